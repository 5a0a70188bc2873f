"""FedBN: Li et al. 2021, Algorithm 1. A setting says which BatchNorm tensors stay on clients."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from textbook.plain import average, cross_entropy, detach, train, trainable, weights
from textbook.world import Book, Params, World

NORM = "model.extractor.2"
STATISTICS, AFFINE = ("running_mean", "running_var", "num_batches_tracked"), ("weight", "bias")
SCOPES = {"all": AFFINE + STATISTICS, "statistics": STATISTICS, "affine": AFFINE, "none": ()}


def fedbn(world: World, scope: str = "all", mu: float = 0.0, reestimate: bool = False) -> Book:
    """Run FedAvg in which tensors of the BatchNorm layer stay on the clients.

    scope: which tensors stay, a key of `SCOPES`.
    mu: the weight of FedProx's term, for shared parameters only.
    reestimate: True: a client that never trained is scored with BatchNorm statistics that are
    computed from its own training samples.
    """
    stays = [f"{NORM}.{name}" for name in SCOPES[scope] if f"{NORM}.{name}" in world.start]
    shared = {name: tensor for name, tensor in world.start.items() if name not in stays}
    own = {client: {name: world.start[name] for name in stays} for client in range(world.clients)}

    def loss(anchor: Params, p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
        distance = sum((p[name] - anchor[name]).square().sum() for name in trainable(anchor))
        return cross_entropy(p, step, x, y) + mu / 2 * distance

    for jobs in world.rounds:
        models = [
            detach(train(world, job, shared | own[job.client], partial(loss, shared)))
            for job in jobs
        ]
        own |= {
            job.client: {name: y[name] for name in stays}
            for job, y in zip(jobs, models, strict=True)
        }
        shared = average([{name: y[name] for name in shared} for y in models], weights(world, jobs))

    took_part = {job.client for jobs in world.rounds for job in jobs}
    if reestimate:  # the statistics of all its samples at once, under the shared model
        for client in set(range(world.clients)) - took_part:
            own[client] |= statistics(
                shared | own[client], world.data[client][0], list(own[client])
            )
    private = {client: own[client] for client in took_part} if stays else {}
    return Book(shared, private, own={client: shared | own[client] for client in own})


def statistics(model: Params, x: Tensor, stays: list[str]) -> Params:
    """Return BatchNorm statistics that are computed from all samples of a client at once.

    The variance is unbiased, and the number of batches is 1.
    model: all tensors of the model, which has one BatchNorm layer.
    x: the inputs of the client's samples.
    stays: the full names of the tensors to return.
    """
    seen = x.flatten(1) @ model["model.extractor.1.weight"].T + model["model.extractor.1.bias"]
    found = {
        "running_mean": seen.mean(0),
        "running_var": seen.var(0),
        "num_batches_tracked": torch.tensor(1),
    }
    return {f"{NORM}.{name}": value for name, value in found.items() if f"{NORM}.{name}" in stays}
