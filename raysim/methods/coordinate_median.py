"""Coordinate-wise median: each parameter moves by the median of what the clients' updates say of it.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML
2018), Definition 1 and Algorithm 1, option I. Fewer than half of the updates, whatever they hold, move a coordinate no
further than the others do.

Choices where the paper is silent
- The median of an even number is the mean of the two in the middle.
- Weights decide only who counts: an update of weight 0 does not. They hold for BatchNorm's statistics, which are
  averaged as ever, so that these are not protected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.hooked_method import HookedMethod
from raysim.methods.recombination import by_coordinate

if TYPE_CHECKING:
    from raysim.api.hooked_method import OldSetup as Setup
    from raysim.api.server_view import Aggregation, Server


def coordinate_median(updates: Tensor) -> Tensor:
    """The median of each column: ``updates`` [m, d] -> [d]."""
    ranked, count = updates.sort(dim=0).values, len(updates)
    return torch.lerp(ranked[(count - 1) // 2], ranked[count // 2], 0.5)


class CoordinateMedian(HookedMethod):
    """The median in place of the mean, parameter by parameter."""

    name = "coordinate_median"
    paper = "Yin et al., ICML 2018"
    weighting = "uniform"

    def check(self, setup: Setup) -> Sequence[str]:
        """The median of two is their mean."""
        if setup.size > 2:
            return ()
        return (
            "method 'coordinate_median' is the mean where an aggregation has no more than two updates: aggregate more",
        )

    def combine(self, aggregation: Aggregation, server: Server) -> Tensor:
        """Of the updates that count."""
        return by_coordinate(coordinate_median, aggregation, server)
