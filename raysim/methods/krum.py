"""Krum and Multi-Krum: the update, or the mean of the updates, that lie closest to most others.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent"
(NeurIPS 2017): of n updates of which f may be arbitrary, the score of i is the sum of |g_i - g_j|^2 over the
n - f - 2 updates closest to it; Krum takes the update of least score, Multi-Krum the mean of the ``selected`` ones of
least score. It withstands f where 2 f + 2 < n.

Choices where the paper is silent
- Where n - f - 2 is below 1, the closest one alone is counted. Ties: who was accepted first.
- Weights decide only who counts: an update of weight 0 does not. BatchNorm's statistics are averaged as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import weighted_rows
from raysim.primitives.checks import at_least
from raysim.vectors.gram import combination, gram

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def scores(distances: Tensor, byzantine: int) -> Tensor:
    """[n] of each update the sum of its smallest squared ``distances`` [n, n] to n - byzantine - 2 others."""
    count = len(distances)
    others = distances.clone().fill_diagonal_(torch.inf).sort(dim=1).values
    return others[:, : max(1, count - byzantine - 2)].sum(dim=1)


def chosen(distances: Tensor, byzantine: int, selected: int) -> list[int]:
    """Places of the ``selected`` updates of least score, ascending."""
    if len(distances) <= selected:
        return list(range(len(distances)))
    return sorted(scores(distances, byzantine).argsort(stable=True)[:selected].tolist())


def multi_krum(updates: Tensor, byzantine: int, selected: int = 1) -> Tensor:
    """Mean of the ``selected`` of ``updates`` [n, d] that lie closest to the others -> [d]."""
    return updates[chosen(_distances(updates @ updates.T), byzantine, selected)].mean(dim=0)


def _distances(products: Tensor) -> Tensor:
    """Squared distances [n, n] of vectors, from their Gram matrix."""
    squares = products.diagonal()
    return (squares[:, None] + squares - 2 * products).clamp_min(0)


class Krum(Method):
    """byzantine: f, so many updates of an aggregation may be arbitrary. selected: so many are averaged; None: n - f."""

    name = "krum"
    paper = "Blanchard et al., NeurIPS 2017"
    weighting = "uniform"

    def __init__(self, byzantine: int = 1, selected: int | None = 1):
        self.byzantine = at_least("method.krum.byzantine", byzantine, 0)
        self.selected = (
            selected if selected is None else at_least("method.krum.selected", selected, 1)
        )

    def setup(self, run: Setup) -> None:
        """Warn of aggregations with fewer updates than the paper's guarantee needs."""
        least = 2 * self.byzantine + 3
        if self.byzantine and run.size < least:
            run.warn(
                f"method 'krum' withstands method.krum.byzantine={self.byzantine} from {least} "
                f"updates on, and an aggregation has at most {run.size}: aggregate more, or lower it"
            )

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the mean of the chosen updates; of all of them, with FedAvg's bits."""
        rows = weighted_rows(aggregation, server)
        selected = max(1, len(rows) - self.byzantine) if self.selected is None else self.selected
        kept = [rows[place] for place in chosen(_distances(gram(rows)), self.byzantine, selected)]
        return combination(kept, [1.0] * len(kept), server.group).div_(len(kept))
