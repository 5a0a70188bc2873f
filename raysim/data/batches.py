"""From uint8 images to a training batch, on the device that holds them: augment, scale, normalise."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Pipeline:
    """Normalisation constants per channel (or one for all; None: only scale to [0, 1]) and train-time augmentation."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    augment: tuple[str, ...] = ()
    crop_padding: int = 4

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 [..., c, h, w] to (x / 255 - mean) / std in `dtype`, on the images' device."""
        scaled = images.to(dtype).div_(255)
        if self.mean is None or self.std is None:
            return scaled
        device = str(images.device)
        return scaled.sub_(_constant(self.mean, dtype, device)).div_(_constant(self.std, dtype, device))

    def augmented(self, images: Tensor, rng: np.random.Generator) -> Tensor:
        """Zero-pad and crop, then flip with probability 1/2, as `augment` says; uint8 [B, c, h, w] to the same.

        Draws, in this order: vertical and horizontal offset of each image, then each image's flip.
        """
        if not self.augment:
            return images
        batch, channels, height, width = images.shape
        padding = self.crop_padding if "crop" in self.augment else 0
        rows = np.broadcast_to(np.arange(height), (batch, height))
        columns = np.broadcast_to(np.arange(width), (batch, width))
        if padding:
            down, right = rng.integers(0, 2 * padding + 1, (2, batch, 1))
            rows, columns = rows + down, columns + right
        if "flip" in self.augment:
            columns = np.where(rng.random((batch, 1)) < 0.5, columns[:, ::-1], columns)
        places = torch.from_numpy(rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]).to(images.device)
        padded = functional.pad(images, (padding,) * 4).flatten(2)
        places = places.flatten(1)[:, None, :].expand(batch, channels, height * width)
        return padded.gather(2, places).reshape(images.shape)


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).reshape(-1, 1, 1)
