"""When to dispatch and when to aggregate, on virtual time alone; nothing is trained here."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from tiny_runs import even, ran, run, run_spec, silent

from raysim.api.declarations import Evaluation
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.schedule import Action, Aggregate, Buffered, Dispatch, Synchronous, View, Wait


@dataclass(frozen=True)
class Clock:
    """A fleet whose client k needs `seconds[k]`, however much it has to do."""

    seconds: tuple[float, ...]

    def duration(self, seed: int, client: int, samples: float, down: int, up: int) -> float:
        return self.seconds[client]


@dataclass
class Watched:
    """A schedule that writes down what it saw and what it did."""

    schedule: Synchronous | Buffered
    log: list[tuple[View, Action]] = field(default_factory=list)

    @property
    def concurrency(self) -> int:
        return self.schedule.concurrency

    @property
    def size(self) -> int:
        return self.schedule.size

    def decide(self, view: View) -> Action:
        self.log.append((view, self.schedule.decide(view)))
        return self.log[-1][1]


# --- decisions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "action"),
    [
        (View(0, (), 9), Dispatch(3)),
        (View(3, (), 6), Wait()),
        (View(1, (4, 5), 8), Wait()),
        (View(0, (5, 3, 4), 9), Aggregate((5, 3, 4))),
    ],
)
def test_rounds_wait_for_the_whole_cohort(view: View, action: Action) -> None:
    assert Synchronous(3).decide(view) == action


@pytest.mark.parametrize(
    ("view", "action"),
    [
        (View(0, (), 9), Dispatch(4)),
        (View(4, (), 5), Wait()),
        (View(3, (8,), 6), Dispatch(1)),
        (View(3, (8,), 0), Wait()),
        (View(1, (8,), 2), Dispatch(2)),
        (View(2, (8, 7), 7), Aggregate((8, 7))),
        (View(1, (8, 7, 6), 8), Aggregate((8, 7))),
    ],
)
def test_a_buffer_steps_when_it_is_full_and_else_keeps_clients_at_work(view: View, action: Action) -> None:
    assert Buffered(concurrency=4, size=2).decide(view) == action


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Synchronous(0), "schedule.cohort=0"),
        (lambda: Buffered(0, 1), "schedule.concurrency=0"),
        (lambda: Buffered(1, -2), "schedule.size=-2"),
    ],
)
def test_numbers_below_one_are_refused(make: object, key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must be at least 1"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("schedule", "key"), [(Synchronous(5), "cohort"), (Buffered(concurrency=5, size=1), "concurrency")]
)
def test_more_clients_at_work_than_have_samples_are_refused_with_the_number_that_would_do(
    schedule: Synchronous | Buffered, key: str
) -> None:
    with pytest.raises(ValueError, match=rf"schedule.{key}=5 is more than the 3 .* \(of 4\): set schedule.{key}=3"):
        silent([2, 2, 0, 2], schedule)


# --- virtual time -------------------------------------------------------------------------------------------------


def test_clients_are_accepted_in_the_order_of_virtual_time_with_ties_by_client_id() -> None:
    coordinator, ledger, _ = silent([2] * 5, Synchronous(5), Clock((3.0, 1.0, 2.0, 1.0, 2.0)), rounds=2)
    found = ran(coordinator)
    assert ledger.cohorts == [[1, 3, 2, 4, 0]] * 2
    assert [row["virtual_seconds"] for row in found.rows] == [3.0, 6.0]


def test_ties_are_by_client_id_and_not_by_the_order_of_dispatch() -> None:
    fleet = Clock((2.0, 1.0, 1.0, 1.0, 1.0, 2.0))
    coordinator, ledger, runtime = silent([2] * 6, Buffered(concurrency=2, size=1), fleet, rounds=60)
    found = ran(coordinator)
    order = [(row["virtual_seconds"], client) for row, (client,) in zip(found.rows, ledger.cohorts, strict=True)]
    assert order == sorted(order), "time first, then the client's id"
    number = {(job.client, job.participation): job.number for job in runtime.jobs}
    turns: dict[int, int] = {}
    taken = []
    for _, client in order:
        taken.append(number[client, turns.get(client, 0)])
        turns[client] = turns.get(client, 0) + 1
    assert taken != sorted(taken), "a job overtook another that was dispatched earlier"
    ties = [i for i in range(59) if order[i][0] == order[i + 1][0] and taken[i] > taken[i + 1]]
    assert ties, "at one instant too"


def test_all_events_of_one_instant_are_taken_before_the_schedule_decides() -> None:
    watched = Watched(Buffered(concurrency=4, size=2))
    coordinator, ledger, _ = silent([2] * 6, watched, Clock((1.0,) * 6), rounds=4)  # type: ignore[arg-type]
    ran(coordinator)
    views = [view for view, _ in watched.log]
    first = next(view for view in views if view.arrived)
    assert (first.running, len(first.arrived)) == (0, 4)
    actions = [type(action).__name__ for _, action in watched.log[:6]]
    assert actions == ["Dispatch", "Wait", "Aggregate", "Aggregate", "Dispatch", "Wait"]
    assert all(len(cohort) == 2 for cohort in ledger.cohorts)


def test_dispatch_follows_the_aggregation_and_free_slots_are_filled_at_once() -> None:
    coordinator, _, runtime = silent([2] * 6, Buffered(concurrency=4, size=2), Clock((1.0,) * 6), rounds=4)
    ran(coordinator)
    assert [job.version for job in runtime.jobs] == [0] * 4 + [2] * 4


def test_staleness_is_counted_at_arrival() -> None:
    # Client 5 needs as long as four versions of the others.
    coordinator, ledger, _ = silent([2] * 6, Buffered(concurrency=6, size=5), Clock((1.0,) * 5 + (4.5,)), rounds=6)
    ran(coordinator)
    late = [
        (version, stale)
        for version, (cohort, staleness) in enumerate(zip(ledger.cohorts, ledger.staleness, strict=True))
        for client, stale in zip(cohort, staleness, strict=True)
        if client == 5
    ]
    assert late == [(4, 4)]
    assert {stale for staleness in ledger.staleness[:4] for stale in staleness} == {0}


def test_every_arrival_is_in_exactly_one_aggregation() -> None:
    coordinator, ledger, runtime = silent([2] * 9, Buffered(concurrency=5, size=3), Lognormal(), rounds=30)
    found = ran(coordinator)
    assert [len(cohort) for cohort in ledger.cohorts] == [3] * 30
    assert len(runtime.jobs) == 90 + len(found.coordinator.planner.in_flight)
    assert [row["round"] for row in found.rows] == list(range(1, 31))
    times = [row["virtual_seconds"] for row in found.rows]
    assert times == sorted(times)  # type: ignore[type-var]


# --- sampling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [Synchronous(4), Buffered(concurrency=4, size=2)])
def test_no_client_is_at_work_twice_and_all_have_the_same_chance(schedule: Synchronous | Buffered) -> None:
    counts = [2, 0, 2, 2, 2, 2, 0, 2, 2]
    coordinator, _, runtime = silent(counts, schedule, Ideal(), rounds=600)
    at_work: set[int] = set()
    original = coordinator.planner._sample

    def sample(count: int) -> list[int]:
        busy = {client for _, client, _ in coordinator.planner.running}
        drawn = original(count)
        assert len(set(drawn)) == count
        assert drawn == sorted(drawn)
        assert not busy & set(drawn)
        at_work.update(drawn)
        return drawn

    coordinator.planner._sample = sample  # type: ignore[method-assign]
    ran(coordinator)
    assert at_work == {client for client, count in enumerate(counts) if count}
    share = np.bincount([job.client for job in runtime.jobs], minlength=9)[sorted(at_work)] / len(runtime.jobs)
    assert np.abs(share - 1 / 7).max() < 0.02, "four standard deviations of 2400 or 1200 draws"


def test_only_the_idle_client_can_be_drawn_when_all_others_are_busy() -> None:
    fleet = Clock((1.0, 1.1, 1.2, 1.3))
    coordinator, ledger, runtime = silent([2] * 4, Buffered(concurrency=4, size=1), fleet, rounds=50)
    ran(coordinator)
    assert [job.client for job in runtime.jobs[4:53]] == [client for (client,) in ledger.cohorts[:49]]


def test_the_cohorts_do_not_depend_on_the_method() -> None:
    ways = []
    for methods in ([], [Scaffold()]):
        found = run(
            run_spec(*methods, data=even()), Synchronous(2), Lognormal(), rounds=4, evaluate=Evaluation(every=9)
        )
        ways.append(found.coordinator.planner.participations)
    assert ways[0] == ways[1]
    assert len(ways[0]) > 2


def test_sampling_costs_as_much_as_the_cohort_and_not_as_the_population() -> None:
    coordinator, _, runtime = silent([1] * 1_000_000, Buffered(concurrency=50, size=10), rounds=20)
    coordinator._publish()
    tracemalloc.start()
    try:
        for _ in range(5):
            coordinator.planner.look_ahead(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert coordinator.planner.dispatched >= 50
    assert peak < 1_000_000, "a single array over the clients takes 8 MB"
    assert not runtime.jobs


def test_the_same_seed_gives_the_same_order_of_events_and_another_seed_another() -> None:
    orders = []
    for seed in (1, 1, 2):
        coordinator, ledger, _ = silent([2] * 20, Buffered(concurrency=6, size=3), Lognormal(), seed=seed, rounds=10)
        ran(coordinator)
        orders.append(ledger.cohorts)
    assert orders[0] == orders[1] != orders[2]


# --- fleets -------------------------------------------------------------------------------------------------------


def test_on_ideal_devices_only_samples_take_time() -> None:
    assert Ideal(speed=50.0).duration(0, 3, 100.0, 10**9, 10**9) == 2.0


def test_lognormal_devices_differ_and_stay_what_they_are() -> None:
    fleet = Lognormal(speed=100.0, sigma=0.0, bandwidth_down=4e3, bandwidth_up=2e3, bandwidth_sigma=0.0)
    assert fleet.duration(0, 1, 50.0, 1000, 1000) == pytest.approx(1000 * 4 / 4e3 + 1000 * 4 / 2e3 + 0.5)
    times = [Lognormal().duration(0, client, 100.0, 0, 0) for client in range(2000)]
    assert times[7] == Lognormal().duration(0, 7, 100.0, 0, 0)
    assert np.std(np.log(times)) == pytest.approx(1.0, abs=0.1)
    assert np.median(times) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("make", "key"),
    [(lambda: Ideal(speed=0), "fleet.speed"), (lambda: Lognormal(sigma=-1), "fleet.sigma"),
     (lambda: Lognormal(bandwidth_up=0), "fleet.bandwidth_up")],
)  # fmt: skip
def test_devices_that_cannot_be_are_refused(make: object, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        make()  # type: ignore[operator]
