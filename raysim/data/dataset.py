"""One data set, one Arrow file: written once into a cache folder, memory-mapped by everyone afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.primitives.files import open_draft, replace_file, user_path, wait_for_folder
from raysim.primitives.kinds import Kind, Tokens

Ints: TypeAlias = NDArray[np.int64]
Inputs: TypeAlias = NDArray[np.uint8] | NDArray[np.float32] | Ints
Labels: TypeAlias = (
    Ints | NDArray[np.float32]
)  # classes [n]; labels that are there (0 or 1) or values [n, outputs]

FORMAT = 5  # raise it when the same settings give other bytes


@dataclass(frozen=True, eq=False)
class Samples:
    """A whole data set in memory: training rows first, then the central test rows."""

    inputs: Inputs  # [n, ...]; images are uint8 [n, c, h, w]
    labels: Labels
    domains: Ints
    train_rows: int
    class_names: list[str]  # of the model's outputs
    domain_names: list[str]
    kind: Kind = "classification"
    tokens: Tokens | None = None  # where inputs are sequences
    columns: str = ""  # what was read as what, for the plan of a run


class Dataset:
    """A memory-mapped data set; all arrays are read-only views of the file, and pickling sends only the path."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError when the file is missing or damaged; its checksum is verified once on each machine."""
        self.path = Path(path)
        try:
            samples = _mapped(self.path)
        except (
            OSError,
            pa.ArrowException,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(
                f"{path} is not a readable data set ({error}): delete it and it is built again."
            ) from error
        self.shape: tuple[int, ...] = samples.inputs.shape[1:]
        self.kind, self.tokens = samples.kind, samples.tokens
        self.class_names, self.domain_names = samples.class_names, samples.domain_names
        self.train_rows, self.columns = samples.train_rows, samples.columns
        self.inputs, self.labels, self.domains = samples.inputs, samples.labels, samples.domains

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[type[Dataset], tuple[Path]]:
        return Dataset, (self.path,)

    @property
    def num_classes(self) -> int:
        """Classes the labels may name, also those without a sample; of other tasks, the model's outputs."""
        return len(self.class_names)

    @property
    def is_images(self) -> bool:
        """Whether inputs are pictures [channels, height, width] of 8 bits."""
        return self.inputs.dtype == np.uint8 and len(self.shape) == 3

    def groups(self) -> tuple[Ints, list[str]]:
        """What partitions and statistics count: the class of every row, or one group of all where there are none."""
        if self.kind == "classification":
            return cast(Ints, self.labels), self.class_names
        return np.zeros(len(self), np.int64), ["all"]


def cache_folder(cache: str | None) -> Path:
    """The setting, else the environment variable RAYSIM_CACHE, else ~/.cache/raysim."""
    return user_path(cache or os.environ.get("RAYSIM_CACHE") or "~/.cache/raysim")


def open_or_build(
    cache: str | None, name: str, content: Mapping[str, object], make: Callable[[], Samples]
) -> Dataset:
    """The data set that `content` (JSON) determines: opened if it exists, else made and written.

    Processes that ask for the same one at the same time wait for the first; a file appears complete or not at all.
    """
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True)
    path = (
        cache_folder(cache)
        / f"{name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.arrow"
    )
    if not path.exists():
        with wait_for_folder(path.parent, "data.cache"):
            if not path.exists():
                _write(path, make())
    return Dataset(path)


def copy_to_cache(name: str, read: Callable[[], NDArray[np.uint8]]) -> Path:
    """The file of that name in this machine's cache folder, written from another machine's bytes if it is missing."""
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
    inputs, domains = (
        np.ascontiguousarray(samples.inputs),
        np.ascontiguousarray(samples.domains, dtype=np.int64),
    )
    labels = np.ascontiguousarray(samples.labels, dtype=_label_type(samples.kind))
    columns = [
        _rows(inputs),
        pa.array(labels) if labels.ndim == 1 else _rows(labels),
        pa.array(domains),
    ]
    batch = pa.record_batch(columns, names=["input", "label", "domain"])
    text = json.dumps(header)
    metadata = {"raysim": text, "sha256": _checksum(text.encode(), inputs, labels, domains)}
    with (
        open_draft(path) as file,
        pa.ipc.new_file(file, batch.schema.with_metadata(metadata)) as writer,
    ):
        writer.write_batch(batch.replace_schema_metadata(metadata))


def _label_type(kind: Kind) -> type[np.generic]:
    return np.int64 if kind == "classification" else np.float32


def _rows(values: NDArray[Any]) -> pa.Array:
    """A column of one binary value per row."""
    width = values.itemsize * math.prod(values.shape[1:])
    flat = values.reshape(-1).view(np.uint8)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(width), len(values), [None, pa.py_buffer(flat)]
    )


def _values(column: pa.Array, kind: Any, shape: tuple[int, ...]) -> Any:
    """What `_rows` wrote, as a view."""
    return np.frombuffer(column.buffers()[1], dtype=kind, count=math.prod(shape)).reshape(shape)


def _mapped(path: Path) -> Samples:
    """What `_write` wrote, as views of the file. Raises one of many errors where it is damaged."""
    if not path.is_file():
        raise OSError("it is no file")
    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    batch.validate()
    text = batch.schema.metadata[b"raysim"]
    header = json.loads(text)
    kind, names = header["kind"], header["class_names"]
    inputs = _values(batch.column(0), np.dtype(header["dtype"]), (batch.num_rows, *header["shape"]))
    labels, domains = batch.column(1), batch.column(2).to_numpy()
    classes = kind == "classification"
    labels = (
        labels.to_numpy()
        if classes
        else _values(labels, _label_type(kind), (batch.num_rows, len(names)))
    )
    if not _verified(path):
        if _checksum(text, inputs, labels, domains) != batch.schema.metadata[b"sha256"].decode():
            raise ValueError("its checksum is another")
        _mark_verified(path)
    tokens = header["tokens"] and Tokens(*header["tokens"])
    rows, domain_names, columns = header["train_rows"], header["domain_names"], header["columns"]
    return Samples(inputs, labels, domains, rows, names, domain_names, kind, tokens, columns)


def _checksum(header: bytes, *arrays: NDArray[np.generic]) -> str:
    digest = hashlib.sha256(header)
    for array in arrays:
        digest.update(array.data)
    return digest.hexdigest()


def _mark(path: Path) -> tuple[Path, str]:
    """Where this machine notes which file it has verified, and what it notes."""
    stat = path.stat()
    return (
        path.parent / ".verified" / socket.gethostname() / path.name,
        f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}",
    )


def _verified(path: Path) -> bool:
    mark, content = _mark(path)
    return mark.is_file() and mark.read_text() == content


def _mark_verified(path: Path) -> None:
    """In a folder that cannot be written, the file is verified again by each process."""
    mark, content = _mark(path)
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        replace_file(mark, content.encode())
