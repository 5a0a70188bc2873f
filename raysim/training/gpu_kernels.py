"""Use the fastest GPU kernels in recorded steps, and forbid Python to read tensors' values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Functions whose GPU kernels may need tensors at aligned addresses.
_LAYERS = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.embedding,
    F.batch_norm,
    F.group_norm,
    F.layer_norm,
    F.instance_norm,
    F.multi_head_attention_forward,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
}
# Functions that change their second and third argument (running means and variances).
_STATISTICS_UPDATERS = {F.batch_norm, F.instance_norm}
_STATISTICS_NAMES = ("running_mean", "running_var")
# A convolution with at most so many weights per output channel is computed as a product of patches.
# The GPU's kernels for such convolutions are slow: on an H100 they took 130 us for 64 images of
# 28 x 28 pixels with one channel.
_MAX_PRODUCT_WEIGHTS = 32
_ALIGNMENT_BYTES = 16  # alignment that some GPU kernels need


def align(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy at an aligned address if its own address is not aligned.

    At an unaligned address some GPU kernels would abort the process.
    """
    if tensor.device.type != "cuda" or tensor.data_ptr() % _ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.clone()


def _align_argument(argument: Any) -> Any:
    return align(argument) if isinstance(argument, Tensor) else argument


def _call_aligned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer's function with aligned tensors; copies replace unaligned tensors.

    If the function changes running means and variances in place, such as `batch_norm`, the new
    values are copied back into the original tensors.
    """
    aligned = [_align_argument(argument) for argument in args]
    aligned_by_name = {name: _align_argument(argument) for name, argument in kwargs.items()}
    result = func(*aligned, **aligned_by_name)
    if func in _STATISTICS_UPDATERS:
        originals = [*args[1:3], *(kwargs.get(name) for name in _STATISTICS_NAMES)]
        written = [*aligned[1:3], *(aligned_by_name.get(name) for name in _STATISTICS_NAMES)]
        for statistics, values in zip(originals, written, strict=True):
            if values is not statistics:
                statistics.copy_(values)
    return result


class GpuKernels(TorchFunctionMode):
    """A torch function mode that aligns tensors and computes convolutions fast on a GPU.

    Kernels that need aligned memory get a copy of an unaligned tensor. If `modules` has no
    GroupNorm, convolutions use the memory layout "channels last", which is faster.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__()
        # Convolutions of more weights are faster if the channels of a pixel are adjacent. GroupNorm
        # would copy such tensors back.
        has_group_norm = any(isinstance(module, nn.GroupNorm) for module in modules)
        self.layout = torch.contiguous_format if has_group_norm else torch.channels_last

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of a PyTorch function, computed with suitable GPU kernels.

        PyTorch calls this method in place of each function. Layers get aligned tensors. A `conv2d`
        of a batch of images, without keyword arguments, uses fast kernels, too.
        """
        kwargs = kwargs or {}
        if func is F.conv2d and not kwargs and args[0].ndim == 4:
            return self._conv2d(*map(_align_argument, args))
        if func in _LAYERS:
            return _call_aligned(func, args, kwargs)
        return func(*args, **kwargs)

    def _conv2d(
        self,
        x: Tensor,
        w: Tensor,
        b: Tensor | None = None,
        stride: Any = (1, 1),
        padding: Any = (0, 0),
        dilation: Any = (1, 1),
        groups: int = 1,
    ) -> Tensor:
        is_plain = (
            groups == 1
            and dilation == (1, 1)
            and isinstance(stride, tuple)
            and isinstance(padding, tuple)
        )
        if is_plain and w[0].numel() <= _MAX_PRODUCT_WEIGHTS:
            return conv2d_as_product(x, w, b, stride, padding)
        x, w = x.contiguous(memory_format=self.layout), w.contiguous(memory_format=self.layout)
        return F.conv2d(x, w, b, stride, padding, dilation, groups)


def conv2d_as_product(x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any) -> Tensor:
    """Return `F.conv2d` of x [B, C, H, W] with w [O, C, h, w] as one product per image."""
    (height, width), (down, right) = w.shape[2:], stride
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    patches = x.unfold(2, height, down).unfold(3, width, right)  # [B, C, H', W', h, w]
    rows, columns = patches.shape[2:4]
    patches = patches.permute(0, 1, 4, 5, 2, 3).reshape(len(x), w[0].numel(), rows * columns)
    product = torch.matmul(w.flatten(1), patches).view(len(x), len(w), rows, columns)
    return product if b is None else product + b.view(-1, 1, 1)


# Functions through which Python reads values of tensors.
_READING = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.nonzero,
    torch.nonzero,
    Tensor.masked_select,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__contains__,
}


class NoReading(TorchFunctionMode):
    """A torch function mode that forbids Python to read values of tensors.

    A CUDA graph does not repeat what Python does with a value. With this mode, a step that reads a
    value raises an error on every device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of PyTorch, unless it returns values of a tensor to Python.

        func: the function, with its arguments `args` and `kwargs`.
        types: has no effect.
        Raises RuntimeError if `func` returns such values, as `Tensor.item` does.
        """
        if func in _READING:
            raise RuntimeError(
                f"`{func.__name__}` reads the value of a tensor in Python, but a recorded step "
                "repeats only tensor operations; compute with the tensor instead of its value"
            )
        return func(*args, **(kwargs or {}))
