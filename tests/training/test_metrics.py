"""Test every metric against scikit-learn, on samples and in a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    hamming_loss,
    mean_absolute_error,
    mean_squared_error,
    roc_auc_score,
    top_k_accuracy_score,
)
from tiny_runs import run, run_spec
from torch import Tensor

from raysim.api.declarations import Evaluation, Local
from raysim.api.messages import ScoringTask
from raysim.api.metrics import ScoresOfRows, resolve_metrics
from raysim.api.objectives import OBJECTIVES
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import CSR, IID, Partition
from raysim.data.sources import NumPy
from raysim.models import Mlp
from raysim.primitives.kinds import POSITION_KINDS, Kind
from raysim.results.observers import UndefinedMetrics
from raysim.simulation.schedule import Synchronous

Reference = Callable[[np.ndarray, np.ndarray], float]


def top_five_accuracy(labels: np.ndarray, outputs: np.ndarray) -> float:
    """Return the top-5 accuracy, which is 1 if there are at most five classes."""
    classes = outputs.shape[1]
    if classes <= 5:
        return 1.0
    return float(top_k_accuracy_score(labels, outputs, k=5, labels=np.arange(classes)))


def mean_area_under_curve(labels: np.ndarray, outputs: np.ndarray) -> float:
    """Return the area under the ROC curve, as a mean over columns of `labels`.

    Columns that do not contain both 0 and 1 are left out. The result is nan if none is left.
    labels, outputs: the labels, 0 or 1, and the model's scores, [samples, labels].
    """
    areas = [
        roc_auc_score(labels[:, column], outputs[:, column])
        for column in range(labels.shape[1])
        if len(np.unique(labels[:, column])) == 2
    ]
    return float(np.mean(areas)) if areas else np.nan


REFERENCES: dict[tuple[Kind, str], Reference] = {
    ("classification", "accuracy"): lambda y, out: accuracy_score(y, out.argmax(1)),
    ("classification", "top5_accuracy"): top_five_accuracy,
    ("classification", "f1"): lambda y, out: f1_score(y, out.argmax(1), average="macro"),
    ("classification", "auroc"): lambda y, out: mean_area_under_curve(
        y[:, None] == np.arange(out.shape[1]), softmax(out.astype(np.float64), axis=1)
    ),
    ("multilabel", "auroc"): mean_area_under_curve,
    ("multilabel", "f1"): lambda y, out: f1_score(y, out > 0, average="macro"),
    ("multilabel", "f1_samples"): lambda y, out: f1_score(y, out > 0, average="samples"),
    ("multilabel", "label_accuracy"): lambda y, out: 1 - hamming_loss(y, out > 0),
    ("regression", "mae"): mean_absolute_error,
    ("regression", "mse"): mean_squared_error,
}


def expected(kind: Kind, name: str, labels: np.ndarray, outputs: np.ndarray) -> float:
    """Return a metric as scikit-learn computes it, with its defaults."""
    if (
        kind == "multilabel" and labels.shape[1] == 1 and name != "auroc"
    ):  # which it takes for two classes
        labels, outputs = (
            np.pad(labels, ((0, 0), (0, 1))),
            np.pad(outputs, ((0, 0), (0, 1)), constant_values=-1),
        )
        share = 2.0 if name == "f1" else 1.0
        if name == "label_accuracy":
            return 1 - 2 * float(hamming_loss(labels, outputs > 0))
    else:
        share = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes that are absent
        return share * float(REFERENCES[kind, name](labels, outputs))


def scored(kind: Kind, name: str, labels: Tensor, outputs: Tensor) -> float:
    """Return a metric as raysim computes it."""
    metric = OBJECTIVES[kind].metric(name)
    assert metric is not None
    rows = ScoresOfRows([metric])
    rows.add(outputs, labels)
    return metric.summarise(rows.arrays()[0])


def test_every_metric_has_a_reference_implementation_in_the_tests() -> None:
    names = {
        (kind, metric.name)
        for kind, objective in OBJECTIVES.items()
        for metric in objective.metrics
        if kind not in POSITION_KINDS  # tests/data/test_{positions,causal}.py
    }
    assert names == REFERENCES.keys()


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("samples", [1, 2, 60])
@pytest.mark.parametrize(("kind", "name"), REFERENCES)
def test_metric_equals_that_of_scikit_learn(
    kind: Kind, name: str, samples: int, width: int
) -> None:
    shares = (0.0,) if kind == "regression" else (0.0, 0.1, 0.5, 1.0)
    for fraction in shares:
        check_metric(kind, name, samples, width, fraction)


def check_metric(kind: Kind, name: str, samples: int, width: int, fraction: float) -> None:
    """Compare a metric with scikit-learn's on random labels and outputs.

    width: the number of outputs of each sample.
    fraction: for classification, the fraction of the classes from which labels are drawn; no sample
    has one of the other classes. For "multilabel", the probability that a label is 1.
    """
    rng = np.random.default_rng([samples, width])
    outputs = rng.normal(size=(samples, width)).astype(np.float32)
    if kind == "classification":
        labels = rng.integers(
            max(1, round(fraction * width)), size=samples
        )  # the other classes are absent
    elif kind == "multilabel":
        labels = (rng.random((samples, width)) < fraction).astype(np.float32)
        outputs[:, ::2] = np.where(
            fraction < 0.5, -1, outputs[:, ::2]
        )  # labels that are never predicted
    else:
        labels = rng.normal(size=(samples, width)).astype(np.float32)
    found = scored(kind, name, torch.from_numpy(labels), torch.from_numpy(outputs))
    assert found == pytest.approx(
        expected(kind, name, labels, outputs), rel=1e-6, abs=1e-7, nan_ok=True
    )


def arrays(kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [120, 4] and targets of a kind of task.

    The targets of "multilabel" have seven labels. Two of the seven labels are rare, and one label
    never occurs.
    """
    rng = np.random.default_rng(5)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    if kind == "classification":
        return x, rng.integers(8, size=120)
    if kind == "multilabel":
        return x, (np.c_[x > 0.3, x[:, :2] > 2.0, x[:, :1] > 99]).astype(int)
    return x, np.c_[x[:, 0] ** 2, x[:, 1]]


def split(kind: Kind, folder: Path) -> FederatedData:
    """Return data of four clients with training and test samples, and of a fifth without any.

    kind: the kind of task.
    folder: where the data set is written.
    """
    x, y = arrays(kind)
    np.savez(folder / "train.npz", x=x, y=y)
    np.savez(folder / "test.npz", x=x[:25] + 0.1, y=y[:25])
    data = federate(NumPy(str(folder), cache=str(folder)), IID(clients=4), 0)
    parts = [
        CSR(part.indices, np.append(part.offsets, part.offsets[-1]))
        for part in _train_and_test(data)
    ]
    return replace(data, partition=Partition(*parts))


def _train_and_test(data: FederatedData) -> list[CSR]:
    return [data.partition.train, data.partition.test]


@pytest.mark.parametrize(("kind", "name"), REFERENCES)
def test_scores_in_the_history_equal_those_of_scikit_learn(
    kind: Kind, name: str, tmp_path: Path
) -> None:
    data, local = split(kind, tmp_path), Local(lr=0.5, batch=8)
    spec = run_spec(model=Mlp((8,)), data=data, local=local)
    result = run(spec, Synchronous(4), evaluate=Evaluation(metric=name))
    worker: Any = result.coordinator.runtime.members[0]  # type: ignore[attr-defined]
    published = result.coordinator.server.published()
    row = result.rows[-1]

    def reference(rows: np.ndarray) -> float:
        labels, outputs = worker.predictions(ScoringTask(-1, rows), published)
        return expected(kind, name, labels, outputs)

    clients = [reference(data.partition.test.rows(client)) for client in range(4)]
    worst = max(clients) if name in ("mae", "mse") else min(clients)
    assert row[name] == pytest.approx(np.mean(clients), rel=1e-5)
    assert row[f"{name}_worst"] == pytest.approx(worst, rel=1e-5)
    assert row[f"{name}_global"] == pytest.approx(reference(data.central), rel=1e-5)


def test_error_for_two_main_metrics_suggests_setting_evaluate_metrics(tmp_path: Path) -> None:
    spec = run_spec(split("classification", tmp_path))
    with pytest.raises(ValueError, match=r"evaluate\.metrics=accuracy"):
        resolve_metrics("accuracy+f1", (), spec.task)


def test_warning_of_metric_that_is_nan_appears_once() -> None:
    printed: list[str] = []
    observer = UndefinedMetrics(printed.append)
    row = {"round": 1, "auroc": 0.5, "auroc_worst": 0.1, "auroc_global": None, "f1": 0.2}
    row |= {"f1_worst": 0.1, "f1_global": float("nan")}
    for number in (1, 2):
        observer.on_round(Mock(), Mock(row={**row, "round": number}))
    assert len(printed) == 1 and "f1_global" in printed[0] and "auroc" not in printed[0]
