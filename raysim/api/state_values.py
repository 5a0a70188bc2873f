"""Convert the values of client state to named tensors and back.

Client state is moved, counted and stored as tensors. A tensor's name has the key of a dictionary's
entry ("fedproto.prototypes[3]"), or the type of a number or of bytes ("mine.count#int").
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_EMPTY = "#empty"
_KEY = re.compile(r"\[((?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\]])*)\]")


class UnstorableValueError(TypeError):
    """The error of a value whose type cannot be stored in client state."""


def pack(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values of client state as named tensors.

    values: tensors, numbers, bytes, or dictionaries of these, by name. The keys of a dictionary are
    integers or text.
    Raises UnstorableValueError for a value or a key of another type.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            tensors.update(_pack_value(name, value))
    return tensors


def _pack_value(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        yield from _pack_mapping(name, value)
    elif isinstance(value, (bytes, bytearray)):
        yield f"{name}#bytes", torch.from_numpy(np.frombuffer(bytes(value), np.uint8).copy())
    elif isinstance(value, bool):
        yield f"{name}#bool", torch.tensor(value)
    elif isinstance(value, int):
        yield f"{name}#int", torch.tensor(value, dtype=torch.int64)
    elif isinstance(value, float):
        yield f"{name}#float", torch.tensor(value, dtype=torch.float64)
    else:
        raise UnstorableValueError(
            f"client state '{name}' has the type {type(value).__name__}. Store a tensor, a number, "
            "bytes, or a dictionary of these."
        )


def _pack_mapping(name: str, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    if not mapping:
        yield f"{name}{_EMPTY}", torch.empty(0, dtype=torch.uint8)
    for key, value in mapping.items():
        if not isinstance(key, (int, str)):
            raise UnstorableValueError(
                f"client state '{name}' has the key {key!r}. Use integers or strings as keys of a "
                "dictionary."
            )
        yield from _pack_value(f"{name}[{key!r}]", value)


def unpack(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the values from which `pack` made these tensors."""
    values: dict[str, Any] = {}
    for stored, tensor in tensors.items():
        if "[" not in stored and "#" not in stored:
            values[stored] = tensor
            continue
        if "]" in stored:
            path, mark, kind = _split_kind(stored)
        else:
            path, mark, kind = stored.partition("#")
        name, keys = _split_keys(path)
        value = _unpack_value(tensor, mark + kind)
        if not keys:
            values[name] = value
            continue
        mapping = values.setdefault(name, {})
        for key in keys[:-1]:
            mapping = mapping.setdefault(key, {})
        mapping[keys[-1]] = value
    return values


def _split_kind(stored: str) -> tuple[str, str, str]:
    """Split a stored name such as "counts[3]#int" into ("counts[3]", "#", "int").

    The last "]" ends the first part, because a key in brackets may contain a "#".
    """
    end = stored.rindex("]") + 1
    return stored[:end], stored[end : end + 1], stored[end + 1 :]


def _split_keys(path: str) -> tuple[str, list[Any]]:
    name = path.partition("[")[0]
    return name, [ast.literal_eval(key) for key in _KEY.findall(path[len(name) :])]


def _unpack_value(tensor: Tensor, kind: str) -> Any:
    if not kind:
        return tensor
    if kind == _EMPTY:
        return {}
    if kind == "#bytes":
        return bytes(tensor.cpu().numpy().tobytes())
    return tensor.item()
