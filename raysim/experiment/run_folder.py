"""The folder of a run: where it is, whether it may be used, and which checkpoint in it is continued."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from raysim.experiment.config_files import Node, load_yaml
from raysim.experiment.instantiate import format_value
from raysim.experiment.many_runs import check_free, dated_folder, to_continue
from raysim.experiment.settings import Experiment
from raysim.primitives.errors import Refused
from raysim.primitives.files import LOCK_FILE, existing_file, user_path, without_password
from raysim.primitives.stores import LocalStore, Store, is_remote, open_store, split_address
from raysim.primitives.version import __version__
from raysim.results.tracking import flatten
from raysim.simulation import checkpoint
from raysim.training.run_spec import Checkpoint

CONFIG = "config.yaml"  # what was asked for

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
    "init.file",  # its checksum counts: init.sha256
)

BITS_OF_RUNTIME = (
    "runtime.threads",
    "runtime.lanes",
    "runtime.graph",
    "runtime.precision",
)  # of runtime, no other key


@dataclass(frozen=True)
class Place:
    """Where a run writes, and what it continues from."""

    folder: Path
    exists: bool = False
    resume: str = ""  # a checkpoint's address
    finished: bool = False
    note: str = ""
    again: bool = False  # whether it goes on by itself, as it has lost a process


def place(experiment: Experiment) -> Place:
    """Decide on folder and checkpoint; refuses a folder that is taken or holds another run. Writes nothing."""
    options, rounds, kept = (
        experiment.execution,
        experiment.spec.settings.rounds,
        experiment.spec.settings.checkpoint,
    )
    if options.resume is None:
        folder = (
            user_path(options.out) if options.out else dated_folder(Path("runs"), experiment.title)
        )
        check_free(folder)
        check_writable(folder, kept)
        if kept.folder and {*open_store(kept.folder).names()} - {LOCK_FILE}:
            raise Refused(
                f"checkpoint.folder={without_password(kept.folder)} holds something already: choose another one, or "
                "continue its run with resume=latest"
            )
        return Place(folder)
    if options.resume != "latest":
        return _continued(experiment, options.resume)
    folder = user_path(to_continue(options.out))
    if folder.exists() and not (folder / CONFIG).is_file() and not _just_begun(folder):
        raise Refused(
            f"out={folder} is not the folder of a run: choose another one, or leave resume out"
        )
    check_writable(folder, kept)
    for where in (str(folder), kept.folder):
        _check_run_in(where, experiment.config)
    if (done := _rounds_done(folder)) >= rounds:
        return Place(
            folder,
            True,
            finished=True,
            note=f"{folder} has finished its {done} rounds: nothing to do",
        )
    if not (last := last_checkpoint(folder, kept)):
        what = (
            f"{folder} has no checkpoint yet"
            if folder.exists()
            else f"nothing to continue in {folder}, it is not there"
        )
        return Place(folder, folder.exists(), note=f"{what}: starting at round 0")
    return _from(last, Place(folder, folder.exists()), rounds)


def _just_begun(folder: Path) -> bool:
    """Whether a folder is empty but for what a run leaves that is killed before its configuration has its name."""
    return folder.is_dir() and all(
        each.name == LOCK_FILE or each in config_drafts(folder) for each in folder.iterdir()
    )


def config_drafts(folder: Path) -> list[Path]:
    """Configurations that were never completed, because their process was killed."""
    return list(folder.glob(f".{CONFIG}.*"))


def last_checkpoint(folder: Path, kept: Checkpoint) -> str:
    """The address of a run's last checkpoint, "" if it has none; the run may have changed where it keeps them."""
    places = dict.fromkeys((kept.folder_for(folder), Checkpoint().folder_for(folder)))
    return max((checkpoint.find_latest(place) for place in places), key=checkpoint.version_of)


def _continued(experiment: Experiment, address: str) -> Place:
    """resume=ADDRESS: in the folder of the checkpoint's run, or from there into a new `out`."""
    if not is_remote(address):
        address = str(user_path(address))
        if not Path(address).is_dir():
            raise Refused(
                f"resume={address} is no folder: name a checkpoint such as runs/NAME/checkpoints/round-000010, "
                "or latest"
            )
    out, where = experiment.execution.out, split_address(address)[0]
    inside = not is_remote(where) and not (Path(where) / CONFIG).is_file()  # the folder of the run
    origin = Path(where).resolve().parent if inside else None
    folder = user_path(out) if out else origin
    if folder is None:
        raise Refused(
            f"resume={without_password(address)} is not in the folder of its run: name that one with out=DIR"
        )
    for each in (where, str(origin or folder)):
        _check_run_in(each, experiment.config)
    same = folder.resolve() == origin or (origin is None and (folder / CONFIG).is_file())
    if folder.exists() and not same:
        raise Refused(
            f"out={folder} exists already, and {address} does not belong to it: choose another out, or leave it out"
        )
    check_writable(folder, experiment.spec.settings.checkpoint)
    return _from(address, Place(folder, folder.exists()), experiment.spec.settings.rounds)


def _from(address: str, where: Place, rounds: int) -> Place:
    checkpoint.read(address)  # a damaged one is refused before anything starts
    shown = without_password(address)
    if (version := checkpoint.version_of(address)) > rounds:
        raise Refused(
            f"rounds={rounds} is below round {version} of {shown}: set rounds={version} or more"
        )
    return replace(where, resume=address, note=f"continuing from {shown}")


def check_writable(folder: Path, kept: Checkpoint) -> None:
    """Refuse a folder, or one for checkpoints apart from it, that nobody can make or write."""
    for name, place in [
        ("out", folder),
        *(("checkpoint.folder", path) for path in apart(kept, folder)),
    ]:
        parent = place.absolute()
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise Refused(
                f"{name}={place} cannot be made because {parent} is a file: choose another folder"
            )
        if not os.access(parent, os.W_OK | os.X_OK):
            raise Refused(
                f"{name}={place} cannot be written because {parent} is read-only: choose another folder"
            )


def apart(kept: Checkpoint, folder: Path) -> list[Path]:
    """Where on this machine's disks a run's checkpoints are kept, if that is neither in its folder nor behind a URL."""
    found = (
        [there.path]
        if kept.folder and isinstance(there := open_store(kept.folder), LocalStore)
        else []
    )
    return [path for path in found if path.resolve() != folder.resolve()]


def _check_run_in(where: str | None, config: Node) -> None:
    """Refuse a place of another run, whether its results or its checkpoints are there."""
    if where and CONFIG in (there := open_store(where)).names():
        with there.local(CONFIG) as path:
            _check_same(load_yaml(path), config, there)


def _check_same(stored: Node, config: Node, folder: Store) -> None:
    """Refuse to resume a run with other settings than the folder's."""
    now = {key: _as_stored(value) for key, value in flatten(config).items()}
    before = flatten(stored)
    for key in dict.fromkeys([*before, *now]):
        head = key.partition(".")[0]
        free = head in FREE or key in FREE or (head == "runtime" and key not in BITS_OF_RUNTIME)
        if not free and key not in before:
            reason = (
                f"it is another run, or an earlier version of raysim than {__version__} wrote it"
            )
            raise Refused(
                f"{key}={format_value(now[key])} is no key of the run in {folder}: {reason}. Choose another out"
            )
        if not free and before.get(key) != now.get(key):
            old, new = format_value(before[key]), format_value(now[key]) if key in now else "absent"
            raise Refused(
                f"{key}={new} differs from {key}={old} of the run in {folder}: set it back, or choose another out"
            )


def _as_stored(value: object) -> object:
    """As the folder's configuration has it."""
    return without_password(value) if isinstance(value, str) else value


def _rounds_done(folder: Path) -> int:
    """Rounds of a run that has finished; 0 for any other."""
    if not (there := existing_file(folder / "summary.json")):
        return 0
    try:
        return int(json.loads(there[0].read_text())["rounds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
