"""Test FedExP's step size, also with other methods in the list, and which model is scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    LOCAL,
    MLP,
    NORMED_MLP,
    ROUNDS,
    FinishedRun,
    check_composition,
    coordinate,
    run,
    run_spec,
    same_arrays,
)
from torch import Tensor

from raysim.api.method import Method
from raysim.api.server_view import Aggregation
from raysim.methods import fedexp
from raysim.methods.fedexp import FedExP
from raysim.methods.fedopt import FedAdam
from raysim.methods.inco import InCo
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous

EVERYBODY = Synchronous(6)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- the step size ----------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_fedexp_step_size_is_one_if_all_updates_are_zero(epsilon: float) -> None:
    assert fedexp.extrapolation(0.0, 0.0, epsilon) == 1.0


@pytest.mark.parametrize("size", [0, 1, 5, 8191, 8192, 8193, 40_000])
def test_fedexp_squared_norm_equals_that_of_numpy_for_any_array_length(size: int) -> None:
    values = random(size).numpy().astype(np.float32)
    assert fedexp.squared_norm(values) == pytest.approx(
        float(np.square(values.astype(np.float64)).sum()), rel=1e-6
    )


# --- in a run ---------------------------------------------------------------------------------


class Watch(Method):
    """A method, the last of the list, that stores inputs and results of every server step.

    vectors: the initial model, then the model after each step.
    steps: for each step, the updates [M, shared] and weights [M] of M clients, and FedExP's step
    size.
    directions: what each step adds to the model.
    """

    name = "watch"
    paper = "a test"

    def __init__(self) -> None:
        self.vectors: list[Tensor] = []
        self.steps: list[
            tuple[Tensor, Tensor, float]
        ] = []  # single updates [M, shared], weights, step size
        self.directions: list[Tensor] = []

    def setup(self, run: Any) -> None:
        run.read_updates()
        run.server_state("start", self._start)

    def _start(self, server: Any) -> Tensor:
        self.vectors.append(server.vector)
        return torch.zeros(0)

    def step(self, direction: Tensor, aggregation: Aggregation, server: Any) -> Tensor:
        self.directions.append(direction.clone())
        return direction

    def absorb(self, aggregation: Aggregation, server: Any) -> None:
        deltas = torch.stack(list(aggregation.deltas))
        weights = torch.tensor(aggregation.weights, dtype=torch.float64)
        self.vectors.append(server.vector)
        step_size = server._server.report["fedexp.step_size"]
        self.steps.append((deltas.double(), weights, step_size))


def watched(
    *methods: Method, schedule: Any = EVERYBODY, rounds: int = 3, **others: Any
) -> tuple[FinishedRun, Watch]:
    watch = Watch()
    ended = run(
        run_spec(*methods, watch, **({"model": NORMED_MLP} | others)),
        schedule,
        Ideal(),
        rounds=rounds,
    )
    assert not ended.failures and len(watch.steps) == rounds
    return ended, watch


def test_fedexp_step_size_ignores_server_steps_of_other_methods() -> None:
    class Doubled(Method):
        name, paper = "doubled", "a test"

        def step(self, direction: Tensor, aggregation: Aggregation, server: Any) -> Tensor:
            return 2 * direction

    settings: Any = {"rounds": 1, "local": replace(LOCAL, batch=8)}
    (_, plain), (_, mixed) = watched(FedExP(), **settings), watched(FedExP(), Doubled(), **settings)
    eta = plain.steps[0][2]
    assert mixed.steps[0][2] == eta > 1
    assert torch.equal(mixed.directions[0], 2 * plain.directions[0])
    _, before = watched(Doubled(), FedExP(), **settings)
    assert before.steps[0][2] == eta, "wherever it stands in the list"


@pytest.mark.parametrize(
    ("method", "schedule"),
    [(FedExP(), Synchronous(1)), (FedExP(1e9), ROUNDS)],
    ids=["one client", "large epsilon"],
)
def test_fedexp_with_step_size_one_equals_fedavg(method: FedExP, schedule: Any) -> None:
    ended, fedavg = (
        run(run_spec(*methods, model=NORMED_MLP), schedule, Ideal()) for methods in ([method], [])
    )
    assert ended.finished.model_sha256 == fedavg.finished.model_sha256
    assert same_arrays(ended.tensors, fedavg.tensors)


# --- what is scored ---------------------------------------------------------------------------


def test_fedexp_scores_the_mean_of_the_last_two_models() -> None:
    ended, watch = watched(FedExP(), rounds=3)
    trained, scored = ended.coordinator.layout.trained, ended.coordinator.server.scored()
    assert torch.equal(
        scored[:trained], (watch.vectors[2][:trained] + watch.vectors[3][:trained]) * 0.5
    )
    assert torch.equal(scored[trained:], watch.vectors[3][trained:])
    assert not torch.equal(scored, watch.vectors[3])


def test_fedexp_scores_the_initial_model_before_the_first_round() -> None:
    at = coordinate(run_spec(FedExP())).server
    assert torch.equal(at.scored(), at.vector)


def test_fedexp_scores_the_newest_model_and_no_mean_after_only_one_round() -> None:
    ended, watch = watched(FedExP(), rounds=1)
    assert torch.equal(ended.coordinator.server.scored(), watch.vectors[1])


def test_fedexp_clients_train_from_the_newest_model() -> None:
    far = FedExP(1e-9, minimum=40.0)  # two iterates that are far from each other
    ended, newest = (
        run(run_spec(method, model=MLP), EVERYBODY, Ideal(), rounds=2)
        for method in (far, Last(far))
    )
    assert ended.finished.model_sha256 == newest.finished.model_sha256
    assert ended.rows[0]["loss_global"] == newest.rows[0]["loss_global"]
    assert ended.rows[1]["loss_global"] != newest.rows[1]["loss_global"]


class Last(FedExP):
    """A FedExP that scores its newest iterate."""

    def __init__(self, like: FedExP):
        super().__init__(like.epsilon, minimum=like.minimum)

    def _mean_iterate(self, server: Any) -> Tensor:
        vector: Tensor = server.vector
        return vector


# --- resuming, settings -----------------------------------------------------------------------


def test_fedexp_refuses_methods_that_replace_the_server_step() -> None:
    with pytest.raises(ValueError, match=r"'fedexp'.*'fedadam'"):
        check_composition([FedExP(), FedAdam()])
    check_composition([FedExP(), InCo()])


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.0},
        {"epsilon_scale": "counts"},
        {"epsilon_decay": 0.0},
        {"epsilon_decay": 1.5},
        {"minimum": -1.0},
    ],
    ids=str,
)
def test_fedexp_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedexp\.{key}="):
        FedExP(**settings)
