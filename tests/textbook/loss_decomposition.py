"""Loss decomposition: Zeng et al. 2024, eqs. (1) and (2), in rounds of FedAvg or FedBN.

All sums are over the clients of a round. p_i is client i's share of the samples of these clients.
A_ij is the loss of client i's trained model on client j's training samples. b_j is the loss of the
next shared model on the same samples.

    sum_j p_j b_j = local_loss + distribution_shift + aggregation
    local_loss = sum_i p_i A_ii        distribution_shift = sum_ij p_i p_j (A_ij - A_ii)
    aggregation = sum_ij p_i p_j (b_j - A_ij)

A_ij and b_j are computed with the personal tensors of client j.
"""

from __future__ import annotations

import numpy as np
import torch.nn.functional as F

from raysim.primitives.streams import stream
from textbook.plain import average, detach, logits, train, weights
from textbook.world import Book, Params, World

NAMES = ("global_loss", "local_loss", "distribution_shift", "aggregation")


def loss_decomposition(world: World, most: int = 1000) -> Book:
    """Compute a run of FedAvg or FedBN, and return its loss decomposition as columns.

    The module defines the columns. The run is FedBN if `world.personal` names BatchNorm's tensors.
    most: the largest number of a client's training samples that are used, drawn at random.
    """
    personal = {
        client: {name: world.start[name] for name in world.personal}
        for client in range(world.clients)
    }
    x, parts = dict(world.start), []

    def loss(model: Params, client: int) -> float:
        inputs, labels = world.data[client]
        if len(labels) > most:
            chosen = stream(world.seed, "decompose", client).choice(
                len(labels), most, replace=False
            )
            inputs, labels = inputs[chosen], labels[chosen]
        return float(F.cross_entropy(logits(dict(model) | personal[client], inputs, False), labels))

    for jobs in world.rounds:
        models = [detach(train(world, job, x | personal[job.client])) for job in jobs]
        personal |= {
            job.client: {name: y[name] for name in personal[0]}
            for job, y in zip(jobs, models, strict=True)
        }
        x = average(models, weights(world, jobs))
        p = np.array([job.samples for job in jobs]) / sum(job.samples for job in jobs)
        a = np.array([[loss(model, job.client) for job in jobs] for model in models])
        b = np.array([loss(x, job.client) for job in jobs])
        m = range(len(jobs))
        shift = sum(p[i] * p[j] * (a[i, j] - a[i, i]) for i in m for j in m)
        aggregation = sum(p[i] * sum(p[j] * (b[j] - a[i, j]) for j in m) for i in m)
        parts.append((p @ b, p @ a.diagonal(), shift, aggregation))
    columns = {
        f"decomposition.{name}": column
        for name, column in zip(NAMES, zip(*parts, strict=True), strict=True)
    }
    took_part = {job.client for jobs in world.rounds for job in jobs}
    return Book(x, {i: personal[i] for i in took_part} if personal[0] else {}, columns=columns)
