"""Test the ways to choose a learner, also in resumed runs and in studies.

The ways are: an option of raysim, an option of a user's package, and a Python object.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raysim
from raysim.api.declarations import Task
from raysim.api.learner import Learner, Parameters
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.cli import main
from raysim.experiment.config_files import load_yaml
from raysim.learners import SklearnLinear
from raysim.primitives.errors import RefusedError

QUICK = (
    "data=synthetic data.samples=200 data.test_samples=40 model=mlp "
    "partition.clients=4 schedule.cohort=2 "
    "runtime=inprocess tracking=none"
)
PACKAGE = """
import numpy as np
import raysim

class Middle(raysim.Learner):
    name = "middle"
    paper = ""

    def __init__(self, share: float = 0.5):
        self.share = share

    def initial(self, task, rng):
        return {"means": np.zeros((task.num_classes, int(np.prod(task.shape))))}

    def fit(self, parameters, inputs, labels, job):
        means = parameters["means"]
        for label in np.unique(labels):
            mean = inputs[labels == label].reshape(-1, means.shape[1]).mean(axis=0)
            means[label] += self.share * (mean - means[label])
        return parameters, None

    def predict(self, parameters, inputs):
        rows = inputs.reshape(len(inputs), -1)
        return -((rows[:, None] - parameters["means"][None]) ** 2).sum(axis=2)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    Path("middling/conf/learner").mkdir(parents=True)
    Path("middling/__init__.py").write_text(PACKAGE)
    Path("middling/conf/learner/middle.yaml").write_text("_target_: middling.Middle\nshare: 0.5\n")


class Unnamed(Learner):
    """A learner with a function as its argument, which a configuration file cannot store."""

    name = "unnamed"

    def __init__(self, function: Any):
        self.function = function

    def initial(self, task: Task, rng: np.random.Generator) -> Parameters:
        return np.zeros((int(np.prod(task.shape)), task.num_classes))

    def fit(
        self, parameters: Parameters, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Parameters, LocalResult | None]:
        return self.function(parameters), None

    def predict(self, parameters: Parameters, inputs: np.ndarray) -> np.ndarray:
        return np.asarray(inputs.reshape(len(inputs), -1) @ parameters)


def test_learner_option_and_learner_object_give_equal_runs() -> None:
    option = raysim.run(f"{QUICK} learner=sklearn_linear rounds=2", quiet=True, out="option")
    part = raysim.run(f"{QUICK} rounds=2", learner=SklearnLinear(), quiet=True, out="object")
    assert part.summary["model_sha256"] == option.summary["model_sha256"]
    assert load_yaml(Path("object/config.yaml"))["learner"] == {
        "_target_": "raysim.learners.sklearn_linear.SklearnLinear",
        "estimator": "SGDClassifier",
        "options": {},
    }


def test_interrupted_run_of_a_learner_resumes_to_the_same_bits() -> None:
    words = f"{QUICK} learner=sklearn_linear learner.options.alpha=0.01 method=fedavgm"
    straight = raysim.run(f"{words} rounds=3", quiet=True, out="straight")
    raysim.run(f"{words} rounds=1", quiet=True, out="resumed")
    resumed = raysim.run("out=resumed resume=latest rounds=3", quiet=True)
    assert resumed.summary["model_sha256"] == straight.summary["model_sha256"]
    with pytest.raises(RefusedError, match=r"learner\.options\.alpha"):
        raysim.run("out=resumed resume=latest learner.options.alpha=0.1 rounds=4", quiet=True)


@pytest.mark.usefixtures("package")
def test_learner_of_a_package_can_be_chosen_if_the_package_is_allowed() -> None:
    allow = ["middling"]
    with pytest.raises(RefusedError, match="--allow middling"):
        raysim.build(f"{QUICK} learner=middle")
    words = f"{QUICK} learner=middle learner.share=0.25"
    straight = raysim.run(f"{words} rounds=2", allow=allow, quiet=True, out="straight")
    raysim.run(f"{words} rounds=1", allow=allow, quiet=True, out="resumed")
    resumed = raysim.run("out=resumed resume=latest rounds=2", allow=allow, quiet=True)
    assert resumed.summary["model_sha256"] == straight.summary["model_sha256"]
    assert resumed.experiment.spec.methods[0].share == 0.25  # type: ignore[attr-defined]


def test_learner_that_cannot_be_stored_must_be_passed_again_to_resume() -> None:
    learner = Unnamed(lambda parameters: parameters + 1)
    raysim.run(f"{QUICK} rounds=1", learner=learner, quiet=True, out="run")
    with pytest.raises(RefusedError, match="learner"):
        raysim.run("out=run resume=latest rounds=2", quiet=True)
    result = raysim.run("out=run resume=latest rounds=2", learner=learner, quiet=True)
    assert result.summary["rounds"] == 2


@pytest.mark.slow
def test_study_compares_learners(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{QUICK} learner=none,sklearn_linear rounds=1 seed=0,1 out=study"
    with pytest.raises(SystemExit) as end:
        main(["study", *words.split()])
    assert end.value.code == 0
    assert len(list(Path("study/runs").iterdir())) == 4
    assert "learner=sklearn_linear – learner=none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("learner=sklearn", "learner=sklearn"),
        ("learner=sklearn_linear learner.estimator=SGD", r"learner\.estimator"),
        ("learner=sklearn_linear learner.options.alfa=1", r"learner\.options"),
        ("learner.estimator=Perceptron", r"learner\.estimator"),
        ("learner=sklearn_linear method=fedprox", "fedprox.*sklearn_linear"),
    ],
)
def test_error_of_a_wrong_learner_setting_mentions_its_key(words: str, key: str) -> None:
    with pytest.raises(RefusedError, match=key):
        raysim.build(f"{QUICK} {words}")


def test_wrong_learner_and_learner_in_the_argument_methods_are_refused() -> None:
    with pytest.raises(RefusedError, match="learner"):
        raysim.build(QUICK, learner=raysim.Observer())  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match="sklearn_linear"):
        raysim.build(f"{QUICK} learner=sklearn_linear", methods=[SklearnLinear()])
