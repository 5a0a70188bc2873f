"""Store a run's history, a row per aggregation, and compute the numbers of its summary."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
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

# The order of columns in a history; all other columns follow in the order of their first row.
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
# What "final" means: the first of these columns of the metric that a run has.
FINAL_SUFFIXES = ("", "_global")
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


# --- reading and writing --------------------------------------------------------------------------
def column(rows: Sequence[Row], key: str) -> list[int | float | None]:
    """Return one column of a history; None for rows without the key."""
    return [row.get(key) for row in rows]


def last_measured(rows: Sequence[Row], key: str) -> Row | None:
    """Return the last row that has a value in a column; None if there is none."""
    for row in reversed(rows):
        if row.get(key) is not None:
            return row
    return None


def write_history(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as Parquet; the file appears complete or not at all.

    A missing value becomes null; nan stays nan.
    """
    columns = {}
    for name in _column_names(rows):
        columns[name] = _array(column(rows, name), COLUMNS.get(name))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    replace_file(Path(path), sink.getvalue().to_pybytes())


def _column_names(rows: Sequence[Row]) -> list[str]:
    metric = metric_of(rows)
    names = [name.replace("accuracy", metric) for name in COLUMNS]
    return list(dict.fromkeys([*names, *(key for row in rows for key in row)]))


def _array(values: Values, kind: pa.DataType | None) -> pa.Array:
    """Return values as an Arrow array.

    kind: the type of the values; None takes int64 if all values are integers, else float64.
    """
    if kind is None:
        measured = [value for value in values if value is not None]
        is_whole = all(isinstance(value, (int, np.integer)) for value in measured)
        kind = pa.int64() if is_whole and measured else pa.float64()
    cast = int if kind == pa.int64() else float
    return pa.array([None if value is None else cast(value) for value in values], kind)


def read_history(path: Path) -> list[dict[str, int | float | None]]:
    """Return the rows in order; every row has every column.

    Raises `ValueError` if the file is no Parquet file, has a row without a whole number in the
    column `round`, or holds anything but numbers.
    """
    try:
        table = pq.read_table(pa.BufferReader(regular_file(Path(path)).read_bytes()))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a readable history; restore the file or start the run again."
        ) from error
    if "round" not in table.column_names:
        raise ValueError(
            f"{path} has no column 'round', so it is not a history; give the folder of a run."
        )
    for schema_field in table.schema:
        kind = schema_field.type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not is_number and not pa.types.is_null(kind):
            raise ValueError(
                f"{path} is not a history, because its column {schema_field.name!r} has the type "
                f"{kind} instead of numbers; give the folder of a run."
            )
    if not pa.types.is_integer(table.schema.field("round").type) or table["round"].null_count:
        raise ValueError(
            f"{path} has rows without a whole number in the column 'round', so it is not a "
            "history; restore the file or start the run again."
        )
    rows: list[dict[str, int | float | None]] = table.to_pylist()
    return rows


def last_round(path: Path) -> int:
    """Return the last round of a stored history; 0 if it has no rounds or cannot be read."""
    try:
        rounds = pq.read_table(path, columns=["round"])["round"]
    except (pa.ArrowException, OSError, KeyError):
        return 0
    return int(rounds[-1].as_py()) if len(rounds) else 0


# --- summary --------------------------------------------------------------------------------------
def lower_metrics(config: Mapping[str, object]) -> frozenset[str]:
    """Return the metrics for which a lower score is better.

    config: the configuration of a run. Its key `evaluate.lower` lists metrics that the user has
    defined and for which a lower score is better.
    """
    evaluate = config.get("evaluate")
    names = evaluate.get("lower") if isinstance(evaluate, Mapping) else None
    return LOWER_IS_BETTER.union(names if isinstance(names, list) else ())


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of a history's metrics; the main metric comes first."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            if f"{key}_worst" in row and f"{key}_global" in row:
                names[key] = None
    return list(names)


def metric_of(rows: Sequence[Row]) -> str:
    """Return the name of a history's main metric: "accuracy", "mae", ..."""
    for row in rows:
        for key in row:
            if f"{key}_worst" in row and f"{key}_global" in row:
                return key
    return "accuracy"


def best_mean(values: Values, k: int = 5, higher: bool = True) -> float | None:
    """Return the mean of the k best values, or of all values if there are fewer.

    Return None if there are no values.
    higher: True if a higher value is better.
    """
    best = sorted(finite_values(values), reverse=higher)[:k]
    return float(np.mean(best)) if best else None


def last_mean_std(values: Values, k: int = 10) -> tuple[float | None, float | None]:
    """Return the mean and the population standard deviation of a run's last k finite values.

    If there are fewer values, use all of them. Without values, return (None, None).
    """
    last = finite_values(values)[-k:]
    return (float(np.mean(last)), float(np.std(last))) if last else (None, None)


def threshold_name(threshold: float) -> str:
    """Return a threshold with at least two decimals: 0.8 is "0.80", 0.925 is "0.925"."""
    return f"{threshold:.2f}" if round(threshold, 2) == threshold else f"{threshold:g}"


def rounds_to(
    values: Values, thresholds: Sequence[float], higher: bool = True
) -> dict[str, int | None]:
    """Return, for each threshold, the first round whose value reaches it; None if no round does.

    The keys are thresholds as text with at least two decimals, "0.80". Rounds are counted from 1.
    values: the scores of the rounds; None for a round that was not scored.
    higher: False if lower values are better; a value then must be at most the threshold.
    """

    def first_round(threshold: float) -> int | None:
        for number, value in enumerate(values, 1):
            if value is None:
                continue
            if value >= threshold if higher else value <= threshold:
                return number
        return None

    return {threshold_name(threshold): first_round(threshold) for threshold in thresholds}


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
    rows: Sequence[Row],
    thresholds: Sequence[float] = THRESHOLDS,
    lower: Collection[str] = LOWER_IS_BETTER,
    **facts: object,
) -> dict[str, object]:
    """Return the content of `summary.json`.

    It has the last value of each column, `facts`, and scores over several rounds such as
    "best5_mean". These scores are computed for the main metric on the clients' test sets. A second
    set of scores, with the suffix `_global`, is for the central test set. If only the central test
    set has scores, its scores have no suffix.

    thresholds: target scores; `rounds_to` has the first round that reached each of them.
    lower: the metrics for which a lower score is better.
    facts: entries of the summary that do not come from the history.
    """
    metric = metric_of(rows)
    higher = metric not in lower
    names = _column_names(rows)
    columns = {name: column(rows, name) for name in names}
    last_values = {name: (last_measured(rows, name) or {}).get(name) for name in names}
    client_scores, central_scores = columns[metric], columns[f"{metric}_global"]
    has_client_scores = bool(finite_values(client_scores))

    summary: dict[str, object] = {"rounds": last_values.pop("round") or 0, **last_values}
    for name in ("failures", "worker_deaths"):
        if name in columns:
            summary[f"{name}_total"] = sum(int(value) for value in finite_values(columns[name]))
    busy = mean_worker_busy(rows)
    if busy is not None:
        summary["worker_busy_mean"] = busy
    scored = client_scores if has_client_scores else central_scores
    summary.update(_scores(scored, thresholds, higher))
    if has_client_scores and finite_values(central_scores):
        summary.update(_scores(central_scores, thresholds, higher, "_global"))
    return {**summary, "metric": metric, **facts}


def mean_worker_busy(rows: Sequence[Row]) -> float | None:
    """Return the share of wall time in which workers worked, over all rounds; None if unknown."""
    worked, before = 0.0, 0.0
    for row in rows:
        share, wall = row.get("worker_busy"), row.get("wall_seconds")
        if share is None or wall is None:
            return None
        worked += share * max(0.0, wall - before)
        before = wall
    return worked / before if before > 0 else None


def score(summary: Mapping[str, object], metric: str) -> float | None:
    """Return a number of a finished run's summary, or None if it has no such number.

    metric: a key of the summary; or "final" for the last score of the main metric. This score is on
    the clients' test sets, or else on the central test set.
    """
    if metric == "final":
        usual = summary.get("metric", "accuracy")
        candidates = [score(summary, f"{usual}{suffix}") for suffix in FINAL_SUFFIXES]
        return next(iter(finite_values(candidates)), None)
    value = summary.get(metric)
    if value is None and "." in metric:
        group, _, name = metric.partition(".")
        values = summary.get(group)
        value = values.get(name) if isinstance(values, Mapping) else None
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


# --- JSON -----------------------------------------------------------------------------------------
def _as_json(value: object) -> object:
    """Convert a value for JSON: NumPy numbers to numbers, paths to text, nan to null."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, np.generic):
        return _as_json(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return without_password(str(value))


# A list of numbers or words. A newline inside a string is two characters, so it never matches.
_FLAT_LIST = re.compile(r"\[\n *([^][{}]*?)\n *\]")


def write_json(obj: object, path: Path) -> None:
    """Write indented JSON, without passwords; nan and infinities become null.

    The file appears complete or not at all. A list of numbers or words is written on one line,
    because 100 rounds would otherwise take 100 lines.
    """

    def one_line(match: re.Match[str]) -> str:
        return "[" + re.sub(r",\n *", ", ", match[1]) + "]"

    text = json.dumps(_as_json(obj), indent=2, allow_nan=False)
    replace_file(path, f"{_FLAT_LIST.sub(one_line, text)}\n".encode())
