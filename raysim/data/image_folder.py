"""Read pictures from folders root/class/ or root/domain/class/."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raysim.data.pictures import PICTURE_SUFFIXES, Picture
from raysim.data.raw import Raw, Source, require_root
from raysim.data.rows import choose_test_rows, number_domains, number_labels, train_first
from raysim.primitives.checks import in_range
from raysim.primitives.files import existing_file, regular_file

SPLITS = ("train", "test")
CSV_COLUMNS = ("path", "domain", "class", "split")


class PictureFile(NamedTuple):
    """A picture file with its domain, its class and its split.

    path: relative to the root, the folder `data.root`.
    domain: the outer folder of root/domain/class/, or the name of the root for root/class/.
    split: "train", "test", or "" if unknown.

    A file split.csv in the root gives all values.
    """

    path: str
    domain: str
    class_name: str
    split: str


@dataclass(frozen=True)
class ImageFolder(Source):
    """A source of pictures in root/class/ or root/domain/class/.

    These folders may also be inside root/train/ and root/test/. A file root/split.csv may list the
    pictures in the columns path, domain, class and split ("train" or "test").
    test_fraction: the share of pictures for testing, evenly spread over the file names. The same
    share is taken from each domain and each of its classes. `test_fraction` is not used if there is
    a split.csv, or if root/train/ and root/test/ both exist.
    """

    root: str | None = None
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        root = self._root_folder()
        pictures = [root / picture.path for picture in self._find_pictures()]
        return existing_file(root / "split.csv") + pictures

    def read(self) -> Raw:
        pictures = self._find_pictures()
        root = self._root_folder()
        class_names = np.array([picture.class_name for picture in pictures])
        classes, names = number_labels(class_names, None, str(root))
        domain_names = np.array([picture.domain for picture in pictures])
        if pictures[0].split:
            is_test = np.array([picture.split == "test" for picture in pictures])
        else:
            _, domain_numbers = np.unique(domain_names, return_inverse=True)
            is_test = choose_test_rows(domain_numbers * len(names) + classes, self.test_fraction)
        domains, numbered_names = number_domains(domain_names, ~is_test)
        order, train_rows = train_first(is_test)
        paths = [root / pictures[row].path for row in order.tolist()]
        inputs = (Picture(str(path), path) for path in paths)
        return Raw(inputs, classes[order], train_rows, names, domains[order], numbered_names)

    def _root_folder(self) -> Path:
        content = "a folder with a subfolder of pictures per class"
        root = require_root(self.root, "data=image_folder", content)
        if not root.is_dir():
            raise ValueError(f"data.root={self.root} is not a folder. Set data.root to {content}.")
        return root

    def _find_pictures(self) -> list[PictureFile]:
        """Return all pictures, sorted by path."""
        root = self._root_folder()
        table = existing_file(root / "split.csv")
        pictures = _read_split_file(table[0]) if table else _search(root)
        if not pictures:
            raise ValueError(
                f"data.root={root} has no pictures class/*.jpg or domain/class/*.jpg. Set "
                "data.root to a folder with such pictures."
            )
        return sorted(pictures)


def _read_split_file(path: Path) -> list[PictureFile]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = sorted(set(CSV_COLUMNS) - set(reader.fieldnames or ()))
            if missing:
                raise ValueError(f"the column {missing[0]} is missing")
            rows = []
            for values in reader:
                rows.append([values[column] for column in CSV_COLUMNS])
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} is not a table of path, domain, class and split ({error}). Correct it."
        ) from error
    pictures = []
    for line, row in enumerate(rows, 2):
        if any(value is None or "\0" in value for value in row):
            raise ValueError(
                f"{path}, line {line}: the value of path, domain, class or split is missing or "
                "contains a NUL character. Correct it."
            )
        pictures.append(PictureFile(*row))
    for picture in pictures:
        if picture.split not in SPLITS:
            raise ValueError(
                f"{path}: the split of {picture.path} is {picture.split}. Write train or test."
            )
        if not (path.parent / picture.path).is_file():
            raise ValueError(
                f"{path} names {picture.path}, which is missing. Remove the row or restore the "
                "file."
            )
    return pictures


def _search(root: Path) -> list[PictureFile]:
    """Return the pictures below a folder.

    The split of each picture is the folder train or test that contains it. It is "" if `root` does
    not contain both of these folders.
    root: the folder.
    """
    if not all((root / split).is_dir() for split in SPLITS):
        return _search_split(root, root, "")
    pictures = []
    for split in SPLITS:
        pictures += _search_split(root, root / split, split)
    return pictures


def _search_split(root: Path, folder: Path, split: str) -> list[PictureFile]:
    """Return the pictures of one split, which are in class/ or domain/class/ below `folder`.

    root: the folder to which the paths of the pictures are relative.
    split: "train", "test", or "" if unknown.
    """
    pictures = []
    depths = set()
    for path in folder.glob("*/**/*"):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if path.suffix.lower() not in PICTURE_SUFFIXES or is_hidden or path.is_dir():
            continue
        regular_file(path)
        if len(parts) not in (2, 3):
            raise ValueError(
                f"{path} is in too many nested folders. Move pictures into class/ or domain/class/ "
                f"below {folder}."
            )
        depths.add(len(parts))
        domain = parts[0] if len(parts) == 3 else root.name
        pictures.append(
            PictureFile("/".join(path.relative_to(root).parts), domain, parts[-2], split)
        )
    if len(depths) > 1:
        raise ValueError(
            f"data.root={root}: {folder} has some pictures in class/ and others in domain/class/. "
            "Use one of these two folder structures for all pictures."
        )
    return pictures
