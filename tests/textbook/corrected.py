"""SCAFFOLD and FedCM for a client with several optimizers, one correction for each of them.

The gradient that an optimizer gets is corrected (of an ascent, that of the negated loss), and a
movement is divided by the steps and by the rate of its own group. The steps of a group are counted
here: a client calls `correct` once for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from textbook.plain import RowMean, average, row_mean, trainable, weights
from textbook.world import Book, Job, Params, World

Correct = Callable[
    [Params, Params], Params
]  # from (parameters, gradients of a group) to what its optimizer gets
Client = Callable[[Job, Params, Correct], Params]
Factor = Callable[[str], float]  # of a parameter: its learning rate in units of the run's


def uncorrected(params: Params, grads: Params) -> Params:
    """Every gradient as it is."""
    return grads


def alone(world: World, client: Client, factor: Factor = lambda name: 1.0) -> Book:
    """FedAvg's rounds."""
    x = dict(world.start)
    for jobs in world.rounds:
        x = average([client(job, x, uncorrected) for job in jobs], weights(world, jobs))
    return Book(x)


def by_round(world: World, reported: Iterable[RowMean]) -> list[float]:
    """What every participation reported, in order: the mean of each round over its rows."""
    found = iter(reported)
    return [row_mean([next(found) for _ in jobs]) for jobs in world.rounds]


def _steps(world: World, count: int) -> float:
    """K': the part of each step's gradient in the movement under momentum."""
    rho = world.local.momentum
    return sum((1 - rho ** (count - k)) / (1 - rho) for k in range(count))


def _networks(world: World) -> list[str]:
    """The shared parameters of all networks, in the order of the vector."""
    names = trainable(world.start, "model") + [n for n in world.start if not n.startswith("model.")]
    return [name for name in names if name not in world.personal]


def _flat(p: Params, names: list[str]) -> Tensor:
    return torch.cat([p[name].flatten() for name in names])


def with_scaffold(world: World, client: Client, factor: Factor = lambda name: 1.0) -> Book:
    """Algorithm 1, Option II: g - c_i + c; c_i+ = c_i - c + (x - y) / (K' eta).

    c moves by 1/N of all changes.
    """
    x, names = dict(world.start), _networks(world)
    c = {name: torch.zeros_like(x[name]) for name in names}
    own = {i: dict(c) for i in range(world.clients)}

    def participate(job: Job) -> tuple[Params, Params]:
        c_i, steps, rate = (
            own[job.client],
            Counter[str](),
            world.local.lr * world.local.lr_decay**job.version,
        )

        def shifted(_: Params, grads: Params) -> Params:
            steps.update(grads.keys())
            return {name: grad - c_i[name] + c[name] for name, grad in grads.items()}

        y = client(job, x, shifted)
        worth = {name: _steps(world, steps[name]) * rate * factor(name) for name in steps}
        return y, c_i | {n: c_i[n] - c[n] + (x[n] - y[n].detach()) / worth[n] for n in steps}

    for jobs in world.rounds:
        models, changed = zip(*map(participate, jobs), strict=True)
        x = average(models, [1.0] * len(jobs))
        for job, new in zip(jobs, changed, strict=True):
            c = {n: c[n] + (new[n] - own[job.client][n]) / world.clients for n in names}
        own |= {job.client: new for job, new in zip(jobs, changed, strict=True)}
    private = {
        job.client: {"scaffold.control": _flat(own[job.client], names)}
        for jobs in world.rounds
        for job in jobs
    }
    return Book(x, private, {"scaffold.control": _flat(c, names)})


def with_fedcm(
    world: World, client: Client, alpha: float, factor: Factor = lambda name: 1.0
) -> Book:
    """Algorithm 1: v = alpha (g + wd y) + (1 - alpha) D.

    Then D is the clients' mean of (x - y) / (K eta).
    """
    x, names, decay = dict(world.start), _networks(world), world.local.weight_decay
    direction = {name: torch.zeros_like(x[name]) for name in names}

    def participate(job: Job) -> tuple[Params, Params]:
        steps, rate = Counter[str](), world.local.lr * world.local.lr_decay**job.version

        def mixed(p: Params, grads: Params) -> Params:
            steps.update(grads.keys())
            # The optimizer adds the whole weight decay afterwards, so it is taken off here.
            fresh = {name: grad + decay * p[name].detach() for name, grad in grads.items()}
            v = {name: alpha * g + (1 - alpha) * direction[name] for name, g in fresh.items()}
            return {name: value - decay * p[name].detach() for name, value in v.items()}

        y = client(job, x, mixed)
        return y, {n: (x[n] - y[n].detach()) / max(steps[n], 1) / (rate * factor(n)) for n in names}

    for jobs in world.rounds:
        models, moves = zip(*map(participate, jobs), strict=True)
        x, direction = average(models, [1.0] * len(jobs)), average(moves, [1.0] * len(jobs))
    return Book(x, {}, {"fedcm.direction": _flat(direction, names)})
