"""What labels stand for: one rule for every source, and the numbers that they are stored as."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysim.data.pictures import numbered
from raysim.data.values import refuse_nan, type_name
from raysim.primitives.kinds import Kind
from raysim.primitives.memory import check_memory

Labels: TypeAlias = tuple[
    NDArray[Any], list[str], Kind
]  # stored labels, names of the outputs, what is learnt

MOST_CLASSES_OF_FLOATS = 100  # more different whole floats are values
EXACT_FLOATS = 2.0**53  # below it every whole number is a float64


def labels_of(values: Any, kind: Kind | None, names: list[str] | None, place: str) -> Labels:
    """Return labels as they are stored, the names of the outputs, and what is learnt.

    values: an array of labels, [n] or [n, outputs], where [n, 1] is read as [n]; or for each row a list of its labels.
    kind: `data.kind`; None: what `inferred_kind` says. names: of the outputs, where the source has them.
    """
    lists = not isinstance(values, np.ndarray)
    if lists and kind == "classification" and values and all(len(row) == 1 for row in values):
        values, lists = np.array([row[0] for row in values]), False
    if not lists:
        refuse_nan(values, f"{place}: the labels")
        if values.ndim > 1 and math.prod(values.shape[1:]) == 1:
            values = values.reshape(-1)
        if values.ndim > 2:
            raise ValueError(
                f"{place}: the labels have the shape {list(values.shape)}: give one label, or one row, for each sample."
            )
        if values.dtype.kind == "b":
            values = values.astype(np.int64)
    kind = kind or inferred_kind(values)
    if kind == "classification":
        return *numbered(_classes(values, place), names, place), kind
    if lists:
        if kind == "multilabel":
            return *_indicators(values, names, place), kind
        values = of_one_length(values, place)
    if values.dtype.kind not in "iuf":
        raise ValueError(
            f"{place} has labels of type {type_name(values)} and shape {list(values.shape)}, and data.kind={kind} "
            "needs numbers: give numbers, or one class for each sample."
        )
    values = values[:, None] if values.ndim == 1 else values
    usual = (
        ["value"] if values.shape[1] == 1 else [str(number) for number in range(values.shape[1])]
    )
    names = names if names and len(names) == values.shape[1] else usual
    return _rounded(values, kind, place), names, kind


def inferred_kind(values: Any) -> Kind:
    """Return what is learnt from labels of this form.

    Integers and text [n] are classes, and so are floats that are whole numbers from 0 on, if there are at most 100
    different ones, of two rows each in the mean. Other floats are values. Lists of labels, and integers [n, labels],
    are several labels that are there or not.
    """
    if not isinstance(values, np.ndarray):
        return "multilabel"
    if values.dtype.kind == "f":
        return "classification" if values.ndim == 1 and _count_classes(values) else "regression"
    return "classification" if values.ndim == 1 else "multilabel"


def of_one_length(rows: Sequence[Sequence[Any]], place: str) -> NDArray[Any]:
    """Return lists as an array. Raise ValueError if their lengths differ."""
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{place} has lists of {min(map(len, rows))} to {max(map(len, rows))} numbers: make them equal."
        )
    return np.array(rows)


def _count_classes(values: NDArray[Any]) -> int:
    """Return how many classes floats name, or 0 where they are values."""
    if not len(values) or not _are_whole(values) or values.min() < 0 or values.max() >= len(values):
        return 0
    different = len(np.unique(values))
    return different if different <= min(MOST_CLASSES_OF_FLOATS, len(values) // 2) else 0


def _are_whole(values: NDArray[Any]) -> bool:
    return bool(np.isfinite(values).all() and (np.floor(values) == values).all())


def _classes(values: Any, place: str) -> NDArray[Any]:
    """Return labels that are read as classes as integers or text."""
    if not isinstance(values, np.ndarray) or values.ndim > 1:
        form = (
            "lists of labels"
            if not isinstance(values, np.ndarray)
            else f"labels of shape {list(values.shape)}"
        )
        raise ValueError(
            f"{place} has {form}, which are no classes: give one class for each sample, or set data.kind=multilabel or "
            "data.kind=regression."
        )
    if values.dtype.kind != "f":
        return values
    floats = values.astype(np.float64)
    wrong = ~np.isfinite(floats) | (np.floor(floats) != floats) | (np.abs(floats) >= EXACT_FLOATS)
    if wrong.any():
        raise ValueError(
            f"{place} has the label {floats[wrong][0]:g}, which is no class: set data.kind=regression, or correct it."
        )
    return floats.astype(np.int64)


def _rounded(values: NDArray[Any], kind: Kind, place: str) -> NDArray[np.float32]:
    """Return values as float32. Raise ValueError for those beyond its range; `labelled` checks the others."""
    with np.errstate(over="ignore"):
        floats: NDArray[np.float32] = values.astype(np.float32)
    if not np.array_equal(np.isfinite(values), np.isfinite(floats)):
        largest = float(np.abs(values[np.isfinite(values)]).max())
        raise ValueError(
            f"{place} has the label {largest:g}, beyond what float32 holds: scale labels for {kind} down."
        )
    return floats


def _indicators(
    sets: Sequence[Sequence[Any]], names: list[str] | None, place: str
) -> tuple[NDArray[np.float32], list[str]]:
    """Return whether each label is in each set, and the labels' names, `numbered` as classes are."""
    flat = [label for row in sets for label in row]
    if odd := [label for label in flat if type(label) not in (int, str)]:
        raise ValueError(
            f"{place} has the label {odd[0]} in a list, and lists of labels are of integers or of text: convert them, "
            "or set data.kind=regression."
        )
    values = np.array(flat, np.int64 if all(type(label) is int for label in flat) else object)
    numbers, names = numbered(values, names, place, len(sets))
    names = names or ["0"]
    check_memory(
        f"{place}: {len(names)} labels of each of {len(sets)} images", 4 * len(names) * len(sets)
    )
    whole = np.zeros((len(sets), len(names)), np.float32)
    whole[np.repeat(np.arange(len(sets)), [len(row) for row in sets]), numbers] = 1
    return whole, names
