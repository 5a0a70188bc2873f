"""Test FedNova, q-FedAvg, AFL, FedBABU and APFL against their textbooks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny_runs import NORMED_MLP, BiasFreeMlp, check_composition, run, run_spec

from raysim.methods.afl import AFL, project_onto_simplex
from raysim.methods.apfl import APFL
from raysim.methods.fedbabu import FedBABU
from raysim.methods.fednova import FedNova, effective_steps, normalising_factors
from raysim.methods.fedproto import FedProto
from raysim.methods.fedprox import FedProx
from raysim.methods.qfedavg import QFedAvg
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import declare_run
from textbook.afl import afl, nearest_on_simplex
from textbook.apfl import apfl
from textbook.check import LOCAL, Row, check
from textbook.fedbabu import fedbabu
from textbook.fednova import fednova
from textbook.qfedavg import qfedavg

NORMED: dict[str, Any] = {"model": NORMED_MLP}
STEPS: dict[str, Any] = {"local": replace(LOCAL, epochs=None, steps=5)}
PLAIN: dict[str, Any] = {"local": replace(LOCAL, momentum=0.0, weight_decay=0.0)}
FEW: dict[str, Any] = {
    "schedule": Synchronous(1),
    "run": {"rounds": 2},
}  # so some client never takes part
UNIFORM, SAMPLES = {"weighting": "uniform"}, {"weighting": "samples"}

ROWS = {
    "fednova": Row(fednova, lambda: [FedNova()]),
    "fednova with BatchNorm": Row(fednova, lambda: [FedNova()], NORMED),
    "fednova, plain SGD, uniform": Row(fednova, lambda: [FedNova()], PLAIN, UNIFORM),
    "fednova, fixed steps": Row(fednova, lambda: [FedNova()], STEPS),
    "fednova and fedprox": Row(
        partial(fednova, mu=0.5), lambda: [FedProx(0.5), FedNova(0.5)], PLAIN | NORMED
    ),
    "qfedavg": Row(partial(qfedavg, q=1.0), lambda: [QFedAvg()]),
    "qfedavg with BatchNorm": Row(partial(qfedavg, q=0.3), lambda: [QFedAvg(0.3)], NORMED),
    "qfedavg, a large q, by samples": Row(
        partial(qfedavg, q=5.0), lambda: [QFedAvg(5.0)], run=SAMPLES
    ),
    "qfedavg, q=0": Row(partial(qfedavg, q=0.0), lambda: [QFedAvg(0.0)], PLAIN),
    "afl": Row(partial(afl, gamma=0.1), lambda: [AFL()]),
    "afl with BatchNorm, a small step": Row(partial(afl, gamma=0.01), lambda: [AFL(0.01)], NORMED),
    "afl, a large step, by samples": Row(
        partial(afl, gamma=3.0), lambda: [AFL(3.0)], run=SAMPLES | {"rounds": 5}
    ),
    "fedbabu": Row(partial(fedbabu, epochs=2, head_only=True), lambda: [FedBABU(2)]),
    "fedbabu with BatchNorm": Row(
        partial(fedbabu, epochs=2, head_only=True), lambda: [FedBABU(2)], NORMED
    ),
    "fedbabu, fine-tuned as a whole": Row(
        partial(fedbabu, epochs=1, head_only=False), lambda: [FedBABU(1, "all")], NORMED
    ),
    "fedbabu, some never train": Row(
        partial(fedbabu, epochs=1, head_only=True), lambda: [FedBABU(1)], NORMED, **FEW
    ),
    "apfl": Row(partial(apfl, alpha=0.5), lambda: [APFL()]),
    "apfl with BatchNorm": Row(partial(apfl, alpha=0.3), lambda: [APFL(0.3)], NORMED),
    "apfl, plain SGD": Row(partial(apfl, alpha=0.8), lambda: [APFL(0.8)], PLAIN),
    "apfl, fixed alpha": Row(
        partial(apfl, alpha=0.3, adaptive=False), lambda: [APFL(0.3, False)], NORMED
    ),
    "apfl, a large rate": Row(
        partial(apfl, alpha=0.99), lambda: [APFL(0.99)], {"local": replace(LOCAL, lr=0.7)}
    ),
    "apfl, alpha reaches 1": Row(partial(apfl, alpha=0.999), lambda: [APFL(0.999)], PLAIN),
    "apfl, some never train": Row(partial(apfl, alpha=0.5), lambda: [APFL()], NORMED, **FEW),
}


@pytest.mark.parametrize("name", ROWS)
def test_fednova_qfedavg_afl_fedbabu_apfl_equal_textbook_computations(name: str) -> None:
    check(ROWS[name])


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("pull", [0.0, 0.3])
def test_fednova_effective_steps_are_the_distance_of_sgd_divided_by_learning_rate(
    momentum: float, nesterov: bool, pull: float
) -> None:
    position = torch.zeros((), dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([position], lr=0.01, momentum=momentum, nesterov=nesterov)
    for _ in range(7):
        sgd.zero_grad()
        (-position + pull / 0.01 / 2 * position.square()).backward()
        sgd.step()
    expected = effective_steps(7, momentum, pull, nesterov)
    assert float(position.detach()) / 0.01 == pytest.approx(expected, rel=1e-12)


def test_fednova_warns_if_its_mu_is_not_the_mu_of_fedprox() -> None:
    def warnings(mu: float) -> list[str]:
        return list(declare_run(run_spec(FedProx(0.5), FedNova(mu))).warnings)

    (warning,) = warnings(mu=0.0)
    assert warning.startswith("method.fednova.mu=0") and "method.fedprox.mu" in warning
    assert warnings(mu=0.5) == []


def test_fednova_reaches_minimum_of_the_mean_loss_unlike_fedavg() -> None:
    """Two clients have the losses x^2 / 2 and (x - 1)^2 / 2, and train in 1 and 10 steps.

    The mean loss is minimal at 0.5. FedAvg ends near 10/11, the mean of both optima weighted by
    steps.
    """
    steps, optima, rate = [1, 10], [0.0, 1.0], 1e-3

    def limit(factors: list[float]) -> float:
        x = 0.3
        for _ in range(20_000):
            shrunk = [(1 - rate) ** count for count in steps]
            moved = [(1 - s) * (optimum - x) for s, optimum in zip(shrunk, optima, strict=True)]
            x += sum(f * step for f, step in zip(factors, moved, strict=True)) / 2
        return x

    normalised = normalising_factors([1.0, 1.0], [effective_steps(count) for count in steps])
    assert limit(normalised) == pytest.approx(0.5, abs=2e-3)
    assert limit([1.0, 1.0]) == pytest.approx(10 / 11, abs=2e-3)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_projection_is_the_nearest_point_of_the_simplex(scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for size in (1, 2, 9):
        values = scale * torch.randn(size, generator=generator, dtype=torch.float64)
        projected = project_onto_simplex(values)
        assert float(projected.sum()) == pytest.approx(1)
        torch.testing.assert_close(projected, nearest_on_simplex(values))


def test_fedbabu_with_0_fine_tuning_epochs_reports_no_fine_tuned_accuracy() -> None:
    assert run(run_spec(FedBABU(0))).rows[-1].get("accuracy_finetuned") is None
    assert run(run_spec(FedBABU(1))).rows[-1]["accuracy_finetuned"] is not None


def test_fedproto_refuses_prediction_by_prototypes_if_the_head_has_no_bias() -> None:
    check_composition([FedProto(predict="prototype")], NORMED_MLP)
    with pytest.raises(ValueError, match=r"method\.fedproto\.predict"):
        check_composition([FedProto(predict="prototype")], BiasFreeMlp())
