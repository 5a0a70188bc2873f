"""FADAS: Wang et al. 2024, Algorithm 1, with a learning rate that depends on the delay.

Symbols: Delta, the mean update; m and v, its exponential means of first and second order; eta, the
server's rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from textbook.plain import trainable
from textbook.servers import Cohort, flatten, run_server_rule
from textbook.world import Book, World


class AmsGrad:
    """AMSGrad on the server, with a smaller learning rate if an update is very stale.

    lr: the learning rate, if no update is stale by more than `threshold` versions.
    rule: the learning rate for a larger staleness s. "cap": min(lr, 1 / s), as in the paper.
    "scale": lr / s, as in the released code.
    bias_correction: True divides the moments by 1 - beta1^t and 1 - beta2^t in aggregation t = 1,
    2, ....
    """

    def __init__(
        self,
        world: World,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        threshold: float = float("inf"),
        rule: str = "scale",
        bias_correction: bool = False,
    ):
        self.lr, self.beta1, self.beta2, self.eps = lr, beta1, beta2, eps
        self.threshold, self.rule, self.bias_correction = threshold, rule, bias_correction
        self.m = self.v = self.w = torch.zeros_like(flatten(world.start, trainable(world.start)))
        self.steps = 0
        self.columns: Mapping[str, Sequence[float]] = {"fadas.rate": [], "fadas.moved": []}

    def __call__(self, at: Cohort, delta: Tensor) -> Tensor:
        """Return the server's parameters after an aggregation, [d].

        at: the aggregation, with its jobs and the parameters before it, `at.x` [d].
        delta: the mean update, [d].
        """
        self.steps += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * delta
        self.v = self.beta2 * self.v + (1 - self.beta2) * delta**2
        self.w = torch.maximum(self.w, self.v)
        rate, stalest = self.lr, max(at.version - job.version for job in at.jobs)
        if stalest > self.threshold:
            rate = self.lr / stalest if self.rule == "scale" else min(self.lr, 1 / stalest)
        m, w = self.m, self.w
        if self.bias_correction:
            m, w = m / (1 - self.beta1**self.steps), w / (1 - self.beta2**self.steps)
        step = rate * m / (w.sqrt() + self.eps)
        for name, value in (("rate", rate), ("moved", float(step.norm()))):
            self.columns[f"fadas.{name}"].append(value)
        return at.x + step

    @property
    def server(self) -> dict[str, Tensor]:
        moments = {"first_moment": self.m, "second_moment": self.v, "max_second_moment": self.w}
        return {f"fadas.{n}": t for n, t in moments.items()} | {
            "fadas.steps": torch.tensor([self.steps])
        }


def fadas(world: World, **settings: object) -> Book:
    """Compute a run of FADAS, which applies AMSGrad to the mean update of each aggregation.

    The mean is uniform, or weighted by samples if the run weighs clients by samples.
    settings: all arguments of the class `AmsGrad` except `world`.
    """
    amsgrad = AmsGrad(world, **settings)
    book = run_server_rule(world, lambda at: amsgrad(at, at.mean))
    return replace(book, server=amsgrad.server, columns=amsgrad.columns)
