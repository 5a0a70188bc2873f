"""jobs.parquet: every job of a run on virtual time, a row each; a folder of Parquet files that are read as one table.

Columns are the fields of `JobRecord`, in the order in which rounds ended them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raysim.primitives.files import open_draft
from raysim.simulation.events import JobRecord

JOBS = "jobs.parquet"
FATES = ("aggregated", "failed", "discarded", "lost", "in flight")
_CODES = {fate: code for code, fate in enumerate(FATES)}
_KINDS = dict.fromkeys(JobRecord._fields, "i") | {"start": "d", "finish": "d", "fate": "b"}
_PART = 1 << 18  # rows of a file, about; a checkpoint writes the last file anew, and no other one


@dataclass(frozen=True)
class Jobs:
    """The jobs of a run, a value for each; see `JobRecord`. fate: positions in `FATES`."""

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
        """Some of them: a mask or positions."""
        return Jobs(**{name: values[chosen] for name, values in self.__dict__.items()})

    def fated(self, *fates: str) -> np.ndarray:
        """Which of them ended so: bool for each."""
        return np.isin(self.fate, [_CODES[fate] for fate in fates])


def read_jobs(folder: Path) -> Jobs | None:
    """The jobs of a run's folder; None where it has none. Raises ValueError where a file is broken."""
    paths = _parts(Path(folder))
    if not paths:
        return None
    ends = np.cumsum([0, *(_rows(path) for path in paths)])
    names = Jobs.__dataclass_fields__
    found = {
        name: np.empty(ends[-1], _KINDS[name]) for name in names
    }  # one file at a time, for there may be many
    for path, begin, end in zip(paths, ends[:-1], ends[1:], strict=True):
        table = _read(path)
        for name in names:
            found[name][begin:end] = _column(table, name)
    return Jobs(**found)


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / JOBS).glob("part-*.parquet"))


def _rows(path: Path) -> int:
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as problem:
        raise _unreadable(path) from problem


def _unreadable(path: Path) -> ValueError:
    return ValueError(
        f"{path} is no readable table of jobs; restore the file or delete {path.parent}."
    )


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(pa.BufferReader(path.read_bytes())).select(list(_KINDS))
    except (pa.ArrowException, KeyError) as problem:
        raise _unreadable(path) from problem


def _column(table: pa.Table, name: str) -> np.ndarray:
    values = table[name]
    if name == "fate":
        values = pc.index_in(values.cast(pa.string()), value_set=pa.array(FATES))
    return np.asarray(values.to_numpy(), np.dtype(_KINDS[name]))


class JobWriter:
    """Adds to jobs.parquet; in memory it has the rows of the last file alone."""

    def __init__(self, folder: Path):
        self.folder, self._number = folder, 0
        self._columns = {name: array(kind) for name, kind in _KINDS.items()}

    @classmethod
    def of(cls, folder: Path, rounds: int) -> JobWriter | None:
        """For a run that has made so many rounds, whose jobs stay; None where it made them without this file."""
        paths, writer = _parts(folder), cls(folder / JOBS)
        if rounds and not paths:
            return None
        writer.folder.mkdir(exist_ok=True)
        for path in reversed(paths):
            table = _read(path)
            table = table.filter(pc.less_equal(table["round"], rounds))
            if len(table):
                writer._number = int(path.stem.removeprefix("part-"))
                writer._take(table)
                break
            path.unlink()
        return writer

    def add(self, jobs: Iterable[JobRecord]) -> None:
        """Of a round."""
        columns = dict(zip(JobRecord._fields, zip(*jobs, strict=True), strict=False))
        if not columns:
            return
        columns["fate"] = tuple(_CODES[fate] for fate in columns["fate"])
        for name, values in columns.items():
            self._columns[name].extend(values)
        if len(self._columns["client"]) >= _PART:
            self.write()

    def write(self) -> None:
        """Write the last file; a full one is never touched again."""
        arrays = {
            name: pa.array(np.array(own, own.typecode)) for name, own in self._columns.items()
        }
        arrays["fate"] = pa.DictionaryArray.from_arrays(arrays["fate"], pa.array(FATES))
        with open_draft(self.folder / f"part-{self._number:06d}.parquet") as file:
            pq.write_table(pa.table(arrays), file)
        if len(self._columns["client"]) >= _PART:
            self._number += 1
            self._columns = {name: array(kind) for name, kind in _KINDS.items()}

    def _take(self, table: pa.Table) -> None:
        """Go on in a file that has these rows."""
        for name, own in self._columns.items():
            own.frombytes(_column(table, name).tobytes())
