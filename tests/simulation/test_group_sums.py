"""Sums that nodes add up have the same bits as those of the coordinator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_deaths import Mortal
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

from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.runtime.inprocess import InProcess
from raysim.simulation import group_sums
from raysim.simulation.assignment import assign_to_nodes
from raysim.simulation.fleet import Ideal
from raysim.simulation.group_sums import group_by_node, pipeline_order
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSpec

NODES = (0, 1, 2, 1, 2, 1, 0)  # of seven workers
COHORT = Synchronous(28)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
)
def test_nodes_get_consecutive_groups(works: list[int], nodes: list[int]) -> None:
    workers = assign_to_nodes(works, nodes)
    seen = [nodes[workers[link[0]]] for link in group_by_node(workers, nodes)]
    assert len(workers) == len(works) and len(set(seen)) == len(seen), "a node comes once"
    assert 0 not in seen[:-1]
    if len(works) >= len(nodes) and len(set(works)) == 1:
        loads = np.bincount(workers, minlength=len(nodes))
        assert loads.max() <= -(-len(works) // len(nodes)) + 1


def test_parts_pass_through_the_nodes_in_turn() -> None:
    order = list(pipeline_order(3, 4))
    assert sorted(order) == [(link, part) for link in range(3) for part in range(4)]
    assert order.index((0, 1)) < order.index((1, 0)) < order.index((2, 0)) < order.index((1, 2))


class Sick(Method):
    """A method that fails for some clients: a whole group, and the first of another one."""

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
    return with_settings(spec, rounds=2, summation=2, tolerate=1.0)


def apart(
    spec: RunSpec,
    nodes: tuple[int, ...] = NODES,
    schedule: Synchronous = COHORT,
    least: float = 0.0,
) -> tuple[FinishedRun, list[tuple[str, int, Any]]]:
    """Return a run whose workers are on these nodes, and its calls."""
    runtime: Any = several_workers(spec, len(nodes))
    runtime.nodes, runtime.combine_from = nodes, least
    calls: list[tuple[str, int, Any]] = []

    def call(worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        calls.append((method, nodes[worker], args))
        return InProcess.call(runtime, worker, method, *args, returns=returns)

    runtime.call = call
    return run_to_end(coordinate(spec, schedule, Ideal(), runtime)), calls


@pytest.mark.parametrize("methods", [(), (Sick(),), (Dead(),)], ids=["well", "sick", "dead"])
def test_sums_on_nodes_have_the_bits_of_one_worker(
    methods: tuple[Method, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run_to_end(coordinate(study(*methods), COHORT, Ideal()))
    for part in (1 << 25, 500):  # whole vectors, and pieces of them
        monkeypatch.setattr(group_sums, "PART_FLOATS", part)
        there, calls = apart(study(*methods))
        assert (there.bits, there.history) == (alone.bits, alone.history)
        assert {node for name, node, _ in calls if name == "train_apart"} == {1, 2}
        assert {node for name, node, _ in calls if name == "train"} == {0}
        pieces = -(-there.coordinator.layout.shared // part)
        combined = [(node, len(args) - 3) for name, node, args in calls if name == "combine"]
        # Of 14 groups the five workers of two nodes sum ten: they arrive as one.
        assert sorted(combined) == sorted(2 * pieces * [(1, 6), (2, 4)])


@pytest.mark.parametrize(("nodes", "least"), [((0, 0, 1), 1e9), ((0, 0, 0), 0), ((0, 1, 0), 0)])
def test_sums_on_nodes_only_if_they_save_traffic(nodes: tuple[int, ...], least: float) -> None:
    """Cases: a small model, workers on one node, and a node with one sum."""
    result, calls = apart(study(), nodes, Synchronous(6), least)
    assert result.bits == run_to_end(coordinate(study(), Synchronous(6), Ideal())).bits
    assert not {name for name, *_ in calls} & {"train_apart", "combine"}


class Combining(Mortal):
    """Workers that count the calls to add up."""

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        if method == "combine":
            return super().call(worker, method, *args, returns=returns)
        deaths, self.deaths = self.deaths, set()
        result = super().call(worker, method, *args, returns=returns)
        self.deaths, self.calls = deaths, self.calls - 1
        return result


def test_death_during_sums_on_nodes_keeps_the_bits() -> None:
    alone = run_to_end(coordinate(study(), COHORT, Ideal())).bits
    for death in (1, 2):  # the first node, and the one to which its sum goes
        runtime = Combining(study(), 5, {death})
        runtime.nodes = (1, 0, 1, 2, 2)
        assert run_to_end(coordinate(study(), COHORT, Ideal(), runtime)).bits == alone
        assert runtime.revived == 1
