"""Test PartialFed's start models, its policy, which model is scored, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    LOCAL,
    MLP,
    NORMED,
    NORMED_MLP,
    SEED,
    Spy,
    coordinate,
    participation_facts,
    run,
    run_spec,
    run_to_end,
    same_arrays,
)
from torch import Tensor
from torch.func import functional_call

from raysim.api.context import Context
from raysim.api.local_job import LocalJob, PersonalModel
from raysim.api.messages import Job
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.api.state_values import pack
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods import partialfed
from raysim.methods.dann import Dann
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedprox import FedProx
from raysim.methods.partialfed import PartialFed, model_layers
from raysim.models import ModelRecipe
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.client_vector import copy_client_state
from raysim.training.run_spec import build_networks, declare_run
from raysim.training.worker import Worker

ALL_CLIENTS = Synchronous(6)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def population(clients: int = 4) -> FederatedData:
    """Return the data of some clients, each with its own test samples."""
    return federate(
        Synthetic(samples=120, test_samples=20, classes=5),
        IID(clients=clients, test_fraction=0.2),
        SEED,
    )


class Watch(Method):
    """A method, after PartialFed in the list, that stores parameters at each job's start and end.

    started: for each job, the number of the client's earlier jobs, the shared parameters,
    `LocalJob.start`, and BatchNorm's counters.
    ended: the trained parameters, by client and number of earlier jobs.
    """

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.started: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.ended: dict[tuple[int, int], Tensor] = {}

    def setup(self, run: Setup) -> None:
        run.read_updates()

    def begin(self, job: LocalJob) -> None:
        counters = job.vector.counters.clone()
        start = job.vector.shared.clone()
        self.started.append((job.participation, start, job.start.clone(), counters))

    def end(self, job: LocalJob) -> None:
        self.ended[job.client, job.participation] = job.params.clone()


class Client:
    """Client 0 on a worker. Its jobs can start from any parameters.

    methods: the methods of the run.
    """

    def __init__(
        self, *methods: Method, model: ModelRecipe = NORMED_MLP, local: Any = LOCAL
    ) -> None:
        self.worker = Worker(run_spec(*methods, model=model, local=local))
        self.initial = self.worker.vector.shared.clone()
        self.counters = self.worker.vector.counters.clone()
        self.personal, self.state = copy_client_state(self.worker.vector, {}), dict[str, Tensor]()
        for declared in self.worker.trainer.declarations.methods:
            self.state |= pack(declared.client_states(1))
        self.turn = 0

    def train(
        self,
        base: Tensor | None = None,
        counters: Tensor | None = None,
        version: int | None = None,
    ) -> Context:
        """Train the client's next job.

        base: the received parameters [d]; None for the initial ones.
        counters: the received counters of BatchNorm; None for the initial ones.
        version: the job's base version; None for the number of earlier jobs.
        """
        version = self.turn if version is None else version
        job = Job(self.turn, 0, self.turn, version, self.turn - 1, 1.0)
        base = self.initial if base is None else base
        counters = self.counters if counters is None else counters
        state = replace(self.personal, methods=self.state)
        ctx = self.worker.trainer.train(job, base, counters, {}, state)
        self.personal, self.state = copy_client_state(self.worker.vector, {}), pack(ctx.state)
        self.turn += 1
        return ctx

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return {e.path: flat[e.start : e.stop] for e in self.worker.layout.entries}


def other(vector: Tensor) -> Tensor:
    """Return a vector that differs from a given one in all entries.

    No entry is negative, because some of them are variances of BatchNorm.
    """
    return vector + 0.1 + vector.abs()


# --- the functions ----------------------------------------------------------------------------


def test_partialfed_refuses_more_layers_than_the_model_has() -> None:
    with pytest.raises(ValueError, match=r"^method\.partialfed\.num_loaded=6: "):
        partialfed.fixed_loading_mask(num_layers=5, strategy="bottom_up", num_loaded=6)


# --- where training starts --------------------------------------------------------------------

# NORMED_MLP's layers, and which each strategy loads.
LAYERS = ["extractor.1", "extractor.2", "head"]
LOADED: dict[str, tuple[PartialFed, set[str]]] = {
    "bottom_up": (PartialFed("bottom_up", 1), {"extractor.1"}),
    "top_down": (PartialFed("top_down", 2), {"extractor.2", "head"}),
    "no_bn": (PartialFed("no_bn"), {"extractor.1", "head"}),
    "no_classifier": (PartialFed("no_classifier"), {"extractor.1", "extractor.2"}),
    "no_bn_no_classifier": (PartialFed(), {"extractor.1"}),
    "all": (PartialFed("all"), set(LAYERS)),
    "none": (PartialFed("none"), set()),
}


def test_partialfed_layers_exclude_networks_that_other_methods_add() -> None:
    networks, layout = build_networks(run_spec(model=NORMED_MLP))
    assert model_layers(layout, networks["model"]) == LAYERS
    networks, layout = build_networks(run_spec(FedBN(), Dann(0.5, width=4), model=NORMED_MLP))
    assert model_layers(layout, networks["model"]) == LAYERS, (
        "what stays on the client counts, other networks do not"
    )


@pytest.mark.parametrize("name", LOADED)
def test_partialfed_job_takes_loaded_layers_from_the_server_and_keeps_the_others(
    name: str,
) -> None:
    method, loaded = LOADED[name]
    watch = Watch()
    client = Client(method, watch)
    trained = client.train().vector.shared.clone()
    counted = client.worker.vector.counters.clone()
    received, counters = other(client.initial), torch.full_like(client.counters, 99)
    ctx = client.train(received, counters)
    _, start, base, counting = watch.started[1]
    assert torch.equal(start, base), "what corrections refer to is the start"
    ended, new, old = (client.named(flat) for flat in (start, received, trained))
    for path, values in ended.items():
        wanted = new if path.rpartition(".")[0] in loaded else old
        assert torch.equal(values, wanted[path]) and not torch.equal(new[path], old[path]), path
    assert torch.equal(counting, counters if "extractor.2" in loaded else counted)
    assert ctx.report["partialfed.loaded"] == pytest.approx(len(loaded) / 3)


def test_partialfed_loads_all_layers_in_the_first_job_of_a_client() -> None:
    watch = Watch()
    client = Client(PartialFed("none"), watch)
    received = other(client.initial)
    ctx = client.train(received)
    assert torch.equal(watch.started[0][1], received) and ctx.report["partialfed.loaded"] == 1.0


@pytest.mark.parametrize(("most", "loads"), [(None, False), (3, False), (2, True)])
def test_partialfed_loads_all_layers_after_an_absence_above_max_staleness(
    most: int | None, loads: bool
) -> None:
    watch = Watch()
    client = Client(PartialFed("none", max_staleness=most), watch)
    client.train(version=4)
    received = other(client.initial)
    client.train(received, version=7)
    assert torch.equal(watch.started[1][1], received) == loads


def test_partialfed_uses_received_values_for_networks_added_by_other_methods() -> None:
    watch = Watch()
    client = Client(PartialFed("none"), Dann(0.5, width=4), watch)
    client.train()
    received = other(client.initial)
    client.train(received)
    for entry in client.worker.layout.entries:
        there = slice(entry.start, entry.stop)
        assert torch.equal(watch.started[1][1][there], received[there]) == (
            entry.network != "model"
        )


def test_partialfed_update_is_the_trained_model_minus_the_shared_model() -> None:
    watch = Watch()
    study = run_spec(PartialFed("none"), watch, model=NORMED_MLP)
    spy = Spy(study)
    run_to_end(coordinate(study, ALL_CLIENTS, runtime=spy, rounds=3))
    published = {job.number: vector.vector for job, vector in spy.sent}
    turns = {job.number: job.participation for job, _ in spy.sent}
    deltas = {update.job: update.delta for update in spy.updates if update.delta is not None}
    assert max(turns[job] for job in deltas) == 2
    clients = {job.number: job.client for job, _ in spy.sent}
    for job, delta in deltas.items():
        assert np.array_equal(delta, watch.ended[clients[job], turns[job]].numpy() - published[job])


def test_frozen_copy_and_fedbss_losses_use_the_model_that_partialfed_starts_from() -> None:
    seen: list[Tensor] = []

    class Look(Method):
        name, paper = "look", "a test"

        def begin(self, job: LocalJob) -> None:
            model = job.frozen()["model"]
            seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))

    client = Client(
        PartialFed("none"), FedBSS(0), Look(), model=MLP, local=replace(LOCAL, epochs=2)
    )
    trained = client.train().vector.shared.clone()
    client.state["fedbss.losses"] = torch.zeros(0)
    client.train(torch.zeros_like(client.initial))
    assert torch.equal(seen[1], trained)
    model, losses = client.worker.vector.networks["model"], client.state["fedbss.losses"]
    client.worker.vector.shared.copy_(trained)
    with torch.no_grad():
        own = [
            torch.nn.functional.cross_entropy(model(x), y, reduction="none")
            for x, y in client.worker.trainer.client_samples(0)
        ]
    assert torch.allclose(losses, torch.cat(own)), "FedBSS is listed behind PartialFed"


class FirstGradient(Method):
    """A method that stores the gradient of each job's first step.

    Earlier methods in the list have already changed this gradient.
    """

    name, paper = "first", "a test"

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def setup(self, run: Setup) -> None:
        run.corrects("mix")

    def gradient(self, job: LocalJob, grad: Tensor, at: slice) -> None:
        if job.step == 0:
            self.gradients.append(grad.clone())


def test_fedprox_term_is_zero_in_the_first_step_of_a_partialfed_job() -> None:
    with_term, without = FirstGradient(), FirstGradient()
    for methods in ((FedProx(10.0), with_term), (without,)):
        client = Client(PartialFed("none"), *methods, model=MLP)
        client.train()
        client.state["partialfed.model"] = client.initial
        client.train(torch.zeros_like(client.initial))
    assert (
        torch.equal(with_term.gradients[1], without.gradients[1]) and with_term.gradients[1].any()
    )


# --- what the settings make of it -------------------------------------------------------------


def test_partialfed_does_not_change_layers_that_fedbn_keeps_personal() -> None:
    alone = run(run_spec(FedBN(), model=NORMED_MLP), fleet=Ideal(), rounds=4)
    both = run(run_spec(FedBN(), PartialFed("all"), model=NORMED_MLP), fleet=Ideal(), rounds=4)
    assert same_arrays(alone.tensors, both.tensors)


# --- the learnt policy ------------------------------------------------------------------------


class Learning(PartialFed):
    """A PartialFed that checks whether its policy's training changes the model or random states."""

    def _learnt_mask(self, job: LocalJob, layers: Any) -> Tensor:
        before = self._tensors(job)
        torch.manual_seed(5)
        random_state = torch.get_rng_state()
        loads = super()._learnt_mask(job, layers)
        after = self._tensors(job)
        assert before.keys() == after.keys()
        self._kept = all(torch.equal(before[key], after[key]) for key in before)
        self._kept &= torch.equal(random_state, torch.get_rng_state())
        self._training = all(module.training for module in job.model.modules())
        return loads

    @staticmethod
    def _tensors(job: LocalJob) -> Mapping[str, Tensor]:
        state = job.model.state_dict()
        tensors = {name: tensor.clone() for name, tensor in state.items()}
        places = {f"at {key}": torch.tensor(value.data_ptr()) for key, value in state.items()}
        return tensors | places | {"data": job.params.clone(), "received": job.start.clone()}


@pytest.mark.parametrize("model", [NORMED_MLP, NORMED], ids=["mlp", "cnn"])
def test_partialfed_policy_training_changes_only_the_logits_of_the_policy(
    model: ModelRecipe,
) -> None:
    method = Learning("adaptive")
    client = Client(method, model=model)
    client.train()
    received, previous = client.initial + 0.01, client.state["partialfed.model"].clone()
    old = client.state["partialfed.logits"]
    ctx = client.train(received)
    assert method._kept and method._training
    new = ctx.state["partialfed.logits"]
    layers = len(model_layers(client.worker.layout, client.worker.vector.networks["model"]))
    assert old.shape == new.shape == (layers, 2) and not old.any()
    assert (new != 0).all(), "every layer has a gradient"
    assert int(ctx.state["partialfed.adam['steps']"]) == 10
    for buffer in ("first", "second"):
        assert ctx.state[f"partialfed.adam['{buffer}']"].shape == (2 * layers,)
    assert torch.equal(received, client.initial + 0.01) and not torch.equal(
        previous, ctx.state["partialfed.model"]
    )


def test_partialfed_policy_optimizer_continues_in_the_clients_next_job() -> None:
    client = Client(PartialFed("adaptive", policy_steps=3))
    for _ in range(3):
        client.train(client.initial)
    assert int(client.state["partialfed.adam['steps']"]) == 6


def test_partialfed_policy_is_unchanged_if_received_and_personal_model_are_equal() -> None:
    client = Client(PartialFed("adaptive"))
    client.train()
    ctx = client.train(client.state["partialfed.model"])
    assert not ctx.state["partialfed.logits"].any() and ctx.report["partialfed.loaded"] == 1.0


def test_partialfed_policy_learns_not_to_use_worse_shared_layers() -> None:
    client = Client(
        PartialFed("adaptive", policy_lr=0.1, policy_steps=40), local=replace(LOCAL, epochs=10)
    )
    client.train()
    spoilt = client.state["partialfed.model"].clone()
    for entry in client.worker.layout.entries:
        if entry.path.startswith("head"):
            spoilt[entry.start : entry.stop] *= -3
    ctx = client.train(spoilt)
    difference = ctx.state["partialfed.logits"][:, 0] - ctx.state["partialfed.logits"][:, 1]
    assert difference[2] < -1 and ctx.report["partialfed.loaded"] == pytest.approx(2 / 3)


def test_partialfed_can_draw_at_random_which_shared_layers_it_uses() -> None:
    client = Client(PartialFed("adaptive", policy_lr=1e-9, sample_decision=True))
    ended = {client.train(client.initial).report["partialfed.loaded"] for _ in range(12)}
    assert ended > {1.0}, "with logits of 0 noise decides"


def test_gradient_of_the_partialfed_policy_includes_batchnorm_statistics() -> None:
    client = Client(PartialFed("adaptive"))
    ctx = client.train()
    ctx.base = other(client.initial)
    job = LocalJob(ctx, "partialfed")
    model, paths = ctx.model.eval(), LAYERS
    inputs, _ = next(ctx.data())
    shares = torch.tensor([0.3, 0.6, 0.9])

    def relaxed(soft: Tensor) -> Tensor:
        relaxed_tensors = partialfed._relax(job, paths, soft)
        return functional_call(model, relaxed_tensors, (inputs,)).square().mean()

    mixed = ctx.state["partialfed.model"].clone()
    for entry in client.worker.layout.entries:
        u = float(shares[paths.index(entry.path.rpartition(".")[0])])
        there = slice(entry.start, entry.stop)
        mixed[there] = u * ctx.base[there] + (1 - u) * mixed[there]
    client.worker.vector.shared.copy_(mixed)
    assert torch.allclose(relaxed(shares), model(inputs).square().mean(), rtol=1e-5)
    # By the statistics alone.
    for entry in client.worker.layout.entries:
        if "running" not in entry.path:
            ctx.base[entry.start : entry.stop] = ctx.state["partialfed.model"][
                entry.start : entry.stop
            ]
    leaf = shares.clone().requires_grad_()
    (grad,) = torch.autograd.grad(relaxed(leaf), [leaf])
    step = torch.tensor([0.0, 1e-2, 0.0])
    slope = (relaxed(shares + step) - relaxed(shares - step)) / 2e-2
    assert (
        grad[1] == pytest.approx(slope.item(), rel=1e-2)
        and grad[1] != 0
        and grad[0] == 0 == grad[2]
    )


def test_partialfed_cost_includes_policy_steps_from_the_second_job_on() -> None:
    method = PartialFed("adaptive", policy_steps=3, policy_batch=20)
    assert method.cost(participation_facts(None, 50, 50)) == 0
    assert method.cost(participation_facts(None, 50, 50, 1)) == 60
    assert method.cost(participation_facts(None, 7, 7, 1)) == 21
    (declared,) = declare_run(run_spec(PartialFed())).methods
    assert not declared.has_hook("cost")


def test_partialfed_sends_all_layers() -> None:
    partial = run(run_spec(PartialFed("none"), model=NORMED_MLP)).rows[-1]
    fedavg = run(run_spec(model=NORMED_MLP)).rows[-1]
    assert all(partial[key] == fedavg[key] for key in ("floats_down", "floats_up"))


# --- which model is scored --------------------------------------------------------------------


def test_personal_model_of_partialfed_is_the_result_of_the_last_job_of_a_client() -> None:
    method = PartialFed("none")
    client = Client(method)
    vector, trainer = client.worker.vector, client.worker.trainer
    shared = other(client.initial)

    def own(state: Mapping[str, Tensor], trained: bool) -> tuple[Tensor, Tensor]:
        vector.shared.copy_(shared)
        vector.counters.fill_(7)
        data = functools.partial(trainer.client_samples, 0)
        client_model = PersonalModel(
            0, trainer.task, vector, state, {}, data, trained, "partialfed"
        )
        method.personalise(client_model)
        return vector.shared.clone(), vector.counters.clone()

    assert torch.equal(own(client.state, False)[0], shared)
    trained = client.train()
    weights, counters = trained.vector.shared.clone(), trained.vector.counters.clone()
    ended = own(client.state, True)
    assert torch.equal(ended[0], weights) and torch.equal(ended[1], counters)


def test_partialfed_run_is_scored_if_all_jobs_of_a_client_fail() -> None:
    class Failing(Method):
        name, paper = "failing", "a test"

        def end(self, job: LocalJob) -> None:
            if job.client == 0:
                raise RuntimeError

    study = run_spec(PartialFed(), Failing(), data=population())
    ended = run(study, Synchronous(4), tolerate=0.5)
    assert len(ended.failures) == 3 and ended.rows[-1]["accuracy"] is not None


def test_partialfed_history_has_scores_of_personal_and_shared_models() -> None:
    row = run(run_spec(PartialFed(), model=NORMED_MLP, data=population()), rounds=4).rows[-1]
    assert (
        row["accuracy"] is not None
        and row["accuracy_shared"] is not None
        and row["accuracy_global"] is not None
    )


# --- settings ---------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "bottom"}, "strategy"),
    ({"strategy": "bottom_up"}, "num_loaded"),
    ({"num_loaded": 2}, "num_loaded"),
    ({"strategy": "top_down", "num_loaded": -1}, "num_loaded"),
    ({"max_staleness": 0}, "max_staleness"),
    ({"policy_steps": 0}, "policy_steps"),
    ({"policy_batch": 0}, "policy_batch"),
    ({"policy_lr": -1.0}, "policy_lr"),
    ({"temperature": 0.0}, "temperature"),
    ({"decay": 1.5}, "decay"),
    ({"floor": 0.0}, "floor"),
    ({"sample_decision": True}, "sample_decision"),
]


@pytest.mark.parametrize(("settings", "key"), BAD)
def test_partialfed_refuses_settings_without_effect(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^method\.partialfed\.{key}\b"):
        PartialFed(**settings)


def test_partialfed_refuses_strategy_that_does_not_fit_model() -> None:
    def warnings(method: PartialFed) -> list[str]:
        return list(declare_run(run_spec(method, model=MLP)).warnings)

    with pytest.raises(ValueError, match=r"^method\.partialfed\.num_loaded\b"):
        warnings(PartialFed("bottom_up", 9))
    (warning,) = warnings(PartialFed("no_bn"))
    assert "method.partialfed.strategy=no_bn" in warning
    for method in (PartialFed(), PartialFed("all"), PartialFed("adaptive"), PartialFed("none")):
        assert not warnings(method)


def test_partialfed_uses_the_shared_layer_if_its_logit_is_larger() -> None:
    client = Client(PartialFed("adaptive", policy_lr=1e-9))
    client.train()
    spoilt = client.state["partialfed.model"].clone()
    for entry in client.worker.layout.entries:
        if entry.path.startswith("head"):
            spoilt[entry.start : entry.stop] *= -3
    ctx = client.train(spoilt)
    loads, keeps = ctx.state["partialfed.logits"].unbind(1)
    assert 0 < (keeps - loads).max() < 1e-7
    assert ctx.report["partialfed.loaded"] == pytest.approx(float((loads >= keeps).double().mean()))
