"""Test centralized training: what the method declares, and the results on pooled data.

The results are compared with local training of one client and with a round of FedSGD.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import LOCAL, MLP, SEED, check_composition, run, run_spec

from raysim.api.composition import HOOKS, fills
from raysim.api.method import parameters
from raysim.data.federated import FederatedData, federate, pool_clients
from raysim.data.partition import CSR, IID, Dirichlet, Partition
from raysim.data.sources import Synthetic
from raysim.methods.centralized import Centralized
from raysim.methods.fedbn import FedBN
from raysim.methods.fedprox import FedProx
from raysim.methods.fedsr import FedSR
from raysim.methods.local import LocalTraining
from raysim.methods.mixup import Mixup
from raysim.methods.partialfed import PartialFed
from raysim.methods.pfedavg import PFedAvg
from raysim.simulation.schedule import Synchronous

SOURCE = Synthetic(samples=120, test_samples=20, classes=5)


def population(clients: int = 4) -> FederatedData:
    """Return the data of some clients, each with its own test samples."""
    return federate(SOURCE, IID(clients=clients, test_fraction=0.2), SEED)


def test_method_centralized_joins_client_data_and_has_no_hooks_or_arguments() -> None:
    assert Centralized.name == "centralized" and Centralized.pools
    assert not any(fills(Centralized(), hook) for hook in HOOKS) and not parameters(Centralized())


@pytest.mark.parametrize(
    "method", [FedBN(), LocalTraining(), PartialFed(), PFedAvg(), PFedAvg("finetune")]
)
def test_centralized_training_refuses_methods_with_a_model_per_client(method: Any) -> None:
    with pytest.raises(
        ValueError,
        match=f"'{method.name}' cannot be combined with method 'centralized'",
    ):
        check_composition([Centralized(), method])


def test_centralized_training_can_be_combined_with_fedprox_and_mixup() -> None:
    check_composition([Centralized(), FedProx(), Mixup()])


def test_centralized_training_refuses_fedsr_only_if_each_client_has_its_own_gaussians() -> None:
    with pytest.raises(ValueError, match="each client has its own class Gaussians"):
        check_composition([Centralized(), FedSR()])
    for method in (FedSR(share_reference=True), FedSR(probabilistic=False), FedSR(alpha_cmi=0.0)):
        spec = run_spec(Centralized(), method, data=pool_clients(population()))
        assert not run(spec, Synchronous(1), rounds=1).failures


def test_centralized_training_equals_local_training_of_one_client() -> None:
    data = pool_clients(population(1))
    result = run(run_spec(Centralized(), data=data), Synchronous(1), rounds=4)
    local = run(run_spec(LocalTraining(), data=data), Synchronous(1), rounds=4)
    mine = result.coordinator.server.vector.numpy()
    # The server adds a difference where the client just goes on: the last bit may differ.
    np.testing.assert_allclose(mine, local.state(0).personal, rtol=1e-4, atol=1e-5)
    assert [row["accuracy"] for row in result.rows] == [row["accuracy"] for row in local.rows]


def test_step_of_centralized_training_equals_a_round_of_fedsgd() -> None:
    data = federate(SOURCE, Dirichlet(clients=4, alpha=1.0, minimum=5), SEED)
    assert len(set(data.partition.train.counts.tolist())) > 1, "or weights would not matter"
    local = replace(LOCAL, momentum=0.0, weight_decay=0.0, batch=1000)
    result = run(
        run_spec(Centralized(), model=MLP, data=pool_clients(data), local=local),
        Synchronous(1),
        rounds=1,
    )
    fedsgd = run(run_spec(model=MLP, data=data, local=local), Synchronous(4), rounds=1)
    mine, its = result.coordinator.server.vector, fedsgd.coordinator.server.vector
    moved = (its - fedsgd.coordinator.initial.shared).abs().max()
    assert moved > 1e-3 and torch.allclose(mine, its, rtol=1e-4, atol=1e-6)


def test_centralized_training_does_not_depend_on_the_split_into_clients() -> None:
    data = population()
    train, order = data.partition.train, [2, 0, 3, 1]
    rows = [train.rows(client) for client in order]
    shuffled = CSR(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))
    other = replace(data, partition=Partition(shuffled, data.partition.test))
    first, second = (
        run(run_spec(Centralized(), data=pool_clients(each)), Synchronous(1))
        for each in (data, other)
    )
    assert first.bits == second.bits


def test_centralized_run_reports_no_traffic() -> None:
    rows = run(run_spec(Centralized(), data=pool_clients(population())), Synchronous(1)).rows
    assert all(row["floats_down"] is None and row["floats_up"] is None for row in rows)
