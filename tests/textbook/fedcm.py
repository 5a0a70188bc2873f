"""FedCM: Xu et al. 2021, Algorithm 1.

Momentum is applied to the mixture of the gradient and the server's direction. A client with a stale
model uses the direction of the version that it received.
"""

from __future__ import annotations

import torch

from textbook.plain import (
    apply_mean_change,
    copy_for_training,
    cross_entropy,
    gradients,
    mean,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def fedcm(world: World, alpha: float, warm_start: bool = False) -> Book:
    """Compute a run of FedCM, whose client steps mix the gradient with the server's direction.

    The direction is the weighted mean of the last round's client gradients, which the server
    computes from the updates. After K steps, a client's gradient is (x - y) / (eta K), where x is
    the received model.
    alpha: the weight of the gradient, which includes weight decay. The weight of the direction is
    1 - alpha.
    warm_start: True: clients that received version 0 use alpha = 1, as in FedBR's code.
    """
    names = trainable(world.start)
    xs, directions = (
        [dict(world.start)],
        [{name: torch.zeros_like(world.start[name]) for name in names}],
    )

    def client(job: Job) -> tuple[Params, Params]:
        x, direction = xs[job.version], directions[job.version]
        p, sgd = copy_for_training(x), optimizer(world, job)
        decay, sgd.weight_decay = sgd.weight_decay, 0.0
        fresh = 1.0 if warm_start and job.version == 0 else alpha
        for step, batch in enumerate(job.batches):
            grads = gradients(cross_entropy(p, step, *batch), p, names)
            whole = {name: grads[name] + decay * p[name].detach() for name in names}
            sgd.step(
                p, {name: fresh * whole[name] + (1 - fresh) * direction[name] for name in names}
            )
        return p, {
            name: (x[name] - p[name].detach()) / (sgd.lr * len(job.batches)) for name in names
        }

    for jobs in world.rounds:
        trained, shares = [client(job) for job in jobs], weights(world, jobs)
        directions.append(
            {name: mean([change[name] for _, change in trained], shares) for name in names}
        )
        xs.append(apply_mean_change(xs[-1], jobs, [p for p, _ in trained], xs, shares))
    return Book(
        xs[-1],
        server={"fedcm.direction": torch.cat([directions[-1][name].flatten() for name in names])},
    )
