"""Test the server's step: its sums and their order, buffers, and hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import declare_methods, make_server, run_spec, with_settings
from torch import Tensor, nn

from raysim.api.declarations import Local, Task
from raysim.api.messages import GroupSums, Job, PublishedVersion, Update
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.api.setup import Setup
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedopt import FedAvgM
from raysim.simulation.server import AggregationError, Server
from raysim.training.run_spec import declare_run
from raysim.training.worker_sums import WorkerSums
from raysim.vectors.blocks import BLOCK
from raysim.vectors.layout import plan_layout
from raysim.vectors.tree_sum import weighted_sum

CLIENTS = 12
MODEL = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
LAYOUT = plan_layout({"model": MODEL})
TRAINED, SHARED = LAYOUT.trained, LAYOUT.shared
RNG = np.random.default_rng(0)
DELTAS = RNG.standard_normal((CLIENTS, SHARED)).astype(np.float32)
START = RNG.standard_normal(SHARED).astype(np.float32)
TASK = Task((1, 2, 2), 3, CLIENTS)
COUNTS = np.array([7, 1, 13, 4, 9, 22, 3, 5, 17, 2, 8, 6])


def server(*methods: Method, **settings: Any) -> Server:
    declarations = declare_methods(methods, {"model": MODEL}, LAYOUT, TASK)
    counters = torch.zeros(1, dtype=torch.int64)
    start = torch.tensor(START)
    return Server(declarations, start, counters, COUNTS, 0, TASK, local=Local(), **settings)


def update(
    client: int, version: int = 0, counter: int = 1, delta: np.ndarray | None = None
) -> Update:
    delta = DELTAS[client] if delta is None else delta
    samples = int(COUNTS[client])
    return Update(
        client, client, version, samples, samples, 1, 0.5, 0.0, np.array([counter]), delta=delta
    )


def step(
    target: Server,
    updates: Sequence[Update | None],
    sums: Sequence[GroupSums] = (),
    bases: dict[int, PublishedVersion] | None = None,
) -> Server:
    target.step(
        updates,
        {jobs: total for part in sums for jobs, total in part.items()},
        [0] * len(updates),
        bases or {},
    )
    return target


def on_a_worker(clients: Sequence[int], failed: Sequence[int] = ()) -> GroupSums:
    """Return the weighted sum of the updates of a group of clients, as a worker computes it.

    clients: the clients of the group.
    failed: the clients of the group whose jobs failed.
    """
    jobs = [Job(client, client, 0, 0, weight=float(COUNTS[client])) for client in clients]
    sums = WorkerSums([tuple(clients)])
    for job in jobs:
        sums.add(job, None if job.client in failed else torch.tensor(DELTAS[job.client]))
    return {group: total.numpy() for group, total in sums.totals.items()}


def summed_update(client: int) -> Update:
    samples = int(COUNTS[client])
    return Update(client, client, 0, samples, samples, 1, 0.5, 0.0, np.array([1]))


ALL = list(range(CLIENTS))


def groups(size: int) -> list[list[int]]:
    return [ALL[start : start + size] for start in range(0, CLIENTS, size)]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_sum_of_partial_sums_has_the_bits_of_the_sum_of_single_updates(size: int) -> None:
    single = step(server(), [update(client) for client in ALL])
    summed = step(
        server(),
        [summed_update(client) for client in ALL],
        [on_a_worker(unit) for unit in groups(size)],
    )
    assert torch.equal(single.vector, summed.vector)
    average = (COUNTS[:, None] * DELTAS.astype(np.float64)).sum(0) / COUNTS.sum()
    np.testing.assert_allclose(single.vector.numpy(), START + average, rtol=1e-5, atol=1e-6)


def test_sums_of_long_vectors_follow_the_fixed_tree() -> None:
    vectors = RNG.standard_normal((5, BLOCK + 3)).astype(np.float32)  # two blocks each
    weights = [0.3, 1.7, 2.0, 0.9, 5.1]
    group = (0, 1, 2, 3, 4)
    sums = WorkerSums([group])
    for number in (3, 2, 0, 1, 4):
        sums.add(Job(number, number, 0, 0, weight=weights[number]), torch.tensor(vectors[number]))
    expected = weighted_sum(list(vectors), weights)
    assert torch.equal(sums.totals[group], expected)


def test_new_version_does_not_depend_on_the_order_of_the_sums() -> None:
    sums = [on_a_worker(unit) for unit in groups(4)]
    ways = [
        step(server(), [summed_update(client) for client in ALL], order)
        for order in (sums, sums[::-1])
    ]
    assert torch.equal(ways[0].vector, ways[1].vector)


def test_server_can_add_sums_of_updates_and_single_updates() -> None:
    mixed = [
        *(summed_update(client) for client in ALL[:4]),
        *(update(client) for client in ALL[4:]),
    ]
    result = step(server(), mixed, [on_a_worker(ALL[:4])])
    assert torch.equal(result.vector, step(server(), [update(client) for client in ALL]).vector)


def test_updates_are_summed_in_the_order_of_virtual_time() -> None:
    ways = [
        step(server(), [update(client) for client in order]).vector for order in (ALL, ALL[::-1])
    ]
    assert torch.allclose(*ways, rtol=1e-5, atol=1e-6)


def test_sum_of_a_group_of_jobs_leaves_out_failed_clients() -> None:
    failed = (0, 6)
    present = [None if client in failed else update(client) for client in ALL]
    result = step(server(), present)
    summed = step(
        server(),
        [None if client in failed else summed_update(client) for client in ALL],
        [on_a_worker(unit, failed) for unit in groups(4)],
    )
    assert torch.equal(result.vector, summed.vector)
    kept = [client for client in ALL if client not in failed]
    average = (COUNTS[kept, None] * DELTAS[kept].astype(np.float64)).sum(0) / COUNTS[kept].sum()
    np.testing.assert_allclose(result.vector.numpy(), START + average, rtol=1e-5, atol=1e-6)


def test_server_accepts_a_group_in_which_all_jobs_failed() -> None:
    present = [None if client < 4 else update(client) for client in ALL]
    result = step(server(), present)
    assert torch.isfinite(result.vector).all()
    assert not np.array_equal(result.vector.numpy(), START)


def test_round_whose_jobs_all_fail_does_not_change_the_vector() -> None:
    result = step(server(), [None, None])
    assert np.array_equal(result.vector.numpy(), START)
    assert result.version == 1


def test_server_step_does_not_depend_on_weights_if_updates_are_equal() -> None:
    same = np.ones(SHARED, np.float32)
    for weighting in ("samples", "uniform"):
        result = step(server(weighting=weighting), [update(client, delta=same) for client in ALL])
        np.testing.assert_allclose(result.vector.numpy(), START + 1, rtol=1e-6)


# --- buffers and counters -------------------------------------------------------------------------


class Doubling(Method):
    name = "doubling"

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        return aggregation.with_weights(aggregation.weights, lambda weights: 1.0)

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        return 100 * direction


@pytest.mark.parametrize(
    "method", [Doubling(), FedAvgM(server_lr=7.0)], ids=lambda method: method.name
)
def test_server_learning_rate_does_not_scale_batchnorm_statistics(method: Method) -> None:
    result = step(server(method), [update(client) for client in ALL])
    plain = step(server(), [update(client) for client in ALL])
    assert torch.equal(result.vector[TRAINED:], plain.vector[TRAINED:])
    assert not torch.equal(result.vector[:TRAINED], plain.vector[:TRAINED])


def test_batchnorm_statistics_of_stale_updates_are_averaged() -> None:
    target = server(FedBuff(), weighting="uniform")
    step(target, [update(client) for client in (0, 1)])
    step(target, [update(client, version=1) for client in (2, 3)], bases={1: target.published()})
    now = target.vector.clone()
    bases = {0: PublishedVersion(0, START, np.zeros(1, np.int64)), 2: target.published()}
    target.step([update(4, version=0), update(5, version=2)], {}, [2, 0], bases)
    weights = np.array([1 / np.sqrt(3), 1.0])
    statistics = np.stack([START + DELTAS[4], now.numpy() + DELTAS[5]])[:, TRAINED:]
    expected = (weights[:, None] * statistics).sum(0) / weights.sum()
    np.testing.assert_allclose(target.vector[TRAINED:].numpy(), expected, rtol=1e-5, atol=1e-6)
    direction = (weights[:, None] * DELTAS[[4, 5], :TRAINED]).sum(0) / 2
    np.testing.assert_allclose(
        target.vector[:TRAINED].numpy(), now[:TRAINED].numpy() + direction, rtol=1e-5, atol=1e-6
    )


def test_batchnorm_batch_counters_get_the_largest_value_of_all_clients() -> None:
    result = step(server(), [update(client, counter=1 + client % 5) for client in ALL])
    assert result.counters.tolist() == [5]


# --- methods' parts -------------------------------------------------------------------------------


def test_updates_are_summed_unless_methods_need_single_updates() -> None:
    class Combining(Method):
        name = "combining"

        def combine(self, aggregation: Aggregation, server: ServerView) -> Tensor:
            return torch.stack([delta[:TRAINED] for delta in aggregation.deltas]).mean(0)

    assert server().summable
    assert server(FedAvgM()).summable
    assert not server(FedBuff(), weighting="uniform").summable
    assert not server(Combining()).summable
    result = step(server(Combining()), [update(client) for client in ALL])
    np.testing.assert_allclose(
        result.vector[:TRAINED], START[:TRAINED] + DELTAS[:, :TRAINED].mean(0), rtol=1e-5, atol=1e-6
    )
    plain = step(server(), [update(client) for client in ALL])
    assert torch.allclose(result.vector[TRAINED:], plain.vector[TRAINED:], rtol=1e-5, atol=1e-6)


def test_hooks_of_a_server_step_run_in_order() -> None:
    log: list[str] = []

    class Logging(Method):
        name = "logging"

        def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
            log.append("weigh")
            return aggregation.with_weights([2 * weight for weight in aggregation.weights])

        def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
            log.append("step")
            return direction

        def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
            log.append("absorb")
            assert not torch.equal(server.vector, torch.tensor(START))

    result = step(server(Logging()), [update(client) for client in ALL])
    assert log == ["weigh", "step", "absorb"]
    plain = step(server(), [update(client) for client in ALL])
    assert torch.equal(result.vector, plain.vector), (
        "weights that are all twice as large are the same weights"
    )


def test_method_that_owns_the_server_step_is_called_after_the_other_methods() -> None:
    class Halving(Method):
        name = "halving"

        def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
            log.append(self.name)
            return direction.mul_(0.5)

    class Ruling(Method):
        name = "ruling"

        def setup(self, run: Setup) -> None:
            run.owns("step")

        def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
            log.append(self.name)
            assert aggregation.combined is not None
            assert torch.equal(direction, 0.5 * aggregation.combined)
            return 3 * aggregation.combined

    log: list[str] = []
    plain = step(server(), [update(client) for client in ALL])
    for methods in ([Halving(), Ruling()], [Ruling(), Halving()]):
        ruled = step(server(*methods), [update(client) for client in ALL])
        moved, wanted = (result.params.numpy() - START[:TRAINED] for result in (ruled, plain))
        np.testing.assert_allclose(moved, 3 * wanted, rtol=1e-4, atol=1e-6)
    assert log == ["halving", "ruling"] * 2


def test_server_report_contains_only_values_of_the_last_aggregation() -> None:
    class First(Method):
        name = "first"

        def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
            if server.version == 0:
                server.report["seen"] = 1.0

    result = step(server(First()), [update(0)])
    assert result.report == {"first.seen": 1.0}
    assert step(result, [update(1, result.version)]).report == {}


def test_server_stores_cumulative_sums_of_the_clients_sample_shares() -> None:
    counters, counts = torch.zeros(1, dtype=torch.int64), np.array([1, 0, 2, 1])
    result = make_server(LAYOUT, torch.tensor(START), counters, (), counts, 0, TASK)
    assert result.sample_ends.tolist() == [0.25, 0.75, 1.0] and result.able == 3
    result.set_clients(np.array([0, 3, 0, 1]), unseen=0)
    assert result.sample_ends.tolist() == [0.75, 1.0]
    assert result.able == 2


class Halving(Method):
    """A method that halves the weight of each update."""

    name = "halving"

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        return aggregation.with_weights([weight / 2 for weight in aggregation.weights])


@pytest.mark.parametrize(
    ("normalization", "scale"), [("count", 0.5), ("weights", 1.0), ("none", 0.5)]
)
def test_fedbuff_normalises_weights_after_all_other_methods(
    normalization: Any, scale: float
) -> None:
    (alone, first, last) = (
        step(server(*methods, weighting="uniform"), [update(client) for client in ALL])
        for buffer in [FedBuff(normalization=normalization)]
        for methods in ([buffer], [buffer, Halving()], [Halving(), buffer])
    )
    assert torch.equal(first.vector, last.vector), "wherever it stands in the list"
    moved, want = (result.params.numpy() - START[:TRAINED] for result in (first, alone))
    np.testing.assert_allclose(moved, scale * want, rtol=1e-4, atol=1e-6)


def test_aggregation_contains_single_updates_only_if_a_method_needs_them() -> None:
    class Watching(Method):
        name = "watching"

        def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
            seen.append(len(aggregation.deltas))

    class Needing(Watching):
        name = "needing"

        def setup(self, run: Setup) -> None:
            run.read_updates()

    seen: list[int] = []
    for methods in ([Watching()], [Needing()], [Watching(), FedBuff()]):
        step(server(*methods, weighting="uniform"), [update(client) for client in ALL])
    assert seen == [0, CLIENTS, CLIENTS]


def test_server_computes_the_messages_of_a_method_only_when_they_are_sent() -> None:
    class Sending(Method):
        name = "sending"

        def setup(self, run: Setup) -> None:
            run.send("once", lambda server: self.make("once"), 2, once=True)
            run.send("version", lambda server: self.make("version"), 2)
            run.send_to_client("own", lambda client, server: self.make(str(client)), 2)

        @staticmethod
        def make(name: str) -> Tensor:
            log.append(name)
            return torch.ones(2)

    log: list[str] = []
    target = server(Sending())
    assert not log and list(target.sent_once()) == ["sending.once"]
    assert list(target.published().extras) == ["sending.version"]
    assert target.published().floats == SHARED + 2
    assert list(target.sent_to(3)) == ["sending.own"]
    assert log == ["once", "version", "version", "3"]


def test_server_step_does_not_change_published_version() -> None:
    target = server(FedAvgM())
    published = target.published()
    step(target, [update(client) for client in ALL])
    assert np.array_equal(published.vector, START)
    assert published.counters.tolist() == [0]


def test_fedbuff_refuses_weighting_by_samples() -> None:
    declare_run(with_settings(run_spec(FedBuff()), weighting="uniform"))
    with pytest.raises(ValueError, match=r"weighting=samples "):
        declare_run(with_settings(run_spec(FedBuff()), weighting="samples"))


def test_error_of_a_diverged_server_lists_the_updates_with_the_largest_norms() -> None:
    deltas = [np.full(LAYOUT.shared, size, np.float32) for size in (1.0, 3.0, np.inf, 4.0, 2.0)]
    target = server(FedBuff(), weighting="uniform")
    named = r"the longest updates are inf of client 2, \S+ of client 3, \S+ of client 1\)"
    with pytest.raises(AggregationError, match=named):
        step(target, [update(client, delta=delta) for client, delta in enumerate(deltas)])
