"""Arrays, tensors and data sets that are given from Python: stored in the cache once, and known by their checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raysim.data.columns import assembled
from raysim.data.labels import labels_of
from raysim.data.raw import Origin, Raw, Source
from raysim.data.values import plain_array, type_name

COLUMNS = ("inputs", "labels", "users")


@dataclass(frozen=True, eq=False)
class GivenArrays:
    """A user's own arrays, while they are stored."""

    inputs: NDArray[Any]
    labels: NDArray[Any]
    users: NDArray[Any] | None
    test: NDArray[np.bool_]


_given: dict[str, GivenArrays] = {}  # by checksum


@dataclass(frozen=True)
class Arrays(Source):
    """What `store_arrays` made of a user's own arrays. digest: their checksum."""

    digest: str = ""

    def read(self) -> Raw:
        if self.digest not in _given:
            raise ValueError(
                f"data.digest={self.digest}: these arrays were given from Python, and the cache of this machine lacks "
                "them: give them again, raysim.run(data=...)."
            )
        given = _given[self.digest]
        labels = labels_of(given.labels, self.kind, None, "data")
        users = "" if given.users is None else "the third array"
        origin = Origin(
            f"the first array ({given.inputs.dtype})",
            f"the second array ({type_name(given.labels)})",
            users,
        )
        return assembled(given.inputs, labels, given.users, given.test, None, origin)


def store_arrays(data: object, settings: Mapping[str, Any] | None = None) -> Arrays:
    """Store a user's own samples and return their source.

    settings: arguments of `Arrays`.
    data: (inputs, labels), of which no row is for central tests; ((inputs, labels), (inputs, labels)), the second for
    tests, or {"train": ..., "test": ...}. Arrays, tensors, lists; or a `torch.utils.data.Dataset` in place of a pair.
    Inputs [n, ...], images [n, h, w], [n, c, h, w] or [n, h, w, c]; a pandas frame is a table of numbers. Labels [n]
    are classes or values, see `labels.inferred_kind`; [n, labels] several labels (0 or 1) or several values. A third
    column, users [n] (integers or text), says whose sample each is, for `partition=natural`.
    """
    train, test = _halves(data)
    parts = [
        _columns(part, name)
        for part, name in ((train, "train"), (test, "test"))
        if part is not None
    ]
    if len({len(columns) for columns in parts}) > 1:
        raise ValueError(
            "data: users are given for training or for tests alone: give them for both."
        )
    columns = [
        _joined(halves, what)
        for halves, what in zip(zip(*parts, strict=True), COLUMNS, strict=False)
    ]
    inputs, labels, *users = columns
    test = np.arange(len(labels)) >= len(parts[0][1])
    source = Arrays(digest=_digest(columns, int((~test).sum())), **(settings or {}))
    _given[source.digest] = GivenArrays(inputs, labels, users[0] if users else None, test)
    try:
        source.build()
    finally:
        del _given[source.digest]
    return source


def _halves(data: object) -> tuple[object, object]:
    """What is for training, and what for central tests."""
    if isinstance(data, Mapping) and {"train"} <= data.keys() <= {"train", "test"}:
        return data["train"], data.get("test")
    if isinstance(data, Dataset):
        return data, None
    if isinstance(data, (tuple, list)) and len(data) in (2, 3):
        halves = len(data) == 2 and isinstance(data[0], (tuple, Dataset))
        return (data[0], data[1]) if halves else (data, None)
    if isinstance(data, DataLoader):
        raise ValueError(
            "data=DataLoader is not understood: give the data set that it reads, loader.dataset."
        )
    many = f" of {len(data)}" if isinstance(data, (tuple, list)) else ""
    raise ValueError(
        f"data={type(data).__name__}{many} is not understood: give (inputs, labels) or (inputs, labels, users), a pair "
        'of such for training and test or {"train": ..., "test": ...}, or a torch Dataset.'
    )


def _columns(part: object, name: str) -> tuple[np.ndarray, ...]:
    """Inputs, labels and perhaps users of one half."""
    if isinstance(part, TensorDataset):
        part = part.tensors
    if isinstance(part, Dataset):
        part = tuple(zip(*(part[row] for row in range(len(part))), strict=True))  # type: ignore[arg-type]
    if not isinstance(part, (tuple, list)) or len(part) not in (2, 3):
        raise ValueError(
            f"data: what is for {name} must be (inputs, labels) or (inputs, labels, users), not {type(part).__name__}."
        )
    is_frame = isinstance(part[0], (pd.DataFrame, pa.Table, pa.RecordBatch))
    inputs, labels, *users = (
        plain_array(column, f"data: the {what} for {name}")
        for column, what in zip(part, COLUMNS, strict=False)
    )
    if not (inputs.size and labels.size):
        raise ValueError(
            f"data: {name} has inputs of shape {inputs.shape} and labels of shape {labels.shape}, and so no samples: "
            "give it some."
        )
    if len(inputs) != len(labels):
        raise ValueError(
            f"data: {name} has inputs of shape {inputs.shape} and labels of shape {labels.shape}: give each input one "
            "label."
        )
    users = [column.reshape(-1) if column.shape == (len(labels), 1) else column for column in users]
    for column in users:
        if column.shape != (len(labels),) or column.dtype.kind not in "iuU":
            raise ValueError(
                f"data: {name} has users of shape {column.shape} ({column.dtype}) for {len(labels)} samples: give each "
                "sample one, an integer or text."
            )
    if is_frame and inputs.dtype.kind in "biu":  # columns of a table are numbers, and no tokens
        inputs = inputs.astype(np.float64)
    return _channels_first(inputs), labels, *users


def _channels_first(inputs: np.ndarray) -> np.ndarray:
    """Images of 8 bits as [n, c, h, w]; everything else as it is."""
    if inputs.dtype != np.uint8 or inputs.ndim not in (3, 4):
        return inputs
    if inputs.ndim == 3:
        return inputs[:, None]
    return (
        inputs.transpose(0, 3, 1, 2)
        if inputs.shape[1] not in (1, 3) and inputs.shape[3] in (1, 3)
        else inputs
    )


def _joined(columns: tuple[np.ndarray, ...], what: str) -> np.ndarray:
    if len({column.shape[1:] for column in columns}) > 1:
        shapes = " and ".join(str(column.shape[1:]) for column in columns)
        raise ValueError(
            f"data: {what} for training and for tests have the shapes {shapes}: make them alike."
        )
    return np.concatenate(columns)


def _digest(columns: Sequence[np.ndarray], train_rows: int) -> str:
    digest = hashlib.blake2b(str(train_rows).encode(), digest_size=8)
    for array in columns:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
