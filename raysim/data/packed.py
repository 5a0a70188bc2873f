"""Strips: many equal images stacked from top to bottom in one lossless picture file, with labels and names beside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raysim.data.partition import Ints
from raysim.data.pictures import Picture, are_names, numbered
from raysim.data.raw import Raw, Source
from raysim.primitives.checks import require
from raysim.primitives.files import existing_file, parse_json, user_path


@dataclass(frozen=True)
class Strips(Source):
    """The files <split>-000.png, -001.png, ... and <split>-labels.npy in a folder, with meta.json (`classes`).

    root: that folder, or the one around it; `name` is the folder in it. The splits are train and test, others are not
    read. The images are square unless meta.json says how many pixels high they are (`height`).
    """

    root: str | None = None
    name: str | None = None

    def files(self) -> list[Path]:
        folder = self.folder()
        return [
            *existing_file(folder / "meta.json"),
            *(path for split in ("train", "test") for path in _files(folder, split)),
        ]

    def read(self) -> Raw:
        folder = self.folder()
        height, names = _meta(folder / "meta.json")
        parts = [_split(folder, split, height) for split in ("train", "test")]
        shapes = [images.shape[1:] for images, _ in parts]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{folder} has images of the shape {shapes[0]} for training and {shapes[1]} for testing."
            )
        labels, class_names = numbered(
            np.concatenate([labels for _, labels in parts]), names, str(folder)
        )
        images = np.concatenate([images for images, _ in parts])
        return Raw(images, labels, len(parts[0][1]), class_names, domain_names=[folder.name])

    def folder(self) -> Path:
        """Where the files are. Raises ValueError when they are not there."""
        folder = user_path(self.root or "")
        folder = folder / self.name if self.name and (folder / self.name).is_dir() else folder
        for split in ("train", "test"):
            if not self.root or not all(path.is_file() for path in _files(folder, split)):
                raise ValueError(
                    f"data.root={self.root} holds no {self.name or 'strips'}: looked for {split}-000.png (or .webp) "
                    f"and {split}-labels.npy in {folder if self.root else 'it'}; name the folder that has them."
                )
        return folder


def are_strips(folder: Path) -> bool:
    """Whether the folder holds labels of strips."""
    return (folder / "train-labels.npy").is_file()


def _files(folder: Path, split: str) -> list[Path]:
    """The split's strips in order, and its labels last."""
    strips = sorted(folder.glob(f"{split}-[0-9]*.*"))
    return [*(strips or [folder / f"{split}-000.png"]), folder / f"{split}-labels.npy"]


def _meta(path: Path) -> tuple[int | None, list[str] | None]:
    """Height of one image, and the names of the classes, as far as the file says."""
    there = existing_file(path)
    try:
        meta = parse_json(path.read_bytes()) if there else {}
        height, names = meta.get("height"), meta.get("classes")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is no readable JSON mapping ({error}): fetch it again."
        ) from error
    require(
        f"{path}: height",
        height,
        height is None or (type(height) is int and height > 0),
        "a number of pixels",
    )
    require(
        f"{path}: classes", names, names is None or are_names(names), "a list of different texts"
    )
    return height, names


def _split(folder: Path, split: str, height: int | None) -> tuple[NDArray[np.uint8], Ints]:
    """The images of all strips of a split, uint8 [n, c, h, w], and their labels."""
    *strips, file = _files(folder, split)
    try:
        with file.open("rb") as content:
            labels = np.lib.format.read_array(content)  # never unpickles
    except Exception as error:  # a damaged header fails in many ways
        raise ValueError(f"{file} is no readable NumPy file ({error}): fetch it again.") from error
    if labels.dtype.kind not in "iuU":
        raise ValueError(
            f"{file} has labels of type {labels.dtype}: they must be integers or text."
        )
    parts = [_cut(path, height) for path in strips]
    for path, part in zip(strips, parts, strict=True):
        if part.shape[1:] != parts[0].shape[1:]:
            raise ValueError(
                f"{path} has images of the shape {part.shape[1:]} (channels, height, width), the strips before it "
                f"{parts[0].shape[1:]}: they must be equal."
            )
    images = np.concatenate(parts)
    if labels.shape != (len(images),):
        raise ValueError(
            f"{file} has labels of the shape {labels.shape}, its strips hold {len(images)} images."
        )
    return images, labels


def _cut(path: Path, height: int | None) -> NDArray[np.uint8]:
    picture = Picture(str(path), path).open()
    grey = picture.mode in ("1", "L", "LA")
    pixels = np.asarray(picture.convert("L" if grey else "RGB"))
    total, width = pixels.shape[:2]
    if total % (height or width):
        raise ValueError(
            f"{path} is {total} pixels high, no multiple of {height or width}: a strip holds whole images from top to "
            "bottom."
        )
    images = pixels.reshape(-1, height or width, width, 1 if grey else 3)
    return images.transpose(0, 3, 1, 2)
