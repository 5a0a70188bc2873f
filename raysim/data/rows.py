"""Choose the test rows of a data set, sort rows, and assign numbers to labels and domains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.data.csr import Ints
from raysim.data.splits import floor_counts


# ---- training and test rows ----------------------------------------------------------------------
def choose_test_rows(groups: Ints, fraction: float) -> NDArray[np.bool_]:
    """Return the mask of test rows: a share of each group's rows, evenly spread.

    groups: [n], the number of each row's group, such as its class.
    fraction: the share; the number of test rows of a group is rounded down.
    """
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    rank = np.empty(len(groups), dtype=np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return floor_counts((rank + 1) * fraction) > floor_counts(rank * fraction)


def train_first(is_test: NDArray[np.bool_]) -> tuple[Ints, int]:
    """Return the row numbers with training rows first, and the number of training rows.

    is_test: bool [n], True for test rows.
    """
    return np.argsort(is_test, kind="stable"), int((~is_test).sum())


# ---- numbers for names ---------------------------------------------------------------------------
def are_names(value: object) -> bool:
    """Return True if a value is a list of different texts, as a list of class names must be.

    value: a value that was read from a file.
    """
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(name, str) for name in value) and len(set(value)) == len(value)


def number_labels(
    values: NDArray[np.generic], names: list[str] | None, place: str, samples: int | None = None
) -> tuple[Ints, list[str]]:
    """Convert labels to class numbers; return the numbers, and the names of the classes.

    values: class numbers, or text. The number of a text is its position in `names`.
    names: the class names. None takes the texts in alphabetical order. With None, integers must be
    below `samples`.
    place: the name of the source in errors.
    samples: None takes the length of `values`.
    Raise ValueError for labels that are neither integers nor text, or not one of the classes.
    """
    samples = len(values) if samples is None else samples
    if values.dtype.kind in "OU":
        return _number_text(values, names, place)
    if values.dtype.kind not in "iu":
        raise ValueError(f"{place} has labels of type {values.dtype}. Give integers or text.")
    if not len(values):
        return values.astype(np.int64), names or []
    lowest, highest = int(values.min()), int(values.max())
    # Such large integers are probably the values of a regression.
    if not names and highest >= samples and lowest >= 0:
        raise ValueError(
            f"{place} has the label {highest}, but only {samples} samples. Labels without names "
            "are read as class numbers. Renumber the classes from 0 without gaps, name all "
            "classes, or set data.kind=regression if the labels are values to predict."
        )
    classes = len(names) if names else highest + 1
    if lowest < 0 or highest >= classes:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"{place} has the label {wrong}, but its classes are 0 to {classes - 1}. Correct it."
        )
    return values.astype(np.int64), names or [str(label) for label in range(classes)]


def _number_text(
    values: NDArray[np.generic], names: list[str] | None, place: str
) -> tuple[Ints, list[str]]:
    present = sorted(set(values.tolist()))
    names = names or present
    unknown = sorted(set(present) - set(names))
    if unknown:
        raise ValueError(
            f"{place} has the label {unknown[0]}, but its class names are {', '.join(names)}. "
            "Correct the label or the names."
        )
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[value] for value in values.tolist()], dtype=np.int64), names


def number_domains(
    values: NDArray[Any], is_train: NDArray[np.bool_], order: Sequence[str] | None = None
) -> tuple[Ints, list[str]]:
    """Return the number of each row's domain, [n], and the names of all domains.

    All domains with training rows come first, and then all others. Both groups are sorted as in
    `order`.
    values: [n], the name of each row's domain.
    is_train: bool [n], True for training rows.
    order: the names of all domains; None uses `natural_order`.
    """
    names = values.astype(np.str_)
    ordered = natural_order(values) if order is None else order
    trained = set(names[is_train].tolist())
    with_training_rows = [name for name in ordered if name in trained]
    without_training_rows = [name for name in ordered if name not in trained]
    return number_labels(names, with_training_rows + without_training_rows, "a domain")


def natural_order(values: NDArray[Any]) -> list[str]:
    """Return the different values as texts, in ascending order.

    Values of a numeric type are sorted as numbers. Texts are sorted character by character:
    "user10" comes before "user2", although 2 is less than 10.
    """
    if values.dtype.kind in "iuf":
        return [str(value) for value in np.unique(values).tolist()]
    return sorted(set(values.astype(np.str_).tolist()))


def join_names(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Join arrays of domain names, as integers if all are integers, else as text.

    Signed and unsigned integers of 64 bits have no common type, so together they become text.
    """
    if all(part.dtype.kind in "iu" for part in parts):
        joined = np.concatenate(parts)
        # NumPy would join signed and unsigned integers of 64 bits to floats.
        if joined.dtype.kind in "iu":
            return joined
    return np.concatenate([part.astype(np.str_) for part in parts])
