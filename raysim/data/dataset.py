"""One data set, one Arrow file: written once into a cache folder, memory-mapped by everyone afterwards."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raysim.primitives.files import alone, whole

FORMAT = 1  # raise it when the same settings give other bytes


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
        """Raises ValueError when the file is missing or damaged."""
        self.path = Path(path)
        try:
            batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
            header = json.loads(batch.schema.metadata[b"raysim"])
        except (OSError, pa.ArrowInvalid, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a readable data set ({error}): delete it and it is built again."
            ) from error
        self.shape: tuple[int, int, int] = tuple(header["shape"])
        self.class_names: list[str] = header["class_names"]
        self.domain_names: list[str] = header["domain_names"]
        self.train_rows: int = header["train_rows"]
        pixels = np.frombuffer(
            batch.column(0).buffers()[1], dtype=np.uint8, count=batch.num_rows * math.prod(self.shape)
        )
        self.images: NDArray[np.uint8] = pixels.reshape(batch.num_rows, *self.shape)
        self.labels: NDArray[np.int64] = batch.column(1).to_numpy()
        self.domains: NDArray[np.int64] = batch.column(2).to_numpy()

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
    return Path(cache or os.environ.get("RAYSIM_CACHE") or "~/.cache/raysim").expanduser()


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
    pixels = pa.py_buffer(np.ascontiguousarray(samples.images, dtype=np.uint8).reshape(-1))
    width = math.prod(samples.images.shape[1:])
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(samples.labels), [None, pixels]),
        pa.array(samples.labels, pa.int64()),
        pa.array(samples.domains, pa.int64()),
    ]
    batch = pa.record_batch(columns, names=["image", "label", "domain"])
    batch = batch.replace_schema_metadata({"raysim": json.dumps(header)})
    with whole(path) as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
