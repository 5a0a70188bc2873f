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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from raysim.blocks import BLOCK, in_blocks
from raysim.methods.method import Method, Task, at_least
from raysim.models.classifier import one_of

if TYPE_CHECKING:
    from raysim.client import Local
    from raysim.server import Server

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
    """g' of ``target`` g and ``source`` g0, of one shape; "kernel": every [o, i] slice of [O, I, ...] for itself."""
    spatial = target[0, 0].numel() if granularity == "kernel" and target.ndim > 2 else 1
    shape = (-1, spatial) if spatial > 1 else (1, -1)
    g, g0 = target.reshape(shape), source.reshape(shape).to(target)
    ones = g.new_ones(g.shape[1], 1)  # a product with it is the fast way to sum rows of nine
    length, length0, product = (a * b @ ones for a, b in ((g, g), (g0, g0), (g, g0)))
    length, length0 = length.sqrt_(), length0.sqrt_()
    theta = (product.abs() / (length0.square() + eps)).clamp(max=clamp_max)
    half = (length + length0) / 2
    mixed = (g * (half / (length + eps))).add_(g0 * (theta * half / (length0 + eps)))
    if align == "conflict":
        mixed = torch.where(product < 0, mixed, g)
    if value_clip is not None:
        mixed = mixed.clamp_(-value_clip, value_clip)
    return mixed.reshape(target.shape)


def source_parameters(*, names: list[str], shapes: list[list[int]]) -> dict[str, str]:
    """The source of every target among parameters of these ``names`` (with any prefix) and ``shapes``."""
    known = {name: tuple(shape) for name, shape in zip(names, shapes, strict=True)}
    found: dict[str, str] = {}
    for name, shape in known.items():
        source = next((each for each in _candidates(name) if known.get(each) == shape), None)
        if source is not None:
            found[name] = source
    return found


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
    excludes: ClassVar[Mapping[str, str]] = {
        "fedcda": "it averages stored models, not updates",
        "fedasync": "it steps on single models, of which there is no mean update",
    }

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
        if value_clip is not None and not value_clip > 0:
            raise ValueError(f"method.inco.value_clip={value_clip} must be above 0: set null for no clip")
        if not eps > 0:
            raise ValueError(f"method.inco.eps={eps} must be above 0: it keeps the divisors away from 0")
        self.value_clip, self.eps = value_clip, eps

    def check(self, task: Task, local: Local, networks: Mapping[str, nn.Module]) -> Sequence[str]:
        """Without a pair it is FedAvg with its weights."""
        named = dict(networks["model"].named_parameters())
        if source_parameters(names=list(named), shapes=[list(each.shape) for each in named.values()]):
            return ()
        return (
            "method 'inco' finds no two blocks to mix in the model and runs as FedAvg (weighting=uniform): choose "
            "model=resnet18 or model=resnet50",
        )

    def mix(self, direction: Tensor, server: Server) -> Tensor:
        """`cross_layer_gradient` of every shared parameter of the model that has a shared source."""
        shared = {e.path: e for e in server.layout.within(["model"]) if not e.personal}
        pairs = source_parameters(names=list(shared), shapes=[list(e.shape) for e in shared.values()])
        updates = {path: direction[e.start : e.stop].view(e.shape) for path, e in shared.items()}
        mixed = torch.empty_like(direction)
        changed = {shared[target].start for target in pairs}
        for kept in server.layout.entries:
            if kept.stop <= len(mixed) and kept.start not in changed:
                mixed[kept.start : kept.stop] = direction[kept.start : kept.stop]
        work: list[tuple[Tensor, Tensor, Tensor]] = []
        for target, source in pairs.items():
            entry = shared[target]
            # Kernels are mixed one by one: some output channels at a time, so that all stays in the cache.
            alone = self.granularity == "kernel" and math.prod(entry.shape[2:]) > 1
            size = max(1, BLOCK * entry.shape[0] // (entry.stop - entry.start)) if alone else entry.shape[0]
            own = mixed[entry.start : entry.stop].view(entry.shape).split(size)
            work += zip(own, updates[target].split(size), updates[source].split(size), strict=True)

        def mix(one: slice) -> None:
            into, target, source = work[one.start]
            into.copy_(self._mixed(target, source))

        in_blocks(len(work), mix, 1)
        return mixed

    def _mixed(self, target: Tensor, source: Tensor) -> Tensor:
        return cross_layer_gradient(
            target=target,
            source=source,
            granularity=self.granularity,
            align=self.align,
            clamp_max=self.clamp_max,
            value_clip=self.value_clip,
            eps=self.eps,
        )
