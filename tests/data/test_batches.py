"""Test the normalisation and the augmentation of training batches."""

from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch

from raysim.data import colour
from raysim.data.batches import Pipeline
from raysim.data.crops import TRIES, crop_boxes, resized_crops

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (64, 3, 8, 6), dtype=np.uint8))


def test_normalise_divides_by_255_then_standardises_by_mean_and_std() -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    expected = (IMAGES.float() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    assert torch.equal(Pipeline(mean, std).normalise(IMAGES), expected)
    assert torch.equal(Pipeline().normalise(IMAGES), IMAGES.float() / 255)


def test_normalise_returns_the_input_shape_and_does_not_change_the_input() -> None:
    before, pipeline = IMAGES.clone(), Pipeline((0.5,), (0.5,))
    lanes = pipeline.normalise(IMAGES.reshape(4, 16, 3, 8, 6), torch.float64)
    assert lanes.dtype == torch.float64 and lanes.shape == (4, 16, 3, 8, 6)
    assert torch.equal(lanes.reshape(IMAGES.shape), (IMAGES.double() / 255 - 0.5) / 0.5)
    assert torch.equal(IMAGES, before)


def test_batches_without_augmentation_draw_no_random_numbers() -> None:
    rng = np.random.default_rng(1)
    assert Pipeline().augment_images(IMAGES, rng) is IMAGES
    assert rng.random() == np.random.default_rng(1).random()


def test_flip_mirrors_about_half_of_the_images() -> None:
    flipped = Pipeline(augment=("flip",)).augment_images(IMAGES, np.random.default_rng(2))
    mirrored = sum(torch.equal(a, b.flip(-1)) for a, b in zip(flipped, IMAGES, strict=True))
    unchanged = sum(torch.equal(a, b) for a, b in zip(flipped, IMAGES, strict=True))
    assert mirrored + unchanged == 64 and 16 < mirrored < 48


def test_random_crop_is_a_window_of_the_padded_image() -> None:
    padding = 2
    cropped = Pipeline(augment=("crop",), crop_padding=padding).augment_images(
        IMAGES, np.random.default_rng(3)
    )
    padded = torch.nn.functional.pad(IMAGES, (padding,) * 4)
    windows = padded.unfold(2, 8, 1).unfold(3, 6, 1)  # [B, c, 5, 5, 8, 6]
    places = [
        (windows[i] == cropped[i][:, None, None]).all(-1).all(-1).all(0).nonzero().tolist()
        for i in range(64)
    ]
    assert all(places) and len({tuple(place[0]) for place in places}) > 15
    assert cropped.dtype == torch.uint8 and cropped.is_contiguous()


ALL = ("resized_crop", "crop", "flip", "rotate", "jitter", "grey")


@pytest.mark.parametrize(
    "augment", [("crop",), ("flip",), ("crop", "flip"), ("resized_crop",), ("jitter",), ALL]
)
def test_augmentation_depends_only_on_the_random_stream(augment: tuple[str, ...]) -> None:
    pipeline = pickle.loads(pickle.dumps(Pipeline(augment=augment)))
    first, again, other = (
        pipeline.augment_images(IMAGES, np.random.default_rng(seed)) for seed in (5, 5, 6)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_rotation_moves_pixels_counter_clockwise() -> None:
    square = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)

    class Right:
        def uniform(self, low: float, high: float, size: int) -> np.ndarray:
            return np.full(size, 90.0)

    pipeline = Pipeline(augment=("rotate",), rotate_degrees=90)
    turned = pipeline.augment_images(square, Right())  # type: ignore[arg-type]
    assert torch.equal(turned, torch.rot90(square, 1, (2, 3))), "counter-clockwise"
    images = torch.full((50, 2, 9, 9), 7, dtype=torch.uint8)
    some = Pipeline(augment=("rotate",)).augment_images(images, np.random.default_rng(0))
    assert (some[:, :, 4, 4] == 7).all() and set(some.unique().tolist()) == {0, 7}, (
        "corners are left empty"
    )
    still = Pipeline(augment=("rotate",), rotate_degrees=0.0).augment_images(
        IMAGES, np.random.default_rng(0)
    )
    assert torch.equal(still, IMAGES)


def test_rotation_is_applied_after_crop_and_flip() -> None:
    both = Pipeline(augment=("crop", "flip", "rotate"), rotate_degrees=0.0)
    alone = Pipeline(augment=("crop", "flip"))
    rotated, unrotated = (
        pipeline.augment_images(IMAGES, np.random.default_rng(3)) for pipeline in (both, alone)
    )
    assert torch.equal(rotated, unrotated)


def test_augmented_images_have_a_known_checksum() -> None:
    moved = Pipeline(augment=("crop", "flip", "rotate")).augment_images(
        IMAGES, np.random.default_rng(5)
    )
    assert hashlib.sha256(moved.numpy().tobytes()).hexdigest()[:16] == "78083843e9596208"


def test_augmentations_run_in_the_documented_order() -> None:
    pipeline = Pipeline(augment=ALL[::-1], crop_area=(0.5, 0.9), jitter=0.4, grey=0.5)
    augmented = pipeline.augment_images(IMAGES, np.random.default_rng(7))
    rng, count = np.random.default_rng(7), len(IMAGES)
    boxes = crop_boxes(height=8, width=6, area=(0.5, 0.9), uniforms=rng.random((4, TRIES, count)))
    images = Pipeline(augment=("crop", "flip", "rotate")).augment_images(
        resized_crops(IMAGES, boxes), rng
    )
    factors = torch.from_numpy(rng.uniform(0.6, 1.4, (3, count))).float()
    for change, strength in zip(
        (colour.scale_brightness, colour.scale_contrast, colour.scale_saturation),
        factors,
        strict=True,
    ):
        images = change(images, strength)
    images = colour.shift_hue(images, torch.from_numpy(rng.uniform(-0.4, 0.4, count)).float())
    images = colour.make_grey(images, torch.from_numpy(rng.random(count) < 0.5))
    assert torch.equal(augmented, images)
    assert augmented.dtype == torch.uint8 and augmented.shape == IMAGES.shape


def test_augmentation_of_a_grey_image_is_equal_with_one_or_three_channels() -> None:
    """Compare augmentation before and after a grey channel is repeated three times.

    FRAug repeats the channel after the augmentation, raysim before.
    """
    one, pipeline = IMAGES[:, :1], Pipeline(augment=ALL, grey=0.5)
    single = pipeline.augment_images(one, np.random.default_rng(3))
    triple = pipeline.augment_images(one.repeat(1, 3, 1, 1), np.random.default_rng(3))
    assert torch.equal(triple, single.repeat(1, 3, 1, 1))


def test_setting_grey_is_the_probability_that_an_image_becomes_grey() -> None:
    images = IMAGES.repeat(20, 1, 1, 1)
    changed = Pipeline(augment=("grey",), grey=0.1).augment_images(images, np.random.default_rng(0))
    grey = (changed == changed[:, :1]).flatten(1).all(1)
    assert 90 < int(grey.sum()) < 170 and torch.equal(changed[~grey], images[~grey])
