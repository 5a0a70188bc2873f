"""Test the picture of a topology: clients, replicas, links and traffic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raysim.api.topology import Federation, Network, Topology, one_replica
from raysim.results.clients import read_clients, write_clients
from raysim.results.history import Row
from raysim.results.topology_picture import MAX_CLIENTS, draw_topology, traffic
from raysim.simulation.topologies import Clustered, Gossip, Hierarchical

ROWS: list[Row] = [
    {"round": 1, "accuracy": 0.1, "replica": 0, "replica_floats_down": 250_000,
     "replica_floats_up": 0, "floats_links": 0},
    {"round": 2, "accuracy": 0.1, "replica": 1, "replica_floats_down": 500_000,
     "replica_floats_up": 250_000, "floats_links": 0},
    {"round": 3, "accuracy": 0.2, "replica": 0, "replica_floats_down": 750_000,
     "replica_floats_up": 250_000, "floats_links": 1000},
]  # fmt: skip


def connect(topology: Topology, clients: int) -> Network:
    return topology.connect(Federation(0, np.full(clients, 5), "samples", 10))


def test_traffic_is_read_from_last_row_of_each_replica() -> None:
    np.testing.assert_allclose(traffic(ROWS, 3), [[3.0, 1.0], [2.0, 1.0], [0.0, 0.0]])


@pytest.mark.pictures
@pytest.mark.parametrize("topology", [Hierarchical(2), Gossip("ring")])
def test_topology_picture_is_drawn_for_edge_servers_and_for_gossip(
    topology: Hierarchical | Gossip, tmp_path: Path
) -> None:
    network = connect(topology, 6)
    scores = {"accuracy": np.array([0.1, 0.2, np.nan, 0.4, 0.5, 0.6])}
    assert draw_topology(network, scores, ROWS, tmp_path / "topology.png", "title")
    assert (tmp_path / "topology.png").stat().st_size > 10_000


@pytest.mark.pictures
def test_picture_of_clusters_accepts_clients_without_a_score(tmp_path: Path) -> None:
    network = connect(Clustered("loss", 3), 4)
    scores = {
        "accuracy": np.array([0.1, np.nan, 0.4, 0.5]),
        "replica": np.array([2.0, np.nan, 0.0, 2.0]),
    }
    assert draw_topology(network, scores, ROWS[:1], tmp_path / "topology.png", "title")
    assert (tmp_path / "topology.png").stat().st_size > 10_000


def test_topology_picture_is_not_drawn_for_one_replica_or_many_clients_or_no_scores(
    tmp_path: Path,
) -> None:
    path, many = tmp_path / "topology.png", MAX_CLIENTS + 1
    for network, clients in ((one_replica(6), 6), (connect(Gossip(), many), many)):
        assert not draw_topology(network, {"accuracy": np.ones(clients)}, ROWS, path, "title")
    unscored = {"accuracy": np.full(6, np.nan)}
    assert not draw_topology(connect(Gossip(), 6), unscored, ROWS, path, "title")
    assert not path.exists()


def test_clients_table_has_the_replica_of_each_client(tmp_path: Path) -> None:
    from tiny_runs import tiny_data

    data = tiny_data(clients=6)
    network = connect(Hierarchical(2), 6)
    write_clients(data, None, tmp_path, network)
    columns = read_clients(tmp_path)
    assert columns is not None
    np.testing.assert_array_equal(columns["replica"], network.replica_of)
