"""pFedMe: Dinh et al. 2020, Algorithm 1.

Symbols: x, the shared parameters; w, the client's copy of them; theta, its personal parameters. On
each batch, theta makes some gradient steps, then w makes one step towards theta.
"""

from __future__ import annotations

import torch

from textbook.plain import (
    average,
    copy_for_training,
    cross_entropy,
    detach,
    gradients,
    is_buffer,
    optimizer,
    trainable,
    weights,
)
from textbook.world import Book, Job, Params, World


def pfedme(world: World, steps: int, lam: float, rate: float, beta: float) -> Book:
    """Compute a run of pFedMe, in which each client trains personal parameters theta.

    For each batch, theta starts at the client's copy w of the shared parameters, and makes `steps`
    gradient steps with the penalty lam/2 |theta - w|^2. Then w makes a step towards theta. A client
    is scored with its last theta.
    rate: the learning rate of theta.
    beta: the weight of the mean of all w in the next shared parameters. The old shared parameters
    have the weight 1 - beta.
    """
    x, names = dict(world.start), trainable(world.start)
    thetas = dict[int, Params]()

    def client(job: Job) -> Params:
        p, sgd = copy_for_training(x), optimizer(world, job)
        theta: Params = {}
        for step, batch in enumerate(job.batches):
            w = {name: p[name].detach().clone() for name in names}
            theta = dict(w)
            for k in range(steps):
                at = p if k == 0 else copy_for_training(p | theta)  # running statistics move once
                grads = gradients(cross_entropy(at, step, *batch), at, names)
                theta = {n: theta[n] - rate * (grads[n] + lam * (theta[n] - w[n])) for n in names}
            sgd.step(p, {name: lam * (w[name] - theta[name]) for name in names})
        y = detach(p)
        thetas[job.client] = {name: theta.get(name, y[name]) for name in y}
        return y

    for jobs in world.rounds:
        mean = average([client(job) for job in jobs], weights(world, jobs))
        x = {
            name: mean[name] if is_buffer(name) else (1 - beta) * x[name] + beta * mean[name]
            for name in x
        }

    private = {i: {"pfedme.theta": flatten(theta)} for i, theta in thetas.items()}
    scored = {
        i: {
            name: thetas[i][name] if i in thetas else x[name]
            for name in x
            if not is_integer_buffer(name)
        }
        for i in range(world.clients)
    }
    return Book(x, private, own=scored)


def is_integer_buffer(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def flatten(p: Params) -> torch.Tensor:
    """Return all parameters, followed by all floating-point buffers, as one vector."""
    buffers = [name for name in p if is_buffer(name) and not is_integer_buffer(name)]
    return torch.cat([p[name].flatten() for name in (*trainable(p), *buffers)])
