"""Test the generated data set for segmentation."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.data.shapes import CLASS_NAMES, Shapes


def test_mask_of_an_image_covers_exactly_its_brighter_pixels() -> None:
    built = Shapes(samples=60, test_samples=12, users=3, noise=0).build()
    assert (built.kind, built.class_names, built.train_rows) == ("positions", CLASS_NAMES, 60)
    assert built.domains.tolist() == [row % 3 for row in range(72)]
    assert set(np.unique(built.labels)) == {0, 1, 2, 3}
    for image, mask in zip(built.inputs[:, 0], built.labels, strict=True):
        assert image[mask > 0].min() > image[mask == 0].max()
        assert len(np.unique(mask)) == 2


def test_images_of_the_shapes_data_set_depend_on_the_seed_alone() -> None:
    first, other = Shapes(samples=8, test_samples=0), Shapes(samples=8, test_samples=0, seed=1)
    np.testing.assert_array_equal(first.read().inputs, first.read().inputs)
    assert (first.read().inputs != other.read().inputs).any()


@pytest.mark.parametrize("key", ["samples", "users", "pixels", "noise"])
def test_shapes_data_set_refuses_impossible_settings(key: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.{key}"):
        Shapes(**{key: -1})
