"""Choose and check a run's folder, and the checkpoint from which the run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from raysim.experiment.config_files import Node, load_yaml, to_yaml
from raysim.experiment.groups import join_options
from raysim.experiment.instantiate import format_value
from raysim.experiment.keys import RUNTIME_KEYS_OF_BITS
from raysim.experiment.many_runs import check_free, dated_folder, folder_to_resume
from raysim.experiment.settings import Experiment
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import (
    LOCK_FILE,
    abandoned_drafts,
    existing_file,
    replace_file,
    user_path,
    without_password,
)
from raysim.primitives.stores import (
    LocalStore,
    Store,
    is_remote,
    local_path,
    open_store,
    split_address,
)
from raysim.primitives.version import __version__
from raysim.results.tracked_run import flatten
from raysim.simulation import checkpoint
from raysim.training.run_spec import Checkpoint

CONFIG = "config.yaml"
SUMMARY = "summary.json"

# Keys that may change when a run is resumed, because its bits do not depend on them.
FREE_KEYS = (
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
    "init.file",  # the checksum init.sha256 must not change
)


@dataclass(frozen=True)
class Place:
    """The folder that a run writes to, and the checkpoint that the run continues from.

    resume: the checkpoint's address; "" for a new run.
    note: a sentence for the user that says where the run starts, or "".
    is_restart: True if the run restarts by itself after a process was lost.
    """

    folder: Path
    exists: bool = False
    resume: str = ""
    is_finished: bool = False
    note: str = ""
    is_restart: bool = False


def choose_place(experiment: Experiment) -> Place:
    """Return a run's folder and the checkpoint to continue from. Nothing is written.

    The settings `out` and `resume` decide both.
    Raise `RefusedError` if the folder or the checkpoint cannot be used, for example if the folder
    holds another run.
    """
    resume = experiment.execution.resume
    if resume is None:
        return _new_place(experiment)
    if resume == "latest":
        return _latest_place(experiment, user_path(folder_to_resume(experiment.execution.out)))
    return _place_of_checkpoint(experiment, resume)


def restart_place(experiment: Experiment, first: Place) -> Place:
    """Return the place at which a run restarts after a process was lost.

    The run continues from its last checkpoint. Without one, it restarts where it began.
    first: the place at which the run began.
    Raise `RefusedError` if the folder or the checkpoint cannot be used.
    """
    place = _latest_place(experiment, first.folder)
    if first.resume and not place.resume:
        place = _continue_checkpoint(first.resume, place, experiment.spec.settings.rounds)
    return replace(place, is_restart=True)


def _new_place(experiment: Experiment) -> Place:
    out, options = experiment.execution.out, experiment.spec.settings.checkpoint
    folder = user_path(out) if out else dated_folder(Path("runs"), experiment.title)
    check_free(folder)
    check_writable(folder, options)
    if options.folder and {*open_store(options.folder).names()} - {LOCK_FILE}:
        raise RefusedError(
            f"checkpoint.folder={without_password(options.folder)} is not empty. Choose another "
            "folder, or continue its run with resume=latest."
        )
    return Place(folder)


def _latest_place(experiment: Experiment, folder: Path) -> Place:
    """Return the place that continues the run in a folder; a missing folder starts a new run."""
    settings = experiment.spec.settings
    options, rounds = settings.checkpoint, settings.rounds
    exists = folder.exists()
    if exists and not (folder / CONFIG).is_file() and not _has_just_begun(folder):
        raise RefusedError(
            f"out={folder} is not the folder of a run. Choose a run's folder, or a new folder."
        )
    check_writable(folder, options)
    for address in (str(folder), options.folder):
        _check_folder_has_same_run(address, experiment.config)
    finished_rounds = _finished_rounds(folder)
    if finished_rounds >= rounds:
        note = f"{folder} has finished its {finished_rounds} rounds: nothing to do"
        return Place(folder, True, is_finished=True, note=note)
    last = last_checkpoint(folder, options)
    if last:
        return _continue_checkpoint(last, Place(folder, exists), rounds)
    note = f"{folder} does not exist yet: starting at round 0"
    if exists:
        note = f"{folder} has no checkpoint yet: starting at round 0"
    return Place(folder, exists, note=note)


def _has_just_begun(folder: Path) -> bool:
    """Return True if a folder has at most a lock and files that were not completely written.

    A run that was killed early leaves such a folder.
    """
    if not folder.is_dir():
        return False
    drafts = abandoned_drafts(folder)
    return all(path.name == LOCK_FILE or path in drafts for path in folder.iterdir())


def begin_folder(experiment: Experiment, place: Place) -> None:
    """Write the configuration into the folder of a run that starts or continues.

    Also write it into `checkpoint.folder`, if this is set. Remove an existing summary.
    place: the folder of the run, as `choose_place` returns it.
    """
    config = to_yaml(experiment.config).encode()
    replace_file(place.folder / CONFIG, config)
    checkpoint_folder = experiment.spec.settings.checkpoint.folder
    if checkpoint_folder:  # so that the run can continue from its checkpoints without its folder
        with open_store(checkpoint_folder).new(CONFIG) as draft:
            draft.write_bytes(config)
    # A finished run that continues with more rounds has a summary already.
    (place.folder / SUMMARY).unlink(missing_ok=True)


def last_checkpoint(folder: Path, options: Checkpoint) -> str:
    """Return the address of a run's last checkpoint; "" if the run has none.

    Checkpoints may be in `checkpoint.folder` and in the run's folder, so both are searched.
    folder: the run's folder.
    options: the settings `checkpoint.*`.
    """
    addresses = dict.fromkeys((options.folder_for(folder), Checkpoint().folder_for(folder)))
    return max(map(checkpoint.find_latest, addresses), key=checkpoint.version_of)


def _place_of_checkpoint(experiment: Experiment, address: str) -> Place:
    """Return the folder in which a run continues, with the checkpoint to load.

    The folder is the setting `out`. Without this setting, it is the folder of the checkpoint's run.
    address: the path or URL of the checkpoint.
    """
    if not is_remote(address):
        address = str(user_path(local_path(address)))
        if not Path(address).is_dir():
            raise RefusedError(
                f"resume={address} is not a folder. Give a checkpoint such as "
                "runs/NAME/checkpoints/round-000010, or latest."
            )
    out = experiment.execution.out
    checkpoints = split_address(address)[0]
    run_folder = None
    if not is_remote(checkpoints) and not (Path(checkpoints) / CONFIG).is_file():
        run_folder = Path(checkpoints).resolve().parent
    folder = user_path(out) if out else run_folder
    if folder is None:
        raise RefusedError(
            f"resume={without_password(address)}: this checkpoint is not in a run's folder on this "
            "machine. Name the folder in which the run continues, with out=DIR."
        )
    for other in (checkpoints, str(run_folder or folder)):
        _check_folder_has_same_run(other, experiment.config)
    is_same_run = folder.resolve() == run_folder
    if run_folder is None:
        is_same_run = (folder / CONFIG).is_file()
    if folder.exists() and not is_same_run:
        action = "Set out to a new folder"
        if run_folder is not None:
            action += f", or remove out=... to continue the run in {run_folder}"
        raise RefusedError(
            f"out={folder} exists already, but resume={without_password(address)} is a checkpoint "
            f"of a run in another folder. {action}."
        )
    settings = experiment.spec.settings
    check_writable(folder, settings.checkpoint)
    return _continue_checkpoint(address, Place(folder, folder.exists()), settings.rounds)


def _continue_checkpoint(address: str, place: Place, rounds: int) -> Place:
    checkpoint.read(address)  # a damaged one is refused before anything starts
    text = without_password(address)
    version = checkpoint.version_of(address)
    if version > rounds:
        raise RefusedError(
            f"rounds={rounds} is below round {version} of {text}. Set rounds={version} or more."
        )
    return replace(place, resume=address, note=f"continuing from {text}")


def check_writable(folder: Path, options: Checkpoint) -> None:
    """Raise `RefusedError` if the folder of a run or of its checkpoints cannot be written.

    folder: the run's folder.
    options: the settings `checkpoint.*`.
    """
    folders = [("out", folder)]
    for checkpoint_folder in separate_checkpoint_folders(options, folder):
        folders.append(("checkpoint.folder", checkpoint_folder))
    for key, path in folders:
        parent = path.absolute()
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise RefusedError(
                f"{key}={path} cannot be created because {parent} is a file. Choose another folder."
            )
        if not os.access(parent, os.W_OK | os.X_OK):
            raise RefusedError(
                f"{key}={path} cannot be written because {parent} is read-only. "
                "Choose another folder."
            )


def separate_checkpoint_folders(options: Checkpoint, folder: Path) -> list[Path]:
    """Return a list with the folder `checkpoint.folder`, if it is local and not the run's folder.

    The list is empty in any other case.
    folder: the run's folder.
    options: the settings `checkpoint.*`.
    """
    if not options.folder:
        return []
    store = open_store(options.folder)
    if not isinstance(store, LocalStore) or store.path.resolve() == folder.resolve():
        return []
    return [store.path]


def _check_folder_has_same_run(address: str | None, config: Node) -> None:
    """Raise `RefusedError` if a folder has results or checkpoints of a different run.

    A different run has another value of a setting that decides the bits.
    address: the folder or URL; None and "" check nothing.
    """
    if not address:
        return
    store = open_store(address)
    if CONFIG in store.names():
        with store.local(CONFIG) as path:
            _check_same_run(load_yaml(path), config, store)


def _check_same_run(stored: Node, config: Node, store: Store) -> None:
    """Raise `RefusedError` if a resumed run has other settings than the stored configuration.

    Only settings that decide the run's bits are compared.
    stored: the configuration in the run's folder.
    """
    stored_values = flatten(stored)
    values = {key: _hide_password(value) for key, value in flatten(config).items()}
    for key in _keys_that_decide_bits([*stored_values, *values]):
        if key in stored_values and key in values and stored_values[key] == values[key]:
            continue
        _check_same_option(key.partition(".")[0], stored, config, store)
        if key not in stored_values:
            raise RefusedError(
                f"{key}={format_value(values[key])} is set, but the run in {store} has no such "
                "key. Either the folder belongs to another run, or a version of raysim before "
                f"{__version__} wrote it. Choose another folder with out=DIR."
            )
        value = format_value(values[key]) if key in values else "absent"
        raise RefusedError(
            f"{key}={value} differs from {key}={format_value(stored_values[key])} of the run in "
            f"{store}, and a continued run cannot change this setting. Set the stored value "
            "again, or choose another folder with out=DIR."
        )


def _check_same_option(group: str, stored: Node, config: Node, store: Store) -> None:
    """Raise `RefusedError` if a resumed run has a different option of a group than before.

    group: the group, such as "method".
    stored: the configuration in the run's folder.
    """
    stored_choices = stored.get("choices")
    choices = config.get("choices")
    if not isinstance(stored_choices, Mapping) or not isinstance(choices, Mapping):
        return
    options = [_format_choice(group, of_run.get(group)) for of_run in (choices, stored_choices)]
    if options[0] != options[1]:
        raise RefusedError(
            f"{group}={options[0]} differs from {group}={options[1]} of the run in {store}, and "
            "a continued run cannot change this option. Choose the stored option again, or "
            "another folder with out=DIR."
        )


def _format_choice(group: str, choice: object) -> str:
    return join_options(choice, group) if isinstance(choice, list) else str(choice)


def _keys_that_decide_bits(keys: list[str]) -> Iterator[str]:
    """Yield the keys on which the bits of a run's results depend; leave out all other keys.

    Each key is yielded only once.
    keys: the full keys from which to select, such as "local.lr". Duplicates are allowed.
    """
    for key in dict.fromkeys(keys):
        head = key.partition(".")[0]
        is_free = head in FREE_KEYS or key in FREE_KEYS
        if not is_free and (head != "runtime" or key in RUNTIME_KEYS_OF_BITS):
            yield key


def _hide_password(value: object) -> object:
    return without_password(value) if isinstance(value, str) else value


def _finished_rounds(folder: Path) -> int:
    """Return the number of rounds of the finished run in a folder; 0 without a finished run."""
    for summary in existing_file(folder / SUMMARY):
        try:
            return int(json.loads(summary.read_text())["rounds"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0
    return 0
