"""DiLoCo (2023), asynchronous DiLoCo (2024) and Streaming DiLoCo (2025), in PyTorch.

Clients use torch.optim.AdamW, and a client's next job continues with AdamW's state. The server's
gradient is the negated mean update. DiLoCo's server uses torch.optim.SGD with Nesterov's momentum.
Asynchronous DiLoCo uses delayed Nesterov steps. Streaming DiLoCo computes Nesterov's momentum for
each fragment, without torch.optim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from textbook.plain import cross_entropy, is_buffer, mean, trainable, weights
from textbook.servers import flatten, unflatten
from textbook.world import Book, Job, Params, World


class Clients:
    """All clients, each with its own AdamW, which continues in the client's next job."""

    def __init__(self, world: World):
        self.local = world.local
        self.optimizers: dict[int, dict[str, object]] = {}
        self.kept: dict[int, Params] = {}

    def train(self, job: Job, received: Params) -> Params:
        """Return the model that a client has trained from the received one in a job."""
        p = {}
        for name, tensor in received.items():
            needs_gradient = tensor.is_floating_point() and not is_buffer(name)
            p[name] = tensor.detach().clone().requires_grad_(needs_gradient)
        adamw = torch.optim.AdamW(
            [p[name] for name in trainable(p)],
            lr=self.local.lr,
            weight_decay=self.local.weight_decay,
        )
        if job.client in self.optimizers:
            adamw.load_state_dict(self.optimizers[job.client])
        for step, (x, y) in enumerate(job.batches):
            adamw.zero_grad()
            cross_entropy(p, step, x, y).backward()
            adamw.step()
        self.optimizers[job.client] = adamw.state_dict()
        self.kept[job.client] = _moments(adamw, len(trainable(p)))
        return {name: tensor.detach() for name, tensor in p.items()}


def _moments(adamw: torch.optim.AdamW, count: int) -> Params:
    """Return the state of AdamW, with the names that raysim uses in client states.

    count: the number of parameter tensors, which must all have a state.
    """
    states = [adamw.state[parameter] for parameter in adamw.param_groups[0]["params"]]
    assert len(states) == count
    return {
        "local.kept.task/first": torch.cat([state["exp_avg"].flatten() for state in states]),
        "local.kept.task/second": torch.cat([state["exp_avg_sq"].flatten() for state in states]),
        "local.kept.task/steps": states[0]["step"].to(torch.int64).reshape(1),
    }


def run(world: World, rule: Callable[[Tensor, Tensor], Tensor]) -> Book:
    """Compute a run in which clients train with AdamW, and `rule` makes the server's step.

    Return the server's final model, and AdamW's state as client state.
    rule(x, update): the next parameters, from the parameters x and the mean update, as vectors.
    """
    names, models, clients = trainable(world.start), [dict(world.start)], Clients(world)
    for jobs in world.rounds:
        changes = []
        for job in jobs:
            trained = clients.train(job, models[job.version])
            changes.append(flatten(trained, names) - flatten(models[job.version], names))
        update = mean(changes, weights(world, jobs))
        x = rule(flatten(models[-1], names), update)
        models.append(unflatten(x, world.start, names))
    return Book(models[-1], private=clients.kept)


def diloco(world: World, lr: float, momentum: float) -> Book:
    """Compute a run whose server steps with torch.optim.SGD and Nesterov's momentum.

    The gradient of the server's optimizer is the negated mean update.
    lr, momentum: the settings of this optimizer.
    """
    names = trainable(world.start)
    x = flatten(world.start, names).clone().requires_grad_()
    outer = torch.optim.SGD([x], lr=lr, momentum=momentum, nesterov=True)

    def rule(now: Tensor, update: Tensor) -> Tensor:
        assert torch.equal(now, x.detach())
        x.grad = -update
        outer.step()
        return x.detach().clone()

    book = run(world, rule)
    u = outer.state[x]["momentum_buffer"]
    return replace(book, server={"fedavgm.momentum": -u})


def delayed(world: World, lr: float, momentum: float, every: int, c: float) -> Book:
    """Compute a run of asynchronous DiLoCo, whose server makes delayed Nesterov steps.

    Each aggregation makes a step with the mean update divided by `every`, and with a part of the
    momentum.

    lr: the server's learning rate.
    momentum: the decay factor of the momentum.
    every: the momentum changes only in every `every`-th aggregation. Then the mean of the last
    `every` gradients is added to it. A gradient is the negated mean update of an aggregation.
    c: the paper's weight of the momentum in all other aggregations.
    """
    names = trainable(world.start)
    m = torch.zeros_like(flatten(world.start, names))
    gradients: list[Tensor] = []

    def rule(theta: Tensor, update: Tensor) -> Tensor:
        nonlocal m
        gradients.append(-update)
        if len(gradients) % every:
            return theta - lr * (c * momentum * m + gradients[-1] / every)
        m = momentum * m + torch.stack(gradients[-every:]).mean(0)
        return theta - lr * ((1 - c * every + c) * momentum * m + gradients[-1] / every)

    book = run(world, rule)
    left = len(gradients) % every
    total = torch.stack(gradients[-left:]).sum(0) if left else torch.zeros_like(m)
    return replace(
        book,
        server={
            "delayed_nesterov.momentum": -m,
            "delayed_nesterov.sum": -total,
            "delayed_nesterov.steps": torch.tensor([len(gradients)]),
        },
    )


def streaming(world: World, lr: float, momentum: float, fragments: Sequence[Sequence[str]]) -> Book:
    """Run rounds in which a job synchronises one fragment of the parameters.

    lr, momentum: the settings of the server's optimizer.
    fragments: lists of parameter names. A job at version t synchronises fragment t mod the number
    of fragments.
    """
    names, models, clients = trainable(world.start), [dict(world.start)], Clients(world)
    u = {name: torch.zeros_like(world.start[name]) for name in names}
    own: dict[int, Params] = {}
    known: dict[int, Params] = {}
    last: dict[int, int] = {}
    for jobs in world.rounds:
        changes: list[tuple[int, float, Params]] = []
        for job, weight in zip(jobs, weights(world, jobs), strict=True):
            received = models[job.version]
            start = {**received, **own.get(job.client, {})}
            known.setdefault(job.client, {name: received[name] for name in names})
            for version in range(last.get(job.client, job.version), job.version):
                for name in fragments[version % len(fragments)]:
                    start[name] = known[job.client][name] = received[name]
            trained = clients.train(job, start)
            own[job.client] = {name: trained[name] for name in names}
            last[job.client] = job.version
            due = job.version % len(fragments)
            change = {name: trained[name] - known[job.client][name] for name in fragments[due]}
            changes.append((due, float(weight), change))
        x = dict(models[-1])
        for number, fragment in enumerate(fragments):
            mine = [(weight, change) for due, weight, change in changes if due == number]
            total = sum(weight for weight, _ in mine)
            for name in fragment if mine else ():
                d = torch.stack([weight / total * change[name] for weight, change in mine]).sum(0)
                u[name] = momentum * u[name] + d
                x[name] = x[name] + lr * (d + momentum * u[name])
        models.append(x)
    private = {}
    for client, moments in clients.kept.items():
        private[client] = moments | {
            "streaming_diloco.local": flatten(own[client], names),
            "streaming_diloco.received": flatten(known[client], names),
            "streaming_diloco.version": torch.tensor([last[client]]),
        }
    return Book(models[-1], private, {"streaming_diloco.momentum": flatten(u, names)})
