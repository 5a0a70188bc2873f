"""Find out the kind of a source's labels, and convert the labels to numbers.

All sources use the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.data.rows import number_labels
from raysim.data.values import refuse_nan, type_name
from raysim.primitives.kinds import IGNORED, Kind, TargetField
from raysim.primitives.memory import check_memory

MAX_CLASSES_OF_FLOATS = 100  # `infer_kind` takes floats with more different values for values
EXACT_FLOATS = 2.0**53  # float64 can store every whole number below it


class LabelSet(NamedTuple):
    """The labels of n samples as numbers, the names of the model's outputs, and the kind of task.

    values: class numbers [n] or [n, ...], or floats [n, outputs] or [n, outputs, ...].
    names: the name of the class, the label or the value that each output of the model stands for.
    targets: for kind="structure", a description of each array, in the order of a row of `values`;
    else ().
    """

    values: NDArray[Any]
    names: list[str]
    kind: Kind
    targets: tuple[TargetField, ...] = ()  # the parts of a row of values, for kind="structure"


def read_labels(
    values: Any,
    kind: Kind | None,
    names: list[str] | None,
    place: str,
    ignore: int | str = IGNORED,
) -> LabelSet:
    """Check the labels of a source and convert them to a `LabelSet`.

    values: an array [n], [n, outputs] or [n, ...], or a list of labels for each sample. An array
    [n, 1] is read as [n].
    kind: `data.kind`; None takes the result of `infer_kind`.
    names: the names of the model's outputs, or None.
    place: the source's name in errors.
    ignore: `data.ignore`, the class that means "no label". It is stored as `IGNORED`.
    Raise ValueError if the labels do not fit the kind, and always for kind="causal".
    """
    if kind == "causal":
        raise streams_error(place)
    if not isinstance(values, np.ndarray):
        if kind == "positions":
            return _read_positions(_pad_lists(values, place, ignore), names, place, ignore)
        return _read_lists(values, kind, names, place, ignore)
    refuse_nan(values, f"{place}: the labels")
    if values.ndim > 1 and math.prod(values.shape[1:]) == 1:
        values = values.reshape(-1)
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    kind = kind or infer_kind(values)
    if kind == "positions":
        return _read_positions(values, names, place, ignore)
    if kind == "classification":
        numbers, class_names = _number_with_ignored(
            _to_classes(values, place), names, place, ignore
        )
        return LabelSet(numbers, class_names, kind)
    if kind == "multilabel" and values.ndim > 2:
        raise ValueError(
            f"{place}: the labels have the shape {list(values.shape)}, and data.kind=multilabel "
            "learns one row of labels per sample. Give an array of shape [n, labels], or set "
            "data.kind=positions for a class at each position."
        )
    return _read_values(values, kind, names, place)


def streams_error(place: str) -> ValueError:
    """Return the error for data.kind=causal with a source that cannot read text.

    place: the name of the source.
    """
    return ValueError(
        f"data.kind=causal: {place} cannot be read as text for a language model. Set data=text, "
        "csv, jsonl, parquet, huggingface, leaf or markov."
    )


def infer_kind(values: Any) -> Kind:
    """Return the kind of task that the type and the shape of n samples' labels suggest.

    - "classification": integers or text [n]. Also floats [n] that look like class numbers: a few
      different whole numbers, from 0 on.
    - "regression": all other floats.
    - "multilabel": integers [n, labels] that are all 0 or 1, or a list of labels for each sample.
    - "positions": all other arrays of integers or text; each position has a class.
    """
    if not isinstance(values, np.ndarray):
        return "multilabel"
    if values.dtype.kind == "f":
        are_classes = values.ndim == 1 and _are_whole_classes(values)
        return "classification" if are_classes else "regression"
    if values.ndim == 1:
        return "classification"
    is_present_or_absent = values.ndim == 2 and values.dtype.kind != "U"
    if is_present_or_absent and np.isin(values, (0, 1)).all():
        return "multilabel"
    return "positions"


def stack_lists(rows: Sequence[Sequence[Any]], place: str) -> NDArray[Any]:
    """Return lists of equal length as an array; raise ValueError if their lengths differ.

    rows: the list of each sample.
    place: the name of the lists in errors.
    """
    lengths = {len(row) for row in rows}
    if len(lengths) > 1:
        raise ValueError(
            f"{place} has lists of different lengths, from {min(lengths)} to {max(lengths)} "
            "numbers. Make all lists equally long."
        )
    return np.array(rows)


def _read_lists(
    rows: Sequence[Sequence[Any]],
    kind: Kind | None,
    names: list[str] | None,
    place: str,
    ignore: int | str,
) -> LabelSet:
    """Return the labels of samples that have a list of labels each.

    kind: `data.kind`; None means "multilabel".
    names: the names of the classes or outputs, if the data have any.
    place: the name of the data in errors.
    ignore: `data.ignore`, the class that means "no label".
    """
    kind = kind or "multilabel"
    if kind == "multilabel":
        indicators, label_names = _to_indicators(rows, names, place)
        return LabelSet(indicators, label_names, kind)
    if kind == "regression":
        return _read_values(stack_lists(rows, place), kind, names, place)
    if not rows or any(len(row) != 1 for row in rows):
        raise ValueError(
            f"{place} has lists of labels, which cannot be classes. Give one class for each "
            "sample, or set data.kind=multilabel or data.kind=regression."
        )
    classes = _to_classes(np.array([row[0] for row in rows]), place)
    numbers, class_names = _number_with_ignored(classes, names, place, ignore)
    return LabelSet(numbers, class_names, kind)


def _read_values(values: NDArray[Any], kind: Kind, names: list[str] | None, place: str) -> LabelSet:
    """Return numeric labels as float32 [n, outputs] or [n, outputs, ...], and the outputs' names.

    values: numbers, [n], [n, outputs] or [n, outputs, ...].
    names: the names of the outputs. If this is None or does not have a name for each output, the
    names are "0", "1" and so on, or "value" for a single output.
    place: the name of the data in errors.
    """
    if values.dtype.kind not in "iuf":
        raise ValueError(
            f"{place} has labels of type {type_name(values)} and shape {list(values.shape)}, and "
            f"data.kind={kind} needs numbers. Give numbers, or give one class for each sample "
            "and set data.kind=classification."
        )
    values = values[:, None] if values.ndim == 1 else values
    outputs = int(values.shape[1])
    if not names or len(names) != outputs:
        names = ["value"] if outputs == 1 else [str(number) for number in range(outputs)]
    return LabelSet(_to_float32(values, kind, place), names, kind)


def _read_positions(
    values: NDArray[Any], names: list[str] | None, place: str, ignore: int | str
) -> LabelSet:
    """Return labels that have a class for each position: int64 [n, ...].

    values: the class of each position, [n, ...] or [n, 1, ...].
    names: the names of the classes, if the data have any.
    place: the name of the data in errors.
    ignore: `data.ignore`, the label of positions without a class.
    """
    if values.ndim > 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim < 2:
        raise ValueError(
            f"{place} has one label for each sample (shape {list(values.shape)}), but "
            "data.kind=positions needs a label for each position. Set data.kind=classification."
        )
    classes = _to_classes(values.reshape(-1), place)
    numbers, class_names = _number_with_ignored(classes, names, place, ignore)
    return LabelSet(numbers.reshape(values.shape), class_names, "positions")


def _pad_lists(rows: Sequence[Sequence[Any]], place: str, ignore: int | str) -> NDArray[Any]:
    """Return lists of labels as one array; short lists are filled up with the ignored label.

    rows: the list of each sample.
    place: the name of the data in errors.
    ignore: `data.ignore`, the ignored label.
    """
    width = max(map(len, rows), default=0)
    has_text = any(isinstance(label, str) for row in rows for label in row)
    if not has_text and isinstance(ignore, str):
        raise ValueError(
            f"{place} has numbers as labels, but data.ignore={ignore} is text. Set data.ignore to "
            "a number."
        )
    filler = str(ignore) if has_text else ignore
    return np.array([[*row, *[filler] * (width - len(row))] for row in rows])


def _number_with_ignored(
    classes: NDArray[Any], names: list[str] | None, place: str, ignore: int | str
) -> tuple[NDArray[np.int64], list[str]]:
    """Return each label's class as a number, and the class names.

    Labels that are `ignore` (`data.ignore`) get the number `IGNORED`.
    classes: the class of each label.
    names: the class names; None if the data has none.
    place: the name of the data in errors.
    """
    if classes.dtype.kind == "V":  # records cannot be labels; `number_labels` raises that error
        return number_labels(classes, names, place)
    counts = classes != (str(ignore) if classes.dtype.kind in "OU" else ignore)
    if np.all(counts):
        return number_labels(classes, names, place)
    if not np.any(counts):
        raise ValueError(
            f"{place}: every label is {ignore}, which marks samples without a label "
            f"(data.ignore={ignore}). Give at least one other label, or change data.ignore."
        )
    numbers, class_names = number_labels(classes[counts], names, place, len(classes))
    stored = np.full(len(classes), IGNORED, np.int64)
    stored[counts] = numbers
    return stored, class_names


def _are_whole_classes(values: NDArray[Any]) -> bool:
    """Return True if floats look like classes: a few different whole numbers, from 0 on."""
    if not len(values) or not np.isfinite(values).all() or (np.floor(values) != values).any():
        return False
    if values.min() < 0 or values.max() >= len(values):
        return False
    return len(np.unique(values)) <= min(MAX_CLASSES_OF_FLOATS, len(values) // 2)


def _to_classes(values: NDArray[Any], place: str) -> NDArray[Any]:
    """Convert class labels that are floats to integers; return other labels unchanged.

    values: [n], the label of each sample.
    place: the name of the data in errors.
    Raise ValueError if a float is not a whole number below 2**53, or if a sample has several
    labels.
    """
    if values.ndim > 1:
        raise ValueError(
            f"{place} has labels of shape {list(values.shape)}, which cannot be classes. Give one "
            "class for each sample, or set data.kind=multilabel or data.kind=regression."
        )
    if values.dtype.kind != "f":
        return values
    floats = values.astype(np.float64)
    is_class = np.isfinite(floats) & (np.floor(floats) == floats) & (np.abs(floats) < EXACT_FLOATS)
    if not is_class.all():
        raise ValueError(
            f"{place} has the label {floats[~is_class][0]:g}, which cannot be a class. Set "
            "data.kind=regression, or correct it."
        )
    return floats.astype(np.int64)


def _to_float32(values: NDArray[Any], kind: Kind, place: str) -> NDArray[np.float32]:
    """Return labels as float32; raise ValueError if a finite label becomes infinite.

    values: labels of any numeric type.
    kind: the value of `data.kind`, for errors.
    place: the file or the argument that has the data, for errors.
    """
    with np.errstate(over="ignore"):
        floats: NDArray[np.float32] = values.astype(np.float32)
    if not np.array_equal(np.isfinite(values), np.isfinite(floats)):
        largest = float(np.abs(values[np.isfinite(values)]).max())
        raise ValueError(
            f"{place} has the label {largest:g}, beyond the range of float32. Scale the labels for "
            f"{kind} down."
        )
    return floats


def _to_indicators(
    rows: Sequence[Sequence[Any]], names: list[str] | None, place: str
) -> tuple[NDArray[np.float32], list[str]]:
    """Return a table [n, L] of the labels that each sample has, and the names of the L labels.

    Entry [i, k] is 1 if sample i has label k, else 0.
    rows: the labels of each sample.
    names: None uses the texts that occur, or all integers from 0 to the largest one that occurs.
    place: the name of the data in errors.
    """
    flat: list[Any] = []
    for row in rows:
        flat += row
    for label in flat:
        if type(label) not in (int, str):
            raise ValueError(
                f"{place} has the label {label} in a list, but lists of labels must hold integers "
                "or text. Convert the labels, or set data.kind=regression."
            )
    are_integers = all(type(label) is int for label in flat)
    values = np.array(flat, np.int64 if are_integers else object)
    numbers, names = number_labels(values, names, place, len(rows))
    names = names or ["0"]
    check_memory(
        f"{place}: {len(names)} labels of each of {len(rows)} rows", 4 * len(names) * len(rows)
    )
    indicators = np.zeros((len(rows), len(names)), np.float32)
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    indicators[owners, numbers] = 1
    return indicators, names
