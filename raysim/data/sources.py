"""List all data sources by name, and define those that download or generate samples.

Each source writes its samples to one Arrow file in the cache (see dataset.py).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysim.data.csr import Ints
from raysim.data.dataset import Dataset, cache_folder
from raysim.data.huggingface import HuggingFace
from raysim.data.image_folder import ImageFolder
from raysim.data.packed import Strips
from raysim.data.parquet import Parquet
from raysim.data.raw import Raw, Source
from raysim.data.rows import choose_test_rows, number_labels, train_first
from raysim.data.shapes import Shapes
from raysim.data.shards import WebDataset
from raysim.data.stored import Stored, find_folder, holds_images
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
    "Shapes",
    "Source",
    "Stored",
    "Strips",
    "Svhn",
    "Synthetic",
    "Tabular",
    "Usps",
    "WebDataset",
]

IDX_FILES = (
    "raw/train-images-idx3-ubyte",
    "raw/train-labels-idx1-ubyte",
    "raw/t10k-images-idx3-ubyte",
    "raw/t10k-labels-idx1-ubyte",
)
IDX_SETS = ("MNIST", "FashionMNIST")
BATCH_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
TORCHVISION_FILES = {  # the files that torchvision's classes read, below their root
    "MNIST": [f"MNIST/{file}" for file in IDX_FILES],
    "FashionMNIST": [f"FashionMNIST/{file}" for file in IDX_FILES],
    "CIFAR10": [f"cifar-10-batches-py/{file}" for file in BATCH_FILES],
    "CIFAR100": [f"cifar-100-python/{file}" for file in ("train", "test", "meta")],
    "SVHN": ["train_32x32.mat", "test_32x32.mat"],
    "USPS": ["usps.bz2", "usps.t.bz2"],
}


# ---- data sets by name ---------------------------------------------------------------------------
@dataclass(frozen=True)
class Digits(Source):
    """A source of the 1,797 digits of scikit-learn, 8x8 pixels, without a download.

    Every fifth image of a class is a test image.
    """

    def read(self) -> Raw:
        from sklearn.datasets import load_digits

        digits = load_digits()
        labels = digits.target.astype(np.int64)
        order, train_rows = train_first(choose_test_rows(labels, 0.2))
        images = np.floor(digits.images * (255 / 16) + 0.5).astype(np.uint8)[:, None]
        names = [str(name) for name in digits.target_names]
        return Raw(images[order], labels[order], train_rows, names)


@dataclass(frozen=True)
class Mnist(Source):
    """A source of MNIST, which torchvision downloads and reads.

    root: the folder that contains MNIST/raw, or that receives the download; None uses the folder of
    stored data sets.
    download: False refuses to download missing files.
    """

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _find_files(self, "MNIST")

    def read(self) -> Raw:
        return _read_set(self, "MNIST")


@dataclass(frozen=True)
class FashionMnist(Source):
    """A source of Fashion-MNIST, which torchvision downloads and reads.

    root: the folder that contains FashionMNIST/raw, or that receives the download; None uses the
    folder of stored data sets.
    download: False refuses to download missing files.
    """

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _find_files(self, "FashionMNIST")

    def read(self) -> Raw:
        return _read_set(self, "FashionMNIST")


@dataclass(frozen=True)
class Cifar10(Source):
    """A source of CIFAR-10, which torchvision downloads and reads.

    root: the folder that contains cifar-10-batches-py, or that receives the download; None uses the
    folder of stored data sets.
    download: False refuses to download missing files.
    """

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _find_files(self, "CIFAR10")

    def read(self) -> Raw:
        return _read_set(self, "CIFAR10")


@dataclass(frozen=True)
class Cifar100(Source):
    """A source of CIFAR-100, which torchvision downloads and reads.

    root: the folder that contains cifar-100-python, or that receives the download; None uses the
    folder of stored data sets.
    download: False refuses to download missing files.
    """

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _find_files(self, "CIFAR100")

    def read(self) -> Raw:
        return _read_set(self, "CIFAR100")


@dataclass(frozen=True)
class Svhn(Source):
    """A source of SVHN, which torchvision downloads and reads, without the split `extra`.

    root: the folder of train_32x32.mat, to which missing files are downloaded; None uses the folder
    of stored data sets.
    download: False refuses downloads.
    """

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _find_files(self, "SVHN")

    def read(self) -> Raw:
        return _read_set(self, "SVHN")


@dataclass(frozen=True)
class Usps(Source):
    """A source of USPS, which torchvision downloads and reads.

    root: the folder that contains usps.bz2, or that receives the download; None uses the folder of
    stored data sets.
    download: False refuses to download missing files.
    """

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _find_files(self, "USPS")

    def read(self) -> Raw:
        return _read_set(self, "USPS")


Downloadable: TypeAlias = Mnist | FashionMnist | Cifar10 | Cifar100 | Svhn | Usps


def _find_files(source: Downloadable, set_name: str) -> list[Path]:
    """Return the files of a data set of torchvision; download them if they are missing.

    They may also be strips, Parquet files or pictures in a folder that has the data set's name.
    set_name: the class in torchvision.datasets, such as "MNIST".
    Raise ValueError if the files cannot be found or downloaded.
    """
    root = _root_folder(source)
    folder = _find_complete_folder(root, set_name)
    if folder:
        return [folder / name for name in TORCHVISION_FILES[set_name]]
    stored = _find_stored(root, set_name)
    if stored:
        return stored.files()
    missing = next(name for name in TORCHVISION_FILES[set_name] if not (root / name).is_file())
    if not source.download:
        raise ValueError(
            f"data.root={root} does not hold {set_name}: {missing} is missing. Give the folder "
            "that holds it, or set data.download=true."
        )
    with wait_for_folder(root, "data.root"):
        _download(root, set_name, missing)
    return [root / name for name in TORCHVISION_FILES[set_name]]


def _read_set(source: Downloadable, set_name: str) -> Raw:
    root = _root_folder(source)
    folder = _find_complete_folder(root, set_name)
    stored = None if folder else _find_stored(root, set_name)
    return stored.read() if stored else _read_torchvision(folder or root, set_name)


def _root_folder(source: Downloadable) -> Path:
    return user_path(source.root) if source.root else cache_folder(source.cache)


def _find_complete_folder(root: Path, set_name: str) -> Path | None:
    """Return the folder that contains all files of a data set of torchvision, or None.

    The folder is `root`, or the folder `set_name` inside `root`.
    set_name: the class in torchvision.datasets, such as "MNIST".
    """
    for folder in (root, find_folder(root, set_name)):
        if folder and all((folder / name).is_file() for name in TORCHVISION_FILES[set_name]):
            return folder
    return None


def _find_stored(root: Path, set_name: str) -> Stored | None:
    folder = find_folder(root, set_name)
    return Stored(root=str(folder)) if folder and holds_images(folder) else None


def _download(folder: Path, set_name: str, missing: str) -> None:
    processed = folder / set_name / "processed"
    if set_name in IDX_SETS and processed.is_dir():
        raise ValueError(
            f"data.root={folder} does not hold {set_name}: {missing} is missing, and torchvision "
            f"cannot download it because an old version of torchvision wrote {processed}. Remove "
            f"the folder {processed.name}."
        )
    try:
        for split in ("train", "test"):
            _open_split(folder, set_name, split, download=True)
    except Exception as error:  # torchvision and the network can raise any error
        raise ValueError(
            f"data.root={folder} does not hold {set_name} ({missing} is missing), and its download "
            f"failed ({_download_error(error)}). Set data.root to a folder that holds it."
        ) from error


def _download_error(error: Exception) -> str:
    """Describe why a download failed: the reason in a `urlopen` error, or else the whole error."""
    reasons = re.findall(r"<urlopen error (?:\[[^]]*\] )?(.*?)>", str(error))
    return reasons[0] if reasons else str(error)


def _read_torchvision(folder: Path, set_name: str) -> Raw:
    place = f"data.root={folder}: {set_name}"
    try:
        train_images, train_labels, class_names = _read_split(folder, set_name, "train")
        test_images, test_labels, _ = _read_split(folder, set_name, "test")
    except Exception as error:  # with a damaged file torchvision can raise any error
        raise ValueError(f"{place} cannot be read ({error}). Download it again.") from error
    halves = ((train_images, train_labels, "training"), (test_images, test_labels, "testing"))
    for images, labels, use in halves:
        if len(images) != len(labels):
            raise ValueError(
                f"{place} has {len(images)} images and {len(labels)} labels for {use}. Download it "
                "again."
            )
    if train_images.shape[2:] != test_images.shape[2:]:
        raise ValueError(
            f"{place} has images of {_pixels(train_images)} pixels for training and of "
            f"{_pixels(test_images)} for testing. Download it again."
        )
    all_labels = np.concatenate([train_labels, test_labels])
    numbers, names = number_labels(all_labels, class_names, place)
    return Raw(np.concatenate([train_images, test_images]), numbers, len(train_labels), names)


def _pixels(images: NDArray[np.uint8]) -> str:
    return f"{images.shape[2]} x {images.shape[3]}"


def _read_split(
    folder: Path, set_name: str, split: str
) -> tuple[NDArray[np.uint8], Ints, list[str]]:
    """Return the images [n, c, h, w], labels and class names of one split.

    If torchvision has no class names, the names are "0" to "9".
    folder: the folder of torchvision's files.
    set_name: the class in torchvision.datasets, such as "MNIST".
    split: "train" or "test".
    """
    if set_name in IDX_SETS:
        # torchvision's class would read a pickle of an old version next to these files
        from torchvision.datasets import mnist

        names = TORCHVISION_FILES[set_name]
        image_file, label_file = names[:2] if split == "train" else names[2:]
        pixels = mnist.read_image_file(str(folder / image_file)).numpy()[:, None]
        labels = mnist.read_label_file(str(folder / label_file)).numpy()
        return pixels, labels, list(getattr(mnist, set_name).classes)
    loaded = _open_split(folder, set_name, split, download=False)
    pixels = np.asarray(loaded.data)
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif set_name != "SVHN":  # SVHN already has its channels first
        pixels = pixels.transpose(0, 3, 1, 2)
    labels = np.asarray(loaded.labels if set_name == "SVHN" else loaded.targets, dtype=np.int64)
    return pixels, labels, list(getattr(loaded, "classes", "0123456789"))


def _open_split(folder: Path, set_name: str, split: str, download: bool) -> Any:
    """Return torchvision's data set of one split.

    folder: the folder of torchvision's files.
    set_name: the class in torchvision.datasets, such as "MNIST".
    split: "train" or "test".
    download: True downloads missing files.
    """
    import torchvision

    selection: dict[str, Any] = {"train": split == "train"}
    if set_name == "SVHN":
        selection = {"split": split}
    dataset = getattr(torchvision.datasets, set_name)
    return dataset(str(folder), download=download, **selection)


@dataclass(frozen=True)
class Synthetic(Source):
    """A source of random images around Gaussian class prototypes, for tests and timing.

    A pixel is 128 + 32 (p + s + e), limited to 0 to 255. For each pixel, p is drawn once for a
    class, s once for a domain, and e for each image. All three are normal with the mean 0; p has
    the standard deviation 1.
    shape: the shape of an image, [channels, height, width].
    samples, test_samples: the numbers of training samples and of central test samples.
    noise: the standard deviation of e.
    shift: the standard deviation of s. With one domain, s is 0.
    seed: the seed of the data, which the run's seed does not change.
    """

    shape: list[int] = field(default_factory=lambda: [1, 8, 8])
    classes: int = 10
    domains: int = 1
    samples: int = 1000
    test_samples: int = 200
    noise: float = 1.0
    shift: float = 1.0
    seed: int = 0

    def check(self) -> None:
        is_image = len(self.shape) == 3 and self.shape[0] in (1, 3) and min(self.shape) >= 1
        require(
            "data.shape", self.shape, is_image, "[channels, height, width] with 1 or 3 channels"
        )
        for key in ("classes", "domains", "samples"):
            at_least(f"data.{key}", getattr(self, key), 1)
        for key in ("test_samples", "noise", "shift", "seed"):
            at_least(f"data.{key}", getattr(self, key), 0)
        images = self.samples + self.test_samples
        patterns = self.classes + self.domains
        size = math.prod(self.shape)
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
        class_names = [str(label) for label in range(self.classes)]
        domain_names = [f"domain {number}" for number in range(self.domains)]
        return Raw(images, labels, self.samples, class_names, domains, domain_names)
