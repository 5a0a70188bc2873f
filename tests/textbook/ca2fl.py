"""CA2FL: Wang et al. 2024, Algorithm 2.

Delta_i: the arriving update of client i. h_i: this client's last update in earlier aggregations, 0
without one. h: the mean of all h_i. v: the calibrated update. eta: the server's learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from textbook.fadas import AmsGrad
from textbook.plain import trainable
from textbook.servers import Cohort, flatten, run_server_rule
from textbook.world import Book, World


class Calibration:
    """The calibrated update of an aggregation: v = h + mean of (Delta_i - h_i).

    Delta_i is an arriving update of client i. h_i is its previous update, or 0 without one.
    h is the mean of the h_i of all clients before the aggregation.

    seen_only: True: h is the mean of the h_i of clients that have sent an update before.
    """

    def __init__(self, world: World, seen_only: bool = False):
        self.zero = torch.zeros_like(flatten(world.start, trainable(world.start)))
        self.clients, self.seen_only = world.clients, seen_only
        self.h: dict[int, Tensor] = {}  # in the order of first arrival
        self.seen: list[float] = []

    def __call__(self, at: Cohort) -> Tensor:
        count = max(1, len(self.h)) if self.seen_only else self.clients
        old = torch.stack([self.h.get(job.client, self.zero) for job in at.jobs])
        v = sum(self.h.values(), self.zero) / count + (at.changes - old).mean(0)
        for job, change in zip(at.jobs, at.changes, strict=True):
            self.h[job.client] = change
        self.seen.append(len(self.h) / self.clients)
        return v

    def book(self, world: World, rule: Callable[[Cohort], Tensor]) -> Book:
        book = run_server_rule(world, rule)
        rows = torch.stack(list(self.h.values()))
        server = {
            "ca2fl.clients": torch.tensor(list(self.h)),
            "ca2fl.cache": rows,
            "ca2fl.total": rows.sum(0),
        }
        return replace(book, server=server, columns={"ca2fl.seen": self.seen})


def ca2fl(world: World, lr: float = 1.0, seen_only: bool = False) -> Book:
    """Compute a run of CA2FL, which adds lr times the update of `Calibration` to the model.

    seen_only: an argument of `Calibration`.
    """
    v = Calibration(world, seen_only)
    return v.book(world, lambda at: at.x + lr * v(at))


def ca2fl_fadas(world: World, eta: float, **settings: object) -> Book:
    """Run FADAS with eta times the calibrated update v in place of the mean update.

    eta: the server's learning rate.
    settings: arguments of `AmsGrad`.
    """
    v, amsgrad = Calibration(world), AmsGrad(world, **settings)
    book = v.book(world, lambda at: amsgrad(at, eta * v(at)))
    return replace(
        book, server={**book.server, **amsgrad.server}, columns={**book.columns, **amsgrad.columns}
    )
