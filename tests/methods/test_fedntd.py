"""FedNTD's teacher, and its rule for mixed batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import MLP, NORMED, ROUNDS, run, run_spec, taking_part
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Outputs
from raysim.api.declarations import Local
from raysim.api.method import Method
from raysim.methods import fedntd
from raysim.methods.fedntd import FedNTD
from raysim.methods.mixup import Mixup
from raysim.models import ModelRecipe
from raysim.simulation.fleet import Ideal
from raysim.vectors.layout import Vector

LOCAL = Local(lr=0.1, momentum=0.9, batch=8, epochs=2)


def received(ctx: Context) -> Any:
    """A model of its own with the received values, in eval mode; counters do not matter there."""
    networks: dict[str, nn.Module] = {name: copy.deepcopy(network).eval() for name, network in ctx.networks.items()}
    Vector(networks, ctx.vector.layout, torch.device("cpu"), torch.float32).shared.copy_(ctx.base)
    return networks["model"]


@pytest.mark.parametrize("model", [MLP, NORMED], ids=["mlp", "cnn with BatchNorm"])
def test_the_teacher_is_the_received_model_in_eval_mode_for_the_whole_job(model: ModelRecipe) -> None:
    apart: list[tuple[int, float]] = []

    class Watched(FedNTD):
        def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
            term = super().term(ctx, out, batch)
            teacher = received(ctx)
            with torch.no_grad():
                logits = teacher(batch.inputs)
            assert torch.allclose(out.base_logits, logits, rtol=1e-5, atol=1e-5) and not out.base_logits.requires_grad
            wanted = 0.7 * fedntd.not_true_distillation_loss(out.logits, logits, batch.targets, 2.0)
            assert torch.allclose(term, wanted, rtol=1e-4, atol=1e-6)
            frozen = ctx.frozen()["model"]
            for found, values in zip(frozen.state_dict().items(), teacher.state_dict().values(), strict=True):
                assert found[0].endswith("num_batches_tracked") or torch.equal(found[1], values)
            assert not any(module.training for module in frozen.modules())
            assert all(p.grad is None and not p.requires_grad for p in frozen.parameters())
            apart.append((ctx.step, (out.logits - logits).abs().max().item()))
            return term

    found = run(run_spec(Watched(0.7, 2.0), model=model, local=LOCAL), ROUNDS, rounds=2)
    assert not found.failures
    assert max(step for step, _ in apart) > 5
    assert min(distance for step, distance in apart if step > 2) > 1e-3, "by then the student is another"


def test_a_mixed_batch_is_distilled_for_either_label_in_the_proportion_of_the_mix() -> None:
    shares = []

    class Watched(FedNTD):
        def term(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
            term = super().term(ctx, out, batch)
            lam, partners = ctx.drawn("mixup.lam").item(), ctx.drawn("mixup.permutation")
            x, y = batch.raw_inputs, batch.raw_targets
            mixed = lam * x + (1 - lam) * x[partners]
            with torch.no_grad():
                student, teacher = ctx.model(mixed), received(ctx)(mixed)
                own, partner = (
                    fedntd.not_true_distillation_loss(student, teacher, labels, 2.0) for labels in (y, y[partners])
                )
            assert torch.allclose(term, 0.7 * (lam * own + (1 - lam) * partner), rtol=1e-4, atol=1e-6)
            if ctx.step and 0.01 < lam < 0.99:
                shares.append(abs(own - partner).item() / term.item())
            return term

    found = run(run_spec(Mixup(2.0), Watched(0.7, 2.0), local=LOCAL), ROUNDS, rounds=2)
    assert not found.failures
    assert max(shares) > 0.1, "or the labels would not matter"


def shared(method: Method | None, steps: int) -> np.ndarray:
    local = Local(lr=0.5, epochs=None, steps=steps, batch=8)
    found = run(run_spec(*([method] if method else []), local=local), ROUNDS, Ideal(), rounds=2)
    vector: np.ndarray = found.coordinator.server.vector.numpy()
    return vector


def test_a_single_step_is_fedavgs_because_teacher_and_student_still_agree() -> None:
    np.testing.assert_allclose(shared(FedNTD(50.0), 1), shared(None, 1), rtol=0, atol=1e-5)
    assert np.abs(shared(FedNTD(50.0), 2) - shared(None, 2)).max() > 1e-3


@pytest.mark.parametrize("settings", [{"beta": -1.0}, {"temperature": 0.0}], ids=str)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, float]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedntd\.{key}="):
        FedNTD(**settings)


def test_a_job_costs_the_teachers_forward_pass() -> None:
    assert FedNTD().cost(taking_part(None, 5, 30.0)).samples == 10
    assert FedNTD(0.0).cost(taking_part(None, 5, 30.0)).samples == 0
