"""Test which arrays and columns of NumPy, PyTorch, pandas, SciPy and Arrow can be data."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy import sparse

from raysim.data.arrays import store_arrays
from raysim.data.dataset import Dataset
from raysim.data.raw import Raw, Source
from raysim.data.sources import Parquet
from raysim.data.values import plain_array

INTEGERS = [0, 1, 2, 0, 1, 2]
TEXTS = ["a", "b", "c", "a", "b", "c"]
TABLE = np.linspace(-1, 1, 24).reshape(6, 4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))


READ_AS_INTEGERS = {
    "list": INTEGERS,
    "range": range(6),
    "int8": np.array(INTEGERS, np.int8),
    "uint64": np.array(INTEGERS, np.uint64),
    "object": np.array(INTEGERS, object),
    "masked array without a mask": np.ma.array(INTEGERS),
    "tensor": torch.tensor(INTEGERS),
    "uint16 tensor": torch.tensor(INTEGERS).to(torch.uint16),
    "list of tensors": [torch.tensor(label) for label in INTEGERS],
    "series": pd.Series(INTEGERS),
    "Int64 series": pd.Series(INTEGERS, dtype="Int64"),
    "Arrow series": pd.Series(INTEGERS, dtype="int64[pyarrow]"),
    "sparse series": pd.Series(pd.arrays.SparseArray(INTEGERS)),
    "categories": pd.Series(INTEGERS).astype("category"),
    "index": pd.Index(INTEGERS),
    "Arrow array": pa.array(INTEGERS),
    "Arrow chunks": pa.chunked_array([INTEGERS[:3], INTEGERS[3:]]),
    "Arrow dictionary": pa.array(INTEGERS).dictionary_encode(),
}
READ_AS_FLOATS = {
    "half": np.array(INTEGERS, np.float16),
    "long double": np.array(INTEGERS, np.longdouble),
    "objects": np.array([0, 1.0, 2, 0, 1, 2], object),
    "decimals": [Decimal(label) for label in INTEGERS],
    "bfloat16": torch.tensor(INTEGERS).bfloat16(),
    "float8": torch.tensor(INTEGERS).to(torch.float8_e5m2),
    "with a gradient": torch.tensor(INTEGERS, dtype=torch.float32, requires_grad=True),
    "sparse tensor": torch.tensor(INTEGERS).float().to_sparse(),
    "Float64 series": pd.Series(INTEGERS, dtype="Float64"),
    "Arrow halves": pa.array(np.array(INTEGERS, np.float16)),
    "Arrow decimals": pa.array([Decimal(label) for label in INTEGERS]),
}
READ_AS_TEXT = {
    "list": TEXTS,
    "array": np.array(TEXTS),
    "bytes": np.array(TEXTS, "S"),
    "StringDType": np.array(TEXTS, np.dtypes.StringDType()),
    "object series": pd.Series(TEXTS, dtype=object),
    "string series": pd.Series(TEXTS, dtype="string"),
    "inferred series": pd.Series(TEXTS),
    "Arrow series": pd.Series(TEXTS, dtype=pd.ArrowDtype(pa.string())),
    "categories": pd.Series(TEXTS).astype("category"),
    "index": pd.Index(TEXTS),
    "Arrow": pa.array(TEXTS),
    "large Arrow": pa.array(TEXTS, pa.large_string()),
    "Arrow dictionary": pa.array(TEXTS).dictionary_encode(),
    "Arrow binary": pa.array([text.encode() for text in TEXTS]),
}


@pytest.mark.parametrize("name", READ_AS_INTEGERS)
def test_integers_of_many_column_types_are_read_as_integers(name: str) -> None:
    values = plain_array(READ_AS_INTEGERS[name], "labels")
    assert values.dtype.kind in "iu" and values.tolist() == (
        list(range(6)) if name == "range" else INTEGERS
    )


@pytest.mark.parametrize("name", READ_AS_FLOATS)
def test_floats_of_many_column_types_are_read_as_floats(name: str) -> None:
    values = plain_array(READ_AS_FLOATS[name], "labels")
    assert values.dtype.kind == "f" and values.tolist() == INTEGERS


@pytest.mark.parametrize("name", READ_AS_TEXT)
def test_text_values_of_many_column_types_are_read_as_labels_and_users(name: str) -> None:
    dataset = store_arrays((TABLE, READ_AS_TEXT[name], READ_AS_TEXT[name])).build()
    assert dataset.class_names == dataset.domain_names == ["a", "b", "c"]
    assert dataset.labels.tolist() == dataset.domains.tolist() == INTEGERS


MISSING = {
    "None": ["a", None, "b", "a", "b", "a"],
    "nan next to text": ["a", float("nan"), "b", "a", "b", "a"],
    "nan": np.array([0, np.nan, 1, 0, 1, 0]),
    "string series": pd.Series(["a", None, "b", "a", "b", "a"], dtype="string"),
    "object series": pd.Series(["a", None, "b", "a", "b", "a"], dtype=object),
    "Int64 series": pd.Series([0, None, 1, 0, 1, 0], dtype="Int64"),
    "categories": pd.Series(["a", None, "b", "a", "b", "a"]).astype("category"),
    "dates": pd.Series(pd.to_datetime(["2020-01-01", None] * 3)),
    "masked array": np.ma.array(INTEGERS, mask=[0, 1, 0, 0, 0, 0]),
    "StringDType": np.array(["a", None, "b", "a", "b", "a"], np.dtypes.StringDType(na_object=None)),
    "Arrow integers": pa.array([0, None, 1, 0, 1, 0]),
    "Arrow text": pa.array(["a", None, "b", "a", "b", "a"]),
    "Arrow nulls": pa.array([None] * 6),
}


@pytest.mark.parametrize("name", MISSING)
@pytest.mark.parametrize("place", [1, 2], ids=["labels", "users"])
def test_missing_values_are_rejected(name: str, place: int) -> None:
    parts: list[Any] = [TABLE, INTEGERS, INTEGERS]
    parts[place] = MISSING[name]
    with pytest.raises(ValueError, match=r"^data: "):
        store_arrays(tuple(parts))


UNREADABLE = {
    "complex": np.array(INTEGERS, complex),
    "dates": np.array(INTEGERS, "M8[s]"),
    "durations": np.array(INTEGERS, "m8[s]"),
    "records": np.zeros(6, [("a", int)]),
    "mixed": [1, "a", 2.0, 3, "b", 4],
    "bytes that are no text": np.array([b"\xe9"] * 6),
    "long integers": [2**70] * 6,
    "days": [date(2020, 1, 1)] * 6,
    "period series": pd.Series(pd.period_range("2020", periods=6)),
    "interval series": pd.Series(pd.interval_range(0, 6)),
    "date series": pd.Series(pd.date_range("2020", periods=6, tz="UTC")),
    "complex tensor": torch.tensor(INTEGERS) * 1j,
    "meta tensor": torch.zeros(6, device="meta"),
    "nested tensor": torch.nested.nested_tensor([torch.zeros(2)] * 6),
    "Arrow dates": pa.array([date(2020, 1, 1)] * 6),
    "Arrow structs": pa.array([{"a": 1}] * 6),
    "one number": 3,
    "one text": "abcdef",
    "nothing": None,
    "generator": (label for label in INTEGERS),
    "ragged floats": [[0.5, 1.5], [0.5], [0.5], [0.5], [0.5], [0.5]],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", UNREADABLE)
def test_values_that_cannot_become_numbers_or_text_are_rejected(name: str) -> None:
    for parts in (
        (TABLE, UNREADABLE[name]),
        (UNREADABLE[name], INTEGERS),
        (TABLE, INTEGERS, UNREADABLE[name]),
    ):
        with pytest.raises(ValueError, match=r"^data[: ]"):
            store_arrays(parts)


@pytest.mark.parametrize("users", [{"first": INTEGERS}, [{"a": 1}] * 6], ids=["one", "list"])
def test_data_with_dictionaries_in_place_of_user_ids_is_refused(users: object) -> None:
    with pytest.raises(ValueError, match=r"^data: "):
        store_arrays((TABLE, INTEGERS, users))


# ---- dictionaries of inputs ----------------------------------------------------------------------
class Items(torch.utils.data.Dataset):
    """A data set of PyTorch.

    items: the items of the data set, in their order.
    """

    def __init__(self, *items: object) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> object:
        return self.items[row]


def test_error_mentions_the_keys_of_dictionary_samples_without_a_label() -> None:
    items = Items(*[{"image": row, "age": row} for row in TABLE])
    with pytest.raises(ValueError, match=r"^data: .*image, age"):
        store_arrays(items)


class DictionarySource(Source):
    """A source whose inputs are a dictionary."""

    def read(self) -> Raw:
        inputs: Any = {"image": TABLE, "age": TABLE}
        return Raw(inputs, np.array(INTEGERS), 6, ["a", "b", "c"])


class TooFewLabels(Source):
    """A source that claims more training samples than it has."""

    def read(self) -> Raw:
        return Raw(TABLE, np.array(INTEGERS), len(INTEGERS) + 1, ["a", "b", "c"])


def test_source_with_more_training_rows_than_labels_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"TooFewLabels has train_rows=\d+, but only \d+ labels"):
        TooFewLabels().build()


def test_source_with_dictionary_of_inputs_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"DictionarySource .*image, age"):
        DictionarySource().build()


# ---- inputs --------------------------------------------------------------------------------------
def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


@pytest.mark.parametrize(
    "inputs",
    [
        TABLE.astype(object),
        TABLE.tolist(),
        pd.DataFrame(TABLE),
        pd.Series(list(TABLE)),
        torch.tensor(TABLE),
        torch.tensor(TABLE).to_sparse(),
        sparse.csr_matrix(TABLE),
        pa.table({str(number): TABLE[:, number] for number in range(4)}),
        pa.array(TABLE.tolist()),
    ],
    ids=[
        "object",
        "lists",
        "frame",
        "series",
        "tensor",
        "sparse tensor",
        "sparse matrix",
        "table",
        "Arrow lists",
    ],
)
def test_equal_inputs_of_any_python_type_are_stored_equally(inputs: object) -> None:
    dataset = store_arrays((inputs, INTEGERS)).build()
    assert dataset.inputs.dtype == np.float32
    assert np.array_equal(dataset.inputs, TABLE.astype(np.float32))


def test_data_frame_of_integers_is_read_as_numbers() -> None:
    dataset = store_arrays((frame(age=INTEGERS, score=[3, 2, 1, 3, 2, 1]), INTEGERS)).build()
    assert dataset.tokens is None and dataset.inputs[:, 1].tolist() == [3, 2, 1, 3, 2, 1]


def test_error_of_data_frame_with_text_mentions_the_column() -> None:
    with pytest.raises(ValueError, match="column city"):
        store_arrays((frame(age=INTEGERS, city=TEXTS), INTEGERS))


@pytest.mark.parametrize("make", [pd.DataFrame, pa.Table.from_pandas], ids=["pandas", "Arrow"])
@pytest.mark.parametrize("test_rows", [6, 3])
def test_pair_of_training_and_test_tables_is_refused(make: Any, test_rows: int) -> None:
    columns = frame(age=INTEGERS, score=[3, 2, 1, 3, 2, 1])
    tables = make(columns), make(columns[["score", "age"]][:test_rows])
    with pytest.raises(ValueError, match=r'data: .*\{"train": table, "test": table\}'):
        store_arrays(tables)


def test_frames_with_different_columns_are_read_as_inputs_and_labels() -> None:
    pair = frame(age=INTEGERS, score=[3, 2, 1, 3, 2, 1]), frame(label=INTEGERS)
    assert store_arrays(pair).build().labels.tolist() == INTEGERS


@pytest.mark.parametrize(
    "inputs", [np.full((6, 2), 1e300), np.full((6, 2), -1e39), [[1e300, 0.0]] * 6]
)
def test_inputs_too_large_for_float32_are_rejected(inputs: object) -> None:
    with pytest.raises(ValueError, match=r"inputs .* float32"):
        store_arrays((inputs, INTEGERS))


def test_largest_float32_value_is_accepted_as_input() -> None:
    largest = float(np.finfo(np.float32).max)
    assert store_arrays((np.full((6, 2), largest), INTEGERS)).build().inputs.max() == np.float32(
        largest
    )


def test_labels_too_large_for_float32_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"label 1e[+]300"):
        store_arrays((TABLE, np.linspace(0, 1e300, 6)))


# ---- Arrow's types in files ----------------------------------------------------------------------
def read_parquet(folder: Path, **columns: Any) -> Dataset:
    table = {"x": pa.array(np.arange(6.0)), "label": pa.array(INTEGERS)} | columns
    pq.write_table(pa.table(table), folder / "train.parquet")
    return Parquet(str(folder), test_fraction=0.0).build()


@pytest.mark.parametrize(
    "column",
    [
        pa.array(INTEGERS, pa.int8()),
        pa.array(INTEGERS, pa.uint64()),
        pa.array(np.array(INTEGERS, np.float16)),
        pa.array([float(label) for label in INTEGERS]),
        pa.array([Decimal(label) for label in INTEGERS]),
        pa.array([Decimal(label) for label in INTEGERS], pa.decimal256(50, 2)),
        pa.array(INTEGERS).dictionary_encode(),
        pa.FixedSizeListArray.from_arrays(pa.array(INTEGERS), 1),
    ],
    ids=lambda column: str(column.type)[:30],
)
def test_arrow_numbers_can_be_labels_and_inputs(column: pa.Array, tmp_path: Path) -> None:
    assert read_parquet(tmp_path, label=column).labels.tolist() == INTEGERS
    assert read_parquet(tmp_path, x=column).inputs.ravel().tolist() == INTEGERS


@pytest.mark.parametrize(
    "column",
    [
        pa.array(TEXTS),
        pa.array(TEXTS, pa.large_string()),
        pa.array(TEXTS, pa.string_view()),
        pa.array(TEXTS).dictionary_encode(),
    ],
    ids=lambda column: str(column.type)[:30],
)
def test_apache_arrow_strings_can_be_labels_and_names_of_users(
    column: pa.Array, tmp_path: Path
) -> None:
    dataset = read_parquet(tmp_path, label=column, user=column)
    assert dataset.class_names == dataset.domain_names == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["label", "x", "user"])
@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(6),
        pa.array([1, None] * 3),
        pa.array(["a", None] * 3),
        pa.array(["a", None] * 3).dictionary_encode(),
        pa.array([date(2020, 1, 1)] * 6),
        pa.array([b"a"] * 6, pa.binary(1)),
        pa.array([[("a", 1)]] * 6, pa.map_(pa.string(), pa.int64())),
        pa.array([[[1.0]]] * 6),
        pa.array([[1, None]] * 6),
        pa.array([[1, 2]] * 6, pa.list_view(pa.int64())),
    ],
    ids=lambda column: str(column.type)[:30],
)
def test_error_mentions_the_unreadable_arrow_column(
    column: pa.Array, name: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"column {name} "):
        read_parquet(tmp_path, **{name: column})


@pytest.mark.parametrize("name", ["x", "user"])
def test_arrow_struct_is_neither_input_nor_user(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"column {name} "):
        read_parquet(tmp_path, **{name: pa.array([{"a": 1}] * 6)})


@pytest.mark.parametrize(
    "column", [pa.array([1e300] * 6), pa.array([[1e300]] * 6)], ids=["numbers", "vectors"]
)
def test_parquet_values_beyond_float32_are_rejected(column: pa.Array, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"column x .*float32"):
        read_parquet(tmp_path, x=column)
