"""Store a data set as one Arrow file in a cache folder, and read it as a memory map."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.data.csr import Ints
from raysim.primitives.files import open_draft, replace_file, user_path, wait_for_folder
from raysim.primitives.kinds import (
    IGNORED,
    POSITION_KINDS,
    InputField,
    Kind,
    PackedShape,
    TargetField,
    Tokens,
)

Inputs: TypeAlias = NDArray[np.uint8] | NDArray[np.float32] | Ints
# classes [n], or a class for each position [n, ...]; or [n, outputs] with values, or with 1 for
# labels that are present and 0 for absent labels
LabelArray: TypeAlias = Ints | NDArray[np.float32]

FORMAT = 5  # increase this number when the same settings lead to a different file


@dataclass(frozen=True, eq=False)
class Samples:
    """A whole data set in memory: training rows first, then the central test rows.

    inputs: [n, ...]; images are uint8 [n, c, h, w] (channels, height, width).
    labels: class numbers [n], or [n, ...] with a class for each position; or floats [n, outputs] or
    [n, outputs, ...].
    domains: [n], the number of each row's domain.
    class_names: the names of the model's outputs.
    domain_names: the names of the domains, by number.
    tokens: None if inputs are not token sequences.
    columns: the columns of inputs, labels and users, for the plan of a run.
    fields: for several inputs, their descriptions, in the order of a row of `inputs`; else ().
    targets: for labels of several arrays, their descriptions, in the order of a row of `labels`;
    else ().
    tokenizer: the tokenizer of language data; else "".
    """

    inputs: Inputs
    labels: LabelArray
    domains: Ints
    train_rows: int
    class_names: list[str]
    domain_names: list[str]
    kind: Kind = "classification"
    tokens: Tokens | None = None
    columns: str = ""
    fields: tuple[InputField, ...] = ()
    targets: tuple[TargetField, ...] = ()
    tokenizer: str = ""


class Dataset:
    """A memory-mapped data set; its arrays are read-only views of the file."""

    def __init__(self, path: str | Path) -> None:
        """Open the file, and verify its checksum the first time on each machine.

        Raise ValueError if the file is missing or damaged.
        """
        self.path = Path(path)
        try:
            samples = _map_file(self.path)
        except (
            OSError,
            pa.ArrowException,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{path} is not a readable data set ({error}). Delete it if it exists; the next "
                "run builds it again."
            ) from error
        self.shape: tuple[int, ...] = samples.inputs.shape[1:]
        if samples.fields:
            self.shape = PackedShape(samples.fields)
        self.kind, self.tokens, self.targets = samples.kind, samples.tokens, samples.targets
        self.class_names, self.domain_names = samples.class_names, samples.domain_names
        self.train_rows, self.columns = samples.train_rows, samples.columns
        self.tokenizer = samples.tokenizer
        self.inputs, self.labels, self.domains = samples.inputs, samples.labels, samples.domains

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[type[Dataset], tuple[Path]]:
        return Dataset, (self.path,)

    @property
    def num_classes(self) -> int:
        """Return the number of classes, including classes without samples."""
        return len(self.class_names)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Return the shape of a label: () for a class per sample, (h, w) for one per pixel."""
        return self.labels.shape[1:]

    @cached_property
    def has_unlabelled(self) -> bool:
        """Return True if labels are one class per sample, and some samples have no label."""
        return self.kind == "classification" and bool((self.labels == IGNORED).any())

    @property
    def is_images(self) -> bool:
        """Return True if inputs are pictures [channels, height, width] of 8 bits."""
        return self.inputs.dtype == np.uint8 and len(self.shape) == 3

    def groups(self) -> tuple[Ints, list[str]]:
        """Return the class of every row, int64 [n], and the names of the classes.

        Samples without a label are a further class, "unlabelled". If labels are not classes, all
        rows are in one class, "all".
        """
        if self.has_unlabelled:
            groups = np.where(self.labels == IGNORED, self.num_classes, self.labels)
            return groups.astype(np.int64), [*self.class_names, "unlabelled"]
        if self.kind == "classification":
            return cast(Ints, self.labels), self.class_names
        return np.zeros(len(self), np.int64), ["all"]


def cache_folder(cache: str | None) -> Path:
    """Return the folder for stored data sets.

    It is `cache` if it is set, else the environment variable RAYSIM_CACHE, else ~/.cache/raysim.
    cache: `data.cache`; None if the user did not set it.
    """
    return user_path(cache or os.environ.get("RAYSIM_CACHE") or "~/.cache/raysim")


def open_or_build(
    cache: str | None, name: str, content: Mapping[str, object], build: Callable[[], Samples]
) -> Dataset:
    """Open a stored data set; build and write it first if it is not in the cache.

    cache: `data.cache`, the folder of stored data sets; None for the usual folder.
    name: the beginning of the file's name, such as "digits".
    content: the settings that determine the data set. The file's name ends with their checksum.

    Several processes may call this function at once.
    """
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    path = cache_folder(cache) / f"{name}-{digest}.arrow"
    if not path.exists():
        with wait_for_folder(path.parent, "data.cache"):
            if not path.exists():
                _write(path, build())
    return Dataset(path)


def copy_to_cache(name: str, read: Callable[[], NDArray[np.uint8]]) -> Path:
    """Return the path of a file in this machine's cache; write the file if it is missing.

    name: the file's name in the cache folder.
    read: returns the file's bytes.
    """
    path = cache_folder(None) / name
    if not path.exists():
        with wait_for_folder(path.parent, "data.cache"):
            if not path.exists():
                with open_draft(path) as file:
                    file.write(read().data)
    return path


def _write(path: Path, samples: Samples) -> None:
    header = {
        "shape": samples.inputs.shape[1:],
        "dtype": str(samples.inputs.dtype),
        "kind": samples.kind,
        "tokens": samples.tokens,
        "class_names": samples.class_names,
        "domain_names": samples.domain_names,
        "train_rows": samples.train_rows,
        "columns": samples.columns,
    }
    if samples.targets:
        header["targets"] = samples.targets
    if samples.kind in (*POSITION_KINDS, "structure") or samples.labels.ndim > 2:
        header["label_shape"] = samples.labels.shape[1:]
    if samples.fields:
        header["fields"] = samples.fields
    if samples.tokenizer:
        header["tokenizer"] = samples.tokenizer
    inputs = np.ascontiguousarray(samples.inputs)
    labels = np.ascontiguousarray(samples.labels, dtype=_label_dtype(samples.kind))
    domains = np.ascontiguousarray(samples.domains, dtype=np.int64)
    label_column = pa.array(labels) if labels.ndim == 1 else _binary_column(labels)
    columns = [_binary_column(inputs), label_column, pa.array(domains)]
    batch = pa.record_batch(columns, names=["input", "label", "domain"])
    text = json.dumps(header)
    metadata = {"raysim": text, "sha256": _checksum(text.encode(), inputs, labels, domains)}
    with (
        open_draft(path) as file,
        pa.ipc.new_file(file, batch.schema.with_metadata(metadata)) as writer,
    ):
        writer.write_batch(batch.replace_schema_metadata(metadata))


def _label_dtype(kind: Kind) -> type[np.generic]:
    return np.int64 if kind in ("classification", *POSITION_KINDS) else np.float32


def _binary_column(values: NDArray[Any]) -> pa.Array:
    """Store an array [n, ...] as an Arrow column with one entry of bytes for each of the n rows."""
    width = values.itemsize * math.prod(values.shape[1:])
    flat = values.reshape(-1).view(np.uint8)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), len(values), [None, pa.py_buffer(flat)]
    )


def _view_column(column: pa.Array, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return the array that `_write` stored as a column, as a view of the column's memory.

    dtype, shape: the type and the shape of the array.
    """
    # `column.to_numpy` would import pandas, which takes half a second in each worker.
    values = np.frombuffer(column.buffers()[1], dtype=dtype, count=math.prod(shape))
    return values.reshape(shape)


def _map_file(path: Path) -> Samples:
    """Return the data set in a file as arrays that share the file's memory.

    A damaged file raises an error, which can have any type.
    """
    if not path.is_file():
        raise OSError("it is not a file")
    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    batch.validate()
    text = batch.schema.metadata[b"raysim"]
    header = json.loads(text)
    kind, class_names, rows = header["kind"], header["class_names"], batch.num_rows
    inputs = _view_column(batch.column(0), np.dtype(header["dtype"]), (rows, *header["shape"]))
    shape = [] if kind == "classification" else header.get("label_shape", [len(class_names)])
    labels = _view_column(batch.column(1), _label_dtype(kind), (rows, *shape))
    domains = _view_column(batch.column(2), np.int64, (rows,))
    if not _is_verified(path):
        if _checksum(text, inputs, labels, domains) != batch.schema.metadata[b"sha256"].decode():
            raise ValueError("the checksum of the file does not match its content")
        _record_verified(path)
    return Samples(
        inputs,
        labels,
        domains,
        header["train_rows"],
        class_names,
        header["domain_names"],
        kind,
        header["tokens"] and Tokens(*header["tokens"]),
        header["columns"],
        tuple(InputField(name, tuple(shape), has) for name, shape, has in header.get("fields", ())),
        tuple(
            TargetField(name, tuple(shape), has) for name, shape, has in header.get("targets", ())
        ),
        header.get("tokenizer", ""),
    )


def _checksum(header: bytes, *arrays: NDArray[np.generic]) -> str:
    digest = hashlib.sha256(header)
    for array in arrays:
        digest.update(array.data)
    return digest.hexdigest()


def _verification_record(path: Path) -> tuple[Path, str]:
    """Return the path and the expected content of the file that records a verification.

    This machine has verified the data set if this file exists with this content. If the data set's
    file changes, the expected content changes too.
    """
    stat = path.stat()
    record = path.parent / ".verified" / socket.gethostname() / path.name
    return record, f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def _is_verified(path: Path) -> bool:
    record, content = _verification_record(path)
    return record.is_file() and record.read_text() == content


def _record_verified(path: Path) -> None:
    """Record that a data set was verified on this machine, so that this is done only once.

    In a read-only folder nothing is recorded, and each process verifies the data set again.
    path: the file of the data set.
    """
    record, content = _verification_record(path)
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        replace_file(record, content.encode())
