"""DANN (Ganin et al. 2016) with a domain for each client, in two variants.

Symbols: z, the features; delta, the discriminator, which predicts the client from z. With gradient
reversal, as in the paper, a local step trains all networks. With alternating steps, as in
DomainBed, it trains either delta, or extractor and classifier.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.corrected import Correct, alone, by_round
from textbook.plain import (
    RowMean,
    copy_for_training,
    features,
    gradients,
    head,
    optimizer,
    trainable,
)
from textbook.world import Book, Job, Params, World

DISCRIMINATOR = "dann.discriminator"


def discriminator(p: Params, z: Tensor) -> Tensor:
    """Return the discriminator's logits [B, clients] for features z [B, F]."""
    for layer in (0, 2, 4):
        name = f"{DISCRIMINATOR}.{layer}"
        z = F.linear(z.relu() if layer else z, p[f"{name}.weight"], p[f"{name}.bias"])
    return z


def dann(
    world: World,
    lam: float,
    r: int = 1,
    rate: float = 1.0,
    reversal: bool = False,
    rounds: Callable[..., Book] = alone,
) -> Book:
    """Compute a run of DANN, whose extractor learns to hide the client from a discriminator.

    lam: the weight with which the extractor increases the discriminator's loss.
    r: without `reversal`, step k = 1, 2, ... trains the discriminator if k mod (1 + r) < r, and
    otherwise extractor and classifier.
    rate: the discriminator's learning rate, divided by that of the run; 1 with `reversal`.
    reversal: True trains discriminator, extractor and classifier in each step.
    rounds: the function of `textbook.corrected` that makes the rounds, such as `with_scaffold`.
    """
    reported: list[RowMean] = []  # the classifier's loss of each participation

    def client(job: Job, x: Params, correct: Correct) -> Params:
        p, main, other, losses = (
            copy_for_training(x),
            optimizer(world, job),
            optimizer(world, job, rate),
            RowMean(),
        )
        model, delta = trainable(p), [name for name in p if name.startswith(DISCRIMINATOR)]
        for k, (inputs, labels) in enumerate(job.batches, 1):
            z = features(p, inputs)
            domain = F.cross_entropy(discriminator(p, z), torch.full_like(labels, job.client))
            adversary = gradients(domain, p, delta)
            if not reversal and k % (1 + r) < r:
                other.step(p, correct(p, adversary))
                continue
            task = F.cross_entropy(head(p, z), labels)
            losses.add(task, inputs)
            main.step(
                p,
                correct(
                    p, gradients(task - lam * domain, p, model) | (adversary if reversal else {})
                ),
            )
        reported.append(losses)
        return p

    book = rounds(
        world, client, factor=lambda name: rate if name.startswith(DISCRIMINATOR) else 1.0
    )
    book.columns = {"train_loss": by_round(world, reported)}
    return book
