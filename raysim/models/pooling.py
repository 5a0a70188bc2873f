"""A max-pool for images that is several times faster than PyTorch's in evaluations on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class MaxPool2d(nn.MaxPool2d):
    """A max-pool over square windows of images [B, channels, H, W].

    Its results are equal to those of `nn.MaxPool2d`. Without gradients on a CPU, it is faster.

    size: the height and width of a window, in pixels.
    stride: the distance between the starts of two windows, in pixels; None means `size`.
    padding: the number of pixels of minus infinity at each side of the image.
    """

    # PyTorch's CPU kernel for images visits one pixel at a time. In an evaluation of a small CNN it
    # takes as long as all convolutions.

    def __init__(self, size: int, stride: int | None = None, padding: int = 0):
        super().__init__(size, stride, padding)
        self._size = size
        self._stride = size if stride is None else stride
        self._padding = padding

    def forward(self, images: Tensor) -> Tensor:
        """Return the largest value of each window, [B, channels, rows, columns] of windows.

        images: [B, channels, H, W].
        """
        if torch.is_grad_enabled() or images.device.type != "cpu":
            largest: Tensor = super().forward(images)
            return largest
        if self._padding:
            images = functional.pad(images, [self._padding] * 4, value=float("-inf"))
        # Rows first: they are contiguous in memory, and half of the columns are left to compare.
        largest_in_rows = self._max_along(images, -2)
        return self._max_along(largest_in_rows, -1)

    def _max_along(self, values: Tensor, dim: int) -> Tensor:
        """Return the largest value of each window along one dimension only."""
        windows = (values.shape[dim] - self._size) // self._stride + 1
        # For each place in a window, one slice has the values of all windows at this place.
        slices = []
        for start in range(self._size):
            end = start + self._stride * (windows - 1) + 1
            places = slice(start, end, self._stride)
            slices.append(values[..., places] if dim == -1 else values[..., places, :])
        largest = slices[0]
        for other in slices[1:]:
            largest = torch.maximum(largest, other)
        return largest
