"""Coordinate-wise trimmed mean: of each parameter the largest and the smallest changes are left out.

Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML
2018), Definition 2 and Algorithm 1, option II: without the ``share`` (their beta) of the m values at either end, which
are floor(share m), the rest is averaged. It withstands as large a share of arbitrary updates.

As with the median, weights decide only who counts, and BatchNorm's statistics are averaged as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import combine_by_coordinate, weighted_rows
from raysim.primitives.checks import in_range
from raysim.vectors.gram import combination

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def trimmed(count: int, share: float) -> int:
    """How many of ``count`` values are left out at either end."""
    return int(share * count + 1e-9)  # 0.29 x 100 is 28.999999999999996


def trimmed_mean(updates: Tensor, share: float) -> Tensor:
    """Mean of each column without ``share`` of its values at either end: ``updates`` [m, d] -> [d]."""
    cut, count = trimmed(len(updates), share), len(updates)
    ranked = updates.sort(dim=0).values[cut : count - cut]
    total = torch.zeros_like(ranked[0])
    for row in ranked:
        total += row
    return total / len(ranked)


class TrimmedMean(Method):
    """share: of the updates, at either end of each parameter."""

    name = "trimmed_mean"
    paper = "Yin et al., ICML 2018"
    weighting = "uniform"

    def __init__(self, share: float = 0.2):
        self.share = in_range("method.trimmed_mean.share", share, least=0, below=0.5)

    def setup(self, run: Setup) -> None:
        """Warn where the share of an aggregation's updates is less than one update."""
        if self.share and not trimmed(run.size, self.share):
            run.warn(
                "method 'trimmed_mean' leaves out nothing: method.trimmed_mean.share="
                f"{self.share:g} of the {run.size} updates of an aggregation is less than one; "
                "raise it, or aggregate more"
            )

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the trimmed mean; where nothing is left out, the mean with FedAvg's bits."""
        rows = weighted_rows(aggregation, server)
        if not trimmed(len(rows), self.share):
            return combination(rows, [1.0] * len(rows), server.group).div_(len(rows))
        return combine_by_coordinate(
            lambda block: trimmed_mean(block, self.share), aggregation, server
        )
