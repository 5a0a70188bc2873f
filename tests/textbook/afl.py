"""AFL: Mohri et al. 2019, with several local steps in a round.

lambda_i: the weight of client i. All lambda_i are at least 0 and add up to 1. `nearest_on_simplex`
finds the t for which all max(lambda_i - t, 0) add up to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textbook.plain import average, detach, train, weights
from textbook.qfedavg import loss_before
from textbook.world import Book, World


def nearest_on_simplex(values: Tensor) -> Tensor:
    """Return max(values - t, 0), where t is the number for which these entries have the sum 1.

    values: [N].
    """
    low, high = float(values.min()) - 1.0, float(values.max())
    for _ in range(200):
        middle = (low + high) / 2
        if float((values - middle).clamp_min(0).sum()) > 1:
            low = middle
        else:
            high = middle
    return (values - high).clamp_min(0)


def afl(world: World, gamma: float) -> Book:
    """Compute a run of FedAvg with weights lambda_i, which grow for clients with large losses.

    In a round of m of the N clients, lambda_i grows by gamma N / m times the client's loss before
    training. Then all lambda_i are projected (`nearest_on_simplex`). If the run weighs by samples,
    n_i multiplies lambda_i. If all lambda_i of a round are 0, they count as 1.
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
