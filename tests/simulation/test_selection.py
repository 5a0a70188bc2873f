"""Test selection rules: properties of the plans, what a rule sees, and errors for wrong choices."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Workers
from hypothesis import given, reject, settings, strategies as st
from test_planner import CLIENTS, COUNTS, FLEETS, SCHEDULES, is_available, load, slow_devices
from tiny_runs import TimedFleet, coordinate, run, run_spec, run_to_end

from raysim.api.local_job import LocalJob
from raysim.api.messages import Update
from raysim.api.method import Method
from raysim.api.selection import Random, Selection, SelectionView, draw_weighted
from raysim.api.setup import Setup
from raysim.api.topology import Topology
from raysim.conformance import agreement
from raysim.experiment.execute import run as run_experiment
from raysim.primitives.streams import stream
from raysim.results.history import Row, mean_worker_busy
from raysim.simulation.fleet import Fleet, Ideal, Lognormal
from raysim.simulation.oort import Oort
from raysim.simulation.planner import Load, PlannedAggregation, Planner
from raysim.simulation.schedule import Buffered, Schedule, Synchronous
from raysim.simulation.selection_rules import (
    FedCS,
    FewestJobs,
    PowerOfChoice,
    RoundRobin,
    Weighted,
)
from raysim.simulation.selector import SelectionError
from raysim.simulation.topologies import Gossip, Hierarchical
from raysim.training.run_spec import RunSpec

RULES: dict[str, Selection] = {
    "weighted": Weighted(),
    "round_robin": RoundRobin(),
    "participation": FewestJobs(),
    "power_of_choice": PowerOfChoice(40, samples=2),
    "last loss": PowerOfChoice(40, loss="last"),
    "fedcs": FedCS(0.5),
    "own links": FedCS(0.5, candidates=5, uplink="own"),
    "oort": Oort(pacer_step=1),
}
SEEING = ("power_of_choice", "last loss", "oort")


def planner(
    rule: Selection,
    schedule: Schedule,
    fleet: Fleet,
    seed: int = 0,
    counts: Sequence[int] = (5,) * CLIENTS,
) -> Planner:
    devices = fleet.devices(seed, len(counts), lambda: 1.0)
    return Planner(schedule, devices, seed, np.asarray(counts), load, selection=rule)


def step(plan: Planner) -> PlannedAggregation:
    """Plan one aggregation, and report a loss for each aggregated job to the planner.

    The loss is a fixed function of the job's client and version.
    """
    aggregation = plan.next_aggregation()
    counters = np.empty(0, np.int64)
    for job in aggregation.aggregated:
        loss = float((7 * job.client + 3 * job.version) % 5)
        facts = (job.number, job.client, job.version, 5, 5, 1, loss, 0.0)
        plan.report([Update(*facts, counters, norm=loss + 1)])
    return aggregation


def steps(plan: Planner, count: int) -> list[PlannedAggregation]:
    try:
        return [step(plan) for _ in range(count)]
    except ValueError as error:
        assert "jobs in a row were lost" in str(error)
        reject()


# --- plans --------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=100)
@given(st.sampled_from(sorted(RULES)), SCHEDULES, FLEETS, st.integers(0, 99), COUNTS)
def test_selection_rules_choose_idle_available_clients(
    name: str, schedule: Schedule, fleet: Fleet, seed: int, counts: list[int]
) -> None:
    plan = planner(RULES[name], schedule, fleet, seed, counts)
    result = steps(plan, 8)
    jobs = [job for aggregation in result for job in aggregation.dispatched]
    assert [job.number for job in jobs] == list(range(len(jobs)))
    devices = fleet.devices(seed, len(counts), lambda: 1.0)
    assert all(is_available(devices, job.client, job.start) for job in jobs)
    for job in jobs:
        assert job.pool < 0 or job.client in plan._members[job.pool]
    ends: Counter[int] = Counter()
    for version, aggregation in enumerate(result):
        assert aggregation.aggregated and aggregation.version == version
        ended = (*aggregation.aggregated, *aggregation.lost, *aggregation.discarded)
        ends.update([job.number for job in ended])
    assert set(ends.values()) <= {1}
    for client in range(len(counts)):
        own = [job for job in jobs if job.client == client]
        assert all(before.finish <= after.start for before, after in pairwise(own)), "never twice"


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(RULES)),
    SCHEDULES,
    FLEETS,
    st.integers(0, 99),
    COUNTS,
    st.integers(0, 5),
)
def test_restored_selection_continues_unchanged(
    name: str, schedule: Schedule, fleet: Fleet, seed: int, counts: list[int], at: int
) -> None:
    whole, first, again = (planner(RULES[name], schedule, fleet, seed, counts) for _ in range(3))
    expected = steps(whole, 8)
    steps(first, at)
    stored = json.loads(json.dumps(first.state()))
    arrays = {name: np.array(array) for name, array in first.selection_arrays().items()}
    again.restore(stored, first.participations, first.accepted, arrays)
    assert steps(again, 8 - at) == expected[at:]


def test_random_selection_dispatches_the_same_jobs_as_a_run_without_selection() -> None:
    fleet = Lognormal(availability="markov", on=1, off=1)
    one, other = (planner(rule, Buffered(5, 2), fleet) for rule in (None, Random()))  # type: ignore[arg-type]
    assert steps(one, 10) == steps(other, 10)
    assert not other.selection_arrays()


# --- runs ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", [Synchronous(3), Buffered(3, 2)], ids=["rounds", "buffer"])
@pytest.mark.parametrize("name", ["round_robin", *SEEING])
def test_selection_has_the_same_bits_on_two_workers(name: str, schedule: Schedule) -> None:
    agreement.check_workers(lambda: run_spec(selection=RULES[name]), schedule)


@pytest.mark.parametrize("schedule", [Synchronous(3), Buffered(3, 2)], ids=["rounds", "buffer"])
@pytest.mark.parametrize("name", ["round_robin", *SEEING])
def test_selection_has_the_same_bits_after_resuming(name: str, schedule: Schedule) -> None:
    agreement.check_resumed(lambda: run_spec(selection=RULES[name]), schedule)


@pytest.mark.parametrize("name", SEEING)
def test_selection_has_the_same_bits_on_ray(name: str, workers: Workers) -> None:
    spec, schedule = run_spec(selection=RULES[name]), Buffered(4, 2)
    expected = run(spec, schedule, rounds=4)
    actual = run_to_end(coordinate(spec, schedule, runtime=workers.runtime(spec, 2), rounds=4))
    assert actual.bits == expected.bits and actual.history == expected.history


@pytest.mark.parametrize("name", ["round_robin", *SEEING])
@pytest.mark.parametrize(
    "topology", [Hierarchical(edges=2), Gossip(graph="ring")], ids=["hierarchical", "gossip"]
)
def test_selection_chooses_clients_for_several_replicas(name: str, topology: Topology) -> None:
    def make() -> RunSpec:
        return run_spec(selection=RULES[name], topology=topology)

    agreement.check_resumed(make, Buffered(2, 1))


@dataclass(frozen=True)
class Looking(Selection):
    """A selection that chooses like `FewestJobs`, and records what it sees."""

    seen: list[dict[str, Any]]

    reports = ("loss", "norm")

    def select(self, view: SelectionView) -> np.ndarray:
        names = ("clients", "loss", "norm", "seconds", "staleness", "accepted", "last_finish")
        self.seen.append({name: getattr(view, name) for name in names} | {"version": view.version})
        return FewestJobs().select(view)


class ReadUpdates(Method):
    name = "read_updates"

    def setup(self, run: Setup) -> None:
        run.read_updates()


def test_selection_receives_reports_of_all_earlier_aggregations() -> None:
    seen: list[dict[str, Any]] = []
    spec = run_spec(ReadUpdates(), selection=Looking(seen))
    coordinator = coordinate(spec, Buffered(4, 2), rounds=6)
    report, reports = coordinator.planner.report, list[list[Update]]()

    def listen(updates: list[Update]) -> None:
        reports.append(list(updates))
        report(updates)

    coordinator.planner.report = listen  # type: ignore[method-assign, assignment]
    result = run_to_end(coordinator)
    assert {view["version"] for view in seen} == set(range(6))
    for view in seen:
        last: dict[int, Update] = {}
        for updates in reports[: view["version"]]:
            last |= {update.client: update for update in updates}
        for place, client in enumerate(view["clients"].tolist()):
            update = last.get(client)
            expected = (np.nan, np.nan) if update is None else (update.loss, update.norm)
            actual = view["loss"][place], view["norm"][place]
            np.testing.assert_array_equal(actual, expected)
            assert (view["accepted"][place] > 0) == (update is not None)
    single = [update for updates in reports for update in updates if update.delta is not None]
    assert single and len(result.rows) == 6
    for update in single:
        np.testing.assert_allclose(update.norm, np.linalg.norm(update.delta), rtol=1e-5)


class FailClient0(Method):
    name = "fail_client_0"

    def begin(self, job: LocalJob) -> None:
        if job.client == 0:
            raise KeyError("on purpose")


def test_accepted_jobs_of_a_client_include_failed_jobs() -> None:
    seen: list[dict[str, Any]] = []
    spec = run_spec(FailClient0(), selection=Looking(seen))
    run(spec, Synchronous(6), rounds=2, tolerate=0.5)
    last = seen[-1]
    assert last["clients"].tolist() == [0, 1, 2, 3, 4, 5] and last["accepted"].tolist() == [1] * 6
    assert np.isnan(last["loss"]).tolist() == [True] + [False] * 5


@pytest.mark.parametrize("name", RULES)
def test_plan_is_only_one_aggregation_ahead_if_selection_needs_reports(name: str) -> None:
    coordinator = coordinate(run_spec(selection=RULES[name]), Buffered(4, 1), rounds=8)
    ahead = [coordinator.planner.version - coordinator.server.version for _ in coordinator.run()]
    assert (max(ahead) > 1) == (name not in SEEING)


def test_selection_measures_losses_of_the_current_version() -> None:
    """Power-of-choice measures losses with the current version, and chooses the largest losses.

    All clients are candidates.
    """
    spec = run_spec(selection=PowerOfChoice(6))
    coordinator = coordinate(spec, Synchronous(2), rounds=3)
    measured: list[tuple[int, dict[int, float]]] = []
    measure = coordinator.planner._selector.measure  # type: ignore[union-attr]

    def listen(clients: Sequence[int], samples: int | None) -> np.ndarray:
        losses = measure(clients, samples)  # type: ignore[misc]
        values = dict(zip(clients, losses.tolist(), strict=True))
        measured.append((coordinator.server.version, values))
        return losses

    coordinator.planner.measure_with(listen)
    result = run_to_end(coordinator)
    assert [version for version, _ in measured] == [0, 1, 2]
    for (_, losses), aggregation in zip(measured, result.aggregations, strict=True):
        largest = sorted(losses, key=losses.__getitem__)[-2:]
        assert sorted(largest) == [job.client for job in aggregation.dispatched]
    untrained = np.mean(list(measured[0][1].values()))
    np.testing.assert_allclose(untrained, np.log(5), atol=0.5)  # of five classes


def test_clients_need_time_and_traffic_to_measure_their_losses() -> None:
    """Three candidates need 1, 2 and 4 s to measure their losses, so the job begins after 4 s.

    Each candidate receives the model once.
    """
    fleet = TimedFleet((1.0, 2.0, 4.0))
    plan = planner(PowerOfChoice(3), Synchronous(1), fleet, counts=[5, 5, 5])
    first = plan.next_aggregation()
    job = first.dispatched[0]
    assert job.finish == 4.0 + (1.0, 2.0, 4.0)[job.client]
    assert first.down == 3 * 100, "the chosen client does not receive the model twice"
    assert first.up == 3 + 10


# --- what rules choose --------------------------------------------------------------------------
def test_round_robin_chooses_clients_in_turn() -> None:
    plan = planner(RoundRobin(), Synchronous(5), Ideal(), counts=[5] * 7)
    chosen = [sorted(job.client for job in step(plan).dispatched) for _ in range(3)]
    assert chosen == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 3, 4, 5, 6]]


def test_selection_by_fewest_jobs_chooses_all_clients_equally_often() -> None:
    plan = planner(FewestJobs(), Synchronous(5), Lognormal(), counts=[5] * 12)
    for _ in range(9):
        step(plan)
        assert np.ptp(plan.participations) <= 1


def test_weighted_selection_draws_clients_in_proportion_to_samples() -> None:
    weights, clients = np.array([1.0, 2.0, 7.0, 0.0]), np.arange(4)
    generator = stream(0, "test")
    firsts = [int(draw_weighted(generator, clients, weights, 2)[0]) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(firsts, minlength=4) / 4000, weights / 10, atol=0.03)
    assert draw_weighted(generator, clients, weights, 4)[-1] == 3
    assert set(draw_weighted(generator, clients, np.zeros(4), 2)) == {0, 1}


def test_fedcs_chooses_clients_until_no_further_client_meets_the_deadline() -> None:
    generator = stream(1, "test")
    rule = FedCS(3.0)
    for _ in range(30):
        ready, sending = generator.exponential(1.0, 6), generator.exponential(0.7, 6)
        chosen = rule._schedule_uploads(ready, sending, 6)
        end = 0.0
        for place in chosen:
            end = max(end, ready[place]) + sending[place]
        assert end <= 3.0 or len(chosen) == 1
        for place in set(range(6)) - set(chosen):
            assert max(end, ready[place]) + sending[place] > 3.0 or len(chosen) == 1
    own = FedCS(0.02, uplink="own")
    plan = planner(own, Synchronous(12), Ideal(speed=1000.0))
    chosen = [job.client for job in step(plan).dispatched]
    assert chosen == [client for client in range(12) if (5 + 3 * client) / 1000 <= 0.02]


def test_fedcs_chooses_the_fastest_client_if_no_client_meets_the_deadline() -> None:
    plan = planner(FedCS(1e-6), Synchronous(4), Ideal(speed=1000.0))
    assert [job.client for job in step(plan).dispatched] == [0]


@dataclass(frozen=True)
class Fastest(Selection):
    """A selection that chooses the clients with the shortest expected jobs, and records these.

    seconds: gets the expected seconds of all clients in each choice.
    sending: gets the seconds in which they send.
    """

    seconds: list[np.ndarray]
    sending: list[np.ndarray]

    def select(self, view: SelectionView) -> np.ndarray:
        self.seconds.append(view.expected_seconds)
        self.sending.append(view.sending_seconds(view.clients))
        return view.clients[np.argsort(view.expected_seconds)[: view.count]]


def floats_by_client(client: int, version: int, earlier: int, accepted: int) -> Load:
    return Load(5.0, 100 - 10 * client, 10 - client)


def test_expected_seconds_use_the_traffic_of_each_client() -> None:
    rule = Fastest([], [])
    devices, counts = slow_devices(1, 1, 1, 1), np.array([5, 5, 0, 5])
    plan = Planner(Synchronous(1), devices, 0, counts, floats_by_client, selection=rule)
    (job,) = plan.next_aggregation().dispatched
    assert rule.seconds[0].tolist() == [100 + 2 * 10, 90 + 2 * 9, 70 + 2 * 7]
    assert rule.sending[0].tolist() == [20, 18, 14]
    assert (job.client, job.finish) == (3, 84.0)


def test_pass_for_losses_ends_when_its_slowest_client_has_sent() -> None:
    """Clients 0 and 3 receive 100 and 70 floats in 100 and 140 s, and send one in 2 s."""
    devices, counts = slow_devices(1, 1, 1, 2), np.array([5, 0, 0, 5])
    rule = PowerOfChoice(2)
    plan = Planner(Synchronous(2), devices, 0, counts, floats_by_client, selection=rule)
    jobs = plan.next_aggregation().dispatched
    assert [job.finish for job in jobs] == [142 + 2 * 10, 142 + 2 * 7]


def test_oort_explores_all_clients_in_the_end() -> None:
    plan = planner(Oort(), Synchronous(4), Lognormal(), counts=[5] * 20)
    first, second = step(plan), step(plan)
    assert len(first.dispatched) == len(second.dispatched) == 4
    known = {job.client for job in first.aggregated}
    assert known - {job.client for job in second.dispatched}, "some of the second are unexplored"
    for _ in range(12):
        step(plan)
    assert (plan.accepted > 0).all(), "all clients are explored in the end"


def test_oort_prefers_fast_clients_with_large_losses() -> None:
    fleet = TimedFleet(tuple([1.0] * 10 + [50.0] * 10))
    rule = Oort(exploration_decay=0.9, exploration_min=0.0, pacer_delta=0.0)
    plan = planner(rule, Synchronous(4), fleet, counts=[5] * 20)
    jobs = [job for _ in range(60) for job in step(plan).dispatched][-160:]
    slow = sum(job.client >= 10 for job in jobs)
    assert slow < 0.1 * len(jobs)


# --- wrong choices ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Scripted(Selection):
    """A selection that returns choose(view)."""

    choose: Callable[[SelectionView], Any]

    def select(self, view: SelectionView) -> Any:
        return self.choose(view)


def busy(view: SelectionView) -> Any:
    return view.clients[:3] if view.is_idle.all() else np.flatnonzero(~view.is_idle)[:1]


WRONG: dict[str, tuple[Callable[[SelectionView], Any], str]] = {
    "busy": (busy, "is busy"),
    "repeated": (lambda view: [view.clients[0]] * 2, "more than once"),
    "too many": (lambda view: view.clients[: view.count + 1], "at most"),
    "unknown": (lambda view: [CLIENTS], "0 to 11"),
    "negative": (lambda view: [-1], "0 to 11"),
    "floats": (lambda view: [0.5], "numbers"),
    "names": (lambda view: ["a"], "numbers"),
    "nested": (lambda view: [[0, 1]], "numbers"),
    "ragged": (lambda view: [[0], [1, 2]], "numbers"),
    "nothing": (lambda view: None, "numbers"),
    "none": (lambda view: [], "no client"),
    "pass": (lambda view: view.measure([0]), "measures = True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_selection_rule_that_returns_wrong_clients_raises_selection_error(name: str) -> None:
    choose, text = WRONG[name]
    plan = planner(Scripted(choose), Buffered(3, 2), Ideal())
    with pytest.raises(SelectionError, match=f"^selection Scripted: .*{text}"):
        steps(plan, 5)


class ScriptedMeasuring(Scripted):
    """A scripted selection that may measure losses."""

    measures = True


@pytest.mark.parametrize(
    ("clients", "text"), [([], "no clients"), ([CLIENTS], "0 to 11"), ([0, 0], "more than once")]
)
def test_selection_rule_that_measures_losses_of_wrong_clients_raises_selection_error(
    clients: list[int], text: str
) -> None:
    plan = planner(ScriptedMeasuring(lambda view: view.measure(clients)), Synchronous(3), Ideal())
    with pytest.raises(SelectionError, match=rf"view\.measure got .*{text}.*\. Use "):
        plan.next_aggregation()


def test_selection_rule_that_chooses_an_unavailable_client_is_refused() -> None:
    fleet = Ideal(availability="markov", on=20.0, off=20.0)
    plan = planner(Scripted(lambda view: np.flatnonzero(~view.is_idle)[:1]), Synchronous(3), fleet)
    with pytest.raises(SelectionError, match=r"^selection Scripted: .*is not available"):
        plan.next_aggregation()


def test_selection_rule_that_chooses_a_client_without_samples_is_refused() -> None:
    plan = planner(Scripted(lambda view: [1]), Synchronous(1), Ideal(), counts=[5, 0, 5])
    with pytest.raises(SelectionError, match=r"^selection Scripted: .*has no samples"):
        plan.next_aggregation()


def test_selection_rule_cannot_change_the_arrays_that_it_receives() -> None:
    def change(view: SelectionView) -> Any:
        view.facts.seconds[0] = 1.0

    with pytest.raises(ValueError, match="read-only"):
        planner(Scripted(change), Synchronous(1), Ideal()).next_aggregation()


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: PowerOfChoice(0), "selection.candidates"),
        (lambda: PowerOfChoice(loss="first"), "selection.loss"),
        (lambda: PowerOfChoice(loss="last", samples=3), "selection.samples"),
        (lambda: FedCS(0.0), "selection.deadline"),
        (lambda: FedCS(candidates=0), "selection.candidates"),
        (lambda: FedCS(uplink="none"), "selection.uplink"),
        (lambda: Oort(exploration=1.5), "selection.exploration"),
        (lambda: Oort(exploration_decay=0.0), "selection.exploration_decay"),
        (lambda: Oort(pacer_step=0), "selection.pacer_step"),
        (lambda: Oort(penalty=-1.0), "selection.penalty"),
    ],
)
def test_error_of_a_wrong_selection_setting_contains_its_key(
    make: Callable[[], Selection], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        make()


def test_selection_refuses_fewer_candidates_than_the_cohort() -> None:
    with pytest.raises(ValueError, match=r"selection\.candidates=3 .* 5 clients"):
        planner(PowerOfChoice(3), Synchronous(5), Ideal()).next_aggregation()


def test_repeated_runs_measure_losses_on_the_same_few_samples() -> None:
    """The samples on which losses are measured do not depend on global random numbers."""
    rule = PowerOfChoice(6, samples=3)
    runs = []
    for seed in (1, 2):
        random.seed(seed)
        torch.manual_seed(seed)
        runs.append(run(run_spec(selection=rule), Synchronous(2)))
    one, other = runs
    full = run(run_spec(selection=replace(rule, samples=None)), Synchronous(2))
    assert one.bits == other.bits
    bits = [one.bits, full.bits]
    assert all(left != right for left, right in combinations(bits, 2))


def test_summary_has_the_share_of_busy_workers() -> None:
    rows: list[Row] = [
        {"round": 1, "accuracy": 0.5, "worker_busy": 1.0, "wall_seconds": 1.0},
        {"round": 2, "accuracy": 0.5, "worker_busy": 0.25, "wall_seconds": 4.0},
    ]
    assert mean_worker_busy(rows) == pytest.approx((1.0 + 0.25 * 3) / 4)
    assert mean_worker_busy([{"round": 1}]) is None


@pytest.mark.parametrize("rule, is_printed", [("round_robin", False), ("oort", True)])
def test_run_prints_share_of_busy_workers_only_if_selection_needs_reports(
    rule: str, is_printed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "data=synthetic model=mlp partition.clients=6 schedule.cohort=2 rounds=2"
    more = f"selection={rule} runtime=inprocess runtime.threads=1 tracking=none"
    result = run_experiment(f"{words} {more} out={tmp_path / 'run'}")
    assert ("workers were busy for" in capsys.readouterr().out) == is_printed
    assert 0 < result.summary["worker_busy_mean"] <= 1
