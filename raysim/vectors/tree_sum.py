"""Sum vectors in a fixed binary tree over their positions.

Leaf i of the tree is vector i times its weight, rounded. A part of the tree has a level and an
index. Its leaves are those from index * 2**level up to, but without, (index + 1) * 2**level. The
sum of a part is the sum of its two halves, rounded. Missing leaves are left out. The bits do not
depend on which process adds up which part. In shapes, d is the length of a vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from raysim.vectors.blocks import in_blocks


class TreeLeaf(NamedTuple):
    """A vector [d] and its weight in the sum."""

    array: np.ndarray
    weight: float


# Sums [d] of parts of the tree, by the positions of the part; None for a part without leaves.
RangeSums: TypeAlias = Mapping[range, np.ndarray | None]
_NO_SUMS: RangeSums = MappingProxyType({})


def num_levels(count: int) -> int:
    """Return the number of levels above the leaves of a binary tree: the level of its root.

    count: the number of leaves.
    """
    return max(0, count - 1).bit_length()


def covered_ranges(positions: Iterable[int], count: int) -> list[range]:
    """Return the fewest subtrees that together have exactly the given leaves.

    A subtree is returned as the range of its leaves' positions; the ranges ascend.

    positions: the positions of the given leaves, in any order.
    count: the number of all leaves.
    """
    ranges: list[range] = []
    start = stop = -1  # consecutive positions, from start to stop - 1
    for position in sorted(set(positions)):
        if position != stop:
            ranges += _parts_of(start, stop, count)
            start = position
        stop = position + 1
    ranges += _parts_of(start, stop, count)
    return ranges


def _parts_of(start: int, stop: int, count: int) -> list[range]:
    """Return the fewest parts of a tree that together have the leaves [start, stop).

    Each part is the range of its leaves' positions.

    count: the number of leaves of the tree.
    """
    parts: list[range] = []
    while start < stop:
        # A part of 2**level positions starts at a multiple of 2**level.
        level = num_levels(count) if start == 0 else (start & -start).bit_length() - 1
        while min(start + (1 << level), count) > stop:
            level -= 1
        part = range(start, min(start + (1 << level), count))
        parts.append(part)
        start = part.stop
    return parts


def halves(part: range) -> tuple[range, range]:
    """Return both halves of a part of a tree; the part must have at least two positions."""
    middle = part.start + (1 << (num_levels(len(part)) - 1))
    return range(part.start, middle), range(middle, part.stop)


def sum_in_tree(
    leaves: Sequence[TreeLeaf | None], sums: RangeSums = _NO_SUMS, into: Tensor | None = None
) -> Tensor | None:
    """Return the sum [d] of all leaves and of all `sums` on the CPU; None if there are none.

    leaves: the leaves in the order of their positions. None stands for a leaf that is missing, or
    that one of the `sums` already contains.
    sums: known sums of parts of the tree. Each key is the range of a part's leaf positions.
    into: the tensor for the result, or None for a new one.
    """
    plan = _Plan(leaves, sums)
    root = plan.add(range(len(leaves)), 0)
    if root is None:
        return None
    if not isinstance(root, int):
        plan.steps.append(_Scale(0, root, 1.0))
    total = np.empty_like(plan.example) if into is None else into.numpy()

    def run(part: slice) -> None:
        block = total[part]
        buffers = [block, *(np.empty_like(block) for _ in range(plan.buffers - 1))]
        for step in plan.steps:
            if isinstance(step, _Scale):
                np.multiply(step.array[part], step.weight, out=buffers[step.buffer])
                continue
            left = buffers[step.left] if isinstance(step.left, int) else step.left[part]
            right = buffers[step.right] if isinstance(step.right, int) else step.right[part]
            np.add(left, right, out=buffers[step.buffer])

    in_blocks(len(total), run)
    return torch.from_numpy(total) if into is None else into


def weighted_sum(
    arrays: Sequence[np.ndarray], weights: Sequence[float], into: Tensor | None = None
) -> Tensor:
    """Return w_1 a_1 + w_2 a_2 + ... [d], added in a summation tree; term i is leaf i.

    arrays, weights: the vectors a_i [d], at least one, and the weights w_i.
    into: the tensor for the result, or None for a new one.
    """
    leaves = [TreeLeaf(array, weight) for array, weight in zip(arrays, weights, strict=True)]
    total = sum_in_tree(leaves, into=into)
    assert total is not None, "at least one vector is summed"
    return total


def add_up(parts: Sequence[range], *sums: np.ndarray | None) -> np.ndarray | None:
    """Return the sum of a whole tree from the sums of its parts; None if all sums are None.

    parts: the range of leaf positions of each part.
    sums: the sum of each part; None for a part without leaves.
    """
    count = max(part.stop for part in parts)
    total = sum_in_tree([None] * count, dict(zip(parts, sums, strict=True)))
    return None if total is None else total.numpy()


class _Scale(NamedTuple):
    """The instruction: buffers[buffer] = array * weight."""

    buffer: int
    array: np.ndarray
    weight: float


class _Add(NamedTuple):
    """The instruction: buffers[buffer] = left + right.

    left, right: a vector, or the index of a buffer.
    """

    buffer: int
    left: int | np.ndarray
    right: int | np.ndarray


class _Plan:
    """The instructions that compute the sum of a tree with a few buffers.

    A buffer is a vector for an intermediate result. At the end, buffer 0 has the sum.

    leaves: None stands for a missing leaf.
    sums: known sums of subtrees, by the range of leaf positions.
    """

    def __init__(self, leaves: Sequence[TreeLeaf | None], sums: RangeSums):
        self._leaves, self._sums = leaves, sums
        self.steps: list[_Scale | _Add] = []
        self.buffers = 1
        self.example = np.empty(0)  # any of the vectors, after one was added

    def add(self, part: range, buffer: int) -> int | np.ndarray | None:
        """Add the instructions that sum a subtree; return where its sum will be.

        The result is the index of the buffer that will have the sum. If the sum is already known,
        the result is the sum itself. If the subtree has no leaves, the result is None.

        part: the positions of the subtree's leaves.
        buffer: the first buffer that the instructions may change.
        """
        if part in self._sums:
            total = self._sums[part]
            self.example = self.example if total is None else total
            return total
        if len(part) == 1:
            return self._scale(part.start, buffer)
        first, second = halves(part)
        left = self.add(first, buffer)
        right = self.add(second, buffer + 1 if isinstance(left, int) else buffer)
        if left is None or right is None:
            return right if left is None else left
        self.steps.append(_Add(self._take(buffer), left, right))
        return buffer

    def _scale(self, position: int, buffer: int) -> int | None:
        leaf = self._leaves[position]
        if leaf is None:
            return None
        self.example = leaf.array
        # A weight that is a NumPy number would change the dtype of the product.
        self.steps.append(_Scale(self._take(buffer), leaf.array, float(leaf.weight)))
        return buffer

    def _take(self, buffer: int) -> int:
        self.buffers = max(self.buffers, buffer + 1)
        return buffer
