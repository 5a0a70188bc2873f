"""q-FedAvg: Li et al. 2020, Algorithm 2.

The algorithm needs a Lipschitz constant, which is unknown. 1 / eta replaces it, where eta is the
local learning rate. The losses before training are computed in eval mode, on all samples of a
client.
"""

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
    """In each round, subtract sum_i F_i^q d_i / sum_i h_i from the model x.

    F_i is client i's loss before training. d_i = (x - y_i) / eta, with the trained model y_i and
    the learning rate eta. h_i = q F_i^(q-1) |d_i|^2 + F_i^q / eta. Buffers become the mean of the
    clients' buffers, with the weights F_i^q. If the run weighs by samples, F_i^q d_i, h_i and these
    weights are multiplied by n_i.
    """
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
