"""What server rules share that only need the inner products of updates: a changed weighted sum, never formed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raysim.api.server_view import Aggregation, Server
from raysim.vectors.gram import Granularity, combination, gram, stretches


def parameters_of(aggregation: Aggregation, server: Server) -> list[Tensor]:
    """Of each update the part [trained] that belongs to trainable parameters; views."""
    return [delta[: server.layout.trained] for delta in aggregation.deltas]


def recombined(
    aggregation: Aggregation, server: Server, granularity: Granularity, change: Callable[[Tensor], Tensor]
) -> Tensor:
    """[trained] the weighted sum of changed updates, over the divisor; they are never formed.

    change: from the Gram matrix of a stretch to the coefficients [m, m], float64, of each changed update (a row) in the
    updates as they came. The identity gives FedAvg's bits.
    """
    rows, raw = parameters_of(aggregation, server), torch.tensor(aggregation.weights, dtype=torch.float64)
    direction = torch.empty_like(server.params)
    for part in stretches(server.layout, granularity):
        blocks = [row[part] for row in rows]
        mixed = (raw @ change(gram(blocks))).tolist()
        combination(blocks, mixed, server.group, direction[part])
    return direction.div_(aggregation.divisor)
