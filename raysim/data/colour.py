"""Colour augmentation of uint8 batches: brightness, contrast, saturation, hue and greyscale, one strength per image.

Images are uint8 [B, 1 or 3, h, w], strengths float32 [B]; each function rounds to whole levels, as programs that edit
pictures do. On one channel, and on three equal ones, saturation, hue and greyscale change nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

LUMA = (19595, 38470, 7471)  # shares of red, green and blue in brightness (ITU-R 601-2), of 65536


def brightened(images: Tensor, factors: Tensor) -> Tensor:
    """Every level times the image's factor."""
    return _levels(images * _each(factors))


def contrasted(images: Tensor, factors: Tensor) -> Tensor:
    """Differences from the image's mean brightness times the factor."""
    total = luma(images).sum(
        dim=(1, 2, 3), dtype=torch.int64
    )  # integers: the same sum in any order
    mean = _each(total / (images.shape[2] * images.shape[3]))
    return _levels(mean + _each(factors) * (images - mean))


def saturated(images: Tensor, factors: Tensor) -> Tensor:
    """Differences from each pixel's brightness times the factor."""
    grey = luma(images)
    return _levels(grey + _each(factors) * (images.to(torch.int32) - grey))


def hue_turned(images: Tensor, turns: Tensor) -> Tensor:
    """Every pixel's hue moved by a share of the colour circle; value and saturation stay."""
    if images.shape[1] == 1:
        return images
    hue, saturation, value = to_hsv(images.float() / 255)
    return _levels(from_hsv((hue + turns.reshape(-1, 1, 1)) % 1.0, saturation, value) * 255)


def greyed(images: Tensor, chosen: Tensor) -> Tensor:
    """The chosen images (bool [B]) with every channel at the pixel's brightness."""
    return torch.where(_each(chosen), luma(images).to(torch.uint8), images)


def luma(images: Tensor) -> Tensor:
    """Brightness of every pixel in whole levels, int32 [B, 1, h, w]."""
    if images.shape[1] == 1:
        return images.to(torch.int32)
    red, green, blue = images.to(torch.int32).split(1, dim=1)
    whole: Tensor = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + 32768
    return whole.bitwise_right_shift(16)


def to_hsv(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue (share of the circle, 0 for grey), saturation and value, each [B, h, w], of RGB in [0, 1]."""
    red, green, blue = images.unbind(1)
    value, lowest = images.amax(1), images.amin(1)
    spread = value - lowest
    some = torch.where(spread > 0, spread, 1.0)
    sector = torch.where(
        value == red,
        (green - blue) / some,
        torch.where(value == green, 2 + (blue - red) / some, 4 + (red - green) / some),
    )
    return sector / 6 % 1.0, spread / torch.where(value > 0, value, 1.0), value


def from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """RGB in [0, 1], [B, 3, h, w]; the inverse of `to_hsv`."""
    shift = torch.tensor([5.0, 3.0, 1.0], dtype=hue.dtype, device=hue.device).reshape(3, 1, 1)
    sector = (shift + 6 * hue.unsqueeze(1)) % 6
    part = torch.minimum(sector, 4 - sector).clamp(0, 1)
    return value.unsqueeze(1) * (1 - saturation.unsqueeze(1) * part)


def _each(values: Tensor) -> Tensor:
    return values.reshape(-1, 1, 1, 1)


def _levels(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255).to(torch.uint8)
