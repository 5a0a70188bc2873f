"""FedDecorr: Shi et al. 2023: a penalty on correlations of features, with three formulas.

Each of the d features is normalised over the n samples of a batch. S_ij is the sum over the samples
of feature i times feature j.

    "paper"      sum of all S_ij^2, divided by (n d)^2
    "authors"    (their code) sum of all S_ij^2 with i != j, divided by n d (d - 1)
    "fedbr"      (FedBR's code) like "paper", with 1e-4 added to each standard deviation

The variance has the divisor n in "paper", and else n - 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import features, head, run_with_loss
from textbook.world import Book, Params, World


def penalty(z: Tensor, variant: str) -> Tensor:
    """Return the penalty on the correlations of features.

    z: [n, d], a row for each sample. A feature that is constant has no correlation with others.
    variant: "authors" (their code), "paper", or "fedbr" (FedBR's code).
    """
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
    """Compute a run of FedAvg with FedDecorr's penalty in the local loss.

    beta: the weight of the penalty, which is on correlations between features.
    variant: the formula of the penalty: "authors" (their code), "paper", or "fedbr" (FedBR's code).
    """

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = features(p, x)
        return F.cross_entropy(head(p, z), y), beta * penalty(z, variant)

    return run_with_loss(world, lambda job, received: loss)
