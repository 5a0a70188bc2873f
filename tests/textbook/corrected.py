"""SCAFFOLD and FedCM for clients that use several optimizers.

Each optimizer trains a group of parameters. The client passes each group's gradients to `correct`.
SCAFFOLD and FedCM divide the change of a group's parameters by the group's number of steps and by
the group's learning rate.
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
    """Return the gradients unchanged."""
    return grads


def alone(world: World, client: Client, factor: Factor = lambda name: 1.0) -> Book:
    """Compute a run of FedAvg in which the clients' gradients are not corrected.

    client(job, x, correct): trains the received parameters x and returns the trained ones. Here
    `correct` returns gradients unchanged.
    factor: not used; `with_scaffold` and `with_fedcm` use it.
    """
    x = dict(world.start)
    for jobs in world.rounds:
        x = average([client(job, x, uncorrected) for job in jobs], weights(world, jobs))
    return Book(x)


def by_round(world: World, reported: Iterable[RowMean]) -> list[float]:
    """Return for each round the mean loss over all samples in all batches of its jobs.

    reported: the mean loss of each job, in the order of the rounds and of their jobs.
    """
    found = iter(reported)
    return [row_mean([next(found) for _ in jobs]) for jobs in world.rounds]


def _steps(world: World, count: int) -> float:
    """Return K', by which SCAFFOLD divides the change of the parameters after `count` steps.

    Without momentum, K' is `count`. With momentum rho, K' is the sum over n = 1, ..., `count` of
    1 + rho + ... + rho^(n - 1).
    """
    rho = world.local.momentum
    return sum((1 - rho ** (count - k)) / (1 - rho) for k in range(count))


def _networks(world: World) -> list[str]:
    """Return the names of the shared parameters of all networks, in the order of the vector."""
    names = trainable(world.start, "model") + [n for n in world.start if not n.startswith("model.")]
    return [name for name in names if name not in world.personal]


def _flat(p: Params, names: list[str]) -> Tensor:
    return torch.cat([p[name].flatten() for name in names])


def with_scaffold(world: World, client: Client, factor: Factor = lambda name: 1.0) -> Book:
    """Compute a run of SCAFFOLD (Algorithm 1, Option II) with any function for local training.

    Each parameter has its own learning rate and number of steps. Models have equal weights.
    client(job, x, correct): trains from the received parameters x, and returns the trained
    parameters. In each step, it must use the gradients that correct(parameters, gradients) returns.
    factor(name): the learning rate of a parameter, divided by that of the run.
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
    """Compute a run of FedCM (Algorithm 1) with any function for local training.

    Each parameter has its own learning rate and number of steps. Models have equal weights.
    client, factor: as in `with_scaffold`. The client's optimizer must add weight decay to the
    gradients that `correct` returns.
    alpha: the weight of the gradient. The weight of the server's direction is 1 - alpha.
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
