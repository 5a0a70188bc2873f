"""Test which gradients FedProx changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysim.api.context import Stage
from raysim.methods.fedprox import FedProx


def added_gradient(mu: float, stage: Stage) -> list[float]:
    """Return what FedProx adds to the gradient of three parameters.

    Each of these parameters is 2 larger than at the start of the job.
    """
    grad, base = torch.zeros(3), torch.arange(6.0)
    ctx: Any = SimpleNamespace(stage=stage, params=base + 2, start=base)
    FedProx(mu).gradient(ctx, grad, slice(1, 4))
    return grad.tolist()


def test_fedprox_changes_gradients_of_the_task_loss_stage_only() -> None:
    assert added_gradient(0.5, Stage()) == [1.0] * 3
    assert (
        added_gradient(
            0.5, Stage("fedbr.ascent", loss=lambda ctx, out, batch: out.logits.sum(), ascend=True)
        )
        == [0.0] * 3
    )


def test_fedprox_with_mu_zero_adds_nothing_to_gradients() -> None:
    assert added_gradient(0.0, Stage()) == [0.0] * 3


def test_fedprox_refuses_negative_mu() -> None:
    with pytest.raises(ValueError, match=r"fedprox\.mu"):
        FedProx(-0.1)
