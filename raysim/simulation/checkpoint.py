"""Checkpoints: everything a run is, written atomically, verified on reading, without pickle.

A checkpoint is a folder `round-000050` of `run.json` (numbers), `server.safetensors` and `clients.safetensors`
(named tensors; many go into several files) and `manifest.json` (SHA-256 of the others and of what it says itself). It
appears under its name only when it is complete. `run.json` has the last rows of the history; of a long one, thousands
at a time are in `rows-000000.json` and so on, which the next checkpoint shares (as links): it costs no more.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from safetensors.torch import load_file as map_file

from raysim.primitives.files import from_json, regular, room_for

MANIFEST = "manifest.json"
_NEEDED = {"run.json", "server.safetensors", "clients.safetensors"}
_KEEP = 2  # the last one, and one more in case it is damaged
_ROWS = 4096  # rows of the history in a file
_MOST = 100_000  # tensors in a file: their names and places may take 100 MB at most, and take some 150 bytes each


@dataclass(frozen=True)
class Snapshot:
    """A run between two aggregations."""

    numbers: Mapping[str, Any]  # JSON
    server: Mapping[str, np.ndarray]
    clients: Mapping[str, np.ndarray]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(folder: Path, version: int, snapshot: Snapshot, shared: dict[str, str] | None = None) -> Path:
    """Write a checkpoint below `folder`, then delete all but the newest two. Returns its path.

    shared: checksums by name of the files of rows that this run's last checkpoint has; these are added to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"round-{version:06d}"
    for unfinished in folder.glob(".round-*"):  # of a process that was killed while it wrote
        shutil.rmtree(unfinished)
    draft = folder / f".{final.name}.{os.getpid()}"
    arrays = (*snapshot.server.values(), *snapshot.clients.values())
    with room_for(final, sum(array.nbytes for array in arrays)):
        try:
            _write(draft, snapshot, next(reversed(available(folder)), None), {} if shared is None else shared)
        except Exception:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    shutil.rmtree(final, ignore_errors=True)
    draft.rename(final)
    _sync(folder)
    for old in available(folder)[:-_KEEP]:
        shutil.rmtree(old)
    return final


def _write(draft: Path, snapshot: Snapshot, last: Path | None, shared: dict[str, str]) -> None:
    """All files, complete on the disk. last: the checkpoint before, of which the files in `shared` may be linked."""
    draft.mkdir()
    rows = snapshot.numbers.get("rows", [])
    linked = set[str]()
    for start in range(0, len(rows) - _ROWS + 1, _ROWS):
        if (name := f"rows-{start // _ROWS:06d}.json") in shared and last and _link(last / name, draft / name):
            linked.add(name)
        else:
            (draft / name).write_text(json.dumps(rows[start : start + _ROWS]))
    left = {"rows": rows[len(rows) // _ROWS * _ROWS :]} if rows else {}
    (draft / "run.json").write_text(json.dumps({**snapshot.numbers, **left}))
    for name, arrays in (("server", snapshot.server), ("clients", snapshot.clients)):
        for index, part in enumerate(_parts(arrays)):
            save_file(part, path := draft / f"{name}{f'-{index}' if index else ''}.safetensors")
            shutil.copymode(draft / "run.json", path)  # safetensors keeps what it writes to its user
    paths = sorted(draft.iterdir())
    digests = {path.name: shared[path.name] if path.name in linked else _digest(path) for path in paths}
    shared.update({name: digest for name, digest in digests.items() if name.startswith("rows-")})
    (draft / MANIFEST).write_text(json.dumps({**digests, MANIFEST: _own_digest(digests)}))
    for path in (*draft.iterdir(), draft):
        if path.name not in linked:
            _sync(path)


def _link(source: Path, target: Path) -> bool:
    """Whether it could be linked, which some file systems cannot."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def save_model(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Named tensors as one file, complete or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with room_for(path, sum(array.nbytes for array in tensors.values())):
        try:
            draft.touch()
            mode = draft.stat().st_mode  # safetensors keeps what it writes to its user
            save_file({name: np.asarray(array, order="C") for name, array in tensors.items()}, draft)
            draft.chmod(mode)
            _sync(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)


def _parts(arrays: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """The arrays, contiguous, so many at a time as fit into one file; at least one part."""
    keys = list(arrays)
    for start in range(0, max(1, len(keys)), _MOST):
        yield {key: np.asarray(arrays[key], order="C") for key in keys[start : start + _MOST]}


def available(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.glob("round-*") if path.name[6:].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[6:]))


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, or ""."""
    try:
        manifest = _manifest(path)
        for name, digest in manifest.items():
            if _digest(regular(path / name)) != digest:
                return f"{name} does not have the checksum of its manifest"
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")
    return ""


def _manifest(path: Path) -> dict[str, str]:
    """The checksums of a checkpoint's files. Raises ValueError where they are not those that were written."""
    manifest = from_json(regular(path / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or not manifest.keys() >= _NEEDED or any("/" in name for name in manifest):
        raise ValueError(f"{MANIFEST} does not name the files of a checkpoint")
    own = manifest.pop(MANIFEST, None)  # earlier versions wrote none
    if own is not None and own != _own_digest(manifest):
        raise ValueError(f"{MANIFEST} does not have its own checksum")
    return manifest


def _own_digest(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> Snapshot:
    """Read and verify a checkpoint.

    Raises ValueError if it is missing or damaged; the sentence names the last good one beside it.
    """
    if not path.is_dir():
        raise ValueError(f"resume={path}: no checkpoint there; give the path of a checkpoint folder, or latest")
    if wrong := damage(path):
        good = next(
            (str(other) for other in reversed(available(path.parent)) if other != path and not damage(other)), ""
        )
        instead = f"resume={good} continues from the last good one" if good else "no other checkpoint is left"
        raise ValueError(f"checkpoint {path} is damaged ({wrong}); {instead}")
    numbers = json.loads((path / "run.json").read_text())
    files = sorted(file for file in _manifest(path) if re.fullmatch(r"rows-\d+\.json", file))
    if files:
        numbers["rows"] = [row for file in files for row in json.loads((path / file).read_text())] + numbers["rows"]
    return Snapshot(numbers, *(_mapped(path, name) for name in ("server", "clients")))


def _mapped(path: Path, name: str) -> dict[str, np.ndarray]:
    """All tensors of the files that `write` made of some arrays.

    Mapped, not read: caches and states may be larger than memory. What is written to stays out of the file.
    """
    files = [file for file in _manifest(path) if re.fullmatch(rf"{name}(-\d+)?\.safetensors", file)]
    return {key: tensor.numpy() for file in files for key, tensor in map_file(path / file).items()}
