"""The optimizers of local training: SGD, Adam, AdamW, Lion and Muon."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from raysim.primitives.checks import at_least, one_of

OptimizerKind: TypeAlias = Literal["sgd", "adam", "adamw", "lion", "muon"]
LION_BETAS = 0.9, 0.99
MUON_MOMENTUM = 0.95
# Coefficients and number of steps of the Newton-Schulz iteration that Muon uses.
NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS = (3.4445, -4.775, 2.0315), 5


def widest_float(device: torch.device) -> torch.dtype:
    """Return the floating dtype with the most digits that a device supports."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of the local optimizer.

    kind: the optimizer. "muon" is for tensors of two or more dimensions.
    momentum: the momentum of SGD; 0 uses none.
    nesterov: True uses Nesterov's momentum in SGD.
    weight_decay: "sgd" and "adam" add weight_decay * parameters to the gradient. Other optimizers
    shrink the parameters directly (Loshchilov and Hutter, ICLR 2019).
    """

    kind: OptimizerKind = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        one_of("local.optimizer", self.kind, get_args(OptimizerKind))
        at_least("local.momentum", self.momentum, 0.0)
        at_least("local.weight_decay", self.weight_decay, 0.0)
        if self.kind != "sgd" and self.nesterov:
            raise ValueError(
                f"local.nesterov=true has no effect with local.optimizer={self.kind}. Set "
                "local.nesterov=false."
            )
        if self.nesterov and not self.momentum:
            raise ValueError("local.nesterov=true needs momentum. Set local.momentum above 0.")
        if self.kind != "sgd" and self.momentum:
            raise ValueError(
                f"local.momentum={self.momentum} has no effect with local.optimizer={self.kind}. "
                "Set local.momentum=0."
            )

    @property
    def is_adam(self) -> bool:
        """True if the optimizer keeps Adam's moments."""
        return self.kind in ("adam", "adamw")

    @property
    def decays_parameters(self) -> bool:
        """True if weight decay is applied to the parameters, and not added to the gradient."""
        return self.kind in ("adamw", "lion", "muon")


class LocalOptimizer:
    """The optimizer of one stage.

    Its steps have the same bits as those of torch.optim (SGD, Adam, AdamW and Muon) and of timm
    (Lion).
    """

    def __init__(self, settings: OptimizerSettings):
        self.settings = settings
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.steps = 0

    def save(self) -> dict[str, Tensor]:
        """Return the buffers and the number of steps: "first", "second" and "steps".

        A buffer is one flat tensor for all parameters. Buffers that the optimizer does not use are
        left out.
        """
        lists = {"first": self.first, "second": self.second}
        flat = {
            name: torch.cat([part.reshape(-1) for part in parts])
            for name, parts in lists.items()
            if parts
        }
        return {"steps": torch.tensor([self.steps]), **flat}

    def load(self, saved: Mapping[str, Tensor], like: Sequence[Tensor]) -> None:
        """Load the buffers that `save` returned.

        like: the parameters, or tensors of the same shapes; their values are not used.
        """
        sizes = [part.numel() for part in like]
        for name, parts in (("first", self.first), ("second", self.second)):
            if name in saved:
                pieces = saved[name].clone().split(sizes)
                parts[:] = [
                    piece.view(part.shape) for piece, part in zip(pieces, like, strict=True)
                ]
        self.steps = int(saved["steps"])

    def step(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """Change `params` in place by one optimizer step with the gradients `grads`.

        rate: the learning rate. In a recorded step it is a scalar tensor, because the rate may
        change between replays.
        """
        settings = self.settings
        self.steps += 1
        if settings.weight_decay and settings.decays_parameters:
            _decay(params, rate, settings.weight_decay)
        elif settings.weight_decay:
            grads = list(torch._foreach_add(grads, params, alpha=settings.weight_decay))
        if settings.is_adam:
            return self._adam(params, grads, rate)
        if settings.kind == "lion":
            return self._lion(params, grads, rate)
        if settings.kind == "muon":
            return self._muon(params, grads, rate)
        if settings.momentum:
            if not self.first:
                self.first = [grad.clone() for grad in grads]
            else:
                torch._foreach_mul_(self.first, settings.momentum)
                torch._foreach_add_(self.first, grads)
            grads = (
                list(torch._foreach_add(grads, self.first, alpha=settings.momentum))
                if settings.nesterov
                else self.first
            )
        if isinstance(rate, Tensor):
            torch._foreach_sub_(params, torch._foreach_mul(grads, rate.to(params[0].dtype)))
        else:
            torch._foreach_add_(params, grads, alpha=-rate)

    def _adam(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """Make a step of Adam (Kingma and Ba 2015) with the defaults 0.9, 0.999, 1e-8."""
        assert not isinstance(rate, Tensor), "a recorded step has a `RecordedOptimizer`"
        if not self.first:
            self.first = [torch.zeros_like(grad) for grad in grads]
            self.second = [torch.zeros_like(grad) for grad in grads]
        scale = (1 - 0.999**self.steps) ** 0.5
        for param, grad, m, v in zip(params, grads, self.first, self.second, strict=True):
            m.lerp_(grad, 0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            param.addcdiv_(m, (v.sqrt() / scale).add_(1e-8), value=-rate / (1 - 0.9**self.steps))

    def _lion(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """Make a step of Lion (Chen et al., NeurIPS 2023, Algorithm 2)."""
        if not self.first:
            self._allocate(grads)
        now, later = LION_BETAS
        for param, grad, momentum in zip(params, grads, self.first, strict=True):
            direction = momentum.lerp(grad, 1 - now).sign_()
            if isinstance(rate, Tensor):
                param.sub_(direction.mul_(rate.to(param.dtype)))
            else:
                param.add_(direction, alpha=-rate)
            momentum.lerp_(grad, 1 - later)

    def _muon(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """Make a step of Muon (Jordan et al. 2024) with Nesterov's momentum.

        A tensor of more than two dimensions is treated as a matrix; its first dimension counts the
        rows.
        """
        assert not isinstance(rate, Tensor), "Muon's steps are not recorded"
        if not self.first:
            self._allocate(grads)
        for param, grad, momentum in zip(params, grads, self.first, strict=True):
            if param.ndim < 2:
                raise ValueError(
                    "local.optimizer=muon trains only matrices, but a method of this run also uses "
                    "it for biases. (Of raysim's methods, only 'ditto' does this.) Set another "
                    "optimizer, such as local.optimizer=adamw, or remove this method."
                )
            momentum.lerp_(grad, 1 - MUON_MOMENTUM)
            matrix = grad.lerp(momentum, MUON_MOMENTUM).flatten(1)
            direction = orthogonalized(matrix)
            stretch = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
            param.add_(direction.view(param.shape), alpha=-rate * stretch)

    def _adam_by_counts(
        self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor, counts: Tensor
    ) -> None:
        """Make one step of Adam, with the number of steps as a tensor.

        counts: the number of steps including this one. It is a scalar, or [K] with a number for
        each row of parameters [K, ...].
        """
        scales, rates = (1 - 0.999**counts) ** 0.5, rate / (1 - 0.9**counts)
        for param, grad, m, v in zip(params, grads, self.first, self.second, strict=True):
            shape = (*counts.shape, *[1] * (param.ndim - counts.ndim))
            scale, row_rate = scales.to(param).view(shape), rates.to(param).view(shape)
            m.lerp_(grad, 0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            param.sub_(m / (v.sqrt() / scale).add_(1e-8) * row_rate)

    def _allocate(self, like: Sequence[Tensor]) -> None:
        """Make the optimizer's buffers before the first step, filled with zeros.

        like: the parameters, or tensors of the same shapes; their values are not used.
        """
        if self.settings.momentum or self.settings.kind != "sgd":
            self.first = [torch.zeros_like(part) for part in like]
        if self.settings.is_adam:
            self.second = [torch.zeros_like(part) for part in like]


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return approximately the nearest matrix with orthonormal rows or columns, in bfloat16.

    The function makes five steps of the quintic Newton-Schulz iteration, as torch.optim.Muon does.

    matrix: the matrix [n, m] to which the result is near. It is not changed.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16, copy=True)
    if is_tall:
        x = x.T
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return (x.T if is_tall else x).contiguous()


class StackedOptimizer(LocalOptimizer):
    """The optimizers of K clients, as one optimizer of stacked parameters.

    Row k of each tensor [K, ...] belongs to client k of the stack, and has its own number of steps.

    like: tensors of the same shapes as the parameters.
    """

    def __init__(self, settings: OptimizerSettings, like: Sequence[Tensor]):
        super().__init__(settings)
        self.counts = [0] * len(like[0])  # steps, by row
        self._allocate(like)

    def step_rows(
        self, rows: Iterable[int], params: list[Tensor], grads: list[Tensor], rate: float
    ) -> None:
        """Make a step for all K clients, and count the step only for the clients in `rows`.

        rows: the clients that have a job now. The results of clients without a job are never used.
        """
        for row in rows:
            self.counts[row] += 1
        self.step(params, grads, rate)

    def _adam(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        counts = torch.tensor(
            self.counts, dtype=widest_float(params[0].device), device=params[0].device
        )
        self._adam_by_counts(params, grads, rate, counts.clamp(min=1))

    def row(self, row: int) -> LocalOptimizer:
        """Return the optimizer of one client.

        Its buffers are views of the stacked buffers.

        row: the index of the client in the stack.
        """
        single = LocalOptimizer(self.settings)
        single.first, single.second = (
            [part[row] for part in self.first],
            [part[row] for part in self.second],
        )
        single.steps = self.counts[row]
        return single

    def restart(self, row: int, saved: Mapping[str, Tensor]) -> None:
        """Reset the buffers of a row to saved ones, or to 0.

        saved: the result of an optimizer's `save`; {} sets the buffers to 0.
        """
        self.counts[row] = int(saved.get("steps", 0))
        if self.first or self.second:
            _refill(self.row(row), saved)


class RecordedOptimizer(LocalOptimizer):
    """The optimizer of steps that are recorded once and then replayed (`runtime.graph`).

    The buffers and the step count stay the same tensor objects. The caller increases `steps`,
    because a replay runs no Python code.

    like: tensors of the same shapes as the parameters.
    """

    def __init__(self, settings: OptimizerSettings, like: Sequence[Tensor]):
        super().__init__(settings)
        self._allocate(like)
        device = like[0].device
        self._count = torch.zeros((), dtype=widest_float(device), device=device)

    def restart(self, saved: Mapping[str, Tensor]) -> None:
        """Reset the buffers to saved ones, or to 0.

        saved: the result of an optimizer's `save`; {} sets the buffers to 0.
        """
        self.steps = int(saved.get("steps", 0))
        self._count.fill_(self.steps)
        _refill(self, saved)

    def step(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        """Make an optimizer step: change `params` in place, with the gradients `grads`.

        The step counter `self.steps` does not change, because the caller increases it.
        rate: the learning rate, a number or a scalar tensor.
        """
        steps = self.steps
        super().step(params, grads, rate)
        self.steps = steps

    def _adam(self, params: list[Tensor], grads: list[Tensor], rate: float | Tensor) -> None:
        self._count.add_(1)
        self._adam_by_counts(params, grads, rate, self._count)


def _decay(params: list[Tensor], rate: float | Tensor, weight_decay: float) -> None:
    """Multiply parameters by 1 - rate * weight_decay, in place."""
    factor = 1 - rate * weight_decay
    if isinstance(factor, Tensor):
        factor = factor.to(params[0].dtype)
    torch._foreach_mul_(params, factor)


def _refill(optimizer: LocalOptimizer, saved: Mapping[str, Tensor]) -> None:
    """Fill the buffers of an optimizer in place.

    saved: the values by name ("first", "second"); buffers without a value become 0.
    """
    for name, buffers in (("first", optimizer.first), ("second", optimizer.second)):
        sizes = [buffer.numel() for buffer in buffers]
        pieces = saved[name].split(sizes) if name in saved else [None] * len(buffers)
        for buffer, piece in zip(buffers, pieces, strict=True):
            if piece is None:
                buffer.zero_()
            else:
                buffer.copy_(piece.view(buffer.shape))


@dataclass
class _StageOptimizer:
    """The optimizer of a training stage, or of a part of its parameters (`OptimizedPart`).

    shared: the slices of the shared parameters that the optimizer changes.
    rate_factor: the factor on the learning rate: the stage's factor times that of `local.rates`.
    """

    optimizer: LocalOptimizer
    shared: tuple[slice, ...]
    rate_factor: float


class Optimizers:
    """The local optimizers of one job, by name.

    An optimizer has the name of its stage. If a stage has several optimizers, each for a part of
    its parameters, their names are "STAGE.NAME" (see `OptimizedPart`).
    """

    def __init__(self) -> None:
        self._working: dict[str, _StageOptimizer] = {}
        self._saved: Mapping[str, Tensor] = {}
        # The mean of the factors on the learning rate of the job's steps, see `Local.step_factors`.
        self.mean_factor = 1.0

    def of(
        self,
        name: str,
        settings: OptimizerSettings,
        like: Sequence[Tensor],
        shared: tuple[slice, ...],
        rate_factor: float,
    ) -> LocalOptimizer:
        """Return the optimizer of this name; create it if the job does not have it yet.

        A new optimizer continues from the buffers that `resume` received for this name.

        like: tensors with the shapes of the parameters.
        shared: the slices of the vector that this optimizer changes and that clients share.
        rate_factor: the factor on the learning rate.
        """
        if name not in self._working:
            optimizer = LocalOptimizer(settings)
            self._working[name] = _StageOptimizer(optimizer, shared, rate_factor)
            saved = self.saved_buffers(name)
            if saved:
                optimizer.load(saved, like)
        return self._working[name].optimizer

    def saved_buffers(self, name: str) -> dict[str, Tensor]:
        """Return the buffers that `resume` received for an optimizer; {} if there are none."""
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): value
            for key, value in self._saved.items()
            if key.startswith(prefix)
        }

    def get(self, name: str) -> LocalOptimizer | None:
        """Return the optimizer of this name, or None if the job does not have it yet."""
        return self._working[name].optimizer if name in self._working else None

    def put(
        self, name: str, optimizer: LocalOptimizer, shared: tuple[slice, ...], rate_factor: float
    ) -> None:
        """Add an optimizer to the job, or replace the optimizer of the same name.

        shared: the parts of the run's vector that the optimizer changes and that clients share.
        rate_factor: the stage's factor on the learning rate, times the factor from `local.rates`.
        """
        self._working[name] = _StageOptimizer(optimizer, shared, rate_factor)

    def save(self) -> dict[str, Tensor]:
        """Return the buffers of all optimizers, by "optimizer/buffer", for `resume` in a later job.

        "optimizer" stands for the name of the optimizer.
        """
        buffers: dict[str, Tensor] = {}
        for name, working in self._working.items():
            saved = working.optimizer.save()
            buffers |= {f"{name}/{key}": value for key, value in saved.items()}
        return buffers

    def resume(self, saved: Mapping[str, Tensor]) -> None:
        """Let the optimizers of this job continue from the result of `save`."""
        self._saved = saved

    def movements(self) -> list[tuple[slice, int, float]]:
        """Return (slice, steps, factor) for the shared parameters that optimizers changed.

        slice: a part of the run's vector.
        steps: this job's optimizer steps on the slice.
        factor: the optimizer's factor on the job's learning rate, times the mean factor of all
        steps of the job.
        """
        moves: list[tuple[slice, int, float]] = []
        for name, working in self._working.items():
            earlier_steps = int(self.saved_buffers(name).get("steps", 0))
            steps = working.optimizer.steps - earlier_steps
            factor = working.rate_factor * self.mean_factor
            moves += [(part, steps, factor) for part in working.shared]
        return moves
