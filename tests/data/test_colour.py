"""Colour augmentation: torchvision's formulas up to rounding, one strength per image, nothing to do for grey."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from raysim.data.colour import (
    brightened,
    contrasted,
    from_hsv,
    greyed,
    hue_turned,
    luma,
    saturated,
    to_hsv,
)

IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (30, 3, 9, 7), dtype=np.uint8))
FACTORS = torch.linspace(0.5, 1.5, 30)
CHANGES = [
    (brightened, FACTORS, "adjust_brightness"),
    (contrasted, FACTORS, "adjust_contrast"),
    (saturated, FACTORS, "adjust_saturation"),
    (hue_turned, torch.linspace(-0.5, 0.5, 30), "adjust_hue"),
]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """What torchvision does to one image; reading it takes seconds."""
    from torchvision.transforms import functional

    return functional


@pytest.mark.parametrize(("change", "strengths", "theirs"), CHANGES)
def test_a_change_is_torchvisions_with_a_strength_of_each_images_own(
    change: Callable[[Tensor, Tensor], Tensor],
    strengths: Tensor,
    theirs: str,
    reference: ModuleType,
) -> None:
    found, adjusted = change(IMAGES, strengths), getattr(reference, theirs)
    expected = torch.stack(
        [adjusted(image, float(s)) for image, s in zip(IMAGES, strengths, strict=True)]
    )
    difference = (found.int() - expected.int()).abs()
    assert found.dtype == torch.uint8 and difference.max() <= 2 and difference.float().mean() < 0.8
    assert difference.float().mean() < (expected.int() - IMAGES.int()).abs().float().mean() / 10


@pytest.mark.parametrize(
    ("change", "strength"),
    [(brightened, 1.0), (contrasted, 1.0), (saturated, 1.0), (hue_turned, 0)],
)
def test_neutral_strengths_change_nothing(
    change: Callable[[Tensor, Tensor], Tensor], strength: float
) -> None:
    before = IMAGES.clone()
    assert torch.equal(change(IMAGES, torch.full((30,), strength)), before) and torch.equal(
        IMAGES, before
    )


def test_a_full_turn_of_the_hue_leads_back_and_a_third_moves_red_to_green() -> None:
    assert torch.equal(hue_turned(IMAGES, torch.ones(30)), IMAGES)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).reshape(1, 3, 1, 1)
    assert hue_turned(red, torch.tensor([1 / 3])).flatten().tolist() == [0, 255, 0]


def test_every_colour_survives_hue_saturation_and_value() -> None:
    levels = torch.arange(0, 256, 15).float() / 255
    colours = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, -1, 1)
    assert torch.allclose(from_hsv(*to_hsv(colours)), colours, atol=1e-6)


def test_grey_is_exact_for_grey_and_hits_only_the_chosen(reference: ModuleType) -> None:
    chosen = torch.arange(30) % 3 == 0
    found = greyed(IMAGES, chosen)
    assert torch.equal(found[~chosen], IMAGES[~chosen])
    assert (found[chosen] == found[chosen][:, :1]).all()
    expected = reference.rgb_to_grayscale(IMAGES[chosen]).int()
    assert (found[chosen][:, :1].int() - expected).abs().max() <= 1
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert torch.equal(luma(levels.expand(1, 3, 16, 16)), levels.int())


@pytest.mark.parametrize(
    ("change", "strengths"),
    [(saturated, FACTORS), (hue_turned, FACTORS - 1), (greyed, torch.arange(30) % 2 == 0)],
)
def test_saturation_hue_and_grey_leave_grey_images_alone(
    change: Callable[[Tensor, Tensor], Tensor], strengths: Tensor
) -> None:
    grey = IMAGES[:, :1]
    assert torch.equal(change(grey, strengths), grey)
    assert torch.equal(change(grey.repeat(1, 3, 1, 1), strengths), grey.repeat(1, 3, 1, 1))


@pytest.mark.parametrize(("change", "strengths"), [(brightened, FACTORS), (contrasted, FACTORS)])
def test_one_channel_repeated_is_changed_as_the_one(
    change: Callable[[Tensor, Tensor], Tensor], strengths: Tensor
) -> None:
    grey = IMAGES[:, :1]
    assert torch.equal(
        change(grey.repeat(1, 3, 1, 1), strengths), change(grey, strengths).repeat(1, 3, 1, 1)
    )
