"""InCo: mix the mean update of a stage's first block into those of the stage's deeper blocks, on the server alone.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning" (ICLR 2024). Of the mean updates g of a tensor and g0 of its source, per kernel of a convolution,

    theta = clamp(|<g0, g>| / (<g0, g0> + eps), 0, 5)
    g' = clip((g / (|g| + eps) + theta g0 / (|g0| + eps)) (|g| + |g0|) / 2, -0.1, 0.1)

Sources, in residual networks with torchvision's names: of convJ in block 1, 2, ... of a stage, block 0's conv2 if it
has the same shape, else its convJ; in transformers, of a block's norm2 its norm1.

Choices where paper and code disagree or are silent
- This is the code's rule ("always"). The paper's problem changes g only where it opposes g0 ("conflict"); neither is
  its minimiser, for theta belongs to the vectors before they are normalised. Clamp and clip are the code's alone.
- The authors' routine fails on bottlenecks: tensors without a source of their shape keep the mean update. A kernel of
  one number has a sign and no direction, so there the whole tensor is one group.
- The code divides a transformer's updates by the number of local epochs; here nothing is divided.
- Uniform weights, as in the code. Buffers are averaged themselves, so that no variance can become negative, and nothing
  needs the code's clamp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from raysim.api.method import Method
from raysim.primitives.checks import above, at_least, one_of
from raysim.vectors.blocks import BLOCK, compiled, in_blocks, parts

if TYPE_CHECKING:
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

GRANULARITIES, ALIGNS = ("kernel", "tensor"), ("always", "conflict")
_CONVOLUTION = re.compile(r"((?:.*\.)?layer\d+)\.(\d+)\.(conv\d+)\.weight")
_NORM = re.compile(r"((?:.*\.)?blocks\.\d+)\.norm2\.weight")


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
    """g' of ``target`` g and ``source`` g0, of one shape; "kernel": every [o, i] slice of [O, I, ...] for itself.

    Tensors of the CPU, where the server is.
    """
    mixed = target.detach().clone(memory_format=torch.contiguous_format)
    rows = (_rows(each, granularity) for each in (mixed, source.to(mixed)))
    compiled(_mix)(*rows, *_settings(mixed, clamp_max, value_clip, eps), align == "conflict")
    return mixed


def _rows(values: Tensor, granularity: str) -> np.ndarray:
    """[groups, numbers of each] what is mixed for itself: kernels of more than one number, else the whole tensor."""
    size = math.prod(values.shape[2:]) if granularity == "kernel" else 1
    return values.detach().contiguous().view(-1, size if size > 1 else values.numel()).numpy()


def _settings(
    values: Tensor, clamp_max: float, value_clip: float | None, eps: float
) -> tuple[float, ...]:
    """The bounds as numbers of the vector's kind."""
    kind = values.numpy().dtype.type
    return kind(clamp_max), kind(math.inf if value_clip is None else value_clip), kind(eps)


def _mix(
    rows: np.ndarray, sources: np.ndarray, clamp_max: float, clip: float, eps: float, conflict: bool
) -> None:
    """Compiled. Every one of ``rows`` [n, k] becomes its g', with its source; sums in float64."""
    chunk = 64  # rows whose sums are known before their factors are computed, all at once
    square, square0, product = (
        np.empty(chunk, rows.dtype),
        np.empty(chunk, rows.dtype),
        np.empty(chunk, rows.dtype),
    )
    factor, factor0 = np.empty(chunk, rows.dtype), np.empty(chunk, rows.dtype)
    half = rows.dtype.type(0.5)  # 2 would be a double
    for start in range(0, len(rows), chunk):
        count = min(chunk, len(rows) - start)
        for r in range(count):
            own, other, both = 0.0, 0.0, 0.0
            for j in range(rows.shape[1]):
                g, g0 = np.float64(rows[start + r, j]), np.float64(sources[start + r, j])
                own += g * g
                other += g0 * g0
                both += g * g0
            square[r], square0[r], product[r] = own, other, both
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
    """The source of every target among parameters of these ``names`` (with any prefix) and ``shapes``."""
    known = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
    sources: dict[str, str] = {}
    for name, shape in known.items():
        source = next((each for each in _candidates(name) if known.get(each) == shape), None)
        if source is not None:
            sources[name] = source
    return sources


def _candidates(name: str) -> Sequence[str]:
    """Names of what may be a parameter's source, the best one first."""
    if match := _CONVOLUTION.fullmatch(name):
        stage, block, convolution = match.groups()
        return [f"{stage}.0.{each}.weight" for each in ("conv2", convolution)] if int(block) else []
    if match := _NORM.fullmatch(name):
        return [f"{match[1]}.norm1.weight"]
    return []


class InCo(Method):
    """clamp_max bounds theta, value_clip every number of a mixed update (null: nothing does)."""

    name = "inco"
    paper = "Chan et al., ICLR 2024"
    weighting = "uniform"

    def __init__(
        self,
        granularity: Literal["kernel", "tensor"] = "kernel",
        align: Literal["always", "conflict"] = "always",
        clamp_max: float = 5.0,
        value_clip: float | None = 0.1,
        eps: float = 1e-7,
    ):
        one_of("method.inco.granularity", granularity, GRANULARITIES)
        one_of("method.inco.align", align, ALIGNS)
        self.granularity, self.align = granularity, align
        self.clamp_max = at_least("method.inco.clamp_max", clamp_max, 0.0)
        if value_clip is not None:
            above("method.inco.value_clip", value_clip, 0.0, "set null for no clip")
        above("method.inco.eps", eps, 0.0, "it keeps the divisors away from 0")
        self.value_clip, self.eps = value_clip, eps

    def setup(self, run: Setup) -> None:
        """Exclude methods without a mean update; warn of a model without pairs of blocks."""
        run.excludes("fedcda", "it averages stored models, not updates")
        run.excludes("fedasync", "it steps on single models, of which there is no mean update")
        named = dict(run.model.named_parameters())
        shapes = [list(parameter.shape) for parameter in named.values()]
        if not source_parameters(names=list(named), shapes=shapes):
            run.warn(
                "method 'inco' finds no two blocks to mix in the model and runs as FedAvg "
                "(weighting=uniform): choose model=resnet18 or model=resnet50"
            )

    def step(self, direction: Tensor, aggregation: Aggregation, server: ServerView) -> Tensor:
        """`cross_layer_gradient` of every shared parameter of the model that has a shared source; no source has one."""
        shared = {e.path: e for e in server.layout.within(["model"]) if not e.personal}
        pairs = source_parameters(
            names=list(shared), shapes=[list(e.shape) for e in shared.values()]
        )
        updates = {path: direction[e.start : e.stop].view(e.shape) for path, e in shared.items()}
        settings = _settings(direction, self.clamp_max, self.value_clip, self.eps)
        work: list[tuple[np.ndarray, np.ndarray]] = []
        for target, source in pairs.items():
            rows, sources = (_rows(updates[path], self.granularity) for path in (target, source))
            size = max(1, BLOCK // rows.shape[1])
            work += [(rows[part], sources[part]) for part in parts(0, len(rows), size)]
        mix, conflict = compiled(_mix), self.align == "conflict"
        in_blocks(len(work), lambda one: mix(*work[one.start], *settings, conflict), 1)
        return direction
