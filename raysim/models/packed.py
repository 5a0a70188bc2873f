"""Unpack samples that have several inputs and are stored as rows of floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raysim.primitives.kinds import InputField


def unpack_fields(rows: Tensor, fields: Sequence[InputField]) -> list[Tensor]:
    """Return a tensor [B, ...] for each of the inputs that rows [B, floats] store.

    `raysim.data.fields.pack_fields` makes such rows.
    fields: the inputs of a sample, in their order in the row.
    """
    sizes = [math.prod(field.shape) for field in fields]
    inputs = []
    for part, field in zip(rows.split(sizes, dim=1), fields, strict=True):
        values = part.reshape(len(rows), *field.shape)
        inputs.append(values.long() if field.has_tokens else values)
    return inputs


class UnpackFields:
    """A forward pre-hook that unpacks rows of floats into the arguments of a neural network.

    fields: the inputs of a sample, in their order in the row.
    """

    def __init__(self, fields: Sequence[InputField]):
        self.fields = tuple(fields)
        self.width = sum(math.prod(field.shape) for field in fields)

    def __call__(
        self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the unpacked arguments; None if the arguments are not packed."""
        is_packed = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not is_packed or args[0].shape[1:] != (self.width,):
            return None
        inputs = unpack_fields(args[0], self.fields)
        if self.fields[0].name:
            return (), {field.name: x for field, x in zip(self.fields, inputs, strict=True)}
        return tuple(inputs), {}


def example_rows(fields: Sequence[InputField], rows: int) -> Tensor:
    """Return example inputs of samples, packed as `unpack_fields` expects: [rows, floats].

    Tokens are 0; other inputs are always the same random numbers.
    fields: the inputs of a sample, in their order in the row.
    """
    generator = torch.Generator().manual_seed(0)
    parts = []
    for field in fields:
        size = math.prod(field.shape)
        if field.has_tokens:
            parts.append(torch.zeros(rows, size))
        else:
            parts.append(torch.randn(rows, size, generator=generator))
    return torch.cat(parts, dim=1)
