"""Store tables of pandas, polars, Arrow and Hugging Face in the cache as Parquet files."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.data.dataset import cache_folder
from raysim.data.parquet import Parquet
from raysim.primitives.extras import is_instance_of
from raysim.primitives.files import replace_file, wait_for_folder

TEST_FRACTION = 0.2  # of the rows of a single table are for testing, as with data=csv


def is_table(data: object) -> bool:
    """Return True for a table with named columns, or for {"train": table, "test": table}.

    The entry "test" may be missing.
    """
    if isinstance(data, Mapping) and {"train"} <= data.keys() <= {"train", "test"}:
        return all(_is_one_table(part) for part in data.values())
    return _is_one_table(data)


def have_same_columns(first: object, second: object) -> bool:
    """Return True if two objects are tables that have columns of the same names, in any order."""
    if not (_is_one_table(first) and _is_one_table(second)):
        return False
    return _column_names(first) == _column_names(second)


def store_table(data: object, settings: Mapping[str, Any] | None = None) -> Parquet:
    """Store a table as Parquet files in the cache of this machine; return the `Parquet` source.

    data: a table, or {"train": table, "test": table}, where "test" may be missing.
    settings: settings of `Parquet`, such as {"label": "target"}; None uses the defaults. Without
    the table "test", the default of `test_fraction` is 0.2.
    Raise ValueError for a table that Parquet cannot store.
    """
    tables = data if isinstance(data, Mapping) else {"train": data}
    files = {
        name: _as_parquet(table, f"data: the table for {name}") for name, table in tables.items()
    }
    digest = hashlib.blake2b(digest_size=8)
    for name, content in files.items():
        digest.update(name.encode() + content)
    folder = cache_folder(None) / f"table-{digest.hexdigest()}"
    for name, content in files.items():
        path = folder / f"{name}.parquet"
        if not path.exists():
            with wait_for_folder(folder, "data.cache"):
                replace_file(path, content)
    usual = {} if "test" in files else {"test_fraction": TEST_FRACTION}
    return Parquet(root=str(folder), **{**usual, **_without_none(settings or {})})


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _package(table: object) -> str:
    return type(table).__module__.partition(".")[0]


def _is_one_table(table: object) -> bool:
    if isinstance(table, pa.Table) or is_instance_of(table, "pandas", "DataFrame"):
        return True
    name = type(table).__name__
    return (_package(table), name) in (("polars", "DataFrame"), ("datasets", "Dataset"))


def _column_names(table: Any) -> set[object]:
    if isinstance(table, pa.Table) or _package(table) == "datasets":
        return set(table.column_names)
    return set(table.columns)


def _as_parquet(table: Any, place: str) -> bytes:
    """Return a table as the content of a Parquet file.

    place: the name of the table in errors.
    """
    buffer = io.BytesIO()
    try:
        if _package(table) == "datasets":
            _write_dataset(table, buffer)
            return buffer.getvalue()
        if is_instance_of(table, "pandas", "DataFrame"):
            table = pa.Table.from_pandas(table, preserve_index=False)
        elif _package(table) == "polars":
            table = table.to_arrow()
        pq.write_table(table, buffer)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ValueError(
            f"{place} cannot be stored as Parquet ({error}). Convert its columns to numbers, text, "
            "or lists of numbers or text."
        ) from error
    return buffer.getvalue()


def _write_dataset(dataset: Any, buffer: io.BytesIO) -> None:
    """Write a data set of Hugging Face's `datasets` as Parquet, without a progress bar.

    buffer: the memory that receives the content of the Parquet file.
    """
    import datasets

    was_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        dataset.to_parquet(buffer)
    finally:
        if not was_disabled:
            datasets.enable_progress_bars()
