"""Test when clients are available, and how runs wait for clients that are not available."""

from __future__ import annotations

import itertools
import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiny_runs import run_to_end, untrained_run

from raysim.simulation.availability import (
    DAY,
    HOUR,
    Availability,
    Diurnal,
    Intervals,
    MarkovAvailability,
    _interval,
)
from raysim.simulation.fleet import Fleet, Ideal
from raysim.simulation.idle_clients import IdleClients
from raysim.simulation.planner import Load, NoClientsLeftError, Planner
from raysim.simulation.schedule import Buffered, Schedule


def intervals(*rows: list[float], period: float = 100.0, wrap: bool = True) -> Intervals:
    """Return the intervals in which clients are available.

    rows: for client k, rows[k] has the start and end of each interval, in seconds.
    period: the seconds after which the intervals repeat.
    wrap: True repeats the intervals.
    """
    first = np.cumsum([0, *map(len, rows)])
    bounds = array("d", [bound for row in rows for bound in row])
    return Intervals(bounds, first, np.full(len(rows), period), np.arange(len(rows)), wrap)


def changes(presence: Availability, client: int, until: float) -> list[float]:
    """Return all times after 0 at which the client's availability changes."""
    result, now = [], 0.0
    while (now := presence.next_change(client, now, until)) < until:
        result.append(now)
    return result


# --- by hand --------------------------------------------------------------------------------------
def test_diurnal_client_is_available_from_its_local_midnight() -> None:
    presence = Diurnal(np.array([0, 6, 23]), hours=8.0)
    hours = [h for h in range(48) if presence.available(1, h * HOUR)]
    assert hours == [*range(6, 14), *range(30, 38)]
    assert [presence.available(client, 0.0) for client in range(3)] == [
        True,
        False,
        True,
    ]  # zone 23: since 23 h before
    assert changes(presence, 1, 2 * DAY) == [6 * HOUR, 14 * HOUR, 30 * HOUR, 38 * HOUR]
    assert changes(presence, 2, 2 * DAY) == [7 * HOUR, 23 * HOUR, 31 * HOUR, 47 * HOUR]
    assert presence.next_change(1, 0.0, 100.0) == 100.0


def test_availability_interval_includes_its_start_but_not_its_end() -> None:
    presence = intervals([10.0, 20.0, 30.0, 90.0])
    there = {
        0.0: False,
        10.0: True,
        19.9: True,
        20.0: False,
        30.0: True,
        90.0: False,
        100.0: False,
        110.0: True,
    }
    assert {now: presence.available(0, now) for now in there} == there
    assert changes(presence, 0, 235.0) == [
        10.0,
        20.0,
        30.0,
        90.0,
        110.0,
        120.0,
        130.0,
        190.0,
        210.0,
        220.0,
        230.0,
    ]


def test_client_is_unavailable_after_a_trace_that_is_not_repeated() -> None:
    presence = intervals([10.0, 20.0], wrap=False)
    assert changes(presence, 0, 500.0) == [10.0, 20.0]
    assert not presence.available(0, 110.0)
    assert presence.next_change(0, 20.0, math.inf) == math.inf


def test_availability_interval_continues_in_the_next_period() -> None:
    presence = intervals([0.0, 15.0, 80.0, 100.0])
    assert changes(presence, 0, 300.0) == [15.0, 80.0, 115.0, 180.0, 215.0, 280.0]
    assert presence.available(0, 100.0)


def test_client_that_is_always_or_never_available_has_no_next_change() -> None:
    presence = intervals([0.0, 100.0], [])
    assert presence.available(0, 12345.6)
    assert not presence.available(1, 12345.6)
    assert [presence.next_change(client, 50.0, math.inf) for client in (0, 1)] == [
        math.inf,
        math.inf,
    ]


def test_availability_changes_include_a_change_at_the_end_of_a_period() -> None:
    assert changes(intervals([0.0, 40.0]), 0, 250.0) == [40.0, 100.0, 140.0, 200.0, 240.0]
    assert changes(intervals([40.0, 100.0]), 0, 250.0) == [40.0, 100.0, 140.0, 200.0, 240.0]


def test_clients_that_change_availability_at_the_same_time_are_listed_together() -> None:
    presence = intervals([10.0, 30.0], [30.0, 40.0], wrap=False)
    changes_of_both = [
        (change.at, change.came.tolist(), change.gone.tolist())
        for change in presence.changes(np.arange(2), 0.0)
    ]
    assert changes_of_both == [(10.0, [0], []), (30.0, [1], [0]), (40.0, [], [1])]


# --- properties -----------------------------------------------------------------------------------
bounds = st.lists(st.integers(0, 100), max_size=12, unique=True).map(
    lambda b: [float(x) for x in sorted(b)]
)
presences = st.one_of(
    st.builds(
        lambda zone, hours: Diurnal(np.array([zone]), hours),
        st.integers(0, 23),
        st.sampled_from([0.5, 8, 23]),
    ),
    st.builds(
        MarkovAvailability,
        st.integers(0, 2**62),
        st.integers(1, 9),
        st.floats(1, 1e4),
        st.floats(1, 1e4),
    ),
    st.builds(lambda b, wrap: intervals(b[: len(b) // 2 * 2], wrap=wrap), bounds, st.booleans()),
)


@given(presence=presences, now=st.integers(0, 400_000), parts=st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_availability_is_constant_until_the_computed_time_of_the_next_change(
    presence: Availability, now: int, parts: int
) -> None:
    until = now + 200_000.0
    there, change = presence.available(0, now), presence.next_change(0, now, until)
    assert now < change <= until
    for part in range(parts):
        between = now + (change - now) * part / parts  # which rounding may push to the end
        assert between >= change or presence.available(0, between) == there
    if change < until:
        after = math.nextafter(change, math.inf)
        assert presence.available(0, after) != there
        assert (
            presence.next_change(0, now, after) == change
            and presence.next_change(0, now, change) == change
        )


@given(
    row=st.lists(st.floats(0, 1.0, exclude_min=True), min_size=2, max_size=8, unique=True).map(
        sorted
    ),
    now=st.floats(0, 1e6),
    period=st.floats(0.1, 1e4),
)
@settings(max_examples=80, deadline=None)
def test_next_change_of_availability_is_always_in_the_future(
    row: list[float], now: float, period: float
) -> None:
    scaled = [bound * period for bound in row[: len(row) // 2 * 2]]
    presence = intervals(scaled, period=max(period, scaled[-1]))
    for _ in range(40):
        after = presence.next_change(0, now, math.inf)
        assert after > now
        if (now := after) == math.inf:  # there at any time
            break


several = st.one_of(
    st.builds(
        Diurnal,
        st.lists(st.integers(0, 23), min_size=9, max_size=9).map(np.array),
        st.sampled_from([0.5, 8, 23]),
    ),
    st.builds(
        MarkovAvailability,
        st.integers(0, 2**62),
        st.just(9),
        st.floats(1e2, 1e4),
        st.floats(1e2, 1e5),
    ),
    st.builds(
        lambda rows, wrap: intervals(*(row[: len(row) // 2 * 2] for row in rows), wrap=wrap),
        st.lists(bounds, min_size=9, max_size=9),
        st.booleans(),
    ),
    st.builds(lambda hours: ByHand(Diurnal(np.arange(9), hours)), st.sampled_from([0.5, 8, 23])),
)


class ByHand(Availability):
    """An availability as a user would write it, with only the two functions that raysim needs."""

    def __init__(self, like: Availability):
        self._like = like

    def available(self, client: int, now: float) -> bool:
        return self._like.available(client, now)

    def next_change(self, client: int, now: float, until: float) -> float:
        return self._like.next_change(client, now, until)


@given(presence=several, now=st.lists(st.floats(0, 400_000), min_size=9, max_size=9))
@settings(max_examples=60, deadline=None)
def test_availability_of_many_clients_equals_that_of_each_client_alone(
    presence: Availability, now: list[float]
) -> None:
    everybody = np.arange(9)
    assert presence.are_available(everybody, np.array(now)).tolist() == [
        presence.available(client, at) for client, at in enumerate(now)
    ]
    if not isinstance(
        presence, MarkovAvailability
    ):  # whose next change may be far away: it is not looked up
        assert presence.next_changes(everybody, np.array(now)).tolist() == [
            presence.next_change(client, at, math.inf) for client, at in enumerate(now)
        ]


@given(presence=several, now=st.floats(0, 100_000), members=st.sets(st.integers(0, 8)))
@settings(max_examples=60, deadline=None)
def test_list_of_availability_changes_contains_the_changes_of_all_clients(
    presence: Availability, now: float, members: set[int]
) -> None:
    clients, until = np.array(sorted(members), np.int64), now + 5_000.0
    listed: dict[int, list[float]] = {client: [] for client in members}
    before = -math.inf
    for change in itertools.takewhile(
        lambda change: change.at < until, presence.changes(clients, now)
    ):
        assert change.at > before
        before = change.at
        for who, there in ((change.came, True), (change.gone, False)):
            assert all(presence.available(client, change.at) == there for client in who.tolist())
            for client in who.tolist():
                listed[client].append(change.at)
    for client in members:
        expected, at = [], now
        while (at := presence.next_change(client, at, until)) < until:
            expected.append(at)
        assert listed[client] == expected


@given(
    presence=several,
    events=st.lists(st.tuples(st.floats(0, 3_000), st.integers(0, 8)), max_size=30),
    members=st.sets(st.integers(0, 8), min_size=1),
)
@settings(max_examples=60, deadline=None)
def test_set_of_idle_clients_equals_a_newly_computed_set_after_each_event(
    presence: Availability, events: list[tuple[float, int]], members: set[int]
) -> None:
    clients, busy, now = np.array(sorted(members)), set[int](), 0.0
    followed = IdleClients(presence, clients, busy, now)
    for seconds, client in events:
        now += seconds
        if client in busy:
            busy.discard(client)
            if client in members:
                followed.add_finished(client)
        elif presence.available(client, now):
            busy.add(client)
            followed.remove(client)
        followed.advance(now)
        expected = [c for c in sorted(members) if c not in busy and presence.available(c, now)]
        assert (
            followed.draw(9, iter(()))
            == IdleClients(presence, clients, busy, now).draw(9, iter(()))
            == expected
        )
        first = next((c.at for c in presence.changes(clients, now) if len(c.came)), math.inf)
        assert followed.next_arrival() == first


def test_each_idle_client_is_drawn_with_the_same_probability() -> None:
    everybody = np.arange(40)
    waiting = IdleClients(
        intervals(*[[0.0, 50.0]] * 20, *[[60.0, 70.0]] * 20), everybody, {3, 7}, 10.0
    )
    numbers = iter(np.random.Generator(np.random.PCG64(0)).random(20_000).tolist())
    counts = np.zeros(40)
    for _ in range(3_000):
        counts[waiting.draw(4, numbers)] += 1
    assert not counts[20:].any()
    assert not counts[[3, 7]].any()
    drawn = np.delete(counts[:20], [3, 7])
    # 12,000 draws over 18 clients: 667 each, with a deviation of 23
    assert abs(drawn - 12_000 / 18).max() < 5 * 23


def test_markov_availability_of_two_clients_is_independent() -> None:
    presence = MarkovAvailability(5, 12, 300.0, 900.0)
    there = np.array(
        [presence.are_available(np.arange(12), np.full(12, at * 5_000.0)) for at in range(4_000)],
        float,
    )
    assert abs(there.mean(axis=0) - 0.25).max() < 5 * math.sqrt(0.25 * 0.75 / 4_000)
    correlations = np.corrcoef(there.T)[np.triu_indices(12, 1)]
    assert abs(correlations).max() < 5 / math.sqrt(4_000)


def test_markov_availability_of_many_clients_equals_that_of_each_client_alone() -> None:
    """A query for many clients gives the same answers as a query for each client.

    In each step of the Markov chain, clients have a random order. The first ones become available,
    and the last ones unavailable. The test queries the clients at the borders of these two groups.
    """
    clients = 1 << 16
    presence = MarkovAvailability(5, clients, 100.0, 300.0)
    for step in range(200):
        draw = presence._draw(step)
        edges = np.array([draw.comes - 1, draw.comes, draw.goes - 1, draw.goes])
        own = (edges * draw.inverse + draw.start) % presence._prime
        own = own[own < clients]
        now = np.full(len(own), (step + 0.5) * 50.0)
        alone = [
            presence.available(client, moment)
            for client, moment in zip(own.tolist(), now.tolist(), strict=True)
        ]
        assert presence.are_available(own, now).tolist() == alone


def test_markov_availability_stores_a_limited_number_of_draws() -> None:
    presence = MarkovAvailability(5, 3, 100.0, 300.0)
    before = presence.available(1, 75.0)
    for step in range((1 << 14) + 5):
        presence._draw(step)
    assert len(presence._draws) <= 1 << 14 and presence.available(1, 75.0) == before


def test_markov_availability_has_the_right_mean_if_few_clients_are_available() -> None:
    clients, on, off = np.arange(100_000), 600.0, 600_000.0
    presence = MarkovAvailability(2, len(clients), on, off)
    result = [len(presence.available_clients(clients, at * 10_000.0)) for at in range(60)]
    assert np.mean(result) == pytest.approx(100, rel=0.05)  # 6,000 in all: 5 deviations are 6 %
    assert 5 < np.std(result) < 15, "as wide as a Poisson distribution"
    come = itertools.islice(presence.changes(clients, 0.0), 200)
    came, gone, last = 0, 0, 0.0
    for change in come:
        came, gone, last = came + len(change.came), gone + len(change.gone), change.at
    assert came == pytest.approx(last * 100 / on, rel=0.05)
    assert gone == pytest.approx(came, rel=0.05)


# --- statistics -----------------------------------------------------------------------------------
def test_index_of_a_time_interval_is_correct_if_floating_point_division_rounds() -> None:
    generator, rounded = np.random.default_rng(0), set[int]()
    for length, place in zip(
        generator.uniform(0.1, 100.0, 2000), generator.integers(1, 1000, 2000), strict=True
    ):
        for now in (float(place * length), math.nextafter(place * length, 0.0)):
            result = _interval(now, float(length))
            assert result * length <= now < (result + 1) * length
            rounded.add(result - math.floor(now / length))
    assert rounded >= {0, -1}


@pytest.mark.parametrize(("on", "off"), [(600.0, 600.0), (300.0, 900.0), (5000.0, 100.0)])
def test_markov_on_and_off_durations_have_the_given_means(on: float, off: float) -> None:
    presence = MarkovAvailability(17, 250, on, off)
    there = np.array(
        [[presence.available(client, at * (on + off)) for at in range(40)] for client in range(250)]
    )
    share = on / (on + off)
    # Looked at so far apart that they are hardly alike: 10,000 coins, and as many at the start as
    # ever
    assert abs(there.mean() - share) < 6 * math.sqrt(share * (1 - share) / there.size)
    assert abs(there[:, 0].mean() - share) < 5 * math.sqrt(share * (1 - share) / 250)
    spans: dict[bool, list[float]] = {True: [], False: []}
    for client in range(40):
        times = changes(presence, client, 60 * (on + off))
        for begins, ends in itertools.pairwise(times):
            spans[presence.available(client, begins)].append(ends - begins)
    for state, mean in ((True, on), (False, off)):
        # Spans are geometric: as wide as their mean. Some 2,400 of them: 2 % of it.
        assert np.mean(spans[state]) == pytest.approx(mean, rel=0.12)


def test_diurnal_time_zones_are_spread_over_the_day() -> None:
    presence = Ideal(availability="diurnal", hours=6.0).presence(3, 4000)
    assert presence is not None
    for hour in (0, 7, 13):
        share = np.mean([presence.available(client, hour * HOUR) for client in range(4000)])
        assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4000)


def test_diurnal_client_is_always_available_if_the_setting_hours_is_24() -> None:
    assert Ideal(availability="diurnal", hours=24.0).presence(0, 5) is None


def test_availability_depends_on_the_seed() -> None:
    for kind in ("diurnal", "markov"):
        fleet = Ideal(availability=kind)
        one, other = (fleet.presence(seed, 60) for seed in (1, 2))
        assert one is not None
        assert other is not None
        assert [one.available(c, 0.0) for c in range(60)] != [
            other.available(c, 0.0) for c in range(60)
        ]


# --- runs -----------------------------------------------------------------------------------------
class Recorded(Fleet):
    """Ideal devices that are available in recorded intervals."""

    def __init__(self, *rows: list[float], wrap: bool = False, **settings: Any):
        super().__init__(**settings)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "wrap", wrap)

    speeds = Ideal(speed=1.0).speeds

    def presence(self, seed: int, clients: int) -> Intervals:
        return intervals(*self.rows, period=1000.0, wrap=self.wrap)  # type: ignore[attr-defined]


def planner(fleet: Fleet, clients: int, schedule: Schedule) -> Planner:
    devices = fleet.devices(0, clients, lambda: 1.0)
    return Planner(
        schedule, devices, 0, np.full(clients, 10), lambda *_: Load(10.0, 1, 1), fleet.patience
    )


def test_run_waits_for_the_next_available_client() -> None:
    fleet = Recorded([50.0, 65.0], [500.0, 900.0])
    step = planner(fleet, 2, Buffered(1, 1)).next_aggregation()
    assert [(job.client, job.start, job.finish) for job in step.dispatched] == [(0, 50.0, 60.0)]
    # Client 0 is sent off again at once, and lost as it goes.
    both = planner(fleet, 2, Buffered(2, 2)).next_aggregation()
    assert [(job.client, job.finish, job.arrives) for job in both.dispatched] == [
        (0, 60.0, True),
        (0, 65.0, False),
        (1, 510.0, True),
    ]
    assert both.now == 510.0


def test_fleet_whose_clients_are_available_too_late_is_refused() -> None:
    fleet = Recorded([500.0, 900.0], patience=499.0)
    with pytest.raises(ValueError, match=r"fleet: .* 500 s\. .*fleet\.availability"):
        planner(fleet, 1, Buffered(1, 1)).next_aggregation()
    with pytest.raises(ValueError, match=r"fleet: .* ever .*fleet\.availability"):
        planner(Recorded([]), 1, Buffered(1, 1)).next_aggregation()


def test_run_stops_if_no_client_becomes_available_again() -> None:
    # Ten seconds a job: three of them fit, and the fourth is lost.
    coordinator, _, _ = untrained_run([10], Buffered(1, 1), Recorded([0.0, 35.0]), rounds=9)
    with pytest.raises(
        NoClientsLeftError,
        match=r"fleet: .* 35 s .* fleet\.wrap=true.*rounds=3",
    ):
        list(coordinator.run())
    assert [row["virtual_seconds"] for row in coordinator.rows] == [10.0, 20.0, 30.0]


def test_run_whose_clients_never_return_saves_a_checkpoint_and_stops(tmp_path: Path) -> None:
    setup: dict[str, Any] = {"rounds": 9, "checkpoint_every": 100}
    coordinator, _, _ = untrained_run(
        [10], Buffered(1, 1), Recorded([0.0, 35.0]), folder=str(tmp_path), **setup
    )
    with pytest.raises(NoClientsLeftError):
        list(coordinator.run())
    (last,) = sorted((tmp_path / "checkpoints").iterdir())[-1:]
    again, _, _ = untrained_run(
        [10], Buffered(1, 1), Recorded([0.0, 35.0]), rounds=3, resume=str(last)
    )
    straight, _, _ = untrained_run([10], Buffered(1, 1), Recorded([0.0, 35.0]), rounds=3)
    assert run_to_end(again).bits == run_to_end(straight).bits


def test_trace_starts_again_if_a_run_is_longer_than_the_trace() -> None:
    coordinator, _, _ = untrained_run(
        [10], Buffered(1, 1), Recorded([0.0, 25.0], wrap=True), rounds=4
    )
    assert [row["virtual_seconds"] for row in run_to_end(coordinator).rows] == [
        10.0,
        20.0,
        1010.0,
        1020.0,
    ]


def test_all_changes_are_reported_if_the_availability_of_a_client_changes_often() -> None:
    """Every change of seconds 1 to 250 is reported if client 0 comes or leaves in each second.

    raysim sorts at most 32 changes of a client at once. From second 150 on, one of 1500 other
    clients also leaves in each second.
    """
    others = 1500
    bounds = np.array(
        [0.0, 1.0, *(bound for client in range(others) for bound in (0.0, 150.0 + client))]
    )
    periods = np.array([2.0, *[1e4] * others])
    presence = Intervals(bounds, 2 * np.arange(others + 2), periods, np.arange(others + 1), True)
    seen = list(itertools.islice(presence.changes(np.arange(others + 1), 0.0), 250))
    assert [change.at for change in seen] == [float(at) for at in range(1, 251)]
    for change in seen:
        mine, left = change.at % 2 == 1, [int(change.at) - 150 + 1] if change.at >= 150 else []
        assert (
            change.came.tolist() == ([] if mine else [0])
            and change.gone.tolist() == ([0] if mine else []) + left
        )
