"""Store the jobs of a run, with their virtual times, in the folder jobs.parquet.

The folder has Parquet files, whose columns are the fields of `JobRecord`. The rows are in the order
of the rounds in which the jobs ended.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raysim.primitives.files import open_draft
from raysim.simulation.events import JobRecord

JOBS = "jobs.parquet"
FATES = ("aggregated", "failed", "discarded", "lost", "in flight")
_FATE_CODES = {fate: code for code, fate in enumerate(FATES)}
_COSTS = ("energy_wh", "money", "co2_g")  # missing in the folders of older runs
_TYPE_CODES = {
    **dict.fromkeys(JobRecord._fields, "i"),
    **dict.fromkeys(("start", "finish", *_COSTS), "d"),
    "fate": "b",
}
_FILE_ROWS = 1 << 18  # about; a checkpoint rewrites only the newest file


@dataclass(frozen=True)
class Jobs:
    """The jobs of a run as arrays with one value for each job.

    The arrays are fields of `JobRecord`, which describes their values. But `fate` has positions in
    `FATES` in place of names.
    """

    client: np.ndarray
    version: np.ndarray
    start: np.ndarray
    finish: np.ndarray
    fate: np.ndarray
    round: np.ndarray
    staleness: np.ndarray

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, chosen: np.ndarray) -> Jobs:
        """Return the chosen jobs.

        chosen: a mask or positions.
        """
        return Jobs(**{name: values[chosen] for name, values in self.__dict__.items()})

    def has_fate(self, *fates: str) -> np.ndarray:
        """Return a mask of the jobs that ended in one of these ways.

        fates: names in `FATES`.
        """
        return np.isin(self.fate, [_FATE_CODES[fate] for fate in fates])

    fated = has_fate  # the name in version 0.1


def read_jobs(folder: Path) -> Jobs | None:
    """Read the jobs of a run's folder, or return None if there are none.

    Raises `ValueError` if a file is broken.
    """
    paths = _job_files(Path(folder))
    if not paths:
        return None
    ends = np.cumsum([0, *(_row_count(path) for path in paths)])
    names = Jobs.__dataclass_fields__
    columns = {name: np.empty(ends[-1], _TYPE_CODES[name]) for name in names}
    # Read one file at a time, because all tables together need much memory.
    for path, begin, end in zip(paths, ends[:-1], ends[1:], strict=True):
        table = _read_table(path)
        for name in names:
            columns[name][begin:end] = _column(table, name)
    return Jobs(**columns)


def _job_files(folder: Path) -> list[Path]:
    return sorted((folder / JOBS).glob("part-*.parquet"))


def _row_count(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path) from error


def _unreadable(path: Path) -> ValueError:
    return ValueError(
        f"{path} is not a readable table of jobs; restore the file or delete {path.parent}."
    )


def _read_table(path: Path) -> pa.Table:
    try:
        table = pq.read_table(pa.BufferReader(path.read_bytes()))
        for name in _COSTS:
            if name not in table.column_names:
                table = table.append_column(name, pa.array(np.zeros(len(table))))
        return table.select(list(_TYPE_CODES))
    except (pa.ArrowException, KeyError) as error:
        raise _unreadable(path) from error


def _column(table: pa.Table, name: str) -> np.ndarray:
    values = table[name]
    if name == "fate":
        values = pc.index_in(values.cast(pa.string()), value_set=pa.array(FATES))
    return np.asarray(values.to_numpy(), np.dtype(_TYPE_CODES[name]))


class JobWriter:
    """A writer of the jobs of a run into the Parquet files of the folder jobs.parquet.

    Once a file has at least `_FILE_ROWS` rows, the next file begins. Only the rows of the newest
    file are in memory.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._file_number = 0
        self._columns = _empty_columns()

    @classmethod
    def open(cls, folder: Path, rounds: int) -> JobWriter | None:
        """Return a writer for a new run, or for a run that continues after `rounds` rounds.

        Remove the stored jobs of later rounds. Return None if a continued run has no file of jobs.
        rounds: the number of rounds up to the run's checkpoint; 0 for a new run.
        """
        paths = _job_files(folder)
        writer = cls(folder / JOBS)
        if rounds and not paths:
            return None
        writer.folder.mkdir(exist_ok=True)
        for path in reversed(paths):
            table = _read_table(path)
            table = table.filter(pc.less_equal(table["round"], rounds))
            if len(table):
                writer._file_number = int(path.stem.removeprefix("part-"))
                writer._load(table)
                break
            path.unlink()
        return writer

    def _load(self, table: pa.Table) -> None:
        for name, values in self._columns.items():
            values.frombytes(_column(table, name).tobytes())

    def add(self, jobs: Iterable[JobRecord]) -> None:
        """Add the jobs of a round."""
        columns = dict(zip(JobRecord._fields, zip(*jobs, strict=True), strict=False))
        if not columns:
            return
        columns["fate"] = tuple(_FATE_CODES[fate] for fate in columns["fate"])
        for name, values in columns.items():
            self._columns[name].extend(values)
        if len(self._columns["client"]) >= _FILE_ROWS:
            self.write()

    def write(self) -> None:
        """Write all jobs that are in memory to the newest file, and replace its old content.

        Once the newest file has at least `_FILE_ROWS` jobs, the next jobs begin a new file.
        """
        arrays = {}
        for name, values in self._columns.items():
            arrays[name] = pa.array(np.array(values, values.typecode))
        arrays["fate"] = pa.DictionaryArray.from_arrays(arrays["fate"], pa.array(FATES))
        with open_draft(self.folder / f"part-{self._file_number:06d}.parquet") as file:
            pq.write_table(pa.table(arrays), file)
        if len(self._columns["client"]) >= _FILE_ROWS:
            self._file_number += 1
            self._columns = _empty_columns()


def _empty_columns() -> dict[str, array[Any]]:
    return {name: array(code) for name, code in _TYPE_CODES.items()}
