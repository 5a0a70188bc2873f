"""Assign jobs to workers.

The assignment changes no result; it decides how busy the workers are.

A unit is a sequence of jobs that must go to one worker: a group whose deltas are summed on that
worker, or the jobs of one client. The work of a unit is its number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from raysim.api.messages import Job

# Of the busiest worker, because of sums on workers or of clients that stay where their state is.
MAX_SLOWDOWN = 1.1


class StateHome(NamedTuple):
    """The worker that has a client's state.

    is_pending: True if the job that makes the state has not ended.
    """

    worker: int
    is_pending: bool


def total_work(unit: Sequence[Job]) -> float:
    """Return the work of a unit in samples."""
    return sum(job.work for job in unit)


def makespan(units: Sequence[Sequence[Job]], workers: int) -> float:
    """Return the work of the busiest worker if the longest units are assigned first."""
    loads = [0.0] * workers
    for work in sorted(map(total_work, units), reverse=True):
        loads[_least_loaded(loads)] += work
    return max(loads)


def units_by_client(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return a unit per client with the jobs in order of dispatch; the longest units come first."""
    units: dict[int, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.number):
        units.setdefault(job.client, []).append(job)
    return sorted(units.values(), key=total_work, reverse=True)


def summable_groups(jobs: Sequence[Job], group_size: int, workers: int) -> list[list[Job]]:
    """Cut the jobs of an aggregation into groups for workers to sum.

    Return no groups if workers would be idle for too long.
    """
    groups = [list(jobs[start : start + group_size]) for start in range(0, len(jobs), group_size)]
    shortest = makespan([[job] for job in jobs], workers)
    return [] if makespan(groups, workers) > MAX_SLOWDOWN * shortest else groups


def assign_units(
    units: Sequence[Sequence[Job]],
    loads: Sequence[float],
    nodes: Sequence[int],
    home_of: Callable[[int], StateHome | None],
) -> list[int]:
    """Return a worker per unit: the one with the client's state, or the least loaded.

    loads: for each worker, the samples that it must already train. nodes: the node of each worker.
    home_of: function that returns the `StateHome` of a client, or None if no worker has the state.
    If the home is too busy, the least loaded worker of the same node is tried next.
    """
    loads = list(loads)
    fair_load = MAX_SLOWDOWN * (sum(loads) + sum(map(total_work, units))) / len(loads)
    chosen: list[int] = []
    for unit in units:
        work = total_work(unit)
        worker = _least_loaded(loads)
        home = home_of(unit[0].client)
        if home is not None:
            neighbours = [
                other for other in range(len(loads)) if nodes[other] == nodes[home.worker]
            ]
            neighbour = min(neighbours, key=loads.__getitem__)
            # No call may wait for a state that another worker still has to make.
            if home.is_pending or loads[home.worker] + work <= fair_load:
                worker = home.worker
            elif loads[neighbour] + work <= fair_load:
                worker = neighbour
        loads[worker] += work
        chosen.append(worker)
    return chosen


def assign_to_nodes(works: Sequence[float], nodes: Sequence[int]) -> list[int]:
    """Return a worker per group: consecutive groups on a node, longest groups first.

    works: the work of each group. nodes: the node of each worker; the last groups go to node 0.
    """
    order = sorted(set(nodes), key=lambda node: (node == 0, node))
    members = [[worker for worker, other in enumerate(nodes) if other == node] for node in order]
    ends = np.cumsum([len(workers) for workers in members]) / len(nodes)
    middles = (np.cumsum(works) - np.asarray(works) / 2) / max(sum(works), 1e-9)
    places = np.minimum(np.searchsorted(ends, middles), len(order) - 1)
    loads, chosen = [0.0] * len(nodes), [0] * len(works)
    for group in sorted(range(len(works)), key=works.__getitem__, reverse=True):
        worker = min(members[places[group]], key=loads.__getitem__)
        loads[worker] += works[group]
        chosen[group] = worker
    return chosen


def assign_groups_to_nodes(groups: Sequence[Sequence[Job]], nodes: Sequence[int]) -> list[int]:
    """Return a worker per group such that nodes can add up the sums of their groups.

    Return an empty list if that saves nothing or takes longer. It saves nothing unless at least two
    groups are summed on nodes other than node 0, where the coordinator is.
    """
    works = [total_work(group) for group in groups]
    workers = assign_to_nodes(works, nodes)
    groups_elsewhere = sum(nodes[worker] > 0 for worker in workers)
    busiest = max(np.bincount(workers, works))
    shortest = makespan([[job] for group in groups for job in group], len(nodes))
    return [] if busiest > MAX_SLOWDOWN * shortest or groups_elsewhere < 2 else workers


def _least_loaded(loads: Sequence[float]) -> int:
    return min(range(len(loads)), key=loads.__getitem__)
