"""What server rules share: a changed weighted sum that is never formed, and rules for each parameter by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raysim.api.server_view import Aggregation, ServerView
from raysim.vectors.blocks import in_blocks
from raysim.vectors.gram import Granularity, combination, gram, stretches


def parameters_of(aggregation: Aggregation, server: ServerView) -> list[Tensor]:
    """Of each update the part [trained] that belongs to trainable parameters; views."""
    return [delta[: server.layout.trained] for delta in aggregation.deltas]


def counting(aggregation: Aggregation, server: ServerView) -> list[Tensor]:
    """The same of the updates that have a weight. Raises ValueError where none has."""
    rows = [
        row
        for row, weight in zip(parameters_of(aggregation, server), aggregation.weights, strict=True)
        if weight
    ]
    if not rows:
        raise ValueError("all updates have the weight 0")
    return rows


def by_coordinate(
    rule: Callable[[Tensor], Tensor], aggregation: Aggregation, server: ServerView
) -> Tensor:
    """[trained] a rule that makes one number of each column of the updates that count, [m, d] -> [d], in blocks."""
    rows, direction = counting(aggregation, server), torch.empty_like(server.params)

    def fill(part: slice) -> None:
        direction[part] = rule(torch.stack([row[part] for row in rows]))

    in_blocks(len(direction), fill)
    return direction


def recombined(
    aggregation: Aggregation,
    server: ServerView,
    granularity: Granularity,
    change: Callable[[Tensor], Tensor],
) -> Tensor:
    """[trained] the weighted sum of changed updates, over the divisor; they are never formed.

    change: from the Gram matrix of a stretch to the coefficients [m, m], float64, of each changed update (a row) in the
    updates as they came. The identity gives FedAvg's bits.
    """
    rows, raw = (
        parameters_of(aggregation, server),
        torch.tensor(aggregation.weights, dtype=torch.float64),
    )
    direction = torch.empty_like(server.params)
    for part in stretches(server.layout, granularity):
        blocks = [row[part] for row in rows]
        mixed = (raw @ change(gram(blocks))).tolist()
        combination(blocks, mixed, server.group, direction[part])
    return direction.div_(aggregation.divisor)
