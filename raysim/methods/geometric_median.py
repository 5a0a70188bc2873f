"""Geometric median (RFA): use the point with the smallest sum of distances to the updates.

The result is robust if arbitrary updates have less than half of the weight.

Source: Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning" (IEEE TSP 2022).
The updates are g_i, with the weights a_i. The point z starts as their weighted mean. With the
settings `steps` and nu, z is then replaced `steps` times by

    z <- sum_i b_i g_i / sum_i b_i,   b_i = a_i / max(nu, |z - g_i|)

Departures from the paper
- BatchNorm's statistics are averaged as in FedAvg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import parameters_of
from raysim.primitives.checks import above, at_least
from raysim.vectors.gram import gram_matrix, linear_combination

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def weiszfeld_weights(products: Tensor, weights: Tensor, steps: int, nu: float) -> Tensor:
    """Return weights [m]; the mean of m updates with these weights is their geometric median.

    products: the Gram matrix of the updates, float64 [m, m].
    weights: [m], as in FedAvg's mean.
    steps: the number of iterations; with 0 the result is `weights`.
    nu: a smaller distance to the median counts as nu.
    """
    b = weights
    for _ in range(steps):
        mean = b / b.sum()
        squares = mean @ products @ mean - 2 * products @ mean + products.diagonal()
        distances = squares.clamp_min(0).sqrt()
        b = weights / distances.clamp_min(nu)
    return b


class GeometricMedian(Method):
    """A server rule that uses the geometric median of the updates.

    steps: the number of iterations of Weiszfeld's algorithm, which starts from the weighted mean; 0
    returns this mean.
    nu: the algorithm divides an update's weight by the update's distance from the current median. A
    distance below nu is replaced by nu.
    """

    name = "geometric_median"
    paper = "Pillutla et al., IEEE TSP 2022"

    def __init__(self, steps: int = 3, nu: float = 1e-5):
        self.steps = at_least("method.geometric_median.steps", steps, 0)
        self.nu = above("method.geometric_median.nu", nu, 0.0, "it keeps the divisors away from 0")

    def setup(self, run: Setup) -> None:
        """Warn if each aggregation has a single update, which is its own median."""
        run.warn_if_single("it is that update")

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the geometric median of the updates, [layout.trained].

        If the setting `steps` is 0, return the weighted mean, bit-identical to FedAvg's.
        """
        rows = parameters_of(aggregation, server)
        weights = torch.tensor(aggregation.weights, dtype=torch.float64)
        divisor = aggregation.divisor
        if self.steps:
            weights = weiszfeld_weights(gram_matrix(rows), weights, self.steps, self.nu)
            divisor = float(weights.sum())
        return linear_combination(rows, weights.tolist()).div_(divisor)
