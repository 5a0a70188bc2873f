"""Krum and Multi-Krum: use only updates that are close to most other updates.

Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent"
(NeurIPS 2017). Of n updates, at most f are arbitrary. Each update has a score: the sum of the
squared distances to the n - f - 2 updates closest to it. Krum uses the update with the smallest
score. Multi-Krum uses the mean of the `selected` updates with the smallest scores. Both methods are
robust if 2 f + 2 < n.

Departures from the paper
- If n - f - 2 is below 1, a score is the squared distance to the closest update.
- Of equal scores, the first in the order of aggregation is used.
- Updates of weight 0 are left out. Other weights have no effect.
- BatchNorm's statistics are averaged as in FedAvg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import weighted_rows
from raysim.primitives.checks import at_least
from raysim.vectors.gram import gram_matrix, linear_combination

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def scores(distances: Tensor, byzantine: int) -> Tensor:
    """Return the score of each of n updates, [n]: the sum of its smallest squared distances.

    The sum is over the n - byzantine - 2 closest updates, but at least one.
    distances: [n, n], the squared distances between the updates.
    byzantine: the assumed number of arbitrary updates.
    """
    count = len(distances)
    to_others = distances.clone().fill_diagonal_(torch.inf)
    closest_first = to_others.sort(dim=1).values
    return closest_first[:, : max(1, count - byzantine - 2)].sum(dim=1)


def least_scores(distances: Tensor, byzantine: int, selected: int) -> list[int]:
    """Return the positions of the `selected` updates with the least scores, sorted by position.

    distances, byzantine: the arguments of `scores`.
    """
    if len(distances) <= selected:
        return list(range(len(distances)))
    order = scores(distances, byzantine).argsort(stable=True)
    return sorted(order[:selected].tolist())


def squared_distances(products: Tensor) -> Tensor:
    """Return the squared distances [n, n] between n vectors.

    products: [n, n], the scalar products of all pairs of vectors (the Gram matrix).
    """
    squares = products.diagonal()
    return (squares[:, None] + squares - 2 * products).clamp_min(0)


class Krum(Method):
    """A server rule that averages the updates with the smallest distances to their neighbours.

    byzantine: the assumed number of arbitrary updates in an aggregation.
    selected: the number of updates that are averaged; None means all but `byzantine`.
    """

    name = "krum"
    paper = "Blanchard et al., NeurIPS 2017"
    weighting = "uniform"

    def __init__(self, byzantine: int = 1, selected: int | None = 1):
        self.byzantine = at_least("method.krum.byzantine", byzantine, 0)
        self.selected = selected
        if selected is not None:
            self.selected = at_least("method.krum.selected", selected, 1)

    def setup(self, run: Setup) -> None:
        """Warn about aggregations with fewer updates than the paper's guarantee needs."""
        least = 2 * self.byzantine + 3
        if self.byzantine and run.max_updates < least:
            run.warn(
                f"method.krum.byzantine={self.byzantine}: to withstand this number of arbitrary "
                f"updates, method 'krum' needs at least {least} updates in each aggregation, but "
                f"an aggregation has at most {run.max_updates}. Aggregate more updates, or "
                "decrease method.krum.byzantine."
            )

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the mean of the updates with the smallest scores.

        If all updates are selected, this mean is bit-identical to FedAvg's with equal weights.
        """
        rows = weighted_rows(aggregation, server)
        selected = self.selected
        if selected is None:
            selected = max(1, len(rows) - self.byzantine)
        distances = squared_distances(gram_matrix(rows))
        closest = [rows[index] for index in least_scores(distances, self.byzantine, selected)]
        return linear_combination(closest, [1.0] * len(closest)).div_(len(closest))
