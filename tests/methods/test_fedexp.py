"""FedExP's step size, what a step of it does to a run, and which model is scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import (
    BUFFER,
    LOCAL,
    MLP,
    NORMED_MLP,
    ROUNDS,
    Ran,
    check_composition,
    coordinate,
    run,
    run_spec,
    same,
)
from torch import Tensor

from raysim.api.method import Method
from raysim.api.server_view import Aggregation
from raysim.methods import fedexp
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedexp import FedExP
from raysim.methods.fedopt import FedAdam
from raysim.methods.fedprox import FedProx
from raysim.methods.groupdro import GroupDRO
from raysim.methods.inco import InCo
from raysim.methods.mixup import Mixup
from raysim.methods.scaffold import Scaffold
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Buffered, Synchronous

EVERYBODY = Synchronous(6)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- the step size ------------------------------------------------------------------------------------------------


def test_identical_updates_are_not_stretched() -> None:
    assert fedexp.server_step_size(deltas=random(5).expand(7, 5), epsilon=1e-9) == 1.0
    raw = fedexp.server_step_size(deltas=random(5).expand(7, 5), epsilon=1e-12, minimum=0.0)
    assert raw == pytest.approx(0.5)


@pytest.mark.parametrize("count", [2, 4, 9])
def test_orthogonal_updates_of_one_length_are_stretched_by_half_their_number(count: int) -> None:
    eta = fedexp.server_step_size(
        deltas=3 * torch.eye(count, 12, dtype=torch.float64), epsilon=1e-12
    )
    assert eta == pytest.approx(max(1.0, count / 2))


@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_without_movement_the_factor_is_the_least_one(epsilon: float) -> None:
    assert fedexp.server_step_size(deltas=torch.zeros(3, 4), epsilon=epsilon) == 1.0


def test_updates_that_cancel_are_stretched_by_what_epsilon_allows() -> None:
    deltas = torch.stack([random(6), -random(6)])
    eta = fedexp.server_step_size(deltas=deltas, epsilon=1e-3)
    assert eta == pytest.approx(random(6).square().sum().item() / 2e-3)


def test_updates_and_epsilon_in_other_units_give_the_same_factor() -> None:
    deltas = random(4, 20)
    etas = [
        fedexp.server_step_size(deltas=c * deltas, epsilon=c**2 * 0.01) for c in (1.0, 10.0, 1e-3)
    ]
    assert etas == pytest.approx([etas[0]] * 3) and etas[0] > 1


@pytest.mark.parametrize("minimum", [0.0, 1.0])
@pytest.mark.parametrize("scale", fedexp.SCALES)
def test_the_factor_falls_with_epsilon_to_the_least_one(scale: str, minimum: float) -> None:
    def eta(epsilon: float) -> float:
        return fedexp.server_step_size(
            deltas=random(4, 20), epsilon=epsilon, epsilon_scale=scale, minimum=minimum
        )

    etas = [eta(epsilon) for epsilon in (1e-6, 1e-3, 0.1, 1.0, 10.0, 1e6)]
    assert etas == sorted(etas, reverse=True) and etas[0] > 1
    assert etas[-1] == 1.0 if minimum else etas[-1] < 1e-3


def test_the_count_multiplies_epsilon() -> None:
    one = fedexp.server_step_size(deltas=random(4, 20), epsilon=0.4)
    assert fedexp.server_step_size(deltas=random(4, 20), epsilon=0.1, epsilon_scale="count") == one


def test_neither_the_order_of_clients_nor_a_factor_of_the_weights_matters() -> None:
    deltas, weights, order = (
        random(5, 9),
        torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
        torch.tensor([3, 0, 4, 2, 1]),
    )
    eta = fedexp.server_step_size(deltas=deltas, epsilon=1e-3, weights=weights)
    again = fedexp.server_step_size(deltas=deltas[order], epsilon=1e-3, weights=7 * weights[order])
    assert again == pytest.approx(eta, rel=1e-12)


def test_a_whole_weight_is_as_many_equal_clients() -> None:
    deltas = random(3, 8)
    repeated = torch.cat([deltas[:1], deltas[1:2].expand(2, 8), deltas[2:]])
    eta = fedexp.server_step_size(
        deltas=deltas, epsilon=1e-3, weights=torch.tensor([1.0, 2.0, 1.0])
    )
    assert eta == pytest.approx(fedexp.server_step_size(deltas=repeated, epsilon=1e-3), rel=1e-12)


def test_the_step_goes_along_the_mean() -> None:
    params, deltas, weights = random(6), random(4, 6, seed=1), torch.tensor([1.0, 2.0, 3.0, 4.0])
    eta = fedexp.server_step_size(deltas=deltas, epsilon=1e-3, weights=weights)
    moved = fedexp.server_step(params=params, deltas=deltas, epsilon=1e-3, weights=weights) - params
    assert torch.allclose(moved, eta * (weights.double() @ deltas) / 10, rtol=1e-12)


@pytest.mark.parametrize("size", [0, 1, 5, 8191, 8192, 8193, 40_000])
def test_a_squared_norm_in_blocks_is_that_of_the_whole(size: int) -> None:
    values = random(size).numpy().astype(np.float32)
    assert fedexp.squared_norm(values) == pytest.approx(
        float(np.square(values.astype(np.float64)).sum()), rel=1e-6
    )


# --- in a run -----------------------------------------------------------------------------------------------------


class Watch(Method):
    """Keeps what every step was made of; the last method of a list."""

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
) -> tuple[Ran, Watch]:
    watch = Watch()
    found = run(
        run_spec(*methods, watch, **({"model": NORMED_MLP} | others)),
        schedule,
        Ideal(),
        rounds=rounds,
    )
    assert not found.failures and len(watch.steps) == rounds
    return found, watch


def others() -> list[Any]:
    given = {
        "alone": [],
        "fedprox": [FedProx(0.1)],
        "scaffold": [Scaffold()],
        "fedbn": [FedBN()],
        "mixup": [Mixup()],
        "groupdro": [GroupDRO(0.5)],
    }
    return [pytest.param(methods, id=name) for name, methods in given.items()]


@pytest.mark.parametrize("methods", others())
@pytest.mark.parametrize("scale", fedexp.SCALES)
def test_a_run_takes_the_steps_of_the_formula_over_shared_trainable_parameters(
    scale: Any, methods: list[Any]
) -> None:
    method = FedExP(1e-4, scale, epsilon_decay=0.5)
    found, watch = watched(method, *methods)
    trained = found.coordinator.layout.trained
    for version, (deltas, weights, eta) in enumerate(watch.steps):
        settings = {"epsilon": 1e-4 * 0.5**version, "weights": weights, "epsilon_scale": scale}
        assert eta == pytest.approx(
            fedexp.server_step_size(deltas=deltas[:, :trained], **settings), rel=1e-5
        )
        assert found.rows[version]["fedexp.step_size"] == eta
        before, after = (vector.double() for vector in watch.vectors[version : version + 2])
        following = fedexp.server_step(
            params=before[:trained], deltas=deltas[:, :trained], **settings
        )
        assert torch.allclose(after[:trained], following, rtol=1e-5, atol=1e-6)
        mean = (weights / weights.sum()) @ deltas[:, trained:]
        assert torch.allclose(after[trained:], before[trained:] + mean, rtol=1e-5, atol=1e-6), (
            "buffers: never stretched"
        )
    assert max(eta for _, _, eta in watch.steps) > 1
    if methods and methods[0].name == "groupdro":
        assert all(len(weights.unique()) == 6 for _, weights, _ in watch.steps), (
            "the weights as finally used"
        )


def test_it_measures_the_mean_update_before_another_method_mixes_it() -> None:
    class Doubled(Method):
        name, paper = "doubled", "a test"

        def step(self, direction: Tensor, aggregation: Aggregation, server: Any) -> Tensor:
            return 2 * direction

    given: Any = {"rounds": 1, "local": replace(LOCAL, batch=8)}
    (_, plain), (_, mixed) = watched(FedExP(), **given), watched(FedExP(), Doubled(), **given)
    eta = plain.steps[0][2]
    assert mixed.steps[0][2] == eta > 1
    assert torch.equal(mixed.directions[0], 2 * plain.directions[0])
    _, before = watched(Doubled(), FedExP(), **given)
    assert before.steps[0][2] == eta, "wherever it stands in the list"


def test_a_divisor_of_another_method_scales_the_step_and_not_the_ratio() -> None:
    found, watch = watched(
        FedExP(1e-4), FedBuff(), schedule=Buffered(concurrency=6, size=3), local=LOCAL
    )
    trained = found.coordinator.layout.trained
    assert any(len(weights.unique()) > 1 for _, weights, _ in watch.steps), "some are stale"
    for version, (deltas, weights, eta) in enumerate(watch.steps):
        wanted = fedexp.server_step_size(deltas=deltas[:, :trained], epsilon=1e-4, weights=weights)
        assert eta == pytest.approx(wanted, rel=1e-5)
        before, after = (
            vector.double()[:trained] for vector in watch.vectors[version : version + 2]
        )
        assert torch.allclose(
            after, before + eta * (weights @ deltas[:, :trained]) / 3, rtol=1e-5, atol=1e-6
        )


def test_a_buffer_of_one_is_never_stretched() -> None:
    _, watch = watched(FedExP(1e-9), FedBuff(), schedule=Buffered(concurrency=4, size=1), rounds=6)
    assert [eta for _, _, eta in watch.steps] == [1.0] * 6


@pytest.mark.parametrize(
    ("method", "schedule"),
    [(FedExP(), Synchronous(1)), (FedExP(1e9), ROUNDS)],
    ids=["one client", "large epsilon"],
)
def test_where_nothing_is_stretched_it_trains_fedavgs_model(method: FedExP, schedule: Any) -> None:
    found, fedavg = (
        run(run_spec(*methods, model=NORMED_MLP), schedule, Ideal()) for methods in ([method], [])
    )
    assert found.finished.model_sha256 == fedavg.finished.model_sha256
    assert same(found.tensors, fedavg.tensors)


# --- what is scored -----------------------------------------------------------------------------------------------


def test_scored_is_the_mean_of_the_last_two_iterates_with_the_newest_buffers() -> None:
    found, watch = watched(FedExP(), rounds=3)
    trained, scored = found.coordinator.layout.trained, found.coordinator.server.scored()
    assert torch.equal(
        scored[:trained], (watch.vectors[2][:trained] + watch.vectors[3][:trained]) * 0.5
    )
    assert torch.equal(scored[trained:], watch.vectors[3][trained:])
    assert not torch.equal(scored, watch.vectors[3])


def test_before_the_first_step_the_model_itself_is_scored() -> None:
    at = coordinate(run_spec(FedExP())).server
    assert torch.equal(at.scored(), at.vector)


def test_after_the_first_round_its_model_itself_is_scored() -> None:
    found, watch = watched(FedExP(), rounds=1)
    assert torch.equal(found.coordinator.server.scored(), watch.vectors[1])


def test_evaluation_sees_the_mean_and_clients_the_newest() -> None:
    far = FedExP(1e-9, minimum=40.0)  # two iterates that are far from each other
    found, newest = (
        run(run_spec(method, model=MLP), EVERYBODY, Ideal(), rounds=2)
        for method in (far, Last(far))
    )
    assert found.finished.model_sha256 == newest.finished.model_sha256
    assert found.rows[0]["loss_global"] == newest.rows[0]["loss_global"]
    assert found.rows[1]["loss_global"] != newest.rows[1]["loss_global"]


class Last(FedExP):
    """FedExP that scores its newest iterate."""

    def __init__(self, like: FedExP):
        super().__init__(like.epsilon, minimum=like.minimum)

    def _mean_iterate(self, server: Any) -> Tensor:
        vector: Tensor = server.vector
        return vector


# --- resuming, settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
@pytest.mark.parametrize(("at", "rounds"), [(1, 2), (3, 5)])
def test_a_resumed_run_has_the_bits_and_the_history_of_a_straight_one(
    schedule: Any, at: int, rounds: int, tmp_path: Path
) -> None:
    study = run_spec(FedExP(epsilon_decay=0.9), model=NORMED_MLP)
    straight = run(study, schedule, rounds=rounds)
    run(study, schedule, rounds=rounds, checkpoint_every=at, folder=str(tmp_path))
    resumed = run(
        study, schedule, rounds=rounds, resume=str(tmp_path / "checkpoints" / f"round-{at:06d}")
    )
    assert (resumed.bits, resumed.history) == (straight.bits, straight.history)


def test_it_does_not_combine_with_another_step_of_the_server() -> None:
    with pytest.raises(
        ValueError, match="method 'fedexp' and method 'fedadam' both own the server's step"
    ):
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
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"method\.fedexp\.{key}="):
        FedExP(**settings)
