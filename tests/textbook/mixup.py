"""Mixup (Zhang et al. 2018) within each batch of a client, as in Appendix A of FedBR.

A sample x becomes lam x + (1 - lam) x'. For each batch, one number lam is drawn, and one
permutation, which chooses the partners x'.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.plain import Parts, logits, run_with_loss
from textbook.world import Book, Job, Params, World


def mixes(world: World, job: Job, alpha: float) -> list[tuple[float, Tensor]]:
    """Return for each step lam ~ Beta(alpha, alpha) and the partner of each row."""
    generator = stream(world.seed, "draws.mixup", job.client, job.turn)
    lams = generator.beta(alpha, alpha, size=len(job.batches)).tolist()
    return [
        (lam, torch.from_numpy(generator.permutation(len(y))))
        for lam, (_, y) in zip(lams, job.batches, strict=True)
    ]


def mixture(x: Tensor, lam: float, partner: Tensor) -> Tensor:
    """Return lam x + (1 - lam) x_pi, where row b of x_pi is row partner[b] of x."""
    return lam * x + (1 - lam) * x[partner]


def mixup(world: World, alpha: float) -> Book:
    """Compute a run of FedAvg in which inputs and labels of a batch are mixed by Mixup.

    A random permutation of the batch chooses the sample with which each sample is mixed.
    alpha: the mixing weight of a batch is drawn from Beta(alpha, alpha).
    """

    def losses(job: Job, received: Params) -> Parts:
        drawn = mixes(world, job, alpha)

        def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
            targets = mixture(F.one_hot(y, world.classes).double(), *drawn[step])
            return -(targets * logits(p, mixture(x, *drawn[step])).log_softmax(1)).sum() / len(
                y
            ), 0.0

        return loss

    return run_with_loss(world, losses)
