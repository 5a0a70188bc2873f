"""Random resized crops: a rectangle of each image, stretched to the size of the whole image."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from raysim.data.csr import Floats, Ints

TRIES = 10  # rectangles drawn per image
ASPECT = (3 / 4, 4 / 3)  # the smallest and the largest ratio of width to height


def crop_boxes(*, height: int, width: int, area: tuple[float, float], uniforms: Floats) -> Ints:
    """Return a random rectangle per image: top, left, height and width, int64 [4, B].

    The rules are those of torchvision's RandomResizedCrop, which draws `TRIES` rectangles for an
    image and takes the first one that fits.
    height, width: the size of the images in pixels.
    area: the smallest and the largest share of the image that a rectangle covers.
    uniforms: random numbers in [0, 1), [4, TRIES, B]. A rectangle's four numbers decide its share
    of the image, its ratio of width to height, its top and its left.
    """
    target = height * width * (area[0] + (area[1] - area[0]) * uniforms[0])
    low, high = map(math.log, ASPECT)
    aspect = np.exp(low + (high - low) * uniforms[1])
    heights = np.rint(np.sqrt(target / aspect)).astype(np.int64)
    widths = np.rint(np.sqrt(target * aspect)).astype(np.int64)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)

    first_fit = fits.argmax(axis=0)[None]
    box_heights = np.take_along_axis(heights, first_fit, axis=0)[0]
    box_widths = np.take_along_axis(widths, first_fit, axis=0)[0]
    top_uniforms = np.take_along_axis(uniforms[2], first_fit, axis=0)[0]
    left_uniforms = np.take_along_axis(uniforms[3], first_fit, axis=0)[0]
    tops = np.floor(top_uniforms * (height - box_heights + 1)).astype(np.int64)
    lefts = np.floor(left_uniforms * (width - box_widths + 1)).astype(np.int64)
    boxes = np.stack([tops, lefts, box_heights, box_widths])

    tall, wide = min(height, round(width / ASPECT[0])), min(width, round(height * ASPECT[1]))
    centre = np.array([(height - tall) // 2, (width - wide) // 2, tall, wide])
    return np.where(fits.any(axis=0), boxes, centre[:, None])


def resized_crops(images: Tensor, boxes: Ints) -> Tensor:
    """Stretch each image's rectangle to the size of the image.

    The interpolation is bilinear, without antialiasing.
    images: uint8 [B, c, h, w]; the result has the same shape and type.
    boxes: int64 [4, B] from `crop_boxes`: each rectangle's top, left, height and width.
    """
    height, width = images.shape[2:]
    top, left, tall, wide = boxes
    rows, columns = _source_coordinates(top, tall, height), _source_coordinates(left, wide, width)
    grid = np.empty((len(images), height, width, 2), dtype=np.float32)
    grid[..., 0], grid[..., 1] = columns[:, None, :], rows[:, :, None]
    coordinates = torch.from_numpy(grid).to(images.device)
    crops = functional.grid_sample(
        images.float(), coordinates, "bilinear", "border", align_corners=False
    )
    return crops.round_().clamp_(0, 255).to(torch.uint8)


def _source_coordinates(start: Ints, length: Ints, size: int) -> NDArray[np.float64]:
    """Return the coordinates in the original image from which a stretched crop takes its pixels.

    The result, [B, size], is for one axis: the height or the width. As
    `torch.nn.functional.grid_sample` requires, -1 and 1 are the edges of the image.
    start, length: [B], the crop's first pixel and its number of pixels along this axis.
    size: the number of pixels of the image along this axis.
    """
    pixels = (np.arange(size) + 0.5) * (length[:, None] / size) - 0.5
    inside = start[:, None] + np.clip(pixels, 0, length[:, None] - 1)
    coordinates: NDArray[np.float64] = (2 * inside + 1) / size - 1
    return coordinates
