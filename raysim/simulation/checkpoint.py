"""Checkpoints: everything a run is, written atomically, verified on reading, without pickle.

A checkpoint is a folder `round-000050` with `run.json` (numbers), `server.safetensors` (named tensors; many go to
several files), `index.safetensors` and `manifest.json`. What checkpoints share is in `log` beside it: client states in
`states-00000017.safetensors`, where the index says which file has whose (`state_log`), and of a long history thousands
of rows at a time in `rows-00000009.json`. The manifest has the SHA-256 of every file that the checkpoint needs, and of
what it says itself. It comes last: before it, there is no checkpoint. No file is ever changed, and those that no
manifest names are removed.

A folder is locked as long as a run writes there (`files.held`). Behind a URL there are no locks: `writer` says which
process writes there, the last that began; an earlier one finds that before it writes or removes more, and stops.
"""

from __future__ import annotations

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
from raysim.simulation.state_log import CLIENT, FILE, MOST, Index, StatesByClient

MANIFEST, WRITER = "manifest.json", "writer"
_RUN, _INDEX = "run.json", "index.safetensors"
_NEEDED = {_RUN, "server.safetensors", _INDEX}
FORMAT = 2  # of run.json; a checkpoint with another one cannot be continued
_LOG = re.compile(r"log/(states|rows)-(\d+)\.(safetensors|json)")
_ROWS = 4096  # rows of the history in a file


@dataclass(frozen=True)
class Snapshot:
    """A run between two aggregations. clients: the named tensors of their client states; jobs: which job left each."""

    numbers: Mapping[str, Any]  # JSON
    server: Arrays
    clients: Mapping[int, Arrays]
    jobs: Mapping[int, int]


def save_model(tensors: Arrays, path: Path) -> None:
    """Named tensors as one file, complete or not at all."""
    with report_full_disk(path, _size(tensors)), draft_file(path) as draft:
        save_file({name: np.asarray(array, order="C") for name, array in tensors.items()}, draft)


def _size(tensors: Arrays) -> int:
    return sum(array.nbytes for array in tensors.values())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- what is there --------------------------------------------------------------------------------------------------
def list_complete(folder: Path) -> list[Path]:
    """Complete checkpoints in a local folder, oldest first."""
    there = open_store(folder)
    return [folder / _folder(version) for version in _versions(there)]


def find_latest(where: str | Path) -> str:
    """The address of the last complete checkpoint in a folder or behind a URL, "" if there is none."""
    versions = _versions(open_store(where))
    return f"{where}/{_folder(versions[-1])}" if versions else ""


def version_of(address: str | Path) -> int:
    """The round after which a checkpoint was written; -1 if its name does not say so."""
    number = split_address(address)[1].removeprefix("round-")
    return int(number) if number.isdecimal() else -1


def _folder(version: int) -> str:
    return f"round-{version:06d}"


def _versions(there: Store, whole: bool = True) -> list[int]:
    """Of complete checkpoints, or of those that were only begun."""
    folders = (name for name in there.names() if name.startswith("round-") and name[6:].isdecimal())
    found = ((int(folder[6:]), there.names(folder)) for folder in folders)
    return sorted(version for version, files in found if files and (MANIFEST in files) == whole)


# --- writing --------------------------------------------------------------------------------------------------------
class Checkpoints:
    """Writes the checkpoints of one run, to where no other run writes, and keeps the last few.

    where: a folder, or a URL. resume: the checkpoint that the run goes on from; if it is one of these, its log goes on.
    """

    def __init__(self, where: str | Path, keep: int = 2, resume: str = ""):
        self.where, self.keep, self._resume = str(where), keep, resume
        self._store: Store | None = None
        self._me = f"{this_process()} ({secrets.token_hex(8)})"
        self._manifests: dict[int, Mapping[str, str]] = {}  # by version: of those that are there
        self._last = -1  # the version that was written last, or gone on from
        self._log: dict[
            str, str
        ] = {}  # checksums by name of the log's files that this version needs
        self._index = Index()  # of this version

    def write(self, version: int, snapshot: Snapshot) -> str:
        """Write a checkpoint, then remove all but the last few. Returns its address.

        Those of later rounds go as well: the run has left their course when it went on from an earlier one. The version
        that was written last is there already: between two aggregations nothing changes that a result depends on.
        Raises OSError where another process has begun to write.
        """
        there = self._opened()
        if is_remote(self.where):
            self._check_writer(there)
        if version != self._last:
            self._remove([version])
            try:
                self._write(there, version, snapshot)
            except Exception:
                self._clear()
                raise
        earlier = sorted(each for each in self._manifests if each <= version)
        self._remove([each for each in self._manifests if each not in earlier[-self.keep :]])
        return f"{self.where}/{_folder(version)}"

    def _write(self, there: Store, version: int, snapshot: Snapshot) -> None:
        rows = snapshot.numbers.get("rows", [])
        index = self._index.of_now(snapshot.jobs)
        log = (
            self._log
            | self._put_rows(there, rows)
            | self._put_states(there, index, snapshot.clients)
        )
        index, folder = index.closed(), _folder(version)
        needed = {_states_name(number) for number in index.files[:, 0].tolist()}
        log = {
            name: digest
            for name, digest in log.items()
            if name in needed or name.startswith("log/rows-")
        }
        left = {"rows": rows[len(rows) // _ROWS * _ROWS :]} if rows else {}
        parts = [
            (f"server{f'-{number}' if number else ''}", part)
            for number, part in enumerate(_parts(snapshot.server))
        ]
        files = log | {
            _RUN: _put_json(
                there, f"{folder}/{_RUN}", {"format": FORMAT, **snapshot.numbers, **left}
            ),
            **{
                f"{name}.safetensors": _put(there, f"{folder}/{name}.safetensors", part)
                for name, part in parts
            },
            _INDEX: _put(
                there, f"{folder}/{_INDEX}", {"states": index.states, "files": index.files}
            ),
        }
        there.settle("log", folder)
        _put_json(there, f"{folder}/{MANIFEST}", files | {MANIFEST: _own_digest(files)})
        there.settle(folder, "")
        self._manifests[version], self._last, self._log, self._index = files, version, log, index

    def _put_states(
        self, there: Store, index: Index, clients: Mapping[int, Arrays]
    ) -> dict[str, str]:
        """Write the states that `index` lacks."""
        parts = (
            (_states_name(number), part)
            for number, part in index.parts(clients, self._next_number())
        )
        return {name: _put(there, name, part) for name, part in parts}

    def _put_rows(self, there: Store, rows: Sequence[Any]) -> dict[str, str]:
        """Write the rows that now fill a file, if there are any."""
        files = {}
        known = sum(name.startswith("log/rows-") for name in self._log)
        for number in range(known, len(rows) // _ROWS):
            # The last of these files is the last of all rows, so that their names are in the rows' order.
            name = f"log/rows-{self._next_number() + number - known:08d}.json"
            files[name] = _put_json(there, name, rows[number * _ROWS : (number + 1) * _ROWS])
        return files

    def _next_number(self) -> int:
        """Of a new file in the log: no checkpoint that is there names it."""
        names = (_LOG.fullmatch(name) for manifest in self._manifests.values() for name in manifest)
        return 1 + max((int(name[2]) for name in names if name), default=0)

    # --- what stays ------------------------------------------------------------------------------------------------
    def _opened(self) -> Store:
        """The place; before anything is written there, what a killed run had begun is removed."""
        if self._store is None:
            self._store = there = open_store(self.where)
            if is_remote(self.where):
                _put_text(there, WRITER, self._me.encode())
            self._manifests = {
                version: _named_files(there, version) for version in _versions(there)
            }
            self._go_on(there)
            self._clear()
        return self._store

    def _check_writer(self, there: Store) -> None:
        with there.local(WRITER) as path:
            if (now := path.read_text()) != self._me:
                raise OSError(
                    f"{now.partition(' (')[0]} writes its checkpoints to {there} too, and began later"
                )

    def _go_on(self, there: Store) -> None:
        """Let the log of the checkpoint that the run goes on from be this run's, if it lies here."""
        where = split_address(self._resume)[0] if self._resume else ""
        if not where or (
            where != self.where
            and (is_remote(where) or Path(where).resolve() != Path(self.where).resolve())
        ):
            return
        self._last = version_of(self._resume)
        files = self._manifests.get(self._last, {})
        self._log = {name: digest for name, digest in files.items() if _LOG.fullmatch(name)}
        if _INDEX in files:
            self._index = _index(there, _folder(self._last))

    def _remove(self, versions: Sequence[int]) -> None:
        """Remove checkpoints, and files of the log that only they needed."""
        there = self._opened()
        before = _log_files(self._manifests)
        for version in versions:
            if self._manifests.pop(version, None) is not None:
                there.remove(
                    f"{_folder(version)}/{MANIFEST}"
                )  # first: what is left is no checkpoint
                there.remove(_folder(version))
        for name in before - _log_files(self._manifests):
            there.remove(name)

    def _clear(self) -> None:
        """Remove all that is no part of a checkpoint."""
        there = self._opened()
        for version in _versions(there, whole=False):
            there.remove(_folder(version))
        for name in {f"log/{name}" for name in there.names("log")} - _log_files(self._manifests):
            there.remove(name)


def _states_name(number: int) -> str:
    return f"log/states-{number:08d}.safetensors"


def _log_files(manifests: Mapping[int, Mapping[str, str]]) -> set[str]:
    return {name for manifest in manifests.values() for name in manifest if name.startswith("log/")}


def _put(there: Store, name: str, tensors: Arrays) -> str:
    """Write named tensors as a file; its checksum."""
    with report_full_disk(there.draft_folder() / name, _size(tensors)), there.new(name) as draft:
        save_file(dict(tensors), draft)
        return _digest(draft)


def _put_json(there: Store, name: str, content: object) -> str:
    return _put_text(there, name, json.dumps(content).encode())


def _put_text(there: Store, name: str, text: bytes) -> str:
    with report_full_disk(there.draft_folder() / name, len(text)), there.new(name) as draft:
        draft.write_bytes(text)
    return hashlib.sha256(text).hexdigest()


def _parts(arrays: Arrays) -> Iterator[dict[str, np.ndarray]]:
    """The arrays, contiguous, so many at a time as fit into one file; at least one part."""
    keys = list(arrays)
    for start in range(0, max(1, len(keys)), MOST):
        yield {key: np.asarray(arrays[key], order="C") for key in keys[start : start + MOST]}


# --- reading --------------------------------------------------------------------------------------------------------
def find_damage(address: str | Path) -> str:
    """What is wrong with a checkpoint, or ""."""
    where, folder = split_address(address)
    try:
        there = open_store(where)
        for name, digest in _manifest(there, folder).items():
            with there.local(_path(folder, name)) as path:
                if _digest(path) != digest:
                    return f"{name} does not have the checksum of its manifest"
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    return ""


def _path(folder: str, name: str) -> str:
    """Where a file lies that a manifest in a folder names."""
    return name if name.startswith("log/") else f"{folder}/{name}"


def _manifest(there: Store, folder: str) -> dict[str, str]:
    """The checksums of a checkpoint's files. Raises ValueError where they are not those that were written."""
    with there.local(f"{folder}/{MANIFEST}") as path:
        manifest = parse_json(path.read_bytes())
    known = isinstance(manifest, dict) and manifest.keys() >= _NEEDED
    if not known or any("/" in name and not _LOG.fullmatch(name) for name in manifest):
        raise ValueError(f"{MANIFEST} does not name the files of a checkpoint")
    if manifest.pop(MANIFEST, None) != _own_digest(manifest):
        raise ValueError(f"{MANIFEST} does not have its own checksum")
    return dict(manifest)


def _named_files(there: Store, version: int) -> dict[str, str]:
    """The same; nothing where it is damaged."""
    try:
        return _manifest(there, _folder(version))
    except ValueError:
        return {}


def _own_digest(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def read(address: str | Path) -> Snapshot:
    """Read and verify a checkpoint.

    Raises ValueError if it is missing or damaged; the sentence names the last good one beside it.
    """
    where, folder = split_address(address)
    there = open_store(where)
    shown = without_password(str(address))
    if not there.names(folder):
        raise ValueError(
            f"resume={shown}: no checkpoint there; give the path of a checkpoint folder, or latest"
        )
    if _is_earlier(there, folder):
        reason = f"an earlier version of raysim than {__version__} wrote this checkpoint"
        raise ValueError(f"resume={shown}: {reason}. Start the run again, in another folder")
    if wrong := find_damage(address):
        others = (
            f"{where}/{_folder(version)}"
            for version in reversed(_versions(there))
            if _folder(version) != folder
        )
        good = without_password(next((other for other in others if not find_damage(other)), ""))
        instead = (
            f"resume={good} continues from the last good one"
            if good
            else "no other checkpoint is left"
        )
        raise ValueError(f"checkpoint {shown} is damaged ({wrong}); {instead}")
    files = _manifest(there, folder)
    numbers = _json(there, f"{folder}/{_RUN}")
    written = numbers.pop("format", 1)
    if written != FORMAT:
        raise ValueError(
            f"resume={shown}: the checkpoint has format {written}, and raysim {__version__} reads format {FORMAT}. "
            "Start the run again, in another folder"
        )
    if blocks := sorted(name for name in files if re.fullmatch(r"log/rows-\d+\.json", name)):
        numbers["rows"] = [
            row for name in blocks for row in _json(there, _path(folder, name))
        ] + numbers["rows"]
    server = _mapped(there, [f"{folder}/{name}" for name in files if _is_part(name, "server")])
    index = _index(there, folder)
    return Snapshot(numbers, server, _states(there, index), index.jobs)


def _is_earlier(there: Store, folder: str) -> bool:
    """Return whether a checkpoint has the file of versions that wrote all client states at once."""
    try:
        with there.local(f"{folder}/{MANIFEST}") as path:
            manifest = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and "clients.safetensors" in manifest


def _is_part(name: str, of: str) -> bool:
    return re.fullmatch(rf"{of}(-\d+)?\.safetensors", name) is not None


def _json(there: Store, name: str) -> Any:
    with there.local(name) as path:
        return json.loads(path.read_text())


def _mapped(there: Store, names: Sequence[str]) -> dict[str, np.ndarray]:
    """All tensors of some files.

    Mapped, not read: caches and states may be larger than memory. What is written to stays out of the file.
    """
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        with there.local(name) as path:
            tensors |= {key: tensor.numpy() for key, tensor in map_file(path).items()}
    return tensors


def _index(there: Store, folder: str) -> Index:
    return Index(
        **{name: array.copy() for name, array in _mapped(there, [f"{folder}/{_INDEX}"]).items()}
    )


def _states(there: Store, index: Index) -> StatesByClient:
    """The states that an index knows, file by file, of which one is mapped at a time."""
    order = index.states[np.argsort(index.states[:, FILE], kind="stable")]
    numbers: dict[int, int] = dict(order[:, [CLIENT, FILE]].tolist())
    mapped: dict[int, dict[int, dict[str, np.ndarray]]] = {}

    def of(client: int) -> Arrays:
        if (number := numbers[client]) not in mapped:
            mapped.clear()
            mapped[number] = _by_client(_mapped(there, [_states_name(number)]))
        return mapped[number].get(client, {})

    return StatesByClient(numbers, of)


def _by_client(tensors: Arrays) -> dict[int, dict[str, np.ndarray]]:
    """Arrays with names such as "17/model.bn1.weight", by client."""
    states: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    for key, array in tensors.items():
        client, _, name = key.partition("/")
        states[int(client)][name] = array
    return dict(states)


def copy(address: str | Path, where: str | Path) -> None:
    """Copy a checkpoint, with all that it needs, to another place."""
    there, folder = open_store(split_address(address)[0]), split_address(address)[1]
    for name in [*_manifest(there, folder), MANIFEST]:
        with (
            there.local(_path(folder, name)) as source,
            open_store(where).new(_path(folder, name)) as draft,
        ):
            shutil.copyfile(source, draft)
