"""FedSpeed: Sun et al. 2023, Algorithm 1, without the normalisation of g1 in theta + rho g1.

theta: the parameters during a job. theta_K: the parameters after the job's last step. c_k: the
correction that client k keeps. g1, g2: the gradients at theta and at theta + rho g1.
"""

from __future__ import annotations

import torch

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


def fedspeed(world: World, lam: float, rho: float, share: float) -> Book:
    """Compute a run of FedSpeed, whose local steps use two gradients and a correction.

    A step at theta uses (1 - share) g1 + share g2 - c + (theta - x) / lam. g1 and g2 are the
    gradients at theta and at theta + rho g1. x are the received parameters, and c is the client's
    correction. After a job, c becomes c - (theta - x) / lam. Then the client sends theta - lam c.
    """
    x, names = dict(world.start), trainable(world.start)
    c = {
        client: {name: torch.zeros_like(x[name]) for name in names}
        for client in range(world.clients)
    }

    def client(job: Job) -> Params:
        p, sgd, correction = copy_for_training(x), optimizer(world, job), c[job.client]
        for step, batch in enumerate(job.batches):
            first = gradients(cross_entropy(p, step, *batch), p, names)
            moved = copy_for_training(
                p | {name: p[name].detach() + rho * first[name] for name in names}
            )
            second = gradients(cross_entropy(moved, step, *batch), moved, names)
            mixed = {name: (1 - share) * first[name] + share * second[name] for name in names}
            pulled = {name: (p[name].detach() - x[name]) / lam for name in names}
            sgd.step(p, {name: mixed[name] - correction[name] + pulled[name] for name in names})
        y = detach(p)
        c[job.client] = {name: correction[name] - (y[name] - x[name]) / lam for name in names}
        return y | {name: y[name] - lam * c[job.client][name] for name in names}

    for jobs in world.rounds:
        x = average([client(job) for job in jobs], weights(world, jobs))
    took_part = {job.client for jobs in world.rounds for job in jobs}
    flat = {i: torch.cat([c[i][name].flatten() for name in names]) for i in took_part}
    return Book(x, {i: {"fedspeed.correction": flat[i]} for i in took_part})
