"""Test DANN's domains, the cost of a discriminator step, and which runs are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import (
    Spy,
    coordinate,
    equal_clients,
    participation_facts,
    run_spec,
    run_to_end,
    several_workers,
)
from torch import Tensor

from raysim.api.declarations import Local
from raysim.api.local_job import LocalJob
from raysim.methods import dann
from raysim.methods.dann import DISCRIMINATOR, Dann
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import build_networks, declare_run
from raysim.vectors.layout import Vector

# --- domains ----------------------------------------------------------------------------------


class Present(Dann):
    """A DANN that stores the client of the running job, and how many jobs the client had before."""

    def begin(self, job: LocalJob) -> None:
        super().begin(job)
        self._now = (job.client, job.participation)


@pytest.mark.parametrize("mode", ["alternate", "grl"])
@pytest.mark.parametrize("workers", [1, 3])
def test_dann_uses_client_number_as_domain_on_every_worker(
    workers: int, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, original = Present(0.5, width=4, mode=mode), dann.discriminator_loss
    labels: dict[tuple[int, int], list[int]] = {}

    def watched(domain_logits: Tensor, domain: Tensor) -> Tensor:
        assert domain_logits.shape[1] == 6, "an output for each client of the run"
        labels.setdefault(method._now, []).append(int(domain))
        return original(domain_logits, domain)

    monkeypatch.setattr(dann, "discriminator_loss", watched)
    spec = run_spec(method)
    result = run_to_end(
        coordinate(spec, Synchronous(4), runtime=several_workers(spec, workers), rounds=4)
    )
    assert not result.failures and max(participation for _, participation in labels) > 1
    assert {client for client, _ in labels} == set(range(6))
    assert all(set(domains) == {client} for (client, _), domains in labels.items())


def test_dann_discriminator_bias_falls_for_absent_clients_and_rises_for_the_cohort() -> None:
    spec = run_spec(Dann(0.5, width=8), local=Local(lr=0.1, batch=8, epochs=2))
    spy = Spy(spec)
    result = run_to_end(coordinate(spec, Synchronous(2), runtime=spy, rounds=1))
    present = [job.client for job, _ in spy.sent]
    absent = [client for client in range(6) if client not in present]
    name = f"{DISCRIMINATOR}.4.bias"
    networks, layout = build_networks(spec)
    initial = Vector(networks, layout, torch.device("cpu"), torch.float32)
    moved = result.tensors[name] - initial.parameters[name].detach().numpy()
    assert moved.shape == (6,) and len(absent) == 4
    assert (moved[absent] < 0).all() and (moved[present] > 0).all()


# --- costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "share"),
    [({}, 1 / 2), ({"discriminator_steps": 3}, 3 / 4), ({"mode": "grl"}, 0)],
    ids=str,
)
def test_dann_discriminator_step_costs_only_a_forward_pass(
    settings: dict[str, Any], share: float
) -> None:
    saved = -Dann(**settings).cost(participation_facts(None, 5, 30.0))
    assert saved == pytest.approx(30 * share * 2 / 3)


# --- what is refused --------------------------------------------------------------------------


def declare(method: Dann, clients: int = 2, local: Local | None = None) -> None:
    """Declare a run with DANN; raise an error if its settings do not fit DANN.

    clients: the number of clients.
    local: the settings of local training; None for the defaults.
    """
    declare_run(run_spec(method, data=equal_clients(clients), local=local or Local()))


def test_dann_refuses_a_single_client() -> None:
    with pytest.raises(ValueError, match=r"partition\.clients=1"):
        declare(Dann(), clients=1)
    declare(Dann(width=1), clients=2)


@pytest.mark.parametrize("ratio", [1, 3])
def test_dann_requires_more_local_steps_than_discriminator_steps(ratio: int) -> None:
    method = Dann(discriminator_steps=ratio)
    with pytest.raises(ValueError, match=rf"local\.steps={ratio}:"):
        declare(method, local=Local(epochs=None, steps=ratio))
    declare(method, local=Local(epochs=None, steps=ratio + 1))
    declare(Dann(mode="grl"), local=Local(epochs=None, steps=1))


@pytest.mark.parametrize("settings", [{"rate": 0.5}, {"discriminator_steps": 2}], ids=str)
def test_dann_reversal_mode_refuses_discriminator_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"method\.dann\.mode=grl"):
        Dann(mode="grl", **settings)


@pytest.mark.parametrize(
    "settings", [{"lam": -0.1}, {"width": 0}, {"discriminator_steps": 0}, {"rate": 0.0}], ids=str
)
def test_error_of_dann_setting_out_of_range_mentions_its_key(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.dann\.{key}="):
        Dann(**settings)


@pytest.mark.parametrize(
    ("mode", "steps", "expected"),
    [("alternate", 1, {"local.steps": 4}), ("alternate", 9, {"local.steps": 9}), ("grl", 1, {})],
)
def test_dann_increases_local_steps_so_that_a_job_trains_both_networks(
    mode: Any, steps: int, expected: dict[str, int]
) -> None:
    steps_of_both = 1 if mode == "grl" else 3
    method = Dann(mode=mode, discriminator_steps=steps_of_both)
    assert method.settings(Local(epochs=None, steps=steps)) == expected
    assert method.settings(Local(epochs=1)) == {}
