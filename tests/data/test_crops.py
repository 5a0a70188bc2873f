"""Test random resized crops.

The boxes are drawn by torchvision's rules. A resized crop depends only on the pixels in its box.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from raysim.data.crops import ASPECT, TRIES, crop_boxes, resized_crops

IMAGES = torch.from_numpy(
    np.random.default_rng(0).integers(0, 256, (40, 3, 24, 20), dtype=np.uint8)
)


def boxes(height: int, width: int, area: tuple[float, float], count: int = 2000) -> np.ndarray:
    uniforms = np.random.default_rng(1).random((4, TRIES, count))
    return crop_boxes(height=height, width=width, area=area, uniforms=uniforms)


def test_crop_boxes_have_allowed_area_and_aspect_ratio() -> None:
    top, left, tall, wide = boxes(200, 200, (0.6, 0.9))
    assert (
        (top >= 0).all()
        and (left >= 0).all()
        and (top + tall <= 200).all()
        and (left + wide <= 200).all()
    )
    share, aspect = tall * wide / 200**2, wide / tall
    assert share.min() > 0.59 and share.max() < 0.91 and abs(share.mean() - 0.75) < 0.02
    assert aspect.min() > ASPECT[0] - 0.01 and aspect.max() < ASPECT[1] + 0.01
    assert abs(np.log(aspect).mean()) < 0.02, "as often wide as tall"


def test_crop_boxes_are_placed_uniformly() -> None:
    top, _, tall, _ = boxes(10, 10, (0.5, 0.5), 20_000)
    places = np.bincount(top[tall == 8])
    assert len(places) == 3 and places.min() > 0.9 * places.max(), "rows 0, 1 and 2"


def test_crop_box_is_the_first_drawn_box_that_fits_the_image() -> None:
    uniforms = np.full((4, TRIES, 1), 0.5)
    uniforms[0, :2], uniforms[1, 1:] = 1.0, 0.5
    uniforms[1, 0] = 0.0  # all of the area at aspect 3/4 is taller than the image
    assert crop_boxes(height=12, width=12, area=(0.25, 1.0), uniforms=uniforms).T.tolist() == [
        [0, 0, 12, 12]
    ]
    uniforms[1, 1] = 1.0  # now the third is the first to fit: 0.625 of the area, a square
    assert crop_boxes(height=12, width=12, area=(0.25, 1.0), uniforms=uniforms).T.tolist() == [
        [2, 2, 9, 9]
    ]


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (12, 12, [0, 0, 12, 12]),
        (12, 30, [0, 7, 12, 16]),
        (30, 12, [7, 0, 16, 12]),
        (12, 14, [0, 0, 12, 14]),
    ],
)
def test_crop_is_central_if_no_drawn_box_fits_the_image(
    height: int, width: int, expected: list[int]
) -> None:
    assert boxes(height, width, (4.0, 5.0), 3).T.tolist() == [expected] * 3


def test_crop_is_the_whole_image_if_its_drawn_area_exceeds_the_image() -> None:
    """Test areas of 0.8 to 1.2 of the image, the setting of COVID-FL.

    A crop is smaller than the image, or it is the whole image.
    """
    _, _, tall, wide = boxes(100, 100, (0.8, 1.2))
    whole = (tall == 100) & (wide == 100)
    assert 0.0 < whole.mean() < 0.1 and (tall * wide)[~whole].min() >= 7900


@pytest.mark.parametrize("box", [(0, 0, 24, 20), (3, 5, 10, 7), (20, 0, 4, 20), (0, 19, 1, 1)])
def test_resized_crop_equals_resized_part_of_the_image(
    box: tuple[int, int, int, int],
) -> None:
    top, left, tall, wide = box
    crops = resized_crops(IMAGES, np.repeat(np.array(box)[:, None], len(IMAGES), axis=1))
    part = IMAGES[:, :, top : top + tall, left : left + wide].float()
    expected = functional.interpolate(part, (24, 20), mode="bilinear", align_corners=False)
    assert crops.dtype == torch.uint8 and crops.shape == IMAGES.shape
    assert (crops.float() - expected).abs().max() <= 0.51, "equal but for rounding to whole levels"
    if box == (0, 0, 24, 20):
        assert torch.equal(crops, IMAGES)


def test_resized_crop_is_independent_of_the_batch() -> None:
    rectangles = boxes(24, 20, (0.3, 1.0), len(IMAGES))
    whole = resized_crops(IMAGES, rectangles)
    single = torch.cat(
        [resized_crops(IMAGES[k : k + 1], rectangles[:, k : k + 1]) for k in range(len(IMAGES))]
    )
    assert torch.equal(whole, single)
