"""Test FedCM with two server learning rates, and the settings that FedCM refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_runs import LOCAL, run, run_spec

from raysim.methods.fedcm import FedCM
from raysim.methods.fedopt import FedAvgM
from raysim.training.run_spec import declare_run


def test_fedcm_direction_is_independent_of_server_learning_rate() -> None:
    one, other = (
        run(run_spec(FedCM(), FedAvgM(rate, 0.0)), rounds=1).coordinator.server
        for rate in (1.0, 0.3)
    )
    assert torch.equal(one.state["fedcm.direction"], other.state["fedcm.direction"])
    assert one.state["fedcm.direction"].any() and not torch.equal(one.vector, other.vector)


def test_fedcm_refuses_adam() -> None:
    with pytest.raises(ValueError, match=r"local\.optimizer=adam"):
        declare_run(run_spec(FedCM(), local=replace(LOCAL, optimizer="adam", momentum=0.0)))


@pytest.mark.parametrize("alpha", [-0.1, 1.01])
def test_fedcm_refuses_alpha_below_zero_or_above_one(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"method\.fedcm\.alpha="):
        FedCM(alpha)
