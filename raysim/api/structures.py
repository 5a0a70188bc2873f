"""Unpack structured targets, which raysim stores as rows of floats.

The user's loss and metrics get the unpacked targets: for each sample, a dictionary of arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from raysim.primitives.kinds import TargetField


def unpack_targets(rows: Tensor, fields: Sequence[TargetField]) -> list[dict[str, Tensor]]:
    """Unpack each sample's row of floats into a dictionary of arrays, by field name.

    rows: [n, floats]. A row has one section for each field, in the order of `fields`. A section
    begins with the length of the array's first axis; the values of the array follow. It is always
    long enough for the largest array of its field.
    fields: the name, the largest shape and the type of each array.
    """
    targets: list[dict[str, Tensor]] = [{} for _ in range(len(rows))]
    start = 0
    for field in fields:
        inner = field.shape[1:]
        size = math.prod(inner)
        lengths = rows[:, start].long().tolist()
        stop = start + 1 + field.shape[0] * size
        for target, row, length in zip(targets, rows, lengths, strict=True):
            values = row[start + 1 : start + 1 + length * size].reshape(length, *inner)
            target[field.name] = values.long() if field.has_integers else values
        start = stop
    return targets


@dataclass(frozen=True)
class OnStructures:
    """A user's loss or metric, called with the targets as a list of dictionaries.

    function: gets the outputs and the targets. If it has an attribute `collate`, it gets
    function.collate(targets) instead of the targets.
    fields: the name, largest shape and type of each array of a target.
    """

    function: Callable[..., Any]
    fields: tuple[TargetField, ...]

    def __call__(self, outputs: Tensor, rows: Tensor) -> Any:
        """Return the result of the user's loss or metric for the outputs and the targets.

        outputs: the outputs of the model.
        rows: [n, floats], the targets of n samples. They are unpacked before the user's function
        gets them.
        """
        targets: Any = unpack_targets(rows, self.fields)
        collate = getattr(self.function, "collate", None)
        if collate is not None:
            targets = collate(targets)
        return self.function(outputs, targets)
