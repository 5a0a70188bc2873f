"""FedRep: Collins et al. 2021, Algorithm 1; FedPer: Arivazhagan et al. 2019.

Heads stay on the clients, and extractors are averaged. The extractor is always in train mode. Each
stage of a job has its own optimizer.
"""

from __future__ import annotations

from collections.abc import Callable

from textbook.plain import (
    average,
    copy_for_training,
    cross_entropy,
    detach,
    gradients,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def fedrep(world: World, head: int, body: int) -> Book:
    """Compute a run of FedRep: clients keep their heads, and the server averages extractors.

    The first head / (head + body) of a job's steps train the head, and the later steps the
    extractor.
    """

    def client(job: Job, p: Params) -> Params:
        cut = len(job.batches) * head // (head + body)
        for part, batches in (
            ("model.head", job.batches[:cut]),
            ("model.extractor", job.batches[cut:]),
        ):
            sgd = optimizer(world, job)
            for batch in batches:
                sgd.step(p, gradients(cross_entropy(p, 0, *batch), p, trainable(p, part)))
        return detach(p)

    return _rounds(world, client)


def fedper(world: World) -> Book:
    """Compute a run of FedPer: clients keep their heads, and the server averages extractors.

    Each step of a job trains the head and the extractor together.
    """

    def client(job: Job, p: Params) -> Params:
        sgd = optimizer(world, job)
        for batch in job.batches:
            sgd.step(p, gradients(cross_entropy(p, 0, *batch), p, trainable(p)))
        return detach(p)

    return _rounds(world, client)


def _rounds(world: World, client: Callable[[Job, Params], Params]) -> Book:
    first = {name: tensor for name, tensor in world.start.items() if name.startswith("model.head.")}
    x = {name: tensor for name, tensor in world.start.items() if name not in first}
    heads: dict[int, Params] = {}
    for jobs in world.rounds:
        models = [client(job, copy_for_training(x | heads.get(job.client, first))) for job in jobs]
        heads |= {
            job.client: {name: y[name] for name in first}
            for job, y in zip(jobs, models, strict=True)
        }
        x = average([{name: y[name] for name in x} for y in models], weights(world, jobs))
    return Book(x, heads, own={i: x | heads.get(i, first) for i in range(world.clients)})
