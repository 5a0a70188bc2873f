"""FedDecorr: Shi et al. 2023, the regulariser |K|_F^2 / d^2 in three forms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import features, head, run_with_loss
from textbook.world import Book, Params, World


def penalty(z: Tensor, variant: str) -> Tensor:
    """Return the penalty of features [n, D]; a constant feature correlates with no other."""
    n, d = z.shape
    if n == 1:
        return torch.zeros(())
    z = z[:, z.var(dim=0) > 0]
    centred = z - z.mean(dim=0)
    if variant == "authors":
        normal = centred / (z.var(dim=0) + 1e-8).sqrt()
        gram = normal.T @ normal
        return (gram - gram.diag().diag()).square().sum() / (n * d * (d - 1))
    if variant == "paper":
        normal = centred / (z.var(dim=0, correction=0) + 1e-8).sqrt()
    else:
        normal = centred / (z.std(dim=0) + 1e-4)
    return (normal.T @ normal / n).square().sum() / d**2


def feddecorr(world: World, beta: float, variant: str) -> Book:
    """Run FedAvg with the loss CE + beta times the penalty on features."""

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = features(p, x)
        return F.cross_entropy(head(p, z), y), beta * penalty(z, variant)

    return run_with_loss(world, lambda job, received: loss)
