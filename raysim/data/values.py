"""Plain NumPy arrays of columns in any type of NumPy, PyTorch, pandas, SciPy or Arrow, and how numbers are stored."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from numpy.typing import NDArray
from scipy import sparse

NUMPY_FLOATS = (
    torch.float16,
    torch.float32,
    torch.float64,
)  # of PyTorch's types of floats, those that NumPy has
LARGEST = float(np.finfo(np.float32).max)


def plain_array(column: Any, what: str) -> NDArray[Any]:
    """Return a column as an array of booleans, integers, floats or text, or of a type that its reader refuses.

    Columns of a table stand side by side. what: the column's place in messages, as in "data: the labels for train".
    Raise ValueError for missing values, for rows of unequal shapes, and for values that mix types.
    """
    if isinstance(column, torch.Tensor):
        return _read_tensor(column, what)
    if isinstance(column, (pa.Array, pa.ChunkedArray, pa.Table, pa.RecordBatch)):
        column = column.to_pandas(types_mapper=pd.ArrowDtype)
    if isinstance(column, pd.DataFrame):
        return _read_frame(column, what)
    if isinstance(column, (pd.Series, pd.Index, pd.api.extensions.ExtensionArray)):
        return _read_series(pd.Series(column), what)
    if sparse.issparse(column):
        return np.asarray(column.toarray())
    if isinstance(column, np.ma.MaskedArray) and np.ma.is_masked(column):
        _refuse_missing(np.ma.getmaskarray(column), what)
    if isinstance(column, (list, tuple)):
        return _read_list(column, what)
    return _read_array(np.asarray(column), what)


def as_float32(values: NDArray[Any], what: str) -> NDArray[np.float32]:
    """Return numbers as float32. Raise ValueError for those that are not finite, or beyond its range."""
    if not np.isfinite(values).all():
        raise ValueError(f"{what} are nan or infinite: replace or remove them.")
    with np.errstate(over="ignore"):
        floats: NDArray[np.float32] = values.astype(np.float32)
    if not np.isfinite(floats).all():
        largest = np.format_float_scientific(np.abs(values).max(), 2, trim="-")
        raise ValueError(
            f"{what} are as large as {largest}, and raysim stores float32, which ends at {LARGEST:.3g}: scale them "
            "down, or remove these rows."
        )
    return floats


def type_name(values: NDArray[Any]) -> str:
    """Return the type of an array's values in a user's words."""
    return "text" if values.dtype.kind == "U" else str(values.dtype)


def refuse_nan(values: NDArray[Any], what: str) -> None:
    """Raise ValueError if floats have a missing value."""
    if values.dtype.kind == "f" and np.isnan(values).any():
        _refuse_missing(np.isnan(values), what)


def _refuse_missing(missing: NDArray[np.bool_], what: str) -> None:
    rows = np.flatnonzero(missing.reshape(len(missing), -1).any(axis=1))
    raise ValueError(
        f"{what} have a missing value in row {rows[0]} ({len(rows)} of {len(missing)} rows have one): remove or fill "
        "these rows."
    )


# ---- PyTorch -------------------------------------------------------------------------------------------------------
def _read_tensor(tensor: torch.Tensor, what: str) -> NDArray[Any]:
    if tensor.is_meta or tensor.is_nested:
        form = (
            "on the device meta, which holds no values"
            if tensor.is_meta
            else "nested, of rows of unequal shapes"
        )
        raise ValueError(f"{what} are a tensor {form}: give one of values, all rows of one shape.")
    try:
        tensor = tensor.detach().cpu()
        tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
        if tensor.is_floating_point() and tensor.dtype not in NUMPY_FLOATS:
            tensor = tensor.float()
        values: NDArray[Any] = tensor.resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{what} are a tensor of {tensor.dtype}, which NumPy has not: convert it."
        ) from error
    return values


# ---- pandas --------------------------------------------------------------------------------------------------------
def _read_frame(frame: pd.DataFrame, what: str) -> NDArray[Any]:
    columns = [
        _read_series(frame.iloc[:, number], f"{what}, column {name}")
        for number, name in enumerate(frame)
    ]
    odd = [
        name for name, values in zip(frame, columns, strict=True) if values.dtype.kind not in "biuf"
    ]
    if odd and len(columns) > 1:
        raise ValueError(
            f"{what}: column {odd[0]} holds no numbers, and only numbers can stand side by side: leave it out, or "
            "encode it as numbers."
        )
    return np.stack(columns, axis=1) if columns else np.empty((len(frame), 0))


def _read_series(series: pd.Series, what: str) -> NDArray[Any]:
    if series.isna().any():
        _refuse_missing(series.isna().to_numpy(), what)
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(series.cat.categories.dtype)
    if isinstance(series.dtype, np.dtype):
        return _read_array(series.to_numpy(), what)
    is_sparse = isinstance(series.dtype, pd.SparseDtype)
    number_type = series.dtype.subtype if is_sparse else getattr(series.dtype, "numpy_dtype", None)
    if isinstance(number_type, np.dtype) and number_type.kind in "biuf":
        return np.asarray(series.to_numpy(dtype=number_type))
    return _read_array(series.to_numpy(dtype=object), what)


# ---- lists and arrays ----------------------------------------------------------------------------------------------
def _read_list(rows: Sequence[Any], what: str) -> NDArray[Any]:
    if any(isinstance(row, torch.Tensor) for row in rows):
        rows = [_read_tensor(row, what) if isinstance(row, torch.Tensor) else row for row in rows]
    try:
        values = np.asarray(rows)
        if values.dtype.kind in "USO":  # NumPy writes numbers, None and nan next to text as text
            values = np.array(rows, dtype=object)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{what} are not all of one shape: fill short ones up, or cut long ones."
        ) from error
    return _read_array(values, what)


def _read_array(values: NDArray[Any], what: str) -> NDArray[Any]:
    if not values.ndim:
        raise ValueError(
            f"{what} are one {type(values.item()).__name__}: give an array with a row for each sample."
        )
    if values.dtype.kind == "S":
        return _decode(values.ravel().tolist(), what).reshape(values.shape)
    if values.dtype.kind not in "OT":
        return values
    items = values.ravel().tolist()
    missing = np.array([_is_missing(item) for item in items], np.bool_)
    if missing.any():
        _refuse_missing(missing.reshape(values.shape), what)
    if (
        values.ndim == 1
        and items
        and all(isinstance(item, (list, tuple, np.ndarray, torch.Tensor)) for item in items)
    ):
        if len({np.shape(item) for item in items}) > 1:
            raise ValueError(
                f"{what} are not all of one shape: fill short ones up, or cut long ones."
            )
        return _read_list(
            [item if isinstance(item, torch.Tensor) else np.asarray(item) for item in items], what
        )
    return _read_items(items, what).reshape(values.shape)


def _read_items(items: list[Any], what: str) -> NDArray[Any]:
    """Return Python's values, of one type all of them, as a flat array."""
    for types, dtype in (
        ((str,), np.str_),
        ((bool, np.bool_), np.bool_),
        ((int, np.integer), np.int64),
        ((int, float, np.integer, np.floating, Decimal), np.float64),
    ):
        if all(isinstance(item, types) for item in items):
            try:
                return np.array([dtype(item) for item in items], dtype)
            except OverflowError as error:
                raise ValueError(
                    f"{what} have an integer of more than 64 bits: give floats."
                ) from error
    if all(isinstance(item, bytes) for item in items):
        return _decode(items, what)
    names = sorted({type(item).__name__ for item in items})
    if len(names) > 1:
        raise ValueError(
            f"{what} mix values of the types {', '.join(names)}: convert them to one, numbers or text."
        )
    raise ValueError(f"{what} are values of type {names[0]}: convert them to numbers or text.")


def _decode(items: list[bytes], what: str) -> NDArray[Any]:
    try:
        return np.array([item.decode() for item in items], np.str_)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what} are bytes that are no text in UTF-8 ({error}): decode them first."
        ) from error


def _is_missing(item: Any) -> bool:
    return (
        item is None
        or item is pd.NA
        or item is pd.NaT
        or (isinstance(item, (float, np.floating)) and item != item)
    )
