"""Data: images of stripes, lying, standing or sloping; read once, and kept in raysim's cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raysim import Raw, Source
from raysim.primitives.checks import at_least
from raysim.primitives.streams import stream


@dataclass(frozen=True)
class MyData(Source):
    """So many images of `pixels` by `pixels`, a sixth of them for tests."""

    samples: int = 1200
    pixels: int = 8
    noise: float = 120.0
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be meant."""
        at_least("data.samples", self.samples, 18)
        at_least("data.pixels", self.pixels, 2)
        at_least("data.noise", self.noise, 0)

    def read(self) -> Raw:
        """All images [n, channels, height, width], those for training first, their classes, and the classes' names."""
        rng = stream(self.seed, "mypackage")
        labels = np.arange(self.samples) % 3
        down, right = np.ogrid[: self.pixels, : self.pixels]
        stripes = np.stack(
            [
                np.broadcast_to(each % 2, (self.pixels, self.pixels))
                for each in (down, right, down + right)
            ]
        )
        images = (
            64
            + 128 * stripes[labels]
            + self.noise * rng.standard_normal((self.samples, self.pixels, self.pixels))
        )
        levels = np.clip(images, 0, 255).astype(np.uint8)[:, None]
        return Raw(
            levels, labels, self.samples - self.samples // 6, ["lying", "standing", "sloping"]
        )
