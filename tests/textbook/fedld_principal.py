"""FedLD's server: Zeng et al. 2024, eq. 4-7, on the vectors themselves; and with eq. 3's penalty, FedLD as a whole.

The default scale is the l2 norm over the kept eigenvalues; eq. 6's orientation is done, though it changes nothing. The
weights are n_i / n, and L is the fraction of the updates at hand, rounded down, at least 1.
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
    """Average g_i' = sum_l w_l |g_i| <g_i, v_l> v_l / |<g_i, v_l>|."""
    parts = slices(world) if tensor else [slice(None)]

    def revised(g: Tensor) -> Tensor:
        m = len(g)
        values, vectors = torch.linalg.eigh(g @ g.T / m)
        values, vectors = values.flip(0), vectors.flip(1)  # descending
        kept = [k for k in range(max(1, int(fraction * m + 1e-9))) if values[k] > tol * values[0]]
        w = (
            values[kept]
            / {"l2": values[kept].norm(), "sum": values.sum(), "none": values[kept]}[scale]
        )
        found = torch.zeros_like(g)
        for share, k in zip(w, kept, strict=True):
            v = g.T @ vectors[:, k]
            v = v / v.norm() * torch.sign(v @ g.mean(0))
            for i in range(m):
                if abs(g[i] @ v) > tol * g[i].norm():
                    projected = (g[i] @ v) * v
                    found[i] += share * g[i].norm() * projected / projected.norm()
        return found

    def rule(at: Cohort) -> Tensor:
        g = torch.cat([revised(at.changes[:, part]) for part in parts], dim=1)
        return at.x + at.weights @ g / at.weights.sum()

    return run_server_rule(world, rule, loss)


def fedld(world: World, lam: float, **settings: object) -> Book:
    """Run CE + lam mean_b log(1 + |f_b|^2) on clients, principal gradients on the server."""

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
        f = logits(p, x)
        return torch.nn.functional.cross_entropy(f, y) + lam * torch.log(1 + (f**2).sum(1)).mean()

    return principal(world, **settings, loss=loss)
