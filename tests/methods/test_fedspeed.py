"""FedSpeed's parts at the settings that its specification names; where it ends is `textbook/fedspeed.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_runs import NORMED_MLP, Spy, coordinate, ran, run_spec

from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.methods.fedprox import FedProx
from raysim.methods.fedspeed import FedSpeed, mixed_gradient, updated_correction
from raysim.simulation.schedule import Synchronous


def first_round(*methods: Method) -> dict[int, np.ndarray]:
    """Each participant's change of the parameters in round 0."""
    study = run_spec(*methods, model=NORMED_MLP)
    spy = Spy(study)
    trained = ran(
        coordinate(study, Synchronous(6), runtime=spy, rounds=1)
    ).coordinator.layout.trained
    assert all(job.weight == 1 for job, _ in spy.sent)
    return {
        update.client: update.delta[:trained] for update in spy.updates if update.delta is not None
    }


class Single(Method):
    """Ask for single updates, all of the same weight."""

    name = "single"
    paper = "a test"
    weighting = "uniform"

    def setup(self, run: Setup) -> None:
        run.read_updates()


def test_in_a_first_participation_with_one_gradient_it_trains_as_fedprox() -> None:
    lam = 0.5
    fedprox = first_round(FedProx(1 / lam), Single())
    fedspeed = first_round(FedSpeed(lam, alpha=0.0), Single())
    assert len(fedprox) == 6
    for client, change in fedspeed.items():
        # It sends theta_K - lam c with c = -(theta_K - x) / lam, so twice the change.
        np.testing.assert_allclose(change, 2 * fedprox[client], rtol=1e-5, atol=1e-6)


def test_the_mixture_is_linear_and_ends_in_either_gradient() -> None:
    first, second = torch.linspace(0, 1, 5), torch.linspace(3, 5, 5)
    assert torch.equal(mixed_gradient(first, second, 0.0), first)
    assert torch.equal(mixed_gradient(first, second, 1.0), second)
    assert torch.allclose(mixed_gradient(first, second, 0.25), 0.75 * first + 0.25 * second)


def test_the_correction_gathers_what_the_proximal_term_held_back() -> None:
    own, trained, received = torch.ones(3), torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)
    assert torch.equal(
        updated_correction(own, trained, received, 0.5), torch.tensor([1.0, -1.0, -3.0])
    )


@pytest.mark.parametrize("settings", [{"lam": 0.0}, {"rho": -1.0}, {"alpha": 1.5}], ids=str)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"fedspeed\.{next(iter(settings))}"):
        FedSpeed(**settings)
