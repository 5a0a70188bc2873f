"""Join several image data sets into one data set; every joined data set becomes a domain.

All images must have one shape. The settings `size` and `channels` of the source convert them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from raysim.data.csr import Ints
from raysim.data.dataset import cache_folder
from raysim.data.pictures import Pixels, stack_images
from raysim.data.raw import Raw, Source
from raysim.data.sources import Cifar10, Cifar100, Digits, FashionMnist, Mnist, Svhn, Usps
from raysim.data.stored import Stored, find_folder, holds_images
from raysim.primitives.checks import require
from raysim.primitives.errors import suggest
from raysim.primitives.files import user_path

TORCHVISION_SOURCES = {
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "svhn": Svhn,
    "usps": Usps,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
}
MAX_CLASSES_IN_MESSAGE = 12


@dataclass(frozen=True)
class Domains(Source):
    """A source of several data sets; domain k is the k-th name in `domains`.

    All must have the same classes in the same order. `size` and `channels` convert their images to
    one shape.
    root: the folder of the data sets and downloads; None uses the folder of stored data sets.
    download: False refuses to download.
    domains: scikit-learn's "digits", data sets that torchvision downloads, or folders in `root`
    with strips, Parquet files or pictures.
    """

    root: str | None = None
    download: bool = True
    domains: list[str] = field(default_factory=lambda: ["mnist", "mnist_m", "svhn", "usps"])

    def check(self) -> None:
        are_different = 0 < len(self.domains) == len(set(self.domains))
        require("data.domains", self.domains, are_different, "a list of different names")

    def files(self) -> list[Path]:
        paths = []
        for name in self.domains:
            source = self._source(name)
            try:
                paths += source.files()
            except ValueError as error:
                raise ValueError(
                    f"{str(error).removesuffix('.')}, or leave {name} out of data.domains."
                ) from error
        return paths

    def read(self) -> Raw:
        parts = [self._source(name).read() for name in self.domains]
        class_names = self._check_classes(parts)
        rows_of_part = _rows_of_parts(parts)
        total = sum(map(len, rows_of_part))
        domains, labels = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int64)
        for number, (part, rows) in enumerate(zip(parts, rows_of_part, strict=True)):
            domains[rows], labels[rows] = number, part.labels
        train_rows = sum(part.train_rows for part in parts)
        images = self._stack_images(parts, rows_of_part)
        return Raw(images, labels, train_rows, class_names, domains, list(self.domains))

    def _check_classes(self, parts: list[Raw]) -> list[str]:
        """Return the class names, which all domains must share; raise ValueError otherwise.

        parts: the samples of each domain.
        """
        for name, part in zip(self.domains, parts, strict=True):
            if part.kind != "classification":
                raise ValueError(
                    f"data.domains: {name} is data for {part.kind}, but every domain must be data "
                    f"for classification. Leave {name} out."
                )
        class_names = _without_words(parts[0].class_names)
        for name, part in zip(self.domains, parts, strict=True):
            names = _without_words(part.class_names)
            if names != class_names:
                raise ValueError(
                    f"data.domains: {name} has the classes {_shorten(names)}, but "
                    f"{self.domains[0]} has {_shorten(class_names)}. All domains must have the "
                    "same classes in the same order. Leave one domain out, or rename its classes."
                )
        return class_names

    def _source(self, name: str) -> Source:
        """Return the source of one domain.

        name: the domain's name in `data.domains`.
        Raise ValueError if no data set has this name.
        """
        if name == "digits":
            return Digits()
        if name in TORCHVISION_SOURCES:
            source = TORCHVISION_SOURCES[name]
            return source(root=self.root, download=self.download, cache=self.cache)
        root = user_path(self.root) if self.root else cache_folder(self.cache)
        folder = find_folder(root, name)
        if folder and holds_images(folder):
            return Stored(root=str(folder))
        hint = suggest(name, ["digits", *TORCHVISION_SOURCES], "known are")
        raise ValueError(
            f"data.domains names {name}, but data.root={root} has no folder {name} with strips, "
            f"Parquet files or pictures. Set data.root to the folder that contains {name}, or "
            f"choose another domain; {hint}."
        )

    def _stack_images(self, parts: list[Raw], rows_of_part: list[Ints]) -> Pixels:
        total = sum(map(len, rows_of_part))
        stack: Pixels | None = None
        for name, part, rows in zip(self.domains, parts, rows_of_part, strict=True):
            pixels = stack_images(part.inputs, len(part.labels), self.size, self.channels)
            if stack is None:
                stack = np.empty((total, *pixels.shape[1:]), dtype=np.uint8)
            if pixels.shape[1:] != stack.shape[1:]:
                raise ValueError(
                    f"data.domains: images of {name} have the shape {pixels.shape[1:]} (channels, "
                    f"height, width), but images of {self.domains[0]} have {stack.shape[1:]}. "
                    "Set data.size and data.channels to convert all images to one shape."
                )
            stack[rows] = pixels
        assert stack is not None, "checked: there is a domain"
        return stack


def _rows_of_parts(parts: list[Raw]) -> list[Ints]:
    """Return for each domain the row numbers of its samples in the joined data set.

    The joined data set has the training samples of all domains first, then all test samples.
    parts: the samples of each domain.
    """
    train_sizes = [part.train_rows for part in parts]
    test_sizes = [len(part.labels) - part.train_rows for part in parts]
    train = np.cumsum([0, *train_sizes])
    test = train[-1] + np.cumsum([0, *test_sizes])
    rows = []
    for number in range(len(parts)):
        train_rows = np.arange(train[number], train[number + 1])
        test_rows = np.arange(test[number], test[number + 1])
        rows.append(np.concatenate((train_rows, test_rows)))
    return rows


def _without_words(names: list[str]) -> list[str]:
    """Shorten class names such as "0 - zero" (torchvision's MNIST) to the number "0"."""
    have_words = all(re.fullmatch(r"\d+ - \w+", name) for name in names)
    return [name.partition(" ")[0] for name in names] if have_words else names


def _shorten(names: list[str]) -> str:
    text = ", ".join(names[:MAX_CLASSES_IN_MESSAGE])
    if len(names) > MAX_CLASSES_IN_MESSAGE:
        text += f", ... ({len(names)})"
    return text
