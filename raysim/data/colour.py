"""Change the colours of batches of images, with a strength for each image.

Images are uint8 [B, 1 or 3, h, w], strengths float32 [B]. Results are integers from 0 to 255. Grey
images (one channel, or three equal ones) have no saturation and hue to change.
"""

from __future__ import annotations

import torch
from torch import Tensor

# shares of red, green and blue in brightness (ITU-R 601-2), in 1/65536
LUMA = (19595, 38470, 7471)


def scale_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Return a batch of images in which every value is multiplied by the image's factor.

    images: uint8 [B, 1 or 3, h, w]; the result has the same shape and type. Products above 255
    become 255.
    factors: float32 [B]; 1 changes nothing.
    """
    return _to_levels(images * _per_image(factors))


def scale_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Return a batch of images in which the contrast of each image is changed.

    The factor multiplies each value's difference from the image's mean brightness.
    images: uint8 [B, 1 or 3, h, w]; the result has the same shape and type.
    factors: float32 [B]; 0 makes an image uniform, 1 changes nothing.
    """
    # a sum of integers does not depend on their order
    total = luma(images).sum(dim=(1, 2, 3), dtype=torch.int64)
    mean = _per_image(total / (images.shape[2] * images.shape[3]))
    return _to_levels(mean + _per_image(factors) * (images - mean))


def scale_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Return a batch of images in which the saturation of each image is changed.

    The factor multiplies each channel's difference from the pixel's brightness.
    images: uint8 [B, 1 or 3, h, w]; the result has the same shape and type.
    factors: float32 [B]; 0 makes an image grey, 1 changes nothing.
    """
    grey = luma(images)
    return _to_levels(grey + _per_image(factors) * (images.to(torch.int32) - grey))


def shift_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Return a batch of images in which every pixel's hue is shifted on the colour circle.

    Images with one channel are returned unchanged.
    images: uint8 [B, 1 or 3, h, w]; the result has the same shape and type.
    shifts: float32 [B], the shift of each image as a share of the circle, from -1 to 1.
    """
    if images.shape[1] == 1:
        return images
    hue, saturation, value = to_hsv(images.float() / 255)
    shifted_hue = (hue + shifts.reshape(-1, 1, 1)) % 1.0
    return _to_levels(from_hsv(shifted_hue, saturation, value) * 255)


def make_grey(images: Tensor, is_chosen: Tensor) -> Tensor:
    """Return a copy of the images in which the chosen images are grey.

    Every channel of a chosen image gets the pixel's brightness.
    images: uint8 [B, 1 or 3, h, w].
    is_chosen: bool [B].
    """
    return torch.where(_per_image(is_chosen), luma(images).to(torch.uint8), images)


def luma(images: Tensor) -> Tensor:
    """Return the brightness of every pixel, from 0 to 255: int32 [B, 1, h, w]."""
    if images.shape[1] == 1:
        return images.to(torch.int32)
    red, green, blue = images.to(torch.int32).split(1, dim=1)
    scaled: Tensor = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + 32768
    return scaled.bitwise_right_shift(16)


def to_hsv(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert RGB in [0, 1], [B, 3, h, w], to hue, saturation and value, each [B, h, w].

    The hue is a share of the colour circle, and 0 for grey.
    """
    red, green, blue = images.unbind(1)
    value, lowest = images.amax(1), images.amin(1)
    spread = value - lowest
    divisor = torch.where(spread > 0, spread, 1.0)
    green_or_blue = torch.where(
        value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor
    )
    sector = torch.where(value == red, (green - blue) / divisor, green_or_blue)
    return sector / 6 % 1.0, spread / torch.where(value > 0, value, 1.0), value


def from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Convert hue, saturation and value back to RGB; the inverse of `to_hsv`."""
    shift = torch.tensor([5.0, 3.0, 1.0], dtype=hue.dtype, device=hue.device).reshape(3, 1, 1)
    sector = (shift + 6 * hue.unsqueeze(1)) % 6
    part = torch.minimum(sector, 4 - sector).clamp(0, 1)
    return value.unsqueeze(1) * (1 - saturation.unsqueeze(1) * part)


def _per_image(values: Tensor) -> Tensor:
    """Return `values` [B] as [B, 1, 1, 1], so that each image is multiplied by its own value."""
    return values.reshape(-1, 1, 1, 1)


def _to_levels(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255).to(torch.uint8)
