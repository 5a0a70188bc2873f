"""LoRA (Hu et al. 2022) on the network of `textbook.plain`, and rules for its factors.

The frozen weight and bias of the hidden layer, and the frozen factors, are in `World.drawn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from textbook.plain import (
    EXTRACTOR,
    Loss,
    average,
    detach,
    head,
    run_rounds,
    train,
    weights,
)
from textbook.world import Book, Job, Params, World

LAYER = f"{EXTRACTOR}.1"
A, B = f"{LAYER}.lora_A.default.weight", f"{LAYER}.lora_B.default.weight"
WEIGHT, BIAS = f"{LAYER}.base_layer.weight", f"{LAYER}.base_layer.bias"


def adapted_loss(frozen: Mapping[str, Tensor], scaling: float) -> Loss:
    """Return the cross-entropy of a network whose hidden layer computes W0 x + b + s B (A x)."""

    def loss(p: Params, step: int, x: Tensor, y: Tensor) -> Tensor:
        values = {**frozen, **p}
        inputs = x.flatten(1)
        product = scaling * values[B] @ values[A]
        hidden = F.linear(inputs, values[WEIGHT] + product, values[BIAS])
        return F.cross_entropy(head(values, hidden.relu()), y)

    return loss


def factor_mean(world: World, scaling: float) -> Book:
    """Average what is trained: A and B (FedIT, Zhang et al. 2024), or B alone (FFA-LoRA)."""
    loss = adapted_loss(world.drawn, scaling)
    return run_rounds(world, lambda job, x: train(world, job, x, loss))


def fedsa(world: World, scaling: float) -> Book:
    """Average A and the head; each client keeps the B that it trained last (Guo et al. 2025)."""
    loss = adapted_loss(world.drawn, scaling)
    shared = {name: value for name, value in world.start.items() if name != B}
    own: dict[int, Params] = {}

    def factor(client: int) -> Params:
        return own.get(client, {B: torch.zeros_like(world.start[B])})

    for jobs in world.rounds:
        models = [detach(train(world, job, shared | factor(job.client), loss)) for job in jobs]
        for job, model in zip(jobs, models, strict=True):
            own[job.client] = {B: model.pop(B)}
        shared = average(models, weights(world, jobs))
    clients = range(world.clients)
    return Book(shared, own, own={client: shared | factor(client) for client in clients})


def mean_product(models: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> Tensor:
    """Return sum_i p_i B_i A_i, an [m, n] matrix. shares: the p_i, with the sum 1."""
    products = [share * model[B] @ model[A] for share, model in zip(shares, models, strict=True)]
    return sum(products[1:], products[0])


def jobs_of(jobs: Sequence[Job]) -> list[int]:
    """Return the clients of jobs."""
    return [job.client for job in jobs]
