"""Test which round has the best model, the file with this model, and resumed runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tiny_runs import NORMED_MLP, SEED, FinishedRun, coordinate, run_spec, run_to_end

import raysim
from raysim.api.declarations import Evaluation
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.fedbn import FedBN
from raysim.methods.fedexp import FedExP
from raysim.primitives.errors import RefusedError
from raysim.simulation.best_model import BestModel, Criterion
from raysim.simulation.schedule import Buffered, Schedule, Synchronous
from raysim.training.run_spec import Checkpoint, RunSpec

WORDS = [
    "data=synthetic",
    "partition=iid",
    "partition.clients=4",
    "schedule.cohort=2",
    "runtime=inprocess",
]
WORDS += ["tracking=none", "rounds=4", "model=mlp", "local.lr=0.5"]


def data(validation: float) -> FederatedData:
    source = Synthetic(samples=160, test_samples=20, classes=5)
    return federate(source, IID(clients=5, test_fraction=0.2, validation_fraction=validation), SEED)


def study(*methods: Method, validation: float = 0.2) -> RunSpec:
    """Return a run with a learning rate so high that its last round is not the best one.

    validation: the share of each client's samples that are validation samples.
    """
    local = replace(run_spec().settings.local, lr=1.0)
    return run_spec(*methods, model=NORMED_MLP, data=data(validation), local=local)


def weights_by_round(
    spec: RunSpec, schedule: Schedule, folder: Path, **settings: Any
) -> tuple[FinishedRun, dict[int, Any]]:
    """Make a run of eight rounds; return the finished run and its scored models.

    The scored models map a version number to tensors by full name.

    settings: further arguments of `tiny_runs.coordinate`.
    """
    coordinator = coordinate(spec, schedule, folder=str(folder), rounds=8, **settings)
    seen: dict[int, Any] = {}
    evaluate = coordinator._evaluate

    def watched(pending: Any) -> None:
        server = coordinator.server
        named = coordinator.initial.named(server.scored().clone(), server.counters.clone())
        seen[server.version] = {name: tensor.numpy().copy() for name, tensor in named.items()}
        evaluate(pending)

    coordinator._evaluate = watched  # type: ignore[method-assign]
    return run_to_end(coordinator), seen


def best_round(finished_run: FinishedRun, column: str, higher: bool) -> int:
    """Return the first round in which a column of the history has its best value.

    higher: True if higher values are better.
    """
    rows = [row for row in finished_run.rows if row.get(column) is not None]
    values = [row[column] for row in rows]
    place = int(np.argmax(values) if higher else np.argmin(values))  # type: ignore[arg-type]
    return int(rows[place]["round"] or 0)


@pytest.mark.parametrize("methods", [[], [FedBN()], [FedExP()]])
@pytest.mark.parametrize("schedule", [Synchronous(3), Buffered(concurrency=4, size=2)])
@pytest.mark.parametrize(
    ("validation", "column"), [(0.2, "accuracy_validation"), (0.0, "train_loss")]
)
def test_best_model_file_has_weights_of_best_round(
    methods: list[Method], schedule: Schedule, validation: float, column: str, tmp_path: Path
) -> None:
    finished_run, weights = weights_by_round(
        study(*methods, validation=validation), schedule, tmp_path
    )
    best = finished_run.finished.best_model
    assert best is not None
    number = best_round(finished_run, column, column != "train_loss")
    assert (best["round"], best["by"]) == (number, column)
    stored = load_file(tmp_path / "best.safetensors")
    assert stored.keys() == load_file(tmp_path / "model.safetensors").keys()
    for name, array in stored.items():
        assert np.array_equal(array, weights[number][name]), name


def test_round_of_the_best_model_equals_best_round_in_the_history(tmp_path: Path) -> None:
    finished_run, _ = weights_by_round(study(), Synchronous(3), tmp_path)
    assert finished_run.finished.best_model is not None
    assert finished_run.finished.best_model["round"] == finished_run.rows[-1]["best_round"]


def test_best_model_comes_from_a_round_with_a_score(tmp_path: Path) -> None:
    evaluate = Evaluation(every=3)
    finished_run, _ = weights_by_round(
        study(validation=0.0), Synchronous(3), tmp_path, evaluate=evaluate
    )
    assert finished_run.finished.best_model is not None
    assert finished_run.finished.best_model["round"] in (3, 6, 8)


@pytest.mark.parametrize("methods", [[], [FedBN()], [FedExP()]])
@pytest.mark.parametrize("validation", [0.2, 0.0])
def test_resumed_run_writes_the_same_best_model_file(
    methods: list[Method], validation: float, tmp_path: Path
) -> None:
    spec = study(*methods, validation=validation)
    straight = tmp_path / "straight"
    straight.mkdir()
    whole = run_to_end(
        coordinate(spec, rounds=8, checkpoint=Checkpoint(2, keep=4), folder=str(straight))
    )
    for stop in (2, 4, 6):
        resumed = tmp_path / str(stop)
        resumed.mkdir()
        address = str(straight / "checkpoints" / f"round-{stop:06d}")
        second = run_to_end(coordinate(spec, rounds=8, folder=str(resumed), resume=address))
        assert second.finished.best_model == whole.finished.best_model
        one, other = ((folder / "best.safetensors").read_bytes() for folder in (straight, resumed))
        assert one == other


def test_best_model_equal_to_the_current_one_is_not_copied_on_resume() -> None:
    """A resumed run makes no copy of the best model if this model is the current version.

    The best model and the current version are then the same tensor.
    """
    vector, counters = torch.ones(3), torch.zeros(1, dtype=torch.int64)
    best = BestModel(Criterion("train_loss", higher=False))
    best.take({"round": 1, "train_loss": 0.5}, vector, counters)
    again = BestModel(best.criterion)
    again.restore(best.state(vector), vector, counters)
    assert again.vector is vector and again.summary() == best.summary()


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_round_without_a_finite_score_cannot_be_the_best_round(value: float | None) -> None:
    best = BestModel(Criterion("accuracy_validation", higher=True))
    best.take({"round": 1, "accuracy_validation": value}, torch.ones(1), torch.ones(1))
    assert best.summary() is None


def test_run_result_has_model_and_predictions_of_the_best_round(tmp_path: Path) -> None:
    result = raysim.run(
        [*WORDS, "partition.validation_fraction=0.2", f"out={tmp_path / 'run'}"], quiet=True
    )
    best = result.summary["best_model"]
    assert best == json.loads((tmp_path / "run" / "summary.json").read_text())["best_model"]
    row = result.rows[best["round"] - 1]
    for finished_run in (result, raysim.load(tmp_path / "run")):
        predicted = finished_run.predictions(best=True)
        assert float((predicted.classes == predicted.labels).mean()) == pytest.approx(
            row["accuracy_global"]
        )
    stored = load_file(tmp_path / "run" / "best.safetensors")
    for name, tensor in result.model(best=True).state_dict().items():
        assert np.array_equal(tensor.numpy(), stored[f"model.{name}"])
    with pytest.raises(RefusedError, match="best=True"):
        result.predictions(client=0, best=True)


def test_best_model_whose_file_is_missing_is_refused(tmp_path: Path) -> None:
    result = raysim.run([*WORDS, f"out={tmp_path / 'run'}"], quiet=True)
    assert result.summary["best_model"]["by"] == "train_loss"
    (tmp_path / "run" / "best.safetensors").unlink()
    with pytest.raises(RefusedError, match=r"best\.safetensors"):
        result.model(best=True)
