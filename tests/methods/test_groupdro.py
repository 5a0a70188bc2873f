"""Test GroupDRO's weights in extreme cases, and what clients upload."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tiny_runs import ROUNDS, run, run_spec
from torch import Tensor

from raysim.api.declarations import Local
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.methods.dann import Dann
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedprox import FedProx
from raysim.methods.groupdro import GroupDRO
from raysim.simulation.schedule import Schedule

LOG_WEIGHTS = "groupdro.log_weights"
LOCAL = Local(lr=0.05, momentum=0.9, batch=8, epochs=2)


class Watch(GroupDRO):
    """A GroupDRO that stores values of each aggregation in lists.

    losses: the uploaded losses.
    log_weights: the logarithms of all clients' GroupDRO weights after the aggregation.
    weights: the weights of the updates.
    vectors: the new versions.
    """

    def __init__(self, settings: GroupDRO) -> None:
        super().__init__(settings.step_size, settings.batches, settings.prior)
        self.losses: list[Tensor] = []
        self.log_weights: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.vectors: list[Tensor] = []

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        self.losses.append(torch.cat(aggregation.uploads("loss")).double())
        self.log_weights.append(server.state["log_weights"].log_softmax(0))
        self.weights.append(torch.tensor(aggregation.weights, dtype=torch.float64))
        self.vectors.append(server.vector)


def watched(
    *methods: Method, schedule: Schedule = ROUNDS, rounds: int = 5, **settings: Any
) -> Watch:
    """Run methods, with a `Watch` in place of GroupDRO; return the `Watch`.

    methods: the methods. The last one must be a GroupDRO.
    settings: further arguments of `run`.
    """
    *others, groupdro = methods
    assert isinstance(groupdro, GroupDRO)
    watch = Watch(groupdro)
    run(run_spec(*others, watch, local=LOCAL), schedule, rounds=rounds, **settings)
    return watch


# --- weights ----------------------------------------------------------------------------------


def test_groupdro_prior_of_client_without_samples_is_finite() -> None:
    server: Any = SimpleNamespace(sample_counts=np.array([0, 3, 9]), clients=3)
    log_weights = GroupDRO(prior="samples")._first_log_weights(server)
    assert log_weights.isfinite().all()
    assert log_weights.exp()[0] < 1e-9
    expected = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.allclose(log_weights.exp()[1:], expected)


def test_groupdro_uses_both_of_two_buffered_updates_of_a_client() -> None:
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


def test_groupdro_weights_that_underflow_do_not_stop_a_run() -> None:
    watch = watched(GroupDRO(1e4))
    assert all(log_weights.isfinite().all() for log_weights in watch.log_weights)
    assert watch.log_weights[-1].exp().min() == 0.0
    assert all(weights.isfinite().all() and weights.max() == 1.0 for weights in watch.weights)


# --- the loss ---------------------------------------------------------------------------------


def test_groupdro_uploads_the_task_loss_without_penalties_of_other_methods() -> None:
    plain, laden = watched(GroupDRO(0.5)), watched(FedDecorr(5.0), FedProx(3.0), GroupDRO(0.5))
    assert torch.equal(plain.losses[0], laden.losses[0])
    assert not torch.equal(plain.vectors[0], laden.vectors[0])


def test_groupdro_client_weights_stay_equal_if_jobs_compute_no_task_loss() -> None:
    study = run_spec(
        Dann(0.5, width=4, discriminator_steps=9),
        GroupDRO(0.5),
        local=replace(LOCAL, epochs=1, batch=32),
    )
    ended = run(study, rounds=1)
    assert not ended.failures
    weights = ended.coordinator.server.state[LOG_WEIGHTS]
    assert torch.allclose(weights, weights[0].expand(6))
