"""Convert columns of NumPy, PyTorch, pandas, SciPy or Arrow to plain NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from raysim.primitives.extras import is_instance_of

if TYPE_CHECKING:
    import pandas as pd

# Floating types of PyTorch that NumPy has, too.
NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def plain_array(column: Any, place: str) -> NDArray[Any]:
    """Return a column as an array of booleans, integers, floats or text.

    Arrays of other NumPy types, such as dates, are returned unchanged; the caller must refuse them.
    column: an array, a tensor, a list, a column of a table, or a table, which becomes [rows,
    columns].
    place: the column's name in errors.
    Raise ValueError for missing values, rows of different shapes and mixed types. nan is a missing
    value in columns of pandas and among Python objects; elsewhere it is allowed.
    """
    if isinstance(column, torch.Tensor):
        return _read_tensor(column, place)
    if isinstance(column, Mapping):
        raise ValueError(
            f"{place} are a dictionary with {', '.join(map(str, column))}, but raysim reads one "
            "array. Join the arrays, for example with numpy.column_stack, or give a pandas frame."
        )
    if isinstance(column, (pa.Array, pa.ChunkedArray, pa.Table, pa.RecordBatch)):
        import pandas as pd

        column = column.to_pandas(types_mapper=pd.ArrowDtype)
    if is_instance_of(column, "pandas", "DataFrame"):
        return _read_frame(column, place)
    is_series = is_instance_of(column, "pandas", "Series", "Index")
    if is_series or is_instance_of(column, "pandas.api.extensions", "ExtensionArray"):
        return _read_series(column, place)
    if is_instance_of(column, "scipy.sparse", "sparray", "spmatrix"):
        return np.asarray(column.toarray())
    if isinstance(column, np.ma.MaskedArray) and np.ma.is_masked(column):
        _refuse_missing(np.ma.getmaskarray(column), place)
    if isinstance(column, (list, tuple)):
        return _read_list(column, place)
    return _read_array(np.asarray(column), place)


def as_float32(values: NDArray[Any], place: str) -> NDArray[np.float32]:
    """Return numbers as float32.

    place: the name of the values in errors, such as "data: the inputs for train".
    Raise ValueError for numbers that are not finite or outside the range of float32.
    """
    if not np.isfinite(values).all():
        raise ValueError(f"{place} contain nan or infinite numbers. Replace or remove them.")
    with np.errstate(over="ignore"):
        floats: NDArray[np.float32] = values.astype(np.float32)
    if not np.isfinite(floats).all():
        largest = np.format_float_scientific(np.abs(values).max(), 2, trim="-")
        raise ValueError(
            f"{place} are as large as {largest}, but raysim stores float32, whose largest number "
            f"is {LARGEST_FLOAT32:.3g}. Scale them down, or remove these rows."
        )
    return floats


def type_name(values: NDArray[Any]) -> str:
    """Return the type of an array's values, "text" for text."""
    return "text" if values.dtype.kind == "U" else str(values.dtype)


def refuse_nan(values: NDArray[Any], place: str) -> None:
    """Raise ValueError if an array of floats contains nan, a missing value.

    place: the name of the values in errors.
    """
    if values.dtype.kind == "f" and np.isnan(values).any():
        _refuse_missing(np.isnan(values), place)


def _refuse_missing(is_missing: NDArray[np.bool_], place: str) -> None:
    rows = np.flatnonzero(is_missing.reshape(len(is_missing), -1).any(axis=1))
    raise ValueError(
        f"{place} have a missing value in row {rows[0]} ({len(rows)} of {len(is_missing)} rows "
        "have one). Remove or fill these rows."
    )


# ---- PyTorch -------------------------------------------------------------------------------------
def _read_tensor(tensor: torch.Tensor, place: str) -> NDArray[Any]:
    if tensor.is_meta:
        raise ValueError(
            f"{place} are a tensor on the device meta, which has no values. Give a tensor with "
            "values."
        )
    if tensor.is_nested:
        raise ValueError(
            f"{place} are a nested tensor, whose rows differ in shape. Give rows of one shape."
        )
    try:
        tensor = tensor.detach().cpu()
        tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
        if tensor.is_floating_point() and tensor.dtype not in NUMPY_FLOATS:
            tensor = tensor.float()
        values: NDArray[Any] = tensor.resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"{place} are a tensor of {tensor.dtype}, a type that NumPy does not have. Convert "
            "the tensor to float32 or int64."
        ) from error
    return values


# ---- pandas --------------------------------------------------------------------------------------
def _read_frame(frame: pd.DataFrame, place: str) -> NDArray[Any]:
    columns = []
    for number, name in enumerate(frame):
        values = _read_series(frame.iloc[:, number], f"{place}, column {name}")
        if values.dtype.kind not in "biuf" and frame.shape[1] > 1:
            raise ValueError(
                f"{place}: column {name} does not hold numbers, but only columns of numbers can be "
                "joined into one array. Remove this column from the table, or encode it as numbers."
            )
        columns.append(values)
    return np.stack(columns, axis=1) if columns else np.empty((len(frame), 0))


def _read_series(column: Any, place: str) -> NDArray[Any]:
    """Return a series, an index or an extension array of pandas as a NumPy array.

    place: the file or the argument that has the data, for errors.
    """
    import pandas as pd

    series = pd.Series(column)
    if series.isna().any():
        _refuse_missing(series.isna().to_numpy(), place)
    if isinstance(series.dtype, pd.CategoricalDtype):
        series = series.astype(series.cat.categories.dtype)
    if isinstance(series.dtype, np.dtype):
        return _read_array(series.to_numpy(), place)
    is_sparse = isinstance(series.dtype, pd.SparseDtype)
    number_type = series.dtype.subtype if is_sparse else getattr(series.dtype, "numpy_dtype", None)
    if isinstance(number_type, np.dtype) and number_type.kind in "biuf":
        return np.asarray(series.to_numpy(dtype=number_type))
    return _read_array(series.to_numpy(dtype=object), place)


# ---- lists and arrays ----------------------------------------------------------------------------
def _read_list(rows: Sequence[Any], place: str) -> NDArray[Any]:
    if any(isinstance(row, torch.Tensor) for row in rows):
        rows = [_read_tensor(row, place) if isinstance(row, torch.Tensor) else row for row in rows]
    try:
        values = np.asarray(rows)
        # NumPy converts numbers, None and nan to text if a column also has text.
        if values.dtype.kind in "USO":
            values = np.array(rows, dtype=object)
    except (ValueError, TypeError) as error:
        raise _unequal_shapes(place) from error
    return _read_array(values, place)


def _read_array(values: NDArray[Any], place: str) -> NDArray[Any]:
    if not values.ndim:
        raise ValueError(
            f"{place} are a single {type(values.item()).__name__}. Give an array with a row for "
            "each sample."
        )
    if values.dtype.kind == "S":
        return _decode(values.ravel().tolist(), place).reshape(values.shape)
    if values.dtype.kind not in "OT":
        return values
    items = values.ravel().tolist()
    is_missing = np.array([_is_missing(item) for item in items], np.bool_)
    if is_missing.any():
        _refuse_missing(is_missing.reshape(values.shape), place)
    row_types = (list, tuple, np.ndarray, torch.Tensor)
    if values.ndim == 1 and items and all(isinstance(item, row_types) for item in items):
        if len({np.shape(item) for item in items}) > 1:
            raise _unequal_shapes(place)
        rows = [item if isinstance(item, torch.Tensor) else np.asarray(item) for item in items]
        return _read_list(rows, place)
    return _read_items(items, place).reshape(values.shape)


def _unequal_shapes(place: str) -> ValueError:
    return ValueError(f"{place} have different shapes. Pad short rows, or cut long rows.")


def _read_items(items: list[Any], place: str) -> NDArray[Any]:
    """Return Python values as a flat array; raise ValueError if not all are numbers or all text.

    items: the values.
    place: the file or the argument that has the data, for errors.
    """
    types: tuple[tuple[tuple[type, ...], Any], ...] = (
        ((str,), np.str_),
        ((bool, np.bool_), np.bool_),
        ((int, np.integer), np.int64),
        ((int, float, np.integer, np.floating, Decimal), np.float64),
    )
    for python_types, dtype in types:
        if all(isinstance(item, python_types) for item in items):
            try:
                return np.array([dtype(item) for item in items], dtype)
            except OverflowError as error:
                raise ValueError(
                    f"{place} have an integer of more than 64 bits. Give floats."
                ) from error
    if all(isinstance(item, bytes) for item in items):
        return _decode(items, place)
    names = sorted({type(item).__name__ for item in items})
    if len(names) > 1:
        raise ValueError(
            f"{place} mix values of the types {', '.join(names)}. Convert them to one type, "
            "numbers or text."
        )
    if all(isinstance(item, Mapping) for item in items):
        keys = ", ".join(map(str, items[0]))
        first_key = next(iter(items[0]), "a")
        raise ValueError(
            f"{place} are a list of dictionaries with {keys}. Give a dictionary of arrays instead, "
            f'{{"{first_key}": array, ...}}, or a table (pandas.DataFrame).'
        )
    raise ValueError(f"{place} are values of type {names[0]}. Convert them to numbers or text.")


def _decode(items: list[bytes], place: str) -> NDArray[Any]:
    try:
        return np.array([item.decode() for item in items], np.str_)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place} are bytes that are not UTF-8 text ({error}). Decode them first."
        ) from error


def _is_missing(item: Any) -> bool:
    if item is None or type(item).__name__ in ("NAType", "NaTType"):  # of pandas
        return True
    return isinstance(item, (float, np.floating)) and item != item
