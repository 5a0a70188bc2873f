"""Test that MLflow gets each row of a run once, also if its server is down or an answer is lost.

The run never waits for the server.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from raysim.commands.ui.database import RunDatabase
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict, to_yaml
from raysim.experiment.execute import run
from raysim.results.history import Row, write_history
from raysim.results.mlflow_server import Mlflow, default_uri, save_model
from raysim.results.observers import TrackingObserver
from raysim.results.shared_model import load_shared_model
from raysim.results.tracked_run import (
    BACKLOG,
    MODEL,
    RECORD,
    Record,
    flatten,
    read_backlog,
    read_record,
)
from raysim.results.tracking import NoTracker, Tracker, replay
from raysim.training.run_spec import build_networks

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

NOWHERE = "http://127.0.0.1:9"  # the port of a service that nobody runs


def rows(first: int, last: int) -> list[Row]:
    """Return rows of a history, from round `first` to round `last`, both included."""
    return [
        {"round": n, "wall_seconds": float(n), "accuracy": None if n % 2 else n / 100}
        for n in range(first, last + 1)
    ]


class Shelf:
    """A stand-in for MLflow's server.

    steps: the round numbers of the stored rows.
    down: True lets `open`, `send` and `close` fail.
    late: True lets the server store the rows and then fail, as if the answer were lost.
    gate: `open` and `send` wait until this event is set.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.calls: list[int] = []  # rows per call
        self.opened = self.closed = 0
        self.down = False
        self.late = False  # stores, then fails: the answer got lost
        self.answered = threading.Event()  # set after each contact, whatever came of it
        self.gate = threading.Event()
        self.gate.set()

    def connect(self, _: str) -> Shelf:
        return self

    def open(self, record: Record, _: Path) -> str:
        self.gate.wait()
        self._fail(self.down)
        self.opened += not record["run_id"]
        return str(record["run_id"] or "run-1")

    def describe(self, _: Record) -> None:
        """Do nothing."""

    def send(self, rows: Sequence[Row]) -> None:
        self.gate.wait()
        self._fail(self.down)
        last = max(self.steps, default=0)
        new = [int(row["round"] or 0) for row in rows if int(row["round"] or 0) > last]
        self.steps += new
        self.calls += [len(new)] if new else []
        self._fail(self.late)
        self.answered.set()

    def close(self, _: Record, __: Path) -> None:
        self._fail(self.down)
        self.closed += 1

    def _fail(self, failing: bool) -> None:
        if failing:
            self.answered.set()
            raise ConnectionError("[Errno 111] Connection refused")


def tracker(folder: Path, shelf: Shelf, said: list[str], patience: float = 30.0) -> Tracker:
    """Return a tracker that sends rows to the stand-in server.

    folder: the tracker's folder, which this function makes.
    said: a list for the lines that the tracker prints.
    patience: the most seconds that the tracker waits at the end of the run.
    """
    folder.mkdir(exist_ok=True)
    return Tracker(
        folder, "http://me:secret@shelf", say=said.append, connect=shelf.connect, patience=patience
    )


def begin(made: Tracker, shelf: Shelf, some: Sequence[Row] = ()) -> None:
    """Start a tracker, and wait until its thread has called the server for the first time.

    made: the tracker.
    shelf: the stand-in server.
    some: the rows that a resumed run already has before it continues.
    """
    shelf.answered.clear()
    made.start({}, {}, some)
    assert shelf.answered.wait(600)


def deliver(made: Tracker, shelf: Shelf, some: Sequence[Row]) -> None:
    """Log rows one by one. Wait after each row until the thread has tried to send it.

    made: the tracker.
    shelf: the stand-in server.
    some: the rows.
    """
    for row in some:
        shelf.answered.clear()
        made.log(row)
        assert shelf.answered.wait(600)


def test_tracker_stores_no_passwords(tmp_path: Path) -> None:
    uri = "postgresql://me:p@ss:w0rd@worker/db?password=w0rd&sslmode=require"
    config = to_dict(compose(["runtime=inprocess"])) | {"tracking": {"name": "mlflow", "uri": uri}}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    shelf = Shelf()
    made = tracker(tmp_path, shelf, [])
    made.start(config, {"tracking.uri": uri})
    made.finish({"uri": uri})
    for name in ("config.yaml", "tracking.json"):
        text = (tmp_path / name).read_text()
        assert "w0rd" not in text and "postgresql://worker/db?password=&sslmode=require" in text


@pytest.mark.parametrize(
    "content",
    ["null", "[]", "3", "[" * 100_000, "\0", '{"round": 1' + "0" * 400 + "}", '{"round": null}'],
)
def test_invalid_entries_of_tracking_files_are_skipped(content: str, tmp_path: Path) -> None:
    (tmp_path / "tracking.json").write_text(content)
    (tmp_path / "tracking_backlog.jsonl").write_text(content + "\n" + '{"round": 3}' + "\n")
    assert isinstance(read_record(tmp_path), dict)
    assert read_backlog(tmp_path)[-1] == {"round": 3}


def test_tracker_sends_each_row_in_a_separate_call_to_a_fast_server(tmp_path: Path) -> None:
    shelf, said = Shelf(), []
    made = tracker(tmp_path, shelf, said)
    begin(made, shelf)
    deliver(made, shelf, rows(1, 4))
    made.finish({}, [])
    assert (shelf.steps, shelf.calls, shelf.closed, said) == ([1, 2, 3, 4], [1, 1, 1, 1], 1, [])
    assert not (tmp_path / BACKLOG).exists()


def test_tracker_sends_waiting_rows_together_to_slow_server(
    tmp_path: Path,
) -> None:
    shelf, said = Shelf(), []
    shelf.gate.clear()
    made = tracker(tmp_path, shelf, said)
    made.start({}, {})
    for row in rows(1, 50):
        made.log(row)  # returns although the server answers nothing
    shelf.gate.set()
    made.finish({}, [])
    assert shelf.steps == list(range(1, 51))
    assert len(shelf.calls) <= 2


def test_tracker_reports_outage_once_and_stores_rows(
    tmp_path: Path,
) -> None:
    shelf, said = Shelf(), []
    shelf.down = True
    made = tracker(tmp_path, shelf, said)
    begin(made, shelf)
    deliver(made, shelf, rows(1, 3))
    shelf.down = False
    deliver(made, shelf, rows(4, 5))
    made.finish({}, [])
    assert len(said) == 1
    assert "http://shelf cannot be used (Connection refused)" in said[0]
    assert "secret" not in said[0]
    assert (shelf.steps, shelf.closed) == ([1, 2, 3, 4, 5], 1)
    assert not (tmp_path / BACKLOG).exists()


def test_replay_sends_the_rows_that_the_mlflow_server_did_not_receive(
    tmp_path: Path,
) -> None:
    shelf, said = Shelf(), []
    shelf.down = True
    made = tracker(tmp_path / "run", shelf, said)
    begin(made, shelf)
    deliver(made, shelf, rows(1, 3))
    made.finish({"best5_mean": 0.5}, [])
    assert f"`raysim run out={tmp_path / 'run'} resume=latest` sends the rest" in said[-1]
    assert len(said) <= 2
    kept = [
        json.loads(line)["round"] for line in (tmp_path / "run" / BACKLOG).read_text().splitlines()
    ]
    assert kept == [1, 2, 3]
    assert not replay(tmp_path / "run", say=said.append, connect=shelf.connect)
    shelf.down = False
    assert replay(tmp_path / "run", say=said.append, connect=shelf.connect)
    assert re.fullmatch(rf"MLflow at .* now has all 3 rounds of {tmp_path / 'run'}", said[-1])
    assert (shelf.steps, shelf.closed) == ([1, 2, 3], 1)
    assert not (tmp_path / "run" / BACKLOG).exists()
    assert replay(tmp_path / "run", connect=shelf.connect)  # nothing is left
    assert shelf.closed == 1


def test_tracker_stops_waiting_for_hanging_server(
    tmp_path: Path,
) -> None:
    shelf, said = Shelf(), []
    shelf.gate.clear()
    made = tracker(tmp_path, shelf, said, patience=0.01)
    made.start({}, {})
    for row in rows(1, 3):
        made.log(row)
    made.finish({}, [])
    assert len((tmp_path / BACKLOG).read_text().splitlines()) == 3
    assert "no answer in time" in said[0]
    shelf.gate.set()  # the thread goes on, too late: it must not touch the files
    made._thread.join(600)
    assert len((tmp_path / BACKLOG).read_text().splitlines()) == 3
    assert not json.loads((tmp_path / RECORD).read_text())["done"]
    assert replay(tmp_path, connect=shelf.connect)
    assert shelf.steps == [1, 2, 3]


def test_tracker_sends_no_row_twice_if_the_answer_is_lost(tmp_path: Path) -> None:
    shelf, said = Shelf(), []
    shelf.late = True
    made = tracker(tmp_path, shelf, said)
    begin(made, shelf)
    deliver(made, shelf, rows(1, 2))
    shelf.late = False
    made.finish({}, [])
    assert shelf.steps == [1, 2]


def test_tracker_gets_each_row_of_a_resumed_run_exactly_once(tmp_path: Path) -> None:
    shelf, said = Shelf(), []
    killed = tracker(tmp_path, shelf, said)
    begin(killed, shelf)
    deliver(killed, shelf, rows(1, 3))
    shelf.gate.clear()
    killed.log(rows(4, 4)[0])  # was in memory only when the run was killed
    after = Shelf()
    after.steps = shelf.steps
    resumed = tracker(tmp_path, after, said)
    resumed.start({}, {}, rows(1, 2))  # from a checkpoint after round 2
    for row in rows(3, 6):
        resumed.log(row)
    resumed.finish({}, [])
    assert after.steps == [1, 2, 3, 4, 5, 6]
    assert (shelf.opened, after.opened) == (1, 0)


def test_resumed_run_sends_rows_that_were_not_sent_before(tmp_path: Path) -> None:
    shelf, said = Shelf(), []
    shelf.down = True
    first = tracker(tmp_path, shelf, said)
    begin(first, shelf)
    deliver(first, shelf, rows(1, 4))
    first.finish({}, [], status="KILLED")
    with (tmp_path / BACKLOG).open("a") as stream:
        stream.write('{"round": 5, "wall_se')  # cut off by the kill
    second = tracker(tmp_path, shelf, said)
    begin(second, shelf, rows(1, 2))
    kept = [json.loads(line)["round"] for line in (tmp_path / BACKLOG).read_text().splitlines()]
    assert kept == [1, 2, 3, 4]
    shelf.down = False
    for row in rows(3, 6):
        second.log(row)
    second.finish({}, [])
    assert shelf.steps == [1, 2, 3, 4, 5, 6]


def test_tracked_run_continues_after_any_error_of_the_server(tmp_path: Path) -> None:
    def broken(_: str) -> Shelf:
        raise RuntimeError("a bug of somebody else\nwith a long story")

    said: list[str] = []
    made = Tracker(tmp_path, "sqlite:////no/such/place/x.db", say=said.append, connect=broken)
    made.start({}, {})
    for row in rows(1, 3):
        made.log(row)
    made.finish({}, [tmp_path / "missing.png"])
    assert "(a bug of somebody else)" in said[-1]
    assert len((tmp_path / BACKLOG).read_text().splitlines()) == 3


def test_message_says_why_mlflow_gets_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(error: Exception) -> str:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("raysim.results.observers.load_shared_model", fail)
        said: list[str] = []
        observer = TrackingObserver(
            NoTracker(), {}, {}, Mock(), said.append, lambda _: contextlib.nullcontext()
        )
        run = Mock(folder=tmp_path, pictures=[], rows=[], facts={}, summary=dict)
        observer.on_finish(run, Mock())
        return said[0].partition("of the model: ")[2]

    assert told(RuntimeError("a loop\nof some length")) == "it cannot be converted or sent: a loop"
    assert told(ConnectionError("MLflow has no such run")) == "MLflow has no such run"
    missing = FileNotFoundError(2, "No such file or directory", "model.safetensors")
    assert told(missing) == "a file fails: [Errno 2] No such file or directory: 'model.safetensors'"
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert (
        told(FileNotFoundError(2, "No such file or directory"))
        == "the folder that this process works in is gone"
    )


def test_tracker_joins_names_of_nested_settings_with_dots() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}, "e": {}}) == {"a.b.c": 1, "a.d": [2], "e": {}}


def test_run_without_a_tracker_sends_nothing_to_mlflow(tmp_path: Path) -> None:
    none = NoTracker()
    none.start({}, {}, [])
    none.log({"round": 1})
    none.finish({}, [])
    assert replay(tmp_path)  # a folder that was never tracked has nothing to send


@pytest.mark.slow
def test_tracker_import_does_not_import_mlflow() -> None:
    code = "import sys, raysim.results.tracking; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two runs that MLflow stores in one SQLite file; return their parent folder.

    The run `online` wrote to an MLflow server. The run `offline` was sent to MLflow when it had
    ended.
    """
    root = tmp_path_factory.mktemp("runs")
    config = {"local": {"lr": 0.1}, "long": "x" * 7000, **{f"key{n}": n for n in range(150)}}
    for name, uri in (("online", ""), ("offline", NOWHERE)):
        folder = root / name
        folder.mkdir()
        (folder / "plot.png").write_bytes(b"png")
        made = Tracker(folder, uri, say=lambda _: None, patience=600.0)
        made.start(config, {"seed": 3}, data={"name": "digits", "digest": "abc", "clients": 7})
        for row in rows(1, 5):
            made.log(row)
        made.finish(
            {"best5_mean": 0.5, "model_sha256": "abc", "rounds_to": {"0.80": 4}},
            [folder / "plot.png"],
        )
    assert (root / "offline" / BACKLOG).is_file()
    assert not (root / "online" / BACKLOG).exists()
    assert replay(root / "offline", default_uri(root))
    return root


@pytest.fixture(scope="module")
def client(tracked: Path) -> MlflowClient:
    """Return MLflow's client for the two runs of `tracked`."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=default_uri(tracked))


def client_of(root: Path) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=default_uri(root))


def identity(folder: Path) -> str:
    """Return the id of the MLflow run of a folder."""
    return str(json.loads((folder / RECORD).read_text())["run_id"])


@pytest.mark.parametrize("name", ["online", "offline"])
def test_mlflow_gets_settings_scores_and_files_of_a_run(
    tracked: Path, client: MlflowClient, name: str
) -> None:
    run = client.get_run(identity(tracked / name))
    assert (run.info.run_name, run.info.status) == (name, "FINISHED")
    assert (len(run.data.params), run.data.params["local.lr"], len(run.data.params["long"])) == (
        152,
        "0.1",
        6000,
    )
    assert (run.data.tags["seed"], run.data.tags["model_sha256"]) == ("3", "abc")
    assert (run.data.tags["best5_mean"], run.data.tags["rounds_to.0.80"]) == ("0.5", "4")
    steps = {
        key: [m.step for m in client.get_metric_history(run.info.run_id, key)]
        for key in ("round", "accuracy")
    }
    assert steps == {"round": [1, 2, 3, 4, 5], "accuracy": [2, 4]}
    assert [item.path for item in client.list_artifacts(run.info.run_id)] == ["plot.png"]


@pytest.mark.parametrize("name", ["online", "offline"])
def test_mlflow_gets_the_data_set(tracked: Path, client: MlflowClient, name: str) -> None:
    (found,) = client.get_run(identity(tracked / name)).inputs.dataset_inputs
    assert (found.dataset.name, found.dataset.digest, json.loads(found.dataset.profile)) == (
        "digits",
        "abc",
        {"clients": 7},
    )
    assert [(tag.key, tag.value) for tag in found.tags] == [("mlflow.data.context", "training")]


def test_new_mlflow_experiment_is_tagged_as_model_development(
    tracked: Path, client: MlflowClient
) -> None:
    experiment = client.get_experiment_by_name("raysim")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"


@pytest.mark.usefixtures("mlflow_database")
def test_existing_mlflow_experiment_is_tagged_as_model_development(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    older = MlflowClient(tracking_uri=default_uri(tmp_path))
    older.create_experiment("raysim")
    made = Tracker(tmp_path, default_uri(tmp_path), say=lambda _: None, patience=600.0)
    made.start({}, {})
    made.finish({})
    assert (
        older.get_experiment_by_name("raysim").tags["mlflow.experimentKind"]
        == "custom_model_development"
    )


def test_mlflow_run_is_complete_and_its_model_predicts(
    tmp_path: Path,
) -> None:
    import mlflow

    words = [
        "data=digits",
        "model=mlp",
        "rounds=3",
        "runtime=inprocess",
        "partition.clients=10",
        "schedule.cohort=5",
    ]
    experiment = build([*words, "method=[fedprox]", "seed=4", f"out={tmp_path / 'run'}"])
    result = run(experiment, quiet=True)
    assert not (tmp_path / "mlflow.db").exists()
    database = RunDatabase(tmp_path)
    assert (database.update(), len(list(database.add_models()))) == (1, 1)
    logged = client_of(tmp_path).get_run(identity(tmp_path / "run"))
    tags, metrics = logged.data.tags, logged.data.metrics
    assert (tags["method"], tags["seed"], tags["kind"], tags["mlflow.user"]) == (
        "fedprox",
        "4",
        "run",
        getuser(),
    )
    assert "study" not in tags and tags["data"] == experiment.spec.data.title
    assert metrics["accuracy_global"] == result.summary["accuracy_global"]
    assert float(tags["best5_mean"]) == pytest.approx(result.summary["best5_mean"], rel=1e-5)
    assert not any("/" in name for name in metrics), "MLflow draws sections above the curves"
    assert "rounds" not in {*metrics, *tags} and not any("identity" in name for name in tags)
    assert not (tmp_path / "run/mlflow_model").exists()
    assert len(logged.outputs.model_outputs) == 1

    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(default_uri(tmp_path))
    try:
        model = mlflow.pyfunc.load_model(f"runs:/{logged.info.run_id}/model")
    finally:
        mlflow.set_tracking_uri(before)
    data, rows = experiment.spec.data.open(), experiment.spec.data.central
    correct = model.predict(data.inputs[rows].copy()).argmax(1) == data.labels[rows]
    assert (
        correct.mean() == result.summary["accuracy_global"]
        and result.summary["accuracy_global"] > 0.3
    )
    assert model.predict(data.inputs[rows[:1]].copy()).shape == (1, 10)


def test_mlflow_gets_no_model_with_personal_parameters(tmp_path: Path) -> None:
    experiment = build(["data=synthetic", "model=small_cnn", "method=[fedbn]", "model.norm=batch"])
    assert load_shared_model(experiment.spec, tmp_path / "none") is None


def test_loaded_shared_model_has_an_output_for_each_class(tmp_path: Path) -> None:
    experiment = build(["data=synthetic", "model=small_cnn", "method=[vhl]"])
    networks, _ = build_networks(experiment.spec)
    save_file(
        {f"model.{name}": value for name, value in networks["model"].state_dict().items()},
        tmp_path / "model",
    )
    found = load_shared_model(experiment.spec, tmp_path / "model")
    assert found is not None
    model, example = found
    assert model(torch.from_numpy(example)).shape == (2, experiment.spec.task.num_classes)  # folded


@pytest.mark.slow
def test_mlflow_gets_recurrent_network_without_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    import mlflow

    experiment = build(["data=markov", "model=gru", "partition=natural", "schedule.cohort=5"])
    networks, _ = build_networks(experiment.spec)
    save_file(
        {f"model.{name}": value for name, value in networks["model"].state_dict().items()},
        tmp_path / "model",
    )
    found = load_shared_model(experiment.spec, tmp_path / "model")
    assert found is not None
    model, example = found
    save_model(model, example, tmp_path)
    assert not [each for each in recwarn if "assigned during export" in str(each.message)]
    inputs = experiment.spec.data.open().inputs[:5].copy()
    loaded = mlflow.pyfunc.load_model(str(tmp_path / MODEL)).predict(inputs)
    assert torch.allclose(torch.from_numpy(loaded), model(torch.from_numpy(inputs)), atol=1e-6)


def test_mlflow_continues_a_finished_run_under_its_id(tracked: Path, client: MlflowClient) -> None:
    before = identity(tracked / "online")
    made = Tracker(tracked / "online", say=lambda _: None, patience=600.0)
    made.start({"local": {"lr": 0.1}, "new": 1}, {}, rows(1, 4))
    for row in rows(5, 7):
        made.log(row)
    made.finish({}, [])
    assert identity(tracked / "online") == before
    run = client.get_run(before)
    assert (run.info.status, run.data.params["new"]) == ("FINISHED", "1")
    assert [m.step for m in client.get_metric_history(before, "round")] == [1, 2, 3, 4, 5, 6, 7]


def test_mlflow_gets_the_whole_history_of_a_run_that_the_server_does_not_know(
    tracked: Path, tmp_path: Path, client: MlflowClient
) -> None:
    folder = tracked / "moved"
    folder.mkdir()
    write_history(rows(1, 3), folder / "history.parquet")
    (folder / RECORD).write_text(
        json.dumps(
            {
                "experiment": "raysim",
                "name": "moved",
                "run_id": "0" * 32,
                "summary": {},
                "done": False,
            }
        )
    )
    assert replay(folder, default_uri(tracked))
    assert identity(folder) != "0" * 32
    assert [m.step for m in client.get_metric_history(identity(folder), "round")] == [1, 2, 3]


@pytest.mark.slow
def test_concurrent_runs_share_one_mlflow_database(
    tmp_path: Path,
) -> None:
    code = (
        "from pathlib import Path; from raysim.results.tracking import Tracker; import sys;"
        "t = Tracker(Path(sys.argv[1]), patience=600.0); import mlflow.tracking; sys.stdin.read();"
        "t.start({}, {}); t.log({'round': 1}); t.finish({}, [])"
    )
    folders = [tmp_path / name for name in "ab"]
    children = []
    for folder in folders:
        folder.mkdir()
        command = [sys.executable, "-c", code, str(folder)]
        pipe = subprocess.PIPE
        children.append(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        )
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    for child in children:
        assert child.stdout is not None
        said = [
            line for line in child.stdout if not line.startswith("raysim: waiting for ")
        ]  # the one that was second
        assert said == [] and child.wait() == 0
    assert len({identity(folder) for folder in folders}) == 2
    assert (tmp_path / "mlflow.db").is_file()
    assert all([path.name for path in folder.iterdir()] == [RECORD] for folder in folders)


def test_failing_mlflow_database_prints_no_traceback(mlflow_database: Path) -> None:
    Mlflow(f"sqlite:///{mlflow_database}")
    assert not logging.getLogger("mlflow.store.db.utils").isEnabledFor(logging.ERROR)


@pytest.fixture
def impatient_sqlite() -> Iterator[None]:
    """Reduce the time that SQLite waits for a lock to 0.1 seconds.

    MLflow sets this time to 20 seconds at each connection.
    """
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def shorten(_: Any, cursor: Any, statement: str, values: Any, *rest: Any) -> tuple[str, Any]:
        return statement.replace("busy_timeout = 20000", "busy_timeout = 100"), values

    event.listen(Engine, "before_cursor_execute", shorten, retval=True)
    yield
    event.remove(Engine, "before_cursor_execute", shorten)


def test_locked_mlflow_database_prints_no_traceback(
    impatient_sqlite: None,
    mlflow_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    lookup = SqlAlchemyStore.get_experiment
    other = sqlite3.connect(mlflow_database, isolation_level=None, check_same_thread=False)

    def lock_and_look_up(store: SqlAlchemyStore, identity: str) -> object:
        other.execute("BEGIN EXCLUSIVE")
        return lookup(store, identity)

    monkeypatch.setattr(SqlAlchemyStore, "get_experiment", lock_and_look_up)
    # As in a process that has not connected yet.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.INFO)
    with contextlib.closing(other), pytest.raises(Exception, match="locked"):
        Mlflow(f"sqlite:///{mlflow_database}")
    assert "Traceback" not in capfd.readouterr().err


def test_mlflow_experiment_just_created_by_another_process_is_used(
    mlflow_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Mlflow(f"sqlite:///{mlflow_database}")
    number = server.experiment("raysim")
    looked_up = server._client.get_experiment_by_name
    answers = iter([None, looked_up("raysim")])
    monkeypatch.setattr(server._client, "get_experiment_by_name", lambda name: next(answers))
    assert server.experiment("raysim") == number
