"""AFL: Mohri et al. 2019, with local steps.

Symbols: lambda_i, the weight of client i, at least 0; all lambda_i sum to 1. The projection onto
such weights finds its threshold by bisection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textbook.plain import average, detach, train, weights
from textbook.qfedavg import loss_before
from textbook.world import Book, World


def nearest_on_simplex(values: Tensor) -> Tensor:
    """Return max(values - t, 0) with the number t for which the sum is 1."""
    low, high = float(values.min()) - 1.0, float(values.max())
    for _ in range(200):
        middle = (low + high) / 2
        if float((values - middle).clamp_min(0).sum()) > 1:
            low = middle
        else:
            high = middle
    return (values - high).clamp_min(0)


def afl(world: World, gamma: float) -> Book:
    """Run FedAvg with weights lambda_i, which grow for clients with large losses.

    After each round, lambda_i of each of its m clients grows by gamma N / m times the loss of x on
    the client's samples before training. Then lambda is projected: `nearest_on_simplex`.
    """
    x, lam = (
        detach(world.start),
        torch.full((world.clients,), 1 / world.clients, dtype=torch.float64),
    )
    for jobs in world.rounds:
        losses = [loss_before(world, job, x) for job in jobs]
        models = [detach(train(world, job, x)) for job in jobs]
        chosen = [float(lam[job.client]) for job in jobs]
        shares = weights(world, jobs)
        if any(chosen):
            shares = [share * own for share, own in zip(shares, chosen, strict=True)]
        x = average(models, shares)
        for job, loss in zip(jobs, losses, strict=True):
            lam[job.client] += gamma * world.clients / len(jobs) * loss
        lam = nearest_on_simplex(lam)
    return Book(x, server={"afl.weights": lam})
