"""Test learners whose parameters are bytes, and learners that score sets of samples themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import BUFFER, ROUNDS, FinishedRun, run, run_spec, several_workers

import raysim
from raysim.api.declarations import Local, Task
from raysim.api.learner import EvaluationData, Learner, LearnerUpdate, Parameters
from raysim.api.local_job import LocalJob
from raysim.api.local_training import LocalResult
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.conformance import Check, checks
from raysim.experiment.describe import overview
from raysim.methods.dp_fedavg import DPFedAvg
from raysim.methods.fedbuff import FedBuff
from raysim.methods.fedopt import FedAvgM
from raysim.methods.krum import Krum
from raysim.primitives.errors import RefusedError
from raysim.simulation.fleet import Lognormal
from raysim.simulation.schedule import Oversample, Schedule, Synchronous

QUICK = (
    "data=synthetic data.samples=200 data.test_samples=40 model=mlp partition.clients=4 "
    "schedule.cohort=2 runtime=inprocess tracking=none"
)


ON_THE_CLOCK = ("virtual_seconds", "floats_down", "floats_up", "staleness", "lost")


class Means(Learner):
    """A learner that collects the class means of all clients, as JSON of growing size."""

    name = "means"

    def __init__(self, wrong: str = ""):
        self.wrong = wrong

    def initial(self, task: Task, rng: np.random.Generator) -> bytes:
        means = rng.normal(size=(task.num_classes, int(np.prod(task.shape)))).round(3)
        return json.dumps(
            [[label, 1.0, mean.tolist()] for label, mean in enumerate(means)]
        ).encode()

    def fit(
        self, parameters: bytes, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[Any, LocalResult]:
        rows = inputs.reshape(len(inputs), -1)
        means = [
            [int(label), 1.0, rows[labels == label].mean(axis=0).round(3).tolist()]
            for label in np.unique(labels)
        ]
        noise = float(np.random.rand())  # noqa: NPY002
        content: Any = json.dumps([*means, [0, noise, means[0][2]]]).encode()
        if self.wrong == "type":
            content = means
        return content, LocalResult(samples=len(rows))

    def aggregate(self, parameters: bytes, updates: Sequence[LearnerUpdate]) -> bytes:
        means = json.loads(parameters)
        for update in updates:
            for label, weight, mean in json.loads(update.parameters):
                means.append([label, weight * update.weight, mean])
        return json.dumps(means).encode()

    def predict(self, parameters: bytes, inputs: np.ndarray) -> np.ndarray:
        means = json.loads(parameters)
        classes = 1 + max(label for label, _, _ in means)
        rows, outputs = inputs.reshape(len(inputs), -1), np.full((len(inputs), classes), -1e3)
        for label, _, mean in means:
            distance = -((rows - np.array(mean)) ** 2).sum(axis=1)
            outputs[:, label] = np.maximum(outputs[:, label], distance)
        return outputs


class Scored(Means):
    """The learner `Means`, with scores that it computes itself in `evaluate`.

    wrong: an object that `evaluate` returns in place of the scores; None returns the scores.
    """

    name = "scored"

    def __init__(self, wrong: Any = None):
        self.wrong_metrics = wrong
        super().__init__()

    def evaluate(self, parameters: Parameters, data: EvaluationData) -> Mapping[str, float]:
        if self.wrong_metrics is not None:
            return self.wrong_metrics  # type: ignore[no-any-return]
        inputs, labels = data.arrays()
        right = self.predict(parameters, inputs).argmax(axis=1) == labels
        return {"accuracy": float(right.mean()), "size": len(data.rows), "my_loss": data.client}


@pytest.mark.parametrize("schedule", [ROUNDS, BUFFER], ids=["rounds", "buffer"])
def test_learner_whose_parameters_are_bytes_has_same_bits_on_several_workers(
    schedule: Schedule,
) -> None:
    others = [FedBuff()] if schedule is BUFFER else []
    spec = run_spec(Means(), *others)
    one = run(spec, schedule, rounds=4)
    two = run(spec, schedule, runtime=several_workers(spec, 2), rounds=4)
    contents = [each.coordinator.server.state["means.model"].tolist() for each in (one, two)]
    assert contents[0] == contents[1] and len(contents[0]) > 100
    for column in ("accuracy", *ON_THE_CLOCK):
        assert [row[column] for row in one.rows] == [row[column] for row in two.rows]


def test_learner_whose_parameters_are_bytes_resumes_to_same_result_if_jobs_are_lost(
    tmp_path: Path,
) -> None:
    words = f"{QUICK} fleet=lognormal fleet.dropout=0.3 schedule=buffered schedule.concurrency=3"
    words = words.replace("schedule.cohort=2 ", "") + " schedule.size=2 method=fedbuff"
    learner = Means()
    runs = []
    for name, rounds in (("straight", 5), ("resumed", 2)):
        out = str(tmp_path / name)
        runs.append(raysim.run(f"{words} rounds={rounds}", learner=learner, out=out, quiet=True))
    again = ["out=" + str(tmp_path / "resumed"), "resume=latest", "rounds=5"]
    runs[1] = raysim.run(again, learner=learner, quiet=True)
    straight, resumed = runs
    assert sum(row["lost"] or 0 for row in straight.rows) > 0
    assert straight.parameters() == resumed.parameters()
    assert straight.summary["state_sha256"] == resumed.summary["state_sha256"]
    for column in ON_THE_CLOCK:
        assert [row[column] for row in straight.rows] == [row[column] for row in resumed.rows]
    assert straight.rows[-1]["means.bytes_down"] > straight.rows[0]["means.bytes_down"]
    assert len(straight.predictions().classes) == 40


class Weights(Means):
    """A `Means` that records the weight and the staleness of each update."""

    name = "weights"

    def initial(self, task: Task, rng: np.random.Generator) -> bytes:
        return b"[]"

    def fit(
        self, parameters: bytes, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[bytes, None]:
        return b"", None

    def aggregate(self, parameters: bytes, updates: Sequence[LearnerUpdate]) -> bytes:
        rows = [[update.weight, update.staleness] for update in updates]
        return json.dumps([*json.loads(parameters), *rows]).encode()

    def predict(self, parameters: bytes, inputs: np.ndarray) -> np.ndarray:
        return np.zeros((len(inputs), 5))


def _weights(result: FinishedRun) -> list[list[float]]:
    words = result.coordinator.server.state["weights.model"].numpy()
    weights: list[list[float]] = json.loads(words[1:].tobytes()[: words[0]])
    return weights


def test_aggregate_function_of_a_learner_gets_staleness_weights() -> None:
    fresh = _weights(run(run_spec(Weights()), ROUNDS, rounds=2))
    assert sum(weight for weight, _ in fresh) == pytest.approx(2)
    late = _weights(run(run_spec(Weights(), FedBuff()), BUFFER, rounds=6))
    assert {staleness for _, staleness in late} > {0}
    for weight, staleness in late:  # the buffer has two updates, and all weights are uniform
        assert weight == pytest.approx((1 + staleness) ** -0.5 / 2)


@pytest.mark.parametrize("other", [Krum(), FedAvgM(), DPFedAvg()], ids=lambda other: other.name)
def test_learner_whose_parameters_are_bytes_refuses_methods_that_average_updates(
    other: Method,
) -> None:
    with pytest.raises(ValueError, match=rf"'{other.name}'.*'means'"):
        run(run_spec(Means(), other), rounds=1)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("faults.norm=1", "faults.norm"),
        ("evaluate.decompose=1", "evaluate.decompose"),
        ("topology=gossip", "topology.*bytes"),
        ("evaluate.finetune.epochs=1", "evaluate.finetune.epochs"),
        ("attack.kind=sign_flip attack.share=0.5", "attackers"),
    ],
)
def test_learner_whose_parameters_are_bytes_refuses_settings_that_need_arrays(
    words: str, key: str
) -> None:
    with pytest.raises(RefusedError, match=key):
        raysim.build(f"{QUICK} {words}", learner=Means())


def test_learner_whose_parameters_are_bytes_needs_an_aggregate_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Means, "aggregate", Learner.aggregate)
    with pytest.raises(RefusedError, match="aggregate"):
        raysim.build(QUICK, learner=Means())


def test_client_whose_learner_returns_parameters_of_wrong_type_fails() -> None:
    result = run(run_spec(Means("type")), rounds=1, tolerate=1.0)
    assert all("bytes" in failure.error for failure in result.failures)
    assert result.rows[0]["failures"] == len(result.failures) > 0


def test_run_result_refuses_to_return_a_model_if_parameters_are_bytes(tmp_path: Path) -> None:
    result = raysim.run(f"{QUICK} rounds=1", learner=Means(), out=str(tmp_path / "run"), quiet=True)
    with pytest.raises(RefusedError, match="parameters"):
        result.model()


def test_printed_plan_of_a_run_describes_its_learner() -> None:
    experiment = raysim.build(QUICK, learner=Means())
    lines = dict(line.split(maxsplit=1) for line in overview(experiment, Path("x")).splitlines())
    assert lines["model"].startswith("means: bytes; at first, a client receives ")
    assert "'means'" in lines["rounds"] and "lr" not in lines["rounds"]


class Growing(Weights):
    """A learner whose parameters grow by 400 bytes with each update; an update has 96 bytes."""

    name = "growing"

    def initial(self, task: Task, rng: np.random.Generator) -> bytes:
        return bytes(400)

    def fit(
        self, parameters: bytes, inputs: np.ndarray, labels: np.ndarray, job: LocalJob
    ) -> tuple[bytes, None]:
        return bytes(96), None

    def upload_bytes(self, task: Task, received: int) -> int:
        return received + 100

    def aggregate(self, parameters: bytes, updates: Sequence[LearnerUpdate]) -> bytes:
        return parameters + bytes(400 * len(updates))


def _words(size: int) -> int:
    """Return the number of float32 values that a message of `size` bytes takes.

    The first value is the length of the message. Each other value has four bytes of the message.
    """
    return 1 + -(-size // 4)


def test_virtual_time_follows_size_of_a_learner_upload() -> None:
    fleet = Lognormal(100.0, 0.0, 1000.0, 500.0, 0.0)  # samples, bytes down and up per second
    spec = run_spec(Growing(), local=Local(lr=0.1, batch=8, epochs=2))
    result = run(spec, Synchronous(2), fleet, rounds=4)
    now = down = up = 0.0
    for version, row in enumerate(result.rows):
        size = 400 + version * 2 * 400
        samples = max(
            result.coordinator.counts[job.client] for job in result.jobs if job.version == version
        )
        received, sent = 4 * _words(size) / 1000, 4 * _words(size + 100) / 500
        now += received + 2 * samples / 100 + sent
        down += 2 * _words(size)
        up += 2 * _words(96)
        assert row["virtual_seconds"] == pytest.approx(now)
        assert (row["floats_down"], row["floats_up"]) == (down, up)


def test_size_of_discarded_uploads_comes_from_the_function_upload_bytes() -> None:
    fleet = Lognormal(100.0, 1.0, 1000.0, 500.0, 0.0)
    result = run(run_spec(Growing()), Oversample(2, 2.0), fleet, rounds=4)
    planned, now = 0, result.rows[-1]["virtual_seconds"] or 0.0
    for job in result.finished.jobs + tuple(result.jobs):
        if job.fate == "discarded" and job.finish <= now:
            planned += _words(400 + job.version * 2 * 400 + 100)
    assert result.rows[-1]["floats_up"] == 8 * _words(96) + planned
    assert planned > 0


@pytest.mark.parametrize("check", checks(Means()), ids=str)
def test_learner_whose_parameters_are_bytes_passes_conformance_checks(check: Check) -> None:
    check()


@pytest.mark.parametrize("wrong", [-1, "many"])
def test_learner_is_refused_if_upload_bytes_returns_no_valid_size(
    monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(Means, "upload_bytes", lambda self, task, received: wrong)
    with pytest.raises(RefusedError, match="upload_bytes of Means"):
        raysim.build(QUICK, learner=Means())


def test_printed_plan_of_a_run_says_that_message_sizes_change() -> None:
    words = QUICK.replace("schedule.cohort=2 runtime=inprocess", "schedule=buffered")
    words += " schedule.concurrency=3 schedule.size=2 runtime=local runtime.workers=2"
    experiment = raysim.build(words, learner=Means())
    lines = dict(line.split(maxsplit=1) for line in overview(experiment, Path("x")).splitlines())
    assert lines["schedule"].endswith("if messages did not change in size")


def test_message_that_is_sent_only_once_is_refused_if_its_size_varies() -> None:
    class Once(Means):
        name = "once"

        def setup(self, run: Setup) -> None:
            super().setup(run)
            run.send("more", floats=1, once=True, varies=True)

    with pytest.raises(ValueError, match=r"'once'.*varies"):
        run(run_spec(Once()), rounds=1)


def test_learner_with_an_evaluate_function_has_usual_and_custom_scores() -> None:
    usual, own = run(run_spec(Means()), rounds=2), run(run_spec(Scored()), rounds=2)
    for name in ("accuracy", "accuracy_worst", "accuracy_global"):
        assert [row[name] for row in own.rows] == pytest.approx([row[name] for row in usual.rows])
    assert own.rows[-1]["size_global"] == len(own.coordinator.spec.data.central)
    assert own.rows[-1]["my_loss_global"] == -1
    clients = np.flatnonzero(own.coordinator.spec.data.partition.test.counts)
    assert own.rows[-1]["my_loss"] == pytest.approx(clients.mean())
    assert own.rows[-1]["my_loss_worst"] == clients.max()


def test_learners_with_an_evaluate_function_have_domain_scores(tmp_path: Path) -> None:
    words = f"{QUICK} data.domains=2 partition.validation_fraction=0.3 rounds=2"
    usual = raysim.run(words, learner=Means(), out=str(tmp_path / "usual"), quiet=True)
    own = raysim.run(words, learner=Scored(), out=str(tmp_path / "own"), quiet=True)
    names = [name for name in usual.rows[-1] if name.startswith("accuracy")]
    assert {"accuracy_worst_domain", "accuracy_validation", "accuracy_global_best"} <= {*names}
    shared = [name for name in names if name in own.rows[-1]]
    assert any("." in name for name in shared)
    for name in shared:
        assert own.rows[-1][name] == pytest.approx(usual.rows[-1][name]), name


def test_evaluate_function_scores_domains_that_have_the_names_of_other_sets(tmp_path: Path) -> None:
    class ScoredMeans(Scored):
        name = Means.name  # the initial parameters depend on the name

    generator = np.random.default_rng(0)
    names = np.repeat(["client", "central", "validation", "central:client"], 30)
    labels = generator.integers(3, size=120)
    inputs = 4 * np.eye(3)[labels] + generator.normal(size=(120, 3))
    data = {"train": (inputs, labels, names), "test": (inputs[:60], labels[:60], names[:60])}
    words = (
        "model=mlp partition=iid partition.clients=4 partition.validation_fraction=0.3 "
        "schedule.cohort=2 runtime=inprocess tracking=none rounds=1"
    )
    usual = raysim.run(words, data=data, learner=Means(), out=str(tmp_path / "usual"), quiet=True)
    own = raysim.run(words, data=data, learner=ScoredMeans(), out=str(tmp_path / "own"), quiet=True)
    columns = [f"accuracy{end}" for end in ("", "_global", "_validation", "_worst_domain")]
    for name in (*columns, *(f"accuracy.{domain}" for domain in np.unique(names))):
        assert own.rows[-1][name] == pytest.approx(usual.rows[-1][name]), name


def test_evaluate_function_of_a_learner_can_return_no_score(tmp_path: Path) -> None:
    result = raysim.run(
        f"{QUICK} rounds=2", learner=Scored({}), out=str(tmp_path / "run"), quiet=True
    )
    assert result.rows[-1]["accuracy_global"] is None and result.rows[-1].get("accuracy") is None


@pytest.mark.parametrize("wrong", [3, {"accuracy": "high"}], ids=["number", "text"])
def test_error_of_an_evaluate_function_contains_the_name_of_the_learner(wrong: Any) -> None:
    with pytest.raises(Exception, match=r"scored.*evaluate"):
        run(run_spec(Scored(wrong)), rounds=1)
