"""Test that `raysim ui` sends each stored run to MLflow's database once.

This also holds for runs that were killed, resumed or moved.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raysim.commands.ui.database import RunDatabase, find_root
from raysim.primitives.errors import RefusedError
from raysim.results.history import Row, write_history
from raysim.results.mlflow_server import default_uri
from raysim.results.tracked_run import BACKLOG, RECORD, read_record
from raysim.results.tracking import StoredTracker

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient


def rows(first: int, last: int) -> list[Row]:
    """Return rows of a history: from round `first` to the round before `last`."""
    return [{"round": n, "wall_seconds": float(n), "accuracy": n / 10} for n in range(first, last)]


def begin(folder: Path, earlier: int = 0, parent: Path | None = None) -> StoredTracker:
    """Start the tracker of the run in `folder`.

    earlier: the number of rounds before the run was resumed; 0 for a new run.
    parent: the folder of the run's study; None for a run without a study.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tracker = StoredTracker(folder)
    tracker.start({"local": {"lr": 0.1}}, {"kind": "run"}, rows(1, earlier + 1), parent=parent)
    return tracker


def log(tracker: StoredTracker, first: int, last: int) -> None:
    for row in rows(first, last + 1):
        tracker.log(row)


def client_of(root: Path) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=default_uri(root))


def runs_in(root: Path) -> list[Run]:
    client = client_of(root)
    experiment = client.get_experiment_by_name("raysim")
    return list(client.search_runs([experiment.experiment_id]))


def steps(root: Path, run: Run) -> list[int]:
    history = client_of(root).get_metric_history(run.info.run_id, "accuracy")
    return [metric.step for metric in history]


def test_database_stores_each_new_row_of_a_running_run_exactly_once(tmp_path: Path) -> None:
    tracker = begin(tmp_path / "a")
    tracker._store_interval = 0.0
    log(tracker, 1, 2)
    database = RunDatabase(tmp_path)
    assert database.update() == 1
    (run,) = runs_in(tmp_path)
    assert (run.info.status, run.info.run_name) == ("RUNNING", "a")
    assert steps(tmp_path, run) == [1, 2]
    assert database.update() == 0, "nothing is new"

    log(tracker, 3, 4)
    assert RunDatabase(tmp_path).update() == 1, "another `raysim ui` continues the same run"
    (run,) = runs_in(tmp_path)
    assert steps(tmp_path, run) == [1, 2, 3, 4]
    assert read_record(tmp_path / "a")["run_id"] is None, "the run's process owns its files"

    write_history(rows(1, 6), tmp_path / "a/history.parquet")
    log(tracker, 5, 5)
    tracker.finish({"best5_mean": 0.25})
    assert not (tmp_path / "a" / BACKLOG).exists()
    assert database.update() == 1
    (run,) = runs_in(tmp_path)
    assert (run.info.status, run.data.tags["best5_mean"]) == ("FINISHED", "0.25")
    assert steps(tmp_path, run) == [1, 2, 3, 4, 5]
    assert run.data.params["local.lr"] == "0.1"
    assert database.update() == 0


@pytest.mark.usefixtures("mlflow_database")
@pytest.mark.parametrize("is_seen_before", [True, False])
def test_database_stores_a_killed_and_resumed_run_as_one_run(
    tmp_path: Path, is_seen_before: bool
) -> None:
    killed = begin(tmp_path / "a")
    killed._store_interval = 0.0
    log(killed, 1, 3)
    if is_seen_before:
        RunDatabase(tmp_path).update()
    resumed = begin(tmp_path / "a", earlier=2)
    log(resumed, 3, 5)
    resumed.finish({}, status="KILLED")
    assert RunDatabase(tmp_path).update() == 1
    (run,) = runs_in(tmp_path)
    assert (run.info.status, steps(tmp_path, run)) == ("KILLED", [1, 2, 3, 4, 5])

    again = begin(tmp_path / "a", earlier=5)
    log(again, 6, 6)
    again.finish({})
    assert RunDatabase(tmp_path).update() == 1
    (run,) = runs_in(tmp_path)
    assert (run.info.status, steps(tmp_path, run)) == ("FINISHED", [1, 2, 3, 4, 5, 6])


def test_runs_of_a_moved_study_belong_to_the_study(tmp_path: Path, mlflow_database: Path) -> None:
    study = tmp_path / "first"
    parent = begin(study)
    (study / "study.yaml").touch()
    mlflow_database.rename(study / mlflow_database.name)
    begin(study / "runs/a", parent=study).finish({})
    unfinished = begin(study / "runs/b", parent=study)
    assert unfinished is not None
    moved = study.rename(tmp_path / "moved")
    parent._folder = moved
    assert find_root(str(moved / "runs/a")) == moved
    assert RunDatabase(moved).update() == 3
    by_name = {run.info.run_name: run for run in runs_in(moved)}
    for name in "ab":
        assert by_name[name].data.tags["mlflow.parentRunId"] == by_name["first"].info.run_id


@pytest.mark.usefixtures("mlflow_database")
def test_mlflow_database_omits_runs_whose_folder_was_removed(tmp_path: Path) -> None:
    begin(tmp_path / "a").finish({}, [tmp_path / "a/gone.png"], model="pending")
    begin(tmp_path / "b").finish({})
    shutil.rmtree(tmp_path / "b")
    printed: list[str] = []
    database = RunDatabase(tmp_path, printed.append)
    assert database.update() == 1
    for folder in database.add_models():
        shutil.rmtree(folder)
    assert len(printed) == 1 and str(tmp_path / "a") in printed[0]
    assert database.update() == 0
    with pytest.raises(RefusedError, match="nowhere"):
        find_root(str(tmp_path / "nowhere"))


@pytest.mark.usefixtures("mlflow_database")
def test_database_reports_only_once_that_a_model_cannot_be_saved(tmp_path: Path) -> None:
    begin(tmp_path / "a").finish({}, model="pending")
    printed: list[str] = []
    database = RunDatabase(tmp_path, printed.append)
    database.update()
    assert len(list(database.add_models())) == 1
    assert len(printed) == 1 and "only the weights" in printed[0]
    assert not list(database.add_models()), "it is not tried again"
    assert json.loads((tmp_path / "a" / RECORD).read_text())["model"] not in ("pending", "sent")


def test_database_ignores_runs_that_log_to_mlflow_themselves(tmp_path: Path) -> None:
    begin(tmp_path / "a")
    record = read_record(tmp_path / "a")
    (tmp_path / "a" / RECORD).write_text(json.dumps({**record, "sent_by": "run"}))
    assert RunDatabase(tmp_path).update() == 0
