"""FedAvg: average the clients' models with weights; the base of all other methods.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(AISTATS 2017), Algorithm 1. Client i has the trained model y_i, n_i training samples and the weight
p_i, which the setting `weighting` decides:

    x_bar = sum_i p_i y_i / sum_i p_i        over the participants i
    p_i = n_i ("samples") or 1 ("uniform")

Floating-point buffers are averaged. Integer buffers (BatchNorm's counters) take the maximum over
the participants. FedBR (Guo et al., ICML 2023) averages with `weighting=uniform`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

PAPER = "McMahan et al., AISTATS 2017"


def weighted_sum(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return sum_i w_i v_i [d] of vectors [m, d] and weights [m], added row by row.

    A row of weight 0 is left out, so it has no influence even if it is not finite.
    """
    total = torch.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights.tolist(), strict=True):
        if weight != 0.0:
            total.add_(vector, alpha=weight)
    return total


def weighted_average(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean [d] of the rows of `vectors`, with the dtype of `vectors`.

    vectors: [m, d].
    weights: [m]; the sum may differ from 1.
    Raises ValueError unless all weights are finite and at least 0, and one is positive.
    """
    return weighted_sum(vectors, weights) / weight_total(weights)


def weight_total(weights: Tensor) -> float:
    """Return the sum of the weights [m].

    Raises ValueError unless all weights are finite, none is negative and at least one is positive.
    """
    values = weights.tolist()
    total = math.fsum(values)
    if not (math.isfinite(total) and min(values, default=0.0) >= 0.0 and total > 0.0):
        raise ValueError(
            f"the weights of the clients, {values}, must be finite and at least 0, and one of "
            "them must be positive. Change the method that sets these weights; with "
            "weighting=samples, at least one client needs training samples."
        )
    return total
