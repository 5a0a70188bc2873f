"""The local optimiser: SGD and Adam on views or on one flat tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raysim.primitives.checks import at_least


@dataclass(frozen=True)
class Optimizer:
    """The local optimiser's settings. Its buffers start at zero in every job."""

    kind: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        at_least("local.momentum", self.momentum, 0.0)
        at_least("local.weight_decay", self.weight_decay, 0.0)
        if self.nesterov and not self.momentum:
            raise ValueError("local.nesterov=true needs momentum: set local.momentum above 0")
        if self.kind == "adam" and self.momentum:
            raise ValueError(f"local.momentum={self.momentum} has no meaning for local.optimizer=adam: set it to 0")


class Descent:
    """One optimiser at work; equal to torch.optim.SGD, bit for bit, on views or on one flat tensor."""

    def __init__(self, settings: Optimizer):
        self.settings = settings
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.steps = 0

    def save(self) -> dict[str, Tensor]:
        """Its buffers as flat tensors."""
        lists = {"first": self.first, "second": self.second}
        flat = {name: torch.cat([part.reshape(-1) for part in parts]) for name, parts in lists.items() if parts}
        return {"steps": torch.tensor([self.steps]), **flat}

    def load(self, saved: Mapping[str, Tensor], like: Sequence[Tensor]) -> None:
        """Take over what `save` returned; `like` has the shapes of the parameters."""
        sizes = [part.numel() for part in like]
        for name, parts in (("first", self.first), ("second", self.second)):
            if name in saved:
                pieces = saved[name].clone().split(sizes)
                parts[:] = [piece.view(part.shape) for piece, part in zip(pieces, like, strict=True)]
        self.steps = int(saved["steps"])

    def step(self, params: list[Tensor], grads: list[Tensor], rate: float) -> None:
        """Move `params` in place, downhill along `grads`."""
        own = self.settings
        self.steps += 1
        if own.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=own.weight_decay))
        if own.kind == "adam":
            return self._adam(params, grads, rate)
        if own.momentum:
            if not self.first:
                self.first = [grad.clone() for grad in grads]
            else:
                torch._foreach_mul_(self.first, own.momentum)
                torch._foreach_add_(self.first, grads)
            grads = list(torch._foreach_add(grads, self.first, alpha=own.momentum)) if own.nesterov else self.first
        torch._foreach_add_(params, grads, alpha=-rate)

    def _adam(self, params: list[Tensor], grads: list[Tensor], rate: float) -> None:
        """Kingma and Ba 2015 with their defaults (0.9, 0.999, 1e-8), bias-corrected."""
        if not self.first:
            self.first = [torch.zeros_like(grad) for grad in grads]
            self.second = [torch.zeros_like(grad) for grad in grads]
        scale = (1 - 0.999**self.steps) ** 0.5
        for param, grad, m, v in zip(params, grads, self.first, self.second, strict=True):
            m.lerp_(grad, 0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            param.addcdiv_(m, (v.sqrt() / scale).add_(1e-8), value=-rate / (1 - 0.9**self.steps))
