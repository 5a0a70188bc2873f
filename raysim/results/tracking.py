"""Store runs for MLflow, and send them to a server or, on request, to a local database.

With `tracking.uri`, a thread of the run sends each row at once. Rows that the server did not accept
are sent again later. Without this setting, `raysim ui` sends the run to an SQLite file next to the
run's folder, so that a run need not import MLflow.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from raysim.primitives.commit import source_commit
from raysim.primitives.files import without_password
from raysim.results.history import Row, last_round, read_history, write_json
from raysim.results.mlflow_server import (
    Mlflow,
    TrackingServer,
    default_uri,
    set_mlflow_environment,
    short_reason,
)
from raysim.results.tracked_run import (
    BACKLOG,
    END_KEYS,
    EXPERIMENT,
    HISTORY,
    RECORD,
    UI,
    Record,
    has_ended,
    merge,
    numbers_in,
    read_backlog,
    read_record,
    round_of,
)

# How long `finish` waits: the first call imports MLflow (5 s) and makes a database (3 s).
FINISH_TIMEOUT_S = 30.0
STORE_INTERVAL_S = 1.0  # the shortest time between two writes of a stored run


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
        """Do nothing, because nothing is recorded with `tracking=none`."""

    def wait_until_known(self) -> None:
        """Do nothing, because nothing is recorded with `tracking=none`."""

    def log(self, row: Row) -> None:
        """Do nothing, because nothing is recorded with `tracking=none`."""

    def finish(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
        model: str | None = None,
    ) -> None:
        """Do nothing, because nothing is recorded with `tracking=none`."""


class StoredTracker:
    """A tracker that keeps a run in its folder, from which `raysim ui` sends it to MLflow.

    The backlog file keeps all rows until the run has ended and history.parquet has them.

    experiment: the name of the experiment in MLflow.
    name: the name of the run in MLflow; "" uses the name of the folder.
    say: prints one sentence.
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
        self._last_round = 0  # of the rows that `start` and `log` got
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

        config, tags: the parameters and the tags that MLflow shows.
        rows: the earlier history of a resumed run.
        parent: the folder of the study or sweep; None for a single run.
        data: name, digest and other facts of the data set.
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

        config, tags: the parameters and the tags that MLflow shows.
        parent: the folder of the study or sweep; None for a single run.
        sender: what sends the run to MLflow: "run" (the run's process) or "ui" (`raysim ui`).
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
        self._last_round = round_of(self._unsent[-1]) if self._unsent else 0

    def wait_until_known(self) -> None:
        """Do nothing, because this class sends nothing; `Tracker` waits for the server here."""

    def log(self, row: Row) -> None:
        """Add a row of the history.

        A resumed run trains some rounds again. Rows of rounds that the tracker has already are
        ignored.
        """
        if round_of(row) <= self._last_round:
            return
        self._last_round = round_of(row)
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
        """Record the end of the run, as `end` does; wait until the tracker has finished its work.

        artifacts: the files to upload to MLflow.
        status: a status of MLflow: FINISHED, FAILED or KILLED.
        model: `PENDING` if `raysim ui` must still make the model in MLflow's format; otherwise
        None.
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
        """Record the end of the run: write its last rows and its summary into the run's folder.

        artifacts: the files that `raysim ui` uploads to MLflow later; only their paths are stored.
        status: a status of MLflow: FINISHED, FAILED or KILLED.
        model: `PENDING` if `raysim ui` must still make the model in MLflow's format; otherwise
        None.
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
        """Do not wait, because this class sends nothing.

        patience: has no effect in this class.
        """

    def _append(self, rows: Sequence[Row], replace: bool = False) -> None:
        """Write rows to the backlog file.

        replace: True replaces the rows in the file.
        """
        if not rows:
            return
        try:
            with (self._folder / BACKLOG).open("w" if replace else "a") as stream:
                stream.writelines(json.dumps(numbers_in(row)) + "\n" for row in rows)
                stream.flush()
                # otherwise history.parquet gets the rows, too
                if self._record.get("sent_by") != UI:
                    os.fsync(stream.fileno())
        except OSError as problem:
            self._say(
                f"{self._folder / BACKLOG} cannot be written ({problem}). Rows of this run that "
                "MLflow does not have yet are stored only in history.parquet, at checkpoints and "
                "at the end."
            )


class Tracker(StoredTracker):
    """A tracker that sends a run to MLflow from another thread.

    No method raises an error because of MLflow, its server or its database.

    uri: the address of MLflow's server or database; "" uses the SQLite file next to the folder.
    name: the name of the run in MLflow; "" uses the name of the folder.
    say: function that prints one sentence. It may be called from another thread.
    patience: the most seconds to wait for MLflow at the end of the run, and in `wait_until_known`.
    command: the start of the command that resumes the run. If rows were not sent, a message shows
    this command.
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
        """Begin or continue a run, and start the thread that sends it.

        config, tags: the parameters and the tags that MLflow shows.
        rows: the earlier history of a resumed run.
        parent: the folder of the study or sweep; None for a single run.
        data: name, digest and other facts of the data set.
        """
        with self._wake:
            self._begin(config, tags, rows, parent, data, sender="run")
            self._has_news = True
        self._thread.start()

    def wait_until_known(self) -> None:
        """Wait until MLflow has recorded this run, so that other runs can become its children.

        The wait ends after `patience` seconds, or when sending to MLflow has failed.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._is_known or self._problem, self._patience)

    def log(self, row: Row) -> None:
        """Queue a row of the history for the thread that sends rows to MLflow.

        A resumed run trains some rounds again. A row is ignored if a row of this or a later round
        was queued before.
        """
        with self._wake:
            if round_of(row) > self._last_round:
                self._last_round, self._has_news = round_of(row), True
                self._unsent.append(dict(row))
                self._wake.notify_all()

    def end(
        self,
        summary: Mapping[str, object],
        artifacts: Sequence[Path] = (),
        status: str = "FINISHED",
        model: str | None = None,
    ) -> None:
        """Tell the sending thread that the run has ended; do not wait until everything is sent.

        status: a status of MLflow: FINISHED, FAILED or KILLED.
        model: `PENDING` if `raysim ui` must still make the model in MLflow's format; otherwise
        None.
        """
        with self._wake:
            self._write_end(summary, artifacts, status, model)
            self._is_ending = True
            self._wake.notify_all()

    def wait(self, patience: float | None = None) -> None:
        """Wait until everything is sent.

        If this fails, or takes longer than `patience` seconds, the unsent rows stay on disk, and a
        printed sentence says so. None uses the number of seconds that the tracker was made with.
        """
        self._thread.join(self._patience if patience is None else patience)
        with self._wake:
            self._is_abandoned = True
            if self._record.get("done"):
                return
            self._append(self._unsent[self._stored_rows :])
            self._say(
                f"MLflow at {without_password(self._uri)} does not have all of this run"
                f" ({self._problem or 'no answer in time'}): unsent rows are in"
                f" {self._folder / BACKLOG}, and `{self._command} out={self._folder}"
                " resume=latest` sends the rest."
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
        """Delete the first `sent` waiting rows, because MLflow's server has received them.

        ended: True if MLflow's server has also received the end of the run.
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
        """Append to the backlog file the rows that neither MLflow nor this file has.

        problem: why the rows could not be sent. The first problem of a run is printed.
        """
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

    uri: the address of MLflow's server or database; None or "" only stores the run.
    name: the name of the run in MLflow; "" uses the name of the folder.
    command: the command that resumes the run. If rows were not sent, a message to the user has it.
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

    An untracked run sends nothing. If MLflow cannot be used, `say` gets the reason.
    uri: the address of the server; "" takes the SQLite file next to the run's folder.
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
    say(f"MLflow at {without_password(uri)} now has all {len(rows)} rounds of {folder}")
    return True


def send_stored(folder: Path, record: Record, server: TrackingServer, is_open: bool) -> None:
    """Send to MLflow the rows of a stored run that the server lacks.

    If the run has ended, also send its end, and then mark it as sent in its folder. Errors of the
    server are raised.
    record: the result of `read_record(folder)`.
    is_open: True if `server.open` was already called for this run.
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


def source_tags() -> dict[str, str]:
    """Return the tags for MLflow's columns: the user, and the current folder's git commit."""
    tags = {"mlflow.source.name": "raysim", "mlflow.source.type": "LOCAL"}
    tags |= {f"mlflow.source.git.{key}": value for key, value in source_commit().items()}
    # In a container the user may have no name.
    with contextlib.suppress(OSError, KeyError, ImportError):
        tags["mlflow.user"] = getpass.getuser()
    return tags
