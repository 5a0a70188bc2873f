"""Test FedDyn's client and server state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import NORMED_MLP, run, run_spec

from raysim.methods.feddyn import FedDyn
from raysim.simulation.schedule import Synchronous


def test_feddyn_server_drift_is_the_mean_of_the_gradients_of_all_clients() -> None:
    ended = run(
        run_spec(FedDyn(0.1), model=NORMED_MLP, dtype=torch.float64), Synchronous(2), rounds=4
    )
    states = ended.private
    gradients = [value for name, value in states.items() if name.endswith("feddyn.gradient")]
    assert len(gradients) > 2
    h = ended.coordinator.server.state["feddyn.drift"].numpy()
    np.testing.assert_allclose(h, np.sum(gradients, axis=0) / 6, rtol=1e-9, atol=1e-12)


def test_feddyn_gradient_of_a_client_does_not_change_while_it_is_absent() -> None:
    gradients = []
    for rounds in (1, 2):
        ended = run(run_spec(FedDyn(0.1), model=NORMED_MLP), Synchronous(1), rounds=rounds)
        gradients.append(ended.private)
    assert len(gradients[1]) == 2, "the second round has another client"
    assert all(np.array_equal(gradients[1][name], value) for name, value in gradients[0].items())


def test_feddyn_with_alpha_zero_equals_fedavg() -> None:
    ended, plain = (
        run(run_spec(FedDyn(0.0)), weighting="uniform"),
        run(run_spec(), weighting="uniform"),
    )
    assert ended.bits == plain.bits
    assert not ended.coordinator.server.state and not ended.private


def test_feddyn_refuses_negative_alpha() -> None:
    with pytest.raises(ValueError, match=r"feddyn\.alpha"):
        FedDyn(-0.1)
