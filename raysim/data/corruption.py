"""Label noise and rotation: what makes clients' data differ although their source is the same.

Rotations are counter-clockwise as seen (y points down) about the centre ((w-1)/2, (h-1)/2), same size, zeros outside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.data.partition import Floats, Ints, fraction_count
from raysim.primitives.checks import above, one_of, require

Pixel = TypeVar("Pixel", bound=np.generic)

CHUNK = 4096  # images rotated at once: 28x28 in double precision is 25 MB per intermediate array


@dataclass(frozen=True)
class Rotation:
    """Which images are turned by which of the `angles` (degrees).

    `per="client"`: client k by angle k mod A. `per="image"`: each client draws q ~ Dir(concentration, ...) over the
    angles, then each of its images an angle. The central test set is there once at every angle (`test="all"`), or
    image j at angle j mod A (`test="spread"`). FedBR uses the angles 0, 15, ..., 135 and nearest neighbour.
    """

    per: Literal["none", "client", "image"] = "none"
    angles: list[float] = field(default_factory=lambda: [15.0 * step for step in range(10)])
    concentration: float = 1.0
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    test: Literal["spread", "all"] = "spread"

    def __post_init__(self) -> None:
        for key, allowed in (
            ("per", ("none", "client", "image")),
            ("interpolation", ("nearest", "bilinear")),
            ("test", ("spread", "all")),
        ):
            one_of(f"data.rotation.{key}", getattr(self, key), allowed)
        finite = self.angles and all(math.isfinite(angle) for angle in self.angles)
        require(
            "data.rotation.angles", self.angles, finite, "a list of at least one angle in degrees"
        )
        above("data.rotation.concentration", self.concentration, 0)


def symmetric_label_noise(
    *, labels: ArrayLike, ratio: float, num_classes: int, order: ArrayLike, shifts: ArrayLike
) -> Ints:
    """Exactly floor(n * ratio) labels, the first of `order`, become (y + shift) mod C; shifts are in 1..C-1."""
    noisy = np.array(labels, dtype=np.int64)
    hit = np.asarray(order)[: fraction_count(total=len(noisy), fraction=ratio)]
    noisy[hit] = (noisy[hit] + np.asarray(shifts)[hit]) % num_classes
    return noisy


def client_rotation_angles(*, num_clients: int, angles: ArrayLike) -> Floats:
    """Client k is turned by angle k mod A."""
    return np.asarray(angles, dtype=np.float64)[
        client_turns(np.arange(num_clients), len(np.asarray(angles)))
    ]


def image_rotation_angles(
    *, probabilities: ArrayLike, uniforms: ArrayLike, angles: ArrayLike
) -> Floats:
    """One angle per image by inverse CDF; `probabilities` [A], or [n, A] with a row per image."""
    return np.asarray(angles, dtype=np.float64)[
        image_turns(np.asarray(probabilities), np.asarray(uniforms))
    ]


def client_turns(clients: Ints, num_angles: int) -> Ints:
    """The number of each client's angle."""
    return clients % num_angles


def image_turns(probabilities: Floats, uniforms: Floats) -> Ints:
    """Number of the first angle whose cumulative probability exceeds the uniform; never one of probability 0."""
    cumulative = np.cumsum(probabilities, axis=-1)
    last = np.argmax(
        cumulative, axis=-1
    )  # the last positive one, for uniforms above a sum of 0.99...9
    turns: Ints = np.minimum((cumulative <= uniforms[:, None]).sum(axis=-1), last)
    return turns


def rotate_images(
    *,
    images: ArrayLike,
    angles: ArrayLike,
    interpolation: Literal["bilinear", "nearest"] = "bilinear",
) -> NDArray[np.generic]:
    """Turn each of images [n, c, h, w] by its angle in degrees; keeps the dtype, integers are rounded half up."""
    source, angles = np.asarray(images), np.asarray(angles, dtype=np.float64)
    turn = _nearest if interpolation == "nearest" else _bilinear
    turned = np.empty_like(source)
    for start in range(0, len(source), CHUNK):
        for angle in np.unique(angles[start : start + CHUNK]):
            rows = start + np.flatnonzero(angles[start : start + CHUNK] == angle)
            turned[rows] = source[rows] if angle % 360 == 0 else turn(source[rows], float(angle))
    return turned


def pool_images(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Averages of size x size pixels of images [n, c, h, w], rounded half up; h and w must divide by `size`."""
    n, channels, height, width = images.shape
    tiles = images.reshape(n, channels, height // size, size, width // size, size)
    sums = tiles.sum(axis=(3, 5), dtype=np.int64)
    rounded: NDArray[np.uint8] = ((2 * sums + size**2) // (2 * size**2)).astype(np.uint8)
    return rounded


def _sources(height: int, width: int, angle: float) -> tuple[Floats, Floats]:
    """Where each pixel of the turned image comes from: (x, y), each [h * w]."""
    cos, sin = _cos_sin(angle)
    y, x = np.mgrid[:height, :width].reshape(2, -1)
    centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
    dx, dy = x - centre_x, y - centre_y
    return cos * dx - sin * dy + centre_x, sin * dx + cos * dy + centre_y


def _cos_sin(angle: float) -> tuple[float, float]:
    quarters, rest = divmod(angle, 90.0)
    if rest == 0:  # exact, so that four quarter turns are the identity
        return ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[int(quarters) % 4]
    return math.cos(math.radians(angle)), math.sin(math.radians(angle))


def _pixels(images: NDArray[Pixel], x: Ints, y: Ints) -> NDArray[Pixel]:
    """Pixels (x, y) of images [n, c, h, w], [n, c, len(x)]; zero outside."""
    n, channels, height, width = images.shape
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    places = np.where(inside, y * width + x, 0)
    picked: NDArray[Pixel] = images.reshape(n, channels, -1)[:, :, places]
    picked[:, :, ~inside] = 0
    return picked


def _nearest(images: NDArray[np.generic], angle: float) -> NDArray[np.generic]:
    x, y = _sources(images.shape[2], images.shape[3], angle)
    return _pixels(
        images, np.floor(x + 0.5).astype(np.int64), np.floor(y + 0.5).astype(np.int64)
    ).reshape(images.shape)


def _bilinear(images: NDArray[np.generic], angle: float) -> NDArray[np.generic]:
    x, y = _sources(images.shape[2], images.shape[3], angle)
    left, top = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    right_share, bottom_share = x - left, y - top
    values = images.astype(np.float64)
    mixed = np.zeros((*images.shape[:2], len(x)))
    for step_x, share_x in ((0, 1 - right_share), (1, right_share)):
        for step_y, share_y in ((0, 1 - bottom_share), (1, bottom_share)):
            mixed += _pixels(values, left + step_x, top + step_y) * (share_x * share_y)
    if np.issubdtype(images.dtype, np.integer):
        np.floor(mixed + 0.5, out=mixed)
    return mixed.astype(images.dtype).reshape(images.shape)
