"""Checkpoints as earlier versions of raysim wrote them: without a log, all private states in each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors.numpy import save_file

from raysim.simulation.checkpoint import Snapshot


def write(folder: Path, version: int, snapshot: Snapshot, signed: bool = True, rows: int = 4096) -> Path:
    """A complete one below `folder`. signed: whether its manifest has a checksum of its own. rows: in a file."""
    path = folder / f"round-{version:06d}"
    path.mkdir(parents=True)
    all_rows = snapshot.numbers.get("rows", [])
    for number in range(len(all_rows) // rows):
        (path / f"rows-{number:06d}.json").write_text(json.dumps(all_rows[number * rows : (number + 1) * rows]))
    numbers = {**snapshot.numbers, "rows": all_rows[len(all_rows) // rows * rows :]}
    (path / "run.json").write_text(json.dumps({**numbers, "accepted": list(snapshot.jobs.items())}))
    clients = {f"{c}/{name}": array for c, state in snapshot.clients.items() for name, array in state.items()}
    save_file(dict(snapshot.server), path / "server.safetensors")
    first = len(clients) // 2
    save_file(dict(list(clients.items())[:first]), path / "clients.safetensors")
    if clients:
        save_file(dict(list(clients.items())[first:]), path / "clients-1.safetensors")
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}
    own = hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({**digests, **({"manifest.json": own} if signed else {})}))
    return path
