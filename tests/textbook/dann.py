"""DANN (Ganin et al. 2016) with a domain for each client, in two variants.

Symbols: z, the features; phi, the extractor; omega, the classifier; delta, the discriminator, which
predicts the client i from z; lam, the weight of its loss.

With gradient reversal, as in the paper, each local step trains phi, omega and delta. The extractor
gets -lam times the gradient of the discriminator's loss. With alternating steps, as in DomainBed, a
local step trains either delta, or phi and omega.
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
    """Compute a run of DANN, which trains an extractor to hide the client from a discriminator.

    The extractor computes the features of a sample. From them, the discriminator predicts the
    sample's client, and the classifier predicts the sample's class. Let CE_client and CE_class be
    the cross-entropies of these predictions. The extractor and the classifier decrease CE_class -
    lam CE_client. The discriminator decreases CE_client.

    lam: the weight of CE_client.
    r: if `reversal` is False, step k = 1, 2, ... of a job trains the discriminator if k mod (1 + r)
    < r. All other steps train the extractor and the classifier.
    rate: the discriminator's learning rate, divided by the learning rate of the run. With gradient
    reversal, leave it at 1.
    reversal: True: each step trains the extractor, the classifier and the discriminator (gradient
    reversal). False: the steps alternate as `r` says.
    rounds: the function that computes the rounds: `alone`, `with_scaffold` or `with_fedcm` of the
    module `textbook.corrected`.
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
