"""FedProx's pull: which gradients it enters; where it ends is `textbook/fedprox.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysim.api.context import Stage
from raysim.methods.fedprox import FedProx


def pulled(mu: float, stage: Stage) -> list[float]:
    """What is added to a gradient of zeros, two steps of size 1 away from where training began."""
    grad, base = torch.zeros(3), torch.arange(6.0)
    ctx: Any = SimpleNamespace(stage=stage, params=base + 2, start=base)
    FedProx(mu).gradient(ctx, grad, slice(1, 4))
    return grad.tolist()


def test_the_stage_of_the_task_alone_is_pulled_and_no_projector_that_ascends() -> None:
    assert pulled(0.5, Stage()) == [1.0] * 3
    assert (
        pulled(
            0.5, Stage("fedbr.ascent", loss=lambda ctx, out, batch: out.logits.sum(), ascend=True)
        )
        == [0.0] * 3
    )


def test_without_weight_nothing_is_added_to_any_gradient() -> None:
    assert pulled(0.0, Stage()) == [0.0] * 3


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fedprox\.mu"):
        FedProx(-0.1)
