"""q-FedAvg: Li et al. 2020, Algorithm 2, with L = 1 / eta; F_i in eval mode over all samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import average, detach, logits, train, trainable, weights
from textbook.servers import flatten, unflatten
from textbook.world import Book, Job, Params, World


def loss_before(world: World, job: Job, x: Params) -> float:
    """Return the cross-entropy of x on all samples of a client."""
    inputs, labels = world.data[job.client]
    with torch.no_grad():
        return max(1e-10, float(F.cross_entropy(logits(x, inputs, training=False), labels)))


def qfedavg(world: World, q: float) -> Book:
    """Run x - sum_i D_i / sum_i h_i, as printed; average buffers by F_i^q."""
    names, x = trainable(world.start), detach(world.start)
    for jobs in world.rounds:
        losses = [loss_before(world, job, x) for job in jobs]
        models = [detach(train(world, job, x)) for job in jobs]
        shares = weights(world, jobs)
        numerator: Tensor = torch.zeros(1, dtype=torch.float64)
        denominator = 0.0
        for job, loss, y, share in zip(jobs, losses, models, shares, strict=True):
            lipschitz = 1 / (world.local.lr * world.local.lr_decay**job.version)
            gradient = lipschitz * (flatten(x, names) - flatten(y, names))
            numerator = numerator + share * loss**q * gradient
            curvature = q * loss ** (q - 1) * float(gradient @ gradient)
            denominator += share * (curvature + lipschitz * loss**q)
        new = flatten(x, names) - numerator / denominator
        raw = [share * loss**q for share, loss in zip(shares, losses, strict=True)]
        x = average(models, raw) | unflatten(new, x, names)
    return Book(x)
