"""Functions for server rules: mix updates by a matrix, or apply a rule to each parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raysim.api.server_view import Aggregation, ServerView
from raysim.vectors.blocks import in_blocks
from raysim.vectors.gram import Granularity, gram_matrix, linear_combination, stretches


def parameters_of(aggregation: Aggregation, server: ServerView) -> list[Tensor]:
    """Return the changes of the trainable parameters in each update, as views [layout.trained].

    The changes of buffers are left out.
    """
    return [delta[: server.layout.trained] for delta in aggregation.deltas]


def weighted_rows(aggregation: Aggregation, server: ServerView) -> list[Tensor]:
    """Return the changes of the trainable parameters in each update whose weight is not 0.

    Each is a view [layout.trained] of an update. Raises ValueError if all weights are 0.
    """
    rows = parameters_of(aggregation, server)
    weighted = [row for row, weight in zip(rows, aggregation.weights, strict=True) if weight]
    if not weighted:
        raise ValueError(
            "method: all updates of an aggregation have the weight 0, so that the server has "
            "nothing to combine. Leave out the method that sets the weights to 0."
        )
    return weighted


def combine_by_coordinate(
    rule: Callable[[Tensor], Tensor], aggregation: Aggregation, server: ServerView
) -> Tensor:
    """Apply a rule to each parameter of the updates; return the result, [layout.trained].

    Updates of weight 0 are left out.
    rule: a function from d parameters of m updates, [m, d], to a number for each parameter, [d].
    """
    rows = weighted_rows(aggregation, server)
    direction = torch.empty_like(server.params)

    def fill(part: slice) -> None:
        direction[part] = rule(torch.stack([row[part] for row in rows]))

    in_blocks(len(direction), fill)
    return direction


def recombine(
    aggregation: Aggregation,
    server: ServerView,
    granularity: Granularity,
    coefficients: Callable[[Tensor], Tensor],
) -> Tensor:
    """Mix the updates g by a matrix C, and return the mean with weights w: [layout.trained].

        sum_i w_i sum_j C_ij g_j / aggregation.divisor

    With the identity matrix, the result is bit-identical to FedAvg's.
    granularity: "model" computes one C for whole updates, "tensor" one for each tensor.
    coefficients: maps the Gram matrix [m, m] of the updates to C, float64 [m, m].
    """
    rows = parameters_of(aggregation, server)
    weights = torch.tensor(aggregation.weights, dtype=torch.float64)
    direction = torch.empty_like(server.params)
    for part in stretches(server.layout, granularity):
        blocks = [row[part] for row in rows]
        mixed = (weights @ coefficients(gram_matrix(blocks))).tolist()
        linear_combination(blocks, mixed, direction[part])
    return direction.div_(aggregation.divisor)
