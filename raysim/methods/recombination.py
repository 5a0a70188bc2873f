"""What server rules share that only need the inner products of updates: a changed weighted sum, never formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from raysim.api.messages import Update
from raysim.api.server_view import Server
from raysim.vectors.gram import Granularity, combination, gram, stretches


def parameters_of(updates: Sequence[Update], server: Server) -> list[Tensor]:
    """Of each update the part [trained] that belongs to trainable parameters; views."""
    return [torch.from_numpy(update.delta)[: server.layout.trained] for update in updates]


def recombined(
    updates: Sequence[Update],
    weights: Sequence[float],
    divisor: float,
    server: Server,
    granularity: Granularity,
    change: Callable[[Tensor], Tensor],
) -> Tensor:
    """[trained] the weighted sum of changed updates, over the divisor; they are never formed.

    change: from the Gram matrix of a stretch to the coefficients [m, m], float64, of each changed update (a row) in the
    updates as they came. The identity gives FedAvg's bits.
    """
    rows, raw = parameters_of(updates, server), torch.tensor(weights, dtype=torch.float64)
    direction = torch.empty_like(server.params)
    for part in stretches(server.layout, granularity):
        own = [row[part] for row in rows]
        mixed = (raw @ change(gram(own))).tolist()
        combination(own, mixed, server.group, direction[part])
    return direction.div_(divisor)
