"""What each client of a run has and scores: two small tables in the run's folder.

split.parquet     a row per client and class that it has: client, label, training samples
clients.parquet   a row per client: its user's name if it has one, training samples, test samples, and the accuracies of
                  the last evaluation; `unseen` marks clients that are never trained (`evaluate.unseen`)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.data.federated import FederatedData
from raysim.data.partition import Ints
from raysim.primitives.files import open_draft, parse_json, regular_file
from raysim.simulation.events import ClientScores

SPLIT_FILE, CLIENTS_FILE = "split.parquet", "clients.parquet"
USER = "user"  # the column of the users' names


@dataclass(frozen=True, eq=False)
class ClientLabels:
    """Training samples by client and class; an entry for each pair that has some."""

    client: Ints
    label: Ints
    samples: Ints
    clients: int  # with those that have no sample
    classes: list[str]

    @property
    def sizes(self) -> Ints:
        """Training samples of each client, [N]."""
        return np.bincount(self.client, self.samples, self.clients).astype(np.int64)


# --- the split ------------------------------------------------------------------------------------------------------
def client_labels(data: FederatedData) -> ClientLabels:
    """Who has how much of what; its memory grows with the samples, not with clients x classes."""
    (groups, names), train = data.open().groups(), data.partition.all_train
    cells, samples = np.unique(
        train.owners * len(names) + groups[train.indices], return_counts=True
    )
    client, label = np.divmod(cells, len(names))
    return ClientLabels(client, label, samples.astype(np.int64), len(train), list(names))


def write_split(split: ClientLabels, folder: Path) -> None:
    """Write split.parquet."""
    content = json.dumps({"clients": split.clients, "classes": split.classes})
    columns = {"client": split.client, "label": split.label, "samples": split.samples}
    _write(pa.table(columns).replace_schema_metadata({"raysim": content}), folder / SPLIT_FILE)


def read_split(folder: Path) -> ClientLabels | None:
    """The split of a run's folder; None where it stored none. Raises ValueError where the file is broken."""
    if (table := _read(folder / SPLIT_FILE, ("client", "label", "samples"))) is None:
        return None
    try:
        content = parse_json((table.schema.metadata or {})[b"raysim"])
        clients, classes = int(content["clients"]), [str(name) for name in content["classes"]]
        client, label, samples = (_whole(table, name) for name in ("client", "label", "samples"))
        split = ClientLabels(client, label, samples, clients, classes)
        ends = [
            (split.client, clients),
            (split.label, len(classes)),
            (split.samples, np.iinfo(np.int64).max),
        ]
        if (
            any(len(v) and not (v.min() >= 0 and v.max() < end) for v, end in ends)
            or not split.samples.all()
        ):
            raise ValueError("it names clients or classes that it does not have")
    except (KeyError, TypeError, ValueError) as problem:
        raise _broken(folder / SPLIT_FILE) from problem
    return split


# --- the clients ----------------------------------------------------------------------------------------------------
def write_clients(data: FederatedData, scores: ClientScores | None, folder: Path) -> None:
    """Write clients.parquet; an accuracy is null where a client was not scored."""
    train, tests = data.partition.all_train.counts, data.partition.test.counts
    count = max(len(train), len(tests))  # a pooled run trains one client, and scores all
    columns: dict[str, Any] = {"client": np.arange(count)}
    if data.users is not None:
        columns[USER] = data.users
    for name, sizes in (("samples", train), ("tests", tests)):
        columns[name] = np.pad(sizes, (0, count - len(sizes)))
    if data.partition.unseen is not None:
        columns["unseen"] = np.isin(columns["client"], data.partition.unseen)
    for name, values in (scores.columns if scores else {}).items():
        each = np.full(count, np.nan)
        if scores is not None:
            each[scores.clients] = values
        columns[name] = pa.array(each, from_pandas=True)
    _write(pa.table(columns), folder / CLIENTS_FILE)


def read_clients(folder: Path) -> dict[str, np.ndarray] | None:
    """The columns of clients.parquet but the users' names, nan where a client was not scored.

    None where the run stored none. Raises ValueError where the file is broken.
    """
    if (table := _read(folder / CLIENTS_FILE, ("client", "samples", "tests"))) is None:
        return None
    try:
        names = [name for name in table.column_names if name != USER]
        return {name: _numbers(table[name]) for name in names}
    except pa.ArrowException as problem:
        raise _broken(folder / CLIENTS_FILE) from problem


def read_users(folder: Path) -> list[str] | None:
    """Return the users' names by client; None where the run stored none. Raise ValueError where the file is broken."""
    table = _read(folder / CLIENTS_FILE, ("client",))
    if table is None or USER not in table.column_names:
        return None
    return [str(name) for name in table[USER].to_pylist()]


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column as floats; True is 1."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return np.asarray(column.cast(pa.float64()).to_numpy())


# --- files ----------------------------------------------------------------------------------------------------------
def _write(table: pa.Table, path: Path) -> None:
    with open_draft(path) as file:
        pq.write_table(table, file)


def _read(path: Path, names: tuple[str, ...]) -> pa.Table | None:
    if not path.exists():
        return None
    try:
        table = pq.read_table(pa.BufferReader(regular_file(path).read_bytes()))
    except (pa.ArrowException, OSError) as problem:
        raise _broken(path) from problem
    if not set(names) <= set(table.column_names):
        raise _broken(path)
    return table


def _whole(table: pa.Table, name: str) -> Ints:
    if not pa.types.is_integer(table.schema.field(name).type) or table[name].null_count:
        raise ValueError(f"{name} is no column of whole numbers")
    return np.asarray(table[name].to_numpy(), np.int64)


def _broken(path: Path) -> ValueError:
    return ValueError(
        f"{path} cannot be read; restore the file, or delete it and the report goes without it."
    )
