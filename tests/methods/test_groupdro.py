"""GroupDRO's weights over a run: who gains, what is uploaded, and what the server does with it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import BUFFER, ROUNDS, run, run_spec, tiny
from torch import Tensor

from raysim.api.context import Batch
from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.methods.dann import Dann
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedprox import FedProx
from raysim.methods.groupdro import GroupDRO, aggregation_weights
from raysim.methods.mixup import Mixup
from raysim.simulation import checkpoint
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Schedule, Synchronous

LOG_WEIGHTS = "groupdro.log_weights"
LOCAL = Local(lr=0.05, momentum=0.9, batch=8, epochs=2)


class Watch(GroupDRO):
    """Keep what the server sees at each aggregation, and the received model's first losses."""

    def __init__(self, settings: GroupDRO) -> None:
        super().__init__(settings.step_size, settings.batches, settings.prior)
        self.clients: list[list[int]] = []
        self.losses: list[Tensor] = []
        self.means: list[list[float]] = []
        self.deltas: list[Tensor] = []
        self.log_weights: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.vectors: list[Tensor] = []
        self.first: dict[tuple[int, int], float] = {}
        self.batch_means: dict[tuple[int, int], float] = {}

    def _first_log_weights(self, server: ServerView) -> Tensor:
        first = super()._first_log_weights(server)
        self.log_weights.append(first.clone())
        self.vectors.append(server.vector)
        return first

    def batch(self, job: LocalJob, batch: Batch) -> Batch:
        if job.step == 0:
            with torch.no_grad():
                loss = F.cross_entropy(job.model(batch.inputs), batch.targets)
            self.first[job.client, job.version] = loss.item()
        return batch

    def end(self, job: LocalJob) -> None:
        super().end(job)
        self.batch_means[job.client, job.version] = float(job.losses.mean())

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        updates = aggregation.updates
        self.clients.append(aggregation.clients)
        self.losses.append(torch.cat(aggregation.uploads("loss")).double())
        self.means.append([self.batch_means[update.client, update.version] for update in updates])
        self.deltas.append(torch.stack(list(aggregation.deltas)))
        self.log_weights.append(server.state["log_weights"].log_softmax(0))
        self.weights.append(torch.tensor(aggregation.weights, dtype=torch.float64))
        self.vectors.append(server.vector)


def watched(
    *methods: Method, schedule: Schedule = ROUNDS, rounds: int = 5, **settings: Any
) -> Watch:
    """Run the methods with a watched GroupDRO in place of theirs, which comes last."""
    *others, groupdro = methods
    assert isinstance(groupdro, GroupDRO)
    watch = Watch(groupdro)
    run(run_spec(*others, watch, local=LOCAL), schedule, rounds=rounds, **settings)
    return watch


# --- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_a_clients_weight_grows_with_its_loss_and_lasts_while_it_is_idle(
    schedule: Schedule,
) -> None:
    watch = watched(GroupDRO(0.5), schedule=schedule, fleet=Ideal())
    assert torch.equal(watch.log_weights[0], torch.full((6,), -math.log(6), dtype=torch.float64))
    for turn, (clients, losses) in enumerate(zip(watch.clients, watch.losses, strict=True)):
        assert len(set(clients)) == len(clients) < 6
        growth = watch.log_weights[turn + 1] - watch.log_weights[turn]
        own = torch.zeros(6, dtype=torch.float64)
        own[clients] = losses
        assert torch.allclose(growth - growth[0], 0.5 * (own - own[0]), rtol=0, atol=1e-12)
        assert watch.log_weights[turn + 1].exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert len(watch.log_weights[-1].unique()) > 3


@pytest.mark.parametrize("prior", ["uniform", "samples"])
def test_the_participants_are_averaged_with_their_updated_weights(prior: Any) -> None:
    watch = watched(GroupDRO(2.0, prior=prior))
    for turn, clients in enumerate(watch.clients):
        shares = aggregation_weights(watch.log_weights[turn + 1].exp(), torch.tensor(clients))
        assert torch.allclose(
            watch.weights[turn] / watch.weights[turn].sum(), shares, rtol=1e-12, atol=0
        )
        mean = (shares.unsqueeze(1) * watch.deltas[turn].double()).sum(dim=0)
        found = watch.vectors[turn + 1] - watch.vectors[turn]
        assert torch.allclose(found.double(), mean, rtol=0, atol=1e-6)
        equal = watch.deltas[turn].double().mean(dim=0)
        assert not torch.allclose(found.double(), equal, rtol=0, atol=1e-4)


def test_with_samples_as_prior_and_no_step_it_is_fedavg_by_samples() -> None:
    watch = watched(GroupDRO(0.0, prior="samples"))
    counts = torch.from_numpy(tiny().partition.train.counts).double()
    assert all(
        torch.allclose(each.exp(), counts / counts.sum(), rtol=1e-12) for each in watch.log_weights
    )
    prior = run(run_spec(GroupDRO(0.0, prior="samples"), local=LOCAL))
    fedavg = run(run_spec(local=LOCAL), weighting="samples")
    for name, value in fedavg.tensors.items():
        np.testing.assert_allclose(prior.tensors[name], value, rtol=1e-4, atol=1e-6)


def test_a_client_without_samples_has_no_weight_as_prior_and_does_no_harm() -> None:
    server: Any = SimpleNamespace(counts=np.array([0, 3, 9]), clients=3)
    found = GroupDRO(prior="samples")._first_log_weights(server)
    assert found.isfinite().all() and found.exp()[0] < 1e-9
    assert torch.allclose(found.exp()[1:], torch.tensor([0.25, 0.75], dtype=torch.float64))


def test_a_single_participant_decides_alone() -> None:
    watch = watched(GroupDRO(0.5), schedule=Synchronous(1))
    assert all(weights.tolist() == [1.0] for weights in watch.weights)
    for turn, (delta,) in enumerate(watch.deltas):
        assert torch.equal(watch.vectors[turn + 1], watch.vectors[turn] + delta)
    assert len(watch.log_weights[-1].unique()) > 2, "its weight grows all the same"


def test_both_results_of_a_client_count_if_it_comes_twice_into_one_aggregation() -> None:
    start = torch.full((3,), 1 / 3, dtype=torch.float64).log()
    server: Any = SimpleNamespace(state={"log_weights": start})
    losses = [(1, 2.0), (0, 1.0), (1, 4.0)]
    updates: Any = [
        SimpleNamespace(client=client, extras={"groupdro.loss": np.array([loss], np.float32)})
        for client, loss in losses
    ]
    aggregation = Aggregation(updates, [], [1.0] * 3, [0] * 3, {}, method="groupdro")
    GroupDRO(0.5).weigh(aggregation, server)
    grown = server.state["log_weights"] - server.state["log_weights"][2]
    assert torch.allclose(grown, torch.tensor([0.5, 3.0, 0.0], dtype=torch.float64))


def test_weights_that_no_float_holds_do_not_break_a_run() -> None:
    watch = watched(GroupDRO(1e4))
    assert all(each.isfinite().all() for each in watch.log_weights)
    assert watch.log_weights[-1].exp().min() == 0.0
    assert all(weights.isfinite().all() and weights.max() == 1.0 for weights in watch.weights)


def test_weights_are_in_a_checkpoint(tmp_path: Path) -> None:
    watch = watched(GroupDRO(0.5), rounds=4, checkpoint_every=2, folder=str(tmp_path))
    for version in (2, 4):
        saved = checkpoint.read(tmp_path / "checkpoints" / f"round-{version:06d}").server[
            f"state/{LOG_WEIGHTS}"
        ]
        assert saved.dtype == np.float64
        assert torch.equal(torch.tensor(saved).log_softmax(0), watch.log_weights[version])
    resumed = Watch(GroupDRO(0.5))
    checkpoint_2 = str(tmp_path / "checkpoints" / "round-000002")
    run(run_spec(resumed, local=LOCAL), rounds=4, resume=checkpoint_2)
    assert torch.equal(resumed.log_weights[-1], watch.log_weights[4])
    assert resumed.clients == watch.clients[2:]


# --- the loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "mixup"])
def test_the_upload_is_the_received_models_loss_on_the_first_batch_as_it_is_trained_on(
    mixed: bool,
) -> None:
    watch = watched(*([Mixup(5.0)] if mixed else []), GroupDRO(0.5))
    for version, (clients, losses) in enumerate(zip(watch.clients, watch.losses, strict=True)):
        expected = [watch.first[client, version] for client in clients]
        np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-5)


def test_what_other_methods_add_to_the_loss_is_no_part_of_the_upload() -> None:
    plain, laden = watched(GroupDRO(0.5)), watched(FedDecorr(5.0), FedProx(3.0), GroupDRO(0.5))
    assert torch.equal(plain.losses[0], laden.losses[0])
    assert not torch.equal(plain.vectors[1], laden.vectors[1])


def test_the_mean_over_all_batches_is_uploaded_on_demand() -> None:
    watch = watched(GroupDRO(0.5, batches="all"))
    for losses, means in zip(watch.losses, watch.means, strict=True):
        np.testing.assert_allclose(losses.numpy(), means, rtol=1e-6)
    first = watched(GroupDRO(0.5))
    assert not torch.equal(watch.losses[0], first.losses[0])


def test_a_client_that_never_trained_its_classifier_uploads_zero() -> None:
    study = run_spec(
        Dann(0.5, width=4, discriminator_steps=9),
        GroupDRO(0.5),
        local=replace(LOCAL, epochs=1, batch=32),
    )
    found = run(study, rounds=1)
    assert not found.failures
    weights = found.coordinator.server.state[LOG_WEIGHTS]
    assert torch.allclose(weights, weights[0].expand(6))
