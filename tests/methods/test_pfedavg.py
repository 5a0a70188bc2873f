"""pFedAvg: training is FedAvg's in every mode; what each mode scores, and that scoring leaves everything alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import BUFFER, LOCAL, NORMED, NORMED_MLP, ROUNDS, SEED, check_composition, private, run, run_spec, same

from raysim.api.context import Context, Own
from raysim.api.declarations import Evaluation, Finetune
from raysim.api.hooked_method import HookedMethod, overrides
from raysim.api.messages import Job, Published, Task
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.fedbn import FedBN
from raysim.methods.fedprox import FedProx
from raysim.methods.local import LocalTraining
from raysim.methods.pfedavg import PFedAvg
from raysim.simulation.schedule import Synchronous
from raysim.training.host import Host

MODES: dict[str, PFedAvg] = {
    "after_local": PFedAvg(),
    "finetune": PFedAvg("finetune", 2),
    "finetune_last": PFedAvg("finetune_last"),
    "finetune, head only": PFedAvg("finetune", 1, head_only=True),
}


def population(clients: int = 5) -> FederatedData:
    """Clients with test rows of their own."""
    return federate(Synthetic(samples=150, test_samples=20, classes=5), IID(clients=clients, test_fraction=0.2), SEED)


def study(*methods: Method, **others: Any) -> Any:
    return run_spec(*methods, **({"model": NORMED_MLP, "data": population()} | others))


# --- training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [(), (FedProx(0.1),)], ids=["alone", "with fedprox"])
def test_the_shared_model_is_that_of_the_other_methods_in_every_round_of_every_mode(
    others: tuple[Method, ...], mode: str, schedule: Any
) -> None:
    found = run(study(MODES[mode], *others, model=NORMED), schedule, rounds=4)
    plain = run(study(*others, model=NORMED), schedule, rounds=4)
    assert found.finished.model_sha256 == plain.finished.model_sha256 and same(found.tensors, plain.tensors)
    for row, reference in zip(found.rows, plain.rows, strict=True):
        for key in ("train_loss", "accuracy_global", "loss_global", "virtual_seconds", "floats_down", "floats_up"):
            assert row[key] == reference[key], key


@pytest.mark.parametrize("mode", ["finetune", "finetune_last", "finetune, head only"])
def test_fine_tuning_keeps_nothing(mode: str) -> None:
    assert run(study(MODES[mode])).private == {}


# --- after_local --------------------------------------------------------------------------------------------------


class Watch(HookedMethod):
    """Keeps what every client trained last."""

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.last: dict[int, torch.Tensor] = {}

    def finish(self, ctx: Context) -> None:
        self.last[ctx.client] = ctx.vector.data.clone()


@pytest.mark.parametrize("others", [(), (FedBN(),)], ids=["alone", "with fedbn"])
def test_after_local_a_client_is_judged_on_what_it_trained_last_however_long_ago(others: tuple[Method, ...]) -> None:
    watch = Watch()
    here = study(PFedAvg(), *others, watch)
    found = run(here, Synchronous(2), rounds=5)
    turns = found.participations
    assert len(watch.last) > 2 and max(turns.values()) > 1
    layout, states = found.coordinator.layout, found.private
    host, tests = Host(here), here.data.partition.test
    hits = []
    for client in range(5):
        weights = watch.last.get(client)
        if weights is not None:
            assert np.array_equal(states[f"{client}/pfedavg.model"], weights[: layout.shared].numpy())
            host.vector.data.copy_(weights)
        else:
            host.vector.shared.copy_(found.coordinator.server.vector)
            if layout.personal:
                host.vector.personal.copy_(Host(here).vector.personal)
        host.trainer.training(False)
        inputs, labels = host.trainer.gather(tests.rows(client))
        with torch.no_grad():
            hits.append(float((host.vector.networks["model"](inputs).argmax(1) == labels).double().mean()))
    assert found.rows[-1]["accuracy"] == pytest.approx(np.mean(hits))


def test_the_shared_model_has_columns_of_its_own() -> None:
    found, plain = run(study(PFedAvg())), run(study())
    for row, reference in zip(found.rows, plain.rows, strict=True):
        assert row["accuracy_shared"] == reference["accuracy"]
        assert row["accuracy_global"] == reference["accuracy_global"]
    assert any(row["accuracy"] != row["accuracy_shared"] for row in found.rows)


def test_a_client_that_never_trained_is_judged_on_the_shared_model() -> None:
    host = Host(study(PFedAvg()))
    shared = host.vector.shared.clone()
    state = PFedAvg().state(host.layout, 10)
    PFedAvg().personalise(Own(0, host.vector, state, {}, host.trainer, False))
    assert torch.equal(host.vector.shared, shared)


def test_a_failed_first_participation_leaves_a_client_with_the_shared_model() -> None:
    class Failing(HookedMethod):
        name, paper = "failing", "a test"

        def receive(self, ctx: Context) -> None:
            if ctx.client == 0:
                raise RuntimeError

    found = run(study(PFedAvg(), Failing()), Synchronous(5), tolerate=0.5)
    assert len(found.failures) == 3 and found.rows[-1]["accuracy"] is not None


def test_one_client_after_local_is_local_training() -> None:
    data = population(1)
    found = run(study(PFedAvg(), data=data), Synchronous(1), rounds=4)
    local = run(study(LocalTraining(), data=data), Synchronous(1), rounds=4)
    mine, its = found.private["0/pfedavg.model"], local.state(0).personal
    # The server adds a difference where the client just goes on: the last bit may differ.
    np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
    assert [row["accuracy"] for row in found.rows] == [row["accuracy"] for row in local.rows]


# --- fine-tuning --------------------------------------------------------------------------------------------------


def test_each_mode_asks_for_its_fine_tuning() -> None:
    assert not overrides(PFedAvg(), "finetuning")
    assert PFedAvg("finetune", 3).finetuning() == Finetune(3)
    assert PFedAvg("finetune_last", 2, head_only=True).finetuning() == Finetune(2, head=True, last=True)


def test_fine_tuned_models_are_scored_in_every_evaluation_or_after_the_last_round_only() -> None:
    always, last = (run(study(PFedAvg(mode))).rows for mode in ("finetune", "finetune_last"))
    assert ["accuracy_finetuned" in row for row in always] == [True, True, True]
    assert ["accuracy_finetuned" in row for row in last] == [False, False, True]
    assert last[-1]["accuracy_finetuned"] == always[-1]["accuracy_finetuned"]


@pytest.mark.parametrize("head", [False, True], ids=["all", "head only"])
def test_fine_tuning_is_that_of_the_evaluation(head: bool) -> None:
    asked = Evaluation(finetune=Finetune(2, head=head))
    by_method = run(study(PFedAvg("finetune", 2, head_only=head))).rows
    by_setting = run(study(), evaluate=asked).rows
    assert [row["accuracy_finetuned"] for row in by_method] == [row["accuracy_finetuned"] for row in by_setting]
    assert any(row["accuracy_finetuned"] != row["accuracy"] for row in by_method)


def test_fine_tuning_improves_on_clients_of_few_classes() -> None:
    rows = run(study(PFedAvg("finetune", 20), local=replace(LOCAL, lr=0.02)), rounds=1).rows
    assert rows[0]["accuracy_finetuned"] > rows[0]["accuracy"]  # type: ignore[operator]


def test_no_epoch_of_fine_tuning_leaves_the_shared_model_for_everybody() -> None:
    rows, plain = run(study(PFedAvg("finetune", 0))).rows, run(study()).rows
    assert not any("accuracy_finetuned" in row for row in rows)
    assert [row["accuracy"] for row in rows] == [row["accuracy"] for row in plain]


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_leaves_the_shared_model_its_statistics_and_training_as_they_were(mode: str) -> None:
    here = study(MODES[mode], model=NORMED)

    def trained(look: bool) -> tuple[torch.Tensor, torch.Tensor, Published]:
        host = Host(here)
        vector, counters = host.vector.shared.clone().numpy(), host.vector.counters.clone().numpy()
        published, state = Published(0, vector, counters), private(MODES[mode].state(host.layout, 10))
        if look:
            for client in range(3):
                rows = here.data.partition.test.rows(client)
                host.evaluate([Task(client, rows, finetune=MODES[mode].finetuning())], published)
        ctx = host.trainer.train(
            Job(0, 0, 0, 0, -1, 1.0), torch.from_numpy(vector), torch.from_numpy(counters), {}, state
        )
        return ctx.vector.data.clone(), ctx.vector.counters.clone(), published

    looked, blind = trained(True), trained(False)
    assert torch.equal(looked[0], blind[0]) and torch.equal(looked[1], blind[1])
    assert np.array_equal(looked[2].vector, blind[2].vector)
    assert np.array_equal(looked[2].counters, blind[2].counters)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "tuned"}, r"method\.pfedavg\.mode='tuned' does not exist: use one of 'after_local'"),
        ({"mode": "finetune", "adapt_epochs": -1}, r"method\.pfedavg\.adapt_epochs=-1 must be at least 0"),
        ({"head_only": True}, r"head_only=true means nothing with mode=after_local"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PFedAvg(**settings)


def test_it_combines_with_what_yields_a_shared_model() -> None:
    check_composition([PFedAvg("finetune"), FedProx(), FedBN()])
