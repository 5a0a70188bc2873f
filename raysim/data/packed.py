"""Read strips: picture files in which many images of equal size are stacked vertically."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raysim.data.csr import Ints
from raysim.data.pictures import Picture
from raysim.data.raw import Raw, Source, require_root
from raysim.data.rows import are_names, number_labels
from raysim.primitives.checks import require
from raysim.primitives.files import existing_file, parse_json

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Strips(Source):
    """A source that reads the files of a folder with strips.

    The training images are in train-000.png (or .webp), train-001.png, and so on. Their labels are
    in train-labels.npy. The names of test files begin with "test" instead. meta.json may have
    `classes`, the names of the classes, and `height`, the height of an image in pixels. Without
    `height`, images are square.
    root: the folder with these files, or a folder that contains it under the name `name`.
    name: the name of the data set, which errors show, too; or None.
    """

    root: str | None = None
    name: str | None = None

    def files(self) -> list[Path]:
        folder = self.folder()
        paths = existing_file(folder / "meta.json")
        for split in SPLITS:
            paths += [*_strip_files(folder, split), _label_file(folder, split)]
        return paths

    def read(self) -> Raw:
        folder = self.folder()
        height, names = _read_description(folder / "meta.json")
        train_images, train_labels = _read_split(folder, "train", height)
        test_images, test_labels = _read_split(folder, "test", height)
        if train_images.shape[1:] != test_images.shape[1:]:
            raise ValueError(
                f"{folder} has images of the shape {train_images.shape[1:]} for training and "
                f"{test_images.shape[1:]} for testing. Give them one shape."
            )
        labels = np.concatenate([train_labels, test_labels])
        numbers, class_names = number_labels(labels, names, str(folder))
        images = np.concatenate([train_images, test_images])
        return Raw(images, numbers, len(train_labels), class_names, domain_names=[folder.name])

    def folder(self) -> Path:
        """Return the folder of the files. Raise ValueError if they are missing."""
        set_name = self.name or "strips"
        root = require_root(self.root, "data=strips", f"the folder with the files of {set_name}")
        folder = root
        if self.name and (root / self.name).is_dir():
            folder = root / self.name
        for split in SPLITS:
            paths = [*_strip_files(folder, split), _label_file(folder, split)]
            if not all(path.is_file() for path in paths):
                raise ValueError(
                    f"data.root={self.root} does not contain {set_name}: {split}-000.png (or "
                    f".webp) or {split}-labels.npy is missing in {folder}. Set data.root to the "
                    "folder that has these files."
                )
        return folder


def are_strips(folder: Path) -> bool:
    """Return True if the folder has a file train-labels.npy, as every folder with strips does."""
    return _label_file(folder, "train").is_file()


def _strip_files(folder: Path, split: str) -> list[Path]:
    """Return the picture files of a split in the order of their names.

    If there are none, return the path that the first file should have.
    folder: the folder of the files.
    split: "train" or "test".
    """
    # `Strips.folder` raises an error if the returned file is missing.
    return sorted(folder.glob(f"{split}-[0-9]*.*")) or [folder / f"{split}-000.png"]


def _label_file(folder: Path, split: str) -> Path:
    return folder / f"{split}-labels.npy"


def _read_description(path: Path) -> tuple[int | None, list[str] | None]:
    """Read the entries `height` (of an image, in pixels) and `classes` (names) of meta.json.

    Return None for an entry that is missing, and (None, None) if the file is missing.
    path: the path of meta.json.
    """
    is_there = bool(existing_file(path))
    try:
        description = parse_json(path.read_bytes()) if is_there else {}
        height, names = description.get("height"), description.get("classes")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a readable JSON object ({error}). Download it again."
        ) from error
    is_height = height is None or (type(height) is int and height > 0)
    require(f"{path}: height", height, is_height, "a number of pixels")
    has_names = names is None or are_names(names)
    require(f"{path}: classes", names, has_names, "a list of different texts")
    return height, names


def _read_split(folder: Path, split: str, height: int | None) -> tuple[NDArray[np.uint8], Ints]:
    """Return all images of a split, uint8 [n, c, h, w], and their labels.

    folder: the folder of the files.
    split: "train" or "test".
    height: the height of an image in pixels; None for square images.
    """
    label_file = _label_file(folder, split)
    try:
        with label_file.open("rb") as content:
            labels = np.lib.format.read_array(content)  # never unpickles
    except Exception as error:  # a damaged header can raise any error
        raise ValueError(
            f"{label_file} is not a readable NumPy file ({error}). Download it again."
        ) from error
    if labels.dtype.kind not in "iuU":
        raise ValueError(f"{label_file} has labels of type {labels.dtype}. Give integers or text.")
    paths = _strip_files(folder, split)
    strips = [_cut_strip(path, height) for path in paths]
    for path, images in zip(paths, strips, strict=True):
        if images.shape[1:] != strips[0].shape[1:]:
            raise ValueError(
                f"{path} has images of the shape {images.shape[1:]} (channels, height, width), but "
                f"earlier strips have {strips[0].shape[1:]}. Give all images the same shape."
            )
    images = np.concatenate(strips)
    if labels.shape != (len(images),):
        raise ValueError(
            f"{label_file} has labels of the shape {labels.shape}, but its strips hold "
            f"{len(images)} images. Give each image one label."
        )
    return images, labels


def _cut_strip(path: Path, height: int | None) -> NDArray[np.uint8]:
    """Return the images that are stacked vertically in one file, uint8 [n, c, h, w].

    height: the height of an image in pixels; None for square images.
    """
    picture = Picture(str(path), path).open()
    is_grey = picture.mode in ("1", "L", "LA")
    pixels = np.asarray(picture.convert("L" if is_grey else "RGB"))
    total, width = pixels.shape[:2]
    height = height or width
    if total % height:
        raise ValueError(
            f"{path} is {total} pixels high, which is not a multiple of {height}. Stack whole "
            "images from top to bottom."
        )
    images = pixels.reshape(-1, height, width, 1 if is_grey else 3)
    return images.transpose(0, 3, 1, 2)
