"""Norm clipping: shorten updates that are longer than a bound, and average them.

Source: Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?" (2019):

    x + sum_i w_i g_i min(1, bound / |g_i|) / sum_i w_i

with x the server's model, g_i the updates and w_i their weights.

Departures from the paper
- No noise is added.
- BatchNorm's statistics are not in the norm, and are averaged as in FedAvg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import parameters_of
from raysim.primitives.checks import above
from raysim.vectors.gram import linear_combination

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView


def clip_factor(update: Tensor, bound: float) -> float:
    """Return the factor that shortens an update [d] to the norm `bound`; 1 if it is not longer."""
    norm = float(torch.linalg.vector_norm(update, dtype=torch.float64))
    return bound / norm if norm > bound else 1.0


class NormClipping(Method):
    """A server rule that shortens long updates.

    bound: the largest norm of an update.
    """

    name = "norm_clipping"
    paper = "Sun et al., 2019"

    def __init__(self, bound: float = 1.0):
        self.bound = above("method.norm_clipping.bound", bound, 0.0)

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the weighted mean of clipped updates; if none is clipped, FedAvg's mean."""
        rows = parameters_of(aggregation, server)
        factors = [clip_factor(row, self.bound) for row in rows]
        server.report["clipped"] = float(sum(factor < 1 for factor in factors))
        pairs = zip(aggregation.weights, factors, strict=True)
        weights = [weight * factor for weight, factor in pairs]
        return linear_combination(rows, weights).div_(aggregation.divisor)
