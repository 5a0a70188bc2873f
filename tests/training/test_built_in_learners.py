"""Test the learners of `raysim.learners`: same bits, resumed runs, and what they learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_runs import BUFFER, run, run_spec, several_workers

import raysim
from raysim.api.declarations import Local, Task
from raysim.api.learner import LearnerUpdate
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.learners import (
    HFTrainer,
    LightningTrainer,
    SklearnKMeans,
    SklearnLinear,
    XGBoostBagging,
)
from raysim.methods.fedbuff import FedBuff
from raysim.primitives.errors import RefusedError
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import declare_run

# Functions, because some learners import large packages.
LEARNERS: dict[str, Callable[[], Method]] = {
    "sgd": SklearnLinear,
    "logistic": partial(SklearnLinear, "LogisticRegression", {"max_iter": 3}),
    "kmeans": partial(SklearnKMeans, clusters=5),
    "xgboost": partial(XGBoostBagging, depth=2),
    "hf_trainer": HFTrainer,
    "lightning": LightningTrainer,
}
QUICK = "runtime=inprocess tracking=none"


def _run(words: str, out: Path, **parts: Any) -> raysim.Result:
    return raysim.run(f"{QUICK} {words}", out=str(out), quiet=True, **parts)


@pytest.mark.parametrize("name", LEARNERS)
def test_built_in_learner_is_bit_identical_on_one_and_two_workers(name: str) -> None:
    spec = run_spec(LEARNERS[name](), FedBuff())
    one = run(spec, BUFFER, rounds=2)
    two = run(spec, BUFFER, runtime=several_workers(spec, 2), rounds=2)
    assert one.bits == two.bits
    states = [result.coordinator.server.state for result in (one, two)]
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key
    assert not one.failures


@pytest.mark.slow  # 12 runs with folders and pictures, 2 seconds each
@pytest.mark.parametrize("name", LEARNERS)
def test_built_in_learner_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    words = "data=synthetic data.samples=200 model=mlp partition.clients=4 schedule.cohort=2"
    learner = LEARNERS[name]()
    straight = _run(f"{words} rounds=3", tmp_path / "straight", learner=learner)
    _run(f"{words} rounds=1", tmp_path / "resumed", learner=learner)
    resumed = _run("resume=latest rounds=3", tmp_path / "resumed")
    for key in ("model_sha256", "state_sha256"):
        assert resumed.summary[key] == straight.summary[key]


@pytest.mark.parametrize(
    ("words", "least"),
    [
        ("learner=sklearn_linear learner.options.alpha=0.001 rounds=6", 0.85),
        ("learner=sklearn_linear learner.estimator=LogisticRegression rounds=3", 0.85),
        ("learner=sklearn_linear learner.estimator=sklearn.svm.LinearSVC rounds=3", 0.85),
        ("learner=xgboost learner.trees=2 rounds=4", 0.75),
        pytest.param(
            "learner=hf_trainer model=mlp local.lr=0.01 rounds=4", 0.6, marks=pytest.mark.slow
        ),
        pytest.param(
            "learner=lightning model=mlp local.lr=0.2 rounds=5", 0.4, marks=pytest.mark.slow
        ),
    ],
)
def test_built_in_learner_learns_digits(words: str, least: float, tmp_path: Path) -> None:
    result = _run(words, tmp_path / "run")
    assert result.summary["failures_total"] == 0
    assert result.summary["accuracy_global"] > least


class Recording(SklearnKMeans):
    """A k-means learner that records the training samples of each job."""

    samples: ClassVar[list[np.ndarray]] = []

    def fit(
        self, parameters: bytes, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[bytes, LocalResult]:
        self.samples.append(inputs.reshape(len(inputs), -1).astype(np.float64))
        return super().fit(parameters, inputs, labels, job)


def test_kmeans_round_is_a_step_of_lloyd() -> None:
    learner = Recording(clusters=5, epochs=0)
    spec = run_spec(learner)
    everybody = Synchronous(int(np.count_nonzero(spec.data.partition.train.counts)))
    states = [
        run(spec, everybody, rounds=rounds).coordinator.server.state["sklearn_kmeans.model"]
        for rounds in (1, 2)
    ]
    before, after = (learner.centers(words.numpy()[1:].tobytes())[0] for words in states)
    points = np.concatenate(Recording.samples[-everybody.cohort :])
    nearest = ((points[:, None] - before[None]) ** 2).sum(axis=2).argmin(axis=1)
    for cluster in range(5):
        members = points[nearest == cluster]
        expected = members.mean(axis=0) if len(members) else before[cluster]
        np.testing.assert_allclose(after[cluster], expected, rtol=1e-5, atol=1e-6)


def test_kmeans_finds_clusters_without_labels(tmp_path: Path) -> None:
    result = _run("learner=sklearn_kmeans learner.clusters=20 rounds=8", tmp_path / "run")
    assert result.summary["purity_global"] > 0.6


def test_xgboost_predicts_the_weighted_mean_of_the_clients_margins() -> None:
    import xgboost

    learner, task = XGBoostBagging(depth=3), Task((4,), num_classes=3, clients=2)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(60, 4)).astype(np.float32)
    labels = rng.integers(0, 3, 60)
    start = learner.initial(task, rng)
    added = []
    for half in (slice(0, 30), slice(30, 60)):
        booster = xgboost.Booster(learner._parameters(task, 1))
        booster.load_model(bytearray(start))
        booster.update(xgboost.DMatrix(inputs[half], label=labels[half]), 0)
        added.append(bytes(booster.save_raw("json")))
    updates = [
        LearnerUpdate(client, trees, weight, 30, 0)
        for client, trees, weight in zip((0, 1), added, (0.25, 0.75), strict=True)
    ]
    first = learner.predict(start, inputs)
    margins = [learner.predict(trees, inputs) - first for trees in added]
    joined = learner.predict(learner.aggregate(start, updates), inputs) - first
    np.testing.assert_allclose(joined, 0.25 * margins[0] + 0.75 * margins[1], atol=1e-5)
    again = learner.aggregate(learner.aggregate(start, updates), updates)
    np.testing.assert_allclose(learner.predict(again, inputs) - first, 2 * joined, atol=1e-5)
    assert len(json.loads(again)["learner"]["gradient_booster"]["model"]["trees"]) == 12


def test_xgboost_learns_regression_and_two_classes(tmp_path: Path) -> None:
    words = "model=mlp learner=xgboost rounds=8"
    regression = _run(f"{words} data=diabetes partition=iid", tmp_path / "regression")
    first, last = (regression.rows[row]["mae_global"] for row in (0, -1))
    assert first is not None and last is not None and last < 0.95 * first
    two_classes = _run(f"{words} data=breast_cancer", tmp_path / "classes")
    assert two_classes.summary["accuracy_global"] > 0.8


def test_lightning_training_equals_raysims_step_on_all_samples() -> None:
    """A job makes one step on all samples, so the order of the samples cannot matter."""
    spec = run_spec()
    local = replace(spec.settings.local, batch=10_000, epochs=1, steps=None, momentum=0.0)
    usual = run(run_spec(local=local), rounds=2)
    own = run(run_spec(LightningTrainer(), local=local), rounds=2)
    torch.testing.assert_close(
        own.coordinator.server.vector, usual.coordinator.server.vector, rtol=1e-5, atol=1e-6
    )
    for usual_row, own_row in zip(usual.rows, own.rows, strict=True):
        assert own_row["train_loss"] == pytest.approx(usual_row["train_loss"], rel=1e-4)


def test_hf_trainer_equals_steps_of_raysim_if_all_samples_are_one_batch() -> None:
    spec = run_spec()
    local = replace(spec.settings.local, batch=10_000, epochs=1, steps=None, momentum=0.0)
    local = replace(local, weight_decay=0.0)  # the Trainer decays no biases
    usual = run(run_spec(local=local), rounds=2)
    own = run(run_spec(HFTrainer({"optim": "sgd"}), local=local), rounds=2)
    torch.testing.assert_close(
        own.coordinator.server.vector, usual.coordinator.server.vector, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("learner=sklearn_linear learner.estimator=sklearn.cluster.KMeans", "learner"),
        ("learner=sklearn_linear learner.estimator=os.path", r"learner\.estimator"),
        ("learner=sklearn_linear learner.estimator=Ridge", r"learner\.estimator"),
        ("learner=sklearn_kmeans learner.clusters=0", r"learner\.clusters"),
        ("learner=xgboost learner.depth=0", r"learner\.depth"),
        ("learner=hf_trainer learner.options.foo=1", r"learner\.options"),
        ("learner=lightning learner.options.foo=1", r"learner\.options"),
    ],
)
def test_error_of_a_built_in_learner_contains_the_wrong_key(words: str, key: str) -> None:
    with pytest.raises(RefusedError, match=key):
        raysim.build(f"data=synthetic runtime=inprocess {words}")


def test_hf_trainer_warns_of_learning_rate_that_suits_only_sgd() -> None:
    def warnings(**options: Any) -> list[str]:
        local = Local(lr=options.pop("lr"))
        spec = run_spec(HFTrainer(options), local=local)
        return [text for text in declare_run(spec).warnings if "local.lr" in text]

    assert len(warnings(lr=0.1)) == 1
    assert not warnings(lr=0.001) + warnings(lr=0.1, optim="sgd")
