"""Assign jobs to workers; no result depends on the assignment.

A unit is a sequence of jobs that one worker trains: the jobs of one client, or a group of jobs
whose updates the worker adds up. The work of a unit is its number of samples. A sample that makes
only a forward pass counts 1/3.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from raysim.api.messages import Job
from raysim.vectors.tree_sum import halves

# The busiest worker may get this many times the work of an ideal balance. The balance is not ideal,
# because groups are kept whole for sums, and clients stay on the worker that has their state.
MAX_SLOWDOWN = 1.1
MAX_SPLITS = 16  # splits of groups per worker; after these, jobs are assigned one by one

_work_of = attrgetter("work")


class StateHome(NamedTuple):
    """The worker that has, or will have, a client's newest state.

    is_pending: True if the job that makes this state has not ended yet.
    """

    worker: int
    is_pending: bool


def total_work(unit: Sequence[Job]) -> float:
    """Return the work of a unit (jobs that one worker trains): the samples of all its jobs."""
    samples: float = sum(map(_work_of, unit))
    return samples


def units_by_client(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return one unit for each client; the units with the most samples come first.

    A unit is a sequence of jobs that one worker trains. It contains the client's jobs in the order
    of their dispatch.
    """
    units: dict[int, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.number):
        units.setdefault(job.client, []).append(job)
    return sorted(units.values(), key=total_work, reverse=True)


def assign_units(
    units: Sequence[Sequence[Job]],
    loads: Sequence[float],
    nodes: Sequence[int],
    home_of: Callable[[int], StateHome | None],
) -> list[int]:
    """Choose a worker for each unit; return the positions of these workers in `loads`.

    A unit goes to the first worker of this list whose condition is true:

    - the client's home (`StateHome`), if it is still making the client's state,
    - the home, if its load stays within a limit,
    - the least loaded worker on the home's node, if its load stays within the limit,
    - without a condition, the least loaded of all workers.

    The limit is `MAX_SLOWDOWN` times the mean load of all workers after all assignments.

    units: the jobs of each client; the units with the most samples come first.
    loads: for each worker, the number of samples that it still has to train from earlier jobs.
    nodes: for each worker, the number of its node.
    home_of: returns a client's home, or None.
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
            # Otherwise a call would wait for a state that another worker still has to make.
            if home.is_pending or loads[home.worker] + work <= fair_load:
                worker = home.worker
            elif loads[neighbour] + work <= fair_load:
                worker = neighbour
        loads[worker] += work
        chosen.append(worker)
    return chosen


def assign_groups(
    groups: Sequence[Sequence[Job]],
    loads: Sequence[float],
    nodes: Sequence[int],
    keeps_nodes: bool = False,
) -> list[list[Job]]:
    """Assign groups of jobs to workers; return the jobs of each worker.

    A worker returns one sum for a whole group. A group is split only if a worker's load would
    exceed a limit. The limit is `MAX_SLOWDOWN` times the largest load after assigning all jobs one
    by one.

    groups: jobs whose updates are a subtree of the summation tree, in the order of aggregation.
    loads, nodes: as in `assign_units`.
    keeps_nodes: True first assigns groups to nodes, so that nodes can add up sums. This has no
    effect if a load would then exceed the limit.
    """
    units = [_Unit(total_work(group), tuple(group)) for group in groups]
    if len(loads) == 1:
        return [_jobs_of(units)]
    capacities = [1] * len(loads)
    jobs = [job for group in groups for job in group]
    limit = MAX_SLOWDOWN * _longest_load(jobs, loads)
    shares = None
    if keeps_nodes:
        shares = _split_among_nodes(units, loads, nodes, limit)
    shares = shares or _split_until_balanced(units, loads, capacities, limit)
    if shares is None:
        shares = _distribute([_Unit(job.work, (job,)) for job in jobs], loads, capacities).units
    return [_jobs_of(share) for share in shares]


def assign_consecutive_jobs(
    jobs: Sequence[Job], loads: Sequence[float], nodes: Sequence[int]
) -> list[list[Job]]:
    """Divide a list of jobs into consecutive ranges, so that workers get about equal loads.

    Return the jobs of each worker; a worker may have none. Use this function if workers train in
    lanes. The jobs of all workers of a node are consecutive, too.

    jobs: the jobs, in the order of aggregation.
    loads: for each worker, the number of samples that it still has to train from earlier jobs.
    nodes: for each worker, the number of its node.
    """
    works = [job.work for job in jobs]
    level = _equal_load(sum(works), loads)
    # Entry i is the work of the first i jobs.
    work_before = [0.0, *itertools.accumulate(works)]
    shares: list[list[Job]] = [[] for _ in loads]
    start, planned = 0, 0.0
    *others, last = sorted(range(len(loads)), key=nodes.__getitem__)
    for worker in others:
        planned += max(0.0, level - loads[worker])
        stop = max(start, _nearest(work_before, planned))
        shares[worker] = list(jobs[start:stop])
        start = stop
    shares[last] = list(jobs[start:])
    return shares


def _equal_load(work: float, loads: Sequence[float]) -> float:
    """Return the load that the least loaded workers have after they have shared some work.

    The work raises the smallest loads until they are equal. Workers with a higher load get no work.
    work, loads: the samples to share, and the samples that each worker already has.
    """
    ascending = sorted(loads)
    total = work
    for count, load in enumerate(ascending, start=1):
        total += load
        level = total / count
        if count == len(ascending) or level <= ascending[count]:
            return level
    raise ValueError("loads=[]: no worker can get this work. Give the load of at least one worker.")


def _nearest(ascending: Sequence[float], value: float) -> int:
    """Return the index of the number that is nearest to `value`.

    If two numbers are equally near, return the larger index.
    """
    index = bisect.bisect_left(ascending, value)
    if index == len(ascending):
        return index - 1
    if index and value - ascending[index - 1] < ascending[index] - value:
        return index - 1
    return index


def _longest_load(jobs: Sequence[Job], loads: Sequence[float]) -> float:
    """Return the load of the busiest worker, in samples, if jobs are assigned one by one.

    The jobs with the most samples come first, and each job goes to the least loaded worker.
    loads: the samples that each worker already has.
    """
    queue = list(loads)
    heapq.heapify(queue)
    for work in sorted(map(_work_of, jobs), reverse=True):
        heapq.heapreplace(queue, queue[0] + work)
    return max(queue)


class _Unit(NamedTuple):
    """Jobs that a worker or a node trains together: a subtree of the summation tree.

    work: the number of samples of all jobs.
    """

    work: float
    jobs: tuple[Job, ...]

    def halves(self) -> tuple[_Unit, _Unit]:
        """Return the two halves of this subtree of the summation tree."""
        middle = halves(range(len(self.jobs)))[0].stop
        first, second = self.jobs[:middle], self.jobs[middle:]
        first_work = total_work(first)
        return _Unit(first_work, first), _Unit(self.work - first_work, second)


class _Shares(NamedTuple):
    """A division of units among receivers: all receivers are workers, or all are nodes.

    units: for each receiver, the units that it gets.
    loads: for each receiver, its number of samples with these units. The load of a node is the mean
    load of its workers.
    """

    units: list[list[_Unit]]
    loads: list[float]


def _jobs_of(units: Sequence[_Unit]) -> list[Job]:
    return [job for unit in units for job in unit.jobs]


def _distribute(
    units: Sequence[_Unit], loads: Sequence[float], capacities: Sequence[int]
) -> _Shares:
    """Divide units of jobs among receivers: all receivers are workers, or all are nodes.

    The units with the most samples come first. Each unit goes to the receiver that has the smallest
    load at this moment.

    loads: for each receiver, its load before the first unit. The load of a node is the mean load of
    its workers.
    capacities: for each receiver, its number of workers; 1 if it is a worker itself.
    """
    queue = [(load, place) for place, load in enumerate(loads)]
    heapq.heapify(queue)
    shares: list[list[_Unit]] = [[] for _ in loads]
    for unit in sorted(units, key=lambda unit: -unit.work):
        load, place = queue[0]
        shares[place].append(unit)
        heapq.heapreplace(queue, (load + unit.work / capacities[place], place))
    after = [load for load, _ in sorted(queue, key=lambda entry: entry[1])]
    return _Shares(shares, after)


def _split_until_balanced(
    units: Sequence[_Unit], loads: Sequence[float], capacities: Sequence[int], limit: float
) -> list[list[_Unit]] | None:
    """Divide units among workers or nodes; split units until no load is above `limit`.

    Return the units of each receiver (worker or node). Return None if `MAX_SPLITS` splits for each
    receiver are not enough, or if the busiest receiver has no unit that can be split.
    loads, capacities: as in `_distribute`.
    """
    longest = (limit - min(loads)) * max(capacities)
    remaining = _split_long_units(units, longest)
    for _ in range(MAX_SPLITS * len(loads)):
        shares = _distribute(remaining, loads, capacities)
        busiest = max(range(len(loads)), key=shares.loads.__getitem__)
        if shares.loads[busiest] <= limit:
            return shares.units
        excess = (shares.loads[busiest] - limit) * capacities[busiest]
        unit = _unit_to_split(shares.units[busiest], excess)
        if unit is None:
            return None
        remaining.remove(unit)
        remaining += unit.halves()
    return None


def _split_long_units(units: Sequence[_Unit], longest: float) -> list[_Unit]:
    """Split units in half repeatedly, until none has more than `longest` samples.

    A unit is a tuple of jobs. A unit of one job is not split.
    longest: the most samples that the least loaded worker (or node) can still take.
    """
    remaining = list(units)
    short: list[_Unit] = []
    while remaining:
        unit = remaining.pop()
        if unit.work > longest and len(unit.jobs) > 1:
            remaining += unit.halves()
        else:
            short.append(unit)
    return short


def _unit_to_split(units: Sequence[_Unit], excess: float) -> _Unit | None:
    """Choose which unit of an overloaded worker or node to split; None if every unit is one job.

    Only units of several jobs can be split. Choose the smallest of them that has at least twice
    `excess` samples. If none has so many, choose the largest.
    excess: the number of samples by which the load is too large.
    """
    several = sorted((unit for unit in units if len(unit.jobs) > 1), key=lambda unit: unit.work)
    for unit in several:
        if unit.work >= 2 * excess:
            return unit
    return several[-1] if several else None


def _split_among_nodes(
    units: Sequence[_Unit], loads: Sequence[float], nodes: Sequence[int], limit: float
) -> list[list[_Unit]] | None:
    """Divide units among nodes, then divide each node's units among its workers.

    Return the units of each worker. Return None if splitting cannot bring all loads down to
    `limit`.
    loads: for each worker, its number of samples without these units.
    nodes: for each worker, the number of its node.
    """
    members: dict[int, list[int]] = {}
    for worker, node in sorted(enumerate(nodes), key=lambda pair: pair[1]):
        members.setdefault(node, []).append(worker)
    capacities = [len(workers) for workers in members.values()]
    node_loads = [
        sum(loads[worker] for worker in workers) / len(workers) for workers in members.values()
    ]
    node_shares = _split_until_balanced(units, node_loads, capacities, limit)
    if node_shares is None:
        return None
    shares: list[list[_Unit]] = [[] for _ in loads]
    for workers, node_share in zip(members.values(), node_shares, strict=True):
        worker_loads = [loads[worker] for worker in workers]
        inner = _split_until_balanced(node_share, worker_loads, [1] * len(workers), limit)
        if inner is None:
            return None
        for worker, share in zip(workers, inner, strict=True):
            shares[worker] = share
    return shares


def _least_loaded(loads: Sequence[float]) -> int:
    return min(range(len(loads)), key=loads.__getitem__)
