"""Generate images for segmentation: a circle, square or triangle on a noisy background."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysim.data.csr import Ints
from raysim.data.raw import Raw, Source
from raysim.primitives.checks import at_least, between
from raysim.primitives.memory import check_memory
from raysim.primitives.streams import stream

CLASS_NAMES = ["background", "circle", "square", "triangle"]


@dataclass(frozen=True)
class Shapes(Source):
    """A source of grey images, each of which shows a circle, a square or a triangle.

    Images are uint8 [1, pixels, pixels]. A label has a class for each pixel: the shape that covers
    the pixel, or the background.
    samples, test_samples: the numbers of images for training and for central tests.
    users: the number of simulated cameras, which partition=natural makes clients. A camera has its
    own brightness and prefers one shape.
    noise: the standard deviation of the noise in a pixel, whose levels are 0 to 255.
    seed: the seed of the data, which the run's seed does not change.
    """

    samples: int = 600
    test_samples: int = 150
    users: int = 10
    pixels: int = 32
    noise: float = 20.0
    seed: int = 0

    def check(self) -> None:
        at_least("data.samples", self.samples, 1)
        at_least("data.test_samples", self.test_samples, 0)
        at_least("data.users", self.users, 1)
        at_least("data.pixels", self.pixels, 8)
        between("data.noise", self.noise, 0, 255)
        at_least("data.seed", self.seed, 0)
        images = self.samples + self.test_samples
        check_memory(f"{images} images of data.pixels={self.pixels}", 9 * images * self.pixels**2)

    def read(self) -> Raw:
        rng = stream(self.seed, "shapes")
        count = self.samples + self.test_samples
        users = np.arange(count) % self.users
        brightness = rng.uniform(20, 120, self.users)
        images = np.empty((count, 1, self.pixels, self.pixels), np.uint8)
        labels = np.zeros((count, self.pixels, self.pixels), np.int64)
        for row, user in enumerate(users.tolist()):
            is_preferred = rng.random() < 0.5
            kind = 1 + (user % 3 if is_preferred else int(rng.integers(3)))
            mask = _draw_mask(rng, kind, self.pixels)
            levels = brightness[user] + 70.0 * mask
            levels = levels + self.noise * rng.standard_normal(mask.shape)
            images[row, 0] = levels.clip(0, 255).astype(np.uint8)
            labels[row][mask] = kind
        names = [f"camera {user}" for user in range(self.users)]
        return Raw(images, labels, self.samples, CLASS_NAMES, users, names, "positions")


def _draw_mask(rng: np.random.Generator, kind: int, pixels: int) -> NDArray[np.bool_]:
    """Draw a shape at a random position: bool [pixels, pixels], True inside the shape.

    kind: the class, which decides the shape: 1 is a circle, 2 a square, 3 a triangle.
    pixels: the height and width of the image.
    """
    size = rng.uniform(0.12, 0.25) * pixels
    centre_y, centre_x = rng.uniform(size, pixels - size, 2)
    grid: list[Ints] = list(np.indices((pixels, pixels)))
    y, x = grid[0] - centre_y, grid[1] - centre_x
    if kind == 1:
        circle: NDArray[np.bool_] = y**2 + x**2 <= size**2
        return circle
    if kind == 2:
        square: NDArray[np.bool_] = np.maximum(abs(y), abs(x)) <= size
        return square
    triangle: NDArray[np.bool_] = (abs(y) <= size) & (2 * abs(x) <= y + size)
    return triangle
