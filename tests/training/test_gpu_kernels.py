"""Test convolutions in recorded steps, and Python operations that a CUDA graph cannot record."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raysim.training import gpu_kernels
from raysim.training.cuda_graph import Branches, no_garbage_collection, recorder
from raysim.training.gpu_kernels import GpuKernels, NoReading, align, conv2d_as_product
from raysim.training.recorded_lanes import stacked_rows

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
def test_convolution_computed_as_matrix_product_equals_conv2d_of_pytorch(
    stride: tuple[int, int], padding: tuple[int, int], bias: bool
) -> None:
    x, w, b = drawn(2, 3, 7, 6), drawn(4, 3, 3, 2), drawn(4)
    leaves = (x, w, b) if bias else (x, w)
    expected = F.conv2d(x, w, b if bias else None, stride, padding)
    found = conv2d_as_product(x, w, b if bias else None, stride, padding)
    torch.testing.assert_close(found, expected, **EXACT)
    for one, other in zip(gradients(found, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize(
    "other", [nn.ReLU(), nn.GroupNorm(1, 2)], ids=["channels last", "contiguous"]
)
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
def test_convolution_with_channels_last_equals_the_usual_convolution(
    layer: nn.Conv2d, other: nn.Module
) -> None:
    layer = layer.double()
    x = drawn(2, layer.in_channels, 6, 6)
    with GpuKernels([other]):
        found = layer(x)
    torch.testing.assert_close(found, layer(x), **EXACT)


def test_convolutions_of_many_channels_use_the_channels_last_format() -> None:
    x = drawn(2, 8, 6, 6)
    with GpuKernels([]):
        assert nn.Conv2d(8, 4, 3).double()(x).is_contiguous(memory_format=torch.channels_last)
    with GpuKernels([nn.GroupNorm(1, 2)]):
        assert nn.Conv2d(8, 4, 3).double()(x).is_contiguous()


def test_align_function_returns_an_unaligned_cpu_tensor_without_a_copy() -> None:
    unaligned = torch.zeros(5)[1:]
    assert align(unaligned) is unaligned


def test_step_in_graph_capture_can_read_shapes_but_no_values() -> None:
    x = torch.ones(3)
    with NoReading():
        assert len(x) == 3 and x.shape[0] == 3 and (x + 1).dtype == torch.float32
        for read in (
            lambda: x.sum().item(),
            lambda: bool(x[0]),
            lambda: 1.0 in x,
            lambda: [0, 1, 2][x[0].long()],
        ):
            with pytest.raises(RuntimeError, match="reads the value"):
                read()


def test_recorder_on_a_cpu_computes_again_instead_of_replaying() -> None:
    numbers = iter(range(2))
    replay = recorder(torch.device("cpu"))(lambda: [torch.tensor(next(numbers))])
    assert [int(replay()[0]) for _ in range(2)] == [0, 1]


def test_branches_of_a_recorded_graph_are_sequential_on_a_cpu() -> None:
    branches, order = Branches(torch.device("cpu")), list[int]()
    for place in range(3):
        with branches.branch(place):
            order.append(place)
    branches.join()
    assert order == [0, 1, 2]


@pytest.mark.parametrize("on", [True, False])
def test_garbage_collector_is_off_only_while_a_cuda_graph_is_recorded(on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(RuntimeError), no_garbage_collection():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == on
    finally:
        (gc.enable if before else gc.disable)()


def test_stacked_rows_are_copies_that_start_at_multiples_of_the_alignment() -> None:
    flat = torch.arange(5.0)
    rows = stacked_rows(flat, 3, alignment=4)
    assert rows.tolist() == 3 * [flat.tolist()]
    assert [rows[row].storage_offset() for row in range(3)] == [0, 8, 16]
    assert stacked_rows(flat, 3, alignment=1).is_contiguous()


class SeesAddresses(TorchFunctionMode):
    """A mode that notes, for each call of `batch_norm` or `instance_norm`, how tensors are aligned.

    aligned: for each call, whether all its tensors start at multiples of 16 bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.aligned: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.batch_norm, F.instance_norm):
            tensors = [
                value for value in [*args, *(kwargs or {}).values()] if isinstance(value, Tensor)
            ]
            self.aligned.append(all(tensor.data_ptr() % 16 == 0 for tensor in tensors))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("by_name", [False, True], ids=["positions", "names"])
@pytest.mark.parametrize(
    ("function", "updates"), [(F.batch_norm, "training"), (F.instance_norm, "use_input_stats")]
)
def test_batchnorm_updates_original_statistics_if_it_computes_on_aligned_copies(
    function: Any, updates: str, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpu_kernels,
        "align",
        lambda tensor: tensor if tensor.data_ptr() % 16 == 0 else tensor.clone(),
    )
    x = torch.arange(60.0).view(4, 3, 5).sin()
    flats = [torch.linspace(0.5, 2.0, 7) for _ in range(2)]
    results, notes = [], SeesAddresses()
    for flat, modes in zip(flats, ([], [notes, GpuKernels([])]), strict=True):
        mean, var = flat[1:4], flat[4:7]  # as in a client's vector: not at multiples of 16 bytes
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            if by_name:
                statistics = {"running_mean": mean, "running_var": var}
                results.append(function(x, **statistics, momentum=0.3, **{updates: True}))
            else:
                results.append(function(x, mean, var, None, None, True, 0.3))
    assert torch.equal(results[0], results[1])
    assert torch.equal(flats[0], flats[1])
    assert notes.aligned == [True]
