"""Store runs for MLflow, and send them to a server or, on request, to a local database.

Without `tracking.uri`, a run only stores in its folder what MLflow needs. `raysim ui` sends it to
the database next to the folder when the user wants to see it, because a short run takes less time
than importing MLflow, making its database and tracing the model. With `tracking.uri`, a thread
sends each row at once; rows that a server does not accept are sent later.

MLflow knows which rows were sent: each new connection asks for the last step, and only later rows
follow. Therefore no step is missing or repeated, even if a run is resumed, sent again or
interrupted during a call.

Studies and sweeps are MLflow runs, too: they are the parents of their runs. The data set is an
input of a run, its model an output: `mlflow.pyfunc.load_model("runs:/ID/model")` predicts on inputs
as the data set stores them.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import math
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from raysim.primitives.commit import source_commit
from raysim.primitives.errors import RefusedError, first_line
from raysim.primitives.files import (
    parse_json,
    regular_file,
    user_path,
    wait_for_folder,
    without_password,
)
from raysim.results.history import Row, last_round, read_history, write_json

if TYPE_CHECKING:
    import numpy as np
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient
    from mlflow.types import Schema
    from torch import nn

EXPERIMENT = "raysim"  # the default name of the experiment
ARTIFACTS = "mlflow_artifacts"  # folder of the files that belong to runs, next to the database
RECORD = "tracking.json"  # which MLflow run belongs to the folder, and its values besides rows
BACKLOG = "tracking_backlog.jsonl"  # rows that were not sent yet
MODEL = "mlflow_model"  # folder of a model that was not sent yet
MODEL_DATA = "data/data"  # in this folder: where MLflow puts a folder `data` with a traced program
# A tag of the experiment, so that its page opens on runs and not on traces of language models.
EXPERIMENT_KIND = ("mlflow.experimentKind", "custom_model_development")
DATABASE = "mlflow.db"
HISTORY = "history.parquet"
UI = "ui"  # in a record: `raysim ui` sends the run; otherwise the run's own process does
# A tag with the record's id. It finds the run if the record has no id of MLflow yet.
ID_TAG = "raysim.id"
# How long `finish` waits: the first call imports MLflow (5 s) and makes a database (3 s).
FINISH_TIMEOUT_S = 30.0
STORE_INTERVAL_S = 1.0  # the shortest time between two writes of a stored run
Record: TypeAlias = dict[str, object]
# keys that a record has once its run has ended
END_KEYS = ("summary", "artifacts", "status", "model")
PENDING = "pending"  # value of `model` if the model was not sent yet

# Short time limits, because an unsent row is sent again with the next row. MLflow prints nothing.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
METRICS_PER_BATCH, PARAMS_PER_BATCH = 1000, 100
KEY_LENGTH, PARAM_LENGTH, TAG_LENGTH = 250, 6000, 5000


def set_mlflow_environment() -> None:
    """Set environment variables that MLflow reads at each call; keep values of the user."""
    for key, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(key, value)


def default_uri(root: Path) -> str:
    """Return the address of the SQLite file that all runs in the folder `root` share."""
    return f"sqlite:///{Path(root).resolve() / DATABASE}"


def expand_uri(uri: str) -> str:
    """Replace ~ in an address by the home folder.

    Raise `RefusedError` if the address is not a valid path.
    """
    path = uri.removeprefix("sqlite:///")
    return f"{uri.removesuffix(path)}{user_path(path)}" if path.startswith("~") else uri


def flatten(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return {"a": {"b": 1}} as {"a.b": 1}.

    An empty mapping stays as the value of its key.
    """
    flat: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _key(name: str) -> str:
    """Return a name in which characters that MLflow does not accept are replaced."""
    return re.sub(r"[^\w\-. /]", "_", name)[:KEY_LENGTH]


def _text(value: object, limit: int) -> str:
    """Return a value as text of at most `limit` characters, without passwords."""
    text = without_password(str(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if isinstance(value, Real)}


def short_reason(problem: BaseException) -> str:
    """Return the cause of a failed call in a few words; errors of HTTP libraries are long."""
    text = without_password(str(problem)) or type(problem).__name__
    match = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", text)
    if match:
        return match[1]
    if "timed out" in text:
        return "no answer in time"
    return text.splitlines()[0][:160].rstrip(". ")


def source_tags() -> dict[str, str]:
    """Return the tags for MLflow's columns: the user, and the current folder's git commit."""
    tags = {"mlflow.source.name": "raysim", "mlflow.source.type": "LOCAL"}
    tags |= {f"mlflow.source.git.{key}": value for key, value in source_commit().items()}
    # In a container the user may have no name.
    with contextlib.suppress(OSError, KeyError, ImportError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def save_model(model: nn.Module, example: np.ndarray, folder: Path) -> None:
    """Write a model for MLflow: a traced program and its weights, without pickled code.

    model: module that maps inputs [B, ...] to scores [B, outputs] for any B >= 1.
    example: two inputs [2, ...]. Raises the error of PyTorch if it cannot trace the model.
    """
    import mlflow.pyfunc
    import torch
    from mlflow.models import Model, ModelSignature

    tensor = torch.from_numpy(example)
    with torch.no_grad():
        scores = model(tensor).numpy()
    inputs, outputs = (_tensor_schema(array) for array in (example, scores))
    version = torch.__version__
    description = Model()
    # `mlflow.pytorch.save_model` writes the same files. It imports Lightning and torchvision, if
    # they are installed, which takes longer than a short run.
    description.add_flavor(
        "pytorch", model_data=MODEL_DATA, pytorch_version=str(version), code=None
    )
    shutil.rmtree(folder / MODEL, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        # PyTorch warns that a recurrent layer's list of weights is traced, too.
        warnings.simplefilter("ignore")
        batch = getattr(torch.export.Dim, "AUTO", None) or torch.export.Dim("batch", min=1)
        program = torch.export.export(model, (tensor,), dynamic_shapes=[{0: batch}])
        data = Path(temporary) / "data"
        data.mkdir()
        torch.export.save(program, data / "model.pt2")
        mlflow.pyfunc.save_model(
            str(folder / MODEL),
            loader_module="mlflow.pytorch",
            data_path=str(data),
            mlflow_model=description,
            input_example=example,
            signature=ModelSignature(inputs, outputs),
            pip_requirements=[f"torch=={version.partition('+')[0]}", "mlflow"],
        )


def _tensor_schema(array: np.ndarray) -> Schema:
    """Describe batches of any length with the shape and type of `array` [B, ...].

    Booleans are described as uint8, because MLflow has no boolean tensors.
    """
    import numpy as np
    from mlflow.types import Schema, TensorSpec

    dtype = np.dtype("uint8") if array.dtype == bool else array.dtype
    return Schema([TensorSpec(dtype, (-1, *array.shape[1:]))])


class TrackingServer(Protocol):
    """The interface of a tracking server, as the tracker uses it.

    Every method may raise any error.
    """

    def open(self, record: Record, folder: Path) -> str:
        """Continue the run that a folder's record names, or create a run; return its id."""

    def describe(self, record: Record) -> None:
        """Log the part of the configuration that the server lacks."""

    def send(self, rows: Sequence[Row]) -> None:
        """Log the rows that come after the server's last row."""

    def close(self, record: Record, folder: Path) -> None:
        """Log the summary, upload the artifacts, end the run."""


class Mlflow:
    """A connection to an MLflow server or database, for one run."""

    def __init__(self, uri: str) -> None:
        from mlflow.tracking import MlflowClient

        uri = expand_uri(uri)
        path = uri.removeprefix("sqlite:///")
        # The tracker reports problems in a sentence; MLflow would print a traceback of every try.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        self._database = Path(path).resolve() if path != uri else None
        with self._database_lock():
            self._client: MlflowClient = MlflowClient(tracking_uri=uri)
        self._run, self._last, self._started = "", 0, 0.0
        self._params: Mapping[str, str] = {}  # parameters that the server has already
        self._has_data = self._has_model = False

    def open(self, record: Record, folder: Path) -> str:
        with self._database_lock():
            run = self._find_run(record) or self._create(record, folder)
        self._use(run)
        if run.info.status != "RUNNING":
            self._client.update_run(self._run, status="RUNNING")
        return self._run

    def _use(self, run: Run) -> None:
        """Read what a run on the server already has: rows, parameters, data and model."""
        self._run = run.info.run_id
        self._started = float(run.info.start_time)
        self._last = int(run.data.metrics.get("round", 0))
        self._params = run.data.params
        self._has_data = bool(run.inputs and run.inputs.dataset_inputs)
        self._has_model = bool(run.outputs and run.outputs.model_outputs)

    def _database_lock(self) -> AbstractContextManager[None]:
        """Lock a SQLite database while its tables or its experiment are created.

        Without the lock, one of two processes would fail.
        """
        return (
            wait_for_folder(self._database.parent, "tracking.uri")
            if self._database
            else nullcontext()
        )

    def _find_run(self, record: Record) -> Run | None:
        """Return MLflow's run of a record; None if the server has no such run, or deleted it."""
        from mlflow.exceptions import MlflowException

        identity = str(record.get("run_id") or "") or self._find_id(record)
        try:
            run = self._client.get_run(identity) if identity else None
        except MlflowException as problem:
            if problem.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run is not None and run.info.lifecycle_stage == "active" else None

    def _find_id(self, record: Record) -> str:
        """Search for a run whose record has no MLflow id; return the id, or "" if there is none."""
        if record.get("sent_by") != UI:
            return ""
        experiment = self._client.get_experiment_by_name(str(record["experiment"]))
        if experiment is None:
            return ""
        condition = f"tags.`{ID_TAG}` = '{record['id']}'"
        runs = self._client.search_runs([experiment.experiment_id], condition, max_results=1)
        return str(runs[0].info.run_id) if runs else ""

    def _create(self, record: Record, folder: Path) -> Run:
        tags = _mapping(record.get("tags"))
        if "id" in record:
            tags[ID_TAG] = record["id"]
        parent = record.get("parent")
        if parent:
            parent_record = read_record(folder / str(parent))
            parent_id = parent_record.get("run_id") or self._find_id(parent_record)
            if not parent_id:
                # The tracker tries again with the next row.
                raise ConnectionError(f"the run of {parent} is not there yet")
            tags["mlflow.parentRunId"] = parent_id
        named = {_key(key): _text(value, TAG_LENGTH) for key, value in tags.items()}
        return self._client.create_run(
            self.experiment(str(record["experiment"])), tags=named, run_name=str(record["name"])
        )

    def experiment(self, name: str) -> str:
        """Return the id of the experiment with this name; create a missing experiment."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            if EXPERIMENT_KIND[0] not in experiment.tags:  # an older raysim made it
                self._client.set_experiment_tag(experiment.experiment_id, *EXPERIMENT_KIND)
            return str(experiment.experiment_id)
        location = None  # a server chooses the location of its artifacts
        if self._database:
            location = (self._database.parent / ARTIFACTS).as_uri()
        from mlflow.exceptions import MlflowException

        try:
            return str(
                self._client.create_experiment(
                    name, artifact_location=location, tags=dict([EXPERIMENT_KIND])
                )
            )
        except MlflowException as problem:
            # Another process may have created it at this moment.
            experiment = self._client.get_experiment_by_name(name)
            if problem.error_code != "RESOURCE_ALREADY_EXISTS" or experiment is None:
                raise
            return str(experiment.experiment_id)

    def describe(self, record: Record) -> None:
        """Log the parameters that the server lacks.

        MLflow does not allow changes of existing parameters.
        """
        from mlflow.entities import Param

        config = _mapping(record.get("config"))
        flat = {_key(key): _text(value, PARAM_LENGTH) for key, value in flatten(config).items()}
        params = [Param(key, value) for key, value in flat.items() if key not in self._params]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            self._client.log_batch(self._run, params=params[start : start + PARAMS_PER_BATCH])
        data = _mapping(record.get("data"))
        if data and not self._has_data:
            self._log_data(data)

    def _log_data(self, data: Mapping[str, object]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        name, digest = str(data["name"])[:500], str(data["digest"])[:36]
        profile = {key: value for key, value in data.items() if key not in ("name", "digest")}
        source = json.dumps({"tags": {"mlflow.source.name": "raysim"}})
        stored = Dataset(name, digest, "code", source, profile=json.dumps(profile))
        self._client.log_inputs(
            self._run,
            datasets=[DatasetInput(stored, [InputTag("mlflow.data.context", "training")])],
        )

    def send(self, rows: Sequence[Row]) -> None:
        """Log the rows after the last logged one.

        A call sends several rows; no row is split over two calls.
        """
        from mlflow.entities import Metric

        batch: list[Metric] = []
        step = self._last
        for row in sorted(rows, key=_round):
            if _round(row) <= step:
                continue
            step = _round(row)
            metrics = [
                Metric(_key(key), value, self._time(row), step)
                for key, value in _numbers(row).items()
            ]
            if batch and len(batch) + len(metrics) > METRICS_PER_BATCH:
                self._log(batch)
                batch = []
            batch += metrics
        if batch:
            self._log(batch)

    def _time(self, row: Mapping[str, object]) -> int:
        """Return the wall time of a row in ms; the time is the same if the row is sent again."""
        return int(self._started + 1000 * _numbers(row).get("wall_seconds", 0.0))

    def _log(self, batch: Sequence[Metric]) -> None:
        self._client.log_batch(self._run, metrics=batch)
        self._last = max(metric.step for metric in batch)

    def close(self, record: Record, folder: Path) -> None:
        from mlflow.entities import RunTag

        # They are not logged as metrics, because MLflow would draw a bar for each above the curves.
        flat = flatten(_mapping(record.get("summary")))
        tags = []
        for key, value in flat.items():
            if isinstance(value, str):
                tags.append(RunTag(_key(key), _text(value, TAG_LENGTH)))
            elif isinstance(value, Real):
                tags.append(RunTag(_key(key), f"{float(value):.6g}"))
        for start in range(0, len(tags), PARAMS_PER_BATCH):
            self._client.log_batch(self._run, tags=tags[start : start + PARAMS_PER_BATCH])
        for name in _names(record.get("artifacts")):
            path = folder / name
            if path.is_file():
                self._client.log_artifact(self._run, str(path))
            elif path.is_dir():
                self._client.log_artifacts(self._run, str(path), artifact_path=path.name)
        if (folder / MODEL / "MLmodel").is_file():
            if not self._has_model:
                self._log_model(folder / MODEL)
            shutil.rmtree(folder / MODEL)
        self._client.set_terminated(self._run, status=str(record.get("status") or "FINISHED"))

    def add_model(self, record: Record, folder: Path) -> None:
        """Log the model in a folder, unless the record's run has a model on the server already."""
        run = self._find_run(record)
        if run is None:
            raise ConnectionError(f"the run {record['name']} is not there")
        self._use(run)
        if not self._has_model:
            self._log_model(folder)

    def _log_model(self, folder: Path) -> None:
        """Store a model on this server, as `mlflow.pytorch.log_model` does.

        MLflow's function would use the server that is set for the whole process.
        """
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import Model

        experiment = self._client.get_run(self._run).info.experiment_id
        logged = self._client.create_logged_model(experiment, name="model", source_run_id=self._run)
        model = Model.load(str(folder))
        model.run_id, model.model_id, model.model_uuid = self._run, logged.model_id, logged.model_id
        model.artifact_path = logged.artifact_location
        model.save(str(folder / "MLmodel"))
        self._client.log_model_artifacts(logged.model_id, str(folder))
        self._client.finalize_logged_model(logged.model_id, "READY")
        self._client.log_outputs(self._run, [LoggedModelOutput(logged.model_id, self._last)])


class NoTracker:
    """The tracker of tracking=none: it records nothing."""

    def start(
        self,
        config: Mapping[str, object],
        tags: Mapping[str, object],
        rows: Sequence[Row] = (),
        parent: Path | None = None,
        data: Mapping[str, object] | None = None,
    ) -> None:
        """Do nothing."""

    def wait_until_known(self) -> None:
        """Do nothing."""

    def log(self, row: Row) -> None:
        """Do nothing."""

    def finish(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
        model: str | None = None,
    ) -> None:
        """Do nothing."""


class StoredTracker:
    """A tracker that keeps a run in its folder, from which `raysim ui` sends it to MLflow.

    This class does not import MLflow. Rows are kept in the backlog file until history.parquet has
    them.

    folder: the run's folder.
    say: function that prints one sentence.
    """

    def __init__(
        self,
        folder: Path,
        *,
        experiment: str = EXPERIMENT,
        name: str = "",
        say: Callable[[str], None] = print,
    ) -> None:
        self._folder = Path(folder)
        self._record: Record = {
            "experiment": experiment,
            "name": name or self._folder.resolve().name,
        }
        self._say = say
        self._unsent: list[Row] = []
        self._stored_rows = 0  # how many of the unsent rows are in the backlog file
        self._last_round = 0  # of the rows that `log` got
        self._stored_at = -math.inf  # on the clock of time.monotonic()
        self._store_interval = STORE_INTERVAL_S

    def start(
        self,
        config: Mapping[str, object],
        tags: Mapping[str, object],
        rows: Sequence[Row] = (),
        parent: Path | None = None,
        data: Mapping[str, object] | None = None,
    ) -> None:
        """Begin a run, or continue the run that the folder's record describes.

        rows: the earlier history of a resumed run.
        parent: the folder of the tracked study or sweep to which this run belongs; None without
        one.
        data: name and digest of the data set, and other facts about it.
        """
        self._begin(config, tags, rows, parent, data, sender=UI)
        self._store()

    def _begin(
        self,
        config: Mapping[str, object],
        tags: Mapping[str, object],
        rows: Sequence[Row],
        parent: Path | None,
        data: Mapping[str, object] | None,
        sender: str,
    ) -> None:
        """Write the record of a run that begins or continues, and collect its unsent rows.

        sender: who sends the run: the run itself, or `raysim ui`.
        """
        self._record.update(read_record(self._folder))
        for key in END_KEYS:
            self._record.pop(key, None)
        self._record.update(config=dict(config), tags=dict(tags), sent_by=sender, done=False)
        self._record.setdefault("run_id", None)
        self._record.setdefault("id", uuid.uuid4().hex)
        if parent is not None:
            # The path is relative, so that a study can be moved before it is sent.
            self._record["parent"] = os.path.relpath(parent, self._folder)
        if data is not None:
            self._record["data"] = dict(data)
        write_json(self._record, self._folder / RECORD)
        backlog = read_backlog(self._folder)
        self._unsent = merge(rows, backlog)
        if backlog:
            self._append(self._unsent, replace=True)
        self._stored_rows = len(self._unsent) if backlog else 0
        self._last_round = _round(self._unsent[-1]) if self._unsent else 0

    def wait_until_known(self) -> None:
        """Do nothing: `raysim ui` sends a parent before its runs."""

    def log(self, row: Row) -> None:
        """Add a row of the history; skip a round that was added before the run was resumed."""
        if _round(row) <= self._last_round:
            return
        self._last_round = _round(row)
        self._unsent.append(dict(row))
        if time.monotonic() - self._stored_at >= self._store_interval:
            self._store()

    def _store(self) -> None:
        """Append the rows that are only in memory to the backlog file."""
        self._append(self._unsent[self._stored_rows :])
        self._unsent, self._stored_rows = [], 0
        self._stored_at = time.monotonic()

    def finish(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
        model: str | None = None,
    ) -> None:
        """Store the remaining rows, the summary, and the names of the files.

        artifacts: the files to upload.
        status: a status of MLflow: FINISHED, FAILED or KILLED.
        model: `PENDING` makes the sender look for a shared model in the folder and save it for
        MLflow.
        """
        self.end(summary, artifacts, status, model)
        self.wait()

    def end(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
        model: str | None = None,
    ) -> None:
        """Store the remaining rows, the summary and the names of the files, without waiting.

        `finish` calls `end`, then `wait`. For the arguments see `finish`.
        """
        self._store()
        self._write_end(summary, artifacts, status, model)
        if last_round(self._folder / HISTORY) >= self._last_round:
            (self._folder / BACKLOG).unlink(missing_ok=True)

    def _write_end(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path],
        status: str,
        model: str | None,
    ) -> None:
        names = [os.path.relpath(path, self._folder) for path in artifacts]
        self._record.update(summary=dict(summary), artifacts=names, status=status, model=model)
        write_json(self._record, self._folder / RECORD)

    def wait(self, patience: float | None = None) -> None:
        """Wait until everything is sent. This class sends nothing, so it does not wait."""

    def _append(self, rows: Sequence[Row], replace: bool = False) -> None:
        """Write rows to the backlog file.

        replace: True replaces the rows in the file.
        """
        if not rows:
            return
        try:
            with (self._folder / BACKLOG).open("w" if replace else "a") as stream:
                stream.writelines(json.dumps(_numbers(row)) + "\n" for row in rows)
                stream.flush()
                # otherwise history.parquet gets the rows, too
                if self._record.get("sent_by") != UI:
                    os.fsync(stream.fileno())
        except OSError as problem:
            self._say(
                f"{self._folder / BACKLOG} cannot be written ({problem}): the rows are only in "
                "history.parquet."
            )


class Tracker(StoredTracker):
    """A tracker that sends a run to MLflow from another thread.

    At its end the run waits at most `patience` seconds.
    folder: the run's folder.
    say: function that prints one sentence. It is called from another thread.

    No method raises an error because of MLflow, its server or its database.
    """

    def __init__(
        self,
        folder: Path,
        uri: str = "",
        *,
        experiment: str = EXPERIMENT,
        name: str = "",
        say: Callable[[str], None] = print,
        patience: float = FINISH_TIMEOUT_S,
        command: str = "raysim run",
        connect: Callable[[str], TrackingServer] = Mlflow,
    ) -> None:
        super().__init__(folder, experiment=experiment, name=name, say=say)
        set_mlflow_environment()
        self._uri = uri or default_uri(self._folder.resolve().parent)
        self._patience = patience
        self._connect = connect
        self._command = command
        # Guards all attributes below and in the base class, and the two files.
        self._wake = threading.Condition()
        self._has_news = False  # True if there are rows that the thread has not seen
        self._is_ending = False
        self._is_abandoned = False  # True if the thread hangs; it must not write files any more
        self._is_known = False  # True if the server has this run
        self._problem = ""
        self._thread = threading.Thread(target=self._run_thread, name="tracking", daemon=True)

    def start(
        self,
        config: Mapping[str, object],
        tags: Mapping[str, object],
        rows: Sequence[Row] = (),
        parent: Path | None = None,
        data: Mapping[str, object] | None = None,
    ) -> None:
        """Begin a run like `StoredTracker.start`, and start the thread that sends it."""
        with self._wake:
            self._begin(config, tags, rows, parent, data, sender="run")
            self._has_news = True
        self._thread.start()

    def wait_until_known(self) -> None:
        """Wait until the server has this run, so that other runs can be its children.

        The wait ends after `patience` seconds, or when sending has failed.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._is_known or self._problem, self._patience)

    def log(self, row: Row) -> None:
        """Add a row like `StoredTracker.log`; the thread sends it."""
        with self._wake:
            if _round(row) > self._last_round:
                self._last_round, self._has_news = _round(row), True
                self._unsent.append(dict(row))
                self._wake.notify_all()

    def end(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
        model: str | None = None,
    ) -> None:
        """Tell the thread to send the remaining rows, the summary and the files; do not wait."""
        with self._wake:
            self._write_end(summary, artifacts, status, model)
            self._is_ending = True
            self._wake.notify_all()

    def wait(self, patience: float | None = None) -> None:
        """Wait until everything is sent.

        After `patience` seconds the unsent rows stay on disk, and a printed sentence says so.
        """
        self._thread.join(self._patience if patience is None else patience)
        with self._wake:
            self._is_abandoned = True
            if self._record.get("done"):
                return
            self._append(self._unsent[self._stored_rows :])
            self._say(
                f"MLflow at {without_password(self._uri)} did not accept the last rows of this run"
                f" ({self._problem or 'no answer in time'}): they are in"
                f" {self._folder / BACKLOG}, and `{self._command} out={self._folder}"
                " resume=latest` sends them."
            )

    def _run_thread(self) -> None:
        server: TrackingServer | None = None
        ending = False
        while not ending:
            with self._wake:
                self._wake.wait_for(lambda: self._has_news or self._is_ending)
                rows, ending, self._has_news = list(self._unsent), self._is_ending, False
            try:
                server = server or self._contact()
                server.send(rows)
                if ending:
                    server.close(self._record, self._folder)
            except Exception as problem:
                server = None
                self._store_unsent(short_reason(problem))
            else:
                self._mark_sent(len(rows), ending)

    def _contact(self) -> TrackingServer:
        server = self._connect(self._uri)
        identity = server.open(self._record, self._folder)
        with self._wake:
            if identity != self._record.get("run_id") and not self._is_abandoned:
                # Stored at once: a contact that fails later must not create a second run.
                self._record["run_id"] = identity
                write_json(self._record, self._folder / RECORD)
        server.describe(self._record)
        return server

    def _mark_sent(self, sent: int, ended: bool) -> None:
        """Remove the first `sent` rows from memory and from the backlog file: the server has them.

        ended: True if the server also has the end of the run.
        """
        with self._wake:
            if self._is_abandoned:
                return
            self._is_known = True
            self._wake.notify_all()
            del self._unsent[:sent]
            self._stored_rows = max(0, self._stored_rows - sent)
            if self._stored_rows == 0:
                (self._folder / BACKLOG).unlink(missing_ok=True)
            if ended:
                self._record["done"] = True
                write_json(self._record, self._folder / RECORD)

    def _store_unsent(self, problem: str) -> None:
        """Append the rows that are not sent to the backlog file; print the run's first problem."""
        with self._wake:
            if self._is_abandoned:
                return
            self._append(self._unsent[self._stored_rows :])
            self._stored_rows = len(self._unsent)
            is_first_problem = not self._problem
            self._problem = problem
            self._wake.notify_all()
            if is_first_problem and not self._is_ending:
                self._say(
                    f"MLflow at {without_password(self._uri)} cannot be used ({problem}): the run "
                    f"continues, and its rows are kept in {self._folder / BACKLOG} and sent as "
                    "soon as possible."
                )


def make_tracker(
    folder: Path,
    uri: str | None,
    name: str = "",
    say: Callable[[str], None] = print,
    command: str = "raysim run",
) -> StoredTracker:
    """Return a tracker that sends a run to an address, or one that only stores the run.

    uri: the address; None or "" stores the run.
    """
    if not uri:
        return StoredTracker(folder, name=name, say=say)
    return Tracker(folder, uri, name=name, say=say, command=command)


def replay(
    folder: Path,
    uri: str = "",
    *,
    say: Callable[[str], None] = print,
    connect: Callable[[str], TrackingServer] = Mlflow,
) -> bool:
    """Send the missing rows of the run in a folder; return True if nothing is left to send.

    If the server never had the run (another server, or a new database), it gets all rows from the
    history. A folder needs nothing if its run was not tracked or was sent completely.
    uri: the address of the server; "" takes the SQLite file next to the folder.
    say: function that prints one sentence.
    connect: function that returns a connected server.
    """
    folder = Path(folder)
    record, backlog = read_record(folder), read_backlog(folder)
    if not record or (record.get("done") and not backlog):
        return True
    set_mlflow_environment()
    uri = uri or default_uri(folder.resolve().parent)
    history = read_history(folder / HISTORY) if (folder / HISTORY).is_file() else []
    try:
        server = connect(uri)
        record["run_id"] = server.open(record, folder)
        write_json(record, folder / RECORD)
        server.describe(record)
        rows = merge(history, backlog)
        server.send(rows)
        if record.get("summary") is not None:
            server.close(record, folder)
            record["done"] = True
    except Exception as problem:
        say(
            f"MLflow at {without_password(uri)} cannot be used ({short_reason(problem)}):"
            f" the run's rows stay in {folder}, and `raysim run out={folder} resume=latest`"
            " tries again."
        )
        return False
    write_json(record, folder / RECORD)
    (folder / BACKLOG).unlink(missing_ok=True)
    say(
        f"sent to MLflow at {without_password(uri)}, which has all {len(rows)} rounds of"
        f" {folder} now"
    )
    return True


def send_stored(folder: Path, record: Record, server: TrackingServer, is_open: bool) -> None:
    """Send the new rows of a stored run, and its end if the run has ended.

    The files of a run in progress are only read, because the run's process writes them.
    is_open: True if the server has opened the run before. Any error of the server may be raised.
    """
    run_id = record.get("run_id") if is_open else server.open(record, folder)
    if not is_open:
        server.describe(record)
    history = read_history(folder / HISTORY) if (folder / HISTORY).is_file() else []
    server.send(merge(history, read_backlog(folder)))
    if not has_ended(record):
        return
    server.close(record, folder)
    if read_record(folder) == record:  # if not, another process has continued the run
        write_json({**record, "run_id": run_id, "done": True}, folder / RECORD)
        (folder / BACKLOG).unlink(missing_ok=True)


def has_ended(record: Record) -> bool:
    """Return True if a run's process has written the end of the run into the record."""
    return record.get("summary") is not None


def read_record(folder: Path) -> Record:
    """Return the content of `tracking.json`; {} if it cannot be read."""
    try:
        return dict(_mapping(parse_json(regular_file(folder / RECORD).read_bytes())))
    except (OSError, ValueError):
        return {}


def read_backlog(folder: Path) -> list[Row]:
    """Return the rows of the backlog file; skip a last line that a crash has cut off."""
    try:
        lines = regular_file(folder / BACKLOG).read_bytes().splitlines()
    except (OSError, ValueError):
        return []
    rows: list[Row] = []
    for line in lines:
        try:
            rows.append(_numbers(_mapping(parse_json(line))))
        except (ValueError, OverflowError):
            continue
    return [row for row in rows if math.isfinite(row.get("round", math.nan) or 0)]


def merge(first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """Return the rows of both lists in order.

    If both have a row of the same round, the row of the second list is used.
    """
    rows = {_round(row): row for row in [*first, *second]}
    return [rows[index] for index in sorted(rows)]


def _round(row: Row) -> int:
    return int(row["round"] or 0)


def _mapping(value: object) -> dict[str, object]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def _names(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def save_problem(error: Exception) -> str:
    """Return a sentence that says why a model could not be saved as a program."""
    if isinstance(error, RefusedError):
        return str(error)
    if not isinstance(error, OSError):
        return f"it cannot be traced: {first_line(error)}"
    try:
        Path.cwd()
    except FileNotFoundError:  # the usual cause of an error that names no file
        return "the folder that this process works in is gone"
    return f"a file fails: {first_line(error)}"


def make_experiment(uri: str) -> str:
    """Return the id of raysim's experiment in a database; create whatever is missing."""
    return Mlflow(uri).experiment(EXPERIMENT)


def find_experiment_id(uri: str) -> str:
    """Return the id of raysim's experiment on a server.

    Raise `RefusedError` if the server has no such experiment.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        experiment = MlflowClient(tracking_uri=uri).get_experiment_by_name(EXPERIMENT)
    except MlflowException as error:
        problem = str(error).splitlines()[0][:120]
        raise RefusedError(
            f"{uri} does not answer ({problem}). Set a database or a server of MLflow."
        ) from error
    if experiment is None:
        raise RefusedError(f"{uri} has no experiment {EXPERIMENT!r}. Send a run there first.")
    return str(experiment.experiment_id)
