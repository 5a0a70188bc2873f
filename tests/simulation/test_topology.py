"""Test topologies: replicas, their exchanges, and runs that agree with independent arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import NORMED, FinishedRun, Spy, coordinate, run, run_spec, run_to_end, tiny_data

from raysim.api.declarations import Evaluation
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.api.topology import (
    Federation,
    Network,
    Topology,
    components,
    mixing_matrix,
    mixing_rows,
)
from raysim.conformance.agreement import check_resumed, check_workers
from raysim.data.partition import CSR
from raysim.methods.centralized import Centralized
from raysim.methods.fedbn import FedBN
from raysim.methods.fedexp import FedExP
from raysim.methods.fedopt import FedAdam
from raysim.methods.fedprox import FedProx
from raysim.methods.scaffold import Scaffold
from raysim.primitives.streams import stream
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Buffered, Immediate, Schedule, Synchronous, Tiered
from raysim.simulation.topologies import Gossip, Hierarchical, k_means

CLIENTS = 8
FAST = {"bandwidth_up": np.inf, "bandwidth_down": np.inf}


class ReadUpdates(Method):
    """A method that reads single updates, so that no worker adds them up.

    A test can then compute the sum independently.
    """

    name = "read_updates"

    def setup(self, run: Setup) -> None:
        run.read_updates()


class UnevenUploads(Method):
    """A method whose client number n sends n + 1 floats with its update; one float is planned."""

    name = "uneven_uploads"

    def setup(self, run: Setup) -> None:
        run.upload("zeros", floats=1, planned=lambda received: 1)

    def end(self, job: LocalJob) -> None:
        job.upload["zeros"] = torch.zeros(job.client + 1)


def spec(topology: Topology, *methods: Method, **others: Any) -> Any:
    return run_spec(*methods, data=tiny_data(clients=CLIENTS), topology=topology, **others)


def spied(topology: Topology, schedule: Schedule, **settings: Any) -> tuple[Spy, FinishedRun]:
    spy = Spy(spec(topology, ReadUpdates()))
    finished = run_to_end(
        coordinate(spec(topology, ReadUpdates()), schedule, Lognormal(), spy, **settings)
    )
    return spy, finished


class TestMixing:
    def test_mixing_matrix_stores_only_weights_above_zero(self) -> None:
        mixing = mixing_matrix(np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), "key")
        assert [mixing.row(replica) for replica in range(3)] == [
            ([0, 1], [0.5, 0.5]),
            ([0, 1], [0.5, 0.5]),
            ([2], [1.0]),
        ]
        assert components(mixing) == [[0, 1], [2]]

    @pytest.mark.parametrize(
        "weights, match",
        [
            ([{0: 0.5}], r"key: .* replica 0 sum to 0\.5"),
            ([{0: 1.5, 1: -0.5}, {1: 1.0}], r"key: .*-0\.5"),
            ([{0: float("nan")}], "key: .*nan"),
            ([{3: 1.0}], "key: .*replica 3"),
        ],
    )
    def test_mixing_matrix_refuses_wrong_weights(
        self, weights: list[Mapping[int, float]], match: str
    ) -> None:
        with pytest.raises(ValueError, match=match):
            mixing_matrix(weights, "key")

    def test_replicas_with_the_same_weights_share_one_row_of_the_mixing_matrix(self) -> None:
        rows = mixing_rows(mixing_matrix([{0: 0.25, 1: 0.75}] * 2, "key"), range(2))
        assert rows == [((0, 1), (0, 1), (0.25, 0.75))]

    def test_mixing_adds_weights_of_absent_clients_to_the_diagonal(self) -> None:
        third = 1 / 3
        ring = [{0: third, 1: third, 2: third}] * 3
        rows = mixing_rows(mixing_matrix(ring, "key"), [0, 2])
        assert [(row.targets, row.sources) for row in rows] == [((0,), (0, 2)), ((2,), (0, 2))]
        np.testing.assert_allclose(rows[0].weights, [2 / 3, 1 / 3])
        np.testing.assert_allclose(rows[1].weights, [1 / 3, 2 / 3])


class TestHierarchical:
    @pytest.mark.parametrize("schedule", [Synchronous(4), Buffered(4, 2)])
    @pytest.mark.parametrize("methods", [(), (Scaffold(), FedBN()), (FedAdam(),)])
    def test_hierarchy_of_one_edge_server_equals_a_single_server(
        self, schedule: Schedule, methods: tuple[Method, ...]
    ) -> None:
        star = run_spec(*methods, data=tiny_data(clients=CLIENTS))
        edge = spec(Hierarchical(1, every=2, **FAST), *methods)
        settings: dict[str, Any] = {"rounds": 5, "evaluate": Evaluation(every=2)}
        expected, result = run(star, schedule, **settings), run(edge, schedule, **settings)
        assert result.bits == expected.bits
        for row, expected_row in zip(result.history, expected.history, strict=True):
            for key in ("virtual_seconds", "floats_down", "floats_up", "accuracy", "loss_global"):
                assert row[key] == expected_row[key], key

    @pytest.mark.parametrize("schedule", [Synchronous(2), Buffered(3, 2)])
    def test_hierarchical_run_equals_a_computation_by_hand(self, schedule: Schedule) -> None:
        """Compute HierFAVG by hand: each replica is an edge server with half of the clients.

        An edge server averages its clients' models, weighted by samples. After every two
        aggregations of all edge servers, the edge servers' models are averaged, too.
        """
        topology = Hierarchical(2, every=2)
        spy, finished = spied(topology, schedule, rounds=11)
        coordinator = finished.coordinator
        edge_of, counts = coordinator.replicas.network.replica_of, coordinator.counts
        assert sorted(np.bincount(edge_of).tolist()) == [CLIENTS // 2] * 2
        updates = {update.job: update for update in spy.updates}
        start = coordinator.initial.shared.numpy().astype(np.float64)
        models = [start, start]
        history = {(0, 0): start, (1, 0): start}  # by edge and the edge's aggregations
        made = [0, 0]
        meetings = 0
        for aggregation in finished.aggregations[:11]:
            (edge,) = {int(edge_of[job.client]) for job in aggregation.aggregated}
            weights = np.array([counts[job.client] for job in aggregation.aggregated], np.float64)
            deltas = np.stack([updates[job.number].delta for job in aggregation.aggregated])
            models[edge] = models[edge] + weights @ deltas / weights.sum()
            made[edge] += 1
            if all(number == 2 * (meetings + 1) for number in made):
                assert aggregation.meets
                meetings += 1
                shares = [counts[edge_of == each].sum() / counts.sum() for each in (0, 1)]
                mean = shares[0] * models[0] + shares[1] * models[1]
                models = [mean, mean]
                history[0, made[0]] = history[1, made[1]] = mean
            else:
                assert not aggregation.meets
                history[edge, made[edge]] = models[edge]
        assert meetings == 2
        for job, published in spy.sent:
            expected = history[int(edge_of[job.client]), job.version]
            np.testing.assert_allclose(published.vector, expected, atol=2e-5)
        for server, expected in zip(coordinator.replicas.servers, models, strict=True):
            np.testing.assert_allclose(server.vector.numpy(), expected, atol=2e-5)

    def test_exchange_between_replicas_takes_as_long_as_its_slowest_link(self) -> None:
        slow = Hierarchical(2, every=1, bandwidth_up=1e3, bandwidth_down=2e3)
        result = run(spec(slow), Synchronous(2), rounds=4)
        size = 4 * result.coordinator.layout.shared
        first, second, third, _ = result.aggregations[:4]
        assert not first.meets and second.meets and not third.meets
        finish = max(job.finish for job in (*first.aggregated, *second.aggregated))
        assert second.now == pytest.approx(finish + size / 1e3 + size / 2e3)
        assert min(job.start for job in third.dispatched) == second.now
        assert [row["floats_links"] for row in result.rows] == [
            meetings * 4 * size // 4 for meetings in (0, 1, 1, 2)
        ]

    def test_history_of_an_edge_server_has_its_traffic(self) -> None:
        result = run(spec(Hierarchical(2, every=2, **FAST)), Synchronous(2), rounds=8)
        size = result.coordinator.layout.shared
        edge_of = result.coordinator.replicas.network.replica_of
        rounds = [0, 0]
        for row, aggregation in zip(result.rows, result.aggregations, strict=False):
            edge = int(edge_of[aggregation.aggregated[0].client])
            rounds[edge] += 1
            assert row["replica"] == edge
            assert row["replica_floats_up"] == 2 * rounds[edge] * size
            assert row["replica_floats_down"] == row["replica_floats_up"]

    def test_history_of_an_edge_server_has_the_real_sizes_of_its_uploads(self) -> None:
        topology = Hierarchical(2, every=2, **FAST)
        result = run(spec(topology, UnevenUploads()), Synchronous(2), rounds=8)
        size = result.coordinator.layout.shared
        edge_of = result.coordinator.replicas.network.replica_of
        floats_up = [0, 0]
        for row, aggregation in zip(result.rows, result.aggregations, strict=False):
            edge = int(edge_of[aggregation.aggregated[0].client])
            floats_up[edge] += sum(size + job.client + 1 for job in aggregation.aggregated)
            assert row["replica_floats_up"] == floats_up[edge]
        assert result.rows[-1]["floats_up"] == sum(floats_up)

    def test_edge_servers_exchange_at_most_once_per_interval(self) -> None:
        result = run(spec(Hierarchical(2, seconds=0.05, **FAST)), Synchronous(2), rounds=24)
        meetings = [step.now for step in result.aggregations[:24] if step.meets]
        assert len(meetings) > 2
        assert all(int(after / 0.05) > int(before / 0.05) for before, after in pairwise(meetings))

    @pytest.mark.parametrize("schedule", [Synchronous(2), Buffered(3, 2)])
    def test_hierarchy_has_same_bits_on_several_workers_and_after_resume(
        self, schedule: Schedule
    ) -> None:
        def make() -> Any:
            return spec(Hierarchical(2, every=2, bandwidth_sigma=0.5), Scaffold(), FedBN())

        check_workers(make, schedule)
        check_resumed(make, schedule)

    def test_edge_servers_have_separate_server_state_and_clients(self) -> None:
        result = run(spec(Hierarchical(2), Scaffold()), Synchronous(2), rounds=6)
        first, second = result.coordinator.replicas.servers
        assert not np.array_equal(first.state["scaffold.control"], second.state["scaffold.control"])
        assert first.population == second.population == CLIENTS // 2
        assert first.samples + second.samples == result.coordinator.counts.sum()
        assert not (first.counts * second.counts).any()

    def test_history_has_scores_of_replicas_and_their_mean(self) -> None:
        evaluate = Evaluation(every=3)
        result = run(
            spec(Hierarchical(2, every=3, **FAST)), Synchronous(2), rounds=6, evaluate=evaluate
        )
        row = result.rows[-1]
        assert result.aggregations[5].meets
        assert row["consensus_distance"] == 0
        assert row["accuracy_replicas"] == row["accuracy_replicas_worst"] == row["accuracy_global"]
        assert result.rows[2]["consensus_distance"] > 0

    def test_replicas_are_scored_if_no_client_has_test_samples(self) -> None:
        data = tiny_data(clients=CLIENTS)
        no_rows = CSR(np.empty(0, np.int64), np.zeros(CLIENTS + 1, np.int64))
        partition = replace(data.partition, test=no_rows)
        plain = replace(spec(Hierarchical(2)), data=replace(data, partition=partition))
        row = run(plain, Synchronous(2), rounds=2, evaluate=Evaluation(every=2)).rows[-1]
        assert row["accuracy"] is None and row["accuracy_replicas"] is not None

    def test_edge_server_gets_clients_with_similar_classes(self) -> None:
        counts = np.zeros((CLIENTS, 2), np.int64)
        counts[: CLIENTS // 2, 0] = counts[CLIENTS // 2 :, 1] = 9
        federation = Federation(0, counts.sum(1), "samples", 10, label_counts=lambda: counts)
        edge_of = Hierarchical(2, assign="data").connect(federation).replica_of
        assert len({*edge_of[: CLIENTS // 2]}) == len({*edge_of[CLIENTS // 2 :]}) == 1
        assert edge_of[0] != edge_of[-1]

    def test_edge_server_gets_clients_of_neighbouring_regions(self) -> None:
        regions = np.arange(CLIENTS)[::-1] // 2
        federation = Federation(0, np.full(CLIENTS, 9), "samples", 10, regions=lambda: regions)
        edge_of = Hierarchical(2, assign="region").connect(federation).replica_of
        np.testing.assert_array_equal(edge_of, [1, 1, 1, 1, 0, 0, 0, 0])

    @pytest.mark.parametrize(
        "topology, schedule, match",
        [
            (Hierarchical(9), Synchronous(1), "topology.edges=9"),
            (Hierarchical(4), Synchronous(3), "schedule.cohort=3 .*edge 0"),
            (Hierarchical(2), Tiered(2, 1), "schedule=tiered"),
            (Hierarchical(2, assign="region"), Synchronous(2), "topology.assign=region"),
        ],
    )
    def test_hierarchical_topology_refuses_impossible_settings(
        self, topology: Topology, schedule: Schedule, match: str
    ) -> None:
        with pytest.raises(ValueError, match=match):
            coordinate(spec(topology), schedule)

    def test_hierarchical_topology_refuses_centralized_training(self) -> None:
        with pytest.raises(ValueError, match="topology: method 'centralized'"):
            coordinate(spec(Hierarchical(2), Centralized()), Synchronous(2))

    def test_edge_server_without_samples_is_refused(self) -> None:
        federation = Federation(
            0, np.array([5, 0, 5, 0]), "samples", 10, regions=lambda: np.array([0, 1, 0, 1])
        )
        with pytest.raises(ValueError, match=r"topology\.edges=2 .*edge server 1 "):
            Hierarchical(2, assign="region").connect(federation)


ALL = Synchronous(CLIENTS)
TWO_PARTS = [[0, 1], [1, 2], [2, 3], [4, 5], [5, 6], [6, 7]]


def vectors(finished: FinishedRun) -> np.ndarray:
    """Return the vectors of all replicas, [replicas, floats]."""
    return np.stack([server.vector.numpy() for server in finished.coordinator.replicas.servers])


def network(topology: Topology, counts: int = 12) -> Network:
    return topology.connect(Federation(0, np.full(counts, 5), "samples", 10))


def dense(network: Network) -> np.ndarray:
    """Return the mixing matrix, [replicas, replicas]."""
    matrix = np.zeros((network.replicas, network.replicas))
    assert network.mixing is not None
    for replica in range(network.replicas):
        sources, weights = network.mixing.row(replica)
        matrix[replica, sources] = weights
    return matrix


def neighbours(clients: int) -> np.ndarray:
    """Return the mixing matrix of a ring: a third for the client and for each of two neighbours."""
    matrix = np.eye(clients)
    return (matrix + np.roll(matrix, 1, 0) + np.roll(matrix, -1, 0)) / 3


class TestGossip:
    def test_gossip_on_complete_graph_equals_fedavg_of_all_clients(self) -> None:
        star = run_spec(data=tiny_data(clients=CLIENTS))
        settings: dict[str, Any] = {"rounds": 4, "weighting": "uniform"}
        expected = run(star, ALL, **settings).coordinator.server.vector.numpy()
        result = run(spec(Gossip("complete")), ALL, **settings)
        for vector in vectors(result):
            np.testing.assert_allclose(vector, expected, atol=2e-6)
        assert result.rows[-1]["consensus_distance"] == 0

    def test_personal_models_have_equal_scores_in_complete_gossip_and_fedavg(self) -> None:
        common: dict[str, Any] = {"model": NORMED, "data": tiny_data(clients=CLIENTS)}
        settings: dict[str, Any] = {
            "rounds": 3,
            "weighting": "uniform",
            "evaluate": Evaluation(common=True),
        }
        expected = run(run_spec(FedBN(), **common), ALL, **settings).rows[-1]
        result = run(run_spec(FedBN(), topology=Gossip("complete"), **common), ALL, **settings)
        for column in ("accuracy", "accuracy_common"):
            assert result.rows[-1][column] == pytest.approx(expected[column], abs=1e-6)

    @pytest.mark.parametrize("mix", ["after", "before"])
    def test_gossip_on_a_ring_equals_d_psgd(self, mix: str) -> None:
        """Compute D-PSGD (Lian et al. 2017) by hand.

        X: the clients' models, one per row. D: the clients' updates. W: the mixing matrix. X
        becomes W X + D with mix=before, and W (X + D) with mix=after.
        """
        spy, result = spied(Gossip("ring", mix=mix), ALL, rounds=4)
        delta_of = {update.job: update.delta for update in spy.updates}
        mixing = neighbours(CLIENTS)
        models = np.stack([result.coordinator.initial.shared.numpy()] * CLIENTS).astype(np.float64)
        for aggregation in result.aggregations[:4]:
            deltas = np.zeros_like(models)
            for job in aggregation.aggregated:
                deltas[job.client] = delta_of[job.number]
            trained = models + deltas
            models = mixing @ trained if mix == "after" else mixing @ models + deltas
        np.testing.assert_allclose(vectors(result), models, atol=1e-5)

    def test_gossip_in_random_pairs_equals_ad_psgd(self) -> None:
        """Compute AD-PSGD (Lian et al. 2018) by hand.

        A client and a random neighbour average their models; then the client's update is added.
        """
        topology = Gossip("ring", exchange="pairwise", mix="before")
        spy, result = spied(topology, Immediate(CLIENTS), rounds=30)
        delta_of = {update.job: update.delta for update in spy.updates}
        models = np.stack([result.coordinator.initial.shared.numpy()] * CLIENTS).astype(np.float64)
        met = set()
        for version, aggregation in enumerate(result.aggregations[:30]):
            (job,) = aggregation.aggregated
            ring = sorted(((job.client - 1) % CLIENTS, (job.client + 1) % CLIENTS))
            generator = stream(result.coordinator.settings.seed, "topology.pairs", version)
            pair = [job.client, ring[int(generator.integers(2))]]
            models[pair] = models[pair].mean(0)
            models[job.client] += delta_of[job.number]
            met.add(pair[1] - pair[0])
        assert len(met) > 1 and any(row["staleness"] > 0 for row in result.rows)
        np.testing.assert_allclose(vectors(result), models, atol=1e-5)

    def test_unavailable_gossip_clients_neither_train_nor_exchange(self) -> None:
        result = run(spec(Gossip("complete")), Synchronous(3), rounds=1)
        (aggregation, *_) = result.aggregations
        present = sorted(job.client for job in aggregation.aggregated)
        models, start = vectors(result), result.coordinator.initial.shared.numpy()
        for client in range(CLIENTS):
            assert np.array_equal(models[client], start) == (client not in present)

    def test_unconnected_gossip_components_never_exchange(self) -> None:
        """The models of one component do not depend on how the other one is connected."""
        other = [*TWO_PARTS[:3], [4, 6], [5, 7]]
        first, second = (
            vectors(run(spec(Gossip("edges", edges=edges)), ALL, rounds=4))
            for edges in (TWO_PARTS, other)
        )
        assert np.array_equal(first[:4], second[:4])
        assert not (first[4:] == second[4:]).all(1).any()

    @pytest.mark.parametrize(
        "topology, schedule",
        [
            (Gossip("expander"), Synchronous(5)),
            (Gossip("ring", exchange="pairwise", mix="before"), Immediate(4)),
        ],
    )
    def test_gossip_has_same_bits_on_several_workers_and_after_resume(
        self, topology: Topology, schedule: Schedule
    ) -> None:
        def make() -> Any:
            return spec(topology, FedProx(), FedBN())

        check_workers(make, schedule)
        check_resumed(make, schedule)

    def test_lanes_train_clients_of_several_replicas(self) -> None:
        def make(lanes: int = 3) -> Any:
            return spec(Gossip("ring"), lanes=lanes)

        check_workers(make, ALL)
        one, several = (vectors(run(make(lanes), ALL, rounds=3)) for lanes in (1, 3))
        np.testing.assert_allclose(one, several, atol=1e-5)

    def test_gossip_counts_the_traffic_of_exchanges(self) -> None:
        result = run(spec(Gossip("ring", every=2)), ALL, rounds=4)
        size = result.coordinator.layout.shared
        sent = [row["floats_up"] for row in result.rows]
        assert sent == [0, 2 * CLIENTS * size, 2 * CLIENTS * size, 4 * CLIENTS * size]
        assert [row["floats_down"] for row in result.rows] == sent
        assert [step.meets for step in result.aggregations[:4]] == [False, True, False, True]

    @pytest.mark.parametrize("method", [FedAdam(), Scaffold(), FedExP()])
    def test_gossip_error_names_the_refused_server_method(self, method: Method) -> None:
        with pytest.raises(ValueError, match=f"topology: method '{method.name}'"):
            coordinate(spec(Gossip(), method), ALL)

    def test_warning_of_unconnected_gossip_graph_lists_its_components(self) -> None:
        topology = Gossip("edges", edges=TWO_PARTS)
        (warning,) = network(topology, CLIENTS).warnings
        assert "[0, 1, 2, 3], [4, 5, 6, 7]" in warning
        assert not network(Gossip("ring")).warnings

    @pytest.mark.parametrize(
        "edges, match",
        [
            ([[0, 12]], r"topology\.edges contains \[0, 12\]"),
            ([[0, 0]], r"topology\.edges contains \[0, 0\]"),
            ([[0]], r"topology\.edges contains \[0\]"),
            ([[0, 1, 0.6], [1, 2, 0.6]], r"topology\.edges: .*client 1's .*1\.2"),
            ([[0, 1, 0.6], [1, 2]], r"topology\.edges has weights"),
            ([[0, 1, -0.1]], r"topology\.edges: .*-0\.1"),
        ],
    )
    def test_wrong_edges_of_a_gossip_graph_are_refused(
        self, edges: list[list[float]], match: str
    ) -> None:
        with pytest.raises(ValueError, match=match):
            network(Gossip("edges", edges=edges))

    @pytest.mark.parametrize(
        "settings, match",
        [
            ({"graph": "star"}, r"topology\.graph"),
            ({"graph": "edges"}, r"topology\.edges"),
            ({"graph": "ring", "edges": [[0, 1]]}, r"topology\.graph=ring .*topology\.edges"),
            ({"degree": 3}, r"topology\.degree=3"),
        ],
    )
    def test_wrong_topology_settings_are_refused(
        self, settings: dict[str, Any], match: str
    ) -> None:
        with pytest.raises(ValueError, match=match):
            Gossip(**settings)

    def test_torus_and_expander_refuse_too_few_clients(self) -> None:
        with pytest.raises(ValueError, match=r"topology\.graph=torus"):
            network(Gossip("torus"), 7)
        with pytest.raises(ValueError, match=r"topology\.degree=4"):
            network(Gossip("expander"), 4)


class TestGraphs:
    @pytest.mark.parametrize(
        "graph, degrees",
        [
            ("ring", {2}),
            ("torus", {4}),
            ("complete", {11}),
            ("expander", {2, 3, 4}),
            ("erdos_renyi", set(range(12))),
        ],
    )
    def test_metropolis_mixing_weights_are_symmetric_and_sum_to_1(
        self, graph: str, degrees: set[int]
    ) -> None:
        matrix = dense(network(Gossip(graph)))
        np.testing.assert_allclose(matrix, matrix.T)
        np.testing.assert_allclose(matrix.sum(1), 1)
        found = (matrix > 0).sum(1) - (np.diag(matrix) > 0)
        assert {*found.tolist()} <= degrees
        for one, other in np.argwhere(np.triu(matrix, 1)).tolist():
            assert matrix[one, other] == pytest.approx(1 / (1 + max(found[one], found[other])))

    def test_uniform_gossip_gives_a_client_and_its_neighbours_equal_weights(self) -> None:
        star = Gossip("edges", edges=[[0, 1], [0, 2]], weights="uniform")
        third, half = 1 / 3, 1 / 2
        expected = [[third, third, third], [half, half, 0], [half, 0, half]]
        np.testing.assert_allclose(dense(network(star, 3)), expected)

    def test_client_keeps_the_gossip_weight_that_its_neighbours_do_not_get(self) -> None:
        line = Gossip("edges", edges=[[0, 1, 0.25], [1, 2, 0.5]])
        expected = [[0.75, 0.25, 0], [0.25, 0.25, 0.5], [0, 0.5, 0.5]]
        np.testing.assert_allclose(dense(network(line, 3)), expected)

    def test_gossip_graphs_depend_on_the_seed_only(self) -> None:
        for graph in ("erdos_renyi", "expander"):
            one, same = dense(network(Gossip(graph))), dense(network(Gossip(graph)))
            other = Gossip(graph).connect(Federation(1, np.full(12, 5), "samples", 10))
            assert np.array_equal(one, same) and not np.array_equal(one, dense(other))

    def test_clients_without_samples_have_no_neighbours(self) -> None:
        counts = np.array([5, 0, 5, 5, 5])
        found = Gossip("ring").connect(Federation(0, counts, "samples", 10))
        matrix = dense(found)
        assert matrix[1, 1] == 1 and matrix[0, 2] > 0 and not found.warnings
        assert found.mean_weights[1] == 0


class Cities(Topology):
    """A topology as a user would write it: one server for even clients, another for odd ones."""

    def connect(self, federation: Federation) -> Network:
        weights = np.array([[0.8, 0.2], [0.2, 0.8]])
        servers = np.arange(federation.clients) % 2
        return Network(servers, mixing_matrix(weights, "topology"), every=2)


class TestOwnTopology:
    def test_run_of_a_custom_topology_equals_a_computation_by_hand(self) -> None:
        spy, result = spied(Cities(), Synchronous(5), rounds=5)
        delta_of = {update.job: update.delta for update in spy.updates}
        counts = result.coordinator.counts
        models = np.stack([result.coordinator.initial.shared.numpy()] * 2).astype(np.float64)
        for number, aggregation in enumerate(result.aggregations[:5]):
            for server in range(2):
                jobs = [job for job in aggregation.aggregated if job.client % 2 == server]
                weights = np.array([counts[job.client] for job in jobs], np.float64)
                deltas = [delta_of[job.number] for job in jobs]
                if jobs:
                    models[server] += weights @ np.stack(deltas) / weights.sum()
            if number % 2:
                models = np.array([[0.8, 0.2], [0.2, 0.8]]) @ models
        np.testing.assert_allclose(vectors(result), models, atol=1e-5)

    def test_custom_topology_has_same_bits_on_several_workers_and_after_resume(self) -> None:
        def make() -> Any:
            return spec(Cities(), Scaffold(), FedBN())

        check_workers(make, Synchronous(5))
        check_resumed(make, Synchronous(5))


def test_k_means_leaves_no_group_empty() -> None:
    points = np.zeros((6, 2))
    groups = k_means(points, np.ones(6, bool), 4, np.random.default_rng(0))
    assert sorted({*groups.tolist()}) == [0, 1, 2, 3]
