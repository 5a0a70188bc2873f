"""Several sources as one data set: each is a domain, brought to a common size and number of channels."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raysim.data.dataset import cache_folder
from raysim.data.pictures import stacked
from raysim.data.raw import Raw, Source
from raysim.data.sources import Cifar10, Cifar100, Digits, FashionMnist, Mnist, Svhn, Usps
from raysim.data.stored import Stored, holds_images, named_folder
from raysim.primitives.checks import require
from raysim.primitives.errors import suggest
from raysim.primitives.files import user_path

DOWNLOADED = {
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "svhn": Svhn,
    "usps": Usps,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
}


@dataclass(frozen=True)
class Domains(Source):
    """Domain k is the k-th name in `domains`: training rows of all domains first, then their test rows.

    A name is scikit-learn's `digits`, a set that torchvision downloads, or a folder in `root` with strips, Parquet
    files or pictures. All must have the same classes in the same order; `size` and `channels` bring them to one shape.
    """

    root: str | None = None
    download: bool = True
    domains: list[str] = field(default_factory=lambda: ["mnist", "mnist_m", "svhn", "usps"])

    def check(self) -> None:
        distinct = 0 < len(self.domains) == len(set(self.domains))
        require("data.domains", self.domains, distinct, "a list of different names")

    def files(self) -> list[Path]:
        return [path for name in self.domains for path in self._files(name)]

    def read(self) -> Raw:
        parts = [self._part(name).read() for name in self.domains]
        for name, raw in zip(self.domains, parts, strict=True):
            if raw.kind != "classification":
                raise ValueError(
                    f"data.domains: {name} has labels for {raw.kind}, and domains of one data set must have classes: "
                    "leave it out."
                )
        classes = [_bare(raw.class_names) for raw in parts]
        for name, found in zip(self.domains, classes, strict=True):
            if found != classes[0]:
                raise ValueError(
                    f"data.domains: {name} has the classes {_listed(found)}, {self.domains[0]} has "
                    f"{_listed(classes[0])}; domains of one data set must have the same classes in the same order."
                )
        rows = _rows(parts)
        domains, labels = (np.empty(sum(map(len, rows)), dtype=np.int64) for _ in range(2))
        for number, (raw, places) in enumerate(zip(parts, rows, strict=True)):
            domains[places], labels[places] = number, raw.labels
        train_rows = sum(raw.train_rows for raw in parts)
        return Raw(
            self._images(parts, rows), labels, train_rows, classes[0], domains, list(self.domains)
        )

    def _part(self, name: str) -> Source:
        """The source of one domain."""
        if name == "digits":
            return Digits()
        if name in DOWNLOADED:
            return DOWNLOADED[name](root=self.root, download=self.download, cache=self.cache)
        root = user_path(self.root) if self.root else cache_folder(self.cache)
        folder = named_folder(root, name)
        if folder and holds_images(folder):
            return Stored(root=str(folder))
        known = ["digits", *DOWNLOADED]
        raise ValueError(
            f"data.domains names {name}, but data.root={root} has no folder {name} with strips, Parquet files or "
            f"pictures: name the folder around it in data.root, or another domain; {suggest(name, known, 'known are')}."
        )

    def _files(self, name: str) -> list[Path]:
        part = self._part(name)
        try:
            return part.files()
        except ValueError as error:
            raise ValueError(
                f"{str(error).removesuffix('.')}, or leave {name} out of data.domains."
            ) from error

    def _images(self, parts: list[Raw], rows: list[NDArray[np.int64]]) -> NDArray[np.uint8]:
        whole: NDArray[np.uint8] | None = None
        for name, raw, places in zip(self.domains, parts, rows, strict=True):
            pixels = stacked(raw.inputs, len(raw.labels), self.size, self.channels)
            if whole is None:
                whole = np.empty((sum(map(len, rows)), *pixels.shape[1:]), dtype=np.uint8)
            if pixels.shape[1:] != whole.shape[1:]:
                raise ValueError(
                    f"data.domains: images of {name} have the shape {pixels.shape[1:]} (channels, height, width), "
                    f"those of {self.domains[0]} {whole.shape[1:]}: set data.size and data.channels for all."
                )
            whole[places] = pixels
        assert whole is not None, "checked: there is a domain"
        return whole


def _rows(parts: list[Raw]) -> list[NDArray[np.int64]]:
    """Where each part's rows go: the training rows of all parts, one after the other, then the test rows of all."""
    train = np.cumsum([0, *(raw.train_rows for raw in parts)])
    test = train[-1] + np.cumsum([0, *(len(raw.labels) - raw.train_rows for raw in parts)])
    return [
        np.concatenate((np.arange(train[k], train[k + 1]), np.arange(test[k], test[k + 1])))
        for k in range(len(parts))
    ]


def _bare(names: list[str]) -> list[str]:
    """Class names; "0 - zero" and so on, as torchvision has them for MNIST, without the words."""
    worded = all(re.fullmatch(r"\d+ - \w+", name) for name in names)
    return [name.partition(" ")[0] for name in names] if worded else names


def _listed(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f", ... ({len(names)})" if len(names) > 12 else "")
