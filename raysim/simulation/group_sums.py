"""The sums of updates that workers and nodes make for an aggregation.

A worker replaces the updates of a group by their sum. If the model is large
(`Runtime.combine_from`), each node adds up the sums of its workers before it sends them to the
coordinator's node. No bit of the result depends on which process made which sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from raysim.simulation.runtime import Ref, Runtime, WorkerDiedError
from raysim.vectors.tree_sum import covered_ranges, halves

Group: TypeAlias = tuple[int, ...]  # numbers of jobs, in the order in which they are aggregated


class _SumTree:
    """The tree in which the updates of one aggregation are added up.

    jobs: the numbers of the jobs, in the order in which they are aggregated.
    """

    def __init__(self, jobs: Group):
        self.jobs = jobs
        self.position_of = {number: position for position, number in enumerate(jobs)}


class SumTrees:
    """The summation trees of the planned aggregations.

    An aggregation has one tree for each replica that gets updates in it; most have one tree. An
    aggregation has no trees if its updates must not be summed by workers.
    """

    def __init__(self) -> None:
        self._trees: dict[int, _SumTree] = {}  # by job

    def plan(self, jobs: Group) -> None:
        """Add the summation tree of a planned aggregation.

        jobs: the numbers of its jobs, in the order in which they are aggregated.
        """
        self._trees.update(dict.fromkeys(jobs, _SumTree(jobs)))

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove the jobs with these numbers, because their aggregation was made."""
        for number in numbers:
            self._trees.pop(number, None)

    def groups(self, numbers: Iterable[int]) -> list[Group]:
        """Return the largest groups that consist only of jobs with the given numbers.

        numbers: the numbers of the jobs, in any order.
        Jobs that are in no tree are left out.
        """
        positions: dict[_SumTree, list[int]] = {}
        for number in numbers:
            tree = self._trees.get(number)
            if tree is not None:
                positions.setdefault(tree, []).append(tree.position_of[number])
        groups: list[Group] = []
        for tree, covered in positions.items():
            ranges = covered_ranges(covered, len(tree.jobs))
            groups += [tree.jobs[part.start : part.stop] for part in ranges]
        return groups

    def summed_groups(self, numbers: Iterable[int]) -> list[Group]:
        """Return the groups of jobs whose updates a worker replaces by one sum per group.

        These are the largest groups that contain only the worker's jobs (`numbers`). If a summation
        tree has a single job, this job is in no group.
        """
        return [group for group in self.groups(numbers) if len(self._trees[group[0]].jobs) > 1]


class RemoteSum(NamedTuple):
    """A sum of updates that is stored on the node that computed it.

    jobs: the numbers of the jobs whose updates are summed, which form a group.
    node: the number of the node.
    ref: a reference to the sum.
    """

    jobs: Group
    node: int
    ref: Ref


def fetch_sums(
    sums: Sequence[RemoteSum], trees: SumTrees, runtime: Runtime
) -> tuple[dict[Group, np.ndarray], list[Group]]:
    """Let nodes add up small sums to sums of the largest possible groups; fetch the large sums.

    Return the fetched sums by group, and a list of the groups whose sum was lost because its node
    was lost. A group is in neither result if all its jobs failed.
    """
    part_of = {number: part for part in sums for number in part.jobs}
    requested: list[tuple[RemoteSum, list[RemoteSum]]] = []
    for group in trees.groups(part_of):
        parts = list({part_of[number].jobs: part_of[number] for number in group}.values())
        requested.append((_add_up(parts, runtime), parts))
    totals: dict[Group, np.ndarray | None] = {}
    lost: list[Group] = []
    for total, parts in requested:
        try:
            totals[total.jobs] = runtime.get(total.ref)
            continue
        except WorkerDiedError:  # a process that adds up, or a node
            pass
        for part in parts:
            try:
                totals[part.jobs] = runtime.get(part.ref)
            except WorkerDiedError:
                lost.append(part.jobs)
    return {group: total for group, total in totals.items() if total is not None}, lost


def _add_up(parts: Sequence[RemoteSum], runtime: Runtime) -> RemoteSum:
    """Start to add up the sums of consecutive groups; return a reference to the total.

    Each node adds up its sums. If a subtree is on several nodes, one node gets the sums of both
    halves.
    parts: the sums, in the order of the summation tree.
    """
    if len(parts) == 1:
        return parts[0]
    ends = list(itertools.accumulate(len(part.jobs) for part in parts))
    if len({part.node for part in parts}) > 1:
        middle = ends.index(halves(range(ends[-1]))[0].stop) + 1
        parts = [_add_up(parts[:middle], runtime), _add_up(parts[middle:], runtime)]
        ends = [len(parts[0].jobs), ends[-1]]
    ranges = [range(end - len(part.jobs), end) for part, end in zip(parts, ends, strict=True)]
    jobs = tuple(number for part in parts for number in part.jobs)
    node = parts[0].node
    return RemoteSum(jobs, node, runtime.add_up(node, ranges, [part.ref for part in parts]))
