"""Name, create and check the folder of a study or a sweep, and read the scores of its runs.

This module imports no torch, so that a wrong override is refused at once.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from raysim.experiment.groups import join_options
from raysim.experiment.instantiate import format_value
from raysim.primitives.checks import finite_values
from raysim.primitives.errors import RefusedError, errors_as_refusals
from raysim.primitives.files import LOCK_FILE, lock_folder, user_path, without_password
from raysim.results.history import Row, last_measured
from raysim.results.significance import mean_deviation
from raysim.runtime.placement import RayOptions, listen_on_loopback

# The end of the name of a column with deviations over seeds.
DEVIATION = "_std"
# Attempts to create a folder whose parents other processes remove.
MAX_CREATE_ATTEMPTS = 5


# --- names ----------------------------------------------------------------------------------------
def value_label(value: object) -> str:
    """Return a value as text for tables: a list of methods by their names, [] as "fedavg"."""
    if isinstance(value, list):
        return join_options(value)
    return f"{value:.4g}" if isinstance(value, float) else format_value(value)


# --- the folder, new or continued -----------------------------------------------------------------
def dated_folder(root: Path, title: str = "") -> Path:
    """Return the path of a folder that does not exist yet: root/DATE-title.

    If that path exists, a number is added.
    """
    date = time.strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{date}-{title}" if title else date
    return next(folder for folder in _numbered_paths(root / name) if not folder.exists())


def _numbered_paths(folder: Path) -> Iterator[Path]:
    """Yield the folder, and then folders with 2, 3, ... added to the name."""
    yield folder
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}-{number}")


@contextmanager
def new_folder(folder: Path, dated: bool) -> Iterator[Path]:
    """Create and lock a folder for a `with` block; remove the folder at the end if it is empty.

    dated: what to do if the folder exists. True adds a number to the name; False raises
    `RefusedError`.
    """
    with ExitStack() as cleanup:
        path = _create_folder(folder, dated, cleanup)
        with lock_folder(path):
            yield path


def _create_folder(folder: Path, dated: bool, cleanup: ExitStack) -> Path:
    """Create a folder and its parents; return the path of the new folder.

    dated: what to do if the folder exists. True adds a number to the name; False raises
    `RefusedError`.
    cleanup: a stack that closes later. Closing it removes those created folders that are empty or
    have only a lock.
    """
    for parent in reversed(folder.parents):
        if not parent.exists():
            cleanup.callback(_remove_empty, parent)
    for path in _numbered_paths(folder) if dated else [folder]:
        try:
            _make_with_parents(path)
        except FileExistsError:
            if not os.path.lexists(path):
                raise
            continue
        cleanup.callback(_remove_empty, path)
        return path
    check_free(folder)
    raise RefusedError(f"out={folder} was removed by another process at this moment. Start again.")


def _make_with_parents(path: Path) -> None:
    """Create a folder and its parents, even if other processes remove empty parents meanwhile."""
    for _ in range(MAX_CREATE_ATTEMPTS - 1):
        with suppress(FileNotFoundError):
            path.mkdir(parents=True)
            return
    path.mkdir(parents=True)


def _remove_empty(folder: Path) -> None:
    """Remove a folder that contains only its lock; leave any other folder."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} == {LOCK_FILE}:
            (folder / LOCK_FILE).unlink()
        folder.rmdir()


def check_free(folder: Path) -> None:
    """Raise `RefusedError` if the folder for a new run, study or sweep exists already."""
    lock = folder / LOCK_FILE
    if lock.is_file() and os.access(lock, os.W_OK):
        with lock_folder(folder):
            pass
    for command in ("study", "sweep"):
        if (folder / f"{command}.yaml").is_file():
            raise RefusedError(
                f"out={folder}: the folder holds a {command}. "
                f"Choose another folder; {resume_hint(command, folder)}"
            )
    if folder.exists() or folder.is_symlink():
        raise RefusedError(
            f"out={folder} exists already. Choose another folder, or continue it with "
            "resume=latest."
        )


def local_folder(out: str) -> Path:
    """Return the folder of a study or a sweep. Raise `RefusedError` for a URL.

    out: the value of out=.
    """
    if "://" in out:
        raise RefusedError(
            f"out={without_password(out)} is a URL, which only `raysim run` accepts. Give a "
            "folder; on a cluster, `raysim fetch JOB` brings it to your machine."
        )
    return user_path(out)


def folder_to_resume(out: str | None) -> str:
    """Return the folder that resume=latest continues, which is the value of out=.

    out: the value of out=; None if the user did not set it.
    Raise `RefusedError` if the user did not set out=.
    """
    if not out:
        raise RefusedError("resume=latest needs the folder of the run. Add out=DIR.")
    return out


def is_resume_requested(overrides: Sequence[str], command: str) -> bool:
    """Return True if the overrides continue a study or a sweep.

    command: "study" or "sweep", for errors.
    Raise `RefusedError` for a value of resume other than "latest", and for resume without out=DIR.
    """
    resume = [override for override in overrides if override.partition("=")[0] == "resume"]
    if not resume:
        return False
    has_folder = any(override.startswith("out=") for override in overrides)
    if resume != ["resume=latest"] or not has_folder:
        raise RefusedError(
            f"{' and '.join(resume)} cannot continue a {command}. Write out=DIR resume=latest, "
            f"with the folder of the {command}."
        )
    return True


def wrong_folder_error(command: str, folder: Path, file: str) -> RefusedError:
    """Return the error for resume=latest in a folder that holds no study or sweep.

    command: "study" or "sweep".
    folder: the value of out=.
    file: the name of the missing file, such as "study.yaml".
    """
    return RefusedError(
        f"out={folder} is not the folder of a {command}, it has no {file}: "
        "name another, or leave resume out"
    )


def resume_hint(command: str, folder: Path, allow: Sequence[str] = ()) -> str:
    """Return a text that says how to continue after an interrupt.

    command: "study" or "sweep".
    folder: the folder of the study or sweep.
    allow: the packages of --allow.
    """
    allow_options = "".join(f" --allow {package}" for package in allow)
    return f"to continue it, run raysim {command} out={folder} resume=latest{allow_options}"


def join_ray(options: RayOptions, session: ExitStack) -> None:
    """Connect this process to a Ray cluster, if it is not connected to one.

    options: the settings that name the cluster.
    session: the exit stack that closes the connection at its end.
    """
    listen_on_loopback(options)
    from raysim.runtime import ray

    with errors_as_refusals():
        session.enter_context(ray.connection(options))


# --- scores ---------------------------------------------------------------------------------------
def last_score(rows: Sequence[Row], metric: str) -> tuple[float | None, float | None]:
    """Return the last value of a metric, and its standard deviation over the seeds.

    Both are None if no row has a value. The deviation is None for a single run, and if a run has no
    finite value in this row.
    rows: one row for each round; for several seeds, the rows of `mean_row`.
    """
    row = last_measured(rows, metric)
    if row is None:
        return None, None
    return float(row[metric] or 0.0), row.get(metric + DEVIATION)


def mean_row(rows: Sequence[Row], metric: str) -> dict[str, int | float | None]:
    """Average the rows of several runs that differ only in the seed.

    A mean is over finite values. If all runs have a finite value of `metric`, its sample standard
    deviation is added. The row of a single run is returned unchanged.
    rows: one row of each run, for the same round.
    """
    if len(rows) == 1:
        return dict(rows[0])
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name in row:
            if name not in columns:
                columns[name] = finite_values([other.get(name) for other in rows])
    means: dict[str, int | float | None] = {}
    for name, values in columns.items():
        means[name] = mean_deviation(values)[0]
    means["round"] = rows[0]["round"]
    if len(columns.get(metric, ())) == len(rows):
        means[metric + DEVIATION] = mean_deviation(columns[metric])[1]
    return means
