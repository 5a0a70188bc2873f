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

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.primitives.files import alone, replace_file, user_path, whole

FORMAT = 2  # raise it when the same settings give other bytes


@dataclass(frozen=True, eq=False)
class Samples:
    """A whole data set in memory: training rows first, then the central test rows."""

    images: NDArray[np.uint8]  # [n, c, h, w]
    labels: NDArray[np.int64]
    domains: NDArray[np.int64]
    train_rows: int
    class_names: list[str]
    domain_names: list[str]


class Dataset:
    """A memory-mapped data set; all arrays are read-only views of the file, and pickling sends only the path."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError when the file is missing or damaged; its checksum is verified once on each machine."""
        self.path = Path(path)
        try:
            samples = _mapped(self.path)
        except (OSError, pa.ArrowException, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a readable data set ({error}): delete it and it is built again."
            ) from error
        self.shape: tuple[int, int, int] = samples.images.shape[1:]
        self.class_names, self.domain_names = samples.class_names, samples.domain_names
        self.train_rows = samples.train_rows
        self.images, self.labels, self.domains = samples.images, samples.labels, samples.domains

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[type[Dataset], tuple[Path]]:
        return Dataset, (self.path,)

    @property
    def num_classes(self) -> int:
        """Classes the labels may name, also those without a sample."""
        return len(self.class_names)


def cache_folder(cache: str | None) -> Path:
    """The setting, else the environment variable RAYSIM_CACHE, else ~/.cache/raysim."""
    return user_path(cache or os.environ.get("RAYSIM_CACHE") or "~/.cache/raysim")


def cached(cache: str | None, name: str, content: Mapping[str, object], make: Callable[[], Samples]) -> Dataset:
    """The data set that `content` (JSON) determines: opened if it exists, else made and written.

    Processes that ask for the same one at the same time wait for the first; a file appears complete or not at all.
    """
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True)
    path = cache_folder(cache) / f"{name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.arrow"
    if not path.exists():
        with alone(path.parent, "data.cache"):
            if not path.exists():
                _write(path, make())
    return Dataset(path)


def copied(name: str, read: Callable[[], NDArray[np.uint8]]) -> Path:
    """The file of that name in this machine's cache folder, written from another machine's bytes if it is missing."""
    path = cache_folder(None) / name
    if not path.exists():
        with alone(path.parent, "data.cache"):
            if not path.exists():
                with whole(path) as file:
                    file.write(read().data)
    return path


def _write(path: Path, samples: Samples) -> None:
    header = {
        "shape": samples.images.shape[1:],
        "class_names": samples.class_names,
        "domain_names": samples.domain_names,
        "train_rows": samples.train_rows,
    }
    images = np.ascontiguousarray(samples.images, dtype=np.uint8)
    labels, domains = (np.ascontiguousarray(each, dtype=np.int64) for each in (samples.labels, samples.domains))
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(math.prod(images.shape[1:])), len(labels), [None, pa.py_buffer(images.reshape(-1))]
        ),
        pa.array(labels),
        pa.array(domains),
    ]
    batch = pa.record_batch(columns, names=["image", "label", "domain"])
    text = json.dumps(header)
    metadata = {"raysim": text, "sha256": _checksum(text.encode(), images, labels, domains)}
    with whole(path) as file, pa.ipc.new_file(file, batch.schema.with_metadata(metadata)) as writer:
        writer.write_batch(batch.replace_schema_metadata(metadata))


def _mapped(path: Path) -> Samples:
    """What `_write` wrote, as views of the file. Raises one of many errors where it is damaged."""
    if not path.is_file():
        raise OSError("it is no file")
    batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    batch.validate()
    text = batch.schema.metadata[b"raysim"]
    header = json.loads(text)
    shape = (batch.num_rows, *header["shape"])
    images = np.frombuffer(batch.column(0).buffers()[1], dtype=np.uint8, count=math.prod(shape)).reshape(shape)
    labels, domains = batch.column(1).to_numpy(), batch.column(2).to_numpy()
    if not _verified(path):
        if _checksum(text, images, labels, domains) != batch.schema.metadata[b"sha256"].decode():
            raise ValueError("its checksum is another")
        _mark_verified(path)
    return Samples(images, labels, domains, header["train_rows"], header["class_names"], header["domain_names"])


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
