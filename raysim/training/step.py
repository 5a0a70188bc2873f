"""The step: one batch through the model, the losses of all methods, one gradient, one optimiser step per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raysim.api.composition import owner, owners
from raysim.api.context import Batch, Context, Outputs, Stage
from raysim.api.method import Method
from raysim.training.second_pass import RecordedOutputs, SecondPass
from raysim.vectors.layout import Vector
from raysim.vectors.optimizer import Descent, Optimizer


@dataclass(frozen=True)
class _Group:
    """What a stage trains: parameters, plain views of them, and the stretches of the vector that they cover."""

    params: list[nn.Parameter]
    views: list[Tensor]
    runs: tuple[slice, ...]
    shared: tuple[bool, ...]


def _part(networks: Mapping[str, nn.Module], name: str) -> nn.Module:
    """A network ("fraug.generator") or a module in one ("model.extractor")."""
    if name in networks:
        return networks[name]
    network, _, path = name.partition(".")
    return networks[network].get_submodule(path)


def _gradients(loss: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """One per parameter; zeros where the loss does not depend on it."""
    found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, params, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]


_KINDS = {"add": 0, "shift": 1, "mix": 2}


class Step:
    """One iteration on one batch, for every method and every stage."""

    def __init__(self, vector: Vector, methods: Sequence[Method], optimizer: Optimizer, clip: float = 0.0):
        self.vector, self.optimizer, self.clip = vector, optimizer, clip
        self.transforms = owners(methods, "transform")
        self.extenders = owners(methods, "rows")
        self.terms = owners(methods, "term")
        self.corrections = sorted(owners(methods, "gradient"), key=lambda method: _KINDS[method.correction])
        self.logits = owner(methods, "logits")
        self.loss = owner(methods, "loss")
        self.perturber = owner(methods, "perturb")
        self.flat = bool(self.corrections) or clip > 0 or self.perturber is not None
        self._groups: dict[tuple[str, ...], _Group] = {}
        self.descents: dict[str, tuple[Stage, Descent]] = {}
        self._saved: Mapping[str, Tensor] = {}
        self._grad: Tensor | None = None

    def begin(self) -> None:
        """A new job: fresh optimisers."""
        self.descents, self._saved = {}, {}

    def optimizers(self) -> dict[str, Tensor]:
        """The optimisers' buffers, by "stage/buffer", for `resume` at the start of another job of this client."""
        return {
            f"{name}/{key}": value for name, (_, each) in self.descents.items() for key, value in each.save().items()
        }

    def resume(self, saved: Mapping[str, Tensor]) -> None:
        """Let the optimisers of this job go on from what `optimizers` returned; called in `receive`."""
        self._saved = saved

    def __call__(self, ctx: Context, batch: Batch, stages: Sequence[Stage]) -> Tensor | None:
        """Do all stages on one batch; returns the task loss without added terms (detached), if a stage has it."""
        for method in self.transforms:
            batch = method.transform(ctx, batch)
        more = {m.name: found for m in self.extenders if (found := m.rows(ctx, batch)) is not None}
        out = Outputs(ctx, batch, more) if self.perturber is None else RecordedOutputs(ctx, batch, more)
        reported: Tensor | None = None
        for stage in stages:
            ctx.stage = stage
            for part, training in stage.modes.items():
                _part(ctx.networks, part).train(training)
            second = SecondPass(self.vector, out) if isinstance(out, RecordedOutputs) else None
            loss, task = self._loss(ctx, out)
            if task is not None:
                reported = task.detach()
            self._descend(ctx, stage, loss, second)
        return reported

    def _loss(self, ctx: Context, out: Outputs) -> tuple[Tensor, Tensor | None]:
        """What the stage at work descends, and the task loss without added terms if that is a part of it."""
        stage, batch = ctx.stage, out.batch
        task: Tensor | None = None
        if stage.loss is not None:
            loss = stage.loss(ctx, out, batch)
        else:
            loss = task = self.task_loss(ctx, out, batch)
            for method in self.terms:
                loss = loss + method.term(ctx, out, batch)
        return -loss if stage.ascend else loss, task

    def movements(self) -> list[tuple[slice, int, float]]:
        """What moved in this job: stretches of the shared parameters, steps made there, factor on the learning rate."""
        return [
            (run, descent.steps, stage.rate)
            for stage, descent in self.descents.values()
            for run, shared in zip(self._group(stage.trains).runs, self._group(stage.trains).shared, strict=True)
            if shared
        ]

    def task_loss(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """Cross-entropy, mean over the batch, unless a method replaces it. The one place that sees changed logits."""
        if self.loss is not None:
            return self.loss.loss(ctx, out, batch)
        logits = out.logits if self.logits is None else self.logits.logits(ctx, out.logits, batch)
        return cross_entropy(logits, batch.targets)

    def _descend(self, ctx: Context, stage: Stage, loss: Tensor, second: SecondPass | None) -> None:
        group = self._group(stage.trains)
        grads = _gradients(loss, group.params)
        steps = [self.vector.data[run] for run in group.runs] if self.flat else group.views
        descent = self._descent(stage, steps)
        rate = ctx.rate * stage.rate
        if not self.flat:
            descent.step(steps, grads, rate)
            return
        flat = self._flatten(grads)
        if second is not None:
            flat = self._perturbed(ctx, group, flat, second)
        parts, position = [], 0
        for run, shared in zip(group.runs, group.shared, strict=True):
            part = flat[position : position + run.stop - run.start]
            position += len(part)
            parts.append(part)
            if shared:
                for method in self.corrections:
                    method.gradient(ctx, part, run)
        if self.clip:
            flat.mul_((self.clip / (flat.norm() + 1e-6)).clamp(max=1.0))
        descent.step(steps, parts, rate)

    def _perturbed(self, ctx: Context, group: _Group, grad: Tensor, second: SecondPass) -> Tensor:
        """The gradient that the owner of `perturb` makes of this one and those at other points."""

        def gradient_at(shift: Tensor) -> Tensor:
            with second.at(shift, group.runs) as out:
                loss, _ = self._loss(ctx, out)
                return torch.cat([part.reshape(-1) for part in _gradients(loss, group.params)])

        assert self.perturber is not None, "a second pass is prepared for its owner only"
        params = torch.cat([self.vector.data[run] for run in group.runs])
        return self.perturber.perturb(ctx, params, grad, gradient_at)

    def _descent(self, stage: Stage, params: list[Tensor]) -> Descent:
        """The stage's optimiser, made at its first step."""
        if stage.name not in self.descents:
            self.descents[stage.name] = (stage, descent := Descent(self.optimizer))
            prefix = f"{stage.name}/"
            saved = {key.removeprefix(prefix): value for key, value in self._saved.items() if key.startswith(prefix)}
            if saved:
                descent.load(saved, params)
        return self.descents[stage.name][1]

    def _flatten(self, grads: list[Tensor]) -> Tensor:
        size = sum(grad.numel() for grad in grads)
        if self._grad is None or len(self._grad) < size:
            self._grad = torch.empty(size, dtype=self.vector.data.dtype, device=self.vector.data.device)
        return torch.cat([grad.reshape(-1) for grad in grads], out=self._grad[:size])

    def _group(self, trains: tuple[str, ...]) -> _Group:
        group = self._groups.get(trains)
        if group is None:
            layout = self.vector.layout
            entries = layout.within(trains)
            if not entries:
                raise ValueError(f"nothing to train in {list(trains)}: all parameters there are frozen or missing")
            runs = layout.runs(entries)
            group = self._groups[trains] = _Group(
                params=self.vector.tensors(entries),
                views=[self.vector.data[e.start : e.stop].view(e.shape) for e in entries],
                runs=runs,
                shared=tuple(run.stop <= layout.trained for run in runs),
            )
        return group
