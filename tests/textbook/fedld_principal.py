"""FedLD: Zeng et al. 2024: the server's rule of eqs. (4)-(7), and its local loss.

The sign of a principal direction is chosen as in eq. (6), towards the mean update; this does not
change the result. As in the paper, clients are weighted by samples, unless the run has uniform
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textbook.plain import Loss, cross_entropy, logits
from textbook.servers import Cohort, run_server_rule, slices
from textbook.world import Book, Params, World


def principal(
    world: World,
    fraction: float = 0.8,
    scale: str = "l2",
    tensor: bool = False,
    tol: float = 1e-8,
    loss: Loss = cross_entropy,
) -> Book:
    """Compute a run of FedAvg with updates that are rebuilt from their principal directions.

    A rebuilt update is a weighted sum of these directions, times the norm of the update. Each
    direction has the sign of its dot product with the update.
    fraction: the number of directions, divided by the number of updates; there is at least one.
    scale: the weight of a direction. "l2": its eigenvalue divided by the norm of all used
    eigenvalues. "sum": its eigenvalue divided by the sum of all eigenvalues. "none": 1.
    tensor: True treats each tensor of the parameters separately.
    tol: eigenvalues of at most tol times the largest one count as 0. Dot products of at most tol
    times the update's norm count as 0.
    """
    parts = slices(world) if tensor else [slice(None)]

    def revised(g: Tensor) -> Tensor:
        m = len(g)
        values, vectors = torch.linalg.eigh(g @ g.T / m)
        values, vectors = values.flip(0), vectors.flip(1)  # descending
        components = [
            k for k in range(max(1, int(fraction * m + 1e-9))) if values[k] > tol * values[0]
        ]
        w = (
            values[components]
            / {"l2": values[components].norm(), "sum": values.sum(), "none": values[components]}[
                scale
            ]
        )
        revised = torch.zeros_like(g)
        for share, k in zip(w, components, strict=True):
            v = g.T @ vectors[:, k]
            v = v / v.norm() * torch.sign(v @ g.mean(0))
            for i in range(m):
                if abs(g[i] @ v) > tol * g[i].norm():
                    projected = (g[i] @ v) * v
                    revised[i] += share * g[i].norm() * projected / projected.norm()
        return revised

    def rule(at: Cohort) -> Tensor:
        g = torch.cat([revised(at.changes[:, part]) for part in parts], dim=1)
        return at.x + at.weights @ g / at.weights.sum()

    return run_server_rule(world, rule, loss)


def fedld(world: World, lam: float, **settings: object) -> Book:
    """Run FedLD: train clients with a penalty on logits, aggregate with the rule `principal`.

    The loss of a batch is CE + lam mean_b log(1 + |f_b|^2), where f_b are the logits of sample b.
    settings: arguments for `principal`.
    """

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
        f = logits(p, x)
        return torch.nn.functional.cross_entropy(f, y) + lam * torch.log(1 + (f**2).sum(1)).mean()

    return principal(world, **settings, loss=loss)
