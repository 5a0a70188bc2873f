"""Test topology=clustered: whole runs, what is refused, and the rule that splits clusters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import coordinate, run, run_spec, tiny_data

from raysim import load
from raysim.api.declarations import Evaluation, Local
from raysim.api.method import Method
from raysim.api.topology import ClusterRule, ClusterView, Federation, Network, Topology
from raysim.conformance.agreement import check_resumed, check_workers
from raysim.experiment.execute import run as run_experiment
from raysim.methods.fedbn import FedBN
from raysim.methods.fedcm import FedCM
from raysim.methods.feddyn import FedDyn
from raysim.methods.fedopt import FedAdam
from raysim.methods.fedpac import FedPAC
from raysim.methods.groupdro import GroupDRO
from raysim.methods.scaffold import Scaffold
from raysim.primitives.errors import RefusedError
from raysim.simulation.clustering import bipartition, cosine_similarities
from raysim.simulation.events import Round
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Buffered, Immediate, Schedule, Synchronous
from raysim.simulation.selection_rules import PowerOfChoice
from raysim.simulation.topologies import Clustered

CLIENTS = 8
ALL = Synchronous(CLIENTS)
# Clusters of the tiny runs are split in the first rounds.
EAGER = Clustered("updates", 4, mean_norm=100.0, max_norm=0.01, start=0)
CHOICE = Clustered("loss", 3)


def spec(topology: Topology, *methods: Method, **others: Any) -> Any:
    return run_spec(*methods, data=tiny_data(clients=CLIENTS), topology=topology, **others)


THREE = (FedAdam(), FedBN(), FedCM())


@pytest.mark.parametrize(
    ("topology", "schedule", "methods"),
    [
        pytest.param(EAGER, ALL, THREE, id="updates-rounds-three"),
        pytest.param(EAGER, Buffered(6, 3), THREE, id="updates-buffer-three"),
        pytest.param(EAGER, Immediate(4), (), id="updates-immediate-none"),
        pytest.param(CHOICE, ALL, (), id="loss-rounds-none"),
        pytest.param(CHOICE, Buffered(6, 3), THREE, id="loss-buffer-three"),
        pytest.param(CHOICE, Immediate(4), THREE, id="loss-immediate-three"),
    ],
)
def test_clusters_have_same_bits_on_several_workers_and_after_resume(
    topology: Topology, schedule: Schedule, methods: tuple[Method, ...]
) -> None:
    def make() -> Any:
        return spec(topology, *methods, local=Local(lr=0.1))

    check_workers(make, schedule, Lognormal())
    check_resumed(make, schedule, Lognormal())


def test_clusters_are_split_again_in_later_rounds() -> None:
    result = run(spec(EAGER), ALL, rounds=3)
    assert result.rows[0]["topology.clusters"] == 2
    assert result.rows[2]["topology.clusters"] == 4
    assert len({*result.coordinator.replicas.clients_of.tolist()}) == 4


def test_clients_choose_the_same_clusters_with_one_or_three_lanes() -> None:
    one, several = (run(spec(CHOICE, lanes=lanes), ALL, rounds=3) for lanes in (1, 3))
    choices = [found.coordinator.replicas.clients_of.tolist() for found in (one, several)]
    assert choices[0] == choices[1] and len({*choices[0]}) > 1


def test_stale_update_is_aggregated_into_the_clients_new_cluster() -> None:
    """A job that began before a split is aggregated into the model of its client's cluster."""
    result = run(spec(EAGER), Buffered(6, 3), Lognormal(), rounds=8)
    replicas = result.coordinator.replicas
    assert result.rows[-1]["topology.clusters"] > 1
    for replica, server in enumerate(replicas.servers):
        members = np.flatnonzero(server.counts)
        assert (replicas.clients_of[members] == replica).all()
    assert sum(server.samples for server in replicas.servers) == result.coordinator.counts.sum()


def test_choice_of_a_cluster_costs_one_download_and_one_pass_for_each_model() -> None:
    star, choice = (run(spec(topology), ALL, rounds=2) for topology in (_star(), CHOICE))
    size = star.coordinator.layout.shared
    assert choice.rows[-1]["floats_down"] == 3 * star.rows[-1]["floats_down"]
    assert choice.rows[-1]["floats_up"] == star.rows[-1]["floats_up"] + 2 * CLIENTS
    job, plain = choice.aggregations[0].aggregated[0], star.aggregations[0].aggregated[0]
    counts = choice.coordinator.counts
    assert job.down == 3 * size
    assert job.work == pytest.approx(plain.work + counts[job.client])  # 3 thirds of a step


def _star() -> Topology:
    from raysim.api.topology import Star

    return Star()


def test_selection_by_measured_loss_uses_each_clients_best_model() -> None:
    make = spec(CHOICE, selection=PowerOfChoice(6, loss="measured"))
    result = run(make, Synchronous(3), rounds=3)
    replicas, evaluator = result.coordinator.replicas, result.coordinator.evaluator
    losses = evaluator.replica_losses(range(CLIENTS), None, replicas, result.coordinator.versions)
    assert losses.shape == (3, CLIENTS)
    measured = result.coordinator._measure_losses(range(CLIENTS), None)
    np.testing.assert_array_equal(measured, losses.min(axis=0))


# With the cohort of 2, some clients have never trained and thus never chosen a model.
@pytest.mark.parametrize(
    ("topology", "cohort"), [(EAGER, CLIENTS), (CHOICE, 2)], ids=["updates", "loss"]
)
def test_clients_are_scored_with_the_model_of_their_cluster(
    topology: Topology, cohort: int
) -> None:
    coordinator = coordinate(spec(topology, local=Local(lr=0.1)), Synchronous(cohort), rounds=2)
    scores = [event.scores for event in coordinator.run() if isinstance(event, Round)][-1]
    assert scores is not None
    replicas = coordinator.replicas
    expected = replicas.clients_of[scores.clients]
    if topology is CHOICE:
        clients = scores.clients.tolist()
        evaluator, versions = coordinator.evaluator, coordinator.versions
        losses = evaluator.replica_losses(clients, None, replicas, versions)
        expected = losses.argmin(axis=0)
    assert len({*expected.tolist()}) > 1
    assert scores.columns["replica"].tolist() == expected.tolist()


@pytest.mark.parametrize("method", [Scaffold(), FedDyn(), GroupDRO()])
@pytest.mark.parametrize("topology", [EAGER, CHOICE])
def test_clusters_refuse_methods_with_server_state_per_client(
    method: Method, topology: Topology
) -> None:
    with pytest.raises(ValueError, match=f"topology: method '{method.name}'"):
        coordinate(spec(topology, method), ALL)


def test_clusters_by_loss_refuse_a_method_with_per_client_downloads() -> None:
    with pytest.raises(ValueError, match="topology: method 'fedpac'"):
        coordinate(spec(CHOICE, FedPAC(), local=Local(epochs=2)), ALL)


@pytest.mark.parametrize(
    "settings, match",
    [
        ({"rule": "kmeans"}, r"topology\.rule"),
        ({"clusters": 1}, r"topology\.clusters"),
        ({"mean_norm": 0.0}, r"topology\.mean_norm"),
        ({"gamma": 1.0}, r"topology\.gamma"),
    ],
)
def test_wrong_settings_of_clusters_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Clustered(**settings)


def test_more_clusters_than_clients_are_refused() -> None:
    with pytest.raises(ValueError, match=r"topology\.clusters=9"):
        Clustered("loss", 9).connect(Federation(0, np.full(CLIENTS, 5), "samples", 10))


def test_error_of_method_option_ifca_suggests_clustered_topology(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"topology=clustered topology\.rule=loss"):
        run_experiment(["method=ifca", f"out={tmp_path}"])


def test_loaded_model_of_a_client_is_the_model_of_its_cluster(tmp_path: Path) -> None:
    result = run_experiment(
        "data=synthetic data.samples=120 model=mlp partition.clients=6 schedule.cohort=6 rounds=3 "
        "topology=clustered topology.rule=loss topology.clusters=2 local.epochs=1 "
        f"runtime=inprocess runtime.threads=1 tracking=none out={tmp_path / 'run'}",
        quiet=True,
    )
    clients = load(result.folder)
    models = [clients.client_model(client).state_dict() for client in range(6)]
    replica_of = result.clients["replica"]
    assert len({*replica_of}) == 2
    for one in range(6):
        for other in range(one):
            key = "head.weight"
            is_same = np.array_equal(models[one][key], models[other][key])
            assert is_same == (replica_of[one] == replica_of[other])


# --- the rule ---------------------------------------------------------------------------------
def test_bipartition_of_a_cluster_separates_opposite_updates() -> None:
    rows = [np.array(row, np.float32) for row in ([1, 0.1], [-1, 0], [1, -0.1], [-2, 0.1])]
    is_second, across = bipartition(cosine_similarities(rows))
    assert is_second.tolist() == [False, True, False, True]
    assert across < -0.9


def test_bipartition_of_a_cluster_accepts_equal_or_zero_updates() -> None:
    rows = [np.ones(2, np.float32), np.ones(2, np.float32), np.zeros(2, np.float32)]
    is_second, across = bipartition(cosine_similarities(rows))
    assert is_second.tolist() == [False, False, True] and across == 0


@dataclass(frozen=True)
class OneByOne(ClusterRule):
    """A rule that moves clients of a cluster to another one while some cluster has no clients.

    target: the number of the cluster that gets the clients.
    many: False moves one client. True moves all clients, which raysim refuses.
    """

    target: int = 1
    many: bool = False

    def regroup(self, view: ClusterView) -> Mapping[int, np.ndarray]:
        count = len(view.members) if self.many else 1
        return {self.target: view.members[:count]} if view.free else {}


@dataclass(frozen=True)
class Pieces(Topology):
    rule: ClusterRule

    def connect(self, federation: Federation) -> Network:
        zeros = np.zeros(federation.clients, np.int64)
        return Network(zeros, shares=np.ones(2), clusters=self.rule)


def test_custom_cluster_rule_can_move_a_client_to_a_new_replica() -> None:
    result = run(spec(Pieces(OneByOne())), ALL, rounds=2, evaluate=Evaluation(every=1))
    assert result.coordinator.replicas.clients_of.tolist() == [1] + [0] * (CLIENTS - 1)


@dataclass(frozen=True)
class MovesUnknownClient(ClusterRule):
    """A rule that moves a client that is in no cluster."""

    def regroup(self, view: ClusterView) -> Mapping[int, np.ndarray]:
        return {1: np.array([CLIENTS])}


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (OneByOne(target=0), "the target is not in view.free"),
        (OneByOne(target=5), "the target is not in view.free"),
        (OneByOne(many=True), "no client would stay"),
        (MovesUnknownClient(), "some clients are not in this replica"),
    ],
)
def test_wrong_result_of_user_defined_cluster_rule_is_refused(
    rule: ClusterRule, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"topology: {type(rule).__name__}\.regroup.* {reason}"):
        run(spec(Pieces(rule)), ALL, rounds=2)
