"""ACE and ACED: Chang et al. 2025, with the choices of raysim's specification.

x: the server's model. u_i: the last update of client i that arrived. tau_i: the version from which
u_i started. eta: the server's rate. Each aggregation makes a new version.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textbook.plain import average, detach, train, trainable
from textbook.servers import flatten, unflatten
from textbook.world import Book, Params, World


def ace(world: World, lr: float, oldest: float = float("inf"), initialise: bool = False) -> Book:
    """Compute a run of ACE, which adds lr times the mean of all last updates to the model.

    The mean leaves out updates whose base versions are more than `oldest` versions old.
    If no update is left, parameters and floating buffers do not change. Otherwise, floating buffers
    become the mean over the arriving models. Integer buffers always become the maximum over the
    arriving models.

    initialise: True changes the model only after every client has sent an update.
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
