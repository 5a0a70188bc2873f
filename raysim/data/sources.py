"""Where data come from: every source by its name, and the data sets that download or make themselves.

Each source ends as one cached Arrow file (`dataset.py`). Its settings (`raw.py`) carry everything that is asked of the
data: the pixels (size, channels), the corruptions (`federated.py` applies them) and the pipeline of the training step
(`batches.py`). Sources fail with one sentence that names the key and the path.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysim.data.dataset import Dataset, cache_folder
from raysim.data.huggingface import HuggingFace
from raysim.data.packed import Strips
from raysim.data.partition import Ints
from raysim.data.pictures import numbered, spread_test, train_first
from raysim.data.raw import Raw, Source
from raysim.data.stored import ImageFolder, Parquet, Stored, holds_images, named_folder
from raysim.data.tables import Csv, JsonLines
from raysim.data.tabular import Npz, NumPy, Tabular
from raysim.data.text import Leaf, Markov
from raysim.primitives.checks import at_least, require
from raysim.primitives.files import user_path, wait_for_folder
from raysim.primitives.memory import check_memory
from raysim.primitives.streams import stream

__all__ = [
    "Cifar10",
    "Cifar100",
    "Csv",
    "Dataset",
    "Digits",
    "FashionMnist",
    "HuggingFace",
    "ImageFolder",
    "JsonLines",
    "Leaf",
    "Markov",
    "Mnist",
    "Npz",
    "NumPy",
    "Parquet",
    "Source",
    "Stored",
    "Strips",
    "Svhn",
    "Synthetic",
    "Tabular",
    "Usps",
]

IDX = tuple(
    f"raw/{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
)
IDX_SETS = ("MNIST", "FashionMNIST")
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
TORCHVISION = {  # the files that torchvision's classes read, below their root
    "MNIST": [f"MNIST/{file}" for file in IDX],
    "FashionMNIST": [f"FashionMNIST/{file}" for file in IDX],
    "CIFAR10": [f"cifar-10-batches-py/{file}" for file in BATCHES],
    "CIFAR100": [f"cifar-100-python/{file}" for file in ("train", "test", "meta")],
    "SVHN": ["train_32x32.mat", "test_32x32.mat"],
    "USPS": ["usps.bz2", "usps.t.bz2"],
}


# ---- data sets by name ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digits(Source):
    """scikit-learn's 1,797 8x8 digits, no download; every fifth image of a class is a test image."""

    def read(self) -> Raw:
        from sklearn.datasets import load_digits

        digits = load_digits()
        labels = digits.target.astype(np.int64)
        order, train_rows = train_first(spread_test(labels, 0.2))
        images = np.floor(digits.images * (255 / 16) + 0.5).astype(np.uint8)[:, None]
        return Raw(
            images[order], labels[order], train_rows, [str(name) for name in digits.target_names]
        )


@dataclass(frozen=True)
class Mnist(Source):
    """MNIST by torchvision; `root` holds the folder MNIST/raw and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _files(self, "MNIST")

    def read(self) -> Raw:
        return _read(self, "MNIST")


@dataclass(frozen=True)
class FashionMnist(Source):
    """Fashion-MNIST by torchvision; `root` holds the folder FashionMNIST/raw and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _files(self, "FashionMNIST")

    def read(self) -> Raw:
        return _read(self, "FashionMNIST")


@dataclass(frozen=True)
class Cifar10(Source):
    """CIFAR-10 by torchvision; `root` holds cifar-10-batches-py and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _files(self, "CIFAR10")

    def read(self) -> Raw:
        return _read(self, "CIFAR10")


@dataclass(frozen=True)
class Cifar100(Source):
    """CIFAR-100 by torchvision; `root` holds cifar-100-python and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _files(self, "CIFAR100")

    def read(self) -> Raw:
        return _read(self, "CIFAR100")


@dataclass(frozen=True)
class Svhn(Source):
    """SVHN by torchvision, without `extra`; `root` holds train_32x32.mat and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _files(self, "SVHN")

    def read(self) -> Raw:
        return _read(self, "SVHN")


@dataclass(frozen=True)
class Usps(Source):
    """USPS by torchvision; `root` holds usps.bz2 and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _files(self, "USPS")

    def read(self) -> Raw:
        return _read(self, "USPS")


Downloadable: TypeAlias = Mnist | FashionMnist | Cifar10 | Cifar100 | Svhn | Usps


def _files(source: Downloadable, kind: str) -> list[Path]:
    """The data set's files, downloaded first if one is missing and that is allowed.

    Instead of torchvision's files, a folder of the set's name may hold it as strips, Parquet or pictures.
    """
    root = _root(source)
    if folder := _complete(root, kind):
        return [folder / name for name in TORCHVISION[kind]]
    if stored := _stored(root, kind):
        return stored.files()
    missing = next(name for name in TORCHVISION[kind] if not (root / name).is_file())
    if not source.download:
        raise ValueError(
            f"data.root={root} holds no {kind}: {missing} is missing there; name the folder that holds it, or set "
            "data.download=true."
        )
    with wait_for_folder(root, "data.root"):
        _download(root, kind, missing)
    return [root / name for name in TORCHVISION[kind]]


def _read(source: Downloadable, kind: str) -> Raw:
    folder = _complete(_root(source), kind)
    stored = None if folder else _stored(_root(source), kind)
    return stored.read() if stored else _torchvision(folder or _root(source), kind)


def _root(source: Downloadable) -> Path:
    return user_path(source.root) if source.root else cache_folder(source.cache)


def _complete(root: Path, kind: str) -> Path | None:
    """Root or the folder of the set's name in it, where that has all of torchvision's files."""
    folders = (root, named_folder(root, kind))
    return next(
        (
            each
            for each in folders
            if each and all((each / name).is_file() for name in TORCHVISION[kind])
        ),
        None,
    )


def _stored(root: Path, kind: str) -> Stored | None:
    folder = named_folder(root, kind)
    return Stored(root=str(folder)) if folder and holds_images(folder) else None


def _download(folder: Path, kind: str, missing: str) -> None:
    if kind in IDX_SETS and (processed := folder / kind / "processed").is_dir():
        raise ValueError(
            f"data.root={folder} holds no {kind}: {missing} is missing there, and {processed} of an old torchvision "
            "keeps this one from downloading it: remove it."
        )
    try:
        for split in ("train", "test"):
            _opened(folder, kind, split, download=True)
    except (
        Exception
    ) as error:  # torchvision and the network fail in many ways; the user needs one sentence
        raise ValueError(
            f"data.root={folder} holds no {kind} ({missing} is missing there) and its download failed "
            f"({_reason(error)}): name a folder that holds it in data.root."
        ) from error


def _reason(error: Exception) -> str:
    """What a failed download says, without the address that torchvision puts around it."""
    return next(iter(re.findall(r"<urlopen error (?:\[[^]]*\] )?(.*?)>", str(error))), str(error))


def _torchvision(folder: Path, kind: str) -> Raw:
    place = f"data.root={folder}: {kind}"
    try:
        parts = [_half(folder, kind, split) for split in ("train", "test")]
    except Exception as error:  # whatever a damaged file makes of torchvision's reader
        raise ValueError(f"{place} cannot be read there ({error}): fetch it again.") from error
    for (images, labels, _), what in zip(parts, ("training", "testing"), strict=True):
        if len(images) != len(labels):
            raise ValueError(
                f"{place} has {len(images)} images and {len(labels)} labels for {what}: fetch it again."
            )
    first, second = (f"{images.shape[2]} x {images.shape[3]}" for images, *_ in parts)
    if first != second:
        raise ValueError(
            f"{place} has images of {first} pixels for training and of {second} for testing."
        )
    labels, names = numbered(np.concatenate([labels for _, labels, _ in parts]), parts[0][2], place)
    return Raw(np.concatenate([images for images, *_ in parts]), labels, len(parts[0][1]), names)


def _half(folder: Path, kind: str, split: str) -> tuple[NDArray[np.uint8], Ints, list[str]]:
    """Images [n, c, h, w], labels and class names (digits where torchvision has none) of one split."""
    if (
        kind in IDX_SETS
    ):  # its class would rather read what an old version of itself pickled beside these files
        from torchvision.datasets import mnist

        files = [
            str(folder / name) for name in TORCHVISION[kind][0 if split == "train" else 2 :][:2]
        ]
        pixels = mnist.read_image_file(files[0]).numpy()[:, None]
        return pixels, mnist.read_label_file(files[1]).numpy(), list(getattr(mnist, kind).classes)
    found = _opened(folder, kind, split, download=False)
    pixels = np.asarray(found.data)
    pixels = (
        pixels[:, None]
        if pixels.ndim == 3
        else pixels
        if kind == "SVHN"
        else pixels.transpose(0, 3, 1, 2)
    )
    labels = np.asarray(found.labels if kind == "SVHN" else found.targets, dtype=np.int64)
    return pixels, labels, list(getattr(found, "classes", "0123456789"))


def _opened(folder: Path, kind: str, split: str, download: bool) -> Any:
    """A split as torchvision's class has it."""
    import torchvision

    which = {"split": split} if kind == "SVHN" else {"train": split == "train"}
    return getattr(torchvision.datasets, kind)(str(folder), download=download, **which)


@dataclass(frozen=True)
class Synthetic(Source):
    """Gaussian class prototypes, a shift per domain and noise (relative to the prototypes): for tests and timing."""

    shape: list[int] = field(default_factory=lambda: [1, 8, 8])
    classes: int = 10
    domains: int = 1
    samples: int = 1000
    test_samples: int = 200
    noise: float = 1.0
    shift: float = 1.0
    seed: int = 0

    def check(self) -> None:
        valid = len(self.shape) == 3 and self.shape[0] in (1, 3) and min(self.shape) >= 1
        require("data.shape", self.shape, valid, "[channels, height, width] with 1 or 3 channels")
        for key in ("classes", "domains", "samples"):
            at_least(f"data.{key}", getattr(self, key), 1)
        for key in ("test_samples", "noise", "shift", "seed"):
            at_least(f"data.{key}", getattr(self, key), 0)
        images, patterns, size = (
            self.samples + self.test_samples,
            self.classes + self.domains,
            math.prod(self.shape),
        )
        check_memory(
            f"data.samples={self.samples} and data.test_samples={self.test_samples}", images * 40
        )
        check_memory(f"data.classes={self.classes} and data.domains={self.domains}", patterns * 200)
        check_memory(f"{images} images of data.shape={self.shape}", (images + 4 * patterns) * size)

    def read(self) -> Raw:
        rng = stream(self.seed, "synthetic")
        rows = np.arange(self.samples + self.test_samples)
        labels, domains = rows % self.classes, rows // self.classes % self.domains
        prototypes = rng.standard_normal((self.classes, *self.shape), dtype=np.float32)
        shifts = self.shift * rng.standard_normal((self.domains, *self.shape), dtype=np.float32)
        if self.domains == 1:
            shifts[:] = 0.0
        images = np.empty((len(rows), *self.shape), dtype=np.uint8)
        for part in np.array_split(rows, len(rows) // 10_000 + 1):
            noise = self.noise * rng.standard_normal((len(part), *self.shape), dtype=np.float32)
            values = prototypes[labels[part]] + shifts[domains[part]] + noise
            images[part] = np.clip(128 + 32 * values, 0, 255).astype(np.uint8)
        names = [f"domain {number}" for number in range(self.domains)]
        return Raw(
            images, labels, self.samples, [str(c) for c in range(self.classes)], domains, names
        )
