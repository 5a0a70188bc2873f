"""Store the samples and the scores of each client in tables in the run's folder.

- split.parquet: the number of training samples of each client and class (column `label`)
- clients.parquet: the numbers of training and test samples of each client, and its last scores.
  Some runs have the columns `unseen` (`evaluate.unseen`), `user` or `replica`.
- client_scores.parquet: a folder of Parquet files with a row for each round and scored client
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raysim.api.topology import Network
from raysim.data.federated import FederatedData
from raysim.data.partition import Ints
from raysim.primitives.files import open_draft, parse_json, regular_file
from raysim.simulation.events import ClientScores

SPLIT_FILE, CLIENTS_FILE = "split.parquet", "clients.parquet"
SCORES_FOLDER = "client_scores.parquet"
SCORES_FILE_ROWS = 1 << 18  # about; a checkpoint rewrites only the newest file
USER = "user"  # the column of the users' names


@dataclass(frozen=True, eq=False)
class ClientLabels:
    """The number of training samples of each client and class.

    client, label, samples: three arrays of the same length. Each position stands for a client and a
    class of which the client has samples: the client's number, the number of the class, and the
    number of these samples.
    clients: the number of all clients, including those without samples.
    classes: the names of the classes.
    """

    client: Ints
    label: Ints
    samples: Ints
    clients: int  # the number of clients, including those without samples
    classes: list[str]

    @property
    def sizes(self) -> Ints:
        """Return the number of training samples of each of N clients, [N]."""
        return np.bincount(self.client, self.samples, self.clients).astype(np.int64)


# --- the split ------------------------------------------------------------------------------------
def client_labels(data: FederatedData) -> ClientLabels:
    """Count the samples of each client and class."""
    groups, names = data.open().groups()
    train = data.partition.all_train
    pairs = train.owners * len(names) + groups[train.indices]
    occurring, samples = np.unique(pairs, return_counts=True)
    client, label = np.divmod(occurring, len(names))
    return ClientLabels(client, label, samples.astype(np.int64), len(train), list(names))


def write_split(split: ClientLabels, folder: Path) -> None:
    """Write split.parquet: the number of samples of each client and class."""
    metadata = json.dumps({"clients": split.clients, "classes": split.classes})
    table = pa.table({"client": split.client, "label": split.label, "samples": split.samples})
    _write_table(table.replace_schema_metadata({"raysim": metadata}), folder / SPLIT_FILE)


def read_split(folder: Path) -> ClientLabels | None:
    """Read split.parquet in a run's folder; return None if the folder has no such file.

    Raises `ValueError` if the file is broken.
    """
    path = folder / SPLIT_FILE
    table = _read_table(path, ("client", "label", "samples"))
    if table is None:
        return None
    try:
        metadata = parse_json((table.schema.metadata or {})[b"raysim"])
        clients = int(metadata["clients"])
        classes = [str(name) for name in metadata["classes"]]
        client, label, samples = (_integers(table, name) for name in ("client", "label", "samples"))
        is_valid = _is_within(client, clients) and _is_within(label, len(classes))
        if not is_valid or not (samples > 0).all():
            raise ValueError(
                f"every row must have a client from 0 to {clients - 1}, a label from 0 to "
                f"{len(classes) - 1} and at least one sample, but a row has other values"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path) from error
    return ClientLabels(client, label, samples, clients, classes)


def _is_within(values: Ints, end: int) -> bool:
    return not len(values) or bool(values.min() >= 0 and values.max() < end)


# --- the clients ----------------------------------------------------------------------------------
def write_clients(
    data: FederatedData, scores: ClientScores | None, folder: Path, network: Network | None = None
) -> None:
    """Write clients.parquet; a score is null if the client was not scored.

    scores: the last scores of the clients; None if there are none.
    network: the topology; None for a single model. With several replicas, the file has each
    client's replica. If clients may move, it is the replica that `scores` has for the client.
    """
    train, tests = data.partition.all_train.counts, data.partition.test.counts
    # a run with pooled data trains one client and scores all clients
    count = max(len(train), len(tests))
    columns: dict[str, Any] = {"client": np.arange(count)}
    if data.users is not None:
        columns[USER] = data.users
    columns["samples"] = np.pad(train, (0, count - len(train)))
    columns["tests"] = np.pad(tests, (0, count - len(tests)))
    if data.partition.unseen is not None:
        columns["unseen"] = np.isin(columns["client"], data.partition.unseen)
    if network is not None and network.replicas > 1 and not network.moves_clients:
        columns["replica"] = np.asarray(network.replica_of)
    if scores is not None:
        for name, values in scores.columns.items():
            column = np.full(count, np.nan)
            column[scores.clients] = values
            columns[name] = pa.array(column, from_pandas=True)
    _write_table(pa.table(columns), folder / CLIENTS_FILE)


def read_clients(folder: Path) -> dict[str, np.ndarray] | None:
    """Read the columns of clients.parquet that hold numbers; nan if a client was not scored.

    Returns None if the run stored no such file. Raises `ValueError` if the file is broken.
    """
    path = folder / CLIENTS_FILE
    table = _read_table(path, ("client", "samples", "tests"))
    if table is None:
        return None
    try:
        return {name: _floats(table[name]) for name in table.column_names if name != USER}
    except pa.ArrowException as error:
        raise _unreadable(path) from error


def read_users(folder: Path) -> list[str] | None:
    """Return the name of each client's user; None if the run stored no users.

    A user is the person whose data the client has, such as a writer in LEAF's data. Raise
    `ValueError` if the file is broken.
    """
    table = _read_table(folder / CLIENTS_FILE, ("client",))
    if table is None or USER not in table.column_names:
        return None
    return [str(name) for name in table[USER].to_pylist()]


# --- the scores of all rounds ---------------------------------------------------------------------
class ScoreWriter:
    """A writer of the clients' scores into the folder client_scores.parquet of a run.

    A file is full once it has `SCORES_FILE_ROWS` rows. Only the newest file's rows are in memory.

    folder: the run's folder.
    rounds: the number of finished rounds. Stored scores of later rounds are removed.
    """

    def __init__(self, folder: Path, rounds: int):
        self._folder = folder / SCORES_FOLDER
        self._file_number = 0
        self._tables: list[pa.Table] = []
        for path in reversed(_score_files(folder)):
            table = _read_scores(path)
            table = table.filter(pc.less_equal(table["round"], rounds))
            if len(table):
                self._file_number = int(path.stem.removeprefix("part-"))
                self._tables = [table]
                break
            path.unlink()

    def add(self, number: int, scores: ClientScores) -> None:
        """Add the scores of a round.

        number: the round.
        """
        columns: dict[str, Any] = {
            "round": np.full(len(scores.clients), number, np.int64),
            "client": scores.clients,
        }
        for name, values in scores.columns.items():
            columns[name] = pa.array(np.asarray(values, np.float64), from_pandas=True)
        self._tables.append(pa.table(columns))
        if self._row_count >= SCORES_FILE_ROWS:
            self.write()

    @property
    def _row_count(self) -> int:
        return sum(map(len, self._tables))

    def write(self) -> None:
        """Write all rows that are in memory to the newest file, and replace its old content.

        Once the newest file has at least `SCORES_FILE_ROWS` rows, the next rows begin a new file.
        Without rows in memory, nothing is written.
        """
        if not self._tables:
            return
        self._folder.mkdir(exist_ok=True)
        table = pa.concat_tables(self._tables, promote_options="default").combine_chunks()
        _write_table(table, self._folder / f"part-{self._file_number:06d}.parquet")
        self._tables = [table]
        if len(table) >= SCORES_FILE_ROWS:
            self._file_number += 1
            self._tables = []


def read_client_scores(folder: Path) -> pa.Table | None:
    """Read the scores of each client in each round, in the order of the rounds.

    Returns None if the run stored none. Raises `ValueError` if a file is broken.
    """
    tables = [_read_scores(path) for path in _score_files(folder)]
    return pa.concat_tables(tables, promote_options="default") if tables else None


def _score_files(folder: Path) -> list[Path]:
    return sorted((folder / SCORES_FOLDER).glob("part-*.parquet"))


def _read_scores(path: Path) -> pa.Table:
    table = _read_table(path, ("round", "client"))
    assert table is not None, "the file was listed"
    return table


# --- files ----------------------------------------------------------------------------------------
def _write_table(table: pa.Table, path: Path) -> None:
    with open_draft(path) as file:
        pq.write_table(table, file)


def _read_table(path: Path, names: tuple[str, ...]) -> pa.Table | None:
    """Return the table in a file, or None if the file does not exist.

    names: the columns that the table must have.
    """
    if not path.exists():
        return None
    try:
        table = pq.read_table(pa.BufferReader(regular_file(path).read_bytes()))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path) from error
    if not set(names) <= set(table.column_names):
        raise _unreadable(path)
    return table


def _integers(table: pa.Table, name: str) -> Ints:
    if not pa.types.is_integer(table.schema.field(name).type) or table[name].null_count:
        raise ValueError(
            f"the column {name!r} must contain only whole numbers, but its type is "
            f"{table.schema.field(name).type}, with {table[name].null_count} empty values"
        )
    return np.asarray(table[name].to_numpy(), np.int64)


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column as floats; True becomes 1 and False becomes 0."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return np.asarray(column.cast(pa.float64()).to_numpy())


def _unreadable(path: Path) -> ValueError:
    return ValueError(
        f"{path} cannot be read, or does not have the expected content; restore the file, or "
        "delete it to continue without it."
    )
