"""From stored inputs to a training batch, on the device that holds them: augment, scale, normalise."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from raysim.data.colour import brightened, contrasted, greyed, hue_turned, saturated
from raysim.data.crops import TRIES, crop_boxes, resized_crops


@dataclass(frozen=True)
class Pipeline:
    """Normalisation constants per channel (or one for all; None: only scale to [0, 1]) and train-time augmentation.

    augment: any of `resized_crop` (`crop_area`: lowest and highest share of the image), `crop` (`crop_padding`),
    `flip`, `rotate` (`rotate_degrees`), `jitter` (strength of each of four) and `grey` (its probability), applied in
    this order whatever theirs in the list.
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
        """As the model sees them, on the inputs' device: token numbers (int64) as they are, all else in `dtype`.

        uint8 [..., c, h, w] becomes (x / 255 - mean) / std, float32 [B, c, ...] becomes (x - mean) / std.
        """
        if inputs.dtype == torch.int64:
            return inputs
        levels = inputs.dtype == torch.uint8
        scaled = inputs.to(dtype).div_(255) if levels else inputs.to(dtype, copy=True)
        if self.mean is None or self.std is None:
            return scaled
        device, inner = str(inputs.device), 2 if levels and inputs.ndim > 2 else inputs.ndim - 2
        mean, std = (_constant(values, dtype, device, inner) for values in (self.mean, self.std))
        return scaled.sub_(mean).div_(std)

    def augment_images(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """What `augment` says, done to each image by itself; uint8 [B, c, h, w] to the same.

        Draws, in this order: four uniforms for each of ten rectangles of each image; vertical and horizontal offset of
        each image; each image's flip (probability 1/2); its angle (uniform up to `rotate_degrees` either way; nearest
        pixel, zero outside); its factors of brightness, contrast and saturation (1 - jitter to 1 + jitter) and its
        shift of hue (up to `jitter` of the circle either way), applied in this order; whether it turns grey. Images of
        one channel draw the same.
        """
        if "resized_crop" in self.augment:
            uniforms = rng.random((4, TRIES, len(images)))
            height, width = images.shape[2:]
            boxes = crop_boxes(height=height, width=width, area=self.crop_area, uniforms=uniforms)
            images = resized_crops(images, boxes)
        if {"crop", "flip", "rotate"} & set(self.augment):
            images = self._moved(images, rng)
        if "jitter" in self.augment:
            factors = _on(images, rng.uniform(1 - self.jitter, 1 + self.jitter, (3, len(images))))
            turns = _on(images, rng.uniform(-self.jitter, self.jitter, len(images)))
            images = saturated(contrasted(brightened(images, factors[0]), factors[1]), factors[2])
            images = hue_turned(images, turns)
        if "grey" in self.augment:
            images = greyed(
                images, torch.from_numpy(rng.random(len(images)) < self.grey).to(images.device)
            )
        return images

    def _moved(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Zero-pad and crop, flip, rotate: pixels change their places and nothing else."""
        batch, channels, height, width = images.shape
        padding = self.crop_padding if "crop" in self.augment else 0
        rows = np.broadcast_to(np.arange(height), (batch, height))
        columns = np.broadcast_to(np.arange(width), (batch, width))
        if padding:
            down, right = rng.integers(0, 2 * padding + 1, (2, batch, 1))
            rows, columns = rows + down, columns + right
        if "flip" in self.augment:
            columns = np.where(rng.random((batch, 1)) < 0.5, columns[:, ::-1], columns)
        grid = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]
        inside = None
        if "rotate" in self.augment:
            angles = rng.uniform(-self.rotate_degrees, self.rotate_degrees, batch)
            places, inside = _turned(height, width, angles)
            grid = np.take_along_axis(grid.reshape(batch, -1), places, axis=1)
        index = torch.from_numpy(grid.reshape(batch, 1, -1)).to(images.device)
        padded = functional.pad(images, (padding,) * 4).flatten(2)
        moved = padded.gather(2, index.expand(batch, channels, height * width))
        if inside is not None:
            moved = moved * torch.from_numpy(inside[:, None, :]).to(images.device)
        return moved.reshape(images.shape)


def _turned(height: int, width: int, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each pixel of an image turned counter-clockwise, the pixel it comes from [B, h * w], and whether it exists."""
    radians = np.deg2rad(degrees)[:, None, None]
    dy, dx = np.ogrid[:height, :width]
    dy, dx = dy - (height - 1) / 2, dx - (width - 1) / 2
    cos, sin = np.cos(radians), np.sin(radians)
    columns = np.floor(cos * dx - sin * dy + (width - 1) / 2 + 0.5).astype(np.int64)
    rows = np.floor(sin * dx + cos * dy + (height - 1) / 2 + 0.5).astype(np.int64)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    places = np.where(inside, rows * width + columns, 0)
    return places.reshape(len(degrees), -1), inside.reshape(len(degrees), -1)


def _on(images: Tensor, values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(images.device)


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: str, inner: int) -> Tensor:
    """One value per channel, in front of so many inner axes."""
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, *inner * [1])
