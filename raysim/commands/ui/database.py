"""Bring the MLflow database of stored runs up to date.

Rows of the history and files are sent first. Models come last, because each model takes seconds:
the run is built again, and PyTorch traces its model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path
from raysim.results.history import write_json
from raysim.results.mlflow_server import (
    DATABASE,
    Mlflow,
    default_uri,
    save_model,
    save_problem,
    set_mlflow_environment,
    short_reason,
)
from raysim.results.tracked_run import (
    BACKLOG,
    HISTORY,
    MODEL,
    PENDING,
    RECORD,
    UI,
    Record,
    has_ended,
    read_record,
)
from raysim.results.tracking import send_stored

STUDY = "study.yaml"
# Patterns of folders with records, in a folder of runs and in a study; parents come first.
RUN_PATTERNS = ("*", "*/trials/*")
STUDY_PATTERNS = (".", "runs/*")
WEIGHTS = "model.safetensors"


def find_root(path: str) -> Path:
    """Return the folder that has the MLflow database for the runs in a folder.

    path: a folder with runs, or the folder of a study or of a run.
    Raise `RefusedError` if the folder has no runs that were stored for MLflow.
    """
    folder = user_path(path).resolve()
    if not folder.is_dir():
        raise RefusedError(
            f"{path}: there is no folder of this name. Give the folder that runs are in. For the "
            "runs on a server, use raysim ui ADDRESS."
        )
    for study in (folder, *folder.parents[:2]):
        is_tracked = (study / RECORD).is_file() or (study / DATABASE).is_file()
        if is_tracked and (study / STUDY).is_file():
            return study
    for root in (folder, folder / "runs", folder.parent):
        if (root / DATABASE).is_file() or any(_stored_folders(root)):
            return root
    raise RefusedError(
        f"{path}: this folder contains no runs that MLflow can show. Runs with tracking=none store "
        "nothing for MLflow, and runs with tracking.uri store their rows on an MLflow server. Give "
        "the folder of other runs, or use raysim ui ADDRESS for the runs on that server."
    )


def _stored_folders(root: Path) -> Iterator[Path]:
    """Yield the folders whose results belong to the MLflow database of `root`.

    For the folder of a study, yield this folder and its runs. Otherwise yield the runs, the sweeps
    and their trials in `root`. Studies are left out, because each study has its own database.
    """
    is_study = (root / STUDY).is_file()
    for pattern in STUDY_PATTERNS if is_study else RUN_PATTERNS:
        for record in sorted(root.glob(f"{pattern}/{RECORD}")):
            folder = record.parent
            has_own_database = not is_study and (folder / STUDY).is_file()
            if not has_own_database:
                yield folder


class RunDatabase:
    """The MLflow database of a folder, and the stored runs that belong to it.

    root: the folder.
    say: function that prints a line, for problems.
    """

    def __init__(self, root: Path, say: Callable[[str], None] = print) -> None:
        set_mlflow_environment()
        self.root = root
        self.uri = default_uri(root)
        self._say = say
        # For each run, the times of change of its files when they were last sent.
        self._seen: dict[Path, tuple[int, ...]] = {}
        self._servers: dict[Path, Mlflow] = {}  # for the runs that have not ended
        # For each run, the time of change of its record when its model was last checked.
        self._examined: dict[Path, int] = {}
        self._problems: set[str] = set()

    def update(self) -> int:
        """Send new rows and files of all runs to the MLflow database, but no models.

        A run is left out if its files have not changed since the last call, or if the database
        already has all its data. Runs whose own process sends their data are left out, too. Return
        the number of runs that were sent.
        """
        count = 0
        for folder in _stored_folders(self.root):
            times = tuple(_changed_at(folder / name) for name in (RECORD, BACKLOG, HISTORY))
            if self._seen.get(folder) == times:
                continue
            record = read_record(folder)
            if record.get("sent_by") == UI and not record.get("done"):
                if not self._send(folder, record):
                    continue
                count += 1
            self._seen[folder] = times
        return count

    def _send(self, folder: Path, record: Record) -> bool:
        """Send new rows and files of a run to the MLflow database; return False if that failed.

        folder: the run's folder.
        record: the run's record. It says which rows and files of the run are already in the
        database.
        """
        try:
            server = self._servers.get(folder)
            is_open = server is not None
            if server is None:
                server = Mlflow(self.uri)
            send_stored(folder, record, server, is_open)
        except Exception as error:  # of MLflow or its database; the next update tries again
            self._servers.pop(folder, None)
            self._report(
                f"{self.uri} cannot be used ({short_reason(error)}); the next update tries again"
            )
            return False
        if has_ended(record):
            self._servers.pop(folder, None)
        else:
            self._servers[folder] = server
        return True

    def _report(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            self._say(problem)

    def add_models(self) -> Iterator[Path]:
        """Save the models that MLflow does not have.

        Yield the folder of each run just before the run's model is saved. A model takes seconds,
        so the caller can do other work before it requests the next one.
        """
        for folder in _stored_folders(self.root):
            if self._examined.get(folder) == _changed_at(folder / RECORD):
                continue
            record = read_record(folder)
            if record.get("done") and record.get("model") == PENDING:
                yield folder
                self._add_model(folder, record)
            self._examined[folder] = _changed_at(folder / RECORD)

    def _add_model(self, folder: Path, record: Record) -> None:
        """Store the final model of a finished run in the MLflow database.

        The run's record then says "sent", or why MLflow gets no model. If the run's folder was
        removed, write nothing.
        """
        from raysim.experiment.execute import load
        from raysim.results.shared_model import load_shared_model

        outcome = "sent"
        try:
            model = load_shared_model(load(folder).experiment.spec, folder / WEIGHTS)
            if model is None:
                outcome = "clients keep parts of it"
            else:
                with tempfile.TemporaryDirectory() as temporary:
                    save_model(*model, Path(temporary))
                    Mlflow(self.uri).add_model(record, Path(temporary) / MODEL)
        except Exception as error:  # PyTorch cannot trace every model
            if not folder.is_dir():
                self._say(
                    f"{folder}: the folder was removed before its model was sent to MLflow; MLflow "
                    "keeps the run without a model"
                )
                return
            outcome = save_problem(error)
            self._say(
                f"MLflow gets only the weights of the run in {folder}, because its model could not "
                f"be saved: {outcome}"
            )
        if folder.is_dir():
            write_json({**record, "model": outcome}, folder / RECORD)


def _changed_at(path: Path) -> int:
    """Return the time of a file's last change, in ns; 0 if the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
