"""Send runs to an MLflow server or database.

The round is the step of MLflow's metrics. A new connection sends the rounds after the last one that
MLflow has, so none is missing or repeated. A study or a sweep is the parent of its runs. The stored
model normalises its inputs itself, so it takes raw samples, as the data set stores them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from raysim.primitives.errors import RefusedError, first_line
from raysim.primitives.files import user_path, wait_for_folder, without_password
from raysim.results.history import Row
from raysim.results.tracked_run import (
    EXPERIMENT,
    MODEL,
    UI,
    Record,
    as_mapping,
    as_names,
    flatten,
    numbers_in,
    read_record,
    round_of,
)

if TYPE_CHECKING:
    import numpy as np
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient
    from mlflow.types import Schema
    from torch import nn

ARTIFACTS = "mlflow_artifacts"  # folder of the files that belong to runs, next to the database
MODEL_DATA = "data/data"  # in this folder: where MLflow puts a folder `data` with a traced program
# A tag of the experiment, so that its page opens on runs and not on traces of language models.
EXPERIMENT_KIND = ("mlflow.experimentKind", "custom_model_development")
DATABASE = "mlflow.db"
# A tag with the record's id. It finds the run if the record has no id of MLflow yet.
ID_TAG = "raysim.id"
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
    """Set environment variables that MLflow reads at each call; keep those that the user set."""
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


class TrackingServer(Protocol):
    """The interface of a tracking server, as `Tracker` uses it to send one run.

    A record is the content of the run's tracking.json: the id on the server, name, experiment,
    configuration and, at the end, the summary.

    Every method may raise any error; `Tracker` then tries again later.
    """

    def open(self, record: Record, folder: Path) -> str:
        """Continue the run on the server, or create it there if it does not exist; return its id.

        record: the record of the run.
        folder: the run's folder.
        """

    def describe(self, record: Record) -> None:
        """Log the configuration and the description of the data set.

        Parts that the server has already are not sent again.
        """

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
        """Choose a run of MLflow for all later requests; read what MLflow stores of this run."""
        self._run = run.info.run_id
        self._started = float(run.info.start_time)
        self._last = int(run.data.metrics.get("round", 0))
        self._params = run.data.params
        self._has_data = bool(run.inputs and run.inputs.dataset_inputs)
        self._has_model = bool(run.outputs and run.outputs.model_outputs)

    def _database_lock(self) -> AbstractContextManager[None]:
        """Lock a SQLite database while its tables or its experiment are created.

        Without the lock, two processes may create them at the same time, and one of them fails.
        """
        return (
            wait_for_folder(self._database.parent, "tracking.uri")
            if self._database
            else nullcontext()
        )

    def _find_run(self, record: Record) -> Run | None:
        """Return MLflow's run for a record; None if there is none, or if it was deleted in MLflow.

        record: the content of the run's tracking.json.
        """
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
        """Search MLflow for its copy of a run of raysim; return MLflow's id of this copy.

        The copy has the record's `id` as a tag. Return "" without a copy. Also return "" if the
        record does not say that `raysim ui` sends the run.
        """
        if record.get("sent_by") != UI:
            return ""
        experiment = self._client.get_experiment_by_name(str(record["experiment"]))
        if experiment is None:
            return ""
        condition = f"tags.`{ID_TAG}` = '{record['id']}'"
        runs = self._client.search_runs([experiment.experiment_id], condition, max_results=1)
        return str(runs[0].info.run_id) if runs else ""

    def _create(self, record: Record, folder: Path) -> Run:
        tags = as_mapping(record.get("tags"))
        if "id" in record:
            tags[ID_TAG] = record["id"]
        parent = record.get("parent")
        if parent:
            parent_record = read_record(folder / str(parent))
            parent_id = parent_record.get("run_id") or self._find_id(parent_record)
            if not parent_id:
                # The tracker tries again with the next row.
                raise ConnectionError(
                    f"MLflow does not yet have the study or sweep of this run, {parent}. raysim "
                    "sends the run to MLflow as soon as MLflow has its study or sweep"
                )
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
        """Log the configuration as parameters, and the name and digest of the data set.

        Values that MLflow already stores are not sent again.
        record: the content of the run's tracking.json, with the configuration.
        """
        from mlflow.entities import Param

        config = as_mapping(record.get("config"))
        flat = {_key(key): _text(value, PARAM_LENGTH) for key, value in flatten(config).items()}
        params = [Param(key, value) for key, value in flat.items() if key not in self._params]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            self._client.log_batch(self._run, params=params[start : start + PARAMS_PER_BATCH])
        data = as_mapping(record.get("data"))
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
        """Log the rows of all rounds after the last round that is stored in MLflow.

        Each request sends all numeric values of one or more rows, never only a part of a row.
        """
        from mlflow.entities import Metric

        batch: list[Metric] = []
        step = self._last
        for row in sorted(rows, key=round_of):
            if round_of(row) <= step:
                continue
            step = round_of(row)
            metrics = [
                Metric(_key(key), value, self._time(row), step)
                for key, value in numbers_in(row).items()
            ]
            if batch and len(batch) + len(metrics) > METRICS_PER_BATCH:
                self._log(batch)
                batch = []
            batch += metrics
        if batch:
            self._log(batch)

    def _time(self, row: Mapping[str, object]) -> int:
        """Return the wall time of a row as Unix time in milliseconds.

        It depends only on the row and the start of the run in MLflow. Therefore a row that is sent
        twice has the same time.
        """
        return int(self._started + 1000 * numbers_in(row).get("wall_seconds", 0.0))

    def _log(self, batch: Sequence[Metric]) -> None:
        self._client.log_batch(self._run, metrics=batch)
        self._last = max(metric.step for metric in batch)

    def close(self, record: Record, folder: Path) -> None:
        from mlflow.entities import RunTag

        # They are not logged as metrics, because MLflow would draw a bar for each above the curves.
        flat = flatten(as_mapping(record.get("summary")))
        tags = []
        for key, value in flat.items():
            if isinstance(value, str):
                tags.append(RunTag(_key(key), _text(value, TAG_LENGTH)))
            elif isinstance(value, Real):
                tags.append(RunTag(_key(key), f"{float(value):.6g}"))
        for start in range(0, len(tags), PARAMS_PER_BATCH):
            self._client.log_batch(self._run, tags=tags[start : start + PARAMS_PER_BATCH])
        for name in as_names(record.get("artifacts")):
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
        """Log a run's model, unless MLflow has a model of this run already.

        record: the content of the run's tracking.json.
        folder: the folder of the model, in MLflow's format.
        """
        run = self._find_run(record)
        if run is None:
            raise ConnectionError(
                f"MLflow does not have the run {record['name']}, so its model cannot be stored; "
                "the run was deleted there, or it was never sent"
            )
        self._use(run)
        if not self._has_model:
            self._log_model(folder)

    def _log_model(self, folder: Path) -> None:
        """Store a model on the server of this connection.

        MLflow's own function would use another server: the one that is set for the whole process.
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


def _key(name: str) -> str:
    """Return a name that MLflow accepts: shortened, and with "_" for unsupported characters."""
    return re.sub(r"[^\w\-. /]", "_", name)[:KEY_LENGTH]


def _text(value: object, limit: int) -> str:
    """Return a value as text of at most `limit` characters, without passwords."""
    text = without_password(str(value))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def short_reason(problem: BaseException) -> str:
    """Return the cause of a failed call in a few words; errors of HTTP libraries are long."""
    text = without_password(str(problem)) or type(problem).__name__
    match = re.search(r"\[Errno -?\d+\] ([^'\")\]]+)", text)
    if match:
        return match[1]
    if "timed out" in text:
        return "no answer in time"
    return text.splitlines()[0][:160].rstrip(". ")


def make_experiment(uri: str) -> str:
    """Return the id of raysim's experiment in a database.

    Create the database and the experiment if they do not exist.
    """
    return Mlflow(uri).experiment(EXPERIMENT)


def find_experiment_id(uri: str) -> str:
    """Return the id of raysim's experiment on a server.

    Raise `RefusedError` if the server does not answer, or has no such experiment.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    try:
        experiment = MlflowClient(tracking_uri=uri).get_experiment_by_name(EXPERIMENT)
    except MlflowException as error:
        problem = str(error).splitlines()[0][:120]
        raise RefusedError(
            f"{uri} does not answer as a server of MLflow ({problem}). Check the address, or give "
            "a folder of runs, such as raysim ui runs."
        ) from error
    if experiment is None:
        raise RefusedError(
            f"{uri} has no experiment {EXPERIMENT!r}. Start a run with tracking.uri={uri}, which "
            "creates this experiment."
        )
    return str(experiment.experiment_id)


def save_model(model: nn.Module, example: np.ndarray, folder: Path) -> None:
    """Write a model for MLflow: a traced program and its weights, without pickled code.

    model: module that maps inputs [B, ...] to scores [B, outputs] for any B >= 1.
    example: two inputs, [2, ...], with which PyTorch traces the model.
    folder: the run's folder. The model is written to the folder `mlflow_model` in it.
    Raises PyTorch's error if the model cannot be traced.
    """
    set_mlflow_environment()
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
    """Return MLflow's schema of a tensor like `array` [B, ...], for any batch size B.

    A boolean array gets the type uint8, because MLflow has no boolean tensors.
    """
    import numpy as np
    from mlflow.types import Schema, TensorSpec

    dtype = np.dtype("uint8") if array.dtype == bool else array.dtype
    return Schema([TensorSpec(dtype, (-1, *array.shape[1:]))])


def save_problem(error: Exception) -> str:
    """Return a sentence that says why a model could not be saved for MLflow."""
    if isinstance(error, (RefusedError, ConnectionError)):
        return str(error)
    if not isinstance(error, OSError):
        return f"it cannot be converted or sent: {first_line(error)}"
    try:
        Path.cwd()
    except FileNotFoundError:  # the usual cause of an error that names no file
        return "the folder that this process works in is gone"
    return f"a file fails: {first_line(error)}"
