"""FedSAM's shift and what it costs; where it ends is `textbook/fedsam.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import NORMED, NORMED_MLP, run, run_spec, step_of, taking_part
from torch import Tensor, nn

from raysim.api.context import Batch, Context, Outputs, Stage
from raysim.api.hooked_method import HookedMethod, overrides
from raysim.methods.fedbn import FedBN
from raysim.methods.fedsam import FedSAM, adaptive_shift, sharpness_shift
from raysim.vectors.layout import Vector, plan_layout
from raysim.vectors.optimizer import Optimizer, Optimizers

A = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]], dtype=torch.float64)
THETA = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


class Quadratic(HookedMethod):
    """F(theta) = theta' A theta / 2."""

    name = "quadratic"
    paper = "a test"

    def loss(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        theta = ctx.networks["model"].weight.flatten()
        return 0.5 * theta @ A @ theta  # type: ignore[operator]


def stepped(method: FedSAM, stage: Stage, rate: float = 0.1) -> Tensor:
    """THETA after one step."""
    networks = {"model": nn.Linear(3, 1, bias=False)}
    vector = Vector(networks, plan_layout(networks), torch.device("cpu"), torch.float64)
    vector.data.copy_(THETA)
    known = {"rate": rate, "stage": stage, "state": {}, "kept": {}, "optimizers": Optimizers()}
    ctx: Any = SimpleNamespace(vector=vector, networks=networks, **known)
    step = step_of(vector, [Quadratic(), method], Optimizer())
    step(ctx, Batch(THETA, THETA, THETA, THETA), (stage,))
    return vector.data.clone()


@pytest.mark.parametrize("rho", [0.01, 0.5])
def test_on_a_quadratic_a_step_is_the_one_that_can_be_written_down(rho: float) -> None:
    slope = A @ THETA
    expected = THETA - 0.1 * A @ (THETA + rho * slope / slope.norm())
    assert torch.allclose(stepped(FedSAM(rho), Stage()), expected, rtol=1e-14)


def test_on_a_quadratic_an_adaptive_step_scales_each_coordinate_by_its_size() -> None:
    scale = torch.diag(THETA.abs() + 0.2)
    slope = A @ THETA
    expected = THETA - 0.1 * A @ (THETA + 0.5 * scale @ scale @ slope / (scale @ slope).norm())
    assert torch.allclose(stepped(FedSAM(0.5, adaptive=True), Stage()), expected, rtol=1e-14)


def test_a_stage_with_another_loss_than_the_tasks_is_not_perturbed() -> None:
    stage = Stage("other", loss=Quadratic().loss)
    assert torch.allclose(stepped(FedSAM(0.5), stage), THETA - 0.1 * A @ THETA, rtol=1e-14)


def test_the_shift_is_rho_long_over_all_coordinates_together() -> None:
    grad = torch.linspace(-3, 5, 11)
    assert float(sharpness_shift(grad, 0.3).norm()) == pytest.approx(0.3)
    assert float(sharpness_shift(grad * 1e-11, 0.3).norm()) == pytest.approx(0.3), "however small the gradient"
    assert torch.equal(sharpness_shift(torch.zeros(4), 0.3), torch.zeros(4))
    assert torch.equal(adaptive_shift(torch.ones(4), torch.zeros(4), 0.3, 0.2), torch.zeros(4))


def test_without_a_distance_there_is_no_second_pass() -> None:
    assert not overrides(FedSAM(0.0), "perturb") and not overrides(FedSAM(0.0), "cost")
    assert run(run_spec(FedSAM(0.0), model=NORMED)).bits == run(run_spec(model=NORMED)).bits


def test_a_job_costs_twice_as_many_samples() -> None:
    assert FedSAM().cost(taking_part(None, 10, 40.0)).samples == 40.0


def test_beside_fedbn_personal_layers_take_part_in_the_shift_and_come_back_from_it() -> None:
    tiny_shift, none = (run(run_spec(FedBN(), FedSAM(rho), model=NORMED_MLP)) for rho in (1e-6, 0.0))
    for name, value in tiny_shift.private.items():
        reference = none.private[name]
        assert torch.allclose(torch.from_numpy(value).double(), torch.from_numpy(reference).double(), atol=1e-4), name
    far = run(run_spec(FedBN(), FedSAM(0.5), model=NORMED_MLP))
    assert far.bits[1] != none.bits[1]


def test_a_negative_distance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fedsam\.rho"):
        FedSAM(-0.1)
