"""SCAFFOLD: Karimireddy et al. 2020, Algorithm 1, Option II, with a divisor for momentum.

The change of a client's parameters is divided by K'. Without momentum, K' is the number of steps.
With momentum, it is larger, because a gradient also moves the parameters in later steps.

Models have equal weights, as in the paper, unless the run weighs by samples. Changes of control
variates always have equal weights. A client with a stale model uses the server's control variate of
the same version.
"""

from __future__ import annotations

import torch

from textbook.plain import (
    apply_mean_change,
    copy_for_training,
    cross_entropy,
    gradients,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def scaffold(world: World) -> Book:
    """Compute a run of SCAFFOLD: each local step uses g - c_i + c in place of the gradient g.

    c_i is the control variate of client i. The server's control variate c is the mean of all c_i.
    All control variates start at 0. A job makes K steps with the learning rate eta from the
    received parameters x to the trained parameters y. After the job,

        c_i <- c_i - c + (x - y) / (K' eta)

    Without momentum, K' is K. With momentum rho, K' is the sum over n = 1, ..., K of 1 + rho + ...
    + rho^(n - 1).
    """
    names = trainable(world.start)
    xs, cs = [dict(world.start)], [{name: torch.zeros_like(world.start[name]) for name in names}]
    controls = {
        client: dict(cs[0]) for client in range(world.clients)
    }  # a client goes on from what it itself left last

    def client(job: Job) -> tuple[Params, Params]:
        x, c = xs[job.version], cs[job.version]
        p, sgd = copy_for_training(x), optimizer(world, job)
        for step, batch in enumerate(job.batches):
            grads = gradients(cross_entropy(p, step, *batch), p, names)
            sgd.step(
                p, {name: grads[name] - controls[job.client][name] + c[name] for name in names}
            )
        rho, steps = world.local.momentum, len(job.batches)
        worth = sum(
            (1 - rho ** (steps - k)) / (1 - rho) for k in range(steps)
        )  # each gradient's part in the movement
        return p, {
            n: controls[job.client][n] - c[n] + (x[n] - p[n].detach()) / (worth * sgd.lr)
            for n in names
        }

    for jobs in world.rounds:
        models, c = list[Params](), cs[-1]
        for job in jobs:
            model, new = client(job)
            models.append(model)
            c = {
                name: c[name] + (new[name] - controls[job.client][name]) / world.clients
                for name in names
            }
            controls[job.client] = new
        xs.append(apply_mean_change(xs[-1], jobs, models, xs, weights(world, jobs)))
        cs.append(c)

    def flatten(p: Params) -> torch.Tensor:
        return torch.cat([p[name].flatten() for name in names])

    took_part = {job.client for jobs in world.rounds for job in jobs}
    private = {i: {"scaffold.control": flatten(controls[i])} for i in took_part}
    return Book(xs[-1], private, {"scaffold.control": flatten(cs[-1])})
