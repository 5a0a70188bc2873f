"""Sum the deltas of groups of jobs on their worker, in the tree in which the server sums them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from raysim.api.messages import Job, TrainingResult
from raysim.vectors.blocks import BLOCK, new_like, split_range
from raysim.vectors.tree_sum import num_levels


class WorkerSums:
    """The sums of Job.weight * delta that a worker computes, one sum for each group of jobs.

    groups: the job numbers of each group, in the order of aggregation. A group has the leaves of
    one subtree of the server's summation tree.
    """

    def __init__(self, groups: Sequence[tuple[int, ...]]):
        self._sums = {group: GroupSum(len(group)) for group in groups}
        # By the number of a job: the sum of its group, and its position in the group.
        self._places: dict[int, tuple[GroupSum, int]] = {}
        for group, group_sum in self._sums.items():
            for position, number in enumerate(group):
                self._places[number] = group_sum, position

    def has(self, job: Job) -> bool:
        """Return True if this worker adds the job's update to the sum of a group of jobs."""
        return job.number in self._places

    def add(self, job: Job, delta: Tensor | None) -> None:
        """Add the delta of a job; None if the job failed. A job that is in no group is ignored."""
        place = self._places.get(job.number)
        if place is not None:
            group_sum, position = place
            group_sum.add(position, delta, job.weight)

    @property
    def totals(self) -> dict[tuple[int, ...], Tensor]:
        """The sum of each group, on the device, by the numbers of the group's jobs.

        A group is missing if all of its jobs failed.
        """
        totals: dict[tuple[int, ...], Tensor] = {}
        for group, group_sum in self._sums.items():
            if group_sum.total is not None:
                totals[group] = group_sum.total
        return totals


class GroupSum:
    """The sum of a subtree of the summation tree. Leaves may be added in any order.

    count: the number of leaves.
    total: the sum. It is None until the last leaf is added, and stays None if all jobs failed.
    """

    def __init__(self, count: int):
        self._count = count
        # By level and index. If leaves are added in order, at most `num_levels(count) + 1` vectors
        # exist at the same time.
        self._waiting: dict[tuple[int, int], Tensor | None] = {}
        self.total: Tensor | None = None

    def add(self, position: int, delta: Tensor | None, weight: float) -> None:
        """Add weight * delta to the sum, as one leaf of the tree.

        position: the index of the leaf among the group's leaves.
        delta: a job's trained minus its received vector [d]; None, for a failed job, adds nothing.
        """
        siblings: list[Tensor] = []  # the sums to which the leaf is added, in this order
        index = position
        for level in range(num_levels(self._count)):
            sibling = index ^ 1
            if sibling << level < self._count:
                if (level, sibling) not in self._waiting:
                    self._waiting[level, index] = self._sum(delta, weight, siblings)
                    return
                other = self._waiting.pop((level, sibling))
                if other is not None:
                    siblings.append(other)
            index >>= 1
        self.total = self._sum(delta, weight, siblings)

    def _sum(self, delta: Tensor | None, weight: float, siblings: list[Tensor]) -> Tensor | None:
        """Return weight * delta + siblings[0] + siblings[1] + ..., added in this order.

        The sum overwrites one of the tensors in `siblings`. If `delta` is None, return the sum of
        the siblings, or None without siblings.
        """
        if delta is None:
            return functools.reduce(Tensor.add_, siblings) if siblings else None
        if not siblings:
            return torch.mul(delta, weight, out=new_like(delta))
        *others, total = siblings
        _add_product(delta, weight, others, total)
        return total


def _add_product(delta: Tensor, weight: float, others: Sequence[Tensor], total: Tensor) -> None:
    """Add weight * delta + others[0] + others[1] + ... to `total` [d], in place.

    The product is rounded before it is added, and every addition is rounded, too.
    """
    if total.device.type != "cpu" or len(delta) <= BLOCK:
        _add_all(delta * weight, others, total)
        return
    # Each block stays in the CPU's cache until all terms are added, so memory is read only once.
    products = torch.empty(BLOCK, dtype=delta.dtype)
    for part in split_range(0, len(delta), BLOCK):
        block = torch.mul(delta[part], weight, out=products[: part.stop - part.start])
        _add_all(block, [other[part] for other in others], total[part])


def _add_all(value: Tensor, others: Sequence[Tensor], total: Tensor) -> None:
    """Add value + others[0] + others[1] + ... to `total`; `value` is overwritten."""
    for other in others:
        value.add_(other)
    total.add_(value)


class SeparateSums:
    """A wrapper of `Worker.train` that returns each sum of updates as a separate value.

    Ray can then keep each sum on the worker's node until all sums of the node are added up.

    train: the function `Worker.train`.
    """

    train: Callable[..., Any]  # see `Worker.train`

    def train_apart(
        self, jobs: Sequence[Job], groups: Sequence[tuple[int, ...]], *values: Any
    ) -> tuple[Any, ...]:
        """Train jobs as `Worker.train` does, and return each sum of updates as a separate value.

        The result has the values of `Worker.train`, and then the sum of each group, or None if all
        jobs of the group failed.

        values: the other arguments of `Worker.train`.
        """
        trained = self.train(jobs, groups, *values)
        result: TrainingResult
        result, *states = trained if isinstance(trained, tuple) else (trained,)
        sums = [result.sums.get(group) for group in groups]
        return replace(result, sums={}), *states, *sums
