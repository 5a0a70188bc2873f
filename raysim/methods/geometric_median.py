"""RFA: the geometric median of the updates, from which the sum of their distances is least, in place of their mean.

Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning" (IEEE TSP 2022), by the smoothed
Weiszfeld algorithm: z starts as the weighted mean, and each of ``steps`` times

    z <- sum_i b_i g_i / sum_i b_i,   b_i = a_i / max(nu, |z - g_i|)

with a_i the weights (by samples unless the run says otherwise). A corruption of less than half of the weight moves it
by a bounded amount only. z stays in the span of the updates: their Gram matrix and one weighted sum suffice.
BatchNorm's statistics are averaged as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import parameters_of
from raysim.primitives.checks import above, at_least
from raysim.vectors.gram import combination, gram

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def weiszfeld_weights(products: Tensor, weights: Tensor, steps: int, nu: float) -> Tensor:
    """b [m] after ``steps``, of the updates' Gram matrix float64 [m, m] and a [m]; a itself after none."""
    found = weights
    for _ in range(steps):
        mean = found / found.sum()
        squares = mean @ products @ mean - 2 * products @ mean + products.diagonal()
        found = weights / squares.clamp_min(0).sqrt().clamp_min(nu)
    return found


def geometric_median(updates: Tensor, weights: Tensor, steps: int = 3, nu: float = 1e-5) -> Tensor:
    """``updates`` [m, d] of ``weights`` [m] -> [d]."""
    found = weiszfeld_weights(updates @ updates.T, weights, steps, nu)
    return found @ updates / found.sum()


class GeometricMedian(Method):
    """steps: of Weiszfeld's algorithm. nu: distances below it count as if they were as long."""

    name = "geometric_median"
    paper = "Pillutla et al., IEEE TSP 2022"

    def __init__(self, steps: int = 3, nu: float = 1e-5):
        self.steps = at_least("method.geometric_median.steps", steps, 0)
        self.nu = above("method.geometric_median.nu", nu, 0.0, "it keeps the divisors away from 0")

    def setup(self, run: Setup) -> None:
        """Warn of aggregations of one update."""
        run.warn_if_single("it is that update")

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the median; without a step of the algorithm the mean with FedAvg's bits."""
        rows = parameters_of(aggregation, server)
        weights = torch.tensor(aggregation.weights, dtype=torch.float64)
        divisor = aggregation.divisor
        if self.steps:
            weights = weiszfeld_weights(gram(rows), weights, self.steps, self.nu)
            divisor = float(weights.sum())
        return combination(rows, weights.tolist(), server.group).div_(divisor)
