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
from raysim.api.mistakes import returned, scalar
from raysim.api.objectives import Loss
from raysim.training.second_pass import RecordedOutputs, SecondPass
from raysim.vectors.layout import Vector
from raysim.vectors.optimizer import Optimizer


@dataclass(frozen=True)
class Group:
    """What a stage trains: parameters, plain views of them, and the stretches of the vector that they cover."""

    params: list[nn.Parameter]
    views: list[Tensor]
    runs: tuple[slice, ...]
    shared: tuple[slice, ...]  # those of the stretches that lie in the shared parameters


def _part(networks: Mapping[str, nn.Module], name: str) -> nn.Module:
    """A network ("fraug.generator") or a module in one ("model.extractor")."""
    if name in networks:
        return networks[name]
    network, _, path = name.partition(".")
    return networks[network].get_submodule(path)


def set_modes(networks: Mapping[str, nn.Module], modes: Mapping[str, bool]) -> None:
    """Networks or modules in them into train (True) or eval mode, in this order."""
    for part, training in modes.items():
        _part(networks, part).train(training)


def gradients(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """One per parameter; zeros where the loss does not depend on it."""
    found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, params, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]


_KINDS = {"add": 0, "shift": 1, "mix": 2}


class Step:
    """One iteration on one batch, for every method and every stage.

    precision: what products are computed in, by autocast, while the vector and the optimiser stay as they are; None: in
    the vector's own kind.
    """

    def __init__(
        self,
        vector: Vector,
        methods: Sequence[Method],
        optimizer: Optimizer,
        clip: float = 0.0,
        usual_loss: Loss = cross_entropy,
        precision: torch.dtype | None = None,
    ):
        self.precision = precision
        self.vector, self.optimizer, self.clip = vector, optimizer, clip
        self.transforms = owners(methods, "transform")
        self.extenders = owners(methods, "rows")
        self.terms = owners(methods, "term")
        self.corrections = sorted(owners(methods, "gradient"), key=lambda method: _KINDS[method.correction])
        self.logits = owner(methods, "logits")
        self.loss = owner(methods, "loss")
        self.usual_loss = usual_loss
        self.perturber = owner(methods, "perturb")
        self.flat = bool(self.corrections) or clip > 0 or self.perturber is not None
        self._groups: dict[tuple[int, tuple[str, ...]], Group] = {}  # by where the vector lies
        # Flat gradients, by where the vector lies and size; a CUDA graph may hold them, so none is ever replaced.
        self._grads: dict[tuple[int, int], Tensor] = {}

    def __call__(self, ctx: Context, batch: Batch, stages: Sequence[Stage]) -> Tensor | None:
        """Do all stages on one batch; returns the task loss without added terms (detached), if a stage has it."""
        out = self.outputs(ctx, batch)
        reported: Tensor | None = None
        for stage in stages:
            ctx.stage = stage
            set_modes(ctx.networks, stage.modes)
            second = SecondPass(self.vector, out) if isinstance(out, RecordedOutputs) else None
            loss, task = self.objective(ctx, out)
            if task is not None:
                reported = task.detach()
            self._descend(ctx, stage, loss, second)
        return reported

    def outputs(self, ctx: Context, batch: Batch) -> Outputs:
        """What the model will make of the batch, changed as methods ask."""
        for method in self.transforms:
            batch = returned(method.transform(ctx, batch), Batch, method, "transform", "the batch")
        more = {m.name: found for m in self.extenders if (found := m.rows(ctx, batch)) is not None}
        return Outputs(ctx, batch, more) if self.perturber is None else RecordedOutputs(ctx, batch, more)

    def objective(self, ctx: Context, out: Outputs) -> tuple[Tensor, Tensor | None]:
        """What the stage at work descends, and the task loss without added terms if that is a part of it."""
        if self.precision is None:
            return self._objective(ctx, out)
        device = out.batch.inputs.device.type
        with torch.autocast(device, self.precision, cache_enabled=False):  # a recorded step must not meet its cache
            return self._objective(ctx, out)

    def _objective(self, ctx: Context, out: Outputs) -> tuple[Tensor, Tensor | None]:
        stage, batch = ctx.stage, out.batch
        task: Tensor | None = None
        if stage.loss is not None:
            loss = stage.loss(ctx, out, batch)
        else:
            loss = task = self.task_loss(ctx, out, batch)
            for method in self.terms:
                loss = loss + scalar(method.term(ctx, out, batch), method, "term")
        return -loss if stage.ascend else loss, task

    def task_loss(self, ctx: Context, out: Outputs, batch: Batch) -> Tensor:
        """The task's, mean over the batch, unless a method replaces it. The one place that sees changed logits."""
        if self.loss is not None:
            return scalar(self.loss.loss(ctx, out, batch), self.loss, "loss")
        logits = out.logits
        if self.logits is not None:
            logits = returned(self.logits.logits(ctx, logits, batch), Tensor, self.logits, "logits", "the logits")
        return self.usual_loss(logits, batch.targets)

    def _descend(self, ctx: Context, stage: Stage, loss: Tensor, second: SecondPass | None) -> None:
        group = self.group(stage.trains)
        grads = gradients(loss, group.params)
        steps = self.moved(group)
        optimizer = ctx.optimizers.of(stage.name, self.optimizer, steps, group.shared, stage.rate)
        rate = ctx.rate * stage.rate
        if not self.flat:
            optimizer.step(steps, grads, rate)
            return
        flat = self._flatten(grads)
        if second is not None:
            flat = self._perturbed(ctx, group, flat, second)
        parts, position = [], 0
        for run in group.runs:
            part = flat[position : position + run.stop - run.start]
            position += len(part)
            parts.append(part)
            if run in group.shared:
                for method in self.corrections:
                    method.gradient(ctx, part, run)
        if self.clip:
            flat.mul_((self.clip / (flat.norm() + 1e-6)).clamp(max=1.0))
        optimizer.step(steps, parts, rate)

    def _perturbed(self, ctx: Context, group: Group, grad: Tensor, second: SecondPass) -> Tensor:
        """The gradient that the owner of `perturb` makes of this one and those at other points."""

        def gradient_at(shift: Tensor) -> Tensor:
            with second.at(shift, group.runs) as out:
                loss, _ = self.objective(ctx, out)
                return torch.cat([part.reshape(-1) for part in gradients(loss, group.params)])

        assert self.perturber is not None, "a second pass is prepared for its owner only"
        params = torch.cat([self.vector.data[run] for run in group.runs])
        changed = self.perturber.perturb(ctx, params, grad, gradient_at)
        return returned(changed, Tensor, self.perturber, "perturb", "the gradient")

    def _flatten(self, grads: list[Tensor]) -> Tensor:
        size, data = sum(grad.numel() for grad in grads), self.vector.data
        place = data.data_ptr(), size
        if place not in self._grads:
            self._grads[place] = torch.empty(size, dtype=data.dtype, device=data.device)
        return torch.cat([grad.reshape(-1) for grad in grads], out=self._grads[place])

    def moved(self, group: Group) -> list[Tensor]:
        """Return the views of the vector that the optimiser moves for a group."""
        return [self.vector.data[run] for run in group.runs] if self.flat else group.views

    def group(self, trains: tuple[str, ...]) -> Group:
        """What stages train that name these networks or modules. Raises ValueError where that is nothing."""
        key = self.vector.data.data_ptr(), trains
        group = self._groups.get(key)
        if group is None:
            layout = self.vector.layout
            entries = layout.within(trains)
            if not entries:
                raise ValueError(f"nothing to train in {list(trains)}: all parameters there are frozen or missing")
            runs = layout.runs(entries)
            group = self._groups[key] = Group(
                params=self.vector.tensors(entries),
                views=[self.vector.data[e.start : e.stop].view(e.shape) for e in entries],
                runs=runs,
                shared=tuple(run for run in runs if run.stop <= layout.trained),
            )
        return group
