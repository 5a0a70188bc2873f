"""Functions that several server rules share.

`recombine` makes a weighted sum of changed updates that are never formed; `combine_by_coordinate`
applies a rule to each parameter separately.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raysim.api.server_view import Aggregation, ServerView
from raysim.vectors.blocks import in_blocks
from raysim.vectors.gram import Granularity, gram_matrix, linear_combination, stretches


def parameters_of(aggregation: Aggregation, server: ServerView) -> list[Tensor]:
    """Return the trainable parameters [trained] of each update, as views."""
    return [delta[: server.layout.trained] for delta in aggregation.deltas]


def weighted_rows(aggregation: Aggregation, server: ServerView) -> list[Tensor]:
    """Return the trainable parameters of the updates that have a weight above 0.

    Raises ValueError if there is none.
    """
    rows = parameters_of(aggregation, server)
    weighted = [row for row, weight in zip(rows, aggregation.weights, strict=True) if weight]
    if not weighted:
        raise ValueError("all updates have the weight 0")
    return weighted


def combine_by_coordinate(
    rule: Callable[[Tensor], Tensor], aggregation: Aggregation, server: ServerView
) -> Tensor:
    """Return the direction [trained] that a rule makes from each column of the weighted updates.

    rule: function from some columns [m, d] of m updates to one number for each column [d]. Columns
    are processed in blocks.
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
    """Return the weighted sum [trained] of changed updates, over the divisor; none is formed.

    coefficients: from the Gram matrix of a stretch to the coefficients float64 [m, m] of each
    changed update (a row) in the original ones. The identity gives FedAvg's bits.
    """
    rows = parameters_of(aggregation, server)
    weights = torch.tensor(aggregation.weights, dtype=torch.float64)
    direction = torch.empty_like(server.params)
    for part in stretches(server.layout, granularity):
        blocks = [row[part] for row in rows]
        mixed = (weights @ coefficients(gram_matrix(blocks))).tolist()
        linear_combination(blocks, mixed, direction[part])
    return direction.div_(aggregation.divisor)
