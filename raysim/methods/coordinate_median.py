"""Coordinate-wise median: move each parameter by the median of the clients' updates.

If fewer than half of the updates come from attackers, each median lies in the range of the honest
updates.

Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML
2018), Definition 1 and Algorithm 1, option I.

Departures from the paper
- The median of an even number of values is the mean of the two middle values.
- Updates of weight 0 are left out; otherwise weights have no effect.
- BatchNorm's statistics are averaged, so attackers can change them.
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
        """Warn if no aggregation has more than two updates, because their median is their mean."""
        if run.max_updates <= 2:
            run.warn(
                "method 'coordinate_median' computes the mean in this run, because an "
                f"aggregation has at most {run.max_updates} updates. Change the schedule so that "
                "each aggregation has three or more updates."
            )

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the coordinate-wise median of the updates; an update of weight 0 is left out."""
        return combine_by_coordinate(coordinate_median, aggregation, server)
