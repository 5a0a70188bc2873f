"""Assignment of jobs to workers."""

from __future__ import annotations

from hypothesis import given, strategies as st

from raysim.api.messages import Job
from raysim.simulation.assignment import (
    MAX_SLOWDOWN,
    StateHome,
    assign_groups_to_nodes,
    assign_units,
    makespan,
    summable_groups,
    units_by_client,
)


def jobs_of(works: list[float], clients: int = 1000) -> list[Job]:
    return [Job(number, number % clients, 0, 0, work=work) for number, work in enumerate(works)]


def units_of(*works: float) -> list[list[Job]]:
    return [[job] for job in jobs_of(list(works))]


def test_unit_goes_to_the_least_loaded_worker() -> None:
    assert assign_units(units_of(4, 1, 1, 1), [0.0, 0.0], [0, 0], lambda client: None) == [
        0,
        1,
        1,
        1,
    ]
    assert assign_units(units_of(4, 1), [9.0, 0.0], [0, 0], lambda client: None) == [1, 1]


def test_client_stays_at_home_only_if_that_is_fair() -> None:
    def home_of(client: int) -> StateHome:
        return StateHome(1, is_pending=False)

    assert assign_units(units_of(1, 1), [0.0, 0.0], [0, 0], home_of) == [1, 0]


def test_client_stays_at_home_while_its_state_is_pending() -> None:
    assert assign_units(
        units_of(1), [0.0, 99.0], [0, 0], lambda client: StateHome(1, is_pending=True)
    ) == [1]


def test_client_moves_to_a_worker_of_the_same_node() -> None:
    loads, nodes = [0.0, 9.0, 1.0], [0, 1, 1]
    assert assign_units(
        units_of(1), loads, nodes, lambda client: StateHome(1, is_pending=False)
    ) == [2]


def test_units_by_client_keep_the_order_of_dispatch() -> None:
    units = units_by_client(jobs_of([1, 5, 1, 5, 1], clients=2)[::-1])
    assert [[job.number for job in unit] for unit in units] == [[1, 3], [0, 2, 4]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 5), st.integers(1, 4))
def test_groups_are_consecutive_or_refused_if_too_slow(
    works: list[int], size: int, workers: int
) -> None:
    jobs = jobs_of([float(work) for work in works])
    groups = summable_groups(jobs, size, workers)
    shortest = makespan([[job] for job in jobs], workers)
    if groups:
        assert [job for group in groups for job in group] == jobs
        assert {len(group) for group in groups[:-1]} <= {size} and len(groups[-1]) <= size
        assert makespan(groups, workers) <= MAX_SLOWDOWN * shortest
    else:
        cut = [jobs[start : start + size] for start in range(0, len(jobs), size)]
        assert makespan(cut, workers) > MAX_SLOWDOWN * shortest


def test_nodes_add_up_two_groups_or_more() -> None:
    assert assign_groups_to_nodes(units_of(1, 1, 1), [0, 1, 1]) == [1, 2, 0]
    assert (
        assign_groups_to_nodes(units_of(1, 1), [0, 1]) == []
    )  # one group on another node saves nothing


def test_nodes_add_up_nothing_if_a_worker_would_be_idle() -> None:
    # Three workers could train 3 samples each; consecutive groups leave one of them 4.
    assert makespan(units_of(1, 1, 1, 2, 2, 2), 3) == 3
    assert assign_groups_to_nodes(units_of(1, 1, 1, 2, 2, 2), [0, 1, 1]) == []
