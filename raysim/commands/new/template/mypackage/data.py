"""Data: images with stripes in three directions, made once and kept in raysim's cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raysim import Raw, Source
from raysim.primitives.checks import at_least
from raysim.primitives.streams import stream


@dataclass(frozen=True)
class MyData(Source):
    """Images of stripes in three directions; each direction is a class.

    samples: the number of images; a sixth of them becomes the central test set.
    pixels: the height and the width of an image.
    noise: the standard deviation of the noise on each pixel, whose values are 0 to 255.
    seed: the seed of the noise.
    """

    samples: int = 1200
    pixels: int = 8
    noise: float = 120.0
    seed: int = 0

    def check(self) -> None:
        """Raise `ValueError` for an impossible setting."""
        at_least("data.samples", self.samples, 18)
        at_least("data.pixels", self.pixels, 2)
        at_least("data.noise", self.noise, 0)

    def read(self) -> Raw:
        """Return images [n, channels, height, width], labels [n], and the names of the classes.

        Training samples come first.
        """
        generator = stream(self.seed, "mypackage")
        size = (self.pixels, self.pixels)
        labels = np.arange(self.samples) % 3
        down, right = np.ogrid[: self.pixels, : self.pixels]
        patterns = [down % 2, right % 2, (down + right) % 2]
        stripes = np.stack([np.broadcast_to(pattern, size) for pattern in patterns])
        noise = self.noise * generator.standard_normal((self.samples, *size))
        images = 64 + 128 * stripes[labels] + noise
        levels = np.clip(images, 0, 255).astype(np.uint8)[:, None]
        training_samples = self.samples - self.samples // 6
        return Raw(levels, labels, training_samples, ["lying", "standing", "sloping"])
