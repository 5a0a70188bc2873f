"""Test that topology=clustered ends with the same models as IFCA and CFL by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_runs import NORMED_MLP, SEED

from raysim.api.declarations import Evaluation, Local
from raysim.data.federated import federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.simulation.schedule import Synchronous
from raysim.simulation.topologies import Clustered
from textbook.check import (
    Recorded,
    Row,
    _assert_equal_columns,
    assert_equal,
    replica_tensors,
    run_recorded,
)
from textbook.clustered import Clusters, cfl, ifca
from textbook.world import Book

SKEWED = federate(
    Synthetic(samples=240, test_samples=40, classes=5),
    Dirichlet(clients=6, alpha=0.15, minimum=6),
    SEED,
)
LAST = {"evaluate": Evaluation(every=1)}


def recorded(topology: Clustered, cohort: int, rounds: int, **study: Any) -> Recorded:
    row = Row(
        lambda world: Book({}),
        list,
        {"topology": topology, "data": SKEWED, **study},
        {"rounds": rounds, "weighting": "samples", **LAST},
        Synchronous(cohort),
    )
    return run_recorded(row)


def check(run: Recorded, expected: Clusters) -> None:
    for number, model in enumerate(expected.models):
        server = run.coordinator.replicas.servers[number]
        tensors = replica_tensors(run.coordinator, server)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        assert_equal(f"replica {number}", arrays, model)
    book = Book({}, columns=expected.columns)
    _assert_equal_columns(run.ended.rows, (), book, {})


@pytest.mark.parametrize("clusters, study", [(2, {}), (3, {}), (3, {"model": NORMED_MLP})])
def test_clients_choose_the_same_models_as_in_a_textbook_ifca(
    clusters: int, study: dict[str, Any]
) -> None:
    run = recorded(Clustered("loss", clusters), 4, 5, **study)
    expected = ifca(run.world, run.starts)
    check(run, expected)
    replicas = run.coordinator.replicas
    scored = run.coordinator.evaluator._replicas_of(range(6), replicas, run.coordinator.versions)
    assert list(scored.values()) == expected.model_of
    assert len({*expected.model_of}) > 1, "clients choose different models"


@pytest.mark.parametrize("gamma, most", [(0.0, 4), (0.5, 3)])
def test_clusters_equal_those_of_a_textbook_cfl(gamma: float, most: int) -> None:
    topology = Clustered("updates", 4, mean_norm=0.6, max_norm=0.5, gamma=gamma, start=0)
    local = Local(lr=0.05, batch=8, epochs=2)
    run = recorded(topology, 6, 8, local=local)
    expected = cfl(run.world, 0.6, 0.5, 4, gamma)
    check(run, expected)
    assert run.coordinator.replicas.clients_of.tolist() == expected.model_of
    clusters = expected.columns["topology.clusters"]
    assert clusters[0] == 2 and clusters[-1] == most, "clusters are split again"
