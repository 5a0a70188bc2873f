"""Compare the losses and metrics of every type of task with values that are computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import run, run_spec
from torch import Tensor, tensor

from raysim.api.declarations import Local
from raysim.api.objectives import OBJECTIVES
from raysim.data.batches import Pipeline
from raysim.data.federated import federate
from raysim.data.partition import IID
from raysim.data.sources import NumPy
from raysim.models import Mlp
from raysim.primitives.kinds import Kind
from raysim.simulation.schedule import Synchronous

OUT = tensor([[2.0, -1.0, 3.0], [-1.0, -2.0, -3.0]])
THERE = tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("kind", "name", "labels", "scores"),
    [
        ("classification", "accuracy", tensor([2, 1]), [True, False]),
        ("classification", "top5_accuracy", tensor([1, 2]), [True, True]),
        ("multilabel", "f1", THERE, [[3, 2, 1], [0, 0, 0]]),
        ("multilabel", "f1_samples", THERE, [0.5, 0.0]),
        ("multilabel", "label_accuracy", THERE, [1 / 3, 1.0]),
        ("regression", "mae", torch.zeros(2, 3), [2.0, 2.0]),
        ("regression", "mse", torch.zeros(2, 3), [14 / 3, 14 / 3]),
    ],
)
def test_scores_of_single_samples_equal_values_computed_by_hand(
    kind: Kind, name: str, labels: Tensor, scores: list[Any]
) -> None:
    metric = OBJECTIVES[kind].metric(name)
    assert metric is not None
    rows = metric.rows(OUT, labels)
    np.testing.assert_allclose(rows.numpy(), scores, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "labels", "losses"),
    [
        (
            "classification",
            tensor([2, 0]),
            [math.log1p(math.exp(-1) + math.exp(-4)), math.log1p(math.exp(-1) + math.exp(-2))],
        ),
        (
            "multilabel",
            THERE,
            [sum(map(math.log1p, map(math.exp, row))) / 3 for row in ((-2, 1, 3), (-1, -2, -3))],
        ),
        ("regression", torch.zeros(2, 3), [14 / 3, 14 / 3]),
    ],
)
def test_loss_is_mean_over_samples(kind: Kind, labels: Tensor, losses: list[float]) -> None:
    objective = OBJECTIVES[kind]
    assert objective.losses(OUT, labels).tolist() == pytest.approx(losses)
    assert float(objective.loss(OUT, labels)) == pytest.approx(np.mean(losses))


def test_top5_prediction_is_wrong_if_the_true_class_has_the_sixth_score() -> None:
    out = torch.arange(6.0).repeat(2, 1)
    assert OBJECTIVES["classification"].metrics[1].rows(out, tensor([0, 1])).tolist() == [
        False,
        True,
    ]


def test_inputs_are_normalised_and_tokens_are_not() -> None:
    pipeline = Pipeline((1.0, 2.0), (2.0, 4.0))
    rows = tensor([[1.0, 2.0], [3.0, 6.0]])
    assert pipeline.normalise(rows).tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert rows.tolist() == [[1.0, 2.0], [3.0, 6.0]]  # the stored ones stay
    waves = torch.ones(1, 2, 3)
    assert pipeline.normalise(waves).tolist() == [[[0.0] * 3, [-0.25] * 3]]
    tokens = tensor([[4253, 0]])
    assert pipeline.normalise(tokens) is tokens


def test_step_of_a_regression_task_is_gradient_descent_on_the_squared_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=(12, 2))
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.savez(tmp_path / "test.npz", x=x[:4], y=y[:4])
    data = federate(NumPy(str(tmp_path), cache=str(tmp_path)), IID(clients=1, test_fraction=0.0), 0)
    ended = run(
        run_spec(model=Mlp((4,)), data=data, local=Local(lr=0.1, batch=12)),
        Synchronous(1),
        rounds=1,
    )
    net = Mlp((4,)).build((3,), 2, 3)
    loss = (
        (net(torch.tensor(x, dtype=torch.float32)) - torch.tensor(y, dtype=torch.float32))
        .square()
        .mean()
    )
    loss.backward()
    for name, parameter in net.named_parameters():
        stepped = (parameter - 0.1 * parameter.grad).detach().numpy()  # type: ignore[operator]
        assert np.allclose(ended.tensors[f"model.{name}"], stepped, atol=1e-6)
    assert ended.rows[0]["train_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_multi_label_classification_is_learnt(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(200, 4)).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=x, y=(x > 0.3).astype(int))
    data = federate(NumPy(str(tmp_path), cache=str(tmp_path)), IID(clients=4), 0)
    rows = run(
        run_spec(model=Mlp((16,)), data=data, local=Local(lr=1.0, batch=16)),
        Synchronous(4),
        rounds=15,
    ).rows
    assert rows[-1]["f1_global"] > 0.8 > rows[0]["f1_global"]  # type: ignore[operator]
    assert 0 <= rows[-1]["f1_worst"] <= rows[-1]["f1"] <= 1  # type: ignore[operator]
