"""Checkpoints: the complete state of a run, written atomically and verified when read.

A checkpoint is a folder such as `round-000050` with these files:
- `run.json`: what JSON can express, such as the planner's state and the rows of the history
- `server.safetensors`: named tensors of the server, in several files if they are large
- `index.safetensors`: which log file contains the state of each client (see `state_log.py`)
- `manifest.json`: the name and the SHA-256 of every file that the checkpoint needs, and a SHA-256
  of this list

All checkpoints of a run share a folder `log` next to them. It has client states
(`states-00000017.safetensors`) and rows of a long history (`rows-00000009.json`).

Files are never changed. The manifest is written last, so a folder without a manifest is not a
checkpoint, and is removed. Files in `log` that no manifest lists are removed, too.

Only one process may write. It locks a local folder. Behind a URL, the file `writer` has its name; a
process that reads another name there stops.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file as map_file

from raysim.api.messages import Arrays
from raysim.primitives.files import (
    draft_file,
    parse_json,
    report_full_disk,
    this_process,
    without_password,
)
from raysim.primitives.stores import Store, is_remote, open_store, split_address
from raysim.primitives.version import __version__
from raysim.simulation.state_log import CLIENT, FILE, MAX_TENSORS, StateIndex, StatesByClient

MANIFEST, WRITER = "manifest.json", "writer"
_RUN, _INDEX = "run.json", "index.safetensors"
_REQUIRED = {_RUN, "server.safetensors", _INDEX}
FORMAT = 3  # format of run.json; a checkpoint with another format cannot be continued
_LOG_FILE = re.compile(r"log/(states|rows)-(\d+)\.(safetensors|json)")
_ROWS = 4096  # rows of the history in a file
# About this many bytes of tensors are in one server file; a file is read at once.
SERVER_FILE_BYTES = 2**28


@dataclass(frozen=True)
class Snapshot:
    """The state of a run between two aggregations.

    numbers: what JSON can express, such as the planner's state and the rows of the history.
    server: arrays by name, such as model parameters and server state.
    clients: the client states by client. Clients that still have the initial state are left out.
    jobs: for each of these clients, the number of the job that made its state.
    """

    numbers: Mapping[str, Any]
    server: Arrays
    clients: Mapping[int, Arrays]
    jobs: Mapping[int, int]


def save_model(tensors: Arrays, path: Path, notes: Mapping[str, str] | None = None) -> None:
    """Write named tensors as one safetensors file, which appears complete or not at all.

    tensors: the arrays by name.
    path: the file to write.
    notes: texts by name for the header of the file; None writes none.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    with report_full_disk(path, _size(tensors)), draft_file(path) as draft:
        save_file(arrays, draft, None if notes is None else dict(notes))


def _size(tensors: Arrays) -> int:
    return sum(array.nbytes for array in tensors.values())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- folders --------------------------------------------------------------------------------------
def list_complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a local folder, oldest first."""
    return [folder / _folder(version) for version in _complete_versions(open_store(folder))]


def find_latest(where: str | Path) -> str:
    """Return the address of the last complete checkpoint in `where`; "" if there is none.

    where: a folder or a URL.
    """
    versions = _complete_versions(open_store(where))
    return f"{where}/{_folder(versions[-1])}" if versions else ""


def version_of(address: str | Path) -> int:
    """Return the version in the name of a checkpoint's folder; -1 for any other name.

    address: the path or URL of the folder, such as "runs/a/checkpoints/round-000050".
    """
    match = re.fullmatch(r"round-(\d+)", split_address(address)[1])
    return int(match[1]) if match else -1


def _folder(version: int) -> str:
    return f"round-{version:06d}"


def _files_by_version(store: Store) -> dict[int, Sequence[str]]:
    """Return the names of each checkpoint's files, by the checkpoint's version.

    A checkpoint without files is left out.
    """
    folders = [name for name in store.names() if re.fullmatch(r"round-\d+", name)]
    files = {int(folder.removeprefix("round-")): store.names(folder) for folder in folders}
    return {version: files[version] for version in sorted(files) if files[version]}


def _complete_versions(store: Store) -> list[int]:
    return [version for version, files in _files_by_version(store).items() if MANIFEST in files]


def _incomplete_versions(store: Store) -> list[int]:
    return [version for version, files in _files_by_version(store).items() if MANIFEST not in files]


# --- writing --------------------------------------------------------------------------------------
class Checkpoints:
    """A writer of one run's checkpoints, which keeps only the last few.

    where: a folder or a URL, to which no other run may write.
    keep: the number of checkpoints to keep.
    resume: the checkpoint that the run continues from; "" for a new run. If it is in `where`, new
    checkpoints share its log files.
    """

    def __init__(self, where: str | Path, keep: int = 2, resume: str = ""):
        self.where, self.keep, self._resume = str(where), keep, resume
        self._store: Store | None = None
        self._writer = f"{this_process()} ({secrets.token_hex(8)})"
        # By version: the manifest of each existing checkpoint.
        self._manifests: dict[int, Mapping[str, str]] = {}
        self.removal_failure = ""  # why the last `write` could not remove older checkpoints
        self._last = -1  # the version that was written last, or that the run continued from
        # For the version `_last`: the checksums of its log files, by name, and its index.
        self._log: dict[str, str] = {}
        self._index = StateIndex()

    def write(self, version: int, snapshot: Snapshot) -> str:
        """Write a checkpoint, remove all but the last few, and return its address.

        Nothing is written if the checkpoint that was written last, or that the run continued from,
        has this version. Checkpoints of later versions are removed. The attribute `removal_failure`
        says why an old checkpoint could not be removed.
        Raises OSError if the checkpoint cannot be written, or if `where` is a URL to which another
        process has begun to write.
        """
        store = self._open()
        if is_remote(self.where):
            self._check_writer(store)
        if version != self._last:
            self._remove([version])
            try:
                self._write(store, version, snapshot)
            except Exception:
                with contextlib.suppress(OSError):  # the first error says more
                    self._remove_leftovers()
                raise
        earlier = sorted(known for known in self._manifests if known <= version)
        last = earlier[-self.keep :]
        self.removal_failure = ""
        try:
            self._remove([known for known in self._manifests if known not in last])
        except OSError as error:
            self.removal_failure = str(error)
        return f"{self.where}/{_folder(version)}"

    def _write(self, store: Store, version: int, snapshot: Snapshot) -> None:
        folder = _folder(version)
        rows = snapshot.numbers.get("rows", [])
        index = self._index.update(snapshot.jobs)
        log = self._log | self._write_rows(store, rows)
        log |= self._write_states(store, index, snapshot.clients)
        index = index.with_sizes()
        log = _without_abandoned(log, index)
        numbers = {"format": FORMAT, **snapshot.numbers}
        if rows:
            numbers["rows"] = rows[len(rows) // _ROWS * _ROWS :]  # earlier rows are in the log
        files = log | {_RUN: _write_json(store, f"{folder}/{_RUN}", numbers)}
        for part, tensors in enumerate(_split(snapshot.server)):
            name = f"server-{part}.safetensors" if part else "server.safetensors"
            files[name] = _write_tensors(store, f"{folder}/{name}", tensors)
        tables = {"states": index.states, "files": index.files}
        files[_INDEX] = _write_tensors(store, f"{folder}/{_INDEX}", tables)
        store.settle("log", folder)
        manifest = files | {MANIFEST: _digest_of_manifest(files)}
        _write_json(store, f"{folder}/{MANIFEST}", manifest)
        store.settle(folder, "")
        self._manifests[version], self._last = files, version
        self._log, self._index = log, index

    def _write_states(
        self, store: Store, index: StateIndex, clients: Mapping[int, Arrays]
    ) -> dict[str, str]:
        """Write all client states that `index` marks as unwritten; put them into new log files.

        Return the checksum of each new file, by name. The files are added to `index`.
        clients: the state of each client. States that are in a log file already are not read.
        """
        files = {}
        for number, tensors in index.write_files(clients, self._next_number()):
            name = _states_name(number)
            files[name] = _write_tensors(store, name, tensors)
        return files

    def _write_rows(self, store: Store, rows: Sequence[Any]) -> dict[str, str]:
        """Write new rows of the history to log files; return the files' checksums by file name.

        Each file gets exactly `_ROWS` rows; fewer rows at the end are left for a later call.
        rows: all rows of the history, including rows that are in files already.
        """
        files = {}
        written = sum(name.startswith("log/rows-") for name in self._log)
        for number in range(written, len(rows) // _ROWS):
            # Numbers grow, so that the names of the files are in the order of the rows.
            name = f"log/rows-{self._next_number() + number - written:08d}.json"
            files[name] = _write_json(store, name, rows[number * _ROWS : (number + 1) * _ROWS])
        return files

    def _next_number(self) -> int:
        """Return a number that no log file of any checkpoint has."""
        last = 0
        for manifest in self._manifests.values():
            for name in manifest:
                match = _LOG_FILE.fullmatch(name)
                if match:
                    last = max(last, int(match[2]))
        return last + 1

    # --- removing ---------------------------------------------------------------------------------
    def _open(self) -> Store:
        """Return the store of the checkpoints.

        The first call also removes unfinished files of a run that was killed.
        """
        if self._store is None:
            self._store = store = open_store(self.where)
            if is_remote(self.where):
                _write_bytes(store, WRITER, self._writer.encode())
            for version in _complete_versions(store):
                self._manifests[version] = _manifest_if_valid(store, version)
            self._continue_log(store)
            with contextlib.suppress(OSError):  # leftovers use space and do no harm
                self._remove_leftovers()
        return self._store

    def _check_writer(self, store: Store) -> None:
        with store.local(WRITER) as path:
            writer = path.read_text()
        if writer != self._writer:
            raise OSError(
                f"{writer.partition(' (')[0]} now also writes checkpoints to {store}. That "
                "run began later, so this run no longer writes there; set another out or "
                "checkpoint.folder for one of the two runs"
            )

    def _continue_log(self, store: Store) -> None:
        """Let new checkpoints use the log files of the checkpoint from which this run continues.

        Log files contain client states and old rows of the history. Do nothing if the run is new,
        or continues from a checkpoint in another folder.
        """
        if not self._resume or not _is_same_place(split_address(self._resume)[0], self.where):
            return
        self._last = version_of(self._resume)
        files = self._manifests.get(self._last, {})
        self._log = {name: digest for name, digest in files.items() if _LOG_FILE.fullmatch(name)}
        if _INDEX in files:
            self._index = _read_index(store, _folder(self._last))

    def _remove(self, versions: Sequence[int]) -> None:
        """Remove checkpoints, and then the log files that no other checkpoint needs.

        versions: the versions of the checkpoints to remove.
        """
        store = self._open()
        before = _log_files(self._manifests)
        for version in versions:
            if version in self._manifests:
                # The manifest first: without it the folder is no checkpoint.
                store.remove(f"{_folder(version)}/{MANIFEST}")
                store.remove(_folder(version))
                del self._manifests[version]
        for name in before - _log_files(self._manifests):
            store.remove(name)

    def _remove_leftovers(self) -> None:
        """Remove incomplete checkpoints, and log files that no valid checkpoint needs."""
        store = self._open()
        for version in _incomplete_versions(store):
            store.remove(_folder(version))
        existing = {f"log/{name}" for name in store.names("log")}
        for name in existing - _log_files(self._manifests):
            store.remove(name)


def _is_same_place(one: str, other: str) -> bool:
    if one == other:
        return True
    return bool(one) and not is_remote(one) and Path(one).resolve() == Path(other).resolve()


def _without_abandoned(log: Mapping[str, str], index: StateIndex) -> dict[str, str]:
    """Return the part of `log` that a checkpoint still needs.

    A file with client states is left out if all its states are outdated.
    log: the checksums of log files, by name.
    index: says which file has the current state of each client.
    """
    needed = {_states_name(number) for number in index.files[:, 0].tolist()}
    return {
        name: digest
        for name, digest in log.items()
        if name in needed or name.startswith("log/rows-")
    }


def _states_name(number: int) -> str:
    return f"log/states-{number:08d}.safetensors"


def _log_files(manifests: Mapping[int, Mapping[str, str]]) -> set[str]:
    return {name for manifest in manifests.values() for name in manifest if name.startswith("log/")}


def _write_tensors(store: Store, name: str, tensors: Arrays) -> str:
    """Write named tensors as a file; return the file's checksum."""
    path = store.draft_folder() / name
    with report_full_disk(path, _size(tensors)), store.new(name) as draft:
        save_file(dict(tensors), draft)
        return _digest(draft)


def _write_json(store: Store, name: str, content: object) -> str:
    """Write a value as a JSON file; return the file's checksum.

    name: the file's path in the store.
    content: a value that JSON can represent.
    """
    return _write_bytes(store, name, json.dumps(content).encode())


def _write_bytes(store: Store, name: str, content: bytes) -> str:
    path = store.draft_folder() / name
    with report_full_disk(path, len(content)), store.new(name) as draft:
        draft.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _split(arrays: Arrays) -> Iterator[dict[str, np.ndarray]]:
    """Divide arrays into groups that are small enough for one file; yield at least one group.

    The yielded arrays are C-contiguous.
    """
    part: dict[str, np.ndarray] = {}
    size = 0
    for key in arrays:
        array = np.asarray(arrays[key], order="C")
        if part and (size + array.nbytes > SERVER_FILE_BYTES or len(part) == MAX_TENSORS):
            yield part
            part, size = {}, 0
        part[key] = array
        size += array.nbytes
    yield part


# --- reading --------------------------------------------------------------------------------------
def find_damage(address: str | Path) -> str:
    """Return a text that says how a checkpoint is damaged; "" if it is undamaged.

    address: the path or the URL of the checkpoint.
    """
    where, folder = split_address(address)
    try:
        store = open_store(where)
        for name, digest in _read_manifest(store, folder).items():
            with store.local(_path(folder, name)) as path:
                if _digest(path) != digest:
                    return f"{name} does not have the checksum of its manifest"
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    return ""


def _path(folder: str, name: str) -> str:
    """Return the path, in the store, of a file that a checkpoint's manifest lists.

    folder: the folder of the checkpoint, such as "round-000050".
    name: the file's name in the manifest; names that start with "log/" are outside of `folder`.
    """
    return name if name.startswith("log/") else f"{folder}/{name}"


def _read_manifest(store: Store, folder: str) -> dict[str, str]:
    """Return the checksum of each file of a checkpoint, by name.

    Raises ValueError if the manifest is incomplete, was changed, or lists a file outside of the
    checkpoint.
    """
    with store.local(f"{folder}/{MANIFEST}") as path:
        manifest = parse_json(path.read_bytes())
    is_complete = isinstance(manifest, dict) and manifest.keys() >= _REQUIRED
    if not is_complete or any("/" in name and not _LOG_FILE.fullmatch(name) for name in manifest):
        raise ValueError(
            f"the list of files in {MANIFEST} lacks a file that every checkpoint has, or contains "
            "a file outside of the checkpoint"
        )
    if manifest.pop(MANIFEST, None) != _digest_of_manifest(manifest):
        raise ValueError(f"{MANIFEST} does not match the checksum that it contains")
    return dict(manifest)


def _manifest_if_valid(store: Store, version: int) -> dict[str, str]:
    """Return the checksum of each file of a checkpoint; {} if its manifest is damaged."""
    try:
        return _read_manifest(store, _folder(version))
    except ValueError:
        return {}


def _digest_of_manifest(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def read(address: str | Path) -> Snapshot:
    """Read a checkpoint, after verifying all its files.

    Raises ValueError if the checkpoint is missing, damaged, or in the format of another version of
    raysim. The error for a damaged checkpoint gives the address of the run's last valid checkpoint,
    if any.
    """
    where, folder = split_address(address)
    store = open_store(where)
    shown = without_password(str(address))
    if not store.names(folder):
        raise ValueError(
            f"resume={shown}: there is no checkpoint. Set the path of a checkpoint folder, or "
            "latest."
        )
    if _is_of_earlier_version(store, folder):
        raise ValueError(
            f"resume={shown}: a version of raysim before {__version__} wrote this checkpoint. "
            "Start the run again, in another folder."
        )
    damage = find_damage(address)
    if damage:
        advice = _advise(where, folder)
        raise ValueError(f"resume={shown}: the checkpoint is damaged ({damage}). {advice}")
    files = _read_manifest(store, folder)
    numbers = _read_json(store, f"{folder}/{_RUN}")
    written_format = numbers.pop("format")
    if written_format != FORMAT:
        raise ValueError(
            f"resume={shown}: the checkpoint has format {written_format}, but raysim {__version__} "
            f"reads format {FORMAT}. Start the run again, in another folder."
        )
    row_files = sorted(name for name in files if re.fullmatch(r"log/rows-\d+\.json", name))
    if row_files:
        rows = [row for name in row_files for row in _read_json(store, _path(folder, name))]
        numbers["rows"] = rows + numbers["rows"]
    parts = [name for name in files if re.fullmatch(r"server(-\d+)?\.safetensors", name)]
    server = _map_tensors(store, [f"{folder}/{name}" for name in parts])
    index = _read_index(store, folder)
    return Snapshot(numbers, server, _states_by_client(store, index), index.jobs)


def _advise(where: str, damaged_folder: str) -> str:
    """Return the sentence that tells users how to continue without a damaged checkpoint.

    The sentence names the last undamaged checkpoint, or says to start the run again.
    where: the folder or URL of all checkpoints of the run.
    """
    for version in reversed(_complete_versions(open_store(where))):
        address = f"{where}/{_folder(version)}"
        if _folder(version) != damaged_folder and not find_damage(address):
            return f"Set resume={without_password(address)} to continue from another one."
    return "There is no other valid checkpoint. Start the run again, in another folder."


def _is_of_earlier_version(store: Store, folder: str) -> bool:
    """Return True if the checkpoint has the format of old versions of raysim.

    These versions had no folder `log`. They kept all client states in one file,
    clients.safetensors.
    """
    try:
        with store.local(f"{folder}/{MANIFEST}") as path:
            manifest = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and "clients.safetensors" in manifest


def _read_json(store: Store, name: str) -> Any:
    with store.local(name) as path:
        return json.loads(path.read_text())


def _map_tensors(store: Store, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Map the tensors of some files into memory; return all tensors in one dict, by name.

    Values are read from the file when they are used. Writing to a returned array does not change
    the file.
    """
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        with store.local(name) as path:
            tensors |= {key: tensor.numpy() for key, tensor in map_file(path).items()}
    return tensors


def _read_index(store: Store, folder: str) -> StateIndex:
    tables = _map_tensors(store, [f"{folder}/{_INDEX}"])
    return StateIndex(tables["states"].copy(), tables["files"].copy())


def _states_by_client(store: Store, index: StateIndex) -> StatesByClient:
    """Return a mapping from each client to its state, which is read when it is accessed.

    Iterate over the clients in the order of the mapping, so that no file is read twice.
    index: says which file contains the state of each client.
    """
    order = index.states[np.argsort(index.states[:, FILE], kind="stable")]
    file_of: dict[int, int] = dict(order[:, [CLIENT, FILE]].tolist())
    mapped: dict[int, dict[int, dict[str, np.ndarray]]] = {}  # by file, by client

    def read_state(client: int) -> Arrays:
        number = file_of[client]
        if number not in mapped:
            mapped.clear()
            mapped[number] = _group_by_client(_map_tensors(store, [_states_name(number)]))
        return mapped[number].get(client, {})

    return StatesByClient(file_of, read_state)


def _group_by_client(tensors: Arrays) -> dict[int, dict[str, np.ndarray]]:
    """Group arrays with names such as "17/model.bn1.weight" by the number of the client (17)."""
    states: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for key, array in tensors.items():
        client, _, name = key.partition("/")
        states[int(client)][name] = array
    return dict(states)


def copy(address: str | Path, where: str | Path) -> None:
    """Copy a checkpoint, with all files that it needs, to another folder or URL.

    address: the path or the URL of the checkpoint.
    where: the folder or URL that gets the copy. The copied folder keeps its name, such as
    "round-000050".
    """
    origin, folder = split_address(address)
    source, target = open_store(origin), open_store(where)
    for name in [*_read_manifest(source, folder), MANIFEST]:
        path = _path(folder, name)
        with source.local(path) as original, target.new(path) as draft:
            shutil.copyfile(original, draft)
