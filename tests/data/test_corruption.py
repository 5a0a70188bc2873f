"""Test the number of wrong labels, and the angles and the direction of rotations."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.data.corruption import (
    Rotation,
    client_rotation_angles,
    image_rotation_angles,
    pool_images,
    rotate_images,
    symmetric_label_noise,
)

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (5, 3, 6, 6), dtype=np.uint8)


def noisy(labels: np.ndarray, ratio: float, classes: int) -> np.ndarray:
    shifts = RNG.integers(1, classes, len(labels))
    return symmetric_label_noise(
        labels=labels,
        ratio=ratio,
        num_classes=classes,
        order=RNG.permutation(len(labels)),
        shifts=shifts,
    )


@pytest.mark.parametrize("ratio", [0.0, 0.29, 0.5, 1.0])
def test_label_noise_changes_the_given_share_of_labels(ratio: float) -> None:
    labels = RNG.integers(0, 7, 100)
    changed = noisy(labels, ratio, 7)
    assert (changed != labels).sum() == round(100 * ratio)
    assert changed.min() >= 0 and changed.max() < 7


def test_label_noise_with_share_one_inverts_all_binary_labels() -> None:
    labels = RNG.integers(0, 2, 50)
    assert np.array_equal(noisy(labels, 1.0, 2), 1 - labels)


def test_clients_take_rotation_angles_in_turn() -> None:
    assert client_rotation_angles(num_clients=5, angles=[0, 15, 30]).tolist() == [0, 15, 30, 0, 15]


def test_rotation_angle_with_probability_zero_is_never_drawn() -> None:
    drawn = image_rotation_angles(
        probabilities=[0.0, 0.3, 0.7, 0.0], uniforms=[0.0, 0.3, 1.0], angles=[1, 2, 3, 4]
    )
    assert drawn.tolist() == [2, 3, 3]


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("size", [6, 7])
def test_rotation_by_four_quarter_turns_restores_the_images(interpolation: str, size: int) -> None:
    images = RNG.integers(0, 256, (4, 1, size, size), dtype=np.uint8)
    turned = images
    for _ in range(4):
        turned = rotate_images(images=turned, angles=np.full(4, 90.0), interpolation=interpolation)
    assert np.array_equal(turned, images)
    assert np.array_equal(
        rotate_images(images=images, angles=np.full(4, 90.0), interpolation=interpolation),
        np.rot90(images, axes=(2, 3)),
    )


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_quarter_turn_moves_right_edge_to_top(
    interpolation: str,
) -> None:
    image = np.zeros((2, 1, 5, 5), dtype=np.uint8)
    image[:, :, :, -1] = 200
    turned = rotate_images(images=image, angles=[90.0, 0.0], interpolation=interpolation)
    assert (turned[0, 0, 0] == 200).all() and turned[0, 0, 1:].sum() == 0
    assert np.array_equal(turned[1], image[1])


def test_rotation_of_an_image_does_not_depend_on_the_rest_of_its_batch() -> None:
    angles = np.array([15.0, 0.0, 135.0, 15.0, 270.0])
    together = rotate_images(images=IMAGES, angles=angles)
    alone = [rotate_images(images=IMAGES[i : i + 1], angles=angles[i : i + 1])[0] for i in range(5)]
    assert np.array_equal(together, np.stack(alone))


def test_rotation_agrees_with_nearest_neighbour_of_pillow() -> None:
    from PIL import Image

    image = RNG.integers(0, 256, (28, 28), dtype=np.uint8)
    for angle in (15.0, 30.0, 60.0, 75.0, 90.0, 105.0, 120.0):
        turned = rotate_images(images=image[None, None], angles=[angle], interpolation="nearest")[
            0, 0
        ]
        assert np.array_equal(turned, np.asarray(Image.fromarray(image).rotate(angle))), angle


def test_block_averages_of_pixels_round_half_up() -> None:
    image = np.array([[0, 1, 255, 255], [0, 1, 255, 255]], dtype=np.uint8)[None, None]
    assert pool_images(image, 2).tolist() == [[[[1, 255]]]]
    assert pool_images(np.array([[0, 1], [0, 0]], dtype=np.uint8)[None, None], 2).tolist() == [
        [[[0]]]
    ]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"per": "row"}, r"data\.rotation\.per='row'"),
        ({"angles": []}, r"data\.rotation\.angles=\[\]"),
        ({"concentration": 0.0}, r"data\.rotation\.concentration=0\.0"),
    ],
)
def test_impossible_rotation_is_rejected(settings: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Rotation(**settings)
