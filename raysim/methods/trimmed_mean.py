"""Trimmed mean: average the changes of each parameter without the largest and smallest ones.

With m updates, a parameter has m changes. The k largest and the k smallest changes are left out; k
is m times the setting `share`, rounded down. The result is robust if at most k updates are
malicious.

Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML
2018), Algorithm 1, option II.

Departures from the paper
- Updates of weight 0 are left out; other weights have no effect.
- BatchNorm's statistics are averaged as in FedAvg.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.recombination import combine_by_coordinate, weighted_rows
from raysim.primitives.checks import in_range
from raysim.vectors.gram import linear_combination

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup


def num_trimmed(count: int, share: float) -> int:
    """Return how many values a trimmed mean leaves out at each end.

    This is count * share, rounded down: a share of 0.2 leaves out the largest 20 % and the smallest
    20 %.
    """
    # 0.29 x 100 is 28.999999999999996 in floating point.
    return int(share * count + 1e-9)


def trimmed_mean(updates: Tensor, share: float) -> Tensor:
    """Return the mean of each column of `updates` [m, d], without its extreme values.

    share: 0.2 leaves out the largest 20 % and the smallest 20 % of the m values. Both numbers of
    values are rounded down.
    """
    count = len(updates)
    cut = num_trimmed(count, share)
    ranked = updates.sort(dim=0).values[cut : count - cut]
    total = torch.zeros_like(ranked[0])
    for row in ranked:
        total += row
    return total / len(ranked)


class TrimmedMean(Method):
    """A server rule that leaves out the largest and smallest changes of each parameter.

    share: the share that is left out at each end: 0.2 leaves out the largest 20 % and the smallest
    20 % of the changes.
    """

    name = "trimmed_mean"
    paper = "Yin et al., ICML 2018"
    weighting = "uniform"

    def __init__(self, share: float = 0.2):
        self.share = in_range("method.trimmed_mean.share", share, least=0, below=0.5)

    def setup(self, run: Setup) -> None:
        """Warn if aggregations have so few updates that none is left out."""
        if self.share and not num_trimmed(run.max_updates, self.share):
            run.warn(
                f"method.trimmed_mean.share={self.share:g}: an aggregation has at most "
                f"{run.max_updates} updates, and this share of them is less than one update. So no "
                "update is left out. Increase method.trimmed_mean.share, or aggregate more updates."
            )

    def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Return the trimmed mean of the updates.

        If nothing is left out, it is bit-identical to FedAvg's mean with equal weights.
        """
        rows = weighted_rows(aggregation, server)
        if not num_trimmed(len(rows), self.share):
            return linear_combination(rows, [1.0] * len(rows)).div_(len(rows))
        return combine_by_coordinate(
            lambda block: trimmed_mean(block, self.share), aggregation, server
        )
