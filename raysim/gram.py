"""Rules that need only the inner products of updates: one Gram matrix and one weighted sum, no copy of the updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from raysim.messages import Update
from raysim.server import Server, weighted_sum
from raysim.vector import Layout

Granularity: TypeAlias = Literal["model", "tensor"]  # of what an inner product is: of whole updates, of each tensor
GRANULARITIES = get_args(Granularity)

_BLOCK = 8192  # columns gathered at once: fifty rows of them fit a cache
_PART = 512  # columns multiplied at once: longer float32 sums lose digits
_ROWS = 32  # rows in a tile; what lies above the diagonal tiles is not computed (15 % of the time for 50 updates)
_SUM = 1 << 18  # numbers summed at once; whole vectors take twice as long


def gram(rows: Sequence[Tensor]) -> Tensor:
    """Inner products of m vectors [d] of one dtype, on the CPU: symmetric, float64 [m, m].

    Whole blocks of float32 vectors are multiplied in float32 and added in float64: entries are off by about 1e-8
    |g_i||g_j|, at most 1e-6. Float64 throughout takes twice as long; what is shorter than a block is done in it.
    """
    count, whole = len(rows), len(rows[0]) // _BLOCK * _BLOCK
    rest = torch.stack([row[whole:] for row in rows]).double()
    total = rest @ rest.T
    block = torch.empty(count, _BLOCK, dtype=rows[0].dtype)
    parts = block.view(count, -1, _PART).transpose(0, 1)
    pairs = [(into, row.numpy()) for into, row in zip(block.numpy(), rows, strict=True)]
    for start in range(0, whole, _BLOCK):
        for into, array in pairs:
            into[:] = array[start : start + _BLOCK]
        for first in range(0, count, _ROWS):
            tile = slice(first, first + _ROWS)
            products = torch.bmm(parts[:, first:], parts[:, tile].mT)
            total[first:, tile] += products.sum(dim=0, dtype=torch.float64)
    return total.tril() + total.tril(-1).T


def folded(rows: Sequence[Tensor], weights: Sequence[float], group: int) -> Tensor:
    """w_1 g_1 + w_2 g_2 + ... of vectors [d]: the bits of the server's own sum, in its order and groups."""
    total = torch.empty_like(rows[0])
    for start in range(0, len(total), _SUM):
        into, own = total[start : start + _SUM], [row[start : start + _SUM].numpy() for row in rows]
        for first in range(0, len(rows), group):
            part = weighted_sum(own[first : first + group], weights[first : first + group])
            into.copy_(part) if first == 0 else into.add_(part)
    return total


def stretches(layout: Layout, granularity: Granularity) -> list[slice]:
    """The shared parameters as a whole, or each of their tensors."""
    if granularity == "model":
        return [slice(0, layout.trained)]
    return [slice(entry.start, entry.stop) for entry in layout.entries if entry.stop <= layout.trained]


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
        direction[part] = folded(own, (raw @ change(gram(own))).tolist(), server.group)
    return direction.div_(divisor)
