"""The sums that workers and nodes make of the updates of an aggregation.

The updates are added up in a tree over the order of acceptance (`tree_sum`). A group is a part of
the tree: a process that has all its updates can sum them. Each call to a worker returns a sum for
each of its largest groups. On other nodes than the coordinator's these sums stay where they are,
until nodes have added them up, too. So a handful of vectors arrive at the coordinator, and the bits
do not depend on who summed what.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from raysim.simulation.runtime import Ref, Runtime, WorkerDiedError
from raysim.vectors.tree_sum import covered_ranges, halves

Group: TypeAlias = tuple[int, ...]  # numbers of jobs, in the order of acceptance


class SumTrees:
    """The trees of planned aggregations whose updates workers may sum: one for each replica."""

    def __init__(self) -> None:
        # By job: its tree, as the numbers of all jobs in order, and its position there.
        self._places: dict[int, tuple[Group, int]] = {}

    def plan(self, tree: Group) -> None:
        """Add a tree: the numbers of its jobs in the order of acceptance."""
        for position, number in enumerate(tree):
            self._places[number] = tree, position

    def forget(self, numbers: Iterable[int]) -> None:
        """Remove the jobs of an aggregation that was made."""
        for number in numbers:
            self._places.pop(number, None)

    def groups(self, numbers: Iterable[int]) -> list[Group]:
        """Return the largest groups of these jobs; jobs without a tree are left out."""
        positions: dict[Group, list[int]] = {}
        for number in numbers:
            place = self._places.get(number)
            if place is not None:
                positions.setdefault(place[0], []).append(place[1])
        groups: list[Group] = []
        for tree, covered in positions.items():
            ranges = covered_ranges(covered, len(tree))
            groups += [tree[part.start : part.stop] for part in ranges]
        return groups

    def summed_groups(self, numbers: Iterable[int]) -> list[Group]:
        """Return the groups that a worker sums: all but single jobs that are a tree of their own.

        The update of such a job is as long as its sum, and says more.
        """
        return [group for group in self.groups(numbers) if len(self._places[group[0]][0]) > 1]


class RemoteSum(NamedTuple):
    """The sum of a group of jobs, which is still on the node that made it."""

    jobs: Group
    node: int
    ref: Ref


def fetch_sums(
    sums: Sequence[RemoteSum], trees: SumTrees, runtime: Runtime
) -> tuple[dict[Group, np.ndarray], list[Group]]:
    """Let nodes add up their sums to the largest groups; return those, and groups that are lost.

    A group whose jobs all failed is left out. A group is lost with its node.
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
    """Return the sum of a group; nodes start to add it up.

    parts: the sums that the group consists of, in order. Each node adds up its own parts. Then one
    half of a part of the tree travels to the node of the other half, for all parts at once.
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
