"""Sends a run to MLflow from a thread of its own; what a server does not take is kept on disk and sent later.

MLflow holds what was sent: on every new contact its last step is asked for, and only later rows follow. So a run that
is resumed, replayed or cut off in the middle of a call has no gap and no step twice.

A study and a sweep are runs of their own, the parents of their runs. The data set is an input of a run, its model an
output: `mlflow.pyfunc.load_model("runs:/ID/model")` predicts on inputs as the data set stores them.
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
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from raysim.primitives.commit import source_commit
from raysim.primitives.errors import Refused
from raysim.primitives.files import (
    parse_json,
    regular_file,
    user_path,
    wait_for_folder,
    without_password,
)
from raysim.results.history import Row, read_history, write_json

if TYPE_CHECKING:
    import numpy as np
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient
    from torch import nn

EXPERIMENT = "raysim"  # where runs are, unless another name is given
ARTIFACTS = "mlflow_artifacts"  # folder of what belongs to runs, beside the database
RECORD = (
    "tracking.json"  # the MLflow run that belongs to a run folder, and what it is told besides rows
)
BACKLOG = "tracking_backlog.jsonl"  # rows that no server has yet
MODEL = "mlflow_model"  # folder of a model that no server has yet
KIND = (
    "mlflow.experimentKind",
    "custom_model_development",
)  # of the experiment: its page shows runs, not traces
FINISH_TIMEOUT_S = 30.0  # seconds that finish waits: a first contact imports MLflow (5 s) and makes a database (3 s)
Record: TypeAlias = dict[str, object]

# Short limits, because a row that fails is tried again with the next one; and nothing of MLflow's own on the screen.
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


def default_uri(root: Path) -> str:
    """The SQLite file that all runs under one root share."""
    return f"sqlite:///{Path(root).resolve() / 'mlflow.db'}"


def expand_uri(uri: str) -> str:
    """The same address, ~ in it being the home folder. Raises Refused for what cannot be a path."""
    path = uri.removeprefix("sqlite:///")
    return f"{uri.removesuffix(path)}{user_path(path)}" if path.startswith("~") else uri


def flatten(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """{"a": {"b": 1}} as {"a.b": 1}; an empty mapping stays as a value, so that its key is seen."""
    flat: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _key(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)[:KEY_LENGTH]


def _text(value: object, limit: int) -> str:
    text = without_password(str(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if isinstance(value, Real)}


def short_reason(problem: BaseException) -> str:
    """A few words for why a call failed, out of the paragraph that an HTTP library makes of it."""
    text = without_password(str(problem)) or type(problem).__name__
    if match := re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", text):
        return match[1]
    return "no answer in time" if "timed out" in text else text.splitlines()[0][:160].rstrip(". ")


def source_tags() -> dict[str, str]:
    """Tags that MLflow shows in columns of their own: who ran what, at which commit of the files in this folder."""
    tags = {"mlflow.source.name": "raysim", "mlflow.source.type": "LOCAL"}
    tags |= {f"mlflow.source.git.{key}": value for key, value in source_commit().items()}
    with contextlib.suppress(
        OSError, KeyError, ImportError
    ):  # a container may know no name for its user
        tags["mlflow.user"] = getpass.getuser()
    return tags


def save_model(model: nn.Module, example: np.ndarray, folder: Path) -> None:
    """Write a model that is to be logged: a traced program and its weights, without pickled code of anybody's.

    model: maps a batch like `example` [2, ...] to scores [2, outputs]; other batches may have any length >= 1. Raises
    whatever PyTorch raises where it cannot trace it.
    """
    import mlflow.pytorch
    import numpy as np
    import torch
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    with torch.no_grad():
        scores = model(torch.from_numpy(example)).numpy()
    inputs, outputs = (
        Schema(
            [
                TensorSpec(
                    each.dtype if each.dtype != bool else np.dtype("uint8"), (-1, *each.shape[1:])
                )
            ]
        )
        for each in (example, scores)
    )
    shutil.rmtree(folder / MODEL, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that a recurrent layer's list of its own weights is traced, too
        mlflow.pytorch.save_model(
            model, str(folder / MODEL), input_example=example, signature=ModelSignature(inputs, outputs),
            serialization_format="pt2", pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}", "mlflow"],
        )  # fmt: skip


class TrackingServer(Protocol):
    """What the tracker needs from a tracking server; every method may raise whatever it likes."""

    def open(self, record: Record) -> str:
        """Continue the run that the record names, or create it; return its id."""

    def describe(self, record: Record) -> None:
        """Log the configuration, as far as it is not there yet."""

    def send(self, rows: Sequence[Row]) -> None:
        """Log the rows after the last one that the server has."""

    def close(self, record: Record, folder: Path) -> None:
        """Log the summary, upload the artifacts, end the run."""


class Mlflow:
    """One run on one MLflow server or database."""

    def __init__(self, uri: str) -> None:
        from mlflow.tracking import MlflowClient

        uri = expand_uri(uri)
        path = uri.removeprefix("sqlite:///")
        # What its database cannot do is told in a sentence; MLflow prints the traceback of every try, the first too.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
        self._database = Path(path).resolve() if path != uri else None
        with self._alone():
            self._client: MlflowClient = MlflowClient(tracking_uri=uri)
        self._run, self._last, self._started = "", 0, 0.0
        self._params: Mapping[str, str] = {}  # what the run has already
        self._has_data = self._has_model = False

    def open(self, record: Record) -> str:
        with self._alone():
            run = self._known(str(record.get("run_id") or "")) or self._create(record)
        self._run = run.info.run_id
        self._started = float(run.info.start_time)
        self._last = int(run.data.metrics.get("round", 0))
        self._params = run.data.params
        self._has_data = bool(run.inputs and run.inputs.dataset_inputs)
        self._has_model = bool(run.outputs and run.outputs.model_outputs)
        if run.info.status != "RUNNING":
            self._client.update_run(self._run, status="RUNNING")
        return self._run

    def _alone(self) -> AbstractContextManager[None]:
        """Two that make the tables or the experiment of one SQLite file at the same time fail."""
        return (
            wait_for_folder(self._database.parent, "tracking.uri")
            if self._database
            else nullcontext()
        )

    def _known(self, identity: str) -> Run | None:
        """None where this server never had the run, or where somebody deleted it there."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(identity) if identity else None
        except MlflowException as problem:
            if problem.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run is not None and run.info.lifecycle_stage == "active" else None

    def _create(self, record: Record) -> Run:
        tags = _mapping(record.get("tags"))
        if above := record.get("parent"):
            identity = read_record(Path(str(above))).get("run_id")
            if not identity:
                raise ConnectionError(
                    f"the run of {above} is not there yet"
                )  # tried again with the next row
            tags["mlflow.parentRunId"] = identity
        named = {_key(key): _text(value, TAG_LENGTH) for key, value in tags.items()}
        return self._client.create_run(
            self._experiment(str(record["experiment"])), tags=named, run_name=str(record["name"])
        )

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            if KIND[0] not in experiment.tags:  # an older raysim made it
                self._client.set_experiment_tag(experiment.experiment_id, *KIND)
            return str(experiment.experiment_id)
        place = None  # a server knows where its artifacts belong
        if self._database:
            place = (self._database.parent / ARTIFACTS).as_uri()
        from mlflow.exceptions import MlflowException

        try:
            return str(
                self._client.create_experiment(name, artifact_location=place, tags=dict([KIND]))
            )
        except MlflowException as problem:
            # Another process created it at this moment.
            experiment = self._client.get_experiment_by_name(name)
            if problem.error_code != "RESOURCE_ALREADY_EXISTS" or experiment is None:
                raise
            return str(experiment.experiment_id)

    def describe(self, record: Record) -> None:
        """Parameters cannot be changed in MLflow, so a run that goes on adds only those that are missing."""
        from mlflow.entities import Param

        config = _mapping(record.get("config"))
        flat = {_key(key): _text(value, PARAM_LENGTH) for key, value in flatten(config).items()}
        params = [Param(key, value) for key, value in flat.items() if key not in self._params]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            self._client.log_batch(self._run, params=params[start : start + PARAMS_PER_BATCH])
        if (data := _mapping(record.get("data"))) and not self._has_data:
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
        """One call per row; rows that have waited together share calls, but no row is split over two."""
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
        """Milliseconds; from the run's own clock, so that sending late or twice gives the same time."""
        return int(self._started + 1000 * _numbers(row).get("wall_seconds", 0.0))

    def _log(self, batch: Sequence[Metric]) -> None:
        self._client.log_batch(self._run, metrics=batch)
        self._last = max(metric.step for metric in batch)

    def close(self, record: Record, folder: Path) -> None:
        from mlflow.entities import Metric, RunTag

        flat = flatten(_mapping(record.get("summary")))
        end = self._time(flat)
        metrics = [
            Metric(_key(f"summary/{key}"), value, end, 0) for key, value in _numbers(flat).items()
        ]
        words = {key: value for key, value in flat.items() if isinstance(value, str)}
        tags = [RunTag(_key(key), _text(value, TAG_LENGTH)) for key, value in words.items()]
        self._client.log_batch(
            self._run, metrics=metrics[:METRICS_PER_BATCH], tags=tags[:PARAMS_PER_BATCH]
        )
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

    def _log_model(self, folder: Path) -> None:
        """As `mlflow.pytorch.log_model` would, but to this server, whatever the process has been told of another."""
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
    """tracking=none: nothing is recorded anywhere."""

    def start(
        self, config: Mapping[str, object], tags: Mapping[str, object], rows: Sequence[Row] = ()
    ) -> None:
        """Do nothing."""

    def known(self) -> None:
        """Do nothing."""

    def log(self, row: Row) -> None:
        """Do nothing."""

    def finish(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
    ) -> None:
        """Do nothing."""


class Tracker:
    """Hands a run to MLflow without ever making it wait, except for at most `patience` seconds at its end.

    `folder` is the run's; `say` prints one sentence (it is called from another thread). No method raises because of
    MLflow, its server or its database.
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
        for key, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(
                key, value
            )  # MLflow reads them at each call; a user's own values stay
        self._folder, self._uri = Path(folder), uri or default_uri(Path(folder).resolve().parent)
        self._record: Record = {
            "experiment": experiment,
            "name": name or self._folder.resolve().name,
        }
        self._say, self._patience, self._connect, self._command = say, patience, connect, command
        self._wake = threading.Condition()  # guards everything below, and the two files
        self._unsent: list[Row] = []
        self._filed = 0  # how many of them are in the backlog file
        self._latest = 0  # the last round that was handed in
        self._fresh = self._ending = self._left = self._settled = False
        self._problem = ""
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)

    def start(
        self,
        config: Mapping[str, object],
        tags: Mapping[str, object],
        rows: Sequence[Row] = (),
        parent: Path | None = None,
        data: Mapping[str, object] | None = None,
    ) -> None:
        """Begin, or continue what the folder's record names; `rows` is the history that a resumed run already has.

        parent: the folder of a tracked run to which this one belongs. data: the name and the digest of its data set,
        and what else is to be said of it.
        """
        with self._wake:
            self._record.update(read_record(self._folder))
            self._record.update(config=dict(config), tags=dict(tags), done=False)
            self._record.setdefault("run_id", None)
            if parent is not None:
                self._record["parent"] = str(parent)
            if data is not None:
                self._record["data"] = dict(data)
            write_json(self._record, self._folder / RECORD)
            backlog = read_backlog(self._folder)
            self._unsent = merge(rows, backlog)
            if backlog:
                self._append(self._unsent, anew=True)
            self._filed = len(self._unsent) if backlog else 0
            self._latest = _round(self._unsent[-1]) if self._unsent else 0
            self._fresh = True
        self._thread.start()

    def known(self) -> None:
        """Wait until the server has this run, so that others can belong to it; or until that failed, or `patience`."""
        with self._wake:
            self._wake.wait_for(lambda: self._settled or self._problem, self._patience)

    def log(self, row: Row) -> None:
        """Take one row of the history; a round that was handed in before (by the run this one continues) is skipped."""
        with self._wake:
            if _round(row) > self._latest:
                self._latest, self._fresh = _round(row), True
                self._unsent.append(dict(row))
                self._wake.notify_all()

    def finish(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
    ) -> None:
        """Send what is left, the summary and the files; then, or after `patience`, leave the rest on disk and say so.

        `status` is one of MLflow's: FINISHED, FAILED, KILLED.
        """
        self.end(summary, artifacts, status)
        self.wait()

    def end(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
    ) -> None:
        """The first half of `finish`, which takes no time: ask for what is left to be sent."""
        with self._wake:
            names = [os.path.relpath(path, self._folder) for path in artifacts]
            self._record.update(summary=dict(summary), artifacts=names, status=status)
            write_json(self._record, self._folder / RECORD)
            self._ending = True
            self._wake.notify_all()

    def wait(self, patience: float | None = None) -> None:
        """The second half of `finish`."""
        self._thread.join(self._patience if patience is None else patience)
        with self._wake:
            self._left = True  # a thread that hangs in a call must not touch the files any more
            if self._record.get("done"):
                return
            self._append(self._unsent[self._filed :])
            self._say(
                f"MLflow at {without_password(self._uri)} did not take the end of this run"
                f" ({self._problem or 'no answer in time'}): the rows are in {self._folder / BACKLOG}, and"
                f" `{self._command} out={self._folder} resume=latest` sends them."
            )

    def _work(self) -> None:
        server: TrackingServer | None = None
        ending = False
        while not ending:
            with self._wake:
                self._wake.wait_for(lambda: self._fresh or self._ending)
                rows, ending, self._fresh = list(self._unsent), self._ending, False
            try:
                server = server or self._contact()
                server.send(rows)
                if ending:
                    server.close(self._record, self._folder)
            except Exception as problem:
                server = None
                self._keep(short_reason(problem))
            else:
                self._settle(len(rows), ending)

    def _contact(self) -> TrackingServer:
        server = self._connect(self._uri)
        identity = server.open(self._record)
        with self._wake:
            if identity != self._record.get("run_id") and not self._left:
                self._record["run_id"] = (
                    identity  # at once: a contact that fails from here on must not make a second
                )
                write_json(self._record, self._folder / RECORD)
        server.describe(self._record)
        return server

    def _settle(self, sent: int, ended: bool) -> None:
        """The server has the first `sent` rows."""
        with self._wake:
            if self._left:
                return
            self._settled = True
            self._wake.notify_all()
            del self._unsent[:sent]
            self._filed = max(0, self._filed - sent)
            if self._filed == 0:
                (self._folder / BACKLOG).unlink(missing_ok=True)
            if ended:
                self._record["done"] = True
                write_json(self._record, self._folder / RECORD)

    def _keep(self, problem: str) -> None:
        """The server has nothing new: put on disk what is not there yet."""
        with self._wake:
            if self._left:
                return
            self._append(self._unsent[self._filed :])
            self._filed = len(self._unsent)
            first, self._problem = not self._problem, problem
            self._wake.notify_all()
            if first and not self._ending:
                self._say(
                    f"MLflow at {without_password(self._uri)} cannot be used ({problem}): the run goes on, its rows are"
                    f" kept in {self._folder / BACKLOG} and sent as soon as it can."
                )

    def _append(self, rows: Sequence[Row], anew: bool = False) -> None:
        if not rows:
            return
        try:
            with (self._folder / BACKLOG).open("w" if anew else "a") as stream:
                stream.writelines(json.dumps(_numbers(row)) + "\n" for row in rows)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as problem:
            self._say(
                f"{self._folder / BACKLOG} cannot be written ({problem}): the rows are in history.parquet alone."
            )


def replay(
    folder: Path,
    uri: str = "",
    *,
    say: Callable[[str], None] = print,
    connect: Callable[[str], TrackingServer] = Mlflow,
) -> bool:
    """Send what a server lacks of the run in this folder; True where nothing is left to send.

    A server that never had the run (another one, or a new database) gets all of it, from the history. Does nothing
    for a folder that was not tracked, and for one that was sent completely.
    """
    folder = Path(folder)
    record, backlog = read_record(folder), read_backlog(folder)
    if not record or (record.get("done") and not backlog):
        return True
    for key, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    uri = uri or default_uri(folder.resolve().parent)
    history = (
        read_history(folder / "history.parquet") if (folder / "history.parquet").is_file() else []
    )
    try:
        server = connect(uri)
        record["run_id"] = server.open(record)
        write_json(record, folder / RECORD)
        server.describe(record)
        server.send(rows := merge(history, backlog))
        if record.get("summary") is not None:
            server.close(record, folder)
            record["done"] = True
    except Exception as problem:
        say(
            f"MLflow at {without_password(uri)} cannot be used ({short_reason(problem)}):"
            f" the run's rows stay in {folder}, and `raysim run out={folder} resume=latest` tries again."
        )
        return False
    write_json(record, folder / RECORD)
    (folder / BACKLOG).unlink(missing_ok=True)
    say(
        f"sent to MLflow at {without_password(uri)}, which has all {len(rows)} rounds of {folder} now"
    )
    return True


def read_record(folder: Path) -> Record:
    """What `tracking.json` says; empty where there is none that can be read."""
    try:
        return dict(_mapping(parse_json(regular_file(folder / RECORD).read_bytes())))
    except (OSError, ValueError):
        return {}


def read_backlog(folder: Path) -> list[Row]:
    """Rows of the backlog file; a last line that a crash cut short is left out."""
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
    """The rows of both by round; where both have one, the second's."""
    rows = {_round(row): row for row in [*first, *second]}
    return [rows[index] for index in sorted(rows)]


def _round(row: Row) -> int:
    return int(row["round"] or 0)


def _mapping(value: object) -> dict[str, object]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def _names(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def find_experiment_id(uri: str) -> str:
    """The number of raysim's experiment in a database or on a server. Raises Refused where there is none."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        found = MlflowClient(tracking_uri=uri).get_experiment_by_name(EXPERIMENT)
    except MlflowException as error:
        raise Refused(
            f"{uri} gives no answer ({str(error).splitlines()[0][:120]}): is it MLflow's?"
        ) from error
    if found is None:
        raise Refused(f"{uri} knows no experiment called {EXPERIMENT}: no run has been sent there")
    return str(found.experiment_id)
