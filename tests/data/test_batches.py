"""The training pipeline: exact normalisation, and augmentation that moves pixels without inventing any."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from raysim.data.batches import Pipeline

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (64, 3, 8, 6), dtype=np.uint8))


def test_normalisation_is_scale_then_subtract_then_divide_bit_for_bit() -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    expected = (IMAGES.float() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.equal(Pipeline(mean, std).normalise(IMAGES), expected)
    assert torch.equal(Pipeline().normalise(IMAGES), IMAGES.float() / 255)


def test_normalisation_keeps_leading_axes_accepts_one_value_and_leaves_its_input_alone() -> None:
    before, pipeline = IMAGES.clone(), Pipeline((0.5,), (0.5,))
    lanes = pipeline.normalise(IMAGES.reshape(4, 16, 3, 8, 6), torch.float64)
    assert lanes.dtype == torch.float64 and lanes.shape == (4, 16, 3, 8, 6)
    assert torch.equal(lanes.reshape(IMAGES.shape), (IMAGES.double() / 255 - 0.5) / 0.5)
    assert torch.equal(IMAGES, before)


def test_no_augmentation_returns_the_same_object_and_draws_nothing() -> None:
    rng = np.random.default_rng(1)
    assert Pipeline().augmented(IMAGES, rng) is IMAGES
    assert rng.random() == np.random.default_rng(1).random()


def test_a_flip_mirrors_about_half_of_the_images_and_keeps_the_others() -> None:
    flipped = Pipeline(augment=("flip",)).augmented(IMAGES, np.random.default_rng(2))
    mirrored = sum(torch.equal(a, b.flip(-1)) for a, b in zip(flipped, IMAGES, strict=True))
    kept = sum(torch.equal(a, b) for a, b in zip(flipped, IMAGES, strict=True))
    assert mirrored + kept == 64 and 16 < mirrored < 48


def test_a_crop_is_a_window_of_the_zero_padded_image() -> None:
    padding = 2
    cropped = Pipeline(augment=("crop",), crop_padding=padding).augmented(IMAGES, np.random.default_rng(3))
    padded = torch.nn.functional.pad(IMAGES, (padding,) * 4)
    windows = padded.unfold(2, 8, 1).unfold(3, 6, 1)  # [B, c, 5, 5, 8, 6]
    places = [(windows[i] == cropped[i][:, None, None]).all(-1).all(-1).all(0).nonzero().tolist() for i in range(64)]
    assert all(places) and len({tuple(place[0]) for place in places}) > 15
    assert cropped.dtype == torch.uint8 and cropped.is_contiguous()


@pytest.mark.parametrize("augment", [("crop",), ("flip",), ("crop", "flip")])
def test_augmentation_is_a_function_of_the_stream(augment: tuple[str, ...]) -> None:
    pipeline = pickle.loads(pickle.dumps(Pipeline(augment=augment)))
    first, again, other = (pipeline.augmented(IMAGES, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_rotation_by_a_right_angle_moves_every_pixel_and_a_small_one_leaves_the_centre() -> None:
    square = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)

    class Right:
        def uniform(self, low: float, high: float, size: int) -> np.ndarray:
            return np.full(size, 90.0)

    turned = Pipeline(augment=("rotate",), rotate_degrees=90).augmented(square, Right())  # type: ignore[arg-type]
    assert torch.equal(turned, torch.rot90(square, 1, (2, 3))), "counter-clockwise"
    images = torch.full((50, 2, 9, 9), 7, dtype=torch.uint8)
    some = Pipeline(augment=("rotate",)).augmented(images, np.random.default_rng(0))
    assert (some[:, :, 4, 4] == 7).all() and set(some.unique().tolist()) == {0, 7}, "corners are left empty"
    still = Pipeline(augment=("rotate",), rotate_degrees=0.0).augmented(IMAGES, np.random.default_rng(0))
    assert torch.equal(still, IMAGES)


def test_rotation_comes_after_crop_and_flip_and_leaves_their_draws_alone() -> None:
    both = Pipeline(augment=("crop", "flip", "rotate"), rotate_degrees=0.0)
    alone = Pipeline(augment=("crop", "flip"))
    found, expected = (each.augmented(IMAGES, np.random.default_rng(3)) for each in (both, alone))
    assert torch.equal(found, expected)
