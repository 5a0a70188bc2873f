"""Read the record and the backlog of a run, the files whose content is sent to MLflow.

The record (`tracking.json`) names the MLflow run of the folder. It has the configuration, the tags
and, at the end, the summary. The backlog (`tracking_backlog.jsonl`) has the history's unsent rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TypeAlias

from raysim.primitives.files import parse_json, regular_file
from raysim.results.history import Row

EXPERIMENT = "raysim"  # the default name of the experiment
RECORD = "tracking.json"  # which MLflow run belongs to the folder, and its values besides rows
BACKLOG = "tracking_backlog.jsonl"  # rows that were not sent yet
MODEL = "mlflow_model"  # folder of a model that was not sent yet
HISTORY = "history.parquet"
UI = "ui"  # in a record: `raysim ui` sends the run; otherwise the run's own process does
Record: TypeAlias = dict[str, object]
# keys that a record has once its run has ended
END_KEYS = ("summary", "artifacts", "status", "model")
PENDING = "pending"  # value of `model` if the model was not sent yet


def has_ended(record: Record) -> bool:
    """Return True if a run's process has written the end of the run into the record."""
    return record.get("summary") is not None


def read_record(folder: Path) -> Record:
    """Return the content of `tracking.json`; {} if it cannot be read."""
    try:
        return dict(as_mapping(parse_json(regular_file(folder / RECORD).read_bytes())))
    except (OSError, ValueError):
        return {}


def read_backlog(folder: Path) -> list[Row]:
    """Return the history rows of a run that were not yet sent to MLflow.

    The rows are the lines of `tracking_backlog.jsonl`. Lines that cannot be read are skipped.
    Return [] if the file cannot be read.
    """
    try:
        lines = regular_file(folder / BACKLOG).read_bytes().splitlines()
    except (OSError, ValueError):
        return []
    rows: list[Row] = []
    for line in lines:
        try:
            rows.append(numbers_in(as_mapping(parse_json(line))))
        except (ValueError, OverflowError):
            continue
    return [row for row in rows if math.isfinite(row.get("round", math.nan) or 0)]


def merge(first: Sequence[Row], second: Sequence[Row]) -> list[Row]:
    """Return the rows of both lists, in the order of the rounds.

    If both have a row of the same round, the row of the second list is used.
    """
    rows = {round_of(row): row for row in [*first, *second]}
    return [rows[index] for index in sorted(rows)]


def flatten(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested mappings: {"a": {"b": 1}} becomes {"a.b": 1}.

    An empty mapping stays as the value of its key.
    prefix: the beginning of all keys.
    """
    flat: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def numbers_in(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are numbers, as floats."""
    return {key: float(value) for key, value in values.items() if isinstance(value, Real)}


def round_of(row: Row) -> int:
    """Return the value of the column `round` in a row; 0 if the value is None."""
    return int(row["round"] or 0)


def as_mapping(value: object) -> dict[str, object]:
    """Return a JSON value as a dict with text keys, or {} if the value is no mapping.

    value: a value that was read from a JSON file.
    """
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def as_names(value: object) -> list[str]:
    """Return the items of a list as texts, and [] for a value that is no list.

    value: a value that was read from a JSON file.
    """
    return [str(item) for item in value] if isinstance(value, list) else []
