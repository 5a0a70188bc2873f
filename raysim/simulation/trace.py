"""Devices as they were recorded: a Parquet file with one row for each client.

| column       | type              | what it says                                                                  |
| ------------ | ----------------- | ----------------------------------------------------------------------------- |
| `client`     | integer or string | who it is; everybody once                                                     |
| `start`      | list of numbers   | when the client comes, in seconds from the start of its trace, ascending      |
| `end`        | list of numbers   | when it goes: as many, each after its start and not after the next start      |
| `period`     | number            | how long the trace is, in seconds; no end is after it                         |
| `speed`      | number            | samples a second in training; or, instead:                                    |
| `flops`      | number            | floating-point operations a second in training, whatever the model is         |
| `down`, `up` | number            | bytes a second                                                                |

Between its intervals, and without any, a client is absent. Other columns are left alone. The file is read in pieces,
and what is kept are arrays: 28 bytes a client, 40 a row and 16 an interval. `raysim fleet check FILE` checks one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raysim.primitives.checks import above
from raysim.primitives.errors import first_line
from raysim.primitives.files import open_draft, user_path
from raysim.primitives.streams import stream, stream_key
from raysim.simulation.availability import Intervals
from raysim.simulation.fleet import Devices, Fate, Fixed, Fleet, Speeds

LISTS = ("start", "end")
NUMBERS = ("period", "down", "up")
RATES = ("speed", "flops")  # a file has one of them
HELP = "the head of raysim/simulation/trace.py describes the file"
_ROWS = 1 << 16  # read at once
_BUFFER = 1 << 18  # bytes of each column that are read at once: a row group may be the whole file


class Recorded(NamedTuple):
    """What a trace says, row by row; bounds and first as in `Intervals`."""

    bounds: np.ndarray
    first: np.ndarray
    period: np.ndarray
    down: np.ndarray
    up: np.ndarray
    rate: np.ndarray  # of what the column `by` holds
    by: str  # "speed" or "flops"


@dataclass(frozen=True, kw_only=True)
class Trace(Fleet):
    """Clients do what those of a trace did.

    With as many clients as rows, client k is row k (the first is 0). With fewer, each is a row of its own, drawn once;
    with more, every row is used equally often, or once more. wrap: after its period a client's trace begins again; if
    not, the client stays away. availability: "trace", or as in any other fleet, with nothing but speed from the file.
    """

    AVAILABILITIES: ClassVar[tuple[str, ...]] = ("trace", *Fleet.AVAILABILITIES)

    file: str | None = None
    wrap: bool = True
    availability: str = "trace"

    def devices(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Devices:
        """See `Fleet`. Raises ValueError with one sentence for whatever the file has wrong."""
        if self.file is None:
            raise ValueError("fleet.file=null names no trace: set it to a Parquet file")
        trace = read(str(user_path(self.file)))
        speed = trace.rate
        if trace.by == "flops":
            speed = speed / above(
                "fleet=trace: FLOPs of the model", sample_flops(), 0, "give the file a column speed"
            )
        speeds, rows = Speeds(speed, trace.down, trace.up), rows_of(seed, clients, len(speed))
        if clients != len(speed):
            speeds = Speeds(*(each[rows] for each in (speed, trace.down, trace.up)))
        presence = self.presence(seed, clients)
        if self.availability == "trace":
            presence = Intervals(trace.bounds, trace.first, trace.period, rows, self.wrap)
        return Fixed(speeds, Fate(presence, self.dropout, stream_key(seed, "fleet.dropout")))


def rows_of(seed: int, clients: int, rows: int) -> np.ndarray:
    """int64 [clients]: the row that each client is."""
    if clients == rows:
        return np.arange(clients)
    generator = stream(seed, "fleet.trace")
    return np.concatenate([generator.permutation(rows) for _ in range(math.ceil(clients / rows))])[
        :clients
    ]


# --- reading ----------------------------------------------------------------------------------------------------------
def read(file: str) -> Recorded:
    """A trace, all of it checked. Raises ValueError that names file, client and row."""
    if not Path(file).is_file() and Path(file).exists():
        raise ValueError(
            f"{file} is no regular file: {HELP}"
        )  # a pipe would be waited for, deaf to Ctrl-C
    try:
        with pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as parquet:
            by = _columns(file, parquet.schema_arrow)
            names, rows, bounds = [], 0, array("d")
            # Arrays of their own: of one, a part that is kept would keep all.
            columns = counts, period, down, up, rate = [
                np.empty(parquet.metadata.num_rows) for _ in range(5)
            ]
            for batch in _batches(parquet, ["client", *LISTS, *NUMBERS, by]):
                more, *numbers = _part(file, batch, by, rows)
                bounds.frombytes(more.tobytes())
                for column, part in zip(columns, numbers, strict=True):
                    column[rows : rows + len(batch)] = part
                names.append(batch.column("client"))
                rows += len(batch)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{file} cannot be read as a Parquet file ({first_line(error)}): {HELP}"
        ) from error
    if not rows:
        raise ValueError(f"{file} has no rows: a trace has one for each client")
    _refuse_twice(file, pa.chunked_array(names))
    del names
    pa.default_memory_pool().release_unused()  # some 100 MB of a trace of a million clients
    first = np.zeros(rows + 1, np.int64)
    first[1:] = np.cumsum(counts)
    return Recorded(
        np.frombuffer(bounds) if bounds else np.empty(0), first, period, down, up, rate, by
    )


def _batches(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Some rows at a time; a reader keeps what it has read of all its row groups, so each has one of its own."""
    for group in range(parquet.num_row_groups):
        yield from parquet.iter_batches(
            _ROWS, row_groups=[group], columns=columns, use_threads=False
        )


def summarise_trace(file: str) -> str:
    """How much a trace holds, in a sentence. Raises ValueError as `read` does."""
    trace = read(file)
    there = (trace.bounds[1::2] - trace.bounds[::2]).sum() / trace.period.sum()
    return (
        f"{file}: {len(trace.rate):,} clients in {len(trace.bounds) // 2:,} intervals, {there:.0%} of the time there, "
        f"{trace.period.max():,.0f} s long, median {trace.by} {np.median(trace.rate):,.4g}"
    )


def _columns(file: str, schema: pa.Schema) -> str:
    """Which of the two rates the file has, if it has all columns in their types."""
    rates = [name for name in RATES if name in schema.names]
    if len(rates) != 1:
        raise ValueError(
            f"{file} has {' and '.join(rates) or 'neither speed nor flops'}: a trace has one of the two"
        )
    wanted: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
        "client": (_names_somebody, "integers or strings"),
        **dict.fromkeys(LISTS, (_numbers, "a list of numbers in each row")),
        **dict.fromkeys((*NUMBERS, *rates), (_number, "numbers")),
    }
    for name, (fits, words) in wanted.items():
        if schema.names.count(name) != 1:
            raise ValueError(f"{file} has no column {name} (or two): it holds {words}; {HELP}")
        if not fits(kind := schema.field(name).type):
            raise ValueError(f"{file}: column {name} is of type {kind}, but holds {words}; {HELP}")
    return rates[0]


def _number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _numbers(kind: pa.DataType) -> bool:
    return bool(
        (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _number(kind.value_type)
    )


def _names_somebody(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    )


def _part(file: str, batch: pa.RecordBatch, by: str, before: int) -> tuple[np.ndarray, ...]:
    """Bounds, bounds of each row, and the numbers of each row. before: rows of the file that came earlier."""
    for name in ("client", *LISTS):
        if batch.column(name).null_count:
            row = int(
                np.flatnonzero(batch.column(name).is_null().to_numpy(zero_copy_only=False))[0]
            )
            raise ValueError(f"{_place(file, batch, row, before)}: {name} is missing")
    numbers = [_floats(batch.column(name)) for name in (*NUMBERS, by)]
    lengths = [np.asarray(pc.list_value_length(batch.column(name)), np.int64) for name in LISTS]
    start, end = (_floats(batch.column(name).flatten()) for name in LISTS)
    wrong = ~np.all([np.isfinite(each) & (each > 0) for each in numbers], axis=0) | (
        lengths[0] != lengths[1]
    )
    if not wrong.any():
        row_of = np.repeat(np.arange(len(batch)), lengths[0])
        fits = (
            (start >= 0) & (end > start) & (end <= numbers[0][row_of])
        )  # false for nan, as infinite ends are too
        same = row_of[1:] == row_of[:-1]
        fits[1:] &= ~same | (start[1:] >= end[:-1])
        wrong[row_of[~fits]] = True
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        values = {name: batch.column(name)[row].as_py() for name in (*LISTS, *NUMBERS, by)}
        raise ValueError(f"{_place(file, batch, row, before)}: {describe_error(values)}")
    bounds, kept = _joined(start, end, same)
    return bounds, np.bincount(np.repeat(row_of, 2)[kept], minlength=len(batch)), *numbers


def _joined(start: np.ndarray, end: np.ndarray, same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends in turn, without those at which one interval of a client passes into the next."""
    bounds = np.stack([start, end], axis=1).ravel()
    kept = np.ones(len(bounds), bool)
    touching = np.flatnonzero(same & (start[1:] == end[:-1]))
    kept[2 * touching + 1] = kept[2 * touching + 2] = False
    return bounds[kept], kept


def _floats(values: pa.Array) -> np.ndarray:
    """float64; nan for what is missing."""
    return np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False))


def _place(file: str, batch: pa.RecordBatch, row: int, before: int) -> str:
    return f"{file}: client {batch.column('client')[row].as_py()} (row {before + row})"


def _refuse_twice(file: str, clients: pa.ChunkedArray) -> None:
    if pa.types.is_integer(clients.type):  # a tenth of the memory that counting them takes
        ordered = np.sort(clients.to_numpy())
        twice = bool((ordered[1:] == ordered[:-1]).any())
    else:
        twice = pc.count_distinct(clients).as_py() < len(clients)
    if twice:
        again = next(each for each in pc.value_counts(clients).to_pylist() if each["counts"] > 1)[
            "values"
        ]
        rows = np.flatnonzero(pc.equal(clients, again))[:2]
        raise ValueError(
            f"{file}: client {again} is in rows {rows[0]} and {rows[1]}: a trace has one row for each client"
        )


def describe_error(row: Mapping[str, Any]) -> str:
    """What is wrong with a row, in words; "" if nothing is."""
    for name in [each for each in (*NUMBERS, *RATES) if each in row]:
        if (value := row[name]) is None or not math.isfinite(value) or value <= 0:
            return f"{name} is {value}, and must be a finite number above 0"
    start, end = row["start"], row["end"]
    if len(start) != len(end):
        return f"{len(start)} starts and {len(end)} ends, of which each interval has one"
    before = 0.0, 0.0
    for index, interval in enumerate(zip(start, end, strict=True), start=1):
        if wrong := _describe_interval_error(interval, before, row["period"]):
            return f"interval {index}, from {interval[0]} to {interval[1]}, {wrong}"
        before = interval
    return ""


def _describe_interval_error(
    interval: Sequence[float], before: Sequence[float], period: float
) -> str:
    if any(value is None or not math.isfinite(value) for value in interval):
        return "has a time that is no finite number"
    start, end = interval
    if start < 0 or end < 0:
        return "has a negative time"
    if end <= start:
        return "does not end after its start"
    if end > period:
        return f"ends after the period of {period} s"
    if start < before[0]:
        return f"is unsorted: the one before it starts at {before[0]}"
    return f"overlaps the one before it, which ends at {before[1]}" if start < before[1] else ""


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a trace of rows that have all columns; `describe_error` must find nothing in them."""
    by = next(name for name in RATES if name in rows[0])
    kinds = {name: pa.list_(pa.float64()) for name in LISTS} | {
        name: pa.float64() for name in (*NUMBERS, by)
    }
    table = pa.Table.from_pylist(list(rows), pa.schema({"client": pa.int64(), **kinds}))
    with open_draft(file) as target:
        pq.write_table(table, target, row_group_size=_ROWS)
