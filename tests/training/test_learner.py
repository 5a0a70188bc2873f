"""Test learners: models that are not networks of PyTorch."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
from tiny_runs import BUFFER, ROUNDS, run, run_spec, several_workers

import raysim
from raysim.api.declarations import Local, Task
from raysim.api.learner import Learner, LearnerNetwork, Parameters
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.learners import SklearnLinear
from raysim.methods.ditto import Ditto
from raysim.methods.fedala import FedALA
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedprox import FedProx
from raysim.methods.partialfed import PartialFed
from raysim.primitives.errors import RefusedError
from raysim.simulation.schedule import Schedule


class Centroids(Learner):
    """A learner that predicts the class whose mean is nearest, and trains by moving the means.

    wrong: the kind of mistake that the learner makes; "": none.
    """

    name = "centroids"

    def __init__(self, wrong: str = ""):
        self.wrong = wrong

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        size = int(np.prod(task.shape))
        means = rng.normal(size=(task.num_classes, size)).astype(np.float32)
        return {"layers": [means, (np.zeros(task.num_classes),)], "seen": np.zeros(3, np.int64)}

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult]:
        means, (bias,) = parameters["layers"]
        for label in np.unique(labels):
            means[label] = inputs[labels == label].reshape(-1, means.shape[1]).mean(axis=0)
        job.state["jobs"] = object() if self.wrong == "state" else job.state["jobs"] + 1
        if self.wrong == "shape":
            means = means[:1]
        if self.wrong == "type":
            means = means.astype(str)
        if self.wrong == "exit":
            sys.exit(3)
        if self.wrong == "error":
            raise KeyError("something")
        if self.wrong == "print":
            print("printed by a learner")
        if self.wrong == "nan":
            means = means * np.nan
        result: Any = {"layers": [means, (bias,)], "seen": parameters["seen"] + 1}
        if self.wrong == "name":
            result["other"] = means
        if self.wrong == "pair":
            return result
        if self.wrong == "result":
            return result, {"loss": 1.0}  # type: ignore[return-value]
        if self.wrong == "float":
            result["seen"] = parameters["seen"] + 0.5
        return result, LocalResult(steps=1, metrics={"classes": len(np.unique(labels))})

    def setup(self, run: Setup) -> None:
        super().setup(run)
        run.client_state("jobs", lambda samples: 0)

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        if self.wrong == "outputs":
            return np.zeros(3)
        if self.wrong == "predict":
            sys.exit(3)
        means, (bias,) = parameters["layers"]
        rows = inputs.reshape(len(inputs), -1)
        distances = ((rows[:, None] - means[None]) ** 2).sum(axis=2)
        return np.asarray(bias - distances)


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_learner_gives_the_same_bits_on_two_workers(schedule: Schedule) -> None:
    others = [FedBuff()] if schedule is BUFFER else []
    spec = run_spec(Centroids(), *others)
    one = run(spec, schedule, rounds=4)
    two = run(spec, schedule, runtime=several_workers(spec, 2), rounds=4)
    assert one.bits == two.bits
    assert one.rows[-1]["accuracy_global"] > one.rows[0]["accuracy_global"] - 0.1
    assert one.rows[0]["centroids.classes"] > 0


@pytest.mark.parametrize(
    "method", [Ditto(), FedALA(), PartialFed()], ids=lambda method: method.name
)
def test_learner_refuses_methods_that_need_gradients(method: Method) -> None:
    with pytest.raises(ValueError, match=rf"'{method.name}'.*'centroids'"):
        run(run_spec(Centroids(), method), rounds=1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("shape", "'layers:0'.*shape"),
        ("type", "'layers:0'.*type"),
        ("float", "'seen'.*type"),
        ("nan", "nan.*centroids"),
        ("name", "'other'"),
        ("pair", "pair"),
        ("result", "LocalResult"),
        ("state", r"centroids\.jobs"),
        ("exit", "SystemExit: 3"),
        ("error", "KeyError.*something"),
    ],
)
def test_error_of_a_learner_fails_only_the_client_with_the_error(wrong: str, text: str) -> None:
    result = run(run_spec(Centroids(wrong)), rounds=1, tolerate=1.0)
    assert result.failures and result.rows[0]["failures"] == len(result.failures)
    for failure in result.failures:
        assert re.search(rf"^client {failure.client}, version 0.*{text}", failure.error)
        assert "raysim/" not in failure.traceback or wrong == "nan"
        if wrong in ("exit", "error"):
            assert "in fit" in failure.traceback


def test_output_printed_by_a_learner_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    silent, loud = run(run_spec(Centroids()), rounds=1), run(run_spec(Centroids("print")), rounds=1)
    assert loud.bits == silent.bits
    assert "printed by a learner" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "text"), [("outputs", "predict of Centroids"), ("predict", "'centroids'.*SystemExit")]
)
def test_error_of_a_predict_function_contains_the_name_of_the_learner(
    wrong: str, text: str, tmp_path: Any
) -> None:
    words = "data=synthetic data.samples=100 partition.clients=4 schedule.cohort=2 rounds=1"
    with pytest.raises(Exception, match=text):
        raysim.run(
            f"{words} runtime=inprocess tracking=none",
            learner=Centroids(wrong),
            out=str(tmp_path / "run"),
            quiet=True,
        )


@pytest.mark.parametrize(
    ("initial", "text"),
    [(sys.exit, "SystemExit"), (lambda: {"a": "text"}, "'a'.*bytes"), (lambda: None, "bytes")],
    ids=["exit", "text", "none"],
)
def test_run_is_refused_if_the_learner_creates_no_valid_initial_parameters(
    initial: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Centroids, "initial", lambda self, task, rng: initial())
    with pytest.raises(RefusedError, match=text):
        raysim.build("data=synthetic runtime=inprocess", learner=Centroids())


def test_learner_parameters_returned_as_arrays_keep_types_and_nesting() -> None:
    task = Task((1, 2, 2), num_classes=3, clients=2)
    learner = Centroids()
    initial = learner.initial(task, np.random.default_rng(0))
    network = LearnerNetwork(learner, initial, task.dtype, 3)
    assert sorted(network.dtypes) == ["layers:0", "layers:1:0", "seen"]
    copy = network.parameters_as_arrays()
    assert isinstance(copy["layers"][1], tuple) and copy["seen"].dtype == np.int64
    np.testing.assert_array_equal(copy["layers"][0], initial["layers"][0])


@pytest.mark.parametrize("key", ["training", "learner", "a.b", ""])
def test_learner_parameters_may_have_any_name(key: str) -> None:
    task = Task((1, 2, 2), num_classes=3, clients=2)
    initial: Any = {key: np.ones(2), "a_b": np.zeros(2)} if key else np.ones(2)
    network = LearnerNetwork(Centroids(), initial, task.dtype, 3)
    copy = network.parameters_as_arrays()
    np.testing.assert_array_equal(copy[key] if key else copy, np.ones(2))


def test_error_contains_both_names_if_a_learner_is_combined_with_fedprox() -> None:
    with pytest.raises(ValueError, match=r"'fedprox'.*'centroids'"):
        run(run_spec(Centroids(), FedProx(0.1)), rounds=1)


def test_sklearn_classifier_learns_digits(tmp_path: Any) -> None:
    result = raysim.run(
        "rounds=10",
        methods=[SklearnLinear(options={"alpha": 0.001}), "fedavgm"],
        runtime="inprocess",
        tracking="none",
        out=str(tmp_path / "run"),
        quiet=True,
    )
    assert result.summary["accuracy_global"] > 0.85
    assert len(result.predictions().classes) > 300


def test_sklearn_regressor_learns_a_line(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(400, 3)).astype(np.float32)
    targets = inputs @ np.array([1.0, -2.0, 0.5], np.float32) + 0.3
    result = raysim.run(
        "model=mlp rounds=20",
        methods=[SklearnLinear("SGDRegressor", {"learning_rate": "constant", "eta0": 0.05})],
        data=((inputs[:300], targets[:300]), (inputs[300:], targets[300:])),
        partition="iid",
        runtime="inprocess",
        tracking="none",
        out=str(tmp_path / "run"),
        quiet=True,
    )
    scores = result.predictions().scores[:, 0]
    assert np.abs(scores - targets[300:]).mean() < 0.1


def test_sklearn_regressor_refuses_data_with_classes() -> None:
    with pytest.raises(ValueError, match="SGDRegressor"):
        run(run_spec(SklearnLinear("SGDRegressor"), local=Local()), rounds=1)
