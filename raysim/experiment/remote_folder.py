"""Keep a run's folder behind a URL (`out=s3://bucket/run`), without a shared disk.

Checkpoints are written directly to the URL, or to `checkpoint.folder`. All other files are sent
from a temporary folder after each checkpoint and at the end.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.experiment.recorder import say, warn
from raysim.experiment.settings import Experiment
from raysim.primitives.errors import RefusedError, errors_as_refusals
from raysim.primitives.files import LOCK_FILE, without_password
from raysim.primitives.stores import (
    LocalStore,
    Store,
    fetch_files,
    is_url,
    open_store,
    split_address,
)
from raysim.results.observers import CurrentRun, Observer
from raysim.results.stored_runs import CHECKPOINTS, is_result_file
from raysim.simulation.events import RunStoppedError, Saved

if TYPE_CHECKING:
    from rich.console import Console


class FolderCopy(Observer):
    """A local copy of a run's folder, which is sent to the run's URL after each checkpoint.

    folder: the copy on this machine.
    store: the folder behind the URL.
    console: prints a warning if files cannot be sent.
    """

    def __init__(self, folder: Path, store: Store, console: Console):
        self.folder, self._store, self._console = folder, store, console
        # By name: the time of change and the size of each file when it was last sent.
        self._sent: dict[str, tuple[int, int]] = {}

    def fetch(self) -> None:
        """Fetch all files of the run except its checkpoints."""
        for name in fetch_files(self._store, self.folder, is_result_file):
            self._sent[name] = self._state(self.folder / name)

    def send(self) -> None:
        """Send the files that are new or have changed, except empty files."""
        for name in filter(is_result_file, LocalStore(self.folder).files()):
            state = self._state(self.folder / name)
            is_empty = state[1] == 0  # such as the file for call stacks
            if is_empty or self._sent.get(name) == state:
                continue
            with self._store.new(name) as draft:
                shutil.copyfile(self.folder / name, draft)
            self._sent[name] = state

    @staticmethod
    def _state(path: Path) -> tuple[int, int]:
        status = path.stat()
        return status.st_mtime_ns, status.st_size

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Send the files; a failure is only a warning, because the next call sends them again."""
        try:
            self.send()
        except OSError as error:
            warn(self._console, f"the files of the run could not be sent: {error}")


@contextmanager
def local_copy(
    experiment: Experiment, console: Console
) -> Iterator[tuple[Experiment, list[Observer]]]:
    """Yield a copy of the run that writes to a local folder, and observers that upload its files.

    If `out` is not a URL, yield the unchanged run and no observers. The end of the `with` block
    uploads new and changed files.
    Raise `RefusedError` for a URL that cannot be used, and `RunStoppedError` if the last upload
    fails.
    """
    out = experiment.execution.out
    if not out or not is_url(out):
        yield experiment, []
        return
    with errors_as_refusals():
        store = open_store(out)
        names = set(store.names()) - {LOCK_FILE}
    address = without_password(out)
    if names and experiment.execution.resume is None:
        raise RefusedError(
            f"out={address} is not empty. Choose another folder, or continue it with resume=latest."
        )
    temporary = Path(tempfile.mkdtemp(prefix="raysim-out-"))
    copy = FolderCopy(temporary / split_address(out)[1], store, console)
    with errors_as_refusals():
        copy.fetch()
    say(console, f"out={address}: until the run ends, its files are in {copy.folder}")
    try:
        yield _with_folder(experiment, checkpoints_at(out), copy.folder), [copy]
    finally:
        try:
            copy.send()
        except OSError as error:
            raise RunStoppedError(
                f"out={address}: the results could not be sent ({error}). They are in "
                f"{copy.folder} on this machine."
            ) from error
        # The result of the run reads its files later.
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    say(console, f"all files are in {address}")


def _with_folder(experiment: Experiment, checkpoints: str, folder: Path) -> Experiment:
    """Return a copy of an experiment that writes its results to a folder of this machine.

    checkpoints: the path or URL for checkpoints, unless `checkpoint.folder` is set.
    The field `url` of the copy is the original setting `out`.
    """
    settings = experiment.spec.settings
    checkpoint = settings.checkpoint
    if not checkpoint.folder:
        checkpoint = replace(checkpoint, folder=checkpoints)
    spec = replace(experiment.spec, settings=replace(settings, checkpoint=checkpoint))
    execution = replace(experiment.execution, out=str(folder))
    url = experiment.execution.out or ""
    return replace(experiment, spec=spec, execution=execution, url=url)


def checkpoints_at(url: str) -> str:
    """Return the default folder of a run's checkpoints, as a path or a URL.

    The result is a path if the run's folder is on this machine, and otherwise a URL.
    url: the URL of the run's folder, such as "file:///a/b".
    """
    store = open_store(url)
    place = str(store.path) if isinstance(store, LocalStore) else url.rstrip("/")
    return f"{place}/{CHECKPOINTS}"
