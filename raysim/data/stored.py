"""Find a data set by its name and read it: strips, Parquet files or pictures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from raysim.data.image_folder import ImageFolder
from raysim.data.packed import Strips, are_strips
from raysim.data.parquet import Parquet, has_parquet_files
from raysim.data.pictures import PICTURE_SUFFIXES
from raysim.data.raw import Raw, Source, require_root
from raysim.primitives.checks import in_range
from raysim.primitives.files import user_path


@dataclass(frozen=True)
class Stored(Source):
    """A source that reads a folder with strips, Parquet files or folders of pictures.

    root: the folder of the data set, or a folder that contains it.
    name: the folder inside `root`; case, blanks, hyphens and underscores do not matter. None if
    `root` is the folder of the data set.
    image_column, label_column, domain_column: columns in Parquet files.
    test_fraction: without a test split, this share of each domain's samples is for testing, equally
    in each class.
    """

    root: str | None = None
    name: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    domain_column: str = "domain"
    test_fraction: float = 0.2

    def check(self) -> None:
        in_range("data.test_fraction", self.test_fraction, least=0, below=1)

    def files(self) -> list[Path]:
        try:
            return self.source().files()
        except ValueError as error:
            root = user_path(self.root or "")
            if not self.name or not root.is_dir() or find_folder(root, self.name):
                raise
            raise ValueError(
                f"data.root={root} has no folder {self.name}, and is not a data set itself: {error}"
            ) from error

    def read(self) -> Raw:
        return self.source().read()

    def source(self) -> Strips | Parquet | ImageFolder:
        """Return the source that can read the files in the folder.

        Raise ValueError if `root` is not a folder.
        """
        set_name = self.name or "the images"
        content = f"the folder with {set_name} as strips, Parquet files or folders of pictures"
        option = f"The data set {self.name}" if self.name else "This data set"
        root = require_root(self.root, option, content)
        if not root.is_dir():
            raise ValueError(f"data.root={self.root} is not a folder. Set data.root to {content}.")
        folder = root
        if self.name:
            folder = find_folder(root, self.name) or root
        if are_strips(folder):
            return Strips(root=str(folder))
        if has_parquet_files(folder):
            return Parquet(
                root=str(folder),
                image_column=self.image_column,
                label_column=self.label_column,
                domain_column=self.domain_column,
                test_fraction=self.test_fraction,
            )
        return ImageFolder(root=str(folder), test_fraction=self.test_fraction)


def find_folder(root: Path, name: str) -> Path | None:
    """Return the folder in `root` with this name; None if there is no such folder.

    Upper and lower case are equal. All characters except letters and digits are ignored.
    """
    inner = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    for path in inner:
        if _letters_and_digits(path.name) == _letters_and_digits(name):
            return path
    return None


def holds_images(folder: Path) -> bool:
    """Return True if the folder contains strips, Parquet files or folders of pictures."""
    if are_strips(folder) or has_parquet_files(folder):
        return True
    return any(path.suffix.lower() in PICTURE_SUFFIXES for path in folder.glob("*/**/*"))


def _letters_and_digits(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
