"""FedAvg with every setting of local training. Updates may be stale.

The textbook draws its own batches, and asserts that raysim has used the same ones. Parameters
change by the weighted mean of the clients' changes. BatchNorm's statistics become the weighted mean
of the clients' statistics. The weights do not depend on staleness.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from raysim.primitives.streams import stream
from textbook.local import Optimizer
from textbook.plain import (
    RowMean,
    average,
    copy_for_training,
    detach,
    gradients,
    is_buffer,
    logits,
    row_mean,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def core(world: World) -> Book:
    """Compute a run of FedAvg, and return its results.

    Each aggregation adds the weighted mean of the updates to the model.
    """
    versions, losses = [dict(world.start)], list[float]()
    for jobs in world.rounds:
        trained = [client(world, job, versions[job.version]) for job in jobs]
        y, x, w = [model for model, _ in trained], versions[-1], weights(world, jobs)
        moved = [
            {n: x[n] + p[n] - versions[j.version][n] for n in trainable(x)}
            for j, p in zip(jobs, y, strict=True)
        ]
        versions.append({**average(y, w), **average(moved, w)})
        losses.append(row_mean(loss for _, loss in trained))
    samples = [sum(len(y) for job in jobs for _, y in job.batches) for jobs in world.rounds]
    columns = {
        "train_loss": losses,
        "samples": samples,
        "clients": [len(jobs) for jobs in world.rounds],
    }
    return Book(versions[-1], columns=columns)


def client(world: World, job: Job, received: Params) -> tuple[Params, RowMean]:
    """Return the model that a client has trained from the received one, and its mean loss."""
    p, own, losses = copy_for_training(received), world.local, RowMean()
    optimizer, rate = Optimizer(own), own.lr * own.lr_decay**job.version
    inputs, labels = world.data[job.client]
    has_batchnorm = any(is_buffer(name) for name in p)
    drawn = batches(world.seed, own, job, has_batchnorm)
    for (x, y), rows in zip(job.batches, drawn, strict=True):
        assert torch.equal(x, inputs[rows]) and torch.equal(y, labels[rows])
        loss = torch.nn.functional.cross_entropy(logits(p, x), y)
        grads = gradients(loss, p, trainable(p))
        norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
        if own.clip and norm > own.clip:
            grads = {
                name: grad * own.clip / (norm + 1e-6) for name, grad in grads.items()
            }  # as PyTorch
        optimizer.step(p, grads, rate)
        losses.add(loss, x)
    return detach(p), losses


def batches(seed: int, own: Any, job: Job, has_batchnorm: bool) -> Iterator[Any]:
    """Yield the positions of each batch's samples among the client's samples, for one job.

    own: the settings local.*.
    has_batchnorm: True leaves out a batch of one sample, unless it is the first batch of a pass or
    sampled with replacement.
    """
    generator, n = stream(seed, "batches", job.client, job.turn), job.samples
    passes = 0
    left = own.steps if own.epochs is None else -1
    while left and (own.epochs is None or passes < own.epochs):
        passes += 1
        if own.sampling == "replacement":  # an epoch is as many batches as a pass would have
            count = -(-n // own.batch) if left < 0 else left
            cut = [generator.integers(n, size=min(own.batch, n)) for _ in range(count)]
        else:
            order = generator.permutation(n)
            ends = [*range(0, n, own.batch), n]
            cut = [
                order[a:b] for a, b in pairwise(ends) if not (has_batchnorm and b - a == 1 and a)
            ]
        cut = cut[:left] if left > 0 else cut
        left -= len(cut) if left > 0 else 0
        yield from cut
