"""Test how far FedSAM shifts the parameters, and what its second gradient of each step costs."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import NORMED_MLP, participation_facts, run, run_spec

from raysim.api.method import Method
from raysim.methods.fedbn import FedBN
from raysim.methods.fedsam import FedSAM, adaptive_shift, sharpness_shift
from raysim.methods.fedspeed import FedSpeed
from raysim.training.run_spec import declare_run


def test_fedsam_shift_has_length_rho_or_is_zero() -> None:
    grad = torch.linspace(-3, 5, 11)
    assert float(sharpness_shift(grad, 0.3).norm()) == pytest.approx(0.3)
    assert float(sharpness_shift(grad * 1e-11, 0.3).norm()) == pytest.approx(0.3)
    assert torch.equal(sharpness_shift(torch.zeros(4), 0.3), torch.zeros(4))
    assert torch.equal(adaptive_shift(torch.ones(4), torch.zeros(4), 0.3, 0.2), torch.zeros(4))


@pytest.mark.parametrize(
    "method",
    [FedSAM(0.0), FedSpeed(alpha=0.0), FedSpeed(rho=0.0)],
    ids=["fedsam rho=0", "fedspeed alpha=0", "fedspeed rho=0"],
)
def test_method_makes_no_second_pass_if_rho_or_alpha_is_zero(method: Method) -> None:
    (declared,) = declare_run(run_spec(method)).methods
    assert not declared.has_hook("perturb") and not declared.has_hook("cost")


@pytest.mark.parametrize("method", [FedSAM(), FedSpeed()], ids=lambda method: method.name)
def test_fedsam_costs_a_second_pass_of_each_batch(method: Method) -> None:
    (declared,) = declare_run(run_spec(method)).methods
    assert declared.has_hook("perturb") and declared.has_hook("cost")
    assert method.cost(participation_facts(None, 10, 40.0)) == 40.0


def test_fedsam_shifts_and_restores_personal_layers() -> None:
    tiny_shift, none = (
        run(run_spec(FedBN(), FedSAM(rho), model=NORMED_MLP)) for rho in (1e-6, 0.0)
    )
    for name, value in tiny_shift.private.items():
        reference = torch.from_numpy(none.private[name]).double()
        assert torch.allclose(torch.from_numpy(value).double(), reference, atol=1e-4), name
    far = run(run_spec(FedBN(), FedSAM(0.5), model=NORMED_MLP))
    assert far.bits[1] != none.bits[1]


def test_fedsam_refuses_negative_rho() -> None:
    with pytest.raises(ValueError, match=r"method\.fedsam\.rho="):
        FedSAM(-0.1)
