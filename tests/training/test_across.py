"""How convolutions are computed in a lane that is computed apart, and what stands in for `vmap` there."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.training.across import Convolutions, across_alone, alone, seen_times_weights
from raysim.training.graph import _no_collection
from raysim.training.rows import stacked_rows

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def drawn(*shape: int) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64
    ).requires_grad_()


def gradients(found: Tensor, *leaves: Tensor) -> list[Tensor]:
    weights = torch.arange(found.numel(), dtype=found.dtype).view(found.shape)
    return list(torch.autograd.grad((found * weights).sum(), leaves))


@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_of_what_is_seen_is_a_convolution(
    stride: tuple[int, int], padding: tuple[int, int], bias: bool
) -> None:
    x, w, b = drawn(2, 3, 7, 6), drawn(4, 3, 3, 2), drawn(4)
    leaves = (x, w, b) if bias else (x, w)
    expected = F.conv2d(x, w, b if bias else None, stride, padding)
    found = seen_times_weights(x, w, b if bias else None, stride, padding)
    torch.testing.assert_close(found, expected, **EXACT)
    for one, other in zip(gradients(found, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3, padding=1),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.Conv2d(2, 3, 3, dilation=2),
        nn.Conv2d(2, 3, 3, padding="same"),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    ],
    ids=["few", "usual", "groups", "dilation", "same", "circular"],
)
def test_every_convolution_stays_what_it_is(layer: nn.Conv2d, last: bool) -> None:
    layer = layer.double()
    x = drawn(2, layer.in_channels, 6, 6)
    with Convolutions(last):
        found = layer(x)
    torch.testing.assert_close(found, layer(x), **EXACT)


def test_convolutions_of_many_channels_are_computed_with_channels_last() -> None:
    x = drawn(2, 8, 6, 6)
    with Convolutions(True):
        assert nn.Conv2d(8, 4, 3).double()(x).is_contiguous(memory_format=torch.channels_last)
    with Convolutions(False):
        assert nn.Conv2d(8, 4, 3).double()(x).is_contiguous()


def test_what_one_lane_computes_is_handed_on_with_an_axis() -> None:
    def compute(given: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        assert given["x"].shape == (3,)
        doubled = across_alone(lambda whole: whole * (2 if whole.shape == (1, 3) else 0), given["x"])
        return {"y": doubled + number}

    x = torch.ones(1, 3, requires_grad=True)
    found = alone(compute)({"x": x}, 1)["y"]
    assert found.shape == (1, 3) and found.tolist() == [[3.0, 3.0, 3.0]]
    assert torch.autograd.grad(found.sum(), x)[0].tolist() == [[2.0, 2.0, 2.0]]


@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(RuntimeError), _no_collection():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()


def test_rows_begin_on_borders_and_are_copies() -> None:
    flat = torch.arange(5.0)
    rows = stacked_rows(flat, 3, border=4)
    assert rows.tolist() == 3 * [flat.tolist()]
    assert [rows[row].storage_offset() for row in range(3)] == [0, 8, 16]
    assert stacked_rows(flat, 3).is_contiguous()
