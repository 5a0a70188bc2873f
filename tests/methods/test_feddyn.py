"""FedDyn's state at the settings that its specification names; where it ends is `textbook/feddyn.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import NORMED_MLP, Spy, coordinate, ran, run, run_spec

from raysim.methods.feddyn import FedDyn, regularised_gradient, updated_drift, updated_gradient
from raysim.simulation.schedule import Synchronous


def test_with_everybody_in_every_round_h_over_alpha_is_minus_the_sum_of_the_mean_drifts() -> None:
    alpha = 0.05
    study = run_spec(FedDyn(alpha), model=NORMED_MLP, dtype=torch.float64)
    spy = Spy(study)
    found = ran(coordinate(study, Synchronous(6), runtime=spy, rounds=3))
    trained = found.coordinator.layout.trained
    drifts = (
        np.sum(
            [update.delta[:trained] for update in spy.updates if update.delta is not None], axis=0
        )
        / 6
    )
    assert len(spy.updates) == 18
    h = found.coordinator.server.state["feddyn.drift"].numpy()
    np.testing.assert_allclose(h / alpha, -drifts, rtol=1e-9, atol=1e-12)


def test_h_is_the_mean_over_all_clients_of_what_they_keep() -> None:
    found = run(
        run_spec(FedDyn(0.1), model=NORMED_MLP, dtype=torch.float64), Synchronous(2), rounds=4
    )
    states = found.private
    kept = [value for name, value in states.items() if name.endswith("feddyn.gradient")]
    assert len(kept) > 2
    h = found.coordinator.server.state["feddyn.drift"].numpy()
    np.testing.assert_allclose(h, np.sum(kept, axis=0) / 6, rtol=1e-9, atol=1e-12)


def test_a_client_that_sits_out_keeps_its_gradient() -> None:
    kept = []
    for rounds in (1, 2):
        found = run(run_spec(FedDyn(0.1), model=NORMED_MLP), Synchronous(1), rounds=rounds)
        kept.append(found.private)
    assert len(kept[1]) == 2, "the second round has another client"
    assert all(np.array_equal(kept[1][name], value) for name, value in kept[0].items())


def test_without_regularisation_nothing_is_kept() -> None:
    found, plain = (
        run(run_spec(FedDyn(0.0)), weighting="uniform"),
        run(run_spec(), weighting="uniform"),
    )
    assert found.bits == plain.bits
    assert not found.coordinator.server.state and not found.private


def test_the_functions_are_those_of_the_algorithm() -> None:
    grad, params, received, own = torch.tensor([[1.0, 2.0], [3.0, 5.0], [2.0, 2.0], [0.5, 1.0]])
    assert regularised_gradient(grad, params, received, own, 0.1).tolist() == pytest.approx(
        [0.6, 1.3]
    )
    assert updated_gradient(own, params, received, 0.1).tolist() == pytest.approx([0.4, 0.7])
    assert updated_drift(own, grad, 3, 6, 0.1).tolist() == pytest.approx([0.45, 0.9])


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"feddyn\.alpha"):
        FedDyn(-0.1)
