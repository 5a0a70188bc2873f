"""What `raysim study` and `raysim sweep` do alike with many runs: name, place, continue and score them, share one Ray.

A single run names and checks its folder in the same way (`run_folder`), and every run is followed by a `Follower`
(`recorder`). Imports no torch, so that a wrong word is refused at once.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from raysim.experiment.groups import join_options
from raysim.experiment.instantiate import format_value
from raysim.primitives.checks import finite_values
from raysim.primitives.errors import Refused, errors_as_refusals
from raysim.primitives.files import LOCK_FILE, lock_folder
from raysim.results.history import Row, last_measured
from raysim.results.significance import mean_deviation
from raysim.runtime.placement import RayOptions, listen_on_loopback

FINAL = (
    "",
    "_global",
)  # what "final" means: the first of these columns of the metric that a run has
TRIES = 5  # to create a folder whose parents come and go
DEVIATION = "_std"  # the end of a column's name that holds the deviation over seeds


# --- names ----------------------------------------------------------------------------------------------------------
def short_names(keys: Sequence[str]) -> list[str]:
    """The last parts of each key, as many as tell them apart: method.fedbr.lam is lam where no other key ends so."""

    def tail(key: str, parts: int) -> str:
        return ".".join(key.split(".")[-parts:])

    names = []
    for key in keys:
        count = 1
        while (
            tail(key, count) != key
            and sum(tail(other, count) == tail(key, count) for other in keys) > 1
        ):
            count += 1
        names.append(tail(key, count))
    return names


def value_label(value: object) -> str:
    """A value as a person reads it: a list of methods by their names, [] as fedavg."""
    if isinstance(value, list):
        return join_options(value)
    return f"{value:.4g}" if isinstance(value, float) else format_value(value)


# --- the folder, new or continued -----------------------------------------------------------------------------------
def dated_folder(root: Path, title: str = "") -> Path:
    """A folder that does not exist yet: root/DATE-title, with a number behind it where two begin in one second."""
    name = "-".join(part for part in (time.strftime("%Y-%m-%d_%H-%M-%S"), title) if part)
    return next(folder for folder in _numbered(root / name) if not folder.exists())


def _numbered(folder: Path) -> Iterator[Path]:
    """Yield the folder's own path, and then the same path with a growing number at its end."""
    yield folder
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}-{number}")


@contextmanager
def new_folder(folder: Path, dated: bool) -> Iterator[Path]:
    """Create a folder for this process alone, and lock it; remove it in the end if nothing was written into it.

    dated: whether `dated_folder` chose the name. Of several processes that chose the same name in the same second, the
    first one gets it, and each of the others gets the name with a number more. Raises Refused if the folder exists.
    """
    with ExitStack() as made:
        path = _create_folder(folder, dated, made)
        with lock_folder(path):
            yield path


def _create_folder(folder: Path, dated: bool, made: ExitStack) -> Path:
    """Create the folder and its parents; `made` removes those that are empty in the end."""
    for parent in reversed(folder.parents):
        if not parent.exists():
            made.callback(_remove_empty, parent)
    for path in _numbered(folder) if dated else [folder]:
        try:
            _make_with_parents(path)
        except FileExistsError:
            if not os.path.lexists(path):
                raise
            continue
        made.callback(_remove_empty, path)
        return path
    check_free(folder)
    raise Refused(f"out={folder} was removed by another process at this moment: start again")


def _make_with_parents(path: Path) -> None:
    """Create a folder; again where another process removes an empty parent at the same moment."""
    for _ in range(TRIES - 1):
        with suppress(FileNotFoundError):
            path.mkdir(parents=True)
            return
    path.mkdir(parents=True)


def _remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing but its lock; leave any other folder."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} == {LOCK_FILE}:
            (folder / LOCK_FILE).unlink()
        folder.rmdir()


def check_free(folder: Path) -> None:
    """Refuse a folder that exists, where something new is to be written; says so if another process writes there."""
    if (folder / LOCK_FILE).is_file() and os.access(folder / LOCK_FILE, os.W_OK):
        with lock_folder(folder):
            pass
    for command in ("study", "sweep"):
        if (folder / f"{command}.yaml").is_file():
            raise Refused(
                f"out={folder}: the folder holds a {command}. "
                f"Choose another folder; {how_to_go_on(command, folder)}"
            )
    if folder.exists() or folder.is_symlink():
        raise Refused(
            f"out={folder} exists already: choose another folder, or continue it with resume=latest"
        )


def to_continue(out: str | None) -> str:
    """The folder of a run that resume=latest continues; refuses none."""
    if not out:
        raise Refused("resume=latest needs the folder of the run: add out=DIR")
    return out


def asked_to_continue(words: Sequence[str], what: str) -> bool:
    """Whether the words of a command ask to go on with what a folder holds; refuses anything but out=DIR and latest."""
    resume = [word for word in words if word.partition("=")[0] == "resume"]
    if resume and (
        resume != ["resume=latest"] or not any(word.startswith("out=") for word in words)
    ):
        raise Refused(f"{' and '.join(resume)}: a {what} is continued with out=DIR resume=latest")
    return bool(resume)


def not_a_folder_of(what: str, folder: Path, file: str) -> Refused:
    """For a folder that lacks the file which says what was asked for."""
    return Refused(
        f"out={folder} is not the folder of a {what}, it has no {file}: name another, or leave resume out"
    )


def how_to_go_on(command: str, folder: Path, allow: Sequence[str] = ()) -> str:
    """The end of a sentence about an interrupt. allow: packages that the command was given."""
    given = "".join(f" --allow {package}" for package in allow)
    return f"raysim {command} out={folder} resume=latest{given} goes on where it stopped"


def join_ray(options: RayOptions, session: ExitStack) -> None:
    """Have a Ray for all runs until the session ends: this process's own if it has one, else what the options name."""
    listen_on_loopback(options)
    from raysim.runtime import ray

    with errors_as_refusals():
        session.enter_context(ray.connection(options))


# --- scores ---------------------------------------------------------------------------------------------------------
def score(summary: Mapping[str, object], metric: str) -> float | None:
    """A number of a finished run's summary; "final" is `accuracy`, or `accuracy_global` without tests of clients.

    Where models are scored by another metric, that is in accuracy's place.
    """
    if metric == "final":
        usual = summary.get("metric", "accuracy")
        return next(
            iter(finite_values([score(summary, f"{usual}{suffix}") for suffix in FINAL])), None
        )
    value = summary.get(metric)
    if value is None and "." in metric:
        group, _, name = metric.partition(".")
        inner = summary.get(group)
        value = inner.get(name) if isinstance(inner, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def last_score(rows: Sequence[Row], metric: str) -> tuple[float | None, float | None]:
    """Of a history that goes on: a column's last value, as a summary would have it, and its deviation over seeds."""
    row = last_measured(rows, metric)
    return (None, None) if row is None else (float(row[metric] or 0.0), row.get(metric + DEVIATION))


def mean_row(rows: Sequence[Row], metric: str) -> dict[str, int | float | None]:
    """One row for the runs of all seeds: the mean of each column, and the metric's deviation (divisor n - 1)."""
    if len(rows) == 1:
        return dict(rows[0])
    columns = {
        name: finite_values([row.get(name) for row in rows])
        for name in dict.fromkeys(n for row in rows for n in row)
    }
    row: dict[str, int | float | None] = {
        name: mean_deviation(values)[0] for name, values in columns.items()
    }
    row["round"] = rows[0]["round"]
    if len(columns.get(metric, ())) == len(rows):
        row[metric + DEVIATION] = mean_deviation(columns[metric])[1]
    return row
