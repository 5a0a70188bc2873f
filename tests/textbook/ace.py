"""ACE and ACED: Chang et al. 2025, as its specification reads them.

T grows on skipped steps, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textbook.plain import average, detach, train, trainable
from textbook.servers import flatten, unflatten
from textbook.world import Book, Params, World


def ace(world: World, lr: float, oldest: float = float("inf"), initialise: bool = False) -> Book:
    """Replace the arrivals' entries, then x <- x + eta mean of the entries that are at most
    `oldest` versions old.

    Buffers are the arrivals' mean. Nothing moves without such an entry; `initialise`: nor before
    everybody has one.
    """
    names, versions = trainable(world.start), [dict(world.start)]
    u: dict[int, tuple[int, Tensor]] = {}  # by client, in the order of first arrival: tau_i, u_i
    active, ages = [], []
    for t, jobs in enumerate(world.rounds):
        arrived: list[Params] = []
        for job in jobs:
            base = versions[job.version]
            arrived.append(detach(train(world, job, base)))
            u[job.client] = job.version, flatten(arrived[-1], names) - flatten(base, names)
        counting = [(t - tau, change) for tau, change in u.values() if t - tau <= oldest]
        x, new = versions[-1], average(arrived, [1.0] * len(jobs))
        if counting and not (initialise and len(u) < world.clients):
            step = lr * torch.stack([change for _, change in counting]).mean(0)
            x = new | unflatten(flatten(x, names) + step, x, names)
        versions.append(x | {n: v for n, v in new.items() if not v.is_floating_point()})
        active.append(float(len(counting)))
        ages.append(sum(age for age, _ in counting) / max(1, len(counting)))
    entered = [t - tau <= oldest for tau, _ in u.values()]
    rows = torch.stack([change for _, change in u.values()])
    server = {
        "clients": torch.tensor(list(u)),
        "versions": torch.tensor([tau for tau, _ in u.values()]),
        "counted": torch.tensor(entered),
        "cache": rows,
        "total": rows[entered].sum(0),
    }
    columns = {"ace.active": active, "ace.age": ages}
    return Book(versions[-1], server={f"ace.{n}": v for n, v in server.items()}, columns=columns)
