"""Random resized crops: a rectangle of each image, stretched to the size of the whole."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from raysim.data.partition import Floats, Ints

TRIES = 10  # rectangles drawn per image
ASPECT = (3 / 4, 4 / 3)  # width by height


def crop_boxes(*, height: int, width: int, area: tuple[float, float], uniforms: Floats) -> Ints:
    """Top, left, height and width of a rectangle per image, int64 [4, B], from uniforms [4, TRIES, B].

    A try takes a share of the image's area (uniform in `area`) and an aspect (log-uniform in 3/4 to 4/3), both rounded
    to pixels; the first that fits is placed uniformly. Where none fits it is the centre: the whole image, cut to the
    nearest allowed aspect. These are the rules of torchvision's RandomResizedCrop.
    """
    target = height * width * (area[0] + (area[1] - area[0]) * uniforms[0])
    low, high = map(math.log, ASPECT)
    aspect = np.exp(low + (high - low) * uniforms[1])
    heights = np.rint(np.sqrt(target / aspect)).astype(np.int64)
    widths = np.rint(np.sqrt(target * aspect)).astype(np.int64)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first = fits.argmax(axis=0)[None]
    drawn = [
        np.take_along_axis(each, first, axis=0)[0]
        for each in (heights, widths, uniforms[2], uniforms[3])
    ]
    tops, lefts = (
        np.floor(drawn[2] * (height - drawn[0] + 1)),
        np.floor(drawn[3] * (width - drawn[1] + 1)),
    )
    boxes = np.stack([tops.astype(np.int64), lefts.astype(np.int64), drawn[0], drawn[1]])
    tall, wide = min(height, round(width / ASPECT[0])), min(width, round(height * ASPECT[1]))
    centre = np.array([(height - tall) // 2, (width - wide) // 2, tall, wide])
    return np.where(fits.any(axis=0), boxes, centre[:, None])


def resized_crops(images: Tensor, boxes: Ints) -> Tensor:
    """Each image's rectangle, bilinear (not antialiased) to the image's own size; uint8 [B, c, h, w] to the same."""
    height, width = images.shape[2:]
    top, left, tall, wide = boxes
    rows, columns = _places(top, tall, height), _places(left, wide, width)
    grid = np.empty((len(images), height, width, 2), dtype=np.float32)
    grid[..., 0], grid[..., 1] = columns[:, None, :], rows[:, :, None]
    where = torch.from_numpy(grid).to(images.device)
    crops = functional.grid_sample(images.float(), where, "bilinear", "border", align_corners=False)
    return crops.round_().clamp_(0, 255).to(torch.uint8)


def _places(start: Ints, length: Ints, size: int) -> NDArray[np.float64]:
    """Where each of `size` pixels reads, inside the rectangle only; -1 to 1 are the image's edges; [B, size]."""
    pixels = (np.arange(size) + 0.5) * (length[:, None] / size) - 0.5
    inside = start[:, None] + np.clip(pixels, 0, length[:, None] - 1)
    places: NDArray[np.float64] = (2 * inside + 1) / size - 1
    return places
