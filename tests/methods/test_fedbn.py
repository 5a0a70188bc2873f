"""Test which tensors stay on clients with FedBN, and how much is sent.

Also test the BatchNorm statistics of clients that have never trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BLOCKS,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    SEED,
    Spy,
    coordinate,
    declare_methods,
    run,
    run_spec,
    run_to_end,
    tiny_data,
)
from torch import Tensor, nn

from raysim.api.local_job import LocalJob, PersonalModel
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.fedbn import SCOPES, FedBN, reestimate_statistics
from raysim.models import ModelRecipe
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import build_networks, declare_run
from raysim.training.worker import Worker
from raysim.vectors.layout import plan_layout


def population(clients: int = 5) -> FederatedData:
    """Return the data of some clients, each with its own test samples."""
    source = Synthetic(samples=150, test_samples=20, classes=5)
    return federate(source, IID(clients=clients, test_fraction=0.2), SEED)


def study(*methods: Method, **others: Any) -> Any:
    return run_spec(*methods, **({"model": NORMED_MLP, "data": population()} | others))


def private_names(method: FedBN, model: nn.Module) -> list[str]:
    """Return the names of the model's tensors that stay on a client, such as "bn1.weight".

    The names have no prefix "model.".
    """
    networks = {"model": model}
    (declared,) = declare_methods([method], networks, plan_layout(networks)).methods
    names: list[str] = []
    for function in declared.late_private_parameters:
        names += function(networks)
    return [name.removeprefix("model.") for name in names]


# --- which tensors stay -----------------------------------------------------------------------


class Trap(nn.Module):
    """A model in which a layer's name does not tell its type: bn1_projection is no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(3)
        self.bn1_projection = nn.Linear(3, 3, bias=False)
        self.downsample = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.synced = nn.SyncBatchNorm(3)
        self.group, self.layer = nn.GroupNorm(3, 3), nn.LayerNorm(3)


@pytest.mark.parametrize("scope", SCOPES)
def test_batchnorm_is_recognised_by_its_type(scope: Any) -> None:
    layers = ("bn1", "downsample.1", "synced")
    wanted = {f"{layer}.{entry}" for layer in layers for entry in SCOPES[scope]}
    assert set(private_names(FedBN(scope), Trap())) == wanted


def test_fedbn_makes_every_normalisation_layer_personal_if_setting_layers_is_all() -> None:
    batch, every = FedBN(), FedBN(layers="all")
    more = set(private_names(every, Trap())) - set(private_names(batch, Trap()))
    wanted = {f"{layer}.{entry}" for layer in ("group", "layer") for entry in SCOPES["affine"]}
    assert more == wanted


def test_fedbn_makes_tensors_personal_if_their_names_contain_the_given_text() -> None:
    model, method = Trap(), FedBN(name_rule="bn")
    in_order = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert private_names(method, model) == [name for name in in_order if "bn" in name]
    assert "bn1_projection.weight" in private_names(method, model)
    statistics = private_names(FedBN("statistics", name_rule="bn"), model)
    assert set(statistics) == {f"bn1.{entry}" for entry in SCOPES["statistics"]}


# --- what travels -----------------------------------------------------------------------------

CHANNELS = {"mlp": (NORMED_MLP, 12), "cnn": (NORMED, 16 + 32), "blocks": (BLOCKS, 3 + 3)}


@pytest.mark.parametrize("name", CHANNELS)
def test_fedbn_sends_four_floats_fewer_than_fedavg_per_batchnorm_channel(name: str) -> None:
    model, channels = CHANNELS[name]
    fedbn = run(run_spec(FedBN(), model=model), fleet=Ideal())
    fedavg = run(run_spec(model=model), fleet=Ideal())
    jobs = sum(row["clients"] for row in fedbn.rows)  # type: ignore[misc]
    for key in ("floats_down", "floats_up"):
        saved = fedavg.rows[-1][key] - fedbn.rows[-1][key]  # type: ignore[operator]
        assert saved == 4 * channels * jobs > 0
    layout = fedbn.coordinator.layout
    layers = [entry for entry in layout.entries if entry.path.endswith("running_mean")]
    assert layout.total_counters - layout.shared_counters == len(layers)


SHARES = {"all": 0, "statistics": 2, "affine": 2, "none": 4}


@pytest.mark.parametrize("scope", SCOPES)
def test_fedbn_scope_decides_how_many_batchnorm_floats_are_shared(scope: Any) -> None:
    _, layout = build_networks(run_spec(FedBN(scope), model=NORMED))
    _, whole = build_networks(run_spec(model=NORMED))
    assert layout.shared == whole.shared - 48 * (4 - SHARES[scope])
    assert layout.shared_counters == (2 if scope in ("affine", "none") else 0)


@pytest.mark.parametrize("scope", ["affine", "none"])
def test_fedbn_server_keeps_the_largest_counter_num_batches_tracked_of_all_clients(
    scope: Any,
) -> None:
    here = study(FedBN(scope), data=tiny_data())
    spy = Spy(here)
    finished = run_to_end(coordinate(here, ROUNDS, runtime=spy, rounds=1))
    counters = [update.counters for update in spy.updates]
    assert len({values.tolist()[0] for values in counters}) > 1, "clients of unequal sizes"
    assert np.array_equal(finished.coordinator.server.counters.numpy(), np.max(counters, axis=0))


class Starts(Method):
    """A method that stores the tensors that each job starts with."""

    name = "starts"
    paper = "a test"

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], dict[str, Tensor]] = {}

    def begin(self, job: LocalJob) -> None:
        named = job.vector.named(job.params, job.vector.counters)
        tensors = {name: tensor.clone() for name, tensor in named.items()}
        self.seen[job.version, job.client] = tensors


@pytest.mark.parametrize("scope", SCOPES)
def test_fedbn_models_of_two_clients_differ_only_in_personal_tensors(scope: Any) -> None:
    starts = Starts()
    finished = run(study(FedBN(scope), starts), Synchronous(5), rounds=3)
    layout = finished.coordinator.layout
    private = {entry.name for entry in (*layout.entries, *layout.counters) if entry.personal}
    first, second = starts.seen[2, 0], starts.seen[2, 1]
    differing = {name for name in first if not torch.equal(first[name], second[name])}
    # Clients of equal sizes count as many batches.
    assert differing == {name for name in private if not name.endswith("num_batches_tracked")}


# --- clients that never trained ---------------------------------------------------------------


def personalised(
    trained: bool, method: FedBN, model: ModelRecipe = NORMED_MLP
) -> tuple[Worker, Mapping[str, Tensor]]:
    """Let FedBN's hook `personalise` change the model of a new worker for client 0.

    Return two things: the worker, and copies of the unchanged model's tensors, by name.
    trained: True if the client has trained before.
    """
    worker = Worker(study(method, model=model))
    worker.trainer.set_training(False)
    tensors = worker.vector.named(worker.vector.data, worker.vector.counters)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    client = PersonalModel(
        0,
        worker.trainer.task,
        worker.vector,
        {},
        {},
        lambda: worker.trainer.client_samples(0),
        trained,
        "fedbn",
    )
    with torch.no_grad():
        method.personalise(client)
    return worker, before


@pytest.mark.parametrize("scope", ["all", "statistics"])
def test_fedbn_computes_batchnorm_statistics_for_an_untrained_client(scope: Any) -> None:
    worker, before = personalised(False, FedBN(scope, reestimate=True))
    model: Any = worker.vector.networks["model"]
    inputs = torch.cat([inputs for inputs, _ in worker.trainer.client_samples(0)])
    with torch.no_grad():
        inner = model.extractor[1](model.extractor[0](inputs))
    norm = model.extractor[2]
    assert torch.allclose(norm.running_mean, inner.mean(0), atol=1e-5)
    assert torch.allclose(norm.running_var, inner.var(0), rtol=1e-4)
    after = worker.vector.named(worker.vector.data, worker.vector.counters)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {f"model.extractor.2.{entry}" for entry in SCOPES["statistics"]}


def test_fedbn_recomputes_statistics_with_each_batch_weighted_by_its_size() -> None:
    norm = nn.BatchNorm1d(3, momentum=0.07)
    drop = nn.Dropout(0.5)
    model = nn.Sequential(drop, norm).eval()
    x = torch.randn(31, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    batches = [(part, part) for part in x.split([20, 10, 1])]
    reestimate_statistics(model=model, layers=[norm], batches=batches)
    assert torch.allclose(norm.running_mean, x[:30].mean(0), atol=1e-6), "one sample: no variance"
    variance = (20 * x[:20].var(0) + 10 * x[20:30].var(0)) / 30
    assert torch.allclose(norm.running_var, variance, rtol=1e-5)
    assert norm.momentum == 0.07 and not norm.training and not drop.training
    assert torch.equal(state, torch.get_rng_state()), "dropout stays in eval mode"


def test_fedbn_restores_batchnorm_mode_and_momentum_if_statistics_cannot_be_computed() -> None:
    norm = nn.BatchNorm1d(3).eval()
    batches = [(torch.ones(2, 3, 4, 5), torch.ones(2))]
    with pytest.raises(ValueError, match="expected 2D"):
        reestimate_statistics(model=norm, layers=[norm], batches=batches)
    assert norm.momentum == 0.1 and not norm.training


def test_fedbn_does_not_recompute_statistics_of_a_trained_client() -> None:
    worker, before = personalised(True, FedBN(reestimate=True))
    after = worker.vector.named(worker.vector.data, worker.vector.counters)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_setting_reestimate_of_fedbn_changes_scores_but_not_training() -> None:
    with_pass = run(study(FedBN(reestimate=True)), Synchronous(1), rounds=3)
    without = run(study(FedBN()), Synchronous(1), rounds=3)
    assert with_pass.bits == without.bits
    scores = [[row["accuracy"] for row in finished.rows] for finished in (with_pass, without)]
    assert scores[0] != scores[1]


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"scope": "stats"}, "scope"),
        ({"name_rule": ""}, "name_rule"),
        ({"name_rule": "bn", "layers": "all"}, "name_rule"),
        ({"reestimate": True, "scope": "affine"}, "reestimate"),
        ({"reestimate": True, "scope": "none"}, "reestimate"),
    ],
)
def test_fedbn_settings_without_effect_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"^method\.fedbn\.{key}\b"):
        FedBN(**settings)


def test_fedbn_warns_of_model_without_normalisation() -> None:
    def warnings(method: FedBN, **others: Any) -> list[str]:
        return list(declare_run(run_spec(method, **others)).warnings)

    (warning,) = warnings(FedBN())
    assert "BatchNorm" in warning
    (warning,) = warnings(FedBN(name_rule="bn"))
    assert "method.fedbn.name_rule" in warning
    assert warnings(FedBN("none")) == [] == warnings(FedBN(), model=NORMED)
