"""Test the table of jobs: the order of a job's states, and the versions that jobs still need."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiny_runs import untrained_run

from raysim.api.messages import Job
from raysim.simulation.events import Round
from raysim.simulation.fleet import Lognormal
from raysim.simulation.jobs import JobRow, JobState, JobTable
from raysim.simulation.schedule import (
    Buffered,
    Deadline,
    Immediate,
    Oversample,
    Schedule,
    Synchronous,
)

SCHEDULES: dict[str, Schedule] = {
    "synchronous": Synchronous(4),
    "oversample": Oversample(3, 1.5),
    "deadline": Deadline(4, 0.15, "discard"),
    "buffered": Buffered(5, 2),
    "stale": Buffered(7, 2, max_staleness=1),
    "immediate": Immediate(4),
}
NEXT = {
    JobState.PLANNED: {
        JobState.DISPATCHED,
        JobState.IN_FLIGHT,
        JobState.LOST,
        JobState.DISCARDED,
    },
    JobState.DISPATCHED: {JobState.IN_FLIGHT, JobState.LOST, JobState.DISCARDED},
    JobState.IN_FLIGHT: {JobState.AGGREGATED, JobState.FAILED},
}
ENDS = {JobState.AGGREGATED, JobState.FAILED, JobState.LOST, JobState.DISCARDED}


def watch_states(table: JobTable) -> dict[int, list[JobState]]:
    """Return a dictionary that gets the states of each job, in order, while the run goes on.

    The keys are the numbers of the jobs.
    """
    states: dict[int, list[JobState]] = {}
    change = table._set_state

    def watched(row: JobRow, state: JobState) -> None:
        states.setdefault(row.job.number, [row.state]).append(state)
        change(row, state)

    table._set_state = watched  # type: ignore[method-assign]
    return states


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(0, 99), st.sampled_from([0.0, 0.3]))
def test_job_states_change_in_the_allowed_order_only(name: str, seed: int, dropout: float) -> None:
    counts = [3 + client for client in range(9)]
    coordinator, _, runtime = untrained_run(
        counts, SCHEDULES[name], Lognormal(dropout=dropout), seed=seed, rounds=6
    )
    states = watch_states(coordinator.jobs)
    records: list[Any] = []
    for event in coordinator.run():
        if isinstance(event, Round):
            records += event.jobs
        holding = (JobState.DISPATCHED, JobState.IN_FLIGHT)
        held = {row.job.version for row in coordinator.jobs.rows if row.state in holding}
        assert set(coordinator.versions.held_versions) == held
        assert held <= set(coordinator.versions) | {coordinator.server.version}
    for path in states.values():
        assert path[0] is JobState.PLANNED
        assert all(after in NEXT[before] for before, after in pairwise(path))
    ended = [path[-1] for path in states.values() if path[-1] in ENDS]
    recorded = [record.fate for record in records]
    assert {fate: ended.count(fate) for fate in ("aggregated", "failed")} == {
        fate: recorded.count(fate) for fate in ("aggregated", "failed")
    }
    trained = {number for number, path in states.items() if JobState.IN_FLIGHT in path}
    assert {job.number for job in runtime.jobs} <= trained
    assert len(coordinator.versions) == len(
        {*coordinator.versions.held_versions, coordinator.server.version}
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_job_is_queued_at_most_once_and_sent_at_most_once(name: str) -> None:
    coordinator, _, runtime = untrained_run([2] * 9, SCHEDULES[name], Lognormal(), rounds=12)
    queued: list[int] = []
    enqueue = coordinator.dispatcher.enqueue

    def watched(job: Any, aggregation: int) -> None:
        queued.append(job.number)
        enqueue(job, aggregation)

    coordinator.dispatcher.enqueue = watched  # type: ignore[method-assign]
    for _ in coordinator.run():
        pass
    sent = [job.number for job in runtime.jobs]
    assert len(set(queued)) == len(queued) and len(set(sent)) == len(sent)
    assert set(sent) <= set(queued)


def test_dispatch_of_a_job_sets_weight_probe_extras_replica_and_base_versions() -> None:
    job = Job(1, 2, 3, 4, 5, 6.0, False, {}, 7, 8.0, 9.0, False, 10.0, 11, 12, 13, 14, (15,))
    extras = {"method.tensor": np.ones(1)}
    expected = job._replace(weight=2.5, probe=True, extras=extras, replica=3, base=4, bases=(4, 5))
    assert job.dispatched(2.5, True, extras, 3, 4, (4, 5)) == expected
