"""Test a user's metrics and those of torchmetrics, on every set of samples and in every process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import cohen_kappa_score
from tiny_runs import NORMED_MLP, coordinate, run, run_spec, run_to_end, several_workers, tiny_data
from torch import Tensor

import raysim
from raysim.api.metrics import Metric
from raysim.commands.sweep.session import _usual_mode
from raysim.experiment.config_files import load_yaml
from raysim.methods.fedbn import FedBN
from raysim.primitives.errors import RefusedError
from raysim.results.history import lower_metrics
from raysim.results.measures import better_direction
from raysim.training.run_spec import RunSpec

SMALL: dict[str, Any] = {
    "data": "synthetic",
    "model": "mlp",
    "partition": {"clients": 4, "validation_fraction": 0.2},
    "schedule": {"cohort": 2},
    "rounds": 2,
    "runtime": "inprocess",
    "tracking": "none",
    "quiet": True,
}
OWN = """
def right(outputs, labels):
    return outputs.argmax(1) == labels

class Entropy:
    higher_is_better = False
    __name__ = "entropy"

    def __call__(self, outputs, labels):
        return -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1)
"""


def brier(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.softmax(1) - torch.eye(outputs.shape[1])[labels]).square().sum(1)


def kappa(outputs: Tensor, labels: Tensor) -> float:
    return float(cohen_kappa_score(labels, outputs.argmax(1)))


LOWER = Metric(brier, higher=False)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("ownmetrics.py").write_text(OWN)


# --- scores -------------------------------------------------------------------------------
def test_custom_metrics_score_the_central_test_set_and_each_client() -> None:
    result = raysim.run(**SMALL, metrics=["accuracy", LOWER, kappa])
    row = result.rows[-1]
    central = result.predictions()
    outputs, labels = torch.from_numpy(central.scores), torch.from_numpy(central.labels)
    assert row["brier_global"] == pytest.approx(float(brier(outputs, labels).mean()), rel=1e-6)
    assert row["kappa_global"] == pytest.approx(kappa(outputs, labels))
    kappas, briers = [], []
    for client in range(4):
        own = result.predictions(client)
        outputs, labels = torch.from_numpy(own.scores), torch.from_numpy(own.labels)
        kappas.append(kappa(outputs, labels))
        briers.append(float(brier(outputs, labels).mean()))
    assert result.clients["kappa"].tolist() == pytest.approx(kappas)
    assert row["kappa"] == pytest.approx(np.mean(kappas))
    assert row["kappa_worst"] == pytest.approx(min(kappas))
    assert row["brier_worst"] == pytest.approx(max(briers), rel=1e-6)
    assert result.summary["metric"] == "accuracy" and "kappa_validation" in row


def test_custom_metrics_do_not_change_training() -> None:
    plain = raysim.run(**SMALL)
    scored = raysim.run(**SMALL, metrics=["accuracy", kappa, "auroc"])
    assert scored.summary["model_sha256"] == plain.summary["model_sha256"]
    assert scored.rows[-1]["accuracy"] == plain.rows[-1]["accuracy"]


def test_custom_metrics_score_domains_and_unseen_clients() -> None:
    settings = {**SMALL, "partition": "domain", "evaluate.unseen": 0.3, "data.domains": 3}
    row = raysim.run(**settings, metrics=[kappa]).rows[-1]
    assert {"kappa_unseen", "kappa_unseen_worst", "kappa_worst_domain"} <= row.keys()
    assert {"kappa.domain 0", "kappa.domain 1"} & row.keys()


def test_mean_of_scores_leaves_out_undefined_ones() -> None:
    def undefined(outputs: Tensor, labels: Tensor) -> float:
        return 0.5 if labels[0] else float("nan")

    metrics = ["accuracy", Metric(undefined, per="set")]
    result = raysim.run(**{**SMALL, "partition": {"clients": 10}}, metrics=metrics)
    scores = result.clients["undefined"]
    assert 0 < scores.isna().sum() < 10
    assert result.rows[-1]["undefined"] == result.rows[-1]["undefined_worst"] == 0.5


# --- names --------------------------------------------------------------------------------
def test_metric_can_be_named_by_its_import_path() -> None:
    words = "evaluate.metrics=accuracy+ownmetrics.right+ownmetrics.Entropy"
    result = raysim.run(words, **SMALL, allow=["ownmetrics"], out="run")
    row = result.rows[-1]
    assert row["right"] == row["accuracy"] and 0 < row["entropy"] < np.log(10)
    config = load_yaml(Path("run/config.yaml"))
    assert config["evaluate"]["lower"] == ["entropy"]
    assert lower_metrics(config) >= {"entropy", "mae"}
    with pytest.raises(
        RefusedError, match=r"^evaluate\.metrics=ownmetrics\.right .*--allow ownmetrics"
    ):
        raysim.run(words, **SMALL)


def test_torchmetrics_can_be_chosen_by_name() -> None:
    pytest.importorskip("torchmetrics")
    result = raysim.run(**SMALL, metrics=["accuracy", "cohen_kappa", "calibration_error"])
    central = result.predictions()
    expected = cohen_kappa_score(central.labels, central.classes)
    assert result.rows[-1]["cohen_kappa_global"] == pytest.approx(expected, abs=1e-6)
    assert result.experiment.spec.settings.evaluate.lower == ["calibration_error"]


def test_metrics_of_torchmetrics_can_score_regression() -> None:
    pytest.importorskip("torchmetrics")
    settings = {**SMALL, "data": "diabetes", "partition": {"name": "iid", "clients": 4}}
    settings |= {"partition": "iid", "partition.clients": 4}
    row = raysim.run(**settings, metrics=["mae", "r2_score", "mean_absolute_error"]).rows[-1]
    assert row["mean_absolute_error_global"] == pytest.approx(row["mae_global"], rel=1e-5)
    assert row["r2_score_global"] < 1


@pytest.mark.parametrize(
    ("metrics", "key"),
    [
        (["accuracy", "accuracy"], r"evaluate\.metrics has accuracy more than once"),
        (["acuracy"], r"evaluate\.metrics=acuracy"),
        (["confusion_matrix"], "confusion_matrix"),
        ([lambda outputs, labels: outputs[:, 0]], "name a column"),
        ([Metric(lambda outputs, labels: labels[:3], name="cut")], "cut returns the shape"),
        ([Metric(lambda outputs, labels: 1 / 0, name="broken")], "broken fails"),
        ([Metric(brier, name="loss")], r"evaluate\.metrics: loss"),
        ([3], "metrics=3"),
        ("accuracy", "metrics='accuracy'"),
    ],
)
def test_wrong_metrics_passed_by_the_user_are_refused(metrics: Any, key: str) -> None:
    pytest.importorskip("torchmetrics")
    with pytest.raises(RefusedError, match=key):
        raysim.build(**{k: v for k, v in SMALL.items() if k != "quiet"}, metrics=metrics)


def test_unknown_metric_is_refused_as_a_value_of_the_key_evaluate_lower() -> None:
    with pytest.raises(RefusedError, match=r"^evaluate\.lower: brierr .*brier"):
        raysim.run(**SMALL, metrics=["accuracy", brier], **{"evaluate.lower": ["brierr"]})


# --- the main metric ----------------------------------------------------------------------
def test_main_metric_selects_the_best_model_and_is_compared_with_thresholds() -> None:
    settings = {**SMALL, "rounds": 4, "thresholds": [1.5, 0.0], "evaluate.metric": "brier"}
    result = raysim.run(**settings, metrics=["accuracy", LOWER])
    assert result.summary["metric"] == "brier"
    best = result.summary["best_model"]
    values = [row["brier_validation"] for row in result.rows]
    assert best["by"] == "brier_validation" and best["value"] == min(values)
    assert result.summary["rounds_to"] == {"1.50": 1, "0.00": None}
    assert result.summary["best5_mean"] == pytest.approx(np.mean([r["brier"] for r in result.rows]))


def test_sweeps_and_studies_minimise_metrics_for_which_lower_is_better() -> None:
    spec = raysim.build(
        **{k: v for k, v in SMALL.items() if k != "quiet"}, metrics=["accuracy", LOWER]
    ).spec
    metrics = spec.task.metrics
    assert _usual_mode("brier_validation", metrics) == "min"
    assert _usual_mode("accuracy_global", metrics) == "max"
    assert _usual_mode("loss_global", metrics) == "min"
    assert better_direction("brier_worst", False, {"brier"}, {"accuracy"}) == -1
    assert better_direction("kappa_global", False, {"brier"}, {"kappa"}) == 1


# --- the same bits ------------------------------------------------------------------------
def with_metrics(spec: RunSpec) -> RunSpec:
    evaluate = replace(spec.settings.evaluate, metrics=["accuracy", "brier", "kappa", "auroc"])
    own = {"brier": LOWER, "kappa": Metric(kappa)}
    return replace(spec, own_metrics=own, settings=replace(spec.settings, evaluate=evaluate))


@pytest.mark.parametrize("methods", [[], [FedBN()]])
def test_custom_metrics_are_equal_on_three_workers_and_after_resume(
    methods: list[Any], tmp_path: Path
) -> None:
    spec = with_metrics(run_spec(*methods, model=NORMED_MLP, data=tiny_data()))
    one = run(spec, rounds=4)
    three = run_to_end(coordinate(spec, rounds=4, runtime=several_workers(spec, 3)))
    assert one.history == three.history and one.bits == three.bits
    run(spec, rounds=4, checkpoint_every=2, folder=str(tmp_path))
    resumed = run(spec, rounds=4, resume=str(tmp_path / "checkpoints" / "round-000002"))
    assert resumed.history == one.history
