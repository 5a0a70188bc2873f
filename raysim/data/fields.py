"""Store several inputs of a sample, or a structured target, as one row of floats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.data.labels import LabelSet
from raysim.data.values import as_float32, plain_array
from raysim.primitives.kinds import InputField, TargetField

LARGEST_TOKEN = 2**24  # float32 cannot store every integer above this number


def pack_fields(
    columns: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]], place: str
) -> tuple[NDArray[np.float32], tuple[InputField, ...]]:
    """Return one row of floats for each sample, [n, floats], and a description of each input.

    columns: an array [n, ...] for each input, by the name of the model's argument or in the order
    of the arguments. uint8 values are divided by 255. Other integers are token numbers.
    place: the name of the data in errors.
    Raise ValueError for different lengths, values that are not numbers, and values that are not
    finite as float32. Raise it also for token numbers below 0 or too large for a float32.
    """
    named = columns if isinstance(columns, Mapping) else {str(i): a for i, a in enumerate(columns)}
    fields: list[InputField] = []
    parts: list[NDArray[np.float32]] = []
    count = -1
    for name, values in named.items():
        key = f"{place}, {name if isinstance(columns, Mapping) else f'input {name}'}"
        if count >= 0 and len(values) != count:
            raise ValueError(
                f"{key}: this input has {len(values)} rows, but other inputs have {count}. Give "
                "every sample all inputs."
            )
        count = len(values)
        values = values[:, None] if values.ndim == 1 else values
        has_tokens = values.dtype.kind in "iu" and values.dtype != np.uint8
        if has_tokens and values.size and not 0 <= values.min() <= values.max() < LARGEST_TOKEN:
            raise ValueError(
                f"{key}: integers are read as token numbers and must be from 0 to "
                f"{LARGEST_TOKEN - 1}, but these are from {values.min()} to {values.max()}. If "
                "they are measurements, store them as floats."
            )
        if values.dtype.kind not in "iufb":
            raise ValueError(f"{key}: inputs have the type {values.dtype}. Give numbers.")
        floats = as_float32(values, key)
        if values.dtype == np.uint8:
            floats = floats / np.float32(255)
        parts.append(floats.reshape(count, -1))
        field_name = name if isinstance(columns, Mapping) else ""
        fields.append(InputField(field_name, tuple(values.shape[1:]), bool(has_tokens)))
    return np.concatenate(parts, axis=1), tuple(fields)


# ---- targets -------------------------------------------------------------------------------------
def pack_targets(targets: Sequence[Mapping[str, Any]], place: str) -> LabelSet:
    """Return structured targets as a `LabelSet`: one row of floats for each sample, [n, floats].

    A row has a part for each name. A part is the length of the array's first axis, the array's
    values, and zeros up to the size of the largest array of this name. `unpack_targets` restores
    the arrays.
    targets: for each sample, arrays by name, such as "boxes" [k, 4]. Only k may differ between
    samples.
    place: the name of the data in errors.
    Raise ValueError if samples differ in names, the order of names, or shapes. Raise it also for
    values that a float32 cannot hold.
    """
    names = list(targets[0])
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for row, target in enumerate(targets):
        if list(target) != names:
            raise ValueError(
                f"{place}: the target of row {row} has {', '.join(map(str, target))}, but the "
                f"target of row 0 has {', '.join(names)}. Give all targets the same names in the "
                "same order."
            )
        for name in names:
            columns[name].append(np.atleast_1d(_target_array(target[name], f"{place}, {name}")))
    parts: list[NDArray[np.float32]] = []
    fields: list[TargetField] = []
    for name, arrays in columns.items():
        field, part = _pack_column(name, arrays, f"{place}, {name}")
        fields.append(field)
        parts.append(part)
    return LabelSet(np.concatenate(parts, axis=1), [], "structure", tuple(fields))


def _target_array(value: Any, place: str) -> NDArray[Any]:
    is_number = isinstance(value, (int, float, np.number))
    return np.asarray(value) if is_number else plain_array(value, place)


def _pack_column(
    name: str, arrays: Sequence[NDArray[Any]], place: str
) -> tuple[TargetField, NDArray[np.float32]]:
    """Pack all samples' arrays of one name, such as "boxes", into rows of floats, [n, floats].

    Return a description of the arrays, and the rows.
    """
    filled = [array for array in arrays if array.size] or arrays[:1]
    inner = filled[0].shape[1:]
    has_integers = all(array.dtype.kind in "iub" for array in filled)
    for row, array in enumerate(arrays):
        if array.size and array.shape[1:] != inner:
            expected = ", ".join(["n", *map(str, inner)])
            raise ValueError(
                f"{place}: row {row} has the shape {list(array.shape)}, but earlier rows have the "
                f"shape [{expected}]. Only the length n of the first axis may differ between rows."
            )
        if array.dtype.kind not in "iufb":
            raise ValueError(f"{place}: values have the type {array.dtype}. Give numbers.")
        if has_integers and array.size and np.abs(array).max() >= LARGEST_TOKEN:
            raise ValueError(
                f"{place}: integers must be from {1 - LARGEST_TOKEN} to {LARGEST_TOKEN - 1}. Give "
                "floats."
            )
    longest = max(len(array) for array in arrays)
    size = math.prod(inner)
    rows = np.zeros((len(arrays), 1 + longest * size), np.float32)
    for stored, array in zip(rows, arrays, strict=True):
        stored[0] = len(array) if array.size else 0
        stored[1 : 1 + array.size] = as_float32(array, place).reshape(-1)
    return TargetField(name, (longest, *inner), has_integers), rows
