"""FedBuff: collect asynchronous updates in a buffer of K, and make one step when it is full.

Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (AISTATS 2022),
Algorithm 1. s_i is the staleness of update i, a the setting `exponent`, and eta_g the server's
learning rate:

    w_i = (1 + s_i)^-a
    x <- x + eta_g sum_i w_i Delta_i / K

Departures from the paper or FLSim's code
- The divisor is K, as in the paper, so a stale buffer makes a shorter step. FLSim's default has no
  divisor (normalization="none").
- FLSim divides all weights by the weight of staleness 1; raysim does not.
- BatchNorm's statistics become the weighted mean, without the server's learning rate.
- Updates that are in the buffer when the run ends are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.methods.fedavg import weight_total, weighted_sum
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

Normalization: TypeAlias = Literal["count", "weights", "none"]


def arrival_weights(
    *, staleness: Tensor, exponent: float = 0.5, sample_weights: Tensor | None = None
) -> Tensor:
    """Return the weight q_i (1 + s_i)^-exponent of each of K updates, float64 [K].

    staleness: int64 [K], the staleness s_i of each update.
    sample_weights: [K], the factors q_i; None means 1.
    """
    weights = (1.0 + staleness.double()).pow(-exponent)
    return weights if sample_weights is None else weights * sample_weights.double()


def buffer_divisor(*, weights: Tensor, normalization: str = "count") -> float:
    """Return the number by which the weighted sum of the updates in a buffer is divided.

    weights: [K], the weight of each update.
    normalization: "count" returns K, "weights" the sum of the weights, and "none" 1.
    Raises ValueError for any other text. With "weights", also raises it unless all weights are
    finite and at least 0, and one is positive.
    """
    if normalization == "count":
        return float(len(weights))
    if normalization == "weights":
        return weight_total(weights)
    one_of("method.fedbuff.normalization", normalization, get_args(Normalization))
    return 1.0


def buffered_aggregate(
    *,
    deltas: Tensor,
    staleness: Tensor,
    exponent: float = 0.5,
    sample_weights: Tensor | None = None,
    normalization: str = "count",
) -> Tensor:
    """Return the direction of the server's step: sum_i w_i Delta_i / c, [D].

    Update i has the weight w_i = q_i (1 + s_i)^-exponent.
    deltas: [K, D], the updates Delta_i.
    staleness: int64 [K], the staleness s_i of each update.
    sample_weights: [K], the factors q_i; None means 1.
    normalization: c is K ("count"), the sum of the w_i ("weights") or 1 ("none").
    """
    weights = arrival_weights(staleness=staleness, exponent=exponent, sample_weights=sample_weights)
    return weighted_sum(deltas, weights) / buffer_divisor(
        weights=weights, normalization=normalization
    )


def buffered_step(
    *,
    params: Tensor,
    deltas: Tensor,
    staleness: Tensor,
    server_lr: float,
    exponent: float = 0.5,
    sample_weights: Tensor | None = None,
    normalization: str = "count",
) -> Tensor:
    """Return params + server_lr d, [D], where d is the direction of `buffered_aggregate`.

    params: [D], the current version.
    deltas: [K, D], the updates in the order of arrival.
    staleness: int64 [K], the staleness of each update.
    exponent, sample_weights, normalization: arguments of `buffered_aggregate`.
    """
    direction = buffered_aggregate(
        deltas=deltas,
        staleness=staleness,
        exponent=exponent,
        sample_weights=sample_weights,
        normalization=normalization,
    )
    return params + server_lr * direction


class FedBuff(Method):
    """A server rule that gives stale updates of a buffer less weight.

    `schedule=buffered` decides when to aggregate.
    exponent: the number a. An update with staleness s has the weight (1 + s)^-a.
    normalization: the divisor of the weighted sum: "count" is the number of updates, "weights" the
    sum of the weights, and "none" 1.
    """

    name = "fedbuff"
    paper = "Nguyen et al., AISTATS 2022"
    weighting = "uniform"

    def __init__(self, exponent: float = 0.5, normalization: Normalization = "count"):
        self.exponent = at_least("method.fedbuff.exponent", exponent, 0.0)
        buffer_divisor(weights=torch.ones(1), normalization=normalization)
        self.normalization = normalization

    def setup(self, run: Setup) -> None:
        """Raise ValueError for weighting=samples; warn of methods that change updates' weights.

        Larger weights would make the server's step longer. With normalization="weights", there is
        no error and no warning.
        """
        if self.normalization == "weights":
            return
        run.require(
            run.weighting != "samples",
            "weighting=samples cannot be used with "
            f"method.fedbuff.normalization={self.normalization}, because a larger number of "
            "samples would make the server's step longer. Set weighting=uniform, or "
            "method.fedbuff.normalization=weights.",
        )
        weighers = run.others_fill("weigh")
        if weighers:
            run.warn(
                f"method '{weighers[0]}' changes the weights of updates, but with "
                f"method.fedbuff.normalization={self.normalization} method 'fedbuff' does not "
                "divide by the sum of weights, so the server's step becomes longer or shorter. "
                "Set method.fedbuff.normalization=weights."
            )

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        """Multiply each weight by (1 + staleness)^-exponent.

        The weighted sum of the updates is divided as `normalization` says: by their number, by the
        sum of the weights, or by 1.
        """
        raw = torch.tensor(aggregation.weights, dtype=torch.float64)
        staleness = torch.tensor(aggregation.staleness)
        weights = arrival_weights(staleness=staleness, exponent=self.exponent, sample_weights=raw)
        return aggregation.with_weights(weights.tolist(), self._divisor)

    def _divisor(self, weights: Sequence[float]) -> float:
        weighed = torch.tensor(list(weights), dtype=torch.float64)
        return buffer_divisor(weights=weighed, normalization=self.normalization)
