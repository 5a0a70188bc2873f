"""FedBN: which entries stay, what that saves, what they decide, and statistics for clients that never trained."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BLOCKS,
    BUFFER,
    NORMED,
    NORMED_MLP,
    ROUNDS,
    SEED,
    Spy,
    coordinate,
    ran,
    run,
    run_spec,
    same,
    setup,
    tiny,
)
from torch import Tensor, nn

from raysim.api.context import Context, Own
from raysim.api.hooked_method import HookedMethod
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.fedbn import SCOPES, FedBN, reestimate_statistics
from raysim.methods.local import LocalTraining
from raysim.models import ModelRecipe
from raysim.models.classifier import Shape
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.host import Host
from raysim.training.run_spec import build_networks
from raysim.training.trainer import load


def population(clients: int = 5) -> FederatedData:
    """Clients with test rows of their own."""
    return federate(Synthetic(samples=150, test_samples=20, classes=5), IID(clients=clients, test_fraction=0.2), SEED)


def study(*methods: Method, **others: Any) -> Any:
    return run_spec(*methods, **({"model": NORMED_MLP, "data": population()} | others))


def stays(method: FedBN, model: nn.Module) -> list[str]:
    """Paths of the personal entries."""
    return [name.removeprefix("model.") for name in method.personal({"model": model})]


# --- which entries stay -------------------------------------------------------------------------------------------


class Trap(nn.Module):
    """Names and types that do not go together."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(3)
        self.bn1_projection = nn.Linear(3, 3, bias=False)
        self.downsample = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.synced = nn.SyncBatchNorm(3)
        self.group, self.layer = nn.GroupNorm(3, 3), nn.LayerNorm(3)


@pytest.mark.parametrize("scope", SCOPES)
def test_batchnorm_is_known_by_its_type_and_the_scope_says_what_of_it_stays(scope: Any) -> None:
    wanted = {f"{layer}.{entry}" for layer in ("bn1", "downsample.1", "synced") for entry in SCOPES[scope]}
    assert set(stays(FedBN(scope), Trap())) == wanted


def test_layers_all_keeps_every_normalisation_layer() -> None:
    more = set(stays(FedBN(layers="all"), Trap())) - set(stays(FedBN(), Trap()))
    assert more == {f"{layer}.{entry}" for layer in ("group", "layer") for entry in ("weight", "bias")}


def test_the_name_rule_is_that_of_the_released_code() -> None:
    model = Trap()
    assert stays(FedBN(name_rule="bn"), model) == [key for key in _in_order(model) if "bn" in key]
    assert "bn1_projection.weight" in stays(FedBN(name_rule="bn"), model)
    assert set(stays(FedBN("statistics", name_rule="bn"), model)) == {f"bn1.{entry}" for entry in SCOPES["statistics"]}


def _in_order(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


def test_where_names_and_types_agree_both_rules_train_alike() -> None:
    runs = [run(run_spec(FedBN(name_rule=rule), model=Named()), rounds=3) for rule in (None, "bn")]
    assert runs[0].bits == runs[1].bits
    assert runs[0].coordinator.layout == runs[1].coordinator.layout and runs[0].coordinator.layout.personal > 0


@dataclass(frozen=True)
class Named(ModelRecipe):
    """A network whose one BatchNorm is called bn."""

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        """See `ModelRecipe`."""
        inputs = int(np.prod(input_shape))
        parts = OrderedDict(flat=nn.Flatten(), fc=nn.Linear(inputs, 8), bn=nn.BatchNorm1d(8), relu=nn.ReLU())
        return nn.Sequential(parts), 8


# --- what travels -------------------------------------------------------------------------------------------------

CHANNELS = {"mlp": (NORMED_MLP, 12), "cnn": (NORMED, 16 + 32), "blocks": (BLOCKS, 3 + 3)}


@pytest.mark.parametrize("name", CHANNELS)
def test_every_channel_saves_four_floats_in_each_direction(name: str) -> None:
    model, channels = CHANNELS[name]
    fedbn, fedavg = (run(run_spec(*methods, model=model), fleet=Ideal()) for methods in ((FedBN(),), ()))
    jobs = sum(row["clients"] for row in fedbn.rows)  # type: ignore[misc]
    for key in ("floats_down", "floats_up"):
        saved = fedavg.rows[-1][key] - fedbn.rows[-1][key]  # type: ignore[operator]
        assert 4 * saved == 4 * (4 * channels) * jobs > 0, "bytes"
    layout = fedbn.coordinator.layout
    layers = len([entry for entry in layout.entries if entry.path.endswith("running_mean")])
    assert layout.total_counters - layout.shared_counters == layers, "and each layer an integer"


SHARES = {"all": 0, "statistics": 2, "affine": 2, "none": 4}


@pytest.mark.parametrize("scope", SCOPES)
def test_each_scope_shares_its_floats_and_counters_where_the_statistics_travel(scope: Any) -> None:
    _, layout = build_networks(run_spec(FedBN(scope), model=NORMED))
    _, whole = build_networks(run_spec(model=NORMED))
    assert layout.shared == whole.shared - 48 * (4 - SHARES[scope])
    assert layout.shared_counters == (2 if scope in ("affine", "none") else 0)


@pytest.mark.parametrize("scope", ["affine", "none"])
def test_shared_counters_take_the_maximum_over_the_clients(scope: Any) -> None:
    here = study(FedBN(scope), data=tiny())
    spy = Spy(here)
    found = ran(coordinate(here, ROUNDS, runtime=spy, rounds=1))
    counted = [update.counters for update in spy.updates]
    assert len({own.tolist()[0] for own in counted}) > 1, "clients of unequal sizes"
    assert np.array_equal(found.coordinator.server.counters.numpy(), np.max(counted, axis=0))


class Starts(HookedMethod):
    """Keeps the vector with which every participation starts."""

    name = "starts"
    paper = "a test"

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], dict[str, Tensor]] = {}

    def receive(self, ctx: Context) -> None:
        named = ctx.vector.named(ctx.vector.data, ctx.vector.counters)
        self.seen[ctx.version, ctx.client] = {name: tensor.clone() for name, tensor in named.items()}


@pytest.mark.parametrize("scope", SCOPES)
def test_right_after_a_broadcast_clients_differ_in_what_stays_and_in_nothing_else(scope: Any) -> None:
    starts = Starts()
    layout = run(study(FedBN(scope), starts), Synchronous(5), rounds=3).coordinator.layout
    personal = {entry.name for entry in (*layout.entries, *layout.counters) if entry.personal}
    first, second = starts.seen[2, 0], starts.seen[2, 1]
    differing = {name for name in first if not torch.equal(first[name], second[name])}
    # Clients of equal sizes count as many batches.
    assert differing == {name for name in personal if not name.endswith("num_batches_tracked")}


# --- references ---------------------------------------------------------------------------------------------------


def test_one_client_is_local_training() -> None:
    data = population(1)
    found, local = (
        run(study(method, data=data, model=NORMED), Synchronous(1), rounds=4) for method in (FedBN(), LocalTraining())
    )
    layout, whole = found.coordinator.layout, local.coordinator.layout
    mine, its = (ran_.state(0).personal for ran_ in (found, local))
    vector = np.concatenate([found.coordinator.server.vector.numpy(), mine])
    places = {entry.name: entry for entry in whole.entries}
    for entry in layout.entries:
        there = places[entry.name]
        # The server adds a difference where the client just goes on: the last bit may differ.
        np.testing.assert_allclose(
            vector[entry.start : entry.stop], its[there.start : there.stop], rtol=1e-4, atol=1e-5, err_msg=entry.name
        )
    assert [row["accuracy"] for row in found.rows] == [row["accuracy"] for row in local.rows]


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
@pytest.mark.parametrize(("scope", "differs"), [("all", True), ("affine", True), ("statistics", False)])
def test_what_is_trained_changes_with_affine_parameters_that_stay_but_not_with_statistics(
    scope: Any, differs: bool, schedule: Any
) -> None:
    # Training normalises with batches: the running statistics matter to scores alone.
    found, fedavg = (run(study(*methods), schedule, fleet=Ideal(), rounds=4) for methods in ((FedBN(scope),), ()))
    trained = {name: tensor for name, tensor in found.tensors.items() if name.endswith(("weight", "bias"))}
    assert len(trained) == (6 if scope == "statistics" else 4)
    assert same(trained, {name: fedavg.tensors[name] for name in trained}) != differs


def test_swapping_two_clients_normalisation_swaps_their_predictions_and_no_shared_parameter() -> None:
    found = run(study(FedBN()), Synchronous(5), rounds=6)
    states, server, vector = (
        dict(found.coordinator.private.accepted()),
        found.coordinator.server,
        found.coordinator.initial,
    )
    trainer = Host(study(FedBN())).trainer
    rows = found.coordinator.spec.data.central
    inputs, _ = trainer.gather(rows)

    def logits(normalisation: int) -> Tensor:
        load(vector, server.vector, server.counters, states[normalisation].each(torch.from_numpy))
        assert torch.equal(vector.shared, server.vector)
        with torch.no_grad():
            return vector.networks["model"].eval()(inputs)  # type: ignore[no-any-return]

    before = {client: logits(client) for client in (0, 1)}
    states[0], states[1] = states[1], states[0]
    assert torch.equal(logits(0), before[1]) and torch.equal(logits(1), before[0])
    assert not torch.equal(before[0], before[1])


# --- clients that never trained -----------------------------------------------------------------------------------


def scored(trained: bool, method: FedBN, model: ModelRecipe = NORMED_MLP) -> tuple[Host, Mapping[str, Tensor]]:
    """A host after client 0 was looked at, and the tensors that it had before."""
    host = Host(study(method, model=model))
    host.trainer.training(False)
    before = {k: v.clone() for k, v in host.vector.named(host.vector.data, host.vector.counters).items()}
    with torch.no_grad():
        method.personalise(Own(0, host.vector, {}, {}, host.trainer, trained))
    return host, before


@pytest.mark.parametrize("scope", ["all", "statistics"])
def test_statistics_of_a_client_that_never_trained_are_those_of_its_samples(scope: Any) -> None:
    host, before = scored(False, FedBN(scope, reestimate=True))
    model: Any = host.vector.networks["model"]
    inputs = torch.cat([inputs for inputs, _ in host.trainer.own(0)])
    with torch.no_grad():
        inner = model.extractor[1](model.extractor[0](inputs))
    norm = model.extractor[2]
    assert torch.allclose(norm.running_mean, inner.mean(0), atol=1e-5)
    assert torch.allclose(norm.running_var, inner.var(0), rtol=1e-4)
    after = host.vector.named(host.vector.data, host.vector.counters)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {f"model.extractor.2.{entry}" for entry in SCOPES["statistics"]}


def test_a_pass_in_several_batches_weighs_them_by_their_sizes_and_restores_modes_and_momenta() -> None:
    norm = nn.BatchNorm1d(3, momentum=0.07)
    drop = nn.Dropout(0.5)
    model = nn.Sequential(drop, norm).eval()
    x = torch.randn(31, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    batches = [(part, part) for part in x.split([20, 10, 1])]
    reestimate_statistics(model=model, layers=[norm], batches=batches)
    assert torch.allclose(norm.running_mean, x[:30].mean(0), atol=1e-6), "a single sample has no variance"
    assert torch.allclose(norm.running_var, (20 * x[:20].var(0) + 10 * x[20:30].var(0)) / 30, rtol=1e-5)
    assert norm.momentum == 0.07 and not norm.training and not drop.training
    assert torch.equal(state, torch.get_rng_state()), "dropout stays in eval mode"


def test_modes_and_momenta_are_restored_after_an_error() -> None:
    norm = nn.BatchNorm1d(3).eval()
    with pytest.raises(ValueError, match="expected 2D"):
        reestimate_statistics(model=norm, layers=[norm], batches=[(torch.ones(2, 3, 4, 5), torch.ones(2))])
    assert norm.momentum == 0.1 and not norm.training


def test_clients_that_trained_keep_what_they_have() -> None:
    host, before = scored(True, FedBN(reestimate=True))
    after = host.vector.named(host.vector.data, host.vector.counters)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_reestimated_statistics_are_scored_and_leave_training_alone() -> None:
    with_, without = (run(study(FedBN(reestimate=asked)), Synchronous(1), rounds=3) for asked in (True, False))
    assert with_.bits == without.bits
    assert [row["accuracy"] for row in with_.rows] != [row["accuracy"] for row in without.rows]


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "stats"}, r"method\.fedbn\.scope='stats' does not exist: .* did you mean 'statistics'"),
        ({"name_rule": ""}, r"method\.fedbn\.name_rule is empty"),
        ({"name_rule": "bn", "layers": "all"}, r"name_rule=bn takes the place of layers=all"),
        ({"reestimate": True, "scope": "affine"}, r"reestimate=true needs statistics .* scope=affine"),
        ({"reestimate": True, "scope": "none"}, r"reestimate=true needs statistics .* scope=none"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedBN(**settings)


def test_a_model_without_such_layers_is_warned_of() -> None:
    here = run_spec()
    networks, _ = build_networks(here)
    (warning,) = FedBN().check(setup(here.task, here.settings.local, networks))
    assert "finds no BatchNorm in the model and runs as FedAvg" in warning
    (warning,) = FedBN(name_rule="bn").check(setup(here.task, here.settings.local, networks))
    assert "finds no 'bn' in the names of the model" in warning
    assert not FedBN("none").check(setup(here.task, here.settings.local, networks))
    normed = {"model": build_networks(run_spec(model=NORMED))[0]["model"]}
    assert not FedBN().check(setup(here.task, here.settings.local, normed))
