"""Test FedSpeed against FedProx, and that FedSpeed refuses wrong settings.

Without its second pass, FedSpeed trains a client's first job as FedProx does.
"""

from __future__ import annotations

import numpy as np
import pytest
from tiny_runs import NORMED_MLP, Spy, coordinate, run_spec, run_to_end

from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.methods.fedprox import FedProx
from raysim.methods.fedspeed import FedSpeed
from raysim.simulation.schedule import Synchronous


def first_round(*methods: Method) -> dict[int, np.ndarray]:
    """Return the update of each client in the first round, without BatchNorm's statistics."""
    study = run_spec(*methods, model=NORMED_MLP)
    spy = Spy(study)
    trained = run_to_end(
        coordinate(study, Synchronous(6), runtime=spy, rounds=1)
    ).coordinator.layout.trained
    assert all(job.weight == 1 for job, _ in spy.sent)
    return {
        update.client: update.delta[:trained] for update in spy.updates if update.delta is not None
    }


class Single(Method):
    """A method that reads single updates, and gives the same weight to all clients."""

    name = "single"
    paper = "a test"
    weighting = "uniform"

    def setup(self, run: Setup) -> None:
        run.read_updates()


def test_fedspeed_with_alpha_0_sends_double_the_update_of_fedprox() -> None:
    lam = 0.5
    fedprox = first_round(FedProx(1 / lam), Single())
    fedspeed = first_round(FedSpeed(lam, alpha=0.0), Single())
    assert len(fedprox) == 6
    for client, change in fedspeed.items():
        # It sends theta_K - lam c with c = -(theta_K - x) / lam, so twice the change.
        np.testing.assert_allclose(change, 2 * fedprox[client], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{"lam": 0.0}, {"rho": -1.0}, {"alpha": 1.5}], ids=str)
def test_fedspeed_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"fedspeed\.{next(iter(settings))}"):
        FedSpeed(**settings)
