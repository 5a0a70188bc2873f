"""The Gram matrix and weighted sums of updates, without a copy of the updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.vectors.blocks import in_blocks
from raysim.vectors.layout import Layout
from raysim.vectors.tree_sum import weighted_sum

# "model": inner products of whole updates. "tensor": separate ones for each tensor.
Granularity: TypeAlias = Literal["model", "tensor"]

_PART = 1024  # columns multiplied at once: longer float32 sums lose digits
_EXACT = 8 * _PART  # the last columns, fewer than this number, are multiplied in float64
_BLOCK = 32 * _PART  # columns gathered at once
_SHARES = 8  # the most parts of the columns for threads; each part needs its own memory
# Rows of a tile. Only tiles on and below the diagonal are computed. The BLAS library multiplies
# tiles of this size without first copying them.
_ROWS = 8


def gram_matrix(rows: Sequence[Tensor]) -> Tensor:
    """Return the inner products of m CPU vectors [d] of one dtype, as float64 [m, m].

    For float32 vectors g_i and g_j, the error of the product is about 1e-8 |g_i| |g_j|, at most
    1e-6 |g_i| |g_j|.
    """
    # Computing everything in float64 takes twice as long. Only the last entries, fewer than _EXACT,
    # are multiplied in float64.
    arrays = [row.numpy() for row in rows]
    count, whole = len(rows), len(rows[0]) // _EXACT * _EXACT

    def products(columns: slice) -> np.ndarray:  # entries above the diagonal may be 0
        sums = np.zeros((count, count))
        buffer = np.empty(count * _BLOCK, arrays[0].dtype)
        for start in range(columns.start, columns.stop, _BLOCK):
            block = slice(start, min(start + _BLOCK, columns.stop))
            gathered = buffer[: count * (block.stop - start)]
            np.concatenate([array[block] for array in arrays], out=gathered)
            parts = gathered.reshape(count, -1, _PART).swapaxes(0, 1)
            for first in range(0, count, _ROWS):
                tile = slice(first, first + _ROWS)
                sums[first:, tile] += (parts[:, first:] @ parts[:, tile].swapaxes(1, 2)).sum(
                    axis=0, dtype=np.float64
                )
        return sums

    rest = np.stack([array[whole:] for array in arrays]).astype(np.float64)
    total = rest @ rest.T
    share = max(_BLOCK, -(-whole // _PART // _SHARES) * _PART)
    for sums in in_blocks(whole, products, share):
        total += sums
    return torch.from_numpy(np.tril(total) + np.tril(total, -1).T)


def linear_combination(
    rows: Sequence[Tensor], weights: Sequence[float], into: Tensor | None = None
) -> Tensor:
    """Return w_1 g_1 + w_2 g_2 + ... [d].

    The server's sum of these vectors, with the same weights and in the same order, is
    bit-identical.
    rows, weights: the vectors g_i [d] and the weights w_i.
    into: the tensor for the sum, or None for a new one.
    """
    return weighted_sum([row.numpy() for row in rows], weights, into)


def stretches(layout: Layout, granularity: Granularity) -> list[slice]:
    """Divide the shared parameters into slices of the vector.

    granularity: "model" returns one slice of all shared parameters; "tensor" returns a slice for
    each tensor.
    """
    if granularity == "model":
        return [slice(0, layout.trained)]
    return [
        slice(entry.start, entry.stop) for entry in layout.entries if entry.stop <= layout.trained
    ]
