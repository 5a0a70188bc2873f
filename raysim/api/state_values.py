"""Store values of any kind that a method keeps for a client as named tensors, and read them back.

A tensor is stored under its own name. The entries of a mapping get their keys behind the name
("fedproto.prototypes[3]"), and numbers and bytes the name of their type ("mine.count#int"), so that
state is moved, counted and checkpointed as tensors and nothing else.
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
    """A value that cannot be kept for a client."""


def pack(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the values as named tensors. Raises UnstorableValue."""
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            tensors.update(_packed(name, value))
    return tensors


def _packed(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        yield from _packed_mapping(name, value)
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
            f"'{name}' is a value of type {type(value).__name__}: keep a tensor, a number, bytes, "
            "or a mapping of these"
        )


def _packed_mapping(name: str, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    if not mapping:
        yield f"{name}{_EMPTY}", torch.empty(0, dtype=torch.uint8)
    for key, value in mapping.items():
        if not isinstance(key, (int, str)):
            raise UnstorableValueError(
                f"'{name}' has the key {key!r}: the keys of a mapping are numbers or texts"
            )
        yield from _packed(f"{name}[{key!r}]", value)


def unpack(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the values of which `pack` made these tensors."""
    values: dict[str, Any] = {}
    for stored, tensor in tensors.items():
        if "[" not in stored and "#" not in stored:
            values[stored] = tensor
            continue
        path, mark, kind = stored.partition("#") if "]" not in stored else _split_kind(stored)
        name, keys = _split_keys(path)
        value = _value(tensor, mark + kind)
        if not keys:
            values[name] = value
            continue
        mapping = values.setdefault(name, {})
        for key in keys[:-1]:
            mapping = mapping.setdefault(key, {})
        mapping[keys[-1]] = value
    return values


def _split_kind(stored: str) -> tuple[str, str, str]:
    """Split off the kind; a "#" inside a key is not one."""
    end = stored.rindex("]") + 1
    return stored[:end], stored[end : end + 1], stored[end + 1 :]


def _split_keys(path: str) -> tuple[str, list[Any]]:
    name = path.partition("[")[0]
    return name, [ast.literal_eval(key) for key in _KEY.findall(path[len(name) :])]


def _value(tensor: Tensor, kind: str) -> Any:
    if not kind:
        return tensor
    if kind == _EMPTY:
        return {}
    if kind == "#bytes":
        return bytes(tensor.cpu().numpy().tobytes())
    return tensor.item()
