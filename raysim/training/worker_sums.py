"""Sum the deltas of groups of jobs on their worker, in the tree in which the server sums them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.api.messages import Job, TrainingResult
from raysim.vectors.blocks import BLOCK, new_like, split_range
from raysim.vectors.tree_sum import num_levels


class WorkerSums:
    """Weighted sums of deltas on a worker, not normalised, one for each group of jobs.

    groups: the numbers of the jobs in each sum, which are a part of the server's tree of sums, in
    the order of acceptance.
    """

    def __init__(self, groups: Sequence[tuple[int, ...]]):
        self._sums = {group: GroupSum(len(group)) for group in groups}
        # By the number of a job: the sum of its group, and its position in the group.
        self._places: dict[int, tuple[GroupSum, int]] = {}
        for group, group_sum in self._sums.items():
            for position, number in enumerate(group):
                self._places[number] = group_sum, position

    def has(self, job: Job) -> bool:
        """Return True if the job is in a group."""
        return job.number in self._places

    def add(self, job: Job, delta: Tensor | None) -> None:
        """Add the delta of a job; None if the job failed. A job that is in no group is ignored."""
        place = self._places.get(job.number)
        if place is not None:
            group_sum, position = place
            group_sum.add(position, delta, job.weight)

    @property
    def totals(self) -> dict[tuple[int, ...], Tensor]:
        """The sum of each group, on the device. If all jobs of a group failed, it has no sum."""
        totals: dict[tuple[int, ...], Tensor] = {}
        for group, group_sum in self._sums.items():
            if group_sum.total is not None:
                totals[group] = group_sum.total
        return totals


class GroupSum:
    """The sum of a part of the tree, whose leaves come in any order.

    If they are added in order, at most `num_levels(count) + 1` vectors exist at the same time.
    count: the number of leaves.
    total: the sum, after the last leaf; None if all leaves are missing.
    """

    def __init__(self, count: int):
        self._count = count
        self._waiting: dict[tuple[int, int], Tensor | None] = {}  # by level and index
        self.total: Tensor | None = None

    def add(self, position: int, delta: Tensor | None, weight: float) -> None:
        """Add the leaf weight * delta [d]; a delta of None is a missing leaf."""
        unscaled, value = delta, None
        index = position
        for level in range(num_levels(self._count)):
            sibling = index ^ 1
            if sibling << level < self._count:
                if (level, sibling) not in self._waiting:
                    self._waiting[level, index] = _scaled(unscaled, weight, value)
                    return
                other = self._waiting.pop((level, sibling))
                if unscaled is not None and other is not None:
                    value, unscaled = _add_product(other, unscaled, weight), None
                elif unscaled is None:
                    value = _add(value, other)
            index >>= 1
        self.total = _scaled(unscaled, weight, value)


def _scaled(delta: Tensor | None, weight: float, value: Tensor | None) -> Tensor | None:
    """Return weight * delta as a new tensor; if there is no delta, return `value`."""
    return value if delta is None else torch.mul(delta, weight, out=new_like(delta))


def _add_product(total: Tensor, delta: Tensor, weight: float) -> Tensor:
    """Add weight * delta to `total` [d], in place, after rounding each product.

    For a long vector on the CPU, the products of one block at a time stay in the cache. This saves
    two passes over the memory.
    """
    if total.device.type != "cpu" or len(delta) <= BLOCK:
        return total.add_(delta * weight)
    product = torch.empty(BLOCK, dtype=delta.dtype)
    for part in split_range(0, len(delta), BLOCK):
        block = product[: part.stop - part.start]
        torch.mul(delta[part], weight, out=block)
        total[part].add_(block)
    return total


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the sum of two vectors, either of which may be None; both may be overwritten."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)


class SeparateSums:
    """The part of a worker that returns each sum as a separate value.

    Ray can then keep a sum on the worker's node until the node's sums are added up.
    """

    train: Callable[..., Any]  # see `Worker.train`

    def train_apart(
        self, jobs: Sequence[Job], groups: Sequence[tuple[int, ...]], *values: Any
    ) -> tuple[Any, ...]:
        """Train as `train` does; return its values, then the sum of each group.

        A sum is None if all jobs of the group failed.
        """
        trained = self.train(jobs, groups, *values)
        result: TrainingResult
        result, *states = trained if isinstance(trained, tuple) else (trained,)
        sums = [result.sums.get(group) for group in groups]
        return replace(result, sums={}), *states, *sums
