"""SCAFFOLD: Karimireddy et al. 2020, Algorithm 1, Option II, with the momentum correction K' of its spec.

Models are averaged uniformly (paper) unless the run asks for samples; the changes of c_i always are.
"""

from __future__ import annotations

import torch

from textbook.plain import averaged, copied, cross_entropy, gradients, optimizer, trainable, weights
from textbook.world import Book, Job, Params, World


def scaffold(world: World) -> Book:
    """g - c_i + c at every step; c_i+ = c_i - c + (x - y) / (K' eta); c moves by the changes' sum over all N."""
    x, names = dict(world.start), trainable(world.start)
    c = {name: torch.zeros_like(x[name]) for name in names}
    own = {client: dict(c) for client in range(world.clients)}

    def client(job: Job) -> tuple[Params, Params]:
        p, sgd = copied(x), optimizer(world, job)
        for step, batch in enumerate(job.batches):
            grads = gradients(cross_entropy(p, step, *batch), p, names)
            sgd.step(p, {name: grads[name] - own[job.client][name] + c[name] for name in names})
        rho, steps = world.local.momentum, len(job.batches)
        worth = sum((1 - rho ** (steps - k)) / (1 - rho) for k in range(steps))  # each gradient's part in the movement
        return p, {n: own[job.client][n] - c[n] + (x[n] - p[n].detach()) / (worth * sgd.lr) for n in names}

    for jobs in world.rounds:
        trained = [client(job) for job in jobs]
        x = averaged([y for y, _ in trained], weights(world, jobs))
        for job, (_, new) in zip(jobs, trained, strict=True):
            c = {name: c[name] + (new[name] - own[job.client][name]) / world.clients for name in names}
        own |= {job.client: new for job, (_, new) in zip(jobs, trained, strict=True)}

    def flat(p: Params) -> torch.Tensor:
        return torch.cat([p[name].flatten() for name in names])

    took_part = {job.client for jobs in world.rounds for job in jobs}
    private = {i: {"scaffold.control": flat(own[i])} for i in took_part}
    return Book(x, private, {"scaffold.control": flat(c)})
