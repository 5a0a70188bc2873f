"""Test fleets: durations by hand, shares of device types, drop-outs, and refused settings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiny_runs import run_spec

from raysim.experiment.build import build as build_run
from raysim.experiment.execute import run as run_words
from raysim.experiment.instantiate import build_object
from raysim.models import Mlp
from raysim.primitives.errors import RefusedError
from raysim.primitives.streams import uniform
from raysim.simulation.availability import Availability
from raysim.simulation.delays import DelayKind, Delays
from raysim.simulation.device_classes import DeviceClass, DeviceClasses
from raysim.simulation.fleet import Devices, Fate, Fixed, Fleet, Ideal, Lognormal, Speeds
from raysim.simulation.trace import Trace
from raysim.training.run_spec import sample_flops

FLEETS: list[Fleet] = [Ideal(), Lognormal(), DeviceClasses(), Delays()]
QUICK = ["data=synthetic", "partition=iid", "partition.clients=10", "schedule.cohort=2"]


def devices(fleet: Fleet, clients: int = 1, seed: int = 0, flops: float = 1.0) -> Devices:
    return fleet.devices(seed, clients, lambda: flops)


# --- durations ------------------------------------------------------------------------------------
def test_device_may_have_a_speed_and_a_bandwidth_below_1_per_second() -> None:
    assert devices(Ideal(speed=0.5)).trip(0, 0, 0.0, 1.0, 0, 0) == (2.0, True)
    slow = Lognormal(
        speed=0.5, sigma=0.0, bandwidth_down=0.5, bandwidth_up=0.25, bandwidth_sigma=0.0
    )
    assert devices(slow).trip(0, 0, 0.0, 1.0, 1, 1) == (2.0 + 8.0 + 16.0, True)


def test_duration_of_a_job_is_download_training_and_upload() -> None:
    plain = Lognormal(
        speed=100.0, sigma=0.0, bandwidth_down=4e3, bandwidth_up=2e3, bandwidth_sigma=0.0
    )
    # 1,000 floats of 4 bytes down at 4,000 bytes a second: 1 s; up at half of it: 2 s; 50 samples:
    # 0.5 s
    assert devices(plain).trip(0, 3, 10.0, 50.0, 1000, 1000) == (13.5, True)


def test_job_duration_on_a_device_class_is_computed_from_model_flops() -> None:
    only = {"box": DeviceClass(share=1.0, flops=2e9, bandwidth_down=1e6, bandwidth_up=5e5)}
    fleet = DeviceClasses(only, sigma=0.0, bandwidth_sigma=0.0)
    # 300 samples of 10 MFLOP are 3 GFLOP, at 2 GFLOP a second 1.5 s; 1 MB down takes 1 s, and up 2
    # s
    finish, back = devices(fleet, flops=10e6).trip(0, 0, 0.0, 300.0, 250_000, 250_000)
    assert back
    assert finish == pytest.approx(1.5 + 1.0 + 2.0)


def test_flops_of_a_sample_include_forward_and_backward_pass() -> None:
    spec = run_spec(model=Mlp((16,)))
    inputs, classes = math.prod(spec.task.shape), spec.task.num_classes
    first, second = (
        2 * inputs * 16,
        2 * 16 * classes,
    )  # a multiplication and an addition for each weight
    # Forward; gradients of the weights; and of the second layer's inputs: the first one's need
    # none.
    assert sample_flops(spec) == (first + second) + (first + second) + second


def test_device_classes_refuse_a_model_with_zero_flops() -> None:
    with pytest.raises(ValueError, match=r"FLOPs of the model=0\.0"):
        devices(DeviceClasses(), flops=0.0)


@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: type(fleet).__name__)
def test_expected_duration_of_a_job_is_the_mean_of_drawn_durations(fleet: Fleet) -> None:
    result, samples = devices(fleet, 40), np.arange(1.0, 41.0)
    expected = result.seconds(samples, 10, 20)
    trips = [
        [result.trip(client, each, 0.0, samples[client], 10, 20).finish for each in range(400)]
        for client in range(40)
    ]
    # Delays draws each trip between two bounds of which the mean is given; the widest are 3 s
    # apart.
    assert np.allclose(
        np.mean(trips, axis=1), expected, rtol=1e-12, atol=0.2 if isinstance(fleet, Delays) else 0
    )


# --- seeds ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("availability", ["always", "diurnal", "markov"])
@pytest.mark.parametrize("fleet", FLEETS, ids=lambda fleet: type(fleet).__name__)
@given(
    seed=st.integers(0, 2**40),
    client=st.integers(0, 29),
    participation=st.integers(0, 1000),
    start=st.floats(0, 1e7),
    dropout=st.floats(0, 0.9),
)
@settings(max_examples=20, deadline=None)
def test_job_has_the_same_duration_in_two_equal_fleets_with_the_same_seed(
    fleet: Fleet,
    availability: str,
    seed: int,
    client: int,
    participation: int,
    start: float,
    dropout: float,
) -> None:
    fleet = replace(fleet, availability=availability, dropout=dropout)
    job = client, participation, start, 100.0, 1000, 1000
    trip = devices(fleet, 30, seed).trip(*job)
    assert devices(fleet, 30, seed).trip(*job) == trip
    unhindered = devices(replace(fleet, availability="always", dropout=0.0), 30, seed).trip(*job)
    assert unhindered.arrives
    assert start <= trip.finish <= unhindered.finish
    assert trip.finish == unhindered.finish or not trip.arrives


def test_devices_of_a_fleet_depend_on_the_seed() -> None:
    for fleet in (Lognormal(), DeviceClasses(), Delays()):
        one, same, other = (
            devices(fleet, 50, seed).seconds(np.ones(50), 1, 1) for seed in (1, 1, 2)
        )
        assert np.array_equal(one, same)
        assert not np.array_equal(one, other)


# --- classes of devices ---------------------------------------------------------------------------
@given(seed=st.integers(0, 1000), clients=st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_number_of_clients_of_a_device_class_follows_its_share(seed: int, clients: int) -> None:
    fleet = DeviceClasses()
    labels = fleet.labels(seed, clients)
    result = np.bincount(labels.kinds, minlength=len(labels.names))
    wanted = np.array([fleet.classes[name].share * clients for name in labels.names])
    assert result.sum() == clients
    assert np.all(np.abs(result - wanted) <= 1)


def test_client_has_the_speed_of_its_device_class() -> None:
    fleet = DeviceClasses(sigma=0.0, bandwidth_sigma=0.0)
    labels, speeds = fleet.labels(7, 200), fleet.speeds(7, 200, lambda: 1.0)
    for client in range(200):
        each = fleet.classes[labels.names[labels.kinds[client]]]
        assert (speeds.samples[client], speeds.down[client]) == (each.flops, each.bandwidth_down)


def test_device_class_with_a_share_of_0_has_no_clients() -> None:
    nothing = DeviceClass(0.0, 1.0, 1.0, 1.0)
    labels = DeviceClasses({"none": nothing, **DeviceClasses().classes, "last": nothing}).labels(
        0, 1000
    )
    assert not {0, len(labels.names) - 1} & set(labels.kinds.tolist())


def test_fleet_without_device_classes_gives_all_clients_the_same_label() -> None:
    assert Lognormal().labels(0, 3).names == ("lognormal",)
    assert Lognormal().labels(0, 3).kinds.tolist() == [0, 0, 0]


# --- delays ---------------------------------------------------------------------------------------
def test_job_durations_are_within_the_bounds_of_the_kind_of_their_client() -> None:
    fleet = Delays()
    labels, result = fleet.labels(3, 300), devices(fleet, 300, 3)
    for client in range(300):
        kind = fleet.kinds[labels.names[labels.kinds[client]]]
        times = [result.trip(client, each, 0.0, 1.0, 1, 1).finish for each in range(20)]
        assert kind.least <= min(times) < max(times) < kind.most


def test_client_gets_the_kind_of_delay_with_the_largest_dirichlet_share() -> None:
    # Of Dirichlet(1, 1) each part is the larger one half of the time; of a large scale the heavier
    # one always is.
    even = {"a": DelayKind(1.0, 1.0, 2.0), "b": DelayKind(1.0, 3.0, 4.0)}
    assert 0.45 < Delays(even).labels(0, 4000).kinds.mean() < 0.55
    uneven = even | {"b": DelayKind(2.0, 3.0, 4.0)}
    assert Delays(uneven, scale=1000.0).labels(0, 400).kinds.all()


# --- drop-outs ------------------------------------------------------------------------------------
def test_dropout_setting_is_the_share_of_jobs_lost_at_random_times() -> None:
    result = devices(Ideal(speed=1.0, dropout=0.3), 100)
    trips = [
        result.trip(client, each, 5.0, 10.0, 0, 0) for client in range(100) for each in range(100)
    ]
    lost = np.array([trip.finish for trip in trips if not trip.arrives])
    # 10,000 coins: a standard deviation of 0.0046; uniform on [5, 15): a mean of 10 and a deviation
    # of 0.053 for 3,000
    assert abs(len(lost) / len(trips) - 0.3) < 5 * 0.0046
    assert 5.0 <= lost.min() < 5.1 < 14.9 < lost.max() < 15.0
    assert abs(lost.mean() - 10.0) < 5 * 0.053
    assert {trip.finish for trip in trips if trip.arrives} == {15.0}


def test_client_and_participation_number_decide_if_a_job_is_lost() -> None:
    """Check the numbers that decide whether a job is lost, and their order.

    They are the seed, the client, and the number of the client's job. In another order, other jobs
    would be lost, and stored results would differ.
    """
    fate = Fate(dropout=0.5, lost=7)
    lost = {(c, p) for c in range(4) for p in range(4) if not fate.trip(c, p, 0.0, 1.0).arrives}
    assert lost == {(c, p) for c in range(4) for p in range(4) if uniform(7, c, p, 0) < 0.5}
    assert lost != {(p, c) for c, p in lost}


def test_unavailable_client_loses_its_job() -> None:
    class Leaves(Availability):
        def available(self, client: int, now: float) -> bool:
            return now < 7.0

        def next_change(self, client: int, now: float, until: float) -> float:
            return min(7.0, until)

    speeds = Speeds(np.ones(1), np.full(1, math.inf), np.full(1, math.inf))
    result = Fixed(speeds, Fate(Leaves()))
    assert result.trip(0, 0, 2.0, 4.0, 9, 9) == (6.0, True)
    assert result.trip(0, 0, 2.0, 5.0, 9, 9) == (7.0, True)  # it is back as it goes
    assert result.trip(0, 0, 2.0, 6.0, 9, 9) == (7.0, False)


def test_lognormal_fleet_accepts_settings_as_positional_arguments() -> None:
    given = Lognormal(10.0, 0.5, 2e6, 1e6, 0.25)
    named = Lognormal(
        speed=10.0, sigma=0.5, bandwidth_down=2e6, bandwidth_up=1e6, bandwidth_sigma=0.25
    )
    assert given == named


def test_markov_fleet_is_refused_if_the_expected_wait_exceeds_fleet_patience() -> None:
    fleet = Ideal(availability="markov", off=100.0, patience=10.0)
    assert fleet.presence(0, 10) is not None
    with pytest.raises(ValueError, match=r"fleet\.off=100 .* 11 s"):
        fleet.presence(0, 9)


# --- what is refused ------------------------------------------------------------------------------
CLASSES = DeviceClasses().classes


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Ideal(speed=0), "fleet.speed=0"),
        (lambda: Lognormal(sigma=-1), "fleet.sigma=-1"),
        (lambda: Lognormal(sigma=math.nan), "fleet.sigma=nan"),
        (lambda: Lognormal(sigma=1e5), "fleet.sigma=100000.0"),
        (lambda: Lognormal(bandwidth_sigma=math.inf), "fleet.bandwidth_sigma=inf"),
        (lambda: Lognormal(bandwidth_up=0), "fleet.bandwidth_up=0"),
        (lambda: Ideal(availability="diurnl"), "did you mean 'diurnal'?"),
        (lambda: Ideal(availability="trace"), "fleet.availability='trace' does not exist"),
        (
            lambda: Trace(availability="sometimes"),
            "use one of 'trace', 'always', 'diurnal', 'markov'",
        ),
        (lambda: Ideal(hours=0), "fleet.hours=0"),
        (lambda: Ideal(on=0), "fleet.on=0"),
        (lambda: Ideal(off=math.nan), "fleet.off=nan"),
        (lambda: Ideal(dropout=1.0), "fleet.dropout=1.0"),
        (lambda: Ideal(patience=-1), "fleet.patience=-1"),
        (
            lambda: DeviceClasses({"a": replace(CLASSES["tablet"], share=0.5)}),
            "they add up to 0.5",
        ),
        (lambda: DeviceClasses({}), "they add up to 0"),
        (
            lambda: DeviceClasses({"a": replace(CLASSES["tablet"], share=-0.5)}),
            "fleet.classes.a.share=-0.5",
        ),
        (
            lambda: DeviceClasses({"a": replace(CLASSES["tablet"], share=1.0, flops=0)}),
            "fleet.classes.a.flops=0",
        ),
        (lambda: DeviceClasses(sigma=math.nan), "fleet.sigma=nan"),
        (
            lambda: Delays({"a": DelayKind(1.0, 2.0, 1.0)}),
            "fleet.kinds.a.most=1.0",
        ),
        (
            lambda: Delays({"a": DelayKind(0.0, 2.0, 3.0)}),
            "fleet.kinds.a.weight=0.0",
        ),
        (lambda: Delays({}), "fleet.kinds={}"),
        (lambda: Delays(scale=math.inf), "fleet.scale=inf"),
    ],
)
def test_fleet_values_out_of_range_are_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["fleet=devices", "fleet.classes.phone.share=1"],
            "fleet.classes.phone does not exist: did you mean phone_",
        ),
        (["fleet=devices", "fleet.classes.tablet.share=1"], "they add up to 1.93"),
        (
            ["fleet=devices", "fleet.classes.tablet.flops=fast"],
            "fleet.classes.tablet.flops=fast",
        ),
        (["fleet=device"], "fleet=device does not exist: did you mean devices?"),
        (["fleet=fadas", "fleet.kinds.slow.speed=1"], "fleet.kinds.slow.speed does not exist"),
    ],
)
def test_error_of_an_unknown_fleet_key_suggests_the_nearest_key(
    words: list[str], text: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        build_run([*QUICK, *words])
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["schedule=tiered", "schedule.tiers=11", "schedule.cohort=1"],
            "schedule.cohort=1",
        ),
        (
            ["schedule=deadline", "schedule.seconds=nan"],
            "schedule.seconds=nan",
        ),
        (
            ["schedule=immediate", "method=centralized"],
            "schedule=synchronous",
        ),
        (
            ["fleet=lognormal", "fleet.sigma=nan"],
            "fleet.sigma=nan",
        ),
        (
            ["fleet=lognormal", "fleet.bandwidth_sigma=inf"],
            "fleet.bandwidth_sigma=inf",
        ),
        (["fleet=lognormal", "fleet.sigma=1e5"], "fleet.sigma=100000.0"),
        (
            ["fleet.availability=markov", "fleet.off=1e9"],
            "fleet.off=1e+09",
        ),
    ],
)
def test_run_that_a_fleet_cannot_finish_writes_no_file(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = [
        word for word in QUICK if words[0].startswith("fleet") or not word.startswith("schedule.")
    ]
    with pytest.raises(RefusedError) as caught:
        run_words([*few, *words, "out=a"], quiet=True)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ideal", "lognormal", "devices", "fadas"])
def test_every_fleet_accepts_availability_and_dropout(name: str) -> None:
    words = [
        f"fleet={name}",
        "fleet.availability=markov",
        "fleet.on=600",
        "fleet.off=300",
        "fleet.dropout=0.1",
    ]
    fleet = build_run([*QUICK, *words]).fleet
    assert (fleet.availability, fleet.on, fleet.off, fleet.dropout) == ("markov", 600.0, 300.0, 0.1)


def test_key_that_yaml_reads_as_bool_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"fleet\.True does not exist"):
        build_object(Ideal, {True: 600.0}, "fleet")  # type: ignore[dict-item]
