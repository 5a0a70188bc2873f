"""Test FedAsync, CA2FL, FADAS and ACE with extreme settings, and with clients of two speeds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
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
from raysim.methods.ace import ACE
from raysim.methods.ca2fl import CA2FL
from raysim.methods.fadas import FADAS, amsgrad_step
from raysim.methods.fedasync import (
    FedAsync,
    arrival_rates,
    staleness_weight,
)
from raysim.methods.fedbuff import FedBuff
from raysim.simulation.schedule import Buffered
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
    """Let the server aggregate the given updates in one aggregation.

    arrivals: for each update, its client and its values [WIDTH]; a number fills all entries.
    bases: the vectors of earlier versions, to which this function adds the current one.
    version: the version from which all clients started; -1 means the current one.
    """
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


# --- FedAsync ---------------------------------------------------------------------------------


def test_fedasync_hinge_weight_is_continuous_and_exponent_0_gives_weight_1() -> None:
    assert staleness_weight(staleness=4, kind="hinge", a=10.0, b=4 - 1e-12) == pytest.approx(1.0)
    assert {staleness_weight(staleness=s, a=0.0) for s in range(9)} == {1.0}


def test_negative_staleness_is_refused() -> None:
    with pytest.raises(ValueError, match="staleness"):
        staleness_weight(staleness=-1)


def test_fedasync_mixing_rates_stay_between_0_and_1_if_scaled_by_samples() -> None:
    rates = arrival_rates(
        base_versions=torch.tensor([5, 5, 0]),
        version=5,
        alpha=0.6,
        kind="constant",
        max_staleness=6,
        factors=torch.tensor([0.5, 3.0, 1.0]),
    )
    assert rates == [0.3, 1.0, 0.0]


def test_fedasync_with_alpha_1_replaces_the_model_by_the_last_trained_one() -> None:
    at, bases = server(FedAsync(1.0, "constant")), dict[int, Tensor]()
    arrive(at, (0, 1.0), (1, 2.0), bases=bases)
    assert at.vector.tolist() == [2.0] * WIDTH
    arrive(at, (2, 5.0), bases=bases, version=0)
    assert at.vector.tolist() == [5.0] * WIDTH, "buffers, too"


def test_fedasync_with_alpha_0_does_not_change_the_model() -> None:
    at = server(FedAsync(0.0))
    arrive(at, (0, 1.0), (1, 2.0))
    assert at.vector.tolist() == [0.0] * WIDTH


def test_too_stale_update_is_discarded_and_counted() -> None:
    at, bases = server(FedAsync(0.5, "constant", max_staleness=1)), dict[int, Tensor]()
    for client in range(2):
        arrive(at, (client, 1.0), bases=bases)
        assert at.report == {"fedasync.rate": 0.5, "fedasync.discarded": 0.0}
    before = at.vector.clone()
    arrive(at, (2, 9.0), bases=bases, version=0)
    assert at.report == {"fedasync.rate": 0.0, "fedasync.discarded": 1.0}
    assert torch.equal(at.vector, before) and at.version == 3


def test_fedasync_weighs_updates_equally_by_default_and_can_weigh_them_by_samples() -> None:
    counts = (30, 10, 20, 0)  # mean 20: a client without samples is none
    at = server(FedAsync(0.4, "constant"), weighting="samples", counts=counts)
    arrive(at, (0, 1.0))
    assert at.vector[0] == pytest.approx(0.6)
    assert server(FedAsync(0.4)).weighting == "uniform"
    assert coordinate(run_spec(FedAsync())).server.weighting == "uniform"


# --- CA2FL ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("average", "second"), [("all", 2 + 4 + 2 / 3), ("seen", 2 + 4 + 2)])
def test_ca2fl_averages_over_all_clients_or_over_the_clients_seen_so_far(
    average: Any, second: float
) -> None:
    at = server(CA2FL(average=average), counts=(10, 0, 10, 10))
    arrive(at, (0, 2.0))
    assert at.vector[0] == 2 and at.report["ca2fl.seen"] == pytest.approx(1 / 3)
    arrive(at, (3, 4.0))
    assert at.vector[0] == pytest.approx(second)
    assert at.vector[-1] == 6.0, "buffers are never cached"


@pytest.mark.parametrize("method", [CA2FL(), ACE(0.3), ACE(0.3, 3)], ids=repr)
def test_update_cache_has_the_last_update_of_each_client(method: Method) -> None:
    spy = Spy(study := run_spec(method, data=equal_clients(clients=12)))
    ended = run_to_end(coordinate(study, BUFFER, runtime=spy, rounds=7))
    state = {
        name.partition(".")[2]: tensor for name, tensor in ended.coordinator.server.state.items()
    }
    gone = ended.in_flight
    last = {u.client: u for u in sorted(spy.updates, key=lambda u: u.job) if u.job not in gone}
    assert set(state["clients"].tolist()) == set(last) and len(last) < 12, "some were never seen"
    trained = ended.coordinator.layout.trained
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


# --- FADAS ------------------------------------------------------------------------------------


def adapted(
    delta: Tensor, state: Sequence[Tensor] | None = None, **settings: Any
) -> dict[str, Tensor]:
    moments = state or [torch.zeros_like(delta)] * 3
    names = ("first_moment", "second_moment", "max_second_moment")
    zero = torch.zeros_like(delta)
    return amsgrad_step(
        params=zero, delta=delta, **dict(zip(names, moments, strict=True)), **settings
    )


def test_default_settings_of_fadas_are_those_of_the_released_code() -> None:
    delta = torch.tensor([2.0, -1.0, 1e-8]).double()
    ended = adapted(delta, server_lr=0.3)
    torch.testing.assert_close(ended["first_moment"], 0.1 * delta)
    torch.testing.assert_close(ended["second_moment"], 0.01 * delta**2)
    torch.testing.assert_close(ended["params"], 0.3 * 0.1 * delta / (0.1 * delta.abs() + 1e-8))


def test_fadas_lowers_only_its_learning_rate_if_updates_are_too_stale() -> None:
    seen = {}
    for threshold in (0, 5, None):
        at, bases = server(FADAS(0.5, threshold)), dict[int, Tensor]()
        for version in (0, 1, 0, 0):
            arrive(at, (0, 1.0), bases=bases, version=version)
        seen[threshold] = at.report["fadas.rate"], at.state["fadas.first_moment"].tolist()
    assert [rate for rate, _ in seen.values()] == [pytest.approx(0.5 / 3), 0.5, 0.5]
    assert len({tuple(moment) for _, moment in seen.values()}) == 1


# --- ACE and ACED -----------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 4])
def test_running_sum_of_the_ace_cache_is_exact_after_many_updates(
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


def test_ace_reads_only_the_cached_update_of_the_client_whose_update_arrives() -> None:
    at = server(ACE(1.0), clients=3)
    for client in range(3):
        arrive(at, (client, 1.0))
    at.state["ace.cache"][[0, 2]] = torch.nan
    arrive(at, (1, 4.0))
    assert at.state["ace.total"].tolist() == [6.0] * (WIDTH - 1)


def test_ace_ignores_too_stale_updates_and_skips_a_step_if_none_remain() -> None:
    at, bases = server(ACE(1.0, max_staleness=1)), dict[int, Tensor]()
    arrive(at, (0, 1.0), bases=bases)
    seen = []
    for client in (1, 2, 3):
        arrive(at, (client, 10.0), bases=bases, version=0)
        seen.append((at.report["ace.active"], at.vector[0].item(), at.vector[-1].item()))
    # At version 1 both are one version old; later nobody is young enough, and not even buffers
    # move.
    assert seen == [(2.0, 6.5, 10.0), (0.0, 6.5, 10.0), (0.0, 6.5, 10.0)] and at.version == 4


def test_ace_waits_for_all_clients_before_the_first_step() -> None:
    at = server(ACE(1.0, initialise=True), counts=(10, 0, 10, 10))
    for client in (0, 2, 0):
        arrive(at, (client, client + 1.0))
        assert not at.vector.any()
    arrive(at, (3, 4.0))
    assert at.vector[0] == pytest.approx((1 + 3 + 4) / 3)


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [CA2FL, ACE])
def test_cache_larger_than_its_memory_budget_is_refused(
    make: Callable[..., Method],
) -> None:
    counts = (10,) * 4 + (0,) * 7  # clients without samples never train
    most = 4 * (WIDTH - 1) * 4 / 2**30
    server(make(budget=most), counts=counts)
    with pytest.raises(ValueError, match=rf"method\.{make.name}.*budget=0\.01"):
        server(make(budget=most * 0.99), counts=counts)


@pytest.mark.parametrize("method", [CA2FL(), ACE()], ids=lambda method: method.name)
def test_ca2fl_and_ace_refuse_weighting_by_samples(method: Method) -> None:
    with pytest.raises(ValueError, match=r"^weighting=samples"):
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
def test_asynchronous_method_settings_out_of_range_are_refused(
    make: Callable[..., Method], settings: dict[str, Any]
) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=f"method.{make.name}.{key}="):
        make(**settings)


# --- clients of two speeds --------------------------------------------------------------------


class Rule(Protocol):
    """The interface of the simple servers that the function `distance` tests.

    x: the parameters of the server's model.
    version: the number of aggregations so far.
    """

    x: Tensor
    version: int

    def take(self, client: int, base: int, start: Tensor, change: Tensor) -> None: ...


class OneByOne:
    """A server with a model of five numbers, which receives one update at a time.

    It aggregates when it has `size` updates.

    method: the method whose rule aggregates the updates.
    size: the number of updates in each aggregation.
    """

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
    """Return the mean distance between a server's model and the optimum of a quadratic problem.

    The distance is measured after each of the last fifth of the arrivals. Each of 10 clients has
    the loss |x - a_i|^2 / 2, so the optimum is the mean of all a_i. Clients 0 to 4 are eight times
    as fast as clients 5 to 9, and have other a_i.
    """
    draw = np.random.default_rng(0)
    optima = draw.normal(0, 3, (10, 5))
    optima[:5] += 2
    in_flight: list[tuple[float, int, int, Tensor]] = []
    idle, gaps = list(range(10)), []

    def send(time_s: float) -> None:
        client = idle.pop(draw.integers(len(idle)))
        job = (1 if client < 5 else 8) * draw.uniform(0.8, 1.2)
        heapq.heappush(in_flight, (time_s + job, client, rule.version, rule.x))

    for _ in range(5):
        send(0.0)
    for number in range(arrivals):
        time_s, client, base, start = heapq.heappop(in_flight)
        five_steps = (1 - 0.95**5) * (torch.from_numpy(optima[client]) - start)
        rule.take(client, base, start, five_steps)
        idle.append(client)
        send(time_s)
        if number >= 0.8 * arrivals:
            gaps.append(float((rule.x - torch.from_numpy(optima.mean(0))).norm()))
    return float(np.mean(gaps))


def test_ca2fl_and_ace_reach_the_optimum_of_all_clients() -> None:
    ca2fl, ace = distance(OneByOne(CA2FL(), 3)), distance(OneByOne(ACE(0.3)))
    assert max(ca2fl, ace) < 0.01


def test_fadas_and_fedasync_miss_the_optimum_by_more_than_ace_with_max_staleness() -> None:
    ace_with_max_staleness, fadas = (
        distance(OneByOne(ACE(0.3, 20))),
        distance(OneByOne(FADAS(0.02, 3, "cap"), 3), 3000),
    )
    assert 0.3 < ace_with_max_staleness < fadas < distance(OneByOne(FedAsync()))


# --- with others ------------------------------------------------------------------------------


def test_asynchronous_methods_add_their_columns_to_the_history() -> None:
    for method, columns in (
        (FedAsync(), {"fedasync.rate"}),
        (CA2FL(0.3), {"ca2fl.seen"}),
        (ACE(), {"ace.active", "ace.age"}),
        (FADAS(), {"fadas.rate", "fadas.moved"}),
    ):
        ended = run(run_spec(method, model=NORMED_MLP), ONE_BY_ONE, rounds=8)
        assert max(row["staleness"] or 0 for row in ended.rows) >= 2
        assert columns == {name for name in ended.rows[-1] if name.startswith(f"{method.name}.")}
