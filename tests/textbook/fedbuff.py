"""FedBuff: Nguyen et al. 2022, Algorithm 1.

Symbols: K, the number of updates in an aggregation; s_i, the staleness of update i when it arrives;
w_i, its weight, which falls with s_i. Network buffers are always averaged with the weights w_i /
sum_i w_i. `World` says which jobs are in an aggregation, and which version each job received.
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
    """Return the weights w_i = (1 + s_i)^-exponent, times n_i if the run weighs by samples."""
    raw = weights(world, jobs)
    return [w * (1 + version - job.version) ** -exponent for w, job in zip(raw, jobs, strict=True)]


def direction(at: Cohort, normalization: str) -> Tensor:
    """Return sum_i w_i D_i, divided by K ("count"), by sum_i w_i ("weights") or by 1 ("none")."""
    divisor = {"count": len(at.jobs), "weights": at.weights.sum(), "none": 1}[normalization]
    return at.weights @ at.changes / divisor


def fedbuff(world: World, exponent: float = 0.5, normalization: str = "count") -> Book:
    """Run x <- x + sum_i w_i D_i / K, or with another divisor than K.

    normalization: the divisor, an argument of `direction`.
    """
    rule = lambda at: at.x + direction(at, normalization)  # noqa: E731
    return run_server_rule(world, rule, weigh=partial(staleness_weights, exponent=exponent))


def fedbuff_fedadam(world: World, exponent: float, **settings: float) -> Book:
    """Run FedAdam, one step of Adam per aggregation, with FedBuff's direction as its gradient.

    settings: arguments of `Adaptive`.
    """
    adam = Adaptive(world, "fedadam", **settings)
    rule: Callable[[Cohort], Tensor] = lambda at: adam(at.x, direction(at, "count"))  # noqa: E731
    return replace(
        run_server_rule(world, rule, weigh=partial(staleness_weights, exponent=exponent)),
        server=adam.server,
    )


def fedbuff_fedexp(world: World, exponent: float, **settings: float) -> Book:
    """Run FedExP with the staleness weights as p_i; its step size multiplies FedBuff's direction.

    settings: arguments of `fedexp`.
    """
    weigh = partial(staleness_weights, exponent=exponent)
    return fedexp(
        world, **settings, weigh=weigh, direction=partial(direction, normalization="count")
    )
