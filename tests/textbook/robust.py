"""Robust aggregation rules, computed in loops over coordinates or pairs of updates.

g_i: the update of client i. n: the number of updates. a_i: a client's weight. Median and trimmed
mean: Yin et al. 2018. Krum: Blanchard et al. 2017. Geometric median: Pillutla et al. 2022. Norm
clipping: Sun et al. 2019.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from math import floor

import torch
from torch import Tensor

from textbook.servers import Cohort, run_server_rule
from textbook.world import Book, World


def _coordinate_wise(world: World, rule: Callable[[list[float]], float]) -> Book:
    """Compute a run whose server combines each coordinate of the updates separately.

    rule: a function that gets the values of one coordinate in all updates. It returns the number
    that the server adds to this coordinate of the model.
    """
    return run_server_rule(
        world,
        lambda at: at.x + torch.tensor([rule(v) for v in at.changes.T.tolist()], dtype=at.x.dtype),
    )


def coordinate_median(world: World) -> Book:
    """Compute a run whose server adds the coordinate-wise median of the updates to the model."""
    return _coordinate_wise(world, statistics.median)


def trimmed_mean(world: World, share: float) -> Book:
    """Compute a run whose server adds the coordinate-wise trimmed mean of the updates.

    In each coordinate, the mean leaves out the k smallest and the k largest values. k is `share`
    times the number of updates, rounded down.
    """

    def rule(values: list[float]) -> float:
        k = floor(share * len(values))
        return statistics.fmean(sorted(values)[k : len(values) - k])

    return _coordinate_wise(world, rule)


def krum(world: World, f: int, selected: int | None = 1) -> Book:
    """Compute a run of Krum, whose server averages the updates with the smallest scores.

    A score is the sum of squared distances to the nearest max(1, n - f - 2) of the n updates.
    f: the number of attackers.
    selected: the number of updates in the mean; None: n - f.
    """

    def rule(at: Cohort) -> Tensor:
        g, n = list(at.changes), len(at.changes)
        score = []
        for i in range(n):
            away = sorted(float((g[i] - g[j]) @ (g[i] - g[j])) for j in range(n) if j != i)
            score.append(sum(away[: max(1, n - f - 2)]))
        m = n - f if selected is None else selected
        best = sorted(range(n), key=lambda i: score[i])[:m]
        return at.x + sum(g[i] for i in best) / len(best)

    return run_server_rule(world, rule)


def geometric_median(world: World, steps: int = 3, nu: float = 1e-5) -> Book:
    """Compute a run whose server adds the geometric median of the updates to the model.

    Weiszfeld's algorithm approximates this median. It starts at the weighted mean of the updates.
    steps: the number of steps of the algorithm.
    nu: the smallest distance by which the algorithm divides.
    """

    def rule(at: Cohort) -> Tensor:
        z = at.mean
        for _ in range(steps):
            b = [
                float(a) / max(nu, float((z - g).norm()))
                for a, g in zip(at.weights, at.changes, strict=True)
            ]
            z = sum(w * g for w, g in zip(b, at.changes, strict=True)) / sum(b)
        return at.x + z

    return run_server_rule(world, rule)


def norm_clipping(world: World, bound: float) -> Book:
    """Compute a run whose server adds the weighted mean of clipped updates to the model.

    An update with a norm above `bound` is scaled to the norm `bound`. The column
    "norm_clipping.clipped" counts such updates in each round.
    """
    counts: list[float] = []

    def rule(at: Cohort) -> Tensor:
        norms = [float(g.norm()) for g in at.changes]
        counts.append(sum(norm > bound for norm in norms))
        clipped = torch.stack(
            [g * min(1.0, bound / norm) for g, norm in zip(at.changes, norms, strict=True)]
        )
        return at.x + at.weights @ clipped / at.weights.sum()

    return replace(run_server_rule(world, rule), columns={"norm_clipping.clipped": counts})
