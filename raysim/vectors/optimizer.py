"""The local optimiser: SGD and Adam on views or on one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from raysim.primitives.checks import at_least


def widest(device: torch.device) -> torch.dtype:
    """The floats of a device that have the most digits."""
    return torch.float32 if device.type == "mps" else torch.float64


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


class LocalOptimizer:
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

    def step(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """Move `params` in place, downhill along `grads`. rate: a tensor where a recorded step must not know it."""
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
        if isinstance(rate, Tensor):
            torch._foreach_sub_(params, torch._foreach_mul(grads, rate.to(params[0].dtype)))
        else:
            torch._foreach_add_(params, grads, alpha=-rate)

    def _adam(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """Kingma and Ba 2015 with their defaults (0.9, 0.999, 1e-8), bias-corrected."""
        if not self.first:
            self.first = [torch.zeros_like(grad) for grad in grads]
            self.second = [torch.zeros_like(grad) for grad in grads]
        scale = (1 - 0.999**self.steps) ** 0.5
        for param, grad, m, v in zip(params, grads, self.first, self.second, strict=True):
            m.lerp_(grad, 0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            assert not isinstance(rate, Tensor), "the steps of a single client are not recorded"
            param.addcdiv_(m, (v.sqrt() / scale).add_(1e-8), value=-rate / (1 - 0.9**self.steps))


class StackedOptimizer(LocalOptimizer):
    """The optimisers of K clients, on tensors with an axis for them in front; each has made steps of its own number."""

    def __init__(self, settings: Optimizer, like: Sequence[Tensor]):
        super().__init__(settings)
        self.counts = [0] * len(like[0])  # steps, by row
        device = like[0].device
        self._made = torch.zeros(len(like[0]), dtype=widest(device), device=device)  # the same, for Adam
        if settings.momentum or settings.kind == "adam":
            self.first = [torch.zeros_like(part) for part in like]
        if settings.kind == "adam":
            self.second = [torch.zeros_like(part) for part in like]

    def step_rows(self, active: Tensor, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """Move all rows; those that are active [K] will `count` it as a step."""
        if self.settings.kind == "adam":
            self._made.add_(active)
        self.step(params, grads, rate)

    def count(self, rows: Iterable[int]) -> None:
        """These have made a step."""
        for row in rows:
            self.counts[row] += 1

    def _set(self, row: int, steps: int) -> None:
        self.counts[row] = steps
        if self.settings.kind == "adam":
            self._made[row] = steps

    def _adam(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """As above, each row with its own correction of the bias."""
        counts = self._made.clamp(min=1)
        scales, rates = (1 - 0.999**counts) ** 0.5, rate / (1 - 0.9**counts)
        for param, grad, m, v in zip(params, grads, self.first, self.second, strict=True):
            scale, own = (each.to(param).view(-1, *[1] * (param.ndim - 1)) for each in (scales, rates))
            m.lerp_(grad, 0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            param.sub_(m / (v.sqrt() / scale).add_(1e-8) * own)

    def row(self, row: int) -> LocalOptimizer:
        """One client's optimiser, whose buffers are rows of these."""
        single = LocalOptimizer(self.settings)
        single.first, single.second = [part[row] for part in self.first], [part[row] for part in self.second]
        single.steps = self.counts[row]
        return single

    def part(self, row: int) -> StackedOptimizer:
        """One row of these, stepped where it lies; who has made a step is still counted here."""
        own, single = slice(row, row + 1), copy(self)
        single.first, single.second = [part[own] for part in self.first], [part[own] for part in self.second]
        single._made = self._made[own]
        return single

    def put(self, row: int, single: LocalOptimizer) -> None:
        """Go on in a row with what a client's optimiser has become."""
        self._set(row, single.steps)
        for whole, parts in ((self.first, single.first), (self.second, single.second)):
            for buffer, part in zip(whole, parts, strict=bool(parts)):
                buffer[row].copy_(part)

    def begin(self, row: int, saved: Mapping[str, Tensor]) -> None:
        """Start a row anew, from what `save` of an optimiser returned if there is any."""
        if not self.first:
            self._set(row, int(saved.get("steps", 0)))
            return
        single = self.row(row)
        for buffer in (*single.first, *single.second):
            buffer.zero_()
        single.steps = 0
        if saved:
            like = list(single.first)
            single = LocalOptimizer(self.settings)
            single.load(saved, like)
        self.put(row, single)


@dataclass
class _AtWork:
    """A stage's optimiser, the stretches of the shared parameters that it moves, its factor on the learning rate."""

    optimizer: LocalOptimizer
    shared: tuple[slice, ...]
    rate: float


class Optimizers:
    """The local optimisers of one job, by the name of their stage."""

    def __init__(self) -> None:
        self._working: dict[str, _AtWork] = {}
        self._saved: Mapping[str, Tensor] = {}

    def of(
        self, stage: str, settings: Optimizer, like: Sequence[Tensor], shared: tuple[slice, ...], rate: float
    ) -> LocalOptimizer:
        """The stage's optimiser, made at its first step with what `resume` has for it; like: what it steps."""
        if stage not in self._working:
            self._working[stage] = _AtWork(new := LocalOptimizer(settings), shared, rate)
            if saved := self.resumed(stage):
                new.load(saved, like)
        return self._working[stage].optimizer

    def resumed(self, stage: str) -> dict[str, Tensor]:
        """What `resume` was given for a stage."""
        prefix = f"{stage}/"
        return {key.removeprefix(prefix): value for key, value in self._saved.items() if key.startswith(prefix)}

    def get(self, stage: str) -> LocalOptimizer | None:
        """The stage's optimiser, if there is one."""
        return self._working[stage].optimizer if stage in self._working else None

    def put(self, stage: str, optimizer: LocalOptimizer, shared: tuple[slice, ...], rate: float) -> None:
        """Let the stage go on with this one."""
        self._working[stage] = _AtWork(optimizer, shared, rate)

    def save(self) -> dict[str, Tensor]:
        """The buffers of all, by "stage/buffer", for `resume` at the start of another job of this client."""
        return {
            f"{name}/{key}": value
            for name, each in self._working.items()
            for key, value in each.optimizer.save().items()
        }

    def resume(self, saved: Mapping[str, Tensor]) -> None:
        """Let the optimisers of this job go on from what `save` returned; called in `receive`."""
        self._saved = saved

    def movements(self) -> list[tuple[slice, int, float]]:
        """What moved in this job: stretches of the shared parameters, steps made there, factor on the learning rate."""
        earlier = {name: int(self.resumed(name).get("steps", 0)) for name in self._working}
        return [
            (run, each.optimizer.steps - earlier[name], each.rate)
            for name, each in self._working.items()
            for run in each.shared
        ]
