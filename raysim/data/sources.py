"""Where images come from: data sets that download themselves, Parquet, folders of pictures, synthetic ones.

Each source ends as one cached Arrow file (`dataset.py`). Its settings carry everything that is asked of the data: the
pixels (size, channels), the corruptions (`federated.py` applies them) and the pipeline of the training step
(`batches.py`). Sources fail with one sentence that names the key and the path.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from raysim.data.corruption import Rotation
from raysim.data.dataset import Dataset, Samples, alone, cache_folder, cached
from raysim.data.partition import Ints
from raysim.data.pictures import Picture, numbered, spread_test, stacked, train_first
from raysim.errors import instead
from raysim.streams import stream

__all__ = [
    "Cifar10",
    "Cifar100",
    "Dataset",
    "Digits",
    "FashionMnist",
    "ImageFolder",
    "Mnist",
    "Parquet",
    "Source",
    "Synthetic",
]

PICTURES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"))
MNIST_FILES = tuple(
    f"raw/{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


@dataclass(frozen=True, eq=False)
class Raw:
    """What a source delivers: pixels as stored, or pictures still to be decoded; training rows first."""

    images: NDArray[np.uint8] | Iterable[Picture]
    labels: Ints
    train_rows: int
    class_names: list[str]
    domains: Ints | None = None
    domain_names: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The settings that all sources share. `size` resizes to a square, `channels` makes grey or RGB of every image.

    only: names of the classes to keep, which are numbered in this order; None keeps all.
    """

    only: list[str] | None = None
    size: int | None = None
    channels: Literal[1, 3] | None = None
    cache: str | None = None
    label_noise: float = 0.0
    rotation: Rotation = field(default_factory=Rotation)
    pool: int = 1
    mean: list[float] | None = None
    std: list[float] | None = None
    augment: list[Literal["crop", "flip", "rotate"]] = field(default_factory=list)
    crop_padding: int = 4
    rotate_degrees: float = 30.0

    def __post_init__(self) -> None:
        _within("size", self.size, self.size is None or self.size >= 1, "at least 1, or null")
        _within("channels", self.channels, self.channels in (None, 1, 3), "1, 3 or null")
        _within("label_noise", self.label_noise, 0 <= self.label_noise <= 1, "from 0 to 1")
        _within("pool", self.pool, self.pool >= 1, "at least 1")
        _within("crop_padding", self.crop_padding, self.crop_padding >= 0, "at least 0")
        kinds = {"crop", "flip", "rotate"}
        _within("augment", self.augment, set(self.augment) <= kinds, "a list of crop, flip and rotate, or []")
        _within("rotate_degrees", self.rotate_degrees, 0 <= self.rotate_degrees <= 180, "from 0 to 180")
        _within("only", self.only, self.only is None or self.only, "a list of names, or null")
        _within(
            "std", self.std, self.std is None or all(value > 0 for value in self.std), "above 0 everywhere, or null"
        )
        if (self.mean is None) != (self.std is None):
            raise ValueError(
                f"data.mean={self.mean} and data.std={self.std} belong together: give both, or null for both."
            )
        self.check()

    def check(self) -> None:
        """Refuse settings that cannot be meant."""

    def files(self) -> list[Path]:
        """The files read; names, sizes and times are part of the cached file's name. Downloads what is missing."""
        return []

    def read(self) -> Raw:
        """All images."""
        raise NotImplementedError

    def build(self) -> Dataset:
        """The cached data set without corruptions; the first call on a machine reads, resizes and writes it."""
        shared = {entry.name for entry in fields(Source)} - {"size", "channels"}
        settings = {key: value for key, value in asdict(self).items() if key not in shared}
        settings |= {"only": self.only} if self.only else {}
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in self.files()]
        name = type(self).__name__.lower()
        return cached(self.cache, name, {"source": name, "settings": settings, "files": stats}, self._samples)

    def _samples(self) -> Samples:
        raw = self.read() if self.only is None else _only(self.read(), self.only)
        count = len(raw.labels)
        if not 0 < raw.train_rows <= count:
            raise ValueError(f"data source {type(self).__name__} has no training images: check data.root.")
        domains = np.zeros(count, dtype=np.int64) if raw.domains is None else raw.domains
        names = raw.domain_names or [type(self).__name__.lower()]
        images = stacked(raw.images, count, self.size, self.channels)
        return Samples(images, raw.labels.astype(np.int64), domains, raw.train_rows, raw.class_names, names)


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
        return Raw(images[order], labels[order], train_rows, [str(name) for name in digits.target_names])


@dataclass(frozen=True)
class Mnist(Source):
    """MNIST by torchvision; `root` holds the folder MNIST/raw and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _present(self, "MNIST", [f"MNIST/{file}" for file in MNIST_FILES])

    def read(self) -> Raw:
        return _torchvision(self, "MNIST")


@dataclass(frozen=True)
class FashionMnist(Source):
    """Fashion-MNIST by torchvision; `root` holds the folder FashionMNIST/raw and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _present(self, "FashionMNIST", [f"FashionMNIST/{file}" for file in MNIST_FILES])

    def read(self) -> Raw:
        return _torchvision(self, "FashionMNIST")


@dataclass(frozen=True)
class Cifar10(Source):
    """CIFAR-10 by torchvision; `root` holds cifar-10-batches-py and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        parts = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]
        return _present(self, "CIFAR10", [f"cifar-10-batches-py/{part}" for part in parts])

    def read(self) -> Raw:
        return _torchvision(self, "CIFAR10")


@dataclass(frozen=True)
class Cifar100(Source):
    """CIFAR-100 by torchvision; `root` holds cifar-100-python and is downloaded to where it does not."""

    root: str | None = None
    download: bool = True

    def files(self) -> list[Path]:
        return _present(self, "CIFAR100", [f"cifar-100-python/{part}" for part in ("train", "test", "meta")])

    def read(self) -> Raw:
        return _torchvision(self, "CIFAR100")


Downloadable: TypeAlias = Mnist | FashionMnist | Cifar10 | Cifar100


def _folder(source: Downloadable) -> Path:
    return Path(source.root).expanduser() if source.root else cache_folder(source.cache)


def _present(source: Downloadable, kind: str, names: list[str]) -> list[Path]:
    """The data set's files, downloaded first if one is missing and that is allowed."""
    folder = _folder(source)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing and not source.download:
        raise ValueError(
            f"data.root={folder} holds no {kind}: {missing[0]} is missing there; name the folder that holds it, or set "
            "data.download=true."
        )
    if missing:
        with alone(folder):
            _download(folder, kind, missing[0])
    return [folder / name for name in names]


def _download(folder: Path, kind: str, missing: str) -> None:
    import torchvision

    try:
        getattr(torchvision.datasets, kind)(str(folder), download=True)
    except Exception as error:  # torchvision and the network fail in many ways; the user needs one sentence
        raise ValueError(
            f"data.root={folder} holds no {kind} ({missing} is missing there) and its download failed ({error}): name "
            "a folder that holds it in data.root."
        ) from error


def _torchvision(source: Downloadable, kind: str) -> Raw:
    import torchvision

    try:
        parts = [getattr(torchvision.datasets, kind)(str(_folder(source)), train=train) for train in (True, False)]
    except Exception as error:  # whatever a damaged file makes of torchvision's reader
        raise ValueError(
            f"data.root={_folder(source)}: {kind} cannot be read there ({error}): fetch it again."
        ) from error
    images = np.concatenate([np.asarray(part.data) for part in parts])
    images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    labels = np.concatenate([np.asarray(part.targets) for part in parts])
    return Raw(images, labels, len(parts[0].targets), list(parts[0].classes))


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
        _within("shape", self.shape, valid, "[channels, height, width] with 1 or 3 channels")
        for key in ("classes", "domains", "samples"):
            _within(key, getattr(self, key), getattr(self, key) >= 1, "at least 1")
        for key in ("test_samples", "noise", "shift", "seed"):
            _within(key, getattr(self, key), getattr(self, key) >= 0, "at least 0")

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
        return Raw(images, labels, self.samples, [str(c) for c in range(self.classes)], domains, names)


# ---- data sets of the user's own -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parquet(Source):
    """Folders with train.parquet and test.parquet, or split in parts train-*.parquet, as Hugging Face stores them.

    `root` is one such folder, a list of them, or a folder of them; with several, each is a domain named by its folder.
    An image is its file's bytes, alone or in a struct {bytes, path}; a domain column is used where there is one.
    """

    root: str | list[str] | None = None
    image_column: str = "image"
    label_column: str = "label"
    domain_column: str = "domain"

    def files(self) -> list[Path]:
        return [path for folder in self._folders() for split in ("train", "test") for path in _parts(folder, split)]

    def read(self) -> Raw:
        folders = self._folders()
        tables = [
            (split, folder, path) for split in ("train", "test") for folder in folders for path in _parts(folder, split)
        ]
        columns = [self._columns(path, folder.name, len(folders) > 1) for _, folder, path in tables]
        paths = [path for *_, path in tables]
        labels, class_names = numbered(
            np.concatenate([labels for labels, _ in columns]), _class_names(paths, self.label_column), str(folders[0])
        )
        domains, domain_names = numbered(np.concatenate([domains for _, domains in columns]), None, str(folders[0]))
        train_rows = sum(
            len(found) for (split, *_), (found, _) in zip(tables, columns, strict=True) if split == "train"
        )
        pictures = (picture for path in paths for picture in self._pictures(path))
        return Raw(pictures, labels, train_rows, class_names, domains, domain_names)

    def _folders(self) -> list[Path]:
        if not self.root:
            raise ValueError(
                "data.root is empty: name a folder with train.parquet and test.parquet, or a list of them."
            )
        if isinstance(self.root, list):
            folders = [Path(root).expanduser() for root in self.root]
            names = [folder.name for folder in folders]
            if len(set(names)) < len(names):
                raise ValueError(
                    f"data.root={self.root} has two folders of one name, and a domain is named by its folder."
                )
        else:
            root = Path(self.root).expanduser()
            inner = [] if _parts(root, "train") or not root.is_dir() else sorted(root.iterdir())
            folders = [folder for folder in inner if _parts(folder, "train")] or [root]
        for folder in folders:
            for split in ("train", "test"):
                if not _parts(folder, split):
                    raise ValueError(
                        f"data.root={folder} holds no {split}.parquet: looked for it and for {split}-*.parquet there."
                    )
        return folders

    def _columns(self, path: Path, folder: str, several: bool) -> tuple[NDArray[np.generic], NDArray[np.str_]]:
        """Labels as stored, and the domain's name for each row."""
        names = _schema(path).names
        for key, column in (("image_column", self.image_column), ("label_column", self.label_column)):
            if column not in names:
                raise ValueError(f"{path} has no column {column}, it has {', '.join(names)}: set data.{key}.")
        with _readable(path):
            table = pq.read_table(path, columns=[n for n in names if n in (self.label_column, self.domain_column)])
        if any(column.null_count for column in table.columns):
            raise ValueError(f"{path} has rows without a label or a domain: remove them.")
        labels = table[self.label_column].to_numpy()
        if self.domain_column not in names:
            return labels, np.full(len(labels), folder)
        domains = table[self.domain_column].to_numpy().astype(np.str_)
        return labels, np.char.add(f"{folder}/", domains) if several else domains

    def _pictures(self, path: Path) -> Iterator[Picture]:
        batches = pq.ParquetFile(path).iter_batches(256, columns=[self.image_column])
        rows = itertools.count()
        while True:
            with _readable(path):
                batch = next(batches, None)
            if batch is None:
                return
            for value in batch.column(0).to_pylist():
                yield Picture(f"{path}, row {next(rows)}", value["bytes"] if isinstance(value, dict) else value)


@dataclass(frozen=True)
class ImageFolder(Source):
    """Pictures in root/class/ or root/domain/class/.

    A file root/split.csv with the columns path, domain, class, split (train or test) decides what is there and what
    is test; without one, every class of every domain gives `test_fraction` of its pictures, evenly spread by name.
    """

    root: str | None = None
    test_fraction: float = 0.2

    def check(self) -> None:
        _within("test_fraction", self.test_fraction, 0 <= self.test_fraction < 1, "at least 0 and below 1")

    def files(self) -> list[Path]:
        listed = [self._root() / "split.csv"] if (self._root() / "split.csv").is_file() else []
        return listed + [self._root() / path for path, *_ in self._rows()]

    def read(self) -> Raw:
        rows = self._rows()
        root = self._root()
        classes, class_names = numbered(np.array([row[2] for row in rows]), None, str(root))
        domains, domain_names = numbered(np.array([row[1] for row in rows]), None, str(root))
        if rows[0][3]:
            test = np.array([row[3] == "test" for row in rows])
        else:
            test = spread_test(domains * len(class_names) + classes, self.test_fraction)
        order, train_rows = train_first(test)
        paths = [root / row[0] for row in rows]
        pictures = (Picture(str(paths[row]), paths[row]) for row in order.tolist())
        return Raw(pictures, classes[order], train_rows, class_names, domains[order], domain_names)

    def _root(self) -> Path:
        root = Path(self.root or "").expanduser()
        if not self.root or not root.is_dir():
            raise ValueError(f"data.root={self.root} is no folder: name one with a subfolder of pictures per class.")
        return root

    def _rows(self) -> list[tuple[str, str, str, str]]:
        """(path below root, domain, class, split or "") of every picture, sorted by path."""
        root = self._root()
        rows = _listed(root / "split.csv") if (root / "split.csv").is_file() else _found(root)
        if not rows:
            raise ValueError(
                f"data.root={root} holds no pictures: looked for class/*.jpg and domain/class/*.jpg there."
            )
        return sorted(rows)


def _listed(path: Path) -> list[tuple[str, str, str, str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := {"path", "domain", "class", "split"} - set(reader.fieldnames or ()):
            raise ValueError(f"{path} lacks the column {sorted(missing)[0]}; it needs path, domain, class and split.")
        rows = [(row["path"], row["domain"], row["class"], row["split"]) for row in reader]
    for name, _, _, split in rows:
        if split not in ("train", "test"):
            raise ValueError(f"{path}: split={split} of {name} must be train or test.")
        if not (path.parent / name).is_file():
            raise ValueError(f"{path} names {name}, which is not there: remove the row or restore the file.")
    return rows


def _found(root: Path) -> list[tuple[str, str, str, str]]:
    rows = []
    for path in root.glob("*/**/*"):
        parts = path.relative_to(root).parts
        if path.suffix.lower() not in PICTURES or any(part.startswith(".") for part in parts):
            continue
        if len(parts) not in (2, 3):
            raise ValueError(f"{path} lies too deep: pictures belong into class/ or domain/class/ below {root}.")
        domain = parts[0] if len(parts) == 3 else root.name
        rows.append(("/".join(parts), domain, parts[-2], ""))
    if len({row[0].count("/") for row in rows}) > 1:
        raise ValueError(f"data.root={root} mixes class/ and domain/class/: use one of them for all pictures.")
    return rows


def _parts(folder: Path, split: str) -> list[Path]:
    whole = folder / f"{split}.parquet"
    return [whole] if whole.is_file() else sorted(folder.glob(f"{split}-*.parquet"))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{path} is no readable Parquet file ({error}): fetch it again.") from error


def _schema(path: Path) -> pa.Schema:
    with _readable(path):
        return pq.read_schema(path)


def _class_names(paths: list[Path], label_column: str) -> list[str] | None:
    """The class names that the files' metadata give, ours or Hugging Face's; all files must agree."""
    found: list[str] | None = None
    for path in paths:
        metadata = _schema(path).metadata or {}
        names = json.loads(metadata.get(b"class_names", b"null"))
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        names = names or features.get(label_column, {}).get("names")
        if names and found and names != found:
            raise ValueError(f"{path} names the classes {', '.join(names)}, the files before it {', '.join(found)}.")
        found = found or names
    return found


def _only(raw: Raw, classes: Sequence[str]) -> Raw:
    """What is of these classes; pictures of others are never decoded."""
    if unknown := [name for name in classes if name not in raw.class_names]:
        raise ValueError(f"data.only names {unknown[0]!r}: {instead(unknown[0], raw.class_names, 'the data has')}")
    numbers = np.full(len(raw.class_names), -1)
    numbers[[raw.class_names.index(name) for name in classes]] = np.arange(len(classes))
    labels = numbers[raw.labels]
    kept = labels >= 0
    images = raw.images[kept] if isinstance(raw.images, np.ndarray) else itertools.compress(raw.images, kept)
    domains = None if raw.domains is None else raw.domains[kept]
    train_rows = int(np.count_nonzero(kept[: raw.train_rows]))
    return Raw(images, labels[kept], train_rows, list(classes), domains, raw.domain_names)


def _within(key: str, value: object, holds: object, allowed: str) -> None:
    if not holds:
        raise ValueError(f"data.{key}={value} is out of range: it must be {allowed}.")
