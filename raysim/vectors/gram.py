"""Rules that need only the inner products of updates: one Gram matrix and one weighted sum, no copy of the updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.vectors.blocks import fold_groups, in_blocks, split_into_groups
from raysim.vectors.layout import Layout

Granularity: TypeAlias = Literal[
    "model", "tensor"
]  # of what an inner product is: of whole updates, of each tensor
GRANULARITIES = get_args(Granularity)

_PART = 1024  # columns multiplied at once: longer float32 sums lose digits
_EXACT = 8 * _PART  # fewer columns are multiplied in float64
_BLOCK = 32 * _PART  # columns gathered at once
_SHARES = 8  # of the columns, for threads to take: no more, for each begins with memory of its own
_ROWS = 8  # rows in a tile: nothing above the diagonal tiles is computed; a product this small is not packed


def gram_matrix(rows: Sequence[Tensor]) -> Tensor:
    """Inner products of m vectors [d] of one dtype, on the CPU: symmetric, float64 [m, m].

    Parts of float32 vectors are multiplied in float32 and added in float64: entries are off by
    about 1e-8 |g_i||g_j|, at most 1e-6. Float64 throughout takes twice as long; the last entries,
    fewer than 8192, are multiplied in it.
    """
    arrays = [row.numpy() for row in rows]
    count, whole = len(rows), len(rows[0]) // _EXACT * _EXACT

    def products(columns: slice) -> np.ndarray:
        """Of these columns, at and below the diagonal tiles."""
        found, held = np.zeros((count, count)), np.empty(count * _BLOCK, arrays[0].dtype)
        for start in range(columns.start, columns.stop, _BLOCK):
            block = slice(start, min(start + _BLOCK, columns.stop))
            gathered = held[: count * (block.stop - start)]
            np.concatenate([array[block] for array in arrays], out=gathered)
            parts = gathered.reshape(count, -1, _PART).swapaxes(0, 1)
            for first in range(0, count, _ROWS):
                tile = slice(first, first + _ROWS)
                found[first:, tile] += (parts[:, first:] @ parts[:, tile].swapaxes(1, 2)).sum(
                    axis=0, dtype=np.float64
                )
        return found

    rest = np.stack([array[whole:] for array in arrays]).astype(np.float64)
    total = rest @ rest.T
    share = max(_BLOCK, -(-whole // _PART // _SHARES) * _PART)
    for found in in_blocks(whole, products, share):
        total += found
    return torch.from_numpy(np.tril(total) + np.tril(total, -1).T)


def linear_combination(
    rows: Sequence[Tensor], weights: Sequence[float], group: int, into: Tensor | None = None
) -> Tensor:
    """w_1 g_1 + w_2 g_2 + ... of vectors [d], `into` a place: the bits of the server's own sum, in its groups."""
    return fold_groups(split_into_groups([row.numpy() for row in rows], weights, group), into)


def stretches(layout: Layout, granularity: Granularity) -> list[slice]:
    """The shared parameters as a whole, or each of their tensors."""
    if granularity == "model":
        return [slice(0, layout.trained)]
    return [
        slice(entry.start, entry.stop) for entry in layout.entries if entry.stop <= layout.trained
    ]
