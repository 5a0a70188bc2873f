"""Ditto: Li et al. 2021, Algorithm 1: FedAvg, and a personal model v for each client.

A job trains v on as many batches as the shared model. The random stream "ditto.batches" shuffles
the samples for v. It shuffles all of them again when fewer than two remain.
"""

from __future__ import annotations

import torch.nn.functional as F

from raysim.primitives.streams import stream
from textbook.plain import (
    average,
    copy_for_training,
    detach,
    gradients,
    logits,
    optimizer,
    train,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def ditto(world: World, lam: float, factor: float = 1.0) -> Book:
    """Compute a run of Ditto: FedAvg, and a personal model v that each client trains as well.

    The loss of v is the client's loss plus lam / 2 times the squared distance from the received
    model. v starts at the initial shared model, and does not influence the shared model.
    factor: the learning rate of v divided by that of the shared model.
    """
    x = {name: tensor for name, tensor in world.start.items() if not name.startswith("ditto.")}
    v = {client: dict(x) for client in range(world.clients)}

    def personal(job: Job) -> Params:
        p, sgd = copy_for_training(v[job.client]), optimizer(world, job, factor)
        order, (inputs, labels) = (
            stream(world.seed, "ditto.batches", job.client, job.turn),
            world.data[job.client],
        )
        left: list[int] = []
        for _ in job.batches:
            if len(left) < 2:
                left = order.permutation(len(labels)).tolist()
            chosen, left = left[: world.local.batch], left[world.local.batch :]
            grads = gradients(
                F.cross_entropy(logits(p, inputs[chosen]), labels[chosen]), p, trainable(p)
            )
            sgd.step(
                p, {name: grad + lam * (p[name].detach() - x[name]) for name, grad in grads.items()}
            )
        return detach(p)

    for jobs in world.rounds:
        models = [train(world, job, x) for job in jobs]
        v |= {job.client: personal(job) for job in jobs}
        x = average(models, weights(world, jobs))
    took_part = {job.client for jobs in world.rounds for job in jobs}
    private = {i: {f"ditto.{name}": tensor for name, tensor in v[i].items()} for i in took_part}
    return Book(x, private, own=v)
