"""Test that the max-pool for evaluations on a CPU has the results of PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from raysim.models.pooling import MaxPool2d

WINDOWS = [(2, None, 0), (2, 1, 0), (2, 2, 1), (3, None, 0), (3, 2, 1), (3, 1, 1), (1, 2, 0)]


def random_images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("height_and_width", [(6, 6), (7, 9), (4, 5)])
@pytest.mark.parametrize(("size", "stride", "padding"), WINDOWS)
def test_max_pool_without_gradients_equals_the_max_pool_of_pytorch(
    size: int, stride: int | None, padding: int, height_and_width: tuple[int, int]
) -> None:
    images = random_images(2, 3, *height_and_width)
    images[0, 0, 1, 1] = float("nan")
    images[1, 2, 2, 3] = float("-inf")
    with torch.no_grad():
        ours = MaxPool2d(size, stride, padding)(images)
        pytorchs = nn.MaxPool2d(size, stride, padding)(images)
    assert torch.equal(ours.nan_to_num(99.0), pytorchs.nan_to_num(99.0))


def test_max_pool_does_not_change_its_input() -> None:
    images = random_images(2, 3, 6, 6)
    before = images.clone()
    with torch.no_grad():
        MaxPool2d(3, 2, 1)(images)
    assert torch.equal(images, before)


def test_max_pool_with_gradients_has_the_gradient_of_pytorchs_max_pool() -> None:
    images = random_images(2, 3, 7, 7).relu().requires_grad_()
    (ours,) = torch.autograd.grad(MaxPool2d(3, 2, 1)(images).square().sum(), images)
    (pytorchs,) = torch.autograd.grad(nn.MaxPool2d(3, 2, 1)(images).square().sum(), images)
    assert torch.equal(ours, pytorchs)
