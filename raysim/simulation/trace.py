"""Recorded devices: a Parquet file with one row for each client.

| column       | type              | content                                                       |
| ------------ | ----------------- | ------------------------------------------------------------- |
| `client`     | integer or string | the number or name of the client, different in each row       |
| `start`      | list of numbers   | when the client becomes available, in seconds from the start  |
|              |                   | of its trace, ascending                                       |
| `end`        | list of numbers   | when it stops being available, one for each start: larger     |
|              |                   | than this start, and at most the next start                   |
| `period`     | number            | the length of the trace in seconds, at least the last end     |
| `speed`      | number            | samples that the device trains on in a second                 |
| `flops`      | number            | floating-point operations in a second of training             |
| `down`, `up` | number            | bytes that the device receives and sends in a second          |

A file has either `speed`, which fits one model only, or `flops`. Other columns are ignored.
`raysim fleet check FILE` checks a file. A trace occupies at most 28 bytes of memory for each client
of the run, 40 for each row and 16 for each interval.
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
HELP = "Give a Parquet file with the columns that raysim/simulation/trace.py lists at its start."
_ROWS = 1 << 16  # read at once
# Bytes of a column that are read at once; a row group may be the whole file.
_BUFFER_BYTES = 1 << 18


class RecordedDevices(NamedTuple):
    """The rows of a trace as arrays; each row is a recorded device.

    bounds: float64, the start and end in seconds of each available interval, row after row.
    first: int64 [rows + 1], the position in `bounds` at which each row begins. The last entry is
    the length of `bounds`.
    period, down, up, rate: float64 [rows]. `rate` is the column `rate_name`: "speed" or "flops".
    """

    bounds: np.ndarray
    first: np.ndarray
    period: np.ndarray
    down: np.ndarray
    up: np.ndarray
    rate: np.ndarray
    rate_name: str


@dataclass(frozen=True, kw_only=True)
class Trace(Fleet):
    """A fleet whose clients behave like the devices that a trace file has recorded.

    Each client follows one row of the trace. With as many clients as rows, client i follows row i.
    With fewer clients, each client follows a different row, drawn at random. With more clients, the
    numbers of clients of two rows differ by at most one.
    wrap: what happens after the period of a row. True repeats the row. False makes the row's
    clients unavailable until the end of the run.
    availability: with "trace", a client is available in the intervals of its row. With "always",
    "diurnal" and "markov", only speed and bandwidth come from the file.
    """

    AVAILABILITIES: ClassVar[tuple[str, ...]] = ("trace", *Fleet.AVAILABILITIES)

    file: str | None = None
    wrap: bool = True
    availability: str = "trace"

    def devices(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Devices:
        """Return the devices of the clients, which follow the rows of the trace.

        sample_flops: returns the operations of the forward and backward pass of one sample, for a
        trace with the column "flops".
        Raises ValueError without a valid file, or if the operations cannot be counted.
        """
        if self.file is None:
            raise ValueError("fleet.file=null names no trace. Set it to a Parquet file.")
        trace = read(str(user_path(self.file)))
        samples, down, up = trace.rate, trace.down, trace.up
        if trace.rate_name == "flops":
            samples = samples / above(
                "fleet=trace: FLOPs of the model", sample_flops(), 0, "give the file a column speed"
            )
        rows = rows_of(seed, clients, len(samples))
        if clients != len(samples):
            samples, down, up = samples[rows], down[rows], up[rows]
        presence = self.presence(seed, clients)
        if self.availability == "trace":
            presence = Intervals(trace.bounds, trace.first, trace.period, rows, self.wrap)
        fate = Fate(presence, self.dropout, stream_key(seed, "fleet.dropout"))
        return Fixed(Speeds(samples, down, up), fate)


def rows_of(seed: int, clients: int, rows: int) -> np.ndarray:
    """Return the row of the trace that each client follows, int64 [clients].

    rows: the number of rows of the trace.
    """
    if clients == rows:
        return np.arange(clients)
    generator = stream(seed, "fleet.trace")
    orders = [generator.permutation(rows) for _ in range(math.ceil(clients / rows))]
    return np.concatenate(orders)[:clients]


# --- reading --------------------------------------------------------------------------------------
def read(file: str) -> RecordedDevices:
    """Read and check a trace.

    Raises ValueError if the trace is not valid. The error names the file and, for a wrong row, also
    its client and row.
    """
    # Opening a pipe would block, and Ctrl-C would not end it.
    if not Path(file).is_file() and Path(file).exists():
        raise ValueError(f"{file} is not a regular file. {HELP}")
    try:
        with pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet:
            rate_name = _check_columns(file, parquet.schema_arrow)
            names, rows, bounds = [], 0, array("d")
            # Separate arrays: a view of a common one would keep all of it in memory.
            columns = [np.empty(parquet.metadata.num_rows) for _ in range(5)]
            for batch in _batches(parquet, ["client", *LISTS, *NUMBERS, rate_name]):
                batch_bounds, *numbers = _read_batch(file, batch, rate_name, rows)
                bounds.frombytes(batch_bounds.tobytes())
                for column, values in zip(columns, numbers, strict=True):
                    column[rows : rows + len(batch)] = values
                names.append(batch.column("client"))
                rows += len(batch)
    except (OSError, pa.ArrowInvalid) as error:
        reason = first_line(error)
        raise ValueError(f"{file} cannot be read as a Parquet file ({reason}). {HELP}") from error
    if not rows:
        raise ValueError(f"{file} has no rows. Write a row for each client.")
    _check_clients_differ(file, pa.chunked_array(names))
    del names
    pa.default_memory_pool().release_unused()  # some 100 MB of a trace of a million clients
    counts, period, down, up, rate = columns
    first = np.zeros(rows + 1, np.int64)
    first[1:] = np.cumsum(counts)
    all_bounds = np.frombuffer(bounds) if bounds else np.empty(0)
    return RecordedDevices(all_bounds, first, period, down, up, rate, rate_name)


def _batches(parquet: pq.ParquetFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file in batches, with only these columns."""
    # One reader for all row groups would keep all of them in memory.
    for group in range(parquet.num_row_groups):
        yield from parquet.iter_batches(
            _ROWS, row_groups=[group], columns=columns, use_threads=False
        )


def summarise_trace(file: str) -> str:
    """Return a sentence about the content of a trace.

    Raises ValueError if the trace is not valid. The error names the file and, for a wrong row, also
    its client and row.
    """
    trace = read(file)
    available_s = (trace.bounds[1::2] - trace.bounds[::2]).sum()
    share = available_s / trace.period.sum()
    return (
        f"{file}: {len(trace.rate):,} clients in {len(trace.bounds) // 2:,} intervals, available "
        f"for {share:.0%} of the time, {trace.period.max():,.0f} s long, median {trace.rate_name} "
        f"{np.median(trace.rate):,.4g}"
    )


def _check_columns(file: str, schema: pa.Schema) -> str:
    """Check the columns of a trace; return the name of the rate column, "speed" or "flops".

    Raises ValueError if a column is missing or has the wrong type.
    """
    rates = [name for name in RATES if name in schema.names]
    if len(rates) != 1:
        found = "both columns speed and flops" if rates else "neither speed nor flops as a column"
        raise ValueError(
            f"{file} has {found}, but a trace needs exactly one of these two columns. {HELP}"
        )
    expected: dict[str, tuple[Callable[[pa.DataType], bool], str]] = {
        "client": (_is_name, "integers or strings"),
        **dict.fromkeys(LISTS, (_is_list, "a list of numbers in each row")),
        **dict.fromkeys((*NUMBERS, *rates), (_is_number, "numbers")),
    }
    for name, (fits, content) in expected.items():
        count = schema.names.count(name)
        if count != 1:
            raise ValueError(
                f"{file} has {count} columns called {name}, but needs one with {content}. {HELP}"
            )
        kind = schema.field(name).type
        if not fits(kind):
            raise ValueError(
                f"{file}: column {name} has the type {kind}, but must contain {content}. {HELP}"
            )
    return rates[0]


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and _is_number(kind.value_type))


def _is_name(kind: pa.DataType) -> bool:
    is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(pa.types.is_integer(kind) or is_string)


def _read_batch(
    file: str, batch: pa.RecordBatch, rate_name: str, earlier_rows: int
) -> tuple[np.ndarray, ...]:
    """Check some rows of a trace, and return their content as arrays.

    The first array has the bounds of all intervals, row after row. The second array has the number
    of bounds of each row. Then there is an array for each column in `NUMBERS`, and one for the
    column `rate_name`. Intervals that touch each other are joined.

    earlier_rows: the rows of the file before this batch, for errors.
    Raises ValueError if a row has an error.
    """
    for name in ("client", *LISTS):
        if batch.column(name).null_count:
            is_null = batch.column(name).is_null().to_numpy(zero_copy_only=False)
            row = int(np.flatnonzero(is_null)[0])
            raise ValueError(
                f"{_row_name(file, batch, row, earlier_rows)}: {name} is missing. Give each row a "
                "value in this column."
            )
    numbers = [_floats(batch.column(name)) for name in (*NUMBERS, rate_name)]
    period = numbers[0]
    starts_of_row, ends_of_row = (
        np.asarray(pc.list_value_length(batch.column(name)), np.int64) for name in LISTS
    )
    start, end = (_floats(batch.column(name).flatten()) for name in LISTS)
    is_positive = np.all([np.isfinite(values) & (values > 0) for values in numbers], axis=0)
    is_wrong = ~is_positive | (starts_of_row != ends_of_row)
    if not is_wrong.any():
        row_of = np.repeat(np.arange(len(batch)), starts_of_row)
        # False for nan and for infinite ends as well.
        fits = (start >= 0) & (end > start) & (end <= period[row_of])
        is_same_row = row_of[1:] == row_of[:-1]
        fits[1:] &= ~is_same_row | (start[1:] >= end[:-1])
        is_wrong[row_of[~fits]] = True
    if is_wrong.any():
        row = int(np.flatnonzero(is_wrong)[0])
        values = {name: batch.column(name)[row].as_py() for name in (*LISTS, *NUMBERS, rate_name)}
        raise ValueError(
            f"{_row_name(file, batch, row, earlier_rows)}: {describe_error(values)}. Correct this "
            "row, or remove it."
        )
    bounds, is_kept = _join_intervals(start, end, is_same_row)
    counts = np.bincount(np.repeat(row_of, 2)[is_kept], minlength=len(batch))
    return bounds, counts, *numbers


def _join_intervals(
    start: np.ndarray, end: np.ndarray, is_same_row: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Join intervals that touch each other and are in the same row of the trace.

    Return the bounds of the joined intervals, [start, end, start, end, ...], and a bool mask of the
    old bounds, True if the bound remains.
    is_same_row: for each interval except the first, True if the previous one is in the same row.
    """
    bounds = np.stack([start, end], axis=1).ravel()
    is_kept = np.ones(len(bounds), bool)
    touching = np.flatnonzero(is_same_row & (start[1:] == end[:-1]))
    is_kept[2 * touching + 1] = is_kept[2 * touching + 2] = False
    return bounds[is_kept], is_kept


def _floats(values: pa.Array) -> np.ndarray:
    """Return a column as float64; nan for missing values."""
    return np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False))


def _row_name(file: str, batch: pa.RecordBatch, row: int, earlier_rows: int) -> str:
    return f"{file}: client {batch.column('client')[row].as_py()} (row {earlier_rows + row})"


def _check_clients_differ(file: str, clients: pa.ChunkedArray) -> None:
    if pa.types.is_integer(clients.type):  # needs a tenth of the memory of counting them
        ordered = np.sort(clients.to_numpy())
        has_duplicate = bool((ordered[1:] == ordered[:-1]).any())
    else:
        has_duplicate = pc.count_distinct(clients).as_py() < len(clients)
    if not has_duplicate:
        return
    counts = pc.value_counts(clients).to_pylist()
    client = next(entry["values"] for entry in counts if entry["counts"] > 1)
    rows = np.flatnonzero(pc.equal(clients, client))[:2]
    raise ValueError(
        f"{file}: client {client} is in rows {rows[0]} and {rows[1]}, but a trace has one row for "
        "each client. Remove one of them."
    )


def describe_error(row: Mapping[str, Any]) -> str:
    """Describe the first error in a row of a trace; return "" if there is none."""
    for name in (*NUMBERS, *RATES):
        if name not in row:
            continue
        value = row[name]
        if value is None or not math.isfinite(value) or value <= 0:
            return f"{name} is {value}, but must be a finite number above 0"
    start, end = row["start"], row["end"]
    if len(start) != len(end):
        return f"{len(start)} starts and {len(end)} ends, but each interval needs both"
    previous = 0.0, 0.0
    for index, interval in enumerate(zip(start, end, strict=True), start=1):
        error = _describe_interval_error(interval, previous, row["period"])
        if error:
            return f"interval {index}, from {interval[0]} to {interval[1]}, {error}"
        previous = interval
    return ""


def _describe_interval_error(
    interval: Sequence[float], previous: Sequence[float], period: float
) -> str:
    if any(value is None or not math.isfinite(value) for value in interval):
        return "has a time that is not a finite number"
    start, end = interval
    if start < 0 or end < 0:
        return "has a negative time"
    if end <= start:
        return "does not end after its start"
    if end > period:
        return f"ends after the period of {period} s"
    if start < previous[0]:
        return f"is not sorted: the previous interval starts at {previous[0]}"
    if start < previous[1]:
        return f"overlaps the previous interval, which ends at {previous[1]}"
    return ""


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a trace; each row must have all columns.

    The caller must check the rows with `describe_error`.
    """
    rate_name = next(name for name in RATES if name in rows[0])
    columns = [("client", pa.int64())]
    columns += [(name, pa.list_(pa.float64())) for name in LISTS]
    columns += [(name, pa.float64()) for name in (*NUMBERS, rate_name)]
    table = pa.Table.from_pylist(list(rows), pa.schema(columns))
    with open_draft(file) as target:
        pq.write_table(table, target, row_group_size=_ROWS)
