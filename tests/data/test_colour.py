"""Test that colour augmentation has torchvision's formulas, with separate strengths per image."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from raysim.data.colour import (
    from_hsv,
    luma,
    make_grey,
    scale_brightness,
    scale_contrast,
    scale_saturation,
    shift_hue,
    to_hsv,
)

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (30, 3, 9, 7), dtype=np.uint8))
FACTORS = torch.linspace(0.5, 1.5, 30)
CHANGES = [
    (scale_brightness, FACTORS, "adjust_brightness"),
    (scale_contrast, FACTORS, "adjust_contrast"),
    (scale_saturation, FACTORS, "adjust_saturation"),
    (shift_hue, torch.linspace(-0.5, 0.5, 30), "adjust_hue"),
]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """Return torchvision's module of functions for images, whose import takes seconds."""
    from torchvision.transforms import functional

    return functional


@pytest.mark.parametrize(("change", "strengths", "theirs"), CHANGES)
def test_colour_change_equals_torchvision_for_each_image(
    change: Callable[[Tensor, Tensor], Tensor],
    strengths: Tensor,
    theirs: str,
    reference: ModuleType,
) -> None:
    changed, adjust = change(IMAGES, strengths), getattr(reference, theirs)
    expected = torch.stack(
        [adjust(image, float(s)) for image, s in zip(IMAGES, strengths, strict=True)]
    )
    difference = (changed.int() - expected.int()).abs()
    assert (
        changed.dtype == torch.uint8 and difference.max() <= 2 and difference.float().mean() < 0.8
    )
    assert difference.float().mean() < (expected.int() - IMAGES.int()).abs().float().mean() / 10


@pytest.mark.parametrize(
    ("change", "strength"),
    [(scale_brightness, 1.0), (scale_contrast, 1.0), (scale_saturation, 1.0), (shift_hue, 0)],
)
def test_colour_change_with_neutral_strengths_leaves_images_unchanged(
    change: Callable[[Tensor, Tensor], Tensor], strength: float
) -> None:
    before = IMAGES.clone()
    assert torch.equal(change(IMAGES, torch.full((30,), strength)), before) and torch.equal(
        IMAGES, before
    )


def test_hue_shift_of_a_third_turns_red_to_green() -> None:
    assert torch.equal(shift_hue(IMAGES, torch.ones(30)), IMAGES)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).reshape(1, 3, 1, 1)
    assert shift_hue(red, torch.tensor([1 / 3])).flatten().tolist() == [0, 255, 0]


def test_hsv_conversion_is_invertible() -> None:
    levels = torch.arange(0, 256, 15).float() / 255
    colours = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, -1, 1)
    assert torch.allclose(from_hsv(*to_hsv(colours)), colours, atol=1e-6)


def test_make_grey_changes_only_chosen_images(reference: ModuleType) -> None:
    is_chosen = torch.arange(30) % 3 == 0
    changed = make_grey(IMAGES, is_chosen)
    assert torch.equal(changed[~is_chosen], IMAGES[~is_chosen])
    assert (changed[is_chosen] == changed[is_chosen][:, :1]).all()
    expected = reference.rgb_to_grayscale(IMAGES[is_chosen]).int()
    assert (changed[is_chosen][:, :1].int() - expected).abs().max() <= 1
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(luma(levels.expand(1, 3, 16, 16)), levels.int())


@pytest.mark.parametrize(
    ("change", "strengths"),
    [(scale_saturation, FACTORS), (shift_hue, FACTORS - 1), (make_grey, torch.arange(30) % 2 == 0)],
)
def test_saturation_and_hue_changes_leave_grey_images_unchanged(
    change: Callable[[Tensor, Tensor], Tensor], strengths: Tensor
) -> None:
    grey = IMAGES[:, :1]
    assert torch.equal(change(grey, strengths), grey)
    assert torch.equal(change(grey.repeat(1, 3, 1, 1), strengths), grey.repeat(1, 3, 1, 1))


@pytest.mark.parametrize(
    ("change", "strengths"), [(scale_brightness, FACTORS), (scale_contrast, FACTORS)]
)
def test_colour_change_of_a_grey_image_is_equal_with_one_or_three_channels(
    change: Callable[[Tensor, Tensor], Tensor], strengths: Tensor
) -> None:
    grey = IMAGES[:, :1]
    assert torch.equal(
        change(grey.repeat(1, 3, 1, 1), strengths), change(grey, strengths).repeat(1, 3, 1, 1)
    )
