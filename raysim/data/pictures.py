"""From stored pictures to one uint8 array: decode, make grey or RGB, resize; and how label names become numbers."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from raysim.data.partition import Ints, guarded_floor
from raysim.primitives.files import regular_file

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
PICTURES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
)


@dataclass(frozen=True, eq=False)
class Picture:
    """An encoded picture: its file, or its bytes and a place to name in messages."""

    place: str
    content: Path | bytes | None

    def open(self) -> Image:
        """Raises ValueError with the place when it cannot be decoded to 8 bits per channel."""
        from PIL import Image

        try:
            if self.content is None:
                raise OSError("it is empty")
            if isinstance(self.content, Path):
                regular_file(self.content)
            picture = Image.open(
                self.content if isinstance(self.content, Path) else io.BytesIO(self.content)
            )
            picture.load()
        except Exception as error:  # each of the formats has its own ways to fail
            reason = str(error).replace(f" {str(self.content)!r}", "")
            raise ValueError(
                f"{self.place} is not a readable picture ({reason}): remove it or fetch it again."
            ) from error
        if picture.mode.startswith(("I", "F")):
            raise ValueError(
                f"{self.place} has more than 8 bits per pixel (mode {picture.mode}): convert it to 8 bits."
            )
        return picture


def stacked(
    images: Pixels | Iterable[Picture], count: int, size: int | None, channels: Literal[1, 3] | None
) -> Pixels:
    """All images as uint8 [count, c, h, w]; they must end with one shape, which `size` and `channels` can enforce."""
    if isinstance(images, np.ndarray):
        height, width = images.shape[2:]
        if channels in (None, images.shape[1]) and (size is None or size == height == width):
            return images
        named = ((f"image {row}", picture) for row, picture in enumerate(_as_pictures(images)))
    else:
        named = ((picture.place, picture.open()) for picture in images)
    whole: Pixels | None = None
    for row, (place, picture) in enumerate(named):
        pixels = fitted(picture, size, channels)
        if whole is None:
            whole = np.empty((count, *pixels.shape), dtype=np.uint8)
        if pixels.shape != whole.shape[1:]:
            raise ValueError(
                f"{place} has the shape {pixels.shape} (channels, height, width), the images before it "
                f"{whole.shape[1:]}: set data.size and data.channels to bring all to one shape."
            )
        whole[row] = pixels
    assert whole is not None, "callers check that there are images"
    return whole


def fitted(picture: Image, size: int | None, channels: Literal[1, 3] | None) -> Pixels:
    """One picture as uint8 [c, h, w]: converted first, then resized (bilinear, antialiased) to size x size."""
    from PIL import Image

    grey = picture.mode in ("1", "L", "LA") if channels is None else channels == 1
    picture = picture.convert("L" if grey else "RGB")
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if grey else pixels.transpose(2, 0, 1)


def spread_test(groups: Ints, fraction: float) -> NDArray[np.bool_]:
    """Mask of test rows: `fraction` of each group, rounded down and evenly spread over the group's rows."""
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    rank = np.empty(len(groups), dtype=np.int64)
    rank[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return guarded_floor((rank + 1) * fraction) > guarded_floor(rank * fraction)


def train_first(test: NDArray[np.bool_]) -> tuple[Ints, int]:
    """The order that puts training rows before test rows, and the number of training rows."""
    return np.argsort(test, kind="stable"), int((~test).sum())


def are_names(value: object) -> bool:
    """Whether a value that was read can be the names of classes."""
    return (
        isinstance(value, list)
        and all(isinstance(name, str) for name in value)
        and len({*value}) == len(value) > 0
    )


def numbered(
    values: NDArray[np.generic], names: list[str] | None, place: str, images: int | None = None
) -> tuple[Ints, list[str]]:
    """Labels as numbers 0..C-1 and the names of the C classes; text is numbered by `names`, or alphabetically.

    Without names there are as many classes as the largest label says, but no more than `images`; None: as labels.
    """
    images = len(values) if images is None else images
    if values.dtype.kind in "OU":
        present = sorted(set(values.tolist()))
        names = names or present
        if unknown := sorted(set(present) - set(names)):
            raise ValueError(
                f"{place} has the label {unknown[0]}, its class names are {', '.join(names)}: correct one."
            )
        number = {name: index for index, name in enumerate(names)}
        return np.array([number[value] for value in values.tolist()], dtype=np.int64), names
    if values.dtype.kind not in "iu":
        raise ValueError(
            f"{place} has labels of type {values.dtype}: they must be integers or text."
        )
    if not len(values):
        return values.astype(np.int64), names or []
    lowest, highest = int(values.min()), int(values.max())
    if not names and highest >= images and lowest >= 0:
        raise ValueError(
            f"{place} has the label {highest}, and {images} images: labels without names count the classes from "
            "0, so number them without gaps, give all classes their names, or set data.kind=regression for values."
        )
    classes = len(names) if names else highest + 1
    if lowest < 0 or highest >= classes:
        worst = lowest if lowest < 0 else highest
        raise ValueError(
            f"{place} has the label {worst}, its classes are 0 to {classes - 1}: correct it."
        )
    return values.astype(np.int64), names or [str(label) for label in range(classes)]


def _as_pictures(images: Pixels) -> Iterator[Image]:
    from PIL import Image

    for pixels in images:
        yield Image.fromarray(
            pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0))
        )
