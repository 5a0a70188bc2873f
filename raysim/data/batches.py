"""Turn stored inputs into a training batch on the device: augment, scale and normalise."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from raysim.data.colour import (
    make_grey,
    scale_brightness,
    scale_contrast,
    scale_saturation,
    shift_hue,
)
from raysim.data.crops import TRIES, crop_boxes, resized_crops


@dataclass(frozen=True)
class Pipeline:
    """The normalisation of inputs and their augmentation in training.

    mean, std: one number for all channels or one per channel; None only scales images to [0, 1].
    augment: names of augmentations, see `augment_images`.
    crop_padding: the pixels of zeros that `crop` adds on each side.
    rotate_degrees: the largest angle of `rotate`.
    crop_area: the smallest and the largest share of the image that `resized_crop` takes.
    jitter: the strength of `jitter`.
    grey: the probability that `grey` makes an image grey.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augment: tuple[str, ...] = ()
    crop_padding: int = 4
    rotate_degrees: float = 30.0
    crop_area: tuple[float, float] = (0.7, 1.0)
    jitter: float = 0.3
    grey: float = 0.1

    def normalise(self, inputs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalise inputs for the model; the result is on the same device and in `dtype`.

        uint8 [..., channels, height, width] becomes (x / 255 - mean) / std. float32 [B, channels,
        ...] becomes (x - mean) / std. If `mean` or `std` is None, uint8 becomes x / 255, and
        float32 keeps its values. Token numbers stay int64 and unchanged.
        """
        if inputs.dtype == torch.int64:
            return inputs
        are_levels = inputs.dtype == torch.uint8
        scaled = inputs.to(dtype).div_(255) if are_levels else inputs.to(dtype, copy=True)
        if self.mean is None or self.std is None:
            return scaled
        inner_axes = 2 if are_levels and inputs.ndim > 2 else inputs.ndim - 2
        device = str(inputs.device)
        mean = _channel_constants(self.mean, dtype, device, inner_axes)
        std = _channel_constants(self.std, dtype, device, inner_axes)
        return scaled.sub_(mean).div_(std)

    def augment_images(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Augment each image independently; images and result are uint8 [B, c, h, w].

        Only the augmentations in `augment` are applied, in this order:
        - resized_crop: a random rectangle of the image (`crop_boxes`) is stretched to the image's
          size.
        - crop: the image moves by up to `crop_padding` pixels.
        - flip: the image is mirrored with probability 1/2.
        - rotate: the image is turned by up to `rotate_degrees` in either direction.
        - jitter: brightness, contrast and saturation are multiplied by 1 - `jitter` to 1 +
          `jitter`. The hue moves by up to `jitter` of the colour circle.
        - grey: the image turns grey with the probability `grey`.
        """
        # Images of one channel draw the same random numbers as images of three channels.
        if "resized_crop" in self.augment:
            uniforms = rng.random((4, TRIES, len(images)))
            height, width = images.shape[2:]
            boxes = crop_boxes(height=height, width=width, area=self.crop_area, uniforms=uniforms)
            images = resized_crops(images, boxes)
        if {"crop", "flip", "rotate"} & set(self.augment):
            images = self._move_pixels(images, rng)
        if "jitter" in self.augment:
            factors = rng.uniform(1 - self.jitter, 1 + self.jitter, (3, len(images)))
            shifts = rng.uniform(-self.jitter, self.jitter, len(images))
            brightness, contrast, saturation = _to_tensor_like(images, factors)
            images = scale_brightness(images, brightness)
            images = scale_contrast(images, contrast)
            images = scale_saturation(images, saturation)
            images = shift_hue(images, _to_tensor_like(images, shifts))
        if "grey" in self.augment:
            is_grey = torch.from_numpy(rng.random(len(images)) < self.grey)
            images = make_grey(images, is_grey.to(images.device))
        return images

    def _move_pixels(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Crop, flip and rotate images at random, if `augment` lists these augmentations."""
        batch, channels, height, width = images.shape
        padding = self.crop_padding if "crop" in self.augment else 0
        rows = np.broadcast_to(np.arange(height), (batch, height))
        columns = np.broadcast_to(np.arange(width), (batch, width))
        if padding:
            down, right = rng.integers(0, 2 * padding + 1, (2, batch, 1))
            rows, columns = rows + down, columns + right
        if "flip" in self.augment:
            columns = np.where(rng.random((batch, 1)) < 0.5, columns[:, ::-1], columns)
        sources = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]
        is_inside = None
        if "rotate" in self.augment:
            angles = rng.uniform(-self.rotate_degrees, self.rotate_degrees, batch)
            places, is_inside = _rotation_sources(height, width, angles)
            sources = np.take_along_axis(sources.reshape(batch, -1), places, axis=1)
        index = torch.from_numpy(sources.reshape(batch, 1, -1)).to(images.device)
        padded = functional.pad(images, (padding,) * 4).flatten(2)
        moved = padded.gather(2, index.expand(batch, channels, height * width))
        if is_inside is not None:
            moved = moved * torch.from_numpy(is_inside[:, None, :]).to(images.device)
        return moved.reshape(images.shape)


def _rotation_sources(
    height: int, width: int, degrees: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the position in the original image from which each pixel of a rotated image comes.

    Return two arrays [B, h * w]. The first one, int64, has the positions, row * width + column. The
    second one, bool, is False for pixels that come from outside of the image. Their positions are
    0.
    degrees: [B], the angles, counter-clockwise.
    """
    radians = np.deg2rad(degrees)[:, None, None]
    y, x = np.ogrid[:height, :width]
    dy, dx = y - (height - 1) / 2, x - (width - 1) / 2
    cos, sin = np.cos(radians), np.sin(radians)
    columns = np.floor(cos * dx - sin * dy + (width - 1) / 2 + 0.5).astype(np.int64)
    rows = np.floor(sin * dx + cos * dy + (height - 1) / 2 + 0.5).astype(np.int64)
    is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = np.where(is_inside, rows * width + columns, 0)
    return places.reshape(len(degrees), -1), is_inside.reshape(len(degrees), -1)


def _to_tensor_like(images: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(images.device)


@functools.lru_cache(maxsize=64)
def _channel_constants(
    values: tuple[float, ...], dtype: torch.dtype, device: str, inner_axes: int
) -> Tensor:
    """Return the values of all channels in a shape that fits a batch: [channels, 1, ..., 1].

    inner_axes: the number of axes of the batch after the channels, such as 2 for images.
    """
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, *inner_axes * [1])
