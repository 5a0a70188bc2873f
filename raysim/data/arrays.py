"""Store arrays, tensors and data sets from Python in the cache, under their checksum.

"From Python" means that they were passed to `raysim.run(data=...)`, not read from a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raysim.data.columns import LABEL_NAMES, USER_NAMES, assemble, find_column
from raysim.data.fields import pack_fields, pack_targets
from raysim.data.frames import have_same_columns
from raysim.data.labels import LabelSet, read_labels
from raysim.data.raw import Origin, Raw, Source
from raysim.data.values import plain_array, type_name
from raysim.primitives.extras import is_instance_of
from raysim.primitives.kinds import InputField, Kind

COLUMNS = ("inputs", "labels", "users")
# For each sample a list of its labels, or a dictionary of target arrays.
LabelLists: TypeAlias = list[Any]


@dataclass(frozen=True, eq=False)
class StoredArrays:
    """The n samples of a data set from Python; the training samples come first.

    inputs: [n, ...].
    labels: [n, ...], a list of labels for each sample, or a `LabelSet` of packed dictionaries.
    users: [n], integers or text, the person or device of each sample; None if there are none.
    is_test: bool [n], True in the central test set.
    fields: a description of each input, in the order of a row of `inputs`; () for a single input.
    """

    inputs: NDArray[Any]
    labels: NDArray[Any] | LabelLists | LabelSet
    users: NDArray[Any] | None
    is_test: NDArray[np.bool_]
    fields: tuple[InputField, ...] = ()


_arrays_by_digest: dict[str, StoredArrays] = {}


@dataclass(frozen=True)
class Arrays(Source):
    """A source of arrays that `store_arrays` stored in the cache of this machine.

    digest: the checksum of the arrays, by which their data set is found in the cache.
    """

    digest: str = ""

    def read(self) -> Raw:
        arrays = _arrays_by_digest.get(self.digest)
        if arrays is None:
            raise ValueError(
                f"data.digest={self.digest}: the data of this run were passed from Python as "
                "arrays, but the cache of this machine does not have them. Pass the arrays again "
                "with raysim.run(data=...)."
            )
        if isinstance(arrays.labels, LabelSet):
            labels, label_type = arrays.labels, "dictionaries"
        else:
            labels = read_labels(arrays.labels, self.kind, None, "data", self.ignore)
            label_type = "lists"
        if isinstance(arrays.labels, np.ndarray):
            label_type = type_name(arrays.labels)
        origin = Origin(
            f"the first array ({arrays.inputs.dtype})",
            f"the second array ({label_type})",
            "" if arrays.users is None else "the third array",
        )
        if arrays.fields:
            origin = origin._replace(inputs="")
        return assemble(
            arrays.inputs,
            labels,
            arrays.users,
            arrays.is_test,
            None,
            origin,
            fields=arrays.fields,
        )


def store_arrays(data: object, settings: Mapping[str, Any] | None = None) -> Arrays:
    """Store samples from Python in the cache and return their source.

    data: `train` without tests, a pair (train, test), or {"train": train, "test": test}. `train`
    and `test` are each (inputs, labels), (inputs, labels, users) or a torch `Dataset`; `test`
    becomes the central test set.
    settings: further settings of the source, such as {"kind": "regression"}.

    Inputs: an array, a tensor or a list [n, ...], or a pandas frame of numbers. Images are [n, h,
    w], [n, c, h, w] or [n, h, w, c]. Several inputs are a dictionary or a tuple of arrays.

    Labels: an array [n], [n, values], or [n, labels] with 0 or 1. They may also be a list of labels
    or a dictionary of arrays for each sample. `labels.infer_kind` decides what they mean. Inputs
    and labels may not be two tables with the same columns.

    Users: integers or text, [n], for `partition=natural`.
    """
    train, test = _split_halves(data)
    kind = (settings or {}).get("kind")
    fields: list[tuple[InputField, ...]] = []
    halves = [_read_half(train, "train", kind, fields)]
    if test is not None:
        halves.append(_read_half(test, "test", kind, fields))
    if len(set(fields)) > 1:
        raise ValueError(
            "data: training and test rows have different inputs. Give the inputs of both the same "
            "names and shapes."
        )
    if len({len(columns) for columns in halves}) > 1:
        raise ValueError(
            "data: only the training rows or only the test rows have users. Give users for both "
            "or for neither."
        )
    columns = []
    for number, name in enumerate(COLUMNS[: len(halves[0])]):
        columns.append(_concatenate([half[number] for half in halves], name))
    inputs, labels, *users = columns
    is_test = np.arange(len(labels)) >= len(halves[0][1])
    targets: LabelSet | None = None
    if isinstance(labels, list) and labels and isinstance(labels[0], Mapping):
        targets = pack_targets(labels, "data: the targets")
        columns[1] = targets.values
    digest = _digest(columns, int((~is_test).sum()), fields[0])
    source = Arrays(digest=digest, **(settings or {}))
    assert isinstance(inputs, np.ndarray), "labels alone may be lists"
    user_column = users[0] if users else None
    assert not isinstance(user_column, list), "labels alone may be lists"
    _arrays_by_digest[source.digest] = StoredArrays(
        inputs, labels if targets is None else targets, user_column, is_test, fields[0]
    )
    try:
        source.build()
    finally:
        del _arrays_by_digest[source.digest]
    return source


def _split_halves(data: object) -> tuple[object, object]:
    """Return the training data, and the data for central tests or None.

    data: the argument `data` of `store_arrays`.
    """
    if isinstance(data, Mapping) and {"train"} <= data.keys() <= {"train", "test"}:
        return data["train"], data.get("test")
    if isinstance(data, Dataset):
        return data, None
    if isinstance(data, (tuple, list)) and len(data) in (2, 3):
        if have_same_columns(data[0], data[1]):
            raise ValueError(
                f"data: the first and the second {type(data[0]).__name__} have the same columns, "
                "but a pair of tables is read as (inputs, labels). Give training and test tables "
                'as {"train": table, "test": table}. If the second table has labels, rename its '
                "columns."
            )
        has_halves = len(data) == 2 and all(isinstance(half, (tuple, Dataset)) for half in data)
        return (data[0], data[1]) if has_halves else (data, None)
    if isinstance(data, DataLoader):
        raise ValueError(
            "data=DataLoader is not supported. Give the data set that it reads, loader.dataset."
        )
    length = f" of {len(data)}" if isinstance(data, (tuple, list)) else ""
    raise ValueError(
        f"data={type(data).__name__}{length} is not supported. Give one of these: (inputs, "
        "labels); (inputs, labels, users); a pair (training, test) of such tuples; "
        '{"train": ..., "test": ...}; a torch Dataset; a table of pandas, polars, Arrow or the '
        "library datasets."
    )


def _read_half(
    part: object, name: str, kind: Kind | None, fields: list[tuple[InputField, ...]]
) -> tuple[NDArray[Any] | LabelLists, ...]:
    """Return the inputs, the labels and the users of the training data or of the test data.

    Without users, return only the inputs and the labels.
    part: (inputs, labels), (inputs, labels, users) or a torch `Dataset`.
    name: "train" or "test", for errors.
    fields: a list to which this function appends a tuple: a description of each input, or () for a
    single input.
    """
    if isinstance(part, TensorDataset):
        part = part.tensors
    if isinstance(part, Dataset):
        part = _read_dataset(part, name)
    if not isinstance(part, (tuple, list)) or len(part) not in (2, 3):
        raise ValueError(
            f"data: the part for {name} has the type {type(part).__name__}. Give (inputs, "
            "labels) or (inputs, labels, users)."
        )
    inputs, parts = _read_inputs(part[0], f"data: the inputs for {name}")
    fields.append(parts)
    labels: NDArray[Any] | LabelLists = _label_lists(part[1], kind) or plain_array(
        part[1], f"data: the labels for {name}"
    )
    shapes = f"inputs of shape {inputs.shape} and {_describe_shape(labels)}"
    has_labels = labels.size > 0 if isinstance(labels, np.ndarray) else len(labels) > 0
    if not inputs.size or not has_labels:
        raise ValueError(
            f"data: {name} has no samples, or samples without a value ({shapes}). Pass at least "
            "one sample with a value."
        )
    if len(inputs) != len(labels):
        raise ValueError(f"data: {name} has {shapes}. Give as many labels as inputs.")
    is_table = isinstance(part[0], (pa.Table, pa.RecordBatch))
    is_table = is_table or is_instance_of(part[0], "pandas", "DataFrame")
    # Integers in the columns of a table are measurements, not tokens.
    if is_table and inputs.dtype.kind in "biu":
        inputs = inputs.astype(np.float64)
    if not parts:
        inputs = _channels_first(inputs)
    if len(part) == 2:
        return inputs, labels
    return inputs, labels, _read_users(part[2], len(labels), name)


def _read_inputs(column: object, place: str) -> tuple[NDArray[Any], tuple[InputField, ...]]:
    """Return the inputs as one array, and a description of each input if samples have several.

    column: an array, a tensor, a list or a pandas frame. For samples with several inputs, it is a
    dictionary or a tuple with an array for each input.
    place: the name of the inputs in errors.
    """
    if isinstance(column, Mapping):
        arrays = {str(key): plain_array(part, f"{place}, {key}") for key, part in column.items()}
        return pack_fields(arrays, place)
    array_types = (np.ndarray, torch.Tensor)
    if isinstance(column, tuple) and all(isinstance(part, array_types) for part in column):
        arrays_in_order = [plain_array(part, place) for part in column]
        return pack_fields(arrays_in_order, place)
    return plain_array(column, place), ()


def _read_users(column: object, count: int, name: str) -> NDArray[Any]:
    users = plain_array(column, f"data: the users for {name}")
    if users.shape == (count, 1):
        users = users.reshape(-1)
    if users.shape != (count,) or users.dtype.kind not in "iuU":
        raise ValueError(
            f"data: {name} has users of shape {users.shape} ({users.dtype}) for {count} samples. "
            "Give each sample a user, as an integer or text."
        )
    return users


def _read_dataset(dataset: Dataset[Any], name: str) -> tuple[tuple[Any, ...], ...]:
    """Return the columns of a torch data set: all inputs, all labels and, if there are any, users.

    dataset: a data set whose items are tuples or lists (input, label[, user]), or dictionaries.
    name: "train" or "test", for errors.
    """
    items = [dataset[row] for row in range(len(dataset))]  # type: ignore[arg-type]
    if not items:
        raise ValueError(f"data: {name} has no samples. Pass at least one sample.")
    if isinstance(items[0], Mapping):
        items = [_split_item(item, row, name) for row, item in enumerate(items)]
    for row, item in enumerate(items):
        if not isinstance(item, (tuple, list)):
            keys = f" with {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
            raise ValueError(
                f"data: item {row} of the data set for {name} is a {type(item).__name__}{keys}. "
                "Return (input, label) from its __getitem__."
            )
    inputs, *labels_and_users = zip(*items, strict=True)
    return (_join_inputs(inputs), *labels_and_users)


def _split_item(item: Mapping[str, Any], row: int, name: str) -> tuple[Any, ...]:
    """Split a sample that is a dictionary into (input, label) or (input, label, user).

    Label and user have usual keys, such as "label" and "user". The input is the only remaining
    value, or a dictionary of all remaining values.
    row: the number of the sample, for errors.
    """
    names = [str(key) for key in item]
    label = find_column(names, LABEL_NAMES)
    if label is None:
        raise ValueError(
            f"data: item {row} of the data set for {name} is a dictionary with {', '.join(names)}, "
            f"but without {', '.join(LABEL_NAMES[:-1])} or {LABEL_NAMES[-1]}. Give the label one "
            "of these names, or return (input, label) from __getitem__."
        )
    user = find_column([key for key in names if key != label], USER_NAMES)
    inputs = {key: value for key, value in item.items() if key not in (label, user)}
    only = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    return (only, item[label]) if user is None else (only, item[label], item[user])


def _join_inputs(inputs: Sequence[Any]) -> Any:
    """Join the inputs of all items of a data set.

    Dictionaries become a dictionary with a list for each key. Tuples of arrays become a tuple of
    arrays [items, ...]. Other inputs become a list.
    """
    first = inputs[0]
    if isinstance(first, Mapping):
        return {key: [item[key] for item in inputs] for key in first}
    array_types = (np.ndarray, torch.Tensor)
    if isinstance(first, tuple) and all(isinstance(part, array_types) for part in first):
        columns = zip(*inputs, strict=True)
        return tuple(np.stack([np.asarray(value) for value in column]) for column in columns)
    return list(inputs)  # a list, because a tuple means several inputs


def _label_lists(column: object, kind: Kind | None) -> LabelLists | None:
    """Return the labels of each sample as a list or a dictionary; None if they are an array.

    A list of lists is an array in each of these cases:
    - `kind` is "positions".
    - A value is neither an integer nor a text.
    - Every list has one value, or all values are integers and all lists have the same length. If
      `kind` is "multilabel", all values must also be 0 or 1.
    """
    if kind == "positions":
        return None
    if is_instance_of(column, "pandas", "Series"):
        series: Any = column
        column = series.tolist() if series.dtype == object else series
    if not isinstance(column, (list, tuple)) or not column:
        return None
    if all(isinstance(row, Mapping) for row in column):
        return list(column)
    if not all(isinstance(row, (list, tuple)) for row in column):
        return None
    rows = [list(row) for row in column]
    items: list[Any] = []
    for row in rows:
        items += row
    if not all(type(label) in (int, str) for label in items):
        return None
    lengths = {len(row) for row in rows}
    has_text = any(isinstance(label, str) for label in items)
    if kind == "multilabel" and not set(items) <= {0, 1}:
        return rows
    if lengths == {1} or (len(lengths) == 1 and not has_text):
        return None
    return rows


def _describe_shape(labels: NDArray[Any] | LabelLists) -> str:
    if isinstance(labels, list):
        return f"labels of {len(labels)} samples"
    return f"labels of shape {labels.shape}"


def _channels_first(inputs: NDArray[Any]) -> NDArray[Any]:
    """Return uint8 images as [n, channels, height, width]; return all other inputs unchanged."""
    if inputs.dtype != np.uint8 or inputs.ndim not in (3, 4):
        return inputs
    if inputs.ndim == 3:
        return inputs[:, None]
    has_channels_last = inputs.shape[1] not in (1, 3) and inputs.shape[3] in (1, 3)
    return inputs.transpose(0, 3, 1, 2) if has_channels_last else inputs


def _concatenate(
    parts: Sequence[NDArray[Any] | LabelLists], name: str
) -> NDArray[Any] | LabelLists:
    """Join the values of one column in the training data and in the test data.

    parts: the column of the training data, then that of the test data if there are any. A column is
    an array, or a list with the labels of each sample.
    name: the column's name in errors.
    """
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if not arrays:
        rows: LabelLists = []
        for part in parts:
            rows += part
        return rows
    if len(arrays) < len(parts):
        raise ValueError(
            f"data: {name} are lists in one of the two parts (training and test data) and an "
            "array in the other part. Give lists for both, or an array for both."
        )
    shapes = [array.shape[1:] for array in arrays]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"data: {name} for training and for tests have the shapes "
            f"{' and '.join(map(str, shapes))}. Give both the same shape."
        )
    return np.concatenate(arrays)


def _digest(
    columns: Sequence[NDArray[Any] | LabelLists],
    train_rows: int,
    fields: tuple[InputField, ...],
) -> str:
    digest = hashlib.blake2b(str(train_rows).encode(), digest_size=8)
    if fields:
        digest.update(str(fields).encode())
    for column in columns:
        if isinstance(column, list):
            digest.update(json.dumps(column).encode())
            continue
        digest.update(f"{column.dtype} {column.shape}".encode())
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()
