"""Test FedBR's costs, how it draws pseudo data, and what it refuses.

`test_fedbr_trace.py` tests its steps.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tiny_runs import (
    BUFFER,
    ROUNDS,
    FinishedRun,
    Spy,
    coordinate,
    participation_facts,
    run_spec,
    run_to_end,
)

from raysim.api.declarations import Local
from raysim.data.sources import Source, Synthetic
from raysim.experiment.instantiate import build_object
from raysim.methods.fedbr import PROJECTOR, FedBR
from raysim.methods.pseudo_data import rows_by_samples
from raysim.primitives.errors import RefusedError
from raysim.primitives.streams import stream
from raysim.training.run_spec import declare_run

LOCAL = Local(lr=0.05, momentum=0.9, batch=8, epochs=2)
PIXELS = 64
PROXY = Synthetic(samples=40, test_samples=20, classes=7, seed=9, mean=[0.2], std=[0.6])


def small(**settings: Any) -> FedBR:
    return FedBR(**{"projection": "code", "pseudo_batch": 4, "samples_per_mean": 3} | settings)


def mixture(**settings: Any) -> FedBR:
    return small(**{"pseudo": "mixture", "proxy": PROXY} | settings)


def watched(method: FedBR, schedule: Any = ROUNDS, **settings: Any) -> tuple[FinishedRun, Spy]:
    study = run_spec(method, local=LOCAL)
    spy = Spy(study)
    return run_to_end(coordinate(study, schedule, runtime=spy, **settings)), spy


# --- what they cost ---------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", ["round", "once"])
@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
@pytest.mark.parametrize("make", [small, mixture], ids=["rsm", "mixture"])
def test_fedbr_sends_pseudo_data_in_every_job_or_once_per_client(
    make: Callable[..., FedBR], schedule: Any, refresh: Any
) -> None:
    found, spy = watched(make(pseudo_refresh=refresh), schedule, rounds=5)
    shared, jobs = found.coordinator.layout.shared, found.coordinator.planner.dispatched
    clients = len(found.participations)
    assert any(spy.contributed) == (make is small) and clients < jobs
    times = jobs if refresh == "round" else clients
    assert found.rows[-1]["floats_down"] == jobs * shared + times * 4 * PIXELS
    finished = jobs - len(found.coordinator.planner.running)
    pool = 6 * 4 * PIXELS if make is small else 0
    assert found.rows[-1]["floats_up"] == finished * shared + pool


def test_fedbr_fresh_pseudo_data_are_sent_to_clients_and_never_uploaded() -> None:
    found, spy = watched(small(fresh=True), rounds=3)
    shared, jobs = found.coordinator.layout.shared, len(spy.sent)
    assert not any(spy.contributed)
    assert found.rows[-1]["floats_up"] == jobs * shared
    assert found.rows[-1]["floats_down"] == jobs * (shared + 4 * PIXELS)


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        (small(lam=0.0, mu=0.0), 0),
        (small(), 1),
        (mixture(), 1 + 1 / 3),
        (mixture(mix_samples=0), 1),
        (mixture(mu=0.0), 1),
        (mixture(global_features="round"), 1),
    ],
    ids=["off", "means", "mixture", "unmixed", "no contrast", "once a round"],
)
def test_fedbr_cost_includes_passes_over_pseudo_data(method: FedBR, passes: float) -> None:
    assert method.cost(participation_facts(None, 5, 30.0)) == pytest.approx(30 * passes)


# --- how clients are drawn --------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    each=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_fedbr_draws_the_same_rows_as_numpy_random_choice(
    counts: list[int], each: int, seed: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(counts) * each))
    shares = np.array(counts) / sum(counts)
    wanted = stream(seed, "pool").choice(
        len(counts) * each, size, replace=False, p=np.repeat(shares / each, each)
    )
    assert (
        rows_by_samples(np.cumsum(shares), each, size, stream(seed, "pool")).tolist()
        == wanted.tolist()
    )


def test_fedbr_draws_pseudo_data_with_less_memory_than_one_byte_per_client() -> None:
    ends, generator = np.linspace(0, 1, 100_001)[1:], stream(0, "pool")
    tracemalloc.start()
    rows_by_samples(ends, 64, 64, generator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(ends), "an array over the clients has a byte for each at least"


# --- switches, and what is refused ------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "adds"),
    [
        ({"mu": 0.0}, False),
        ({"projection": "none"}, False),
        ({"lam": 0.0}, True),
        ({"max_step": False}, True),
    ],
    ids=str,
)
def test_fedbr_has_no_projector_if_mu_is_zero_or_projection_is_none(
    settings: dict[str, Any], adds: bool
) -> None:
    assert (PROJECTOR in declare_run(run_spec(small(**settings))).networks) == adds


@pytest.mark.parametrize(
    ("projection", "sizes"),
    [("paper", [(256, 12), (256, 256), (128, 256)]), ("code", [(24, 12), (24, 24), (12, 24)])],
)
def test_fedbr_projection_has_the_widths_of_the_paper_or_of_its_released_code(
    projection: Any, sizes: list[tuple[int, int]]
) -> None:
    projector = declare_run(run_spec(small(projection=projection))).networks[PROJECTOR]
    assert [tuple(p.shape) for p in projector.parameters() if p.dim() == 2] == sizes


def test_fedbr_defaults_are_those_of_the_paper() -> None:
    method = FedBR()
    assert (method.lam, method.mu, method.tau1, method.tau2) == (1.0, 0.5, 2.0, 2.0)


def test_fedbr_refuses_pseudo_batch_larger_than_its_pseudo_data() -> None:
    with pytest.raises(ValueError, match=r"^method\.fedbr\.pseudo_batch=13 "):
        declare_run(run_spec(FedBR(pseudo_batch=13, means_per_client=2)))
    for fits in (FedBR(pseudo_batch=12, means_per_client=2), FedBR(pseudo_batch=13)):
        declare_run(run_spec(fits))


@pytest.mark.parametrize("shape", [[1, 4, 4], [3, 8, 8]], ids=str)
def test_fedbr_refuses_proxy_set_with_another_image_shape(shape: list[int]) -> None:
    proxy = Synthetic(samples=10, test_samples=5, shape=shape)
    match = r"^method\.fedbr\.proxy .*proxy\.size=8 and .*proxy\.channels=1"
    with pytest.raises(ValueError, match=match):
        declare_run(run_spec(mixture(proxy=proxy)))
    fits = Synthetic(samples=10, test_samples=5, shape=shape, size=8, channels=1)
    declare_run(run_spec(mixture(proxy=fits)))


@pytest.mark.parametrize("key", ["mean", "std"])
def test_fedbr_refuses_proxy_mean_or_std_of_wrong_length(key: str) -> None:
    constants: dict[str, Any] = {"mean": [0.2], "std": [0.6]} | {key: [0.2, 0.3]}
    proxy = Synthetic(samples=10, test_samples=5, **constants)
    with pytest.raises(ValueError, match=rf"^method\.fedbr\.proxy\.{key}="):
        declare_run(run_spec(mixture(proxy=proxy)))


@pytest.mark.parametrize("proxy", [None, Source()], ids=["none", "a source of nothing"])
def test_fedbr_refuses_mixture_without_a_proxy_set(proxy: Source | None) -> None:
    with pytest.raises(ValueError, match=r"^method\.fedbr\.pseudo=mixture .*method\.fedbr\.proxy"):
        FedBR(pseudo="mixture", proxy=proxy)


@pytest.mark.parametrize(
    "settings",
    [{"pseudo_refresh": "once"}, {"pseudo": "mixture", "proxy": PROXY}],
    ids=["once", "mixture"],
)
def test_fedbr_refuses_fresh_pseudo_data_if_they_are_drawn_once_or_are_mixtures(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match=r"^method\.fedbr\.fresh=true"):
        FedBR(fresh=True, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"lam": -1.0},
        {"mu": -1.0},
        {"pseudo_batch": 0},
        {"samples_per_mean": 0},
        {"means_per_client": 0},
        {"mix_samples": -1},
        {"sources": "labels"},
    ],
    ids=str,
)
def test_fedbr_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"^method\.fedbr\.{key}="):
        FedBR(**settings)


# --- a proxy in a configuration ---------------------------------------------------------------

NODE = {"_target_": "raysim.methods.fedbr.FedBR", "pseudo": "mixture"}


def test_fedbr_proxy_set_is_configured_with_the_settings_of_a_data_source() -> None:
    proxy = {
        "_target_": "raysim.data.sources.Synthetic",
        "samples": 40,
        "classes": 7,
        "mean": [0.2],
        "std": [0.6],
    }
    method = build_object(FedBR, NODE | {"proxy": proxy}, "method.fedbr")
    assert method.proxy == Synthetic(samples=40, classes=7, mean=[0.2], std=[0.6])
    assert build_object(FedBR, {}, "method.fedbr").proxy is None


@pytest.mark.parametrize(
    "proxy",
    [
        {"_target_": "raysim.models.Mlp"},
        {"_target_": "raysim.methods.fedprox.FedProx"},
        {"_target_": "raysim.data.sources.Nonsense"},
        {"_target_": "raysim.data.sources.Synthetic", "sample": 40},
        {"_target_": "raysim.data.sources.Synthetic", "samples": 0},
        {"samples": 40},
        "Cifar100",
    ],
    ids=str,
)
def test_fedbr_refuses_a_proxy_set_that_is_no_valid_source_of_samples(proxy: Any) -> None:
    with pytest.raises(RefusedError, match=r"method\.fedbr\.proxy"):
        build_object(FedBR, NODE | {"proxy": proxy}, "method.fedbr")
