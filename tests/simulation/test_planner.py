"""Test plans for random fleets and schedules, and how many operations the planner needs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings, strategies as st
from tiny_runs import TimedFleet, run_to_end, untrained_run

from raysim.primitives.kinds import FLOAT_BYTES
from raysim.simulation.availability import Diurnal, Intervals, MarkovAvailability
from raysim.simulation.fleet import Devices, Fate, Fixed, Fleet, Ideal, Lognormal, Speeds
from raysim.simulation.planner import Load, PlannedAggregation, Planner
from raysim.simulation.schedule import (
    Action,
    Aggregate,
    Buffered,
    Deadline,
    Discard,
    Dispatch,
    Immediate,
    Oversample,
    Schedule,
    Synchronous,
    Tiered,
    View,
    Wait,
)

CLIENTS = 12
caps = st.none() | st.integers(0, 4)
SCHEDULES: st.SearchStrategy[Schedule] = st.one_of(
    st.builds(Synchronous, st.integers(1, CLIENTS)),
    st.builds(Oversample, st.integers(1, 6), st.floats(1.0, 2.0)),
    st.builds(
        Deadline,
        st.integers(1, CLIENTS),
        st.floats(0.01, 3.0),
        st.sampled_from(["stale", "discard"]),
        caps,
    ),
    st.integers(1, CLIENTS).flatmap(
        lambda most: st.builds(Buffered, st.just(most), st.integers(1, most), caps)
    ),
    st.builds(Immediate, st.integers(1, CLIENTS), caps),
    st.builds(Tiered, st.integers(1, 3), st.integers(1, 4), caps),
)
CONDITIONS = {
    "availability": st.sampled_from(["always", "diurnal", "markov"]),
    "hours": st.floats(1, 24),
    "on": st.floats(20, 500),
    "off": st.floats(1, 100),
    "dropout": st.sampled_from([0.0, 0.3, 0.8]),
}
FLEETS: st.SearchStrategy[Fleet] = st.one_of(
    st.builds(Ideal, st.floats(5, 1000), **CONDITIONS),
    st.builds(Lognormal, st.floats(5, 1000), **CONDITIONS),
)
COUNTS = st.lists(st.integers(1, 50), min_size=CLIENTS, max_size=CLIENTS + 3)


def load(client: int, version: int, earlier: int, accepted: int) -> Load:
    return Load(5.0 + 3 * client, 100 + version, 10 + earlier)


def planner(schedule: Schedule, fleet: Fleet, seed: int, counts: Sequence[int]) -> Planner:
    return Planner(
        schedule, fleet.devices(seed, len(counts), lambda: 1.0), seed, np.asarray(counts), load
    )


def slow_devices(*receiving: float) -> Devices:
    """Return devices that train in no time, and send a float in 2 seconds.

    receiving: for each client, the seconds in which it receives a float.
    """
    training = np.full(len(receiving), np.inf)
    down = FLOAT_BYTES / np.array(receiving)
    up = np.full(len(receiving), FLOAT_BYTES / 2)
    return Fixed(Speeds(training, down, up), Fate())


def is_available(devices: Devices, client: int, now: float) -> bool:
    return devices.presence is None or devices.presence.available(client, now)


def steps(plan: Planner, count: int) -> list[PlannedAggregation]:
    """Plan `count` aggregations, and return them.

    If the random fleet loses all jobs, tell Hypothesis to skip the example.
    """
    try:
        return [plan.next_aggregation() for _ in range(count)]
    except ValueError as error:
        assert "jobs in a row were lost" in str(error)
        reject()


def test_schedule_receives_the_number_of_idle_clients() -> None:
    """A schedule receives the right number of idle clients.

    One of six clients has no samples and never counts as idle. In each decision, jobs in flight
    plus idle clients are 5. Decisions with 0, 3 and 4 jobs in flight occur.
    """
    seen = list[tuple[int, int]]()

    class Look(Buffered):
        def decide(self, view: View) -> Action:
            seen.append((len(view.running), view.idle))
            return super().decide(view)

    plan = planner(Look(4, 1), Ideal(), 0, [5, 0, 5, 5, 5, 5])
    plan.next_aggregation()
    plan.next_aggregation()
    assert {(0, 5), (4, 1), (3, 2)} <= {*seen} and all(
        running + idle == 5 for running, idle in seen
    )


@settings(deadline=None, max_examples=60)
@given(SCHEDULES, FLEETS, st.integers(0, 99), COUNTS)
def test_planned_jobs_end_once_and_time_never_decreases(
    schedule: Schedule, fleet: Fleet, seed: int, counts: list[int]
) -> None:
    plan = planner(schedule, fleet, seed, counts)
    result = steps(plan, 12)
    jobs = {job.number: job for step in result for job in step.dispatched}
    assert list(jobs) == list(range(len(jobs))), "numbered in the order of dispatch"

    ends: Counter[int] = Counter()
    for step in [*result, plan._next]:  # what is too old is thrown away right after an aggregation
        ends.update([job.number for job in (*step.aggregated, *step.lost, *step.discarded)])
    assert set(ends.values()) <= {1}, "no job ends twice"
    left = {*plan.running, *(job.number for job in plan.arrived)}
    assert ends.keys() | left >= jobs.keys() - {job.number for job in plan._next.dispatched}
    assert not ends.keys() & left

    times = [step.now for step in result]
    assert times == sorted(times)
    for version, step in enumerate(result):
        assert step.aggregated and step.version == version
        for job in step.dispatched:
            assert job.version == version and job.start <= step.now and job.finish >= job.start
        for job, staleness in zip(step.aggregated, step.staleness, strict=True):
            assert job == jobs[job.number]
            assert (
                job.arrives and job.finish <= step.now and staleness == version - job.version >= 0
            )
            assert schedule.max_staleness is None or staleness <= schedule.max_staleness
        assert not any(job.arrives for job in step.lost)

    for client in range(len(counts)):
        own = sorted(
            (job for job in jobs.values() if job.client == client), key=lambda job: job.number
        )
        assert all(before.finish <= after.start for before, after in pairwise(own)), "never twice"
        assert [job.participation for job in own] == list(range(len(own)))
    assert result[-1].down == sum(job.down for job in jobs.values())
    assert result[-1].up == sum(
        job.up for job in jobs.values() if job.arrives and job.finish <= result[-1].now
    )
    devices = fleet.devices(seed, len(counts), lambda: 1.0)
    assert all(is_available(devices, job.client, job.start) for job in jobs.values())


@settings(deadline=None, max_examples=60)
@given(SCHEDULES, FLEETS, st.integers(0, 99), COUNTS, st.integers(0, 8))
def test_restored_plan_continues_unchanged(
    schedule: Schedule, fleet: Fleet, seed: int, counts: list[int], at: int
) -> None:
    whole = planner(schedule, fleet, seed, counts)
    first = planner(schedule, fleet, seed, counts)
    expected = steps(whole, 12)
    steps(first, at)
    stored = json.loads(json.dumps(first.state()))
    again = planner(schedule, fleet, seed, counts)
    again.restore(stored, first.participations, first.accepted)
    assert steps(again, 12 - at) == expected[at:]


@settings(deadline=None, max_examples=25)
@given(SCHEDULES, FLEETS, st.integers(0, 9))
def test_executed_run_equals_its_plan(schedule: Schedule, fleet: Fleet, seed: int) -> None:
    counts = [3 + client for client in range(CLIENTS)]
    coordinator, ledger, runtime = untrained_run(counts, schedule, fleet, seed=seed, rounds=6)
    devices = fleet.devices(seed, CLIENTS, lambda: 1.0)
    expected = steps(
        Planner(schedule, devices, seed, np.asarray(counts), coordinator.planner._load), 6
    )
    result = run_to_end(coordinator)
    assert result.aggregations == expected
    assert ledger.cohorts == [[job.client for job in step.aggregated] for step in expected]
    assert ledger.staleness == [step.staleness for step in expected]
    assert {job.number for job in runtime.jobs} == {
        job.number for step in expected for job in step.aggregated
    }
    fates = Counter(end.fate for end in result.jobs)
    assert fates["lost"] == sum(len(step.lost) for step in expected)
    assert fates["discarded"] == sum(len(step.discarded) for step in expected)


def test_lost_job_frees_its_client_and_sends_nothing() -> None:
    plan = planner(Immediate(3), Ideal(dropout=0.5), 1, [5] * 6)
    result = steps(plan, 60)
    jobs = {job.number: job for step in result for job in step.dispatched}
    lost = [job for step in result for job in step.lost]
    assert 30 < len(lost) < 100, "about as many as come back"
    assert all(job.finish < job.start + load(job.client, 0, 0, 0).work / 1000 for job in lost)
    assert result[-1].up == sum(
        job.up for job in jobs.values() if job.arrives and job.finish <= plan.now
    )


def test_job_is_lost_when_its_client_becomes_unavailable() -> None:
    # Away half of the time, in stretches that are as long as a job.
    fleet = Ideal(speed=1.0, availability="markov", on=20.0, off=20.0)
    result = steps(planner(Synchronous(4), fleet, 0, [5] * 12), 30)
    devices = fleet.devices(0, 12, lambda: 1.0)
    lost = [job for step in result for job in step.lost]
    assert lost
    for job in lost:
        assert not is_available(devices, job.client, job.finish)
        assert is_available(devices, job.client, job.finish - 1e-6)


def test_round_dispatches_all_available_clients_if_they_are_few() -> None:
    fleet = Ideal(availability="diurnal", hours=4.0)
    plan = planner(Synchronous(12), fleet, 3, [5] * 12)
    first = plan.next_aggregation()
    devices = fleet.devices(3, 12, lambda: 1.0)
    expected = [
        client for client in range(12) if is_available(devices, client, first.dispatched[0].start)
    ]
    assert [job.client for job in first.dispatched] == expected
    assert 0 < len(first.aggregated) < 12


def test_plan_is_refused_if_no_client_is_available_within_fleet_patience() -> None:
    class Late(Fleet):
        speeds = Ideal().speeds

        def presence(self, seed: int, clients: int) -> Diurnal:
            return Diurnal(np.full(clients, 7), hours=1.0)

    with pytest.raises(ValueError, match=r"fleet: .* 25,200 s\. .*fleet\.patience"):
        Planner(
            Synchronous(2), Late().devices(0, 4, lambda: 1.0), 0, np.array([1] * 4), load, 3600.0
        ).next_aggregation()
    waited = Planner(
        Synchronous(2), Late().devices(0, 4, lambda: 1.0), 0, np.array([1] * 4), load, 86400.0
    ).next_aggregation()
    assert waited.dispatched[0].start == 7 * 3600.0


# --- schedules of one's own -----------------------------------------------------------------------
@dataclass(frozen=True)
class Script:
    """A schedule that dispatches clients, waits for the first arrival, and takes `action`.

    concurrency: the number of clients to dispatch.
    size, max_staleness, pools, stale: attributes that raysim reads from each schedule.
    """

    action: Action
    concurrency: int = 3
    size: int = 3
    max_staleness: int | None = None
    pools: int = 0
    stale: bool = True

    def decide(self, view: View) -> Action:
        if not view.sent:
            return Dispatch(self.concurrency)
        return Wait() if not view.arrived else self.action


@pytest.mark.parametrize(
    ("action", "value"),
    [
        (Aggregate([]), r"Aggregate\(\[\]\)"),
        (Aggregate([0, 0]), r"Aggregate\(\[0, 0\]\)"),
        (Aggregate([7]), r"Aggregate with jobs \[7\]"),
        (Discard([]), r"Discard\(\[\]\)"),
        (Discard([9]), r"Discard with jobs \[9\]"),
        (None, "None"),
    ],
)
def test_invalid_decision_of_a_schedule_is_refused(action: Any, value: str) -> None:
    with pytest.raises(RuntimeError, match=f"schedule Script: decide returned {value}"):
        planner(Script(action), Ideal(), 0, [5] * 4).next_aggregation()


def test_schedule_is_refused_if_the_schedule_waits_without_a_job_in_flight() -> None:
    @dataclass(frozen=True)
    class Idle(Script):
        def decide(self, view: View) -> Action:
            return Wait()

    with pytest.raises(RuntimeError, match=r"^schedule Idle: decide returned Wait"):
        planner(Idle(Wait()), Ideal(), 0, [5] * 4).next_aggregation()


def test_schedule_cannot_aggregate_jobs_of_a_client_out_of_order() -> None:
    @dataclass(frozen=True)
    class Newest(Script):
        """A schedule that dispatches single clients and aggregates the last of five arrivals."""

        def decide(self, view: View) -> Action:
            if len(view.arrived) >= 5:
                return Aggregate([view.arrived[-1].number])
            return Dispatch(1) if not view.running else Wait()

    with pytest.raises(RuntimeError, match="job 4 of client 0"):
        planner(Newest(Wait(), concurrency=1), Ideal(), 0, [5]).next_aggregation()


def test_discarded_job_no_longer_counts_in_its_pool() -> None:
    seen: list[tuple[int, ...]] = []

    @dataclass(frozen=True)
    class DiscardFirst(Script):
        """A schedule with two pools that discards its first job and aggregates its last one."""

        def decide(self, view: View) -> Action:
            seen.append(tuple(view.in_pool))
            if view.sent < 3:
                return Dispatch(1, pool=int(view.sent == 2))
            if 0 in view.running:
                return Discard([0])
            return Aggregate([2]) if any(job.number == 2 for job in view.arrived) else Wait()

    plan = planner(DiscardFirst(Wait(), pools=2), Ideal(), 0, [5] * 6).next_aggregation()
    assert [job.number for job in plan.discarded] == [0]
    assert seen[:5] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1)]
    assert seen[-1] == (0, 0)


# --- virtual time by pencil -----------------------------------------------------------------------


def test_virtual_time_equals_a_computation_by_hand() -> None:
    # Two at a time of three clients that need 1, 2 and 4 seconds; who is drawn is up to the seed.
    coordinator, _, _ = untrained_run([2] * 3, Immediate(3), TimedFleet((1.0, 2.0, 4.0)), rounds=7)
    result = run_to_end(coordinator)
    assert [row["virtual_seconds"] for row in result.rows] == [1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert [end.client for end in result.jobs] == [0, 0, 1, 0, 0, 1, 2]
    # A job's base version is the number of arrivals before its dispatch; at t=2 client 0 came
    # first.
    assert [end.version for end in result.jobs] == [0, 1, 0, 3, 4, 3, 0]
    assert [end.staleness for end in result.jobs] == [0, 0, 2, 0, 0, 2, 6]


def test_memory_of_planning_does_not_grow_with_the_population() -> None:
    import tracemalloc

    plan = planner(
        Buffered(50, 10), Lognormal(availability="markov", on=600, off=600), 0, [1] * 1_000_000
    )
    plan.next_aggregation()
    tracemalloc.start()
    try:
        steps(plan, 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert plan.dispatched >= 200
    assert peak < 1_000_000, "a single array over the clients takes 4 MB"


def operations(plan: Planner, count: int) -> float:
    """Plan `count` aggregations; return the mean number of bytecode operations per job."""
    made = 0

    def each(frame: Any, event: str, arg: Any) -> Any:
        nonlocal made
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        made += event == "opcode"
        return each

    before, earlier = plan.dispatched, sys.gettrace()
    sys.settrace(each)
    try:
        for _ in range(count):
            plan.next_aggregation()
    finally:
        sys.settrace(earlier)
    return made / (plan.dispatched - before)


@pytest.mark.parametrize(
    "make",
    [Immediate, lambda most: Buffered(most, 10), lambda most: Buffered(most, 10, 3)],
    ids=["immediate", "buffered", "at most three stale"],
)
def test_number_of_planner_operations_does_not_grow_with_jobs_in_flight(make: Any) -> None:
    def cost(most: int) -> float:
        plan = planner(make(most), Lognormal(dropout=0.1), 0, [1] * 20_000)
        plan.next_aggregation()
        return operations(plan, 50)

    few, many = cost(50), cost(2_000)
    assert many < 1.5 * few


class Counted(MarkovAvailability):
    """A Markov availability that counts queries. A call for n clients counts as n queries."""

    looks = 0

    def available(self, client: int, now: float) -> bool:
        self.looks += 1
        return super().available(client, now)

    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        self.looks += len(clients)
        return super().are_available(clients, now)

    def _places(self, clients: np.ndarray, step: int) -> np.ndarray:
        self.looks += len(clients)
        return super()._places(clients, step)


@pytest.mark.parametrize(
    "schedule",
    [
        Synchronous(50),
        Oversample(50),
        Deadline(50, 5.0),
        Buffered(50, 10),
        Immediate(50),
        Tiered(5, 10),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_planning_needs_few_operations_if_few_clients_are_available(
    schedule: Schedule,
) -> None:
    @dataclass(frozen=True)
    class Scarce(Ideal):
        def presence(self, seed: int, clients: int) -> Counted:
            return Counted(seed, clients, 600.0, 600.0 * clients / 20)  # some twenty are there

    devices = Scarce(speed=1.0).devices(0, 100_000, lambda: 1.0)
    plan = Planner(
        schedule,
        devices,
        0,
        np.ones(100_000, int),
        lambda client, *_: Load(5.0 + client % 10, 1, 1),
    )
    plan.next_aggregation()
    presence: Any = plan.devices.presence
    presence.looks, before = 0, plan.dispatched
    steps(plan, 60)
    assert plan.dispatched - before >= 30
    assert presence.looks < 30 * (plan.dispatched - before), "of a hundred thousand"


def tiers(slow: float, fast: float, schedule: Schedule | None = None) -> Planner:
    """Return a planner for four clients that become available at different times.

    slow: the second from which clients 0 and 1 are available; their jobs take 4 s.
    fast: the second from which clients 2 and 3 are available; their jobs take 1 s.
    schedule: None means `Tiered(2, 2)`, with one tier for each of these pairs.
    """

    @dataclass(frozen=True)
    class Late(TimedFleet):
        def devices(self, seed: int, clients: int, sample_flops: Any) -> Any:
            devices: Any = super().devices(seed, clients, sample_flops)
            bounds = np.array([slow, 1e6] * 2 + [fast, 1e6] * 2)
            devices.presence = Intervals(
                bounds, np.arange(0, 9, 2), np.full(4, 1e6), np.arange(4), wrap=False
            )
            return devices

    late = Late(seconds=(4.0, 4.0, 1.0, 1.0))
    return planner(schedule or Tiered(2, 2), late, 0, [1] * 4)


def test_pool_without_available_clients_does_not_block_other_pools() -> None:
    result = steps(tiers(0.0, 5e5), 3)
    assert [[job.client for job in step.dispatched] for step in result] == [[0, 1]] * 3
    assert [step.now for step in result] == [4.0, 8.0, 12.0]


def test_first_jobs_are_dispatched_when_clients_of_any_pool_become_available() -> None:
    (first,) = steps(tiers(30.0, 5e5), 1)
    assert ([job.client for job in first.dispatched], first.now) == ([0, 1], 34.0)


def test_planner_tries_pools_without_clients_again_after_each_aggregation() -> None:
    first_view: dict[int, list[int]] = {}  # by version: the tiers without clients

    class Watched(Tiered):
        def decide(self, view: View) -> Action:
            first_view.setdefault(view.version, sorted(view.short))
            return super().decide(view)

    steps(tiers(0.0, 5e5, Watched(2, 2)), 3)
    assert first_view == {0: [], 1: [], 2: []}


PLANS: dict[str, tuple[Schedule, Fleet]] = {
    "deadline, drop-outs": (Deadline(4, 0.05), Lognormal(200.0, dropout=0.3)),
    "tiers, zones": (Tiered(2, 2), Lognormal(200.0, availability="diurnal", hours=12.0)),
    "buffer, on and off": (
        Buffered(5, 2),
        Ideal(50.0, availability="markov", on=30.0, off=10.0, dropout=0.2),
    ),
}
CROWD = 64  # a cohort for which numbers are drawn by a generator; one fewer has each by itself


# By aggregation: when, which clients are sent off, which jobs are taken, which are lost.
KNOWN: dict[str, list[tuple[float, list[int], list[int], list[int]]]] = {
    "deadline, drop-outs": [
        (0.05, [0, 2, 9, 10], [1, 0], []),
        (0.228849, [5, 6, 7, 8], [2], [5, 4]),
        (0.278849, [0, 4, 9, 11], [8, 6], []),
        (0.328849, [0, 1, 2, 6], [12, 13], [14, 9]),
        (0.378849, [0, 2, 3, 4], [17, 16], [18, 19]),
    ],
    "tiers, zones": [
        (0.075315, [0, 4, 9, 11], [0, 1], []),
        (0.150635, [0, 4], [4, 5], []),
        (0.225961, [0, 4], [6, 7], []),
        (0.301293, [0, 4], [8, 9], []),
        (0.37663, [0, 4], [10, 11], []),
    ],
    "buffer, on and off": [
        (0.52, [2, 5, 6, 7, 10, 9, 3, 5, 3, 4], [0, 3], [1, 2, 6, 8]),
        (0.6189, [2, 5], [7, 9], []),
        (0.713706, [7, 3], [4, 5], []),
        (0.98, [6, 10], [10, 13], []),
        (1.173706, [3, 2, 4], [11, 14], [12]),
    ],
}


@pytest.mark.parametrize("name", PLANS)
def test_planner_with_a_fixed_seed_plans_the_stored_jobs_and_aggregations(name: str) -> None:
    schedule, fleet = PLANS[name]
    plan = planner(schedule, fleet, 7, range(1, CLIENTS + 1))
    result = [
        (
            round(step.now, 6),
            [job.client for job in step.dispatched],
            [job.number for job in step.aggregated],
            [job.number for job in step.lost],
        )
        for step in (plan.next_aggregation() for _ in range(5))
    ]
    assert result == KNOWN[name]


def test_tiered_schedule_groups_clients_by_the_duration_of_their_first_job() -> None:
    counts = [9, 1, 8, 2, 7, 3]
    devices = Ideal(10.0).devices(0, 6, lambda: 1.0)

    def work(client: int, version: int, earlier: int, accepted: int) -> Load:
        return Load(
            20.0 - counts[client] if version or earlier or accepted else counts[client], 0, 0
        )

    plan = Planner(Tiered(2, 3), devices, 0, np.asarray(counts), work)
    result = [step.dispatched for step in steps(plan, 4)]
    assert {job.client for jobs in result for job in jobs if job.pool == 0} == {1, 3, 5}
    assert {job.client for jobs in result for job in jobs if job.pool == 1} <= {0, 2, 4}


def test_tiered_schedule_groups_clients_by_their_own_traffic() -> None:
    floats = [9, 1, 8, 2, 7, 3]
    devices = slow_devices(1, 1, 1, 1, 1, 1)

    def traffic(client: int, version: int, earlier: int, accepted: int) -> Load:
        return Load(1.0, floats[client], 1)

    plan = Planner(Tiered(2, 3), devices, 0, np.full(6, 5), traffic)
    jobs = [job for step in steps(plan, 4) for job in step.dispatched]
    assert {job.client for job in jobs if job.pool == 0} == {1, 3, 5}


def test_lost_jobs_stop_a_run_only_if_they_are_consecutive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raysim.simulation.planner.MAX_CONSECUTIVE_LOST_JOBS", 12)
    plan = planner(Immediate(4), Ideal(50.0, dropout=0.3), 0, [1] * CLIENTS)
    result = steps(plan, 200)
    assert sum(len(step.lost) for step in result) > 40
    hopeless = planner(Immediate(4), Ideal(50.0, dropout=0.999), 0, [1] * CLIENTS)
    with pytest.raises(ValueError, match="12 jobs in a row were lost"):
        hopeless.next_aggregation()


def test_restored_plan_continues_unchanged_if_few_clients_are_available() -> None:
    counts = [1] * 4000
    fleet = Ideal(50.0, availability="markov", on=100.0, off=50_000.0, dropout=0.1)
    straight, stopped = (planner(Buffered(6, 3), fleet, 3, counts) for _ in range(2))
    steps(straight, 5), steps(stopped, 5)
    state = json.loads(json.dumps(stopped.state()))
    assert state["scarce"], "or this shows nothing"
    again = planner(Buffered(6, 3), fleet, 3, counts)
    again.restore(state, stopped.participations, stopped.accepted)
    assert steps(again, 20) == steps(straight, 20)


@pytest.mark.parametrize(
    ("cohort", "clients"),
    [(CROWD - 1, [11, 45, 47, 52, 44, 52, 56, 61]), (CROWD, [19, 36, 46, 71, 12, 17, 18, 21])],
)
def test_large_cohort_of_a_fixed_seed_equals_stored_clients(
    cohort: int, clients: list[int]
) -> None:
    plan = planner(
        Synchronous(cohort), Ideal(availability="markov", on=3e5, off=3e4), 7, [1] * 1000
    )
    first, second = ([job.client for job in step.dispatched] for step in steps(plan, 2))
    assert len(first) == len(second) == cohort and [*first[:4], *second[:4]] == clients


def test_plan_counts_dispatched_and_aggregated_jobs_of_each_client() -> None:
    plan = planner(Buffered(5, 3), Lognormal(dropout=0.3), 0, [1] * CLIENTS)
    result = steps(plan, 12)
    clients = {job.number: job.client for step in result for job in step.dispatched}
    sent, taken = (
        Counter(clients.values()),
        Counter(job.client for step in result for job in step.aggregated),
    )
    ahead = Counter(job.client for job in plan.running.values() if job.number not in clients)
    assert plan.participations.tolist() == [
        sent[client] + ahead[client] for client in range(CLIENTS)
    ]
    assert (
        plan.accepted.tolist() == [taken[client] for client in range(CLIENTS)]
        and sum(taken.values()) == 36
    )
