"""FedBuff: Nguyen et al. 2022, Algorithm 1; the divisor is K ("count") unless said.

Buffers of networks: the clients' own are averaged, with the staleness weights over their sum
whatever the divisor is. Which jobs are in a buffer, and from which version, is the world's;
staleness is counted at the arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from textbook.fedexp import fedexp
from textbook.fedopt import Adaptive
from textbook.plain import weights
from textbook.servers import Cohort, run_server_rule
from textbook.world import Book, Job, World


def staleness_weights(
    world: World, version: int, jobs: Sequence[Job], exponent: float
) -> list[float]:
    """(1 + s_i)^-a, times the samples where the run weighs by them."""
    raw = weights(world, jobs)
    return [w * (1 + version - job.version) ** -exponent for w, job in zip(raw, jobs, strict=True)]


def direction(at: Cohort, normalization: str) -> Tensor:
    """sum_i w_i D_i over K, over sum_i w_i, or as it is."""
    divisor = {"count": len(at.jobs), "weights": at.weights.sum(), "none": 1}[normalization]
    return at.weights @ at.changes / divisor


def fedbuff(world: World, exponent: float = 0.5, normalization: str = "count") -> Book:
    """x <- x + sum_i w_i D_i / K."""
    rule = lambda at: at.x + direction(at, normalization)  # noqa: E731
    return run_server_rule(world, rule, weigh=partial(staleness_weights, exponent=exponent))


def fedbuff_fedadam(world: World, exponent: float, **settings: float) -> Book:
    """The buffer's direction as FedAdam's gradient: one step of it per flush."""
    adam = Adaptive(world, "fedadam", **settings)
    rule: Callable[[Cohort], Tensor] = lambda at: adam(at.x, direction(at, "count"))  # noqa: E731
    return replace(
        run_server_rule(world, rule, weigh=partial(staleness_weights, exponent=exponent)),
        server=adam.server,
    )


def fedbuff_fedexp(world: World, exponent: float, **settings: float) -> Book:
    """The staleness weights are FedExP's p_i, and the stretched step is the buffer's."""
    weigh = partial(staleness_weights, exponent=exponent)
    return fedexp(
        world, **settings, weigh=weigh, direction=partial(direction, normalization="count")
    )
