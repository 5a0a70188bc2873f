"""DANN with a domain for each client: Ganin et al. 2016 in the alternating form of DomainBed, or
with their reversal.

Step k = 1, 2, ... of a participation trains the discriminator if k mod (1 + r) < r; both kinds
count as local steps. With gradient reversal one optimizer steps all: the extractor gets -lam times
the gradient of the domain's loss.
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
    """Features to an output for each client."""
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
    """Minimise CE(omega(z), y) - lam CE(delta(z), i) in phi and omega, CE(delta(z), i) in delta."""
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
