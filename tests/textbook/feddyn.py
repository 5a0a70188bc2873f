"""FedDyn: Acar et al. 2021, Algorithm 1, with the paper's local loss and a uniform mean.

Symbols: F_k, the task loss of client k; g_k, its accumulated gradient, which stays on the client;
h, the server's drift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textbook.plain import average, cross_entropy, detach, train, trainable
from textbook.world import Book, Job, Params, World


def feddyn(world: World, alpha: float) -> Book:
    """Compute a run of FedDyn: FedAvg with a corrected local loss and a drift on the server.

    Client k starts from the received parameters x, and trains parameters y_k with the loss

        task loss - <g_k, y_k> + alpha/2 |y_k - x|^2

    A job subtracts alpha (y_k - x) from g_k. A round subtracts alpha / N times the sum of all y_k -
    x from the drift h. The next x is the mean of all y_k, minus h / alpha. All g_k and h start at
    0.
    """
    x, names = dict(world.start), trainable(world.start)
    g = {
        client: {name: torch.zeros_like(x[name]) for name in names}
        for client in range(world.clients)
    }
    h = {name: torch.zeros_like(x[name]) for name in names}

    def client(job: Job, received: Params) -> Params:
        correction = g[job.client]

        def loss(p: Params, step: int, inputs: Tensor, labels: Tensor) -> Tensor:
            linear = sum((correction[name] * p[name]).sum() for name in names)
            square = sum((p[name] - received[name]).square().sum() for name in names)
            return cross_entropy(p, step, inputs, labels) - linear + alpha / 2 * square

        y = detach(train(world, job, received, loss))
        g[job.client] = {
            name: correction[name] - alpha * (y[name] - received[name]) for name in names
        }
        return y

    for jobs in world.rounds:
        models = [client(job, x) for job in jobs]
        h = {n: h[n] - alpha / world.clients * sum(y[n] - x[n] for y in models) for n in names}
        x = average(models, [1.0] * len(jobs))
        x |= {name: x[name] - h[name] / alpha for name in names}

    def flatten(p: Params) -> Tensor:
        return torch.cat([p[name].flatten() for name in names])

    took_part = {job.client for jobs in world.rounds for job in jobs}
    return Book(
        x, {i: {"feddyn.gradient": flatten(g[i])} for i in took_part}, {"feddyn.drift": flatten(h)}
    )
