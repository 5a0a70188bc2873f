"""Coordinate-wise median: each parameter moves by the median of the clients' updates.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates" (ICML 2018), Definition 1 and Algorithm 1, option I. Fewer than half of the
updates, whatever they hold, move a coordinate no further than the others do.

Choices where the paper is silent
- The median of an even number is the mean of the two in the middle.
- Weights decide only who counts: an update of weight 0 does not. They hold for BatchNorm's
  statistics, which are averaged as ever, so that these are not protected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import combine_by_coordinate

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def coordinate_median(updates: Tensor) -> Tensor:
    """Return the median [d] of each column of `updates` [m, d]."""
    ranked, count = updates.sort(dim=0).values, len(updates)
    return torch.lerp(ranked[(count - 1) // 2], ranked[count // 2], 0.5)


class CoordinateMedian(Method):
    """A server rule that uses the median instead of the mean; it has no settings."""

    name = "coordinate_median"
    paper = "Yin et al., ICML 2018"
    weighting = "uniform"

    def setup(self, run: Setup) -> None:
        """Warn of aggregations of two updates, whose median is their mean."""
        if run.max_updates <= 2:
            run.warn(
                "method 'coordinate_median' gives the mean, because an aggregation has at most "
                f"{run.max_updates} updates. Aggregate three or more at once."
            )

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the median of the updates that have a weight."""
        return combine_by_coordinate(coordinate_median, aggregation, server)
