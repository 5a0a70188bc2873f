"""FedNova: Wang et al. 2020.

Symbols: p_i, the normalised weight of client i; a_i, its effective number of steps, by the paper's
closed form for SGD with momentum or for a proximal term.
"""

from __future__ import annotations

from torch import Tensor

from textbook.plain import Loss, cross_entropy
from textbook.servers import Cohort, run_server_rule
from textbook.world import Book, Params, World


def fednova(world: World, mu: float = 0.0) -> Book:
    """In each round, add (sum_j p_j a_j) sum_i p_i D_i / a_i to the model.

    D_i: the update of client i. p_i: the client's normalised weight. a_i: the client's effective
    number of steps.
    mu: the weight of a proximal term in the local loss; it must be 0 if clients use momentum.
    """
    rho = world.local.momentum
    assert not (mu and rho), "the paper has a closed form for one of them"

    def normaliser(steps: int, rate: float) -> float:
        if mu:
            return sum((1 - rate * mu) ** k for k in range(steps))
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def rule(at: Cohort) -> Tensor:
        rates = [world.local.lr * world.local.lr_decay**job.version for job in at.jobs]
        a = [normaliser(len(job.batches), rate) for job, rate in zip(at.jobs, rates, strict=True)]
        p = (at.weights / at.weights.sum()).tolist()
        mean_steps = sum(share * steps for share, steps in zip(p, a, strict=True))
        normalised = [
            share / steps * row for share, steps, row in zip(p, a, at.changes, strict=True)
        ]
        return at.x + mean_steps * sum(normalised[1:], normalised[0])

    return run_server_rule(world, rule, proximal(mu) if mu else cross_entropy)


def proximal(mu: float) -> Loss:
    """Return the loss CE + mu/2 |w - x|^2, with x the values at a job's first step."""
    start: Params = {}

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
        if step == 0:
            start.update({name: tensor.detach().clone() for name, tensor in p.items()})
        pulls = [(t - start[name]).square().sum() for name, t in p.items() if t.requires_grad]
        return cross_entropy(p, step, x, y) + mu / 2 * sum(pulls[1:], pulls[0])

    return loss
