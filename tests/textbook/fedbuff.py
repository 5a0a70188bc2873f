"""FedBuff: Nguyen et al. 2022, Algorithm 1.

The weight of an update falls with its staleness. The sum of weighted updates is divided by their
number, by the sum of the weights, or by 1. BatchNorm's statistics become the weighted mean of the
clients' statistics.
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
    """Return the weight (1 + s)^-exponent of each update, where s is the staleness.

    If the run weighs clients by samples, the weight is multiplied by the client's number of
    samples.
    version: how many aggregations come before the one that uses the updates.
    """
    raw = weights(world, jobs)
    return [w * (1 + version - job.version) ** -exponent for w, job in zip(raw, jobs, strict=True)]


def direction(at: Cohort, normalization: str) -> Tensor:
    """Return the weighted sum of the updates of an aggregation, divided by a number.

    normalization: the divisor: the number of updates ("count"), the sum of the weights ("weights")
    or 1 ("none").
    """
    divisor = {"count": len(at.jobs), "weights": at.weights.sum(), "none": 1}[normalization]
    return at.weights @ at.changes / divisor


def fedbuff(world: World, exponent: float = 0.5, normalization: str = "count") -> Book:
    """Compute a run of FedBuff, which adds a weighted sum of updates to the model.

    exponent: an update of staleness s has the weight (1 + s)^-exponent, times the client's samples
    if the run weighs by samples.
    normalization: "count" divides the sum by the number of updates, "weights" by the sum of the
    weights. "none" does not divide it.
    """
    rule = lambda at: at.x + direction(at, normalization)  # noqa: E731
    return run_server_rule(world, rule, weigh=partial(staleness_weights, exponent=exponent))


def fedbuff_fedadam(world: World, exponent: float, **settings: float) -> Book:
    """Compute a run in which FedAdam's server step uses FedBuff's weighted sum of updates.

    The sum, divided by the number of updates, replaces the mean update.
    exponent: an argument of `staleness_weights`.
    """
    adam = Adaptive(world, "fedadam", **settings)
    rule: Callable[[Cohort], Tensor] = lambda at: adam(at.x, direction(at, "count"))  # noqa: E731
    return replace(
        run_server_rule(world, rule, weigh=partial(staleness_weights, exponent=exponent)),
        server=adam.server,
    )


def fedbuff_fedexp(world: World, exponent: float, **settings: float) -> Book:
    """Compute a run in which FedExP's step size multiplies FedBuff's weighted sum of updates.

    The sum is divided by the number of updates. The step size is computed with the same weights.
    exponent: an argument of `staleness_weights`.
    """
    weigh = partial(staleness_weights, exponent=exponent)
    return fedexp(
        world, **settings, weigh=weigh, direction=partial(direction, normalization="count")
    )
