"""FedLC: Zhang et al. 2022, the calibrated cross-entropy in its pairwise form.

In the paper, the sum over classes leaves out the true class. By default, this textbook includes the
true class, as public code does. Classes without samples of the client are left out, unless their
counts are raised to `floor`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from textbook.mixup import mixes, mixture
from textbook.plain import Parts, logits, run_with_loss
from textbook.world import Book, Job, Params, World


def calibrated(z: Tensor, y: Tensor, counts: Tensor, tau: float, others: bool) -> Tensor:
    """Return the mean calibrated cross-entropy of a batch, with the margins tau counts^(-1/4).

    z: logits [B, C].
    y: classes [B].
    counts: [C], the client's number of samples of each class. Classes without samples are left out.
    If the client has samples of only one class, the loss is 0.
    others: True leaves the true class out of the sum over classes.
    """
    present = counts.nonzero().flatten()
    if len(present) == 1:
        return 0.0 * z.sum()
    m = tau / counts**0.25  # infinite for an absent class, and not used
    pairs = z - z.gather(1, y.unsqueeze(1)) + m[y].unsqueeze(1) - m
    against = pairs.exp() * (y.unsqueeze(1) != torch.arange(len(m)))
    return (against[:, present].sum(1) + (0.0 if others else 1.0)).log().mean()


def fedlc(
    world: World, tau: float, others: bool = False, floor: float = 0.0, mixed: float | None = None
) -> Book:
    """Compute a run of FedLC: FedAvg with the calibrated cross-entropy as the local loss.

    n_c is the client's number of training samples of class c.
    tau: the scale of the margins tau n_c^(-1/4).
    others: True leaves the true class out of the sum over classes, as in the paper.
    floor: smaller n_c are raised to this number. With 0, classes without samples are left out.
    mixed: the parameter alpha of Mixup; None: no Mixup. A mixed sample has two labels and the
    weighted mean of two losses.
    """
    counts = [torch.bincount(y, minlength=world.classes).double() for _, y in world.data]

    def losses(job: Job, received: Params) -> Parts:
        floored, drawn = (
            counts[job.client].clamp(min=floor),
            mixes(world, job, mixed) if mixed else [],
        )

        def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
            lam, partner = drawn[step] if mixed else (1.0, torch.arange(len(y)))
            z = logits(p, mixture(x, lam, partner))
            one, other = (calibrated(z, label, floored, tau, others) for label in (y, y[partner]))
            return lam * one + (1 - lam) * other, 0.0

        return loss

    book = run_with_loss(world, losses)
    single = [[bool((counts[job.client] > 0).sum() == 1) for job in jobs] for jobs in world.rounds]
    share = [sum(clients) / len(clients) for clients in single]
    return replace(book, columns={**book.columns, "fedlc.one_class": share})
