"""Several inputs of a sample, stored as one row of floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.data.values import as_float32
from raysim.primitives.kinds import InputField

LARGEST_TOKEN = 2**24  # above it float32 does not have every integer


def pack_fields(
    columns: Mapping[str, NDArray[Any]] | Sequence[NDArray[Any]], place: str
) -> tuple[NDArray[np.float32], tuple[InputField, ...]]:
    """Return the inputs of all samples as rows [n, floats], and what each part of a row is.

    columns: the arrays [n, ...] by the name of the model's argument, or in the order of its
    arguments. uint8 becomes floats from 0 to 1, floats stay, other integers are token numbers.
    Raise ValueError for arrays of different lengths, negative or too large tokens, and other types.
    """
    named = columns if isinstance(columns, Mapping) else {str(i): a for i, a in enumerate(columns)}
    fields: list[InputField] = []
    parts: list[NDArray[np.float32]] = []
    count = -1
    for name, values in named.items():
        here = f"{place}, {name if isinstance(columns, Mapping) else f'input {name}'}"
        if count >= 0 and len(values) != count:
            raise ValueError(
                f"{here}: {len(values)} rows, and other inputs have {count}. Give each sample all "
                "inputs."
            )
        count = len(values)
        values = values[:, None] if values.ndim == 1 else values
        has_tokens = values.dtype.kind in "iu" and values.dtype != np.uint8
        if has_tokens and values.size and not 0 <= values.min() <= values.max() < LARGEST_TOKEN:
            raise ValueError(
                f"{here}: integers are token numbers from 0 to {LARGEST_TOKEN - 1}, and these are "
                f"{values.min()} to {values.max()}. Store measurements as floats."
            )
        if values.dtype.kind not in "iufb":
            raise ValueError(f"{here}: inputs of type {values.dtype}. Give numbers.")
        floats = as_float32(values, here)
        if values.dtype == np.uint8:
            floats = floats / np.float32(255)
        parts.append(floats.reshape(count, -1))
        field_name = name if isinstance(columns, Mapping) else ""
        fields.append(InputField(field_name, tuple(values.shape[1:]), bool(has_tokens)))
    return np.concatenate(parts, axis=1), tuple(fields)
