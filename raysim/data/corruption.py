"""Label noise and rotation, which make clients' data differ, and pooling of pixels.

Rotations are counter-clockwise on the screen (y points down) about the image's centre ((width-1)/2,
(height-1)/2). Images keep their size. Pixels from outside of the original image are 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.data.csr import Floats, Ints
from raysim.data.splits import fraction_count
from raysim.primitives.checks import above, one_of, require

RotatedUnit: TypeAlias = Literal["none", "client", "image"]
Interpolation: TypeAlias = Literal["nearest", "bilinear"]
TestRotation: TypeAlias = Literal["spread", "all"]

Pixel = TypeVar("Pixel", bound=np.generic)

# Images rotated at once: 28x28 in double precision is 25 MB per intermediate array.
IMAGES_AT_ONCE = 4096


@dataclass(frozen=True)
class Rotation:
    """The settings for rotating images: each image is turned by one of A angles.

    per: "none" rotates nothing. "client" turns all images of client k by angle k mod A. With
    "image", each client draws a distribution over the angles, and then an angle for each image.
    angles: the A angles in degrees, counter-clockwise.
    concentration: with per="image", the parameter of the Dirichlet distribution over the angles.
    interpolation: "nearest" takes the nearest pixel, "bilinear" interpolates between four pixels.
    test: "all" repeats the central test set at every angle. "spread" turns image j of the central
    test set by angle j mod A.

    The default angles and interpolation are those of FedBR's paper.
    """

    per: RotatedUnit = "none"
    angles: list[float] = field(default_factory=lambda: [15.0 * step for step in range(10)])
    concentration: float = 1.0
    interpolation: Interpolation = "nearest"
    test: TestRotation = "spread"

    def __post_init__(self) -> None:
        one_of("data.rotation.per", self.per, get_args(RotatedUnit))
        one_of("data.rotation.interpolation", self.interpolation, get_args(Interpolation))
        one_of("data.rotation.test", self.test, get_args(TestRotation))
        is_valid = self.angles and all(math.isfinite(angle) for angle in self.angles)
        require(
            "data.rotation.angles", self.angles, is_valid, "a list of at least one angle in degrees"
        )
        above("data.rotation.concentration", self.concentration, 0)


def symmetric_label_noise(
    *, labels: ArrayLike, ratio: float, num_classes: int, order: ArrayLike, shifts: ArrayLike
) -> Ints:
    """Return a copy of n labels in which exactly floor(n * ratio) labels are wrong.

    A label y becomes (y + shift) mod `num_classes`.
    labels: [n], class numbers.
    order: a permutation of the n row numbers; the first rows in it get wrong labels.
    shifts: [n], each from 1 to `num_classes` - 1.
    """
    noisy = np.array(labels, dtype=np.int64)
    changed = np.asarray(order)[: fraction_count(total=len(noisy), fraction=ratio)]
    noisy[changed] = (noisy[changed] + np.asarray(shifts)[changed]) % num_classes
    return noisy


def client_rotation_angles(*, num_clients: int, angles: ArrayLike) -> Floats:
    """Return the angle of each client: client k has the angle at index k mod A of `angles`.

    angles: [A] in degrees.
    """
    numbers = client_angle_numbers(np.arange(num_clients), len(np.asarray(angles)))
    return np.asarray(angles, dtype=np.float64)[numbers]


def image_rotation_angles(
    *, probabilities: ArrayLike, uniforms: ArrayLike, angles: ArrayLike
) -> Floats:
    """Draw the angle of each image by inverse CDF.

    angles: [A] in degrees.
    probabilities: [A], the probabilities of the A angles, or [n, A] with a row for each image.
    uniforms: [n], random numbers in [0, 1).
    """
    numbers = image_angle_numbers(np.asarray(probabilities), np.asarray(uniforms))
    return np.asarray(angles, dtype=np.float64)[numbers]


def client_angle_numbers(clients: Ints, num_angles: int) -> Ints:
    """Return the index of each client's angle: k mod `num_angles` for client k.

    clients: the numbers of the clients.
    """
    return clients % num_angles


def image_angle_numbers(probabilities: Floats, uniforms: Floats) -> Ints:
    """Draw the angle of each image; return the angle's index, int64 [n].

    Take the first angle whose cumulative probability is above the image's random number.
    probabilities: [A] for A angles, or [n, A] with a row for each image.
    uniforms: [n], a random number in [0, 1) for each image.
    """
    cumulative = np.cumsum(probabilities, axis=-1)
    # the last angle of positive probability, for uniforms above a sum of 0.99...9
    last = np.argmax(cumulative, axis=-1)
    numbers: Ints = np.minimum((cumulative <= uniforms[:, None]).sum(axis=-1), last)
    return numbers


def rotate_images(
    *,
    images: ArrayLike,
    angles: ArrayLike,
    interpolation: Interpolation = "bilinear",
) -> NDArray[np.generic]:
    """Rotate each image counter-clockwise by its angle; return images of the same type.

    Pixels from outside of an image are 0. If the type is an integer, interpolated values are
    rounded to the nearest integer, and halves are rounded up.
    images: [n, c, h, w].
    angles: [n], in degrees.
    interpolation: "nearest" takes the nearest pixel, "bilinear" interpolates between four pixels.
    """
    source, angles = np.asarray(images), np.asarray(angles, dtype=np.float64)
    rotate = _rotate_nearest if interpolation == "nearest" else _rotate_bilinear
    rotated = np.empty_like(source)
    for start in range(0, len(source), IMAGES_AT_ONCE):
        part = angles[start : start + IMAGES_AT_ONCE]
        for angle in np.unique(part):
            rows = start + np.flatnonzero(part == angle)
            is_unturned = angle % 360 == 0
            rotated[rows] = source[rows] if is_unturned else rotate(source[rows], float(angle))
    return rotated


def pool_images(images: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Shrink images: each pixel of the result is the mean of `size` x `size` pixels.

    Return uint8 [n, c, h / size, w / size]. Means are rounded to the nearest integer, halves up.
    images: uint8 [n, c, h, w]; `size` divides the height h and the width w.
    """
    n, channels, height, width = images.shape
    tiles = images.reshape(n, channels, height // size, size, width // size, size)
    sums = tiles.sum(axis=(3, 5), dtype=np.int64)
    means: NDArray[np.uint8] = ((2 * sums + size**2) // (2 * size**2)).astype(np.uint8)
    return means


def _source_pixels(height: int, width: int, angle: float) -> tuple[Floats, Floats]:
    """Return the position in the original image from which each pixel of a rotated image comes.

    The result is the pair (x, y) of arrays, float64 [height * width], in pixels.
    angle: the angle in degrees, counter-clockwise.
    """
    cos, sin = _cos_sin(angle)
    y, x = np.mgrid[:height, :width].reshape(2, -1)
    centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
    dx, dy = x - centre_x, y - centre_y
    return cos * dx - sin * dy + centre_x, sin * dx + cos * dy + centre_y


def _cos_sin(angle: float) -> tuple[float, float]:
    quarters, rest = divmod(angle, 90.0)
    if rest == 0:  # exact for quarter turns: four of them are the identity
        return ((1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0))[int(quarters) % 4]
    return math.cos(math.radians(angle)), math.sin(math.radians(angle))


def _pixels_at(images: NDArray[Pixel], x: Ints, y: Ints) -> NDArray[Pixel]:
    """Return the pixels of images [n, c, h, w] at the positions (x, y): [n, c, len(x)].

    Pixels outside an image are 0.
    """
    n, channels, height, width = images.shape
    is_inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    places = np.where(is_inside, y * width + x, 0)
    pixels: NDArray[Pixel] = images.reshape(n, channels, -1)[:, :, places]
    pixels[:, :, ~is_inside] = 0
    return pixels


def _rotate_nearest(images: NDArray[np.generic], angle: float) -> NDArray[np.generic]:
    x, y = _source_pixels(images.shape[2], images.shape[3], angle)
    nearest_x, nearest_y = np.floor(x + 0.5).astype(np.int64), np.floor(y + 0.5).astype(np.int64)
    return _pixels_at(images, nearest_x, nearest_y).reshape(images.shape)


def _rotate_bilinear(images: NDArray[np.generic], angle: float) -> NDArray[np.generic]:
    x, y = _source_pixels(images.shape[2], images.shape[3], angle)
    left, top = np.floor(x).astype(np.int64), np.floor(y).astype(np.int64)
    right_share, bottom_share = x - left, y - top
    values = images.astype(np.float64)
    mixed = np.zeros((*images.shape[:2], len(x)))
    for step_x, share_x in ((0, 1 - right_share), (1, right_share)):
        for step_y, share_y in ((0, 1 - bottom_share), (1, bottom_share)):
            mixed += _pixels_at(values, left + step_x, top + step_y) * (share_x * share_y)
    if np.issubdtype(images.dtype, np.integer):
        np.floor(mixed + 0.5, out=mixed)
    return mixed.astype(images.dtype).reshape(images.shape)
