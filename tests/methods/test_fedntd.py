"""Test FedNTD: a run with one local step, the cost of a job, and the settings that it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_runs import ROUNDS, participation_facts, run, run_spec

from raysim.api.declarations import Local
from raysim.api.method import Method
from raysim.methods.fedntd import FedNTD
from raysim.simulation.fleet import Ideal


def shared(steps: int, *methods: Method) -> np.ndarray:
    """Return the shared vector after two rounds in which each job makes `steps` local steps."""
    local = Local(lr=0.5, epochs=None, steps=steps, batch=8)
    result = run(run_spec(*methods, local=local), ROUNDS, Ideal(), rounds=2)
    vector: np.ndarray = result.coordinator.server.vector.numpy()
    return vector


def test_fedntd_equals_fedavg_if_a_job_has_only_one_step() -> None:
    np.testing.assert_allclose(shared(1, FedNTD(50.0)), shared(1), rtol=0, atol=1e-5)
    assert np.abs(shared(2, FedNTD(50.0)) - shared(2)).max() > 1e-3


@pytest.mark.parametrize("settings", [{"beta": -1.0}, {"temperature": 0.0}], ids=str)
def test_error_of_fedntd_setting_out_of_range_mentions_its_key(settings: dict[str, float]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedntd\.{key}="):
        FedNTD(**settings)


def test_fedntd_adds_the_cost_of_a_forward_pass_of_the_teacher() -> None:
    assert FedNTD().cost(participation_facts(None, 5, 30.0)) == 10
    assert FedNTD(0.0).cost(participation_facts(None, 5, 30.0)) == 0
