"""Inside `torch.func.vmap`: what is computed with the tensors of all lanes at once, [K, ...] each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


def across(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """What `compute` makes of the tensors of all lanes at once; autograd sees what it does."""
    found: Tensor = _Across.apply(compute, *tensors)
    return found


def alone(compute: Callable[..., Any]) -> Callable[..., Any]:
    """As `vmap` of it, where there is one lane: what a client computes by itself, handed on with an axis in front."""

    def computed(*trees: Any) -> Any:
        found = compute(*pytree.tree_map_only(Tensor, lambda whole: whole.squeeze(0), trees))
        return pytree.tree_map_only(Tensor, lambda own: own.unsqueeze(0), found)

    return computed


def across_alone(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """As `across`, inside `alone`."""
    return compute(*(tensor.unsqueeze(0) for tensor in tensors)).squeeze(0)


_FEW = 32  # weights of one output of a convolution that is computed as a product


class Convolutions(TorchFunctionMode):
    """Convolutions of pictures as a GPU computes them fastest.

    Those of few channels are a product of what each output sees: on an H100 kernels for convolutions took 130 us for 64
    pictures of 28 x 28 with one channel. Others get tensors in which the channels of a pixel lie together, unless the
    network has layers that would copy them back (GroupNorm).
    """

    def __init__(self, channels_last: bool):
        super().__init__()
        self.layout = torch.channels_last if channels_last else torch.contiguous_format

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See above."""
        if func is F.conv2d and not kwargs and args[0].ndim == 4:
            return self._conv(*args)
        return func(*args, **(kwargs or {}))

    def _conv(
        self,
        x: Tensor,
        w: Tensor,
        b: Tensor | None = None,
        stride: Any = (1, 1),
        padding: Any = (0, 0),
        dilation: Any = (1, 1),
        groups: int = 1,
    ) -> Tensor:
        plain = groups == 1 and dilation == (1, 1) and isinstance(stride, tuple) and isinstance(padding, tuple)
        if plain and w[0].numel() <= _FEW:
            return seen_times_weights(x, w, b, stride, padding)
        x, w = x.contiguous(memory_format=self.layout), w.contiguous(memory_format=self.layout)
        return F.conv2d(x, w, b, stride, padding, dilation, groups)


def seen_times_weights(x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any) -> Tensor:
    """`F.conv2d` of x [B, C, H, W] with w [O, C, h, w] as one product for each picture."""
    (high, wide), (down, right) = w.shape[2:], stride
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    seen = x.unfold(2, high, down).unfold(3, wide, right)  # [B, C, H', W', h, w]
    rows, columns = seen.shape[2:4]
    seen = seen.permute(0, 1, 4, 5, 2, 3).reshape(len(x), w[0].numel(), rows * columns)
    found = torch.matmul(w.flatten(1), seen).view(len(x), len(w), rows, columns)
    return found if b is None else found + b.view(-1, 1, 1)


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Of constants that all lanes share."""
        return compute(*(tensor.unsqueeze(0) for tensor in tensors))[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], compute: Callable[..., Tensor], *tensors: Tensor) -> Any:
        """With the axis of the lanes in front."""
        whole = [_in_front(tensor, dim, info.batch_size) for tensor, dim in zip(tensors, in_dims[1:], strict=True)]
        with _with_gradient():
            return compute(*whole), 0


def _with_gradient() -> torch.set_grad_enabled:
    """A rule of `vmap` is followed below autograd, which has to see it, unless nobody wants a gradient."""
    return torch.set_grad_enabled(not torch.is_inference_mode_enabled())


def _in_front(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    if dim is None:
        return tensor.expand(count, *tensor.shape)
    return tensor.movedim(dim, 0) if dim else tensor


class _Products(torch.autograd.Function):
    """x w^T + b of every lane: x [K, B, n], w [K, m, n], b [K, m].

    What autograd makes of the same products is the gradient of w^T, which lies in memory the other way round than w:
    adding it to w takes longer than all products together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """[K, B, m]"""
        ctx.save_for_backward(x, w)
        return torch.bmm(x, w.transpose(1, 2)) if b is None else torch.baddbmm(b.unsqueeze(1), x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Of x, w and b."""
        x, w = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (
            torch.bmm(grad, w) if needs[0] else None,
            torch.bmm(grad.transpose(1, 2), x) if needs[1] else None,
            grad.sum(1) if needs[2] else None,
        )


class _Linear(torch.autograd.Function):
    """`F.linear` of x [..., n], which may be one for all lanes, as may be w and b."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Of constants that all lanes share."""
        return F.linear(x, w, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], x: Tensor, w: Tensor, b: Tensor | None) -> Any:
        """Rows of one lane are multiplied with its own w."""
        with _with_gradient():
            x = _in_front(x, in_dims[0], info.batch_size)
            if in_dims[1] is None and in_dims[2] is None:
                return F.linear(x, w, b), 0
            w = _in_front(w, in_dims[1], info.batch_size)
            bias = None if b is None else _in_front(b, in_dims[2], info.batch_size)
            if torch.is_autocast_enabled(x.device.type):  # its gradient is computed where autocast is over
                precision = torch.get_autocast_dtype(x.device.type)
                x, w, bias = x.to(precision), w.to(precision), None if bias is None else bias.to(precision)
            rows = _Products.apply(x.reshape(len(x), -1, x.shape[-1]), w, bias)
            return rows.view(*x.shape[:-1], w.shape[1]), 0


def _of_classes(*args: Any, **options: Any) -> bool:
    """Whether it is the mean over rows of logits [B, C] with labels [B], and nothing else is asked for.

    (The function itself calls again with all its options by name.)
    """
    usual: dict[str, Any] = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    asked = all(usual.get(name) == value for name, value in options.items())
    return asked and len(args) == 2 and args[0].ndim == 2 and args[1].ndim == 1


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """`F.cross_entropy` in a fourth of its operations: no label is left out."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits  # as autocast would
    return -F.log_softmax(logits, 1).gather(1, labels.unsqueeze(1)).mean()


class InLanes(TorchFunctionMode):
    """What a model computes in lanes in another way than alone.

    Linear layers and cross-entropy, for speed; and draws: every client draws from its own generator, as it would alone.
    What is drawn otherwise, `vmap` refuses.
    """

    def __init__(self, generators: Mapping[int, torch.Generator], lane: Tensor):
        super().__init__()
        self.generators, self.lane = generators, lane  # by row; any tensor that each lane has of its own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See above."""
        kwargs = kwargs or {}
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.cross_entropy and _of_classes(*args, **kwargs):
            return _cross_entropy(*args[:2])
        if func is F.batch_norm and torch.is_autocast_enabled(args[0].device.type):
            return func(args[0].float(), *args[1:], **kwargs)  # under vmap it takes no inputs coarser than its weights
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func in (torch.randn_like, torch.rand_like) and not kwargs:
            return self._drawn(args[0], Tensor.normal_ if func is torch.randn_like else Tensor.uniform_)
        return func(*args, **kwargs)

    @staticmethod
    def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found: Tensor = _Linear.apply(input, weight, bias)
        return found

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or not 0 < p < 1:
            return F.dropout(input, p, training)
        fill = lambda noise, generator: noise.bernoulli_(1 - p, generator=generator).div_(1 - p)  # noqa: E731
        return input * self._drawn(input, fill)

    def _drawn(self, like: Tensor, fill: Callable[..., Tensor]) -> Tensor:
        if not self.generators:
            raise RuntimeError("it draws random numbers where that was not expected")

        def compute(lane: Tensor, likes: Tensor) -> Tensor:
            noise = torch.zeros_like(likes, memory_format=torch.contiguous_format)
            for row, generator in self.generators.items():
                noise[row] = fill(torch.empty_like(likes[row].detach()), generator=generator)
            return noise

        return across(compute, self.lane, like)
