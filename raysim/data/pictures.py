"""Decode pictures, convert them to grey or RGB, resize them and stack them in an array."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from raysim.primitives.files import regular_file

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.uint8]
PICTURE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
)


@dataclass(frozen=True, eq=False)
class Picture:
    """An encoded picture: a file or bytes.

    place: the name of the picture in errors.
    content: the path of the file, or the bytes; None if the picture is missing in the data.
    """

    place: str
    content: Path | bytes | None

    def open(self) -> Image:
        """Decode the picture. Raise ValueError if it cannot be decoded to 8 bits per channel."""
        from PIL import Image

        try:
            if self.content is None:
                raise OSError("it is empty")
            if isinstance(self.content, Path):
                picture = Image.open(regular_file(self.content))
            else:
                picture = Image.open(io.BytesIO(self.content))
            picture.load()
        except Exception as error:  # every format has its own errors
            reason = str(error).replace(f" {str(self.content)!r}", "")
            raise ValueError(
                f"{self.place} is not a readable picture ({reason}). Remove it or download it "
                "again."
            ) from error
        if picture.mode.startswith(("I", "F")):
            raise ValueError(
                f"{self.place} has more than 8 bits per channel (mode {picture.mode}). Convert it "
                "to 8 bits per channel."
            )
        return picture


def stack_images(
    images: Pixels | Iterable[Picture], count: int, size: int | None, channels: Literal[1, 3] | None
) -> Pixels:
    """Return all images as uint8 [count, c, h, w].

    size: the new height and width; None keeps the images' sizes.
    channels: the new number of channels. With None, arrays that keep their size keep their
    channels. Other images become RGB unless they are grey.
    Raise ValueError if the resulting shapes differ.
    """
    if isinstance(images, np.ndarray):
        height, width = images.shape[2:]
        if channels in (None, images.shape[1]) and (size is None or size == height == width):
            return images
    stack: Pixels | None = None
    for row, (place, picture) in enumerate(_open_all(images)):
        pixels = fit_image(picture, size, channels)
        if stack is None:
            stack = np.empty((count, *pixels.shape), dtype=np.uint8)
        if pixels.shape != stack.shape[1:]:
            raise ValueError(
                f"{place} has the shape {pixels.shape} (channels, height, width), but earlier "
                f"images have {stack.shape[1:]}. Set data.size and data.channels to convert all "
                "images to one shape."
            )
        stack[row] = pixels
    assert stack is not None, "callers check that there are images"
    return stack


def resize_masks(masks: NDArray[Any], size: int) -> NDArray[Any]:
    """Return masks [n, size, size], in which each pixel has the class of the nearest old pixel.

    masks: int64 [n, h, w], the class of each pixel, below 2^31.
    """
    from PIL import Image

    resized = np.empty((len(masks), size, size), np.int64)
    for row, mask in enumerate(masks.astype(np.int32)):
        picture = Image.fromarray(mask).resize((size, size), Image.Resampling.NEAREST)
        resized[row] = np.asarray(picture)
    return resized


def _open_all(images: Pixels | Iterable[Picture]) -> Iterator[tuple[str, Image]]:
    """Yield the name of each image, for errors, and the image as a Pillow image.

    images: uint8 [n, c, h, w], or encoded pictures.
    """
    from PIL import Image

    if not isinstance(images, np.ndarray):
        for picture in images:
            yield picture.place, picture.open()
        return
    for row, pixels in enumerate(images):
        is_grey = len(pixels) == 1
        plane = pixels[0] if is_grey else np.ascontiguousarray(pixels.transpose(1, 2, 0))
        yield f"image {row}", Image.fromarray(plane)


def fit_image(picture: Image, size: int | None, channels: Literal[1, 3] | None) -> Pixels:
    """Return a picture as uint8 [c, h, w], converted to grey or RGB and then resized.

    The resizing is bilinear, with antialiasing.
    size: the new height and width; None keeps the picture's size.
    channels: 1 makes the picture grey, 3 makes it RGB. None keeps a grey picture grey and makes
    others RGB. Transparency is lost.
    """
    from PIL import Image

    is_grey = picture.mode in ("1", "L", "LA") if channels is None else channels == 1
    picture = picture.convert("L" if is_grey else "RGB")
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return pixels[None] if is_grey else pixels.transpose(2, 0, 1)
