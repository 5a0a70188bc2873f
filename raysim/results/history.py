"""What a run reports: its history, a row per aggregation, and the numbers that sum it up."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.primitives.checks import finite_values
from raysim.primitives.files import regular_file, replace_file, without_password
from raysim.primitives.kinds import LOWER_IS_BETTER

Row: TypeAlias = Mapping[str, int | float | None]
Values: TypeAlias = Sequence[int | float | None]

# The order of columns in a history; what methods add follows in the order of its first appearance.
COLUMNS = {
    "round": pa.int64(),
    "virtual_seconds": pa.float64(),
    "wall_seconds": pa.float64(),
    "floats_down": pa.int64(),
    "floats_up": pa.int64(),
    "train_loss": pa.float64(),
    "accuracy": pa.float64(),
    "accuracy_worst": pa.float64(),
    "accuracy_global": pa.float64(),
    "loss_global": pa.float64(),
    "clients": pa.int64(),
    "failures": pa.int64(),
}
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


def column(rows: Sequence[Row], key: str) -> list[int | float | None]:
    """One column of a history; None where a row lacks the key."""
    return [row.get(key) for row in rows]


def last_measured(rows: Sequence[Row], key: str) -> Row | None:
    """The last row that has a value of a column."""
    return next((row for row in reversed(rows) if row.get(key) is not None), None)


def _array(values: Values, kind: pa.DataType | None) -> pa.Array:
    """int64 where the column is declared so, or where a new column holds nothing but integers; else float64."""
    if kind is None:
        whole = all(isinstance(value, (int, np.integer)) for value in values if value is not None)
        kind = pa.int64() if whole and any(value is not None for value in values) else pa.float64()
    cast = int if kind == pa.int64() else float
    return pa.array([None if value is None else cast(value) for value in values], kind)


def write_history(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as Parquet, atomically; a missing value is null, nan stays nan."""
    usual = [name.replace("accuracy", metric_of(rows)) for name in COLUMNS]
    names = dict.fromkeys([*usual, *(key for row in rows for key in row)])
    table = pa.table({name: _array(column(rows, name), COLUMNS.get(name)) for name in names})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    replace_file(Path(path), sink.getvalue().to_pybytes())


def read_history(path: Path) -> list[dict[str, int | float | None]]:
    """Rows in order, with every column in every row.

    Raises `ValueError` where the file is no Parquet file, has no column `round`, or holds anything but numbers.
    """
    try:
        table = pq.read_table(pa.BufferReader(regular_file(Path(path)).read_bytes()))
    except (pa.ArrowException, OSError) as problem:
        raise ValueError(
            f"{path} is no readable history; restore the file or run the study again."
        ) from problem
    if "round" not in table.column_names:
        raise ValueError(
            f"{path} has no column 'round', so it is no history; name the folder of a raysim run."
        )
    for column in table.schema:
        if not any(
            check(column.type)
            for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
        ):
            raise ValueError(
                f"{path} has {column.type} in the column {column.name!r}, so it is no history."
            )
    if not pa.types.is_integer(table.schema.field("round").type) or table["round"].null_count:
        raise ValueError(f"{path} has rows without a round, so it is no history; restore the file.")
    rows: list[dict[str, int | float | None]] = table.to_pylist()
    return rows


def metric_of(rows: Sequence[Row]) -> str:
    """What the models of a history are scored with: "accuracy", "mae", ..."""
    found = (key for row in rows for key in row if f"{key}_worst" in row and f"{key}_global" in row)
    return next(found, "accuracy")


def best_mean(values: Values, k: int = 5, higher: bool = True) -> float | None:
    """Mean of the k best values (of all, where there are fewer); None where there are none."""
    best = sorted(finite_values(values), reverse=higher)[:k]
    return float(np.mean(best)) if best else None


def last_mean_std(values: Values, k: int = 10) -> tuple[float | None, float | None]:
    """Mean and standard deviation (divisor k) of the last k known values; over rounds, not over seeds."""
    last = finite_values(values)[-k:]
    return (float(np.mean(last)), float(np.std(last))) if last else (None, None)


def threshold_name(threshold: float) -> str:
    """At least two decimals: 0.8 is "0.80", 0.925 is "0.925"."""
    return f"{threshold:.2f}" if round(threshold, 2) == threshold else f"{threshold:g}"


def rounds_to(
    values: Values, thresholds: Sequence[float], higher: bool = True
) -> dict[str, int | None]:
    """First round (1-based) whose value is as good as each threshold, by `threshold_name`; None where none is."""

    def reached(value: float | None, threshold: float) -> bool:
        return value is not None and (value >= threshold if higher else value <= threshold)

    return {
        threshold_name(threshold): next(
            (index for index, value in enumerate(values, 1) if reached(value, threshold)), None
        )
        for threshold in thresholds
    }


def _scores(
    values: Values, thresholds: Sequence[float], higher: bool, suffix: str = ""
) -> dict[str, object]:
    mean, deviation = last_mean_std(values)
    return {
        f"best5_mean{suffix}": best_mean(values, higher=higher),
        f"last10_mean{suffix}": mean,
        f"last10_std{suffix}": deviation,
        f"rounds_to{suffix}": rounds_to(values, thresholds, higher),
    }


def summarise(
    rows: Sequence[Row], thresholds: Sequence[float] = THRESHOLDS, **more: object
) -> dict[str, object]:
    """What `summary.json` holds: last known value of every column, scores of the metric, and `more` as it is.

    Scores are those of `accuracy`, or of `accuracy_global` where no client has a test of its own; where both exist
    the second come again with the suffix `_global`; likewise of another metric. `failures` and `worker_deaths` are the
    last round's, `failures_total` and `worker_deaths_total` the run's.
    """
    metric = metric_of(rows)
    usual = [name.replace("accuracy", metric) for name in COLUMNS]
    names = dict.fromkeys([*usual, *(key for row in rows for key in row)])
    columns = {name: column(rows, name) for name in names}
    final = {name: (last_measured(rows, name) or {}).get(name) for name in names}
    local, central, higher = (
        columns[metric],
        columns[f"{metric}_global"],
        metric not in LOWER_IS_BETTER,
    )
    summary: dict[str, object] = {"rounds": final.pop("round") or 0, **final}
    for name in ("failures", "worker_deaths"):
        if name in columns:
            summary[f"{name}_total"] = sum(int(value) for value in finite_values(columns[name]))
    summary.update(_scores(local if finite_values(local) else central, thresholds, higher))
    if finite_values(local) and finite_values(central):
        summary.update(_scores(central, thresholds, higher, "_global"))
    return {**summary, "metric": metric, **more}


def _plain(value: object) -> object:
    """What JSON can say: NumPy scalars as numbers, paths as text, nan and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return (
        value
        if value is None or isinstance(value, (bool, int, float))
        else without_password(str(value))
    )


_FLAT = re.compile(
    r"\[\n *([^][{}]*?)\n *\]"
)  # a list of numbers or words; in a string a newline has two characters


def write_json(obj: object, path: Path) -> None:
    """Write indented JSON atomically, without passwords; nan and infinities become null, what JSON cannot say text.

    A list of numbers or words is one line: a column of a hundred rounds would be a hundred.
    """
    text = json.dumps(_plain(obj), indent=2, allow_nan=False)
    text = _FLAT.sub(lambda found: "[" + re.sub(r",\n *", ", ", found[1]) + "]", text)
    replace_file(Path(path), f"{text}\n".encode())
