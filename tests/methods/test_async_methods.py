"""FedAsync, CA2FL, FADAS and ACE: what their specifications promise, and where clients of two speeds lead them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
    NORMED,
    NORMED_MLP,
    Spy,
    clients_of_sizes,
    coordinate,
    equal_clients,
    make_server,
    run,
    run_spec,
    run_to_end,
)
from torch import Tensor

from raysim.api.declarations import Task
from raysim.api.messages import PublishedVersion, Update
from raysim.api.method import Method
from raysim.methods.ace import ACE, active_clients, all_client_step
from raysim.methods.ca2fl import CA2FL, calibrated_step
from raysim.methods.fadas import FADAS, amsgrad_step, delay_adaptive_lr
from raysim.methods.fedasync import (
    FedAsync,
    apply_arrivals,
    arrival_rates,
    mixed_params,
    staleness_weight,
)
from raysim.methods.fedbuff import FedBuff, buffered_step
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.simulation.server import Server
from raysim.vectors.layout import Layout

UNIFORM = {"weighting": "uniform"}
ONE_BY_ONE = Buffered(concurrency=4, size=1)
WIDTH = 4  # three parameters and a buffer


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def server(
    method: Method, clients: int = 5, weighting: Any = "uniform", counts: Sequence[int] = ()
) -> Server:
    layout = Layout((), (), WIDTH - 1, WIDTH, WIDTH, 0, 0)
    counts, nothing = counts or (10,) * clients, torch.empty(0, dtype=torch.int64)
    task = Task((1, 1, 1), 2, len(counts))
    return make_server(
        layout, torch.zeros(WIDTH), nothing, [method], np.array(counts), 0, task, weighting
    )


def arrive(
    at: Server,
    *arrivals: tuple[int, Any],
    bases: dict[int, Tensor] | None = None,
    version: int = -1,
) -> None:
    """An aggregation of (client, change) pairs from one version, the current one if -1. bases: vectors by version."""
    base = at.version if version < 0 else version
    known = bases if bases is not None else {}
    known[at.version] = at.vector.clone()
    empty = np.empty(0, np.int64)
    updates = [
        Update(
            number,
            client,
            base,
            10,
            10,
            1,
            0.0,
            0.0,
            empty,
            delta=np.full(WIDTH, change, np.float32),
        )
        for number, (client, change) in enumerate(arrivals)
    ]
    at.step(
        updates,
        {},
        [at.version - base] * len(updates),
        {base: PublishedVersion(base, known[base].numpy(), empty)},
    )


# --- FedAsync -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"kind": "constant"}, {"kind": "hinge", "a": 10.0}, {"a": 2.0}]
)
def test_a_fresh_model_counts_in_full_and_a_staler_one_never_more(settings: dict[str, Any]) -> None:
    weights = [staleness_weight(staleness=s, **settings) for s in range(30)]
    assert weights[0] == 1.0 and all(later <= earlier for earlier, later in pairwise(weights))


def test_a_hinge_is_continuous_where_it_bends_and_an_exponent_of_0_is_constant() -> None:
    assert staleness_weight(staleness=4, kind="hinge", a=10.0, b=4 - 1e-12) == pytest.approx(1.0)
    assert {staleness_weight(staleness=s, a=0.0) for s in range(9)} == {1.0}


def test_a_model_from_the_future_is_an_error() -> None:
    with pytest.raises(ValueError, match="staleness of -1"):
        staleness_weight(staleness=-1)


def test_mixing_is_exact_at_both_ends() -> None:
    x, y = random(50), random(50, seed=1)
    assert torch.equal(mixed_params(params=x, client_params=y, rate=0.0), x)
    assert torch.equal(mixed_params(params=x, client_params=y, rate=1.0), y)


def test_after_arrivals_at_a_constant_rate_each_has_what_the_later_ones_left_of_it() -> None:
    x, models = random(6), random(4, 6, seed=1)
    found = apply_arrivals(
        params=x,
        client_params=models,
        base_versions=torch.tensor([7, 2, 5, 0]),
        version=8,
        alpha=0.3,
        kind="constant",
    )
    parts = [0.3 * 0.7 ** (4 - m) for m in range(1, 5)]
    torch.testing.assert_close(found["params"], 0.7**4 * x + torch.tensor(parts).double() @ models)
    assert found["version"] == 12
    everything = torch.stack([x, *models])
    assert (found["params"] <= everything.amax(0)).all() and (
        found["params"] >= everything.amin(0)
    ).all()


def test_rates_by_samples_end_at_1_and_those_of_old_models_at_0() -> None:
    rates = arrival_rates(
        base_versions=torch.tensor([5, 5, 0]),
        version=5,
        alpha=0.6,
        kind="constant",
        max_staleness=6,
        factors=torch.tensor([0.5, 3.0, 1.0]),
    )
    assert rates == [0.3, 1.0, 0.0]


def test_at_alpha_1_the_model_is_the_last_that_arrived_whatever_it_started_from() -> None:
    at, bases = server(FedAsync(1.0, "constant")), dict[int, Tensor]()
    arrive(at, (0, 1.0), (1, 2.0), bases=bases)
    assert at.vector.tolist() == [2.0] * WIDTH
    arrive(at, (2, 5.0), bases=bases, version=0)
    assert at.vector.tolist() == [5.0] * WIDTH, "buffers, too"


def test_at_alpha_0_nothing_moves() -> None:
    at = server(FedAsync(0.0))
    arrive(at, (0, 1.0), (1, 2.0))
    assert at.vector.tolist() == [0.0] * WIDTH


def test_what_is_too_old_is_left_out_and_counted_and_the_version_grows() -> None:
    at, bases = server(FedAsync(0.5, "constant", max_staleness=1)), dict[int, Tensor]()
    for client in range(2):
        arrive(at, (client, 1.0), bases=bases)
        assert at.report == {"fedasync.rate": 0.5, "fedasync.discarded": 0.0}
    before = at.vector.clone()
    arrive(at, (2, 9.0), bases=bases, version=0)
    assert at.report == {"fedasync.rate": 0.0, "fedasync.discarded": 1.0}
    assert torch.equal(at.vector, before) and at.version == 3


def test_clients_count_by_their_samples_only_where_that_is_asked_for() -> None:
    counts = (30, 10, 20, 0)  # mean 20: a client without samples is none
    at = server(FedAsync(0.4, "constant"), weighting="samples", counts=counts)
    arrive(at, (0, 1.0))
    assert at.vector[0] == pytest.approx(0.6)
    assert server(FedAsync(0.4)).weighting == "uniform"
    assert coordinate(run_spec(FedAsync())).server.weighting == "uniform"


# --- CA2FL ----------------------------------------------------------------------------------------------------------


def flush(
    deltas: Tensor, clients: Sequence[int], cache: Tensor, server_lr: float = 1.0
) -> dict[str, Tensor]:
    given = {
        "params": random(6, seed=9),
        "deltas": deltas,
        "clients": torch.tensor(clients),
        "cache": cache,
    }
    copies = {name: tensor.clone() for name, tensor in given.items()}
    found = calibrated_step(**given, server_lr=server_lr)
    assert all(torch.equal(given[name], copies[name]) for name in given), (
        "arguments stay as they were"
    )
    return found


def test_with_an_empty_cache_it_is_fedbuff_without_staleness_weights() -> None:
    deltas = random(3, 6)
    found = flush(deltas, [0, 2, 4], torch.zeros(5, 6).double(), 0.7)
    plain = buffered_step(
        params=random(6, seed=9),
        deltas=deltas,
        staleness=torch.tensor([0, 3, 9]),
        server_lr=0.7,
        exponent=0.0,
    )
    torch.testing.assert_close(found["params"], plain)


def test_arrivals_that_repeat_what_is_cached_leave_the_mean_of_the_cache() -> None:
    cache = random(5, 6)
    torch.testing.assert_close(flush(cache[[1, 3]], [1, 3], cache)["update"], cache.mean(0))


def test_when_all_clients_arrive_the_cache_does_not_matter() -> None:
    deltas = random(5, 6)
    found = flush(deltas, [4, 0, 1, 3, 2], 100 * random(5, 6, seed=1))
    torch.testing.assert_close(found["update"], deltas.mean(0))


def test_a_step_is_linear_in_updates_and_cache_together() -> None:
    clients, (d1, d2), (c1, c2) = [1, 1, 3], random(2, 3, 6), random(2, 5, 6, seed=1)
    both = flush(2 * d1 - d2, clients, 2 * c1 - c2)["update"]
    torch.testing.assert_close(
        both, 2 * flush(d1, clients, c1)["update"] - flush(d2, clients, c2)["update"]
    )


def test_of_a_client_that_arrives_twice_the_later_update_is_kept() -> None:
    deltas, cache = random(3, 6), random(5, 6, seed=1)
    found = flush(deltas, [2, 0, 2], cache)["cache"]
    assert torch.equal(found[[2, 0]], deltas[[2, 1]]) and torch.equal(
        found[[1, 3, 4]], cache[[1, 3, 4]]
    )


@pytest.mark.parametrize(("average", "second"), [("all", 2 + 4 + 2 / 3), ("seen", 2 + 4 + 2)])
def test_clients_that_never_came_count_as_zeros_and_those_without_samples_not_at_all(
    average: Any, second: float
) -> None:
    at = server(CA2FL(average=average), counts=(10, 0, 10, 10))
    arrive(at, (0, 2.0))
    assert at.vector[0] == 2 and at.report["ca2fl.seen"] == pytest.approx(1 / 3)
    arrive(at, (3, 4.0))
    assert at.vector[0] == pytest.approx(second)
    assert at.vector[-1] == 6.0, "buffers are never cached"


def test_in_rounds_with_everybody_ca2fl_and_ace_are_uniform_fedavg() -> None:
    settings: dict[str, Any] = {"schedule": Synchronous(6), "fleet": Ideal()} | UNIFORM
    fedavg = run(run_spec(model=NORMED), **settings)
    for method in (CA2FL(), ACE(1.0)):
        found = run(run_spec(method, model=NORMED), **settings)
        for name, values in found.tensors.items():
            np.testing.assert_allclose(
                values, fedavg.tensors[name], rtol=1e-3, atol=1e-5, err_msg=name
            )


@pytest.mark.parametrize("method", [CA2FL(), ACE(0.3), ACE(0.3, 3)], ids=repr)
def test_a_cache_has_the_last_update_of_every_client_and_their_sum(method: Method) -> None:
    spy = Spy(study := run_spec(method, data=equal_clients(clients=12)))
    found = run_to_end(coordinate(study, BUFFER, runtime=spy, rounds=7))
    state = {
        name.partition(".")[2]: tensor for name, tensor in found.coordinator.server.state.items()
    }
    gone = found.in_flight
    last = {u.client: u for u in sorted(spy.updates, key=lambda u: u.job) if u.job not in gone}
    assert set(state["clients"].tolist()) == set(last) and len(last) < 12, "some were never seen"
    trained = found.coordinator.layout.trained
    for client, row in zip(state["clients"].tolist(), state["cache"], strict=True):
        assert np.array_equal(row.numpy(), last[client].delta[:trained]), "bit for bit"
    counted = state.get("counted", torch.ones(len(last), dtype=torch.bool))
    torch.testing.assert_close(
        state["total"], state["cache"][counted].double().sum(0), rtol=1e-12, atol=1e-13
    )
    if "versions" in state:
        assert state["versions"].tolist() == [
            last[client].version for client in state["clients"].tolist()
        ]


# --- FADAS ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0, 1, 5])
def test_a_late_update_never_makes_the_rate_larger_and_one_within_the_threshold_leaves_it(
    threshold: int,
) -> None:
    for late in range(12):
        asked: dict[str, Any] = {"server_lr": 0.3, "max_staleness": late, "threshold": threshold}
        cap, scale = (delay_adaptive_lr(**asked, rule=rule) for rule in ("cap", "scale"))
        if late <= threshold:
            assert cap == scale == 0.3
        else:
            assert scale <= cap <= min(0.3, 1 / late) and scale == 0.3 / late


def adapted(
    delta: Tensor, state: Sequence[Tensor] | None = None, **settings: Any
) -> dict[str, Tensor]:
    moments = state or [torch.zeros_like(delta)] * 3
    names = ("first_moment", "second_moment", "max_second_moment")
    zero = torch.zeros_like(delta)
    return amsgrad_step(
        params=zero, delta=delta, **dict(zip(names, moments, strict=True)), **settings
    )


def test_the_first_step_goes_by_signs_alone() -> None:
    delta = random(8)
    found = adapted(delta, server_lr=0.3, beta1=0.6, beta2=0.8, eps=1e-15)["params"]
    torch.testing.assert_close(found, 0.3 * 0.4 / 0.2**0.5 * delta.sign())
    torch.testing.assert_close(
        adapted(delta, server_lr=0.3, eps=1e-15, step=1)["params"], 0.3 * delta.sign()
    )


def test_by_default_the_moments_forget_as_in_the_released_code() -> None:
    delta = torch.tensor([2.0, -1.0, 1e-8]).double()
    found = adapted(delta, server_lr=0.3)
    torch.testing.assert_close(found["first_moment"], 0.1 * delta)
    torch.testing.assert_close(found["second_moment"], 0.01 * delta**2)
    torch.testing.assert_close(found["params"], 0.3 * 0.1 * delta / (0.1 * delta.abs() + 1e-8))


def test_without_an_update_nothing_moves() -> None:
    for step in (None, 1):
        assert all(
            not tensor.any()
            for tensor in adapted(torch.zeros(5), server_lr=0.3, step=step).values()
        )


def test_the_largest_second_moment_is_never_forgotten() -> None:
    highest, state = torch.zeros(6).double(), None
    for seed in range(20):
        found = adapted(random(6, seed=seed) / (seed + 1), state, server_lr=0.1)
        _, *state = found.values()
        assert (state[2] >= highest).all() and (state[2] >= state[1]).all()
        highest = state[2]
    assert (state[2] > state[1]).all()


def test_only_the_step_knows_of_late_updates_and_only_where_a_threshold_is_set() -> None:
    seen = {}
    for threshold in (0, 5, None):
        at, bases = server(FADAS(0.5, threshold)), dict[int, Tensor]()
        for version in (0, 1, 0, 0):
            arrive(at, (0, 1.0), bases=bases, version=version)
        seen[threshold] = at.report["fadas.rate"], at.state["fadas.first_moment"].tolist()
    assert [rate for rate, _ in seen.values()] == [pytest.approx(0.5 / 3), 0.5, 0.5]
    assert len({tuple(moment) for _, moment in seen.values()}) == 1


def test_the_history_has_the_rate_and_the_length_of_every_step() -> None:
    found = run(run_spec(FADAS(0.05)), BUFFER, rounds=6)
    assert {row["fadas.rate"] for row in found.rows} >= {0.05} and all(
        row["fadas.moved"] > 0 for row in found.rows
    )


# --- ACE and ACED ---------------------------------------------------------------------------------------------------


def entry(
    cache: Tensor, versions: Sequence[int], delta: Tensor, limit: int | None = None
) -> dict[str, Tensor]:
    """Client 1 arrives at version 9 with an update from version 7."""
    given = {
        "params": random(6, seed=9),
        "cache": cache,
        "dispatch_versions": torch.tensor(versions),
        "delta": delta,
    }
    copies = {name: tensor.clone() for name, tensor in given.items()}
    found = all_client_step(
        **given, client=1, dispatch_version=7, version=9, server_lr=0.5, max_staleness=limit
    )
    assert all(torch.equal(given[name], copies[name]) for name in given), (
        "arguments stay as they were"
    )
    assert torch.equal(found["cache"][1], delta) and found["dispatch_versions"][1] == 7
    others = [row for row in range(len(cache)) if row != 1]
    assert torch.equal(found["cache"][others], cache[others])
    return found


def test_equal_entries_are_stepped_along_whoever_they_are_from() -> None:
    delta = random(6)
    for versions in ([0, 5, 3], [-1, -1, -1], [4, -1, 8]):
        found = entry(delta.expand(3, 6), versions, delta)["params"]
        torch.testing.assert_close(found, random(6, seed=9) + 0.5 * delta)


def test_one_client_is_asynchronous_sgd_and_clients_without_an_entry_do_not_count() -> None:
    delta = random(6)
    found = entry(random(3, 6, seed=1), [-1, 4, -1], delta)["params"]
    torch.testing.assert_close(found, random(6, seed=9) + 0.5 * delta)
    assert active_clients(dispatch_versions=torch.tensor([-1, 0]), version=0).tolist() == [
        False,
        True,
    ]


def test_a_limit_above_all_ages_is_none_and_one_below_all_leaves_the_parameters() -> None:
    cache, delta, versions = random(3, 6), random(6, seed=1), [3, 4, 0]
    assert torch.equal(
        entry(cache, versions, delta, 9)["params"], entry(cache, versions, delta)["params"]
    )
    assert torch.equal(entry(cache, versions, delta, 1)["params"], random(6, seed=9))


@pytest.mark.parametrize("limit", [None, 4])
def test_the_running_sum_is_that_of_the_entries_after_a_thousand_arrivals(
    limit: int | None,
) -> None:
    at, bases, draw = (
        server(ACE(0.1, limit), clients=7),
        dict[int, Tensor](),
        np.random.default_rng(0),
    )
    for number in range(1000):
        version = int(draw.integers(max(0, number - 8), number + 1))
        arrive(
            at, (int(draw.integers(7)), draw.standard_normal(WIDTH)), bases=bases, version=version
        )
    assert not (limit and at.state["ace.counted"].all())
    total = at.state["ace.cache"][at.state["ace.counted"]].double().sum(0)
    torch.testing.assert_close(at.state["ace.total"], total, rtol=1e-6, atol=1e-6)


def test_an_arrival_touches_its_own_entry_alone() -> None:
    at = server(ACE(1.0), clients=3)
    for client in range(3):
        arrive(at, (client, 1.0))
    at.state["ace.cache"][[0, 2]] = torch.nan
    arrive(at, (1, 4.0))
    assert at.state["ace.total"].tolist() == [6.0] * (WIDTH - 1)


def test_entries_expire_at_versions_that_did_not_step() -> None:
    at, bases = server(ACE(1.0, max_staleness=1)), dict[int, Tensor]()
    arrive(at, (0, 1.0), bases=bases)
    seen = []
    for client in (1, 2, 3):
        arrive(at, (client, 10.0), bases=bases, version=0)
        seen.append((at.report["ace.active"], at.vector[0].item(), at.vector[-1].item()))
    # At version 1 both are one version old; later nobody is young enough, and not even buffers move.
    assert seen == [(2.0, 6.5, 10.0), (0.0, 6.5, 10.0), (0.0, 6.5, 10.0)] and at.version == 4


def test_with_initialise_nothing_moves_before_every_client_with_samples_has_come() -> None:
    at = server(ACE(1.0, initialise=True), counts=(10, 0, 10, 10))
    for client in (0, 2, 0):
        arrive(at, (client, client + 1.0))
        assert not at.vector.any()
    arrive(at, (3, 4.0))
    assert at.vector[0] == pytest.approx((1 + 3 + 4) / 3)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [CA2FL, ACE])
def test_a_cache_that_may_outgrow_its_budget_is_refused_with_what_it_may_take(
    make: Callable[..., Method],
) -> None:
    counts = (10,) * 4 + (0,) * 7  # clients without samples never train
    most = 4 * (WIDTH - 1) * 4 / 2**30
    server(make(budget=most), counts=counts)
    with pytest.raises(
        ValueError, match=rf"method.{make.name} may keep .* of 4 clients.*{make.name}.budget=0.01"
    ):
        server(make(budget=most * 0.99), counts=counts)


@pytest.mark.parametrize("method", [CA2FL(), ACE()], ids=lambda method: method.name)
def test_weights_by_samples_are_refused(method: Method) -> None:
    with pytest.raises(
        ValueError, match=f"weighting=samples has no effect on method '{method.name}'"
    ):
        coordinate(run_spec(method, data=clients_of_sizes((3, 3, 3, 3))), weighting="samples")


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (FedAsync, {"alpha": 1.5}),
        (FedAsync, {"kind": "linear"}),
        (FedAsync, {"a": -1.0}),
        (FedAsync, {"b": -1.0}),
        (FedAsync, {"max_staleness": -1}),
        (FedAsync, {"alpha_decay": 0.0}),
        (CA2FL, {"server_lr": -1.0}),
        (CA2FL, {"average": "some"}),
        (CA2FL, {"cache": "tape"}),
        (CA2FL, {"budget": -1.0}),
        (FADAS, {"server_lr": -1.0}),
        (FADAS, {"threshold": -1}),
        (FADAS, {"rule": "cut"}),
        (FADAS, {"eps": 0.0}),
        (FADAS, {"beta1": 1.0}),
        (FADAS, {"beta2": -0.1}),
        (ACE, {"server_lr": -1.0}),
        (ACE, {"max_staleness": -1}),
        (ACE, {"cache": "tape"}),
        (ACE, {"budget": -1.0}),
        (FedBuff, {"exponent": -1.0}),
        (FedBuff, {"normalization": "mean"}),
    ],
)
def test_settings_out_of_range_are_refused(
    make: Callable[..., Method], settings: dict[str, Any]
) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=f"method.{make.name}.{key}="):
        make(**settings)


# --- clients of two speeds ------------------------------------------------------------------------------------------


class Rule(Protocol):
    """A server of the toy problem: what it does with a change from x_base."""

    x: Tensor
    version: int

    def take(self, client: int, base: int, start: Tensor, change: Tensor) -> None: ...


class OneByOne:
    """x moves at every arrival, by `method`'s own server."""

    def __init__(self, method: Method, size: int = 1):
        layout, task = Layout((), (), 5, 5, 5, 0, 0), Task((1, 1, 1), 2, 10)
        start, nothing = torch.zeros(5, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
        self.server = make_server(
            layout, start, nothing, [method], np.full(10, 10), 0, task, "uniform"
        )
        self.size, self.waiting = size, list[Update]()
        self.bases: dict[int, PublishedVersion] = {}

    @property
    def x(self) -> Tensor:
        return self.server.vector

    @property
    def version(self) -> int:
        return self.server.version

    def take(self, client: int, base: int, start: Tensor, change: Tensor) -> None:
        empty = np.empty(0, np.int64)
        self.bases[base] = PublishedVersion(base, start.numpy(), empty)
        self.waiting.append(Update(0, client, base, 1, 1, 1, 0.0, 0.0, empty, delta=change.numpy()))
        if len(self.waiting) == self.size:
            ages = [self.version - update.version for update in self.waiting]
            self.server.step(self.waiting, {}, ages, self.bases)
            self.waiting = []


def distance(rule: Rule, arrivals: int = 1000) -> float:
    """From the mean optimum at the end; five of ten clients are eight times as fast, and their optima lie aside."""
    draw = np.random.default_rng(0)
    optima = draw.normal(0, 3, (10, 5))
    optima[:5] += 2
    going: list[tuple[float, int, int, Tensor]] = []
    idle, gaps = list(range(10)), []

    def send(now: float) -> None:
        client = idle.pop(draw.integers(len(idle)))
        job = (1 if client < 5 else 8) * draw.uniform(0.8, 1.2)
        heapq.heappush(going, (now + job, client, rule.version, rule.x))

    for _ in range(5):
        send(0.0)
    for number in range(arrivals):
        now, client, base, start = heapq.heappop(going)
        five_steps = (1 - 0.95**5) * (torch.from_numpy(optima[client]) - start)
        rule.take(client, base, start, five_steps)
        idle.append(client)
        send(now)
        if number >= 0.8 * arrivals:
            gaps.append(float((rule.x - torch.from_numpy(optima.mean(0))).norm()))
    return float(np.mean(gaps))


def test_fast_clients_pull_fedasync_and_fadas_aside_and_leave_ca2fl_and_ace_where_they_are() -> (
    None
):
    ca2fl, ace = distance(OneByOne(CA2FL(), 3)), distance(OneByOne(ACE(0.3)))
    assert max(ca2fl, ace) < 0.01
    aced, fadas = (
        distance(OneByOne(ACE(0.3, 20))),
        distance(OneByOne(FADAS(0.02, 3, "cap"), 3), 3000),
    )
    assert 0.3 < aced < fadas < distance(OneByOne(FedAsync()))


# --- with others ----------------------------------------------------------------------------------------------------


def test_a_run_of_single_arrivals_has_stale_updates_and_the_methods_columns() -> None:
    for method, columns in (
        (FedAsync(), {"fedasync.rate"}),
        (CA2FL(0.3), {"ca2fl.seen"}),
        (ACE(), {"ace.active", "ace.age"}),
        (FADAS(), {"fadas.rate", "fadas.moved"}),
    ):
        found = run(run_spec(method, model=NORMED_MLP), ONE_BY_ONE, rounds=8)
        assert max(row["staleness"] or 0 for row in found.rows) >= 2
        assert columns == {name for name in found.rows[-1] if name.startswith(f"{method.name}.")}
