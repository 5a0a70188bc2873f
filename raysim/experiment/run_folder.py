"""The folder of a run: where it is, whether it may be used, and which checkpoint in it is continued."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from raysim.experiment.compose import Node, load_yaml
from raysim.experiment.instantiate import shown
from raysim.experiment.many_runs import check_free, dated_folder
from raysim.experiment.settings import Experiment
from raysim.primitives.errors import Refused
from raysim.primitives.files import user_path, without_password
from raysim.results.tracking import flatten
from raysim.simulation import checkpoint

# Keys that may change when a run is resumed: no bit of it depends on them.
FREE = (
    "rounds",
    "out",
    "resume",
    "choices",
    "tracking",
    "observer",
    "checkpoint",
    "faults",
    "thresholds",
    "profile",
    "state.device",
    "data.cache",
    "data.download",
)

FREE_RUNTIME = ("name", "hosts", "cpus", "gpus", "address")  # but not threads

_ADDED: dict[str, object] = {  # keys that older runs lack, with what those runs did
    "runtime.lanes": 1,
    "runtime.graph": False,
    "runtime.precision": "float32",
    "local.keep_optimizer": False,
    "partition.validation_fraction": 0.0,
    "method.fraug.ramp_rounds": None,
    "loss": {},
}


@dataclass(frozen=True)
class Place:
    """Where a run writes, and what it continues from."""

    folder: Path
    exists: bool = False
    resume: str = ""  # a checkpoint's folder
    finished: bool = False
    note: str = ""


def place(experiment: Experiment) -> Place:
    """Decide on folder and checkpoint; refuses a folder that is taken or holds another run. Writes nothing."""
    options, rounds = experiment.execution, experiment.spec.settings.rounds
    if options.resume is None:
        folder = user_path(options.out) if options.out else dated_folder(Path("runs"), experiment.title)
        check_free(folder)
        _check_writable(folder)
        return Place(folder)
    if options.resume != "latest":
        return _continued(experiment, user_path(options.resume))
    if not options.out:
        raise Refused("resume=latest needs the folder of the run: add out=DIR")
    folder = user_path(options.out)
    if folder.exists() and not (folder / "config.yaml").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"out={folder} is not the folder of a run: choose another one, or leave resume out")
    _check_writable(folder)
    if (folder / "config.yaml").is_file():
        _check_same(load_yaml(folder / "config.yaml"), experiment.config, folder)
    if (done := _rounds_done(folder)) >= rounds:
        return Place(folder, True, finished=True, note=f"{folder} has finished its {done} rounds: nothing to do")
    if not (checkpoint := last_checkpoint(folder)):
        return Place(folder, folder.exists(), note=f"{folder} has no checkpoint yet: starting at round 0")
    return _from(Path(checkpoint), Place(folder, True), rounds)


def last_checkpoint(folder: Path) -> str:
    """The folder of a run's last checkpoint, or "" if it has none."""
    return str(next(reversed(checkpoint.available(folder / "checkpoints")), ""))


def _continued(experiment: Experiment, path: Path) -> Place:
    """resume=PATH: in the folder that the checkpoint is in, or from there into a new `out`."""
    origin = path.resolve().parent.parent
    if not path.is_dir():
        raise Refused(
            f"resume={path} is no folder: name a checkpoint such as runs/NAME/checkpoints/round-000010, or latest"
        )
    if (origin / "config.yaml").is_file():
        _check_same(load_yaml(origin / "config.yaml"), experiment.config, origin)
    folder = user_path(experiment.execution.out) if experiment.execution.out else origin
    same = folder.resolve() == origin
    if folder.exists() and not same:
        raise Refused(
            f"out={folder} exists already, and {path} does not belong to it: choose another out, or leave it out"
        )
    _check_writable(folder)
    return _from(path, Place(folder, same), experiment.spec.settings.rounds)


def _from(path: Path, where: Place, rounds: int) -> Place:
    checkpoint.read(path)  # a damaged one is refused before anything starts
    number = path.name.rpartition("-")[2]
    if number.isdigit() and int(number) > rounds:
        raise Refused(f"rounds={rounds} is below round {int(number)} of {path}: set rounds={int(number)} or more")
    return replace(where, resume=str(path), note=f"continuing from {path}")


def _check_writable(folder: Path) -> None:
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise Refused(f"out={folder} cannot be made because {parent} is a file: choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise Refused(f"out={folder} cannot be written because {parent} is read-only: choose another folder")


def _check_same(stored: Node, config: Node, folder: Path) -> None:
    """Refuse to resume a run with other settings than the folder's."""
    now = {key: _as_stored(value) for key, value in flatten(config).items()}
    before = {**{key: value for key, value in _ADDED.items() if key in now}, **flatten(stored)}
    for key in dict.fromkeys([*before, *now]):
        head = key.partition(".")[0]
        free = head in FREE or key in FREE or (head == "runtime" and key.partition(".")[2] in FREE_RUNTIME)
        if not free and before.get(key) != now.get(key):
            old, new = (shown(values[key]) if key in values else "absent" for values in (before, now))
            raise Refused(
                f"{key}={new} differs from {key}={old} of the run in {folder}: set it back, or choose another out"
            )


def _as_stored(value: object) -> object:
    """As the folder's configuration has it."""
    return without_password(value) if isinstance(value, str) else value


def _rounds_done(folder: Path) -> int:
    """Rounds of a run that has finished; 0 for any other."""
    try:
        return int(json.loads((folder / "summary.json").read_text())["rounds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
