"""InCo: mix the mean update of a shallow layer into the mean updates of similar deeper layers.

Source: Chan et al., "Internal Cross-layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning" (ICLR 2024). g is the mean update of a tensor, and g0 that of its *source*, a
shallower tensor. g' replaces g, separately for each kernel of a convolution:

    theta = clamp(|<g0, g>| / (<g0, g0> + eps), 0, 5)
    g' = clip((g / (|g| + eps) + theta g0 / (|g0| + eps)) (|g| + |g0|) / 2, -0.1, 0.1)

Two kinds of networks have such sources:

- ResNets with torchvision's names. A group of blocks, such as `layer1`, has its sources in its
  first block, `layer1.0`. For a convolution in a later block, the source is conv2 if the shapes are
  equal. Otherwise, it is the convolution of the same name, such as conv1.
- Transformers. In each block, norm1 is the source of norm2.

Departures from the paper
- All updates with a source are changed, as in the authors' code. In the paper's derivation, g
  changes only if <g, g0> is negative; align="conflict" does this.
- theta is clamped and g' is clipped, as in the authors' code.
- All clients have the same weight, as in the authors' code.
- A tensor without a source of its shape is not changed; the authors' code fails.
- A tensor with 1x1 kernels is mixed as one vector.
- Updates of transformers are not divided by the number of local epochs.
- Buffers are averaged as in FedAvg.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import above, at_least, one_of
from raysim.vectors.blocks import BLOCK, compile_function, in_blocks, split_range

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

Granularity: TypeAlias = Literal["kernel", "tensor"]
AlignmentRule: TypeAlias = Literal["always", "conflict"]

_CONVOLUTION = re.compile(r"((?:.*\.)?layer\d+)\.(\d+)\.(conv\d+)\.weight")
_NORM = re.compile(r"((?:.*\.)?blocks\.\d+)\.norm2\.weight")


# The method computes the same without this function, which states the rule on plain tensors.
def cross_layer_gradient(
    *,
    target: Tensor,
    source: Tensor,
    granularity: str = "kernel",
    align: str = "always",
    clamp_max: float = 5.0,
    value_clip: float | None = 0.1,
    eps: float = 1e-7,
) -> Tensor:
    """Return the update `target` of a layer, mixed with the update `source` of another layer.

    The two updates are CPU tensors of the same shape. Tensors with slices [o, i] of one entry, such
    as 1x1 kernels, are always mixed as one vector.

    granularity, align, clamp_max, value_clip, eps: the settings of `InCo`.
    """
    mixed = target.detach().clone(memory_format=torch.contiguous_format)
    rows = _as_rows(mixed, granularity)
    source_rows = _as_rows(source.to(mixed), granularity)
    settings = _settings(mixed, clamp_max, value_clip, eps)
    compile_function(_mix)(rows, source_rows, *settings, align == "conflict")
    return mixed


def _as_rows(values: Tensor, granularity: str) -> np.ndarray:
    """Return the update of a layer as n rows of k values, [n, k].

    A row is a kernel. With granularity="tensor", or without kernels larger than 1x1, the single row
    is the whole tensor.
    The result shares the memory of contiguous `values`.
    """
    size = math.prod(values.shape[2:]) if granularity == "kernel" else 1
    if size == 1:
        size = values.numel()
    return values.detach().contiguous().view(-1, size).numpy()


def _settings(
    values: Tensor, clamp_max: float, value_clip: float | None, eps: float
) -> tuple[float, ...]:
    """Return clamp_max, value_clip and eps, rounded to the dtype of `values`.

    A value_clip of None, which means no bound, becomes infinity.
    """
    number = values.numpy().dtype.type
    clip = math.inf if value_clip is None else value_clip
    return number(clamp_max), number(clip), number(eps)


def _mix(
    rows: np.ndarray, sources: np.ndarray, clamp_max: float, clip: float, eps: float, conflict: bool
) -> None:
    """Mix row i of `rows` [n, k] with row i of `sources` [n, k], for each i, in place.

    The module's docstring has the formula: g and g0 are the two rows. The function is compiled,
    with sums in float64.
    clip: inf for no bound.
    conflict: True mixes only the rows with <g, g0> < 0.
    """
    chunk = 64  # rows whose factors are computed at once
    square = np.empty(chunk, rows.dtype)
    square0 = np.empty(chunk, rows.dtype)
    product = np.empty(chunk, rows.dtype)
    factor = np.empty(chunk, rows.dtype)
    factor0 = np.empty(chunk, rows.dtype)
    half = rows.dtype.type(0.5)  # a Python constant would be a double
    for start in range(0, len(rows), chunk):
        count = min(chunk, len(rows) - start)
        for r in range(count):
            sum_gg, sum_g0g0, sum_gg0 = 0.0, 0.0, 0.0
            for j in range(rows.shape[1]):
                g, g0 = np.float64(rows[start + r, j]), np.float64(sources[start + r, j])
                sum_gg += g * g
                sum_g0g0 += g0 * g0
                sum_gg0 += g * g0
            square[r], square0[r], product[r] = sum_gg, sum_g0g0, sum_gg0
        for r in range(count):
            length, length0 = np.sqrt(square[r]), np.sqrt(square0[r])
            theta = min(abs(product[r]) / (square0[r] + eps), clamp_max)
            mean = half * (length + length0)
            factor[r], factor0[r] = mean / (length + eps), theta * mean / (length0 + eps)
            if conflict and product[r] >= 0:
                factor[r], factor0[r] = 1, 0
        for r in range(count):
            for j in range(rows.shape[1]):
                g = factor[r] * rows[start + r, j] + factor0[r] * sources[start + r, j]
                rows[start + r, j] = min(max(g, -clip), clip)


def source_parameters(*, names: list[str], shapes: list[list[int]]) -> dict[str, str]:
    """Return which parameters InCo mixes: {deeper parameter: shallower parameter}, by name.

    The module's docstring describes the pairs, which have equal shapes. A name may have a prefix,
    such as "net.".
    """
    shape_of = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
    sources: dict[str, str] = {}
    for name, shape in shape_of.items():
        for candidate in _candidates(name):
            if shape_of.get(candidate) == shape:
                sources[name] = candidate
                break
    return sources


def _candidates(name: str) -> Sequence[str]:
    """Return names of parameters whose update may be mixed into that of `name`, the best first.

    The model need not have these parameters. The result is empty if nothing may be mixed.
    """
    convolution = _CONVOLUTION.fullmatch(name)
    if convolution:
        stage, block, layer = convolution.groups()
        if int(block) == 0:
            return []
        return [f"{stage}.0.conv2.weight", f"{stage}.0.{layer}.weight"]
    norm = _NORM.fullmatch(name)
    if norm:
        return [f"{norm[1]}.norm1.weight"]
    return []


class InCo(Method):
    """A server rule that mixes updates of shallow layers into updates of similar deeper layers.

    granularity: "kernel" mixes each slice [o, i] of a tensor [O, I, ...] separately; "tensor" mixes
    each tensor as one vector.
    align: "conflict" mixes only slices, or tensors, with a negative inner product; "always" mixes
    all.
    clamp_max: the largest weight of the shallow update; the deeper update has the weight 1.
    value_clip: the largest absolute value in updates of the deeper layers, mixed or not; None for
    no bound.
    eps: a small number that is added to divisors.
    """

    name = "inco"
    paper = "Chan et al., ICLR 2024"
    weighting = "uniform"

    def __init__(
        self,
        granularity: Granularity = "kernel",
        align: AlignmentRule = "always",
        clamp_max: float = 5.0,
        value_clip: float | None = 0.1,
        eps: float = 1e-7,
    ):
        one_of("method.inco.granularity", granularity, get_args(Granularity))
        one_of("method.inco.align", align, get_args(AlignmentRule))
        self.granularity = granularity
        self.align = align
        self.clamp_max = at_least("method.inco.clamp_max", clamp_max, 0.0)
        if value_clip is not None:
            above("method.inco.value_clip", value_clip, 0.0, "set null for no clip")
        above("method.inco.eps", eps, 0.0, "it keeps the divisors away from 0")
        self.value_clip = value_clip
        self.eps = eps

    def setup(self, run: Setup) -> None:
        """Refuse fedcda and fedasync; warn if the model has no two layers that can be mixed.

        InCo changes the mean of the updates. fedcda averages stored models instead, and fedasync
        makes a step for each update.
        """
        run.excludes("fedcda", "it averages stored models, not updates")
        run.excludes("fedasync", "it makes a step for each update, so there is no mean update")
        parameters = dict(run.model.named_parameters())
        shapes = [list(parameter.shape) for parameter in parameters.values()]
        if not source_parameters(names=list(parameters), shapes=shapes):
            run.warn(
                "model: method 'inco' finds no two layers whose updates it can mix, so it changes "
                "no update. Set model=resnet18 or model=resnet50."
            )

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """Mix mean updates of shallow tensors into those of deeper tensors; return the result.

        `source_parameters` chooses the pairs of tensors; the order of the pairs does not matter.
        direction: [layout.trained], the mean update, changed in place.
        """
        entries = [entry for entry in server.layout.entries_in(["model"]) if not entry.personal]
        updates = {
            entry.path: direction[entry.start : entry.stop].view(entry.shape) for entry in entries
        }
        shapes = [list(entry.shape) for entry in entries]
        pairs = source_parameters(names=list(updates), shapes=shapes)

        blocks: list[tuple[np.ndarray, np.ndarray]] = []
        for target, source in pairs.items():
            rows = _as_rows(updates[target], self.granularity)
            source_rows = _as_rows(updates[source], self.granularity)
            size = max(1, BLOCK // rows.shape[1])
            blocks += [(rows[part], source_rows[part]) for part in split_range(0, len(rows), size)]

        mix, is_conflict = compile_function(_mix), self.align == "conflict"
        settings = _settings(direction, self.clamp_max, self.value_clip, self.eps)
        in_blocks(len(blocks), lambda at: mix(*blocks[at.start], *settings, is_conflict), 1)
        return direction
