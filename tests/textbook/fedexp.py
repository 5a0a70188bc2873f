"""FedExP: Jhunjhunwala et al. 2023, Algorithm 1.

After each round, a model is scored on the central test set. Its parameters are the mean of the
parameters after the last two rounds; after the first round, they are those of this round. Its
buffers are those of the last round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from textbook.plain import logits, trainable, weights
from textbook.servers import Cohort, Weigh, flatten, run_server_rule, unflatten
from textbook.world import Book, Params, World


def fedexp(
    world: World,
    epsilon: float,
    count: bool = False,
    decay: float = 1.0,
    minimum: float = 1.0,
    weigh: Weigh = lambda world, version, jobs: weights(world, jobs),
    direction: Callable[[Cohort], Tensor] = lambda at: at.mean,
) -> Book:
    """Compute a run of FedExP, whose server adds eta times the mean update D to the model.

        eta = max(minimum, sum_i p_i |D_i|^2 / (2 (|D|^2 + epsilon decay^t)))

    p_i is the normalised weight of client i, D_i its update, and t the version.
    count: True multiplies epsilon by the number of clients in the round, as in the authors' code.
    minimum: the smallest eta; it is 1 in the paper.
    weigh(world, version, jobs): the weights of the jobs before normalisation.
    direction(cohort): the vector that eta multiplies; by default D.
    """
    names = trainable(world.start)
    etas: list[float] = []
    iterates: list[Tensor] = []
    losses: list[float] = []
    hits: list[float] = []

    def rule(at: Cohort) -> Tensor:
        eps = epsilon * decay**at.version * (len(at.jobs) if count else 1)
        p = at.weights / at.weights.sum()
        ratio = (p * at.changes.square().sum(1)).sum() / (2 * (at.mean.square().sum() + eps))
        etas.append(max(minimum, float(ratio)))
        return at.x + etas[-1] * direction(at)

    def evaluate(x: Params) -> None:
        iterates.append(flatten(x, names))
        middle = sum(iterates[-2:]) / len(iterates[-2:])
        out = logits(x | unflatten(middle, x, names), world.central[0], training=False)
        losses.append(float(F.cross_entropy(out, world.central[1])))
        hits.append(float((out.argmax(1) == world.central[1]).double().mean()))

    book = run_server_rule(world, rule, weigh=weigh, after=evaluate)
    columns = {"fedexp.step_size": etas, "loss_global": losses, "accuracy_global": hits}
    return replace(book, server={"fedexp.previous": iterates[-2]}, columns=columns)
