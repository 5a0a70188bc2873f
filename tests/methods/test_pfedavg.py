"""Test that the shared model of pFedAvg equals that of FedAvg, and which models are scored."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
    LOCAL,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    SEED,
    FinishedRun,
    method_state,
    run,
    run_spec,
    same_arrays,
)

from raysim.api.declarations import Evaluation, Finetune
from raysim.api.local_job import LocalJob, PersonalModel
from raysim.api.messages import Job, PublishedVersion, ScoringTask
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.fedbn import FedBN
from raysim.methods.fedprox import FedProx
from raysim.methods.pfedavg import PFedAvg
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import declare_run
from raysim.training.worker import Worker

MODES: dict[str, PFedAvg] = {
    "after_local": PFedAvg(),
    "finetune": PFedAvg("finetune", 2),
    "finetune_last": PFedAvg("finetune_last"),
    "finetune, head only": PFedAvg("finetune", 1, head_only=True),
}


def population(clients: int = 5) -> FederatedData:
    """Return the data of some clients, each with its own test samples."""
    return federate(
        Synthetic(samples=150, test_samples=20, classes=5),
        IID(clients=clients, test_fraction=0.2),
        SEED,
    )


def study(*methods: Method, **others: Any) -> Any:
    return run_spec(*methods, **({"model": NORMED_MLP, "data": population()} | others))


# --- training ---------------------------------------------------------------------------------


@functools.cache
def run_without(others: tuple[Method, ...], schedule: Any) -> FinishedRun:
    """Run these methods, which do not contain pFedAvg."""
    return run(study(*others), schedule, rounds=4)


@pytest.mark.parametrize(
    ("schedule", "others"),
    [
        pytest.param(ROUNDS, (), id="rounds, alone"),
        pytest.param(BUFFER, (FedProx(0.1),), id="buffer, with fedprox"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_adding_pfedavg_does_not_change_the_trained_shared_model(
    mode: str, schedule: Any, others: tuple[Method, ...]
) -> None:
    ended = run(study(MODES[mode], *others), schedule, rounds=4)
    plain = run_without(others, schedule)
    assert ended.finished.model_sha256 == plain.finished.model_sha256 and same_arrays(
        ended.tensors, plain.tensors
    )
    for row, reference in zip(ended.rows, plain.rows, strict=True):
        for key in (
            "train_loss",
            "accuracy_global",
            "loss_global",
            "virtual_seconds",
            "floats_down",
            "floats_up",
        ):
            assert row[key] == reference[key], key


@pytest.mark.parametrize("mode", ["finetune", "finetune_last", "finetune, head only"])
def test_pfedavg_fine_tuning_stores_no_client_state(mode: str) -> None:
    assert run(study(MODES[mode])).private == {}


# --- after_local ------------------------------------------------------------------------------


class Watch(Method):
    """A method that stores the trained model of each client's last job."""

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.last: dict[int, torch.Tensor] = {}

    def end(self, job: LocalJob) -> None:
        self.last[job.client] = job.params.clone()


@pytest.mark.parametrize("others", [(), (FedBN(),)], ids=["alone", "with fedbn"])
def test_pfedavg_scores_a_client_with_its_last_trained_model_by_default(
    others: tuple[Method, ...],
) -> None:
    watch = Watch()
    spec = study(PFedAvg(), *others, watch)
    ended = run(spec, Synchronous(2), rounds=5)
    turns = ended.participations
    assert len(watch.last) > 2 and max(turns.values()) > 1
    layout, states = ended.coordinator.layout, ended.private
    worker, tests = Worker(spec), spec.data.partition.test
    hits = []
    for client in range(5):
        weights = watch.last.get(client)
        if weights is not None:
            assert np.array_equal(
                states[f"{client}/pfedavg.model"], weights[: layout.shared].numpy()
            )
            worker.vector.data.copy_(weights)
        else:
            worker.vector.shared.copy_(ended.coordinator.server.vector)
            if layout.personal:
                worker.vector.personal.copy_(Worker(spec).vector.personal)
        worker.trainer.set_training(False)
        inputs, labels = worker.trainer.gather(tests.rows(client))
        with torch.no_grad():
            hits.append(
                float((worker.vector.networks["model"](inputs).argmax(1) == labels).double().mean())
            )
    assert ended.rows[-1]["accuracy"] == pytest.approx(np.mean(hits))


def test_pfedavg_history_has_columns_with_scores_of_the_shared_model() -> None:
    ended, plain = run(study(PFedAvg())), run(study())
    for row, reference in zip(ended.rows, plain.rows, strict=True):
        assert row["accuracy_shared"] == reference["accuracy"]
        assert row["accuracy_global"] == reference["accuracy_global"]
    assert any(row["accuracy"] != row["accuracy_shared"] for row in ended.rows)


def test_pfedavg_scores_untrained_client_with_shared_model() -> None:
    worker = Worker(study(PFedAvg()))
    shared = worker.vector.shared.clone()
    state = {"pfedavg.model": torch.empty(0)}
    task = worker.trainer.task
    client = PersonalModel(0, task, worker.vector, state, {}, lambda: iter(()), False, "pfedavg")
    PFedAvg().personalise(client)
    assert torch.equal(worker.vector.shared, shared)


def test_pfedavg_scores_shared_model_after_a_failed_first_job() -> None:
    class Failing(Method):
        name, paper = "failing", "a test"

        def begin(self, job: LocalJob) -> None:
            if job.client == 0:
                raise RuntimeError

    finished = run(study(PFedAvg(), Failing()), Synchronous(5), tolerate=0.5)
    assert len(finished.failures) == 3 and finished.rows[-1]["accuracy"] is not None


# --- fine-tuning ------------------------------------------------------------------------------


def finetuning(method: PFedAvg) -> Finetune | None:
    """Return the fine-tuning that the method declares."""
    (declared,) = declare_run(study(method)).methods
    return declared.finetune


def test_pfedavg_settings_choose_how_clients_are_fine_tuned() -> None:
    assert finetuning(PFedAvg()) is None
    assert finetuning(PFedAvg("finetune", 3)) == Finetune(3)
    head = PFedAvg("finetune_last", 2, head_only=True)
    assert finetuning(head) == Finetune(2, head=True, last=True)


def test_pfedavg_can_fine_tune_in_the_last_round_only() -> None:
    always, last = (run(study(PFedAvg(mode))).rows for mode in ("finetune", "finetune_last"))
    assert ["accuracy_finetuned" in row for row in always] == [True, True, True]
    assert ["accuracy_finetuned" in row for row in last] == [False, False, True]
    assert last[-1]["accuracy_finetuned"] == always[-1]["accuracy_finetuned"]


@pytest.mark.parametrize("head", [False, True], ids=["all", "head only"])
def test_pfedavg_gives_the_same_scores_as_the_setting_evaluate_finetune(head: bool) -> None:
    asked = Evaluation(finetune=Finetune(2, head=head))
    by_method = run(study(PFedAvg("finetune", 2, head_only=head))).rows
    by_setting = run(study(), evaluate=asked).rows
    assert [row["accuracy_finetuned"] for row in by_method] == [
        row["accuracy_finetuned"] for row in by_setting
    ]
    assert any(row["accuracy_finetuned"] != row["accuracy"] for row in by_method)


def test_pfedavg_fine_tuning_raises_the_accuracy_of_clients_with_few_classes() -> None:
    rows = run(study(PFedAvg("finetune", 20), local=replace(LOCAL, lr=0.02)), rounds=1).rows
    assert rows[0]["accuracy_finetuned"] > rows[0]["accuracy"]  # type: ignore[operator]


def test_pfedavg_with_0_fine_tuning_epochs_scores_the_shared_model() -> None:
    rows, plain = run(study(PFedAvg("finetune", 0))).rows, run(study()).rows
    assert not any("accuracy_finetuned" in row for row in rows)
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in plain]


@pytest.mark.parametrize("mode", MODES)
def test_pfedavg_evaluation_changes_no_model_and_no_training(
    mode: str,
) -> None:
    spec = study(MODES[mode], model=NORMED)

    def trained(look: bool) -> tuple[torch.Tensor, torch.Tensor, PublishedVersion]:
        worker = Worker(spec)
        vector, counters = (
            worker.vector.shared.clone().numpy(),
            worker.vector.counters.clone().numpy(),
        )
        published = PublishedVersion(0, vector, counters)
        state = method_state({"pfedavg.model": torch.empty(0)} if mode == "after_local" else {})
        if look:
            for client in range(3):
                rows = spec.data.partition.test.rows(client)
                worker.evaluate(
                    [ScoringTask(client, rows, finetune=finetuning(MODES[mode]))], published
                )
        ctx = worker.trainer.train(
            Job(0, 0, 0, 0, -1, 1.0),
            torch.from_numpy(vector),
            torch.from_numpy(counters),
            {},
            state,
        )
        return ctx.vector.data.clone(), ctx.vector.counters.clone(), published

    looked, blind = trained(True), trained(False)
    assert torch.equal(looked[0], blind[0]) and torch.equal(looked[1], blind[1])
    assert np.array_equal(looked[2].vector, blind[2].vector)
    assert np.array_equal(looked[2].counters, blind[2].counters)


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"mode": "tuned"}, "mode"),
        ({"mode": "finetune", "adapt_epochs": -1}, "adapt_epochs"),
        ({"head_only": True}, "head_only"),
    ],
)
def test_pfedavg_refuses_settings_without_effect(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^method\.pfedavg\.{key}\b"):
        PFedAvg(**settings)
