"""Test that an aggregation has the same bits if workers or nodes compute parts of its sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as how, strategies as st
from tiny_runs import (
    NORMED_MLP,
    FinishedRun,
    coordinate,
    equal_clients,
    run_spec,
    run_to_end,
    several_workers,
    with_settings,
)

from raysim.api.declarations import Evaluation
from raysim.api.local_job import LocalJob
from raysim.api.messages import TrainingResult
from raysim.api.method import Method
from raysim.methods.fedbn import FedBN
from raysim.runtime.inprocess import InProcess
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.group_sums import SumTrees
from raysim.simulation.runtime import WorkerDiedError
from raysim.simulation.schedule import Buffered, Immediate, Schedule, Synchronous
from raysim.training.run_spec import RunSpec

NODES = (0, 1, 2, 1, 2, 1, 0)  # of seven workers
COHORT = Synchronous(28)


class Sick(Method):
    """A method that fails for some clients."""

    name = "sick"
    clients = (0, 1, 2, 5, 9, 30)

    def begin(self, job: LocalJob) -> None:
        if job.client in self.clients:
            raise RuntimeError("sick")


class Dead(Sick):
    """A method that fails for all clients."""

    clients = tuple(range(40))


def study(*methods: Method) -> RunSpec:
    spec = run_spec(*methods, model=NORMED_MLP, data=equal_clients(clients=40, samples=400))
    return with_settings(spec, rounds=2, tolerate=1.0)


class Nodes(InProcess):
    """A runtime in one process whose workers act as if they were on several nodes.

    nodes: the node of each worker.
    least: nodes add up updates only if the model has at least this number of parameters.

    The object records the calls of a run:
    trained: the name of the called method and the worker's node, for each training call.
    added: the node and the number of sums, for each call of `add_up`.
    vectors: the number of vectors in each object that the coordinator fetched.
    """

    def __init__(self, spec: RunSpec, nodes: Sequence[int], least: float = 0.0):
        super().__init__(*several_workers(spec, len(nodes)).members)
        self.nodes, self.combine_from = nodes, least
        self.trained: list[tuple[str, int]] = []
        self.added: list[tuple[int, int]] = []  # node, and number of sums
        self.vectors: list[int] = []  # that arrive, by answer

    def call(self, worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        if method.startswith("train"):
            self.trained.append((method, self.nodes[worker]))
        return super().call(worker, method, *args, returns=returns)

    def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Any]) -> Any:
        self.added.append((node, len(refs)))
        return super().add_up(node, parts, refs)

    def get(self, ref: Any) -> Any:
        if isinstance(ref, TrainingResult):
            self.vectors.append(len(ref.sums))
        if isinstance(ref, np.ndarray):
            self.vectors.append(1)
        return super().get(ref)


def run_on_nodes(
    spec: RunSpec, nodes: Sequence[int] = NODES, schedule: Schedule = COHORT, least: float = 0.0
) -> tuple[FinishedRun, Nodes]:
    """Make a run whose workers are on several nodes; return the run and its `Nodes` object.

    nodes: the number of each worker's node.
    least: nodes add up updates only if the model has at least this many parameters.
    """
    runtime = Nodes(spec, nodes, least)
    return run_to_end(coordinate(spec, schedule, Ideal(), runtime)), runtime


@pytest.mark.parametrize("methods", [(), (Sick(),), (Dead(),)], ids=["well", "sick", "dead"])
def test_run_in_which_nodes_add_up_updates_equals_a_run_with_one_worker(
    methods: tuple[Method, ...],
) -> None:
    alone = run_to_end(coordinate(study(*methods), COHORT, Ideal()))
    there, runtime = run_on_nodes(study(*methods))
    assert (there.bits, there.history) == (alone.bits, alone.history)
    assert {node for name, node in runtime.trained if name == "train_apart"} == {1, 2}
    assert {node for name, node in runtime.trained if name == "train"} == {0}
    assert {node for node, _ in runtime.added} == {1, 2}


def test_coordinator_receives_few_vectors_if_nodes_sum_updates() -> None:
    """Each node adds up its updates, so the coordinator receives few vectors in a round."""
    _, runtime = run_on_nodes(study(), (0, 1, 2), Synchronous(12))
    assert sum(runtime.vectors) == 2 * 2, "one of node 0, and one of both others"
    _, runtime = run_on_nodes(study(), (0, 0, 1, 1), Synchronous(8))
    assert sum(runtime.vectors) == 2 * 3, "two of node 0, one of node 1"
    _, runtime = run_on_nodes(study(), tuple(range(8)), Synchronous(16))
    assert sum(runtime.vectors) == 2 * 4, "1 of node 0, and of 1, 2 and 4 other nodes"


@pytest.mark.parametrize(("nodes", "least"), [((0, 0, 1), 1e9), ((0, 0, 0), 0)])
def test_nodes_sum_updates_only_if_that_saves_traffic(nodes: tuple[int, ...], least: float) -> None:
    """No node adds up updates if the model is small, or if all workers are on one node.

    nodes: the number of each worker's node.
    least: nodes add up updates only if the model has at least this many parameters.
    """
    result, runtime = run_on_nodes(study(), nodes, Synchronous(6), least)
    assert result.bits == run_to_end(coordinate(study(), Synchronous(6), Ideal())).bits
    assert {name for name, _ in runtime.trained} == {"train"} and not runtime.added


def test_death_of_a_process_that_sums_updates_changes_no_bit() -> None:
    class Dying(Nodes):
        def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Any]) -> Any:
            return WorkerDiedError("it was told to")

        def get(self, ref: Any) -> Any:
            if isinstance(ref, WorkerDiedError):
                raise ref
            return super().get(ref)

    alone = run_to_end(coordinate(study(Sick()), COHORT, Ideal())).bits
    runtime = Dying(study(Sick()), NODES)
    assert run_to_end(coordinate(study(Sick()), COHORT, Ideal(), runtime)).bits == alone


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    size = draw(st.integers(1, 12))
    kinds = [
        Synchronous(size),
        Buffered(concurrency=size + draw(st.integers(0, 6)), size=size),
        Immediate(size),
    ]
    return draw(st.sampled_from(kinds))


@how(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedules(),
    st.sampled_from([(0, 0), (0, 0, 0), (0, 1, 1), (0, 1, 2, 1, 0), (0, 0, 1, 1, 2, 2, 3, 3)]),
    st.sampled_from([(), (Sick(),), (FedBN(),)]),
)
def test_bits_and_history_are_the_same_if_nodes_sum_updates(
    schedule: Schedule, nodes: tuple[int, ...], methods: tuple[Method, ...]
) -> None:
    spec = with_settings(study(*methods), rounds=3, tolerate=1.0)
    alone = run_to_end(coordinate(spec, schedule, Lognormal()))
    there = run_to_end(coordinate(spec, schedule, Lognormal(), Nodes(spec, nodes)))
    assert (there.bits, there.history) == (alone.bits, alone.history)


def test_jobs_are_grouped_by_part_of_the_summation_tree() -> None:
    trees = SumTrees()
    trees.plan((10, 11, 12, 13, 14))
    trees.plan((20, 21))
    assert trees.groups([21, 14, 13, 12, 11, 20]) == [(20, 21), (11,), (12, 13), (14,)]
    assert trees.groups([99]) == [], "a job whose update is needed alone"
    trees.forget([20, 21])
    assert trees.groups([20, 21, 10]) == [(10,)]


class Separate(Nodes):
    """Workers that are not in this process, so that the history counts bytes between nodes."""

    is_in_process = False

    def put(self, value: object) -> object:
        return Stored(value)

    def call(self, worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        values = [arg.value if isinstance(arg, Stored) else arg for arg in args]
        results = super().call(worker, method, *values, returns=returns)
        return [Stored(result) for result in results]

    def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Any]) -> Any:
        return Stored(super().add_up(node, parts, [ref.value for ref in refs]))

    def get(self, ref: Any) -> Any:
        return super().get(ref.value if isinstance(ref, Stored) else ref)


class Stored:
    """A value in an object store."""

    def __init__(self, value: object):
        self.value = value


def columns_of_nodes(nodes: Sequence[int], least: float = 0.0) -> list[dict[str, Any]]:
    spec = with_settings(study(), rounds=3, evaluate=Evaluation(every=10**9))
    runtime = Separate(spec, nodes, least)
    coordinator = coordinate(spec, Synchronous(16), Ideal(), runtime)
    rows = run_to_end(coordinator).rows
    vector = 4 * coordinator.layout.shared
    return [
        {name: value / vector for name, value in row.items() if name.startswith("node_")}
        for row in rows
    ]


def test_history_counts_bytes_between_nodes() -> None:
    """A version is sent to each node once, and node 1 sends one sum of its updates to node 0.

    If nodes do not add up updates, node 1 sends a sum for each of its two workers.
    """
    row = columns_of_nodes((0, 0, 1, 1))[1]
    assert round(row["node_0_out_bytes"]) == round(row["node_1_in_bytes"]) == 1
    assert round(row["node_1_out_bytes"]) == round(row["node_0_in_bytes"]) == 1
    unsummed = columns_of_nodes((0, 0, 1, 1), least=1e9)[1]
    assert round(unsummed["node_0_in_bytes"]) == 2, "a sum of each worker of node 1"


def test_history_of_a_run_on_one_node_has_no_columns_for_traffic_between_nodes() -> None:
    assert columns_of_nodes((0, 0)) == [{}, {}, {}]
