"""Test the decisions of each schedule, and the order of events in runs with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tiny_runs import TimedFleet, equal_clients, run, run_spec, run_to_end, untrained_run

from raysim.api.declarations import Evaluation
from raysim.api.messages import Job
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Ideal, Lognormal
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


def job(number: int, version: int = 0, pool: int = -1) -> Job:
    return Job(number, number, 0, version, pool=pool, finish=1.0, work=1.0, down=1, up=1)


def view(running: int = 0, arrived: tuple[int, ...] = (), idle: int = 9, **others: Any) -> View:
    """Return what a schedule sees at one moment.

    running: the number of jobs in flight; their numbers are 100, 101, ...
    arrived: the numbers of the jobs that have arrived.
    idle: the number of idle clients.
    """
    jobs = {100 + index: job(100 + index) for index in range(running)}
    return View(running=jobs, arrived=[job(number) for number in arrived], idle=idle, **others)


@dataclass
class Watched:
    """A schedule that decides like another one, and records what it sees and decides.

    schedule: the other schedule.
    log: for each decision, the view and the action.
    """

    schedule: Any
    log: list[tuple[View, Action]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)

    def decide(self, view: View) -> Action:
        action = self.schedule.decide(view)
        seen = view._replace(
            running=dict(view.running), arrived=list(view.arrived), in_pool=list(view.in_pool)
        )
        self.log.append((seen, action))
        return action


# --- decisions ------------------------------------------------------------------------------------
DECISIONS: list[tuple[Schedule, View, Action]] = [
    (Synchronous(3), view(), Dispatch(3)),
    (Synchronous(3), view(3), Wait()),
    (Synchronous(3), view(1, (4, 5)), Wait()),
    (Synchronous(3), view(0, (5, 3, 4)), Aggregate([5, 3, 4])),
    (Synchronous(3), view(0, (5,)), Aggregate([5])),  # the others were lost
    (Oversample(10), view(), Dispatch(13)),
    (Oversample(2, 1.5), view(2, (4,)), Wait()),
    (Oversample(2, 1.5), view(1, (4, 5)), Discard([100])),
    (Oversample(2, 1.5), view(1, (4, 5, 6)), Discard([100, 6])),
    (Oversample(2, 1.5), view(0, (4, 5)), Aggregate([4, 5])),
    (Oversample(2, 1.5), view(0, (4,)), Aggregate([4])),
    (Deadline(3, 10.0), view(), Dispatch(3)),
    (Deadline(3, 10.0), view(idle=2), Dispatch(2)),
    (Deadline(3, 10.0), view(2, (4,), sent=3, now=7.0, since=2.0), Wait(12.0)),
    (Deadline(3, 10.0), view(2, (4,), sent=3, now=12.0, since=2.0), Aggregate([4])),
    (Deadline(3, 10.0, "discard"), view(2, (4,), sent=3, now=12.0, since=2.0), Discard([100, 101])),
    (Deadline(3, 10.0, "discard"), view(0, (4,), sent=3, now=12.0, since=2.0), Aggregate([4])),
    (Deadline(3, 10.0), view(2, sent=3, now=12.0, since=2.0), Wait()),
    (Deadline(3, 10.0), view(0, (4, 5), sent=2, now=5.0, since=2.0), Aggregate([4, 5])),
    (Deadline(3, 10.0), view(sent=3, now=5.0, since=2.0), Dispatch(3)),  # all were lost
    (Buffered(4, 2), view(), Dispatch(4)),
    (Buffered(4, 2), view(4), Wait()),
    (Buffered(4, 2), view(3, (8,)), Dispatch(1)),
    (Buffered(4, 2), view(3, (8,), idle=0), Wait()),
    (Buffered(4, 2), view(1, (8,), idle=2), Dispatch(2)),
    (Buffered(4, 2), view(2, (8, 7)), Aggregate([8, 7])),
    (Buffered(4, 2), view(1, (8, 7, 6)), Aggregate([8, 7])),
    (Immediate(4), view(3, (8, 7)), Aggregate((8,))),
    (Immediate(4), view(3), Dispatch(1)),
    (Immediate(4), view(4), Wait()),
    (Tiered(2, 3), view(in_pool=[0, 0]), Dispatch(3, 0)),
    (Tiered(2, 3), view(3, in_pool=[3, 0]), Dispatch(3, 1)),
    (Tiered(2, 3), view(6, in_pool=[3, 3]), Wait()),
]


@pytest.mark.parametrize(("schedule", "seen", "action"), DECISIONS, ids=lambda value: "")
def test_schedule_decides_the_action_that_is_listed_for_each_situation(
    schedule: Schedule, seen: View, action: Action
) -> None:
    assert schedule.decide(seen) == action


def test_schedules_declare_whether_updates_can_be_stale() -> None:
    fresh = [Synchronous(3), Oversample(3), Deadline(3, 1.0, "discard")]
    stale = [Deadline(3, 1.0), Buffered(4, 2), Immediate(4), Tiered(2, 3)]
    assert [schedule.stale for schedule in (*fresh, *stale)] == [False] * 3 + [True] * 4


def test_schedule_view_has_zero_or_empty_fields_by_default() -> None:
    assert View() == View(0.0, 0, {}, (), 0, 0, 0.0, (), ())


def test_tiered_schedule_aggregates_only_jobs_of_the_same_pool() -> None:
    arrived = [job(7, pool=1), job(8, pool=0), job(9, pool=1)]
    assert Tiered(2, 3).decide(View(arrived=arrived, in_pool=[2, 0])) == Aggregate([7, 9])


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda: Synchronous(0), "cohort=0"),
        (lambda: Buffered(0, 1), "concurrency=0"),
        (lambda: Buffered(1, -2), "size=-2"),
        (lambda: Buffered(2, 1, -1), "max_staleness=-1"),
        (lambda: Immediate(0), "concurrency=0"),
        (lambda: Oversample(0), "cohort=0"),
        (lambda: Oversample(3, 0.9), "factor=0.9"),
        (lambda: Deadline(0, 1.0), "cohort=0"),
        (lambda: Deadline(3, 0.0), "seconds=0.0"),
        (lambda: Deadline(3, float("nan")), "seconds=nan"),
        (lambda: Deadline(3, 1.0, "later"), "late='later'"),
        (lambda: Tiered(0, 1), "tiers=0"),
    ],
)
def test_schedule_values_out_of_range_are_refused(make: Callable[[], object], value: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"schedule.{value}")):
        make()


@pytest.mark.parametrize(
    ("schedule", "value", "largest"),
    [
        (Synchronous(5), "cohort=5", "cohort=3"),
        (Buffered(5, 1), "concurrency=5", "concurrency=3"),
        (Immediate(4), "concurrency=4", "concurrency=3"),
        (Oversample(3, 1.5), "cohort=3", "cohort=1"),
        (Tiered(2, 2), "cohort=2", "cohort=1"),
    ],
)
def test_error_suggests_the_largest_value_if_a_schedule_needs_too_many_clients(
    schedule: Schedule, value: str, largest: str
) -> None:
    with pytest.raises(ValueError, match=rf"schedule\.{value} .* schedule\.{largest} "):
        untrained_run([2, 2, 0, 2], schedule)


@pytest.mark.parametrize("schedule", [Tiered(4, 1), Oversample(1, 3.1)])
def test_error_suggests_no_cohort_if_even_cohort_1_needs_too_many_clients(
    schedule: Schedule,
) -> None:
    with pytest.raises(ValueError, match=r"schedule\.cohort=1 needs 4 clients") as refused:
        untrained_run([2, 2, 0, 2], schedule)
    assert "Set schedule.cohort" not in str(refused.value)


# --- virtual time ---------------------------------------------------------------------------------


def test_updates_are_aggregated_in_the_order_of_virtual_time() -> None:
    coordinator, ledger, _ = untrained_run(
        [2] * 5, Synchronous(5), TimedFleet((3.0, 1.0, 2.0, 1.0, 2.0)), rounds=2
    )
    result = run_to_end(coordinator)
    assert ledger.cohorts == [[1, 3, 2, 4, 0]] * 2
    assert [row["virtual_seconds"] for row in result.rows] == [3.0, 6.0]


def test_jobs_that_end_at_the_same_time_are_ordered_by_client() -> None:
    fleet = TimedFleet((2.0, 1.0, 1.0, 1.0, 1.0, 2.0))
    coordinator, ledger, _ = untrained_run([2] * 6, Immediate(2), fleet, rounds=60)
    result = run_to_end(coordinator)
    ends = [(end.finish, end.client) for end in result.jobs]
    assert ends == sorted(ends), "time first, then the client's id"
    assert [end.client for end in result.jobs] == [client for (client,) in ledger.cohorts]
    number = {
        (job.client, job.participation): job.number
        for each in result.aggregations
        for job in each.dispatched
    }
    taken = [number[end.client, end.participation] for end in result.jobs]
    ties = [i for i in range(59) if ends[i][0] == ends[i + 1][0] and taken[i] > taken[i + 1]]
    assert ties, "a job overtook another one of its instant that was dispatched earlier"


def test_schedule_decides_after_all_jobs_that_end_at_the_same_time() -> None:
    watched = Watched(Buffered(concurrency=4, size=2))
    coordinator, ledger, _ = untrained_run([2] * 6, watched, TimedFleet((1.0,) * 6), rounds=4)  # type: ignore[arg-type]
    run_to_end(coordinator)
    views = [view for view, _ in watched.log]
    first = next(view for view in views if view.arrived)
    assert (len(first.running), len(first.arrived)) == (0, 4)
    actions = [type(action).__name__ for _, action in watched.log[:6]]
    assert actions == ["Dispatch", "Wait", "Aggregate", "Aggregate", "Dispatch", "Wait"]
    assert all(len(cohort) == 2 for cohort in ledger.cohorts)


def test_staleness_includes_aggregations_that_happen_while_an_update_waits() -> None:
    # Four arrive in one instant and fill two buffers: the second one adds to a newer version than
    # the first.
    coordinator, ledger, _ = untrained_run(
        [2] * 6, Buffered(concurrency=4, size=2), TimedFleet((1.0,) * 6), rounds=4
    )
    result = run_to_end(coordinator)
    assert ledger.staleness == [[0, 0], [1, 1]] * 2
    assert [row["staleness"] for row in result.rows] == [0.0, 1.0, 0.0, 1.0]
    assert [row["staleness_max"] for row in result.rows] == [0, 1, 0, 1]


def test_update_of_a_slow_client_is_aggregated_with_staleness_4() -> None:
    coordinator, ledger, _ = untrained_run(
        [2] * 6, Buffered(concurrency=6, size=5), TimedFleet((1.0,) * 5 + (4.5,)), rounds=6
    )
    run_to_end(coordinator)
    late = [
        (version, stale)
        for version, (cohort, staleness) in enumerate(
            zip(ledger.cohorts, ledger.staleness, strict=True)
        )
        for client, stale in zip(cohort, staleness, strict=True)
        if client == 5
    ]
    assert late == [(4, 4)]
    assert {stale for staleness in ledger.staleness[:4] for stale in staleness} == {0}


def test_too_stale_jobs_are_never_trained() -> None:
    fleet = TimedFleet((1.0,) * 5 + (4.5,))
    coordinator, ledger, runtime = untrained_run(
        [2] * 6, Buffered(6, 5, max_staleness=3), fleet, rounds=12
    )
    result = run_to_end(coordinator)
    gone = [end for end in result.jobs if end.fate == "discarded"]
    assert gone and {end.client for end in gone} == {5}
    assert not any(5 in cohort for cohort in ledger.cohorts)
    assert 5 not in {job.client for job in runtime.jobs}
    assert sum(row["discarded"] for row in result.rows) == len(gone)  # type: ignore[misc]


def test_oversampled_round_ends_with_its_fastest_clients() -> None:
    seconds = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    coordinator, ledger, runtime = untrained_run(
        [2] * 6, Oversample(2, 1.5), TimedFleet(seconds), rounds=40
    )
    result = run_to_end(coordinator)
    assert all(len(cohort) == 2 and cohort == sorted(cohort) for cohort in ledger.cohorts)
    assert len(runtime.jobs) == 80, "nothing else is trained"
    assert [row["discarded"] for row in result.rows] == [1] * 40
    first, _ = result.aggregations[:2]
    ends = sorted(job.finish for job in first.dispatched)
    assert first.now == ends[1], "it ends when the second is back"
    busy = next(job for job in first.dispatched if job.finish == ends[2])
    again = [end for end in result.jobs if end.client == busy.client][1]
    assert again.start >= busy.finish, "the third works to its end and is not sent off before"
    starts = {job.number: job for each in result.aggregations for job in each.dispatched}
    down = sum(job.down for job in starts.values())
    assert result.rows[-1]["floats_down"] == down, "what was thrown away was sent all the same"
    up = sum(job.up for job in starts.values() if job.finish <= result.aggregations[-1].now)
    assert result.rows[-1]["floats_up"] == up


@pytest.mark.parametrize("late", ["stale", "discard"])
def test_deadline_ends_a_synchronous_round(late: str) -> None:
    seconds = (1.0, 1.5, 2.0, 5.5, 9.0)
    coordinator, ledger, _ = untrained_run(
        [2] * 5, Deadline(5, 2.0, late), TimedFleet(seconds), rounds=5
    )
    result = run_to_end(coordinator)
    assert [row["virtual_seconds"] for row in result.rows] == [2.0, 4.0, 6.0, 8.0, 10.0]
    # Client 3 is late by two rounds, client 4 by four; both are sent off again when a round begins.
    quick = [0, 1, 2]
    cohorts = [sorted(cohort) for cohort in ledger.cohorts]
    if late == "discard":
        assert cohorts == [quick] * 5
    else:
        assert cohorts == [quick, quick, [*quick, 3], quick, [*quick, 4]]
        assert ledger.staleness[2][ledger.cohorts[2].index(3)] == 2


def test_deadline_without_any_update_is_extended_to_the_first_update() -> None:
    coordinator, ledger, _ = untrained_run(
        [2] * 3, Deadline(3, 2.0, "discard"), TimedFleet((5.0, 6.0, 7.0)), rounds=1
    )
    result = run_to_end(coordinator)
    assert ledger.cohorts == [[0]] and result.rows[0]["virtual_seconds"] == 5.0


def test_tiered_schedule_has_separate_rounds_for_fast_and_slow_clients() -> None:
    seconds = (1.0, 1.0, 1.0, 3.0, 3.0, 3.0)
    coordinator, ledger, _ = untrained_run([2] * 6, Tiered(2, 2), TimedFleet(seconds), rounds=8)
    result = run_to_end(coordinator)
    of_fast = [set(cohort) <= {0, 1, 2} for cohort in ledger.cohorts]
    assert of_fast == [True, True, True, False, True, True, True, False], "three rounds for one"
    assert all(
        of or set(cohort) <= {3, 4, 5} for of, cohort in zip(of_fast, ledger.cohorts, strict=True)
    )
    assert [row["virtual_seconds"] for row in result.rows] == [
        1.0,
        2.0,
        3.0,
        3.0,
        4.0,
        5.0,
        6.0,
        6.0,
    ]
    assert ledger.staleness[3] == [3, 3]


def test_buffered_updates_are_aggregated_exactly_once() -> None:
    coordinator, ledger, runtime = untrained_run(
        [2] * 9, Buffered(concurrency=5, size=3), Lognormal(), rounds=30
    )
    result = run_to_end(coordinator)
    assert [len(cohort) for cohort in ledger.cohorts] == [3] * 30
    assert len(runtime.jobs) == 90, "what is under way at the end is not trained"
    assert [row["round"] for row in result.rows] == list(range(1, 31))
    times = [row["virtual_seconds"] for row in result.rows]
    assert times == sorted(times)  # type: ignore[type-var]


def test_buffered_schedule_equals_synchronous_if_the_buffer_holds_all_clients() -> None:
    settings = {"rounds": 4, "weighting": "uniform"}
    rounds = run(run_spec(data=equal_clients()), Synchronous(3), Ideal(), **settings)
    buffered = run(
        run_spec(data=equal_clients()), Buffered(concurrency=3, size=3), Ideal(), **settings
    )
    assert rounds.bits == buffered.bits


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [Synchronous(4), Buffered(concurrency=4, size=2), Immediate(4)]
)
def test_clients_are_drawn_with_equal_probability(schedule: Schedule) -> None:
    counts = [2, 0, 2, 2, 2, 2, 0, 2, 2]
    coordinator, _, runtime = untrained_run(counts, schedule, Ideal(), rounds=900)
    run_to_end(coordinator)
    share = np.bincount([job.client for job in runtime.jobs], minlength=9) / len(runtime.jobs)
    assert not share[[1, 6]].any()
    assert np.abs(share[np.flatnonzero(counts)] - 1 / 7).max() < 0.05, (
        "four standard deviations of 900 draws"
    )


def test_only_idle_clients_are_drawn() -> None:
    fleet = TimedFleet((1.0, 1.1, 1.2, 1.3))
    coordinator, _, _ = untrained_run([2] * 4, Immediate(4), fleet, rounds=50)
    result = run_to_end(coordinator)
    dispatched = [job.client for each in result.aggregations for job in each.dispatched]
    assert dispatched[4:] == [end.client for end in result.jobs[:49]]


def test_cohorts_do_not_depend_on_the_method() -> None:
    ways = []
    for methods in ([], [Scaffold()]):
        result = run(
            run_spec(*methods, data=equal_clients()),
            Synchronous(2),
            Ideal(),
            rounds=4,
            evaluate=Evaluation(every=9),
        )
        ways.append(result.participations)
    assert ways[0] == ways[1]
    assert len(ways[0]) > 2


def test_order_of_events_depends_on_the_seed_only() -> None:
    orders = []
    for seed in (1, 1, 2):
        coordinator, ledger, _ = untrained_run(
            [2] * 20, Buffered(concurrency=6, size=3), Lognormal(), seed=seed, rounds=10
        )
        run_to_end(coordinator)
        orders.append(ledger.cohorts)
    assert orders[0] == orders[1] != orders[2]
