"""Test the assignment of jobs to workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, strategies as st

from raysim.api.messages import Job
from raysim.simulation.assignment import (
    MAX_SLOWDOWN,
    StateHome,
    assign_consecutive_jobs,
    assign_groups,
    assign_units,
    total_work,
    units_by_client,
)
from raysim.vectors.tree_sum import covered_ranges


def jobs_of(works: list[float], clients: int = 1000) -> list[Job]:
    return [Job(number, number % clients, 0, 0, work=work) for number, work in enumerate(works)]


def units_of(*works: float) -> list[list[Job]]:
    return [[job] for job in jobs_of(list(works))]


def test_jobs_are_assigned_to_the_least_loaded_worker() -> None:
    assert assign_units(units_of(4, 1, 1, 1), [0.0, 0.0], [0, 0], lambda client: None) == [
        0,
        1,
        1,
        1,
    ]
    assert assign_units(units_of(4, 1), [9.0, 0.0], [0, 0], lambda client: None) == [1, 1]


def test_client_moves_to_another_worker_if_loads_would_be_uneven() -> None:
    def home_of(client: int) -> StateHome:
        return StateHome(1, is_pending=False)

    assert assign_units(units_of(1, 1), [0.0, 0.0], [0, 0], home_of) == [1, 0]


def test_client_stays_on_its_worker_until_its_last_job_ends() -> None:
    assert assign_units(
        units_of(1), [0.0, 99.0], [0, 0], lambda client: StateHome(1, is_pending=True)
    ) == [1]


def test_client_moves_to_a_less_loaded_worker_of_the_same_node() -> None:
    loads, nodes = [0.0, 9.0, 1.0], [0, 1, 1]
    assert assign_units(
        units_of(1), loads, nodes, lambda client: StateHome(1, is_pending=False)
    ) == [2]


def test_jobs_of_a_client_stay_together_in_the_order_of_their_dispatch() -> None:
    units = units_by_client(jobs_of([1, 5, 1, 5, 1], clients=2)[::-1])
    assert [[job.number for job in unit] for unit in units] == [[1, 3], [0, 2, 4]]


WORKS = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def parts_of(jobs: Sequence[Job], count: int) -> int:
    """Return how many vectors a worker returns if it adds up its updates.

    If the worker has all updates of a subtree of the summation tree, they become one vector.

    jobs: the worker's jobs.
    count: the number of jobs on all workers.
    """
    return len(covered_ranges([job.number for job in jobs], count))


@given(WORKS, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.booleans())
def test_groups_of_jobs_leave_no_worker_idle(
    works: list[int], nodes: list[int], keeps: bool
) -> None:
    jobs = jobs_of([float(work) for work in works])
    loads = [0.0] * len(nodes)
    assigned = assign_groups([jobs], loads, nodes, keeps)
    single = assign_units(
        sorted([[job] for job in jobs], key=total_work, reverse=True),
        loads,
        nodes,
        lambda client: None,
    )
    best = max(np.bincount(single, sorted(works, reverse=True)))
    assert sorted(job.number for share in assigned for job in share) == list(range(len(works)))
    assert max(total_work(share) for share in assigned) <= MAX_SLOWDOWN * best + 1e-9


def test_equal_jobs_are_divided_into_few_groups_for_the_summation_tree() -> None:
    sums = {}
    for clients, workers in ((3, 3), (10, 3), (10, 2), (100, 3), (100, 8)):
        assigned = assign_groups([jobs_of([1.0] * clients)], [0.0] * workers, [0] * workers)
        sums[clients, workers] = sum(parts_of(share, clients) for share in assigned)
    assert sums == {(3, 3): 3, (10, 3): 3, (10, 2): 4, (100, 3): 3, (100, 8): 18}


def test_busy_worker_gets_fewer_jobs_of_a_group() -> None:
    assigned = assign_groups([jobs_of([1.0] * 4)], [0.0, 2.0], [0, 0])
    assert [len(share) for share in assigned] == [3, 1]


def test_jobs_of_one_part_of_the_summation_tree_go_to_one_node() -> None:
    nodes = [0, 0, 1, 1, 2, 2]
    jobs = jobs_of([1.0] * 24)
    assigned = assign_groups([jobs], [0.0] * 6, nodes, keeps_nodes=True)
    on_node = [assigned[2 * node] + assigned[2 * node + 1] for node in range(3)]
    assert [len(share) for share in on_node] == [8, 8, 8]
    assert [parts_of(share, 24) for share in on_node] == [1, 1, 1]


def test_two_idle_workers_get_half_of_all_jobs_and_half_of_the_jobs_of_each_lane() -> None:
    jobs = jobs_of([60.0] * 100)
    shares = assign_consecutive_jobs(jobs, [0.0, 0.0], [0, 0])
    assert [len(share) for share in shares] == [50, 50]
    for share in shares:
        lanes = [(job.number + job.number // 10) % 10 for job in share]
        assert {lanes.count(lane) for lane in range(10)} == {5}


def test_worker_with_unfinished_jobs_gets_fewer_jobs_than_an_idle_worker() -> None:
    shares = assign_consecutive_jobs(jobs_of([1.0] * 10), [4.0, 0.0], [0, 0])
    assert [len(share) for share in shares] == [3, 7]
    shares = assign_consecutive_jobs(jobs_of([1.0] * 3), [9.0, 0.0], [0, 0])
    assert [len(share) for share in shares] == [0, 3]


def test_jobs_of_each_node_are_consecutive_in_the_order_of_aggregation() -> None:
    shares = assign_consecutive_jobs(jobs_of([1.0] * 8), [0.0] * 4, [0, 1, 0, 1])
    numbers = [[job.number for job in share] for share in shares]
    assert numbers == [[0, 1], [4, 5], [2, 3], [6, 7]]


@given(
    st.lists(st.floats(0, 100), max_size=30),
    st.lists(st.floats(0, 300), min_size=1, max_size=5),
)
def test_each_job_goes_to_one_worker_and_loads_are_nearly_equal(
    works: list[float], loads: list[float]
) -> None:
    jobs = jobs_of(works)
    shares = assign_consecutive_jobs(jobs, loads, [0] * len(loads))
    assert [job for share in shares for job in share] == jobs
    level = max(max(loads), (sum(works) + sum(loads)) / len(loads))
    largest = max(works, default=0.0)
    for share, load in zip(shares, loads, strict=True):
        assert load + total_work(share) <= level + largest + 1e-6
