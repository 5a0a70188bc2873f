"""MOON's previous models: which client has how many, what they are, and that training leaves them alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from tiny_runs import MLP, NORMED, ROUNDS, private, run, run_spec, taking_part
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Outputs
from raysim.api.declarations import Local
from raysim.api.hooked_method import HookedMethod
from raysim.api.messages import Job
from raysim.methods import moon
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.models import ModelRecipe
from raysim.training.host import Host
from raysim.vectors.layout import Layout, Vector

PREVIOUS = "moon.previous"


class Watch(HookedMethod):
    """Keeps every job's context, what it started from, and what it ended with; the last method of a list."""

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.jobs: list[Context] = []
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []

    def receive(self, ctx: Context) -> None:
        self.jobs.append(ctx)
        self.before.append(ctx.state[PREVIOUS])

    def finish(self, ctx: Context) -> None:
        self.after.append(ctx.vector.data.clone())

    def of(self, client: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(turn, previous models at the start, vector at the end) of every participation of a client."""
        for ctx, before, after in zip(self.jobs, self.before, self.after, strict=True):
            if ctx.client == client:
                yield ctx.participation, before, after


def flat(networks: Any, layout: Layout) -> Tensor:
    """The networks' parameters and floating buffers in the order of the layout."""
    found = {f"{name}.{path}": value for name, net in networks.items() for path, value in net.state_dict().items()}
    return torch.cat([found[entry.name].flatten() for entry in layout.entries])


# --- which models a client has ------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("model", [MLP, NORMED], ids=["mlp", "cnn with BatchNorm"])
def test_the_previous_models_are_the_last_ones_that_the_client_itself_trained_to_the_bit(
    model: ModelRecipe, pool: int
) -> None:
    watch = Watch()
    found = run(run_spec(Moon(out=8, previous=pool), watch, model=model), ROUNDS, rounds=6)
    state = found.private
    turns = found.participations
    assert max(turns.values()) > 2 and len(set(turns.values())) > 1, "somebody sat out"
    for client, count in turns.items():
        trained: list[Tensor] = []
        for turn, before, after in watch.of(client):
            assert turn == len(trained)
            assert before.shape == (min(turn, pool), found.coordinator.layout.total)
            assert all(torch.equal(row, own) for row, own in zip(before, trained[-pool:], strict=True))
            trained.append(after)
        kept = torch.from_numpy(state[f"{client}/{PREVIOUS}"])
        assert len(trained) == count and torch.equal(kept, torch.stack(trained[-pool:]))


def test_without_an_earlier_participation_there_is_no_contrast() -> None:
    class Watched(Moon):
        seen: ClassVar[list[tuple[int, Tensor]]] = []

        def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
            self.seen.append((ctx.participation, super().term(ctx, out, batch)))
            return self.seen[-1][1]

    run(run_spec(Watched(out=8)), ROUNDS, rounds=4)
    assert {turn for turn, _ in Watched.seen} >= {0, 1, 2}
    for turn, term in Watched.seen:
        assert term.requires_grad == (turn > 0)
        assert (term.item() > 0) == (turn > 0)


def test_at_weight_zero_it_is_fedavg_on_the_network_with_the_projection() -> None:
    class Headed(HookedMethod):
        name, paper = "moon", "its network alone"

        def model(self, task: Any, model: nn.Module) -> nn.Module:
            return Moon(width=5, out=8).model(task, model)

    zero, fedavg, weighed = (run(run_spec(method)) for method in (Moon(0.0, width=5, out=8), Headed(), Moon(1, out=8)))
    assert zero.finished.model_sha256 == fedavg.finished.model_sha256 != weighed.finished.model_sha256
    assert zero.tensors["model.head.weight"].shape == (5, 8)
    assert not any(key.endswith(PREVIOUS) for key in zero.private)


# --- the contrast of one step -------------------------------------------------------------------------------------


def networks_of(ctx: Context, values: Tensor) -> Any:
    """Networks of their own with the values of a flat vector, in eval mode."""
    networks = {name: copy.deepcopy(network).eval() for name, network in ctx.networks.items()}
    vector = Vector(networks, ctx.vector.layout, torch.device("cpu"), torch.float32)
    vector.data[: len(values)].copy_(values)
    return networks["model"]


@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "mixup"])
@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("model", [MLP, NORMED], ids=["mlp", "cnn with BatchNorm"])
def test_the_term_contrasts_the_batch_under_the_received_and_all_previous_models_in_eval_mode(
    model: ModelRecipe, pool: int, mixed: bool
) -> None:
    counts = []

    class Watched(Moon):
        def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
            term = super().term(ctx, out, batch)
            if previous := list(ctx.state[PREVIOUS]):
                counts.append(len(previous))
                assert mixed != torch.equal(batch.inputs, batch.raw_inputs)
                with torch.no_grad():
                    received, *others = (
                        networks_of(ctx, values).features(batch.inputs) for values in (ctx.base, *previous)
                    )
                wanted = 0.7 * moon.model_contrastive_loss(out.features, received, torch.stack(others), 0.4)
                assert torch.allclose(term, wanted, rtol=1e-5, atol=1e-6)
            return term

    methods = [Watched(0.7, 0.4, out=8, previous=pool), *([Mixup(5.0)] if mixed else [])]
    run(run_spec(*methods, model=model), ROUNDS, rounds=4)
    assert set(counts) == set(range(1, pool + 1))


@pytest.mark.parametrize("model", [MLP, NORMED], ids=["mlp", "cnn with BatchNorm"])
def test_a_job_leaves_its_frozen_models_as_they_were_and_without_gradient(
    model: ModelRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, jobs = moon.model_contrastive_loss, []

    def watched(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
        assert z.requires_grad and not z_global.requires_grad and not z_previous.requires_grad
        return original(z, z_global, z_previous, temperature)

    class Look(HookedMethod):
        name, paper = "look", "a test"

        def finish(self, ctx: Context) -> None:
            layout = ctx.vector.layout
            if ctx.participation:  # asked for again, a job's copies are those that it has worked with
                frozen = {"received": ctx.base, "moon.0": ctx.state[PREVIOUS][-1]}
                for name, values in frozen.items():
                    networks = ctx.frozen(name)
                    assert torch.equal(flat(networks, layout)[: len(values)], values)
                    assert not any(module.training for net in networks.values() for module in net.modules())
                    parameters = [p for net in networks.values() for p in net.parameters()]
                    assert all(p.grad is None and not p.requires_grad for p in parameters)
                assert not torch.equal(ctx.vector.shared, ctx.base)
                jobs.append(ctx.plan.steps)  # type: ignore[union-attr]

    monkeypatch.setattr(moon, "model_contrastive_loss", watched)
    run(run_spec(Look(), Moon(out=8), model=model), ROUNDS, rounds=3)
    assert max(jobs) > 2


def test_frozen_models_do_not_touch_the_running_statistics_of_the_one_in_training() -> None:
    steps = []

    class Look(HookedMethod):
        name, paper = "look", "a test"

        def receive(self, ctx: Context) -> None:
            self._before = ctx.vector.counters.clone()

        def finish(self, ctx: Context) -> None:
            assert ctx.plan is not None
            assert ((ctx.vector.counters - self._before) == ctx.plan.steps).all()
            steps.append(ctx.plan.steps)

    run(run_spec(Moon(out=8), Look(), model=NORMED), ROUNDS, rounds=3)
    assert max(steps) > 2


def test_a_previous_model_equal_to_the_received_one_does_not_change_the_first_step() -> None:
    local = Local(lr=0.5, epochs=None, steps=1, batch=8)

    def trained(mu: float, shift: float) -> Tensor:
        host = Host(run_spec(Moon(mu, out=8), local=local))
        base = host.vector.shared.clone()
        noise = torch.randn(len(base), generator=torch.Generator().manual_seed(0))
        state = private({PREVIOUS: (base + shift * noise).unsqueeze(0)})
        host.trainer.train(Job(0, 0, 1, 0, -1, 1.0), base, host.vector.counters[:0], {}, state)
        return host.vector.data.clone()

    plain = trained(0.0, 0.0)
    assert torch.allclose(trained(10.0, 0.0), plain, rtol=0, atol=1e-6)
    assert not torch.allclose(trained(10.0, 0.1), plain, rtol=0, atol=1e-3)


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"mu": -1.0}, {"temperature": 0.0}, {"width": 0}, {"out": 0}, {"previous": 0}], ids=str
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.moon\.{key}="):
        Moon(**settings)


def test_a_job_costs_a_forward_pass_of_the_received_and_of_each_previous_model() -> None:
    def passes(mu: float, turn: int) -> float:
        return Moon(mu, previous=2).cost(taking_part(None, 5, 30.0, turn)).samples / 10

    assert [passes(1.0, turn) for turn in range(4)] == [0.0, 2.0, 3.0, 3.0]
    assert passes(0.0, 3) == 0.0
