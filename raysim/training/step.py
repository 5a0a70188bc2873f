"""The step: one batch through the model, the losses of all methods, one gradient, one optimiser step per stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raysim.api.context import Batch, Context, Outputs, Stage
from raysim.api.declare import Declarations
from raysim.api.hook_checks import check_scalar, check_type
from raysim.api.objectives import Loss
from raysim.training.second_pass import RecordedOutputs, SecondPass
from raysim.vectors.layout import Vector
from raysim.vectors.optimizer import OptimizerSettings


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
NamedHook: TypeAlias = tuple[str, Callable[..., Any]]


class _StepHooks:
    """The hooks of a run that are called once for each batch, each with its method's name."""

    def __init__(self, declarations: Declarations | None):
        self.batches: list[NamedHook] = []
        self.loss_owner: NamedHook | None = None
        self.terms: list[NamedHook] = []
        self.corrections: list[NamedHook] = []
        self.perturb: NamedHook | None = None
        self._stager = ""
        if declarations is not None:
            self._fill(declarations)

    @property
    def losses(self) -> bool:
        """Whether a method changes the loss."""
        return self.loss_owner is not None or bool(self.terms)

    def _fill(self, declarations: Declarations) -> None:
        self.batches = [(each.method, hook) for each, hook in declarations.hooks_of("batch")]
        for each, hook in declarations.hooks_of("loss"):
            if "loss" in each.owned:
                self.loss_owner = (each.method, hook)
            else:
                self.terms.append((each.method, hook))
        corrections = declarations.hooks_of("gradient")
        corrections.sort(key=lambda pair: _KINDS[pair[0].correction])
        self.corrections = [(each.method, hook) for each, hook in corrections]
        only = declarations.single_hook("perturb")
        self.perturb = None if only is None else (only[0].method, only[1])
        stager = declarations.declarer("stages")
        if stager is not None:
            self._stager = stager.method

    def stage_loss(self, ctx: Context, loss: Callable[..., Tensor], out: Outputs) -> Tensor:
        """Return the loss that a stage brings."""
        job = ctx.view(self._stager) if self._stager else ctx
        value: Tensor = loss(job, out)
        return value


class Step:
    """One iteration on one batch, for every method and every stage.

    precision: what products are computed in, by autocast, while the vector and the optimiser stay as they are; None: in
    the vector's own kind.
    """

    def __init__(
        self,
        vector: Vector,
        declarations: Declarations | None,
        optimizer: OptimizerSettings,
        clip: float = 0.0,
        usual_loss: Loss = cross_entropy,
        precision: torch.dtype | None = None,
    ):
        self.precision = precision
        self.vector, self.optimizer, self.clip = vector, optimizer, clip
        hooks = _StepHooks(declarations)
        self.hooks = hooks
        self.usual_loss = usual_loss
        self._fixed = {} if declarations is None else declarations.fixed_parameters
        self.flat = bool(hooks.corrections) or clip > 0 or hooks.perturb is not None
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
            second = None  # `perturb` acts in stages with the task loss only
            if stage.has_task_loss and isinstance(out, RecordedOutputs):
                second = SecondPass(self.vector, out)
            loss, task = self.objective(ctx, out)
            if task is not None:
                reported = task.detach()
            self._descend(ctx, stage, loss, second)
        return reported

    def outputs(self, ctx: Context, batch: Batch) -> Outputs:
        """Return what the model will make of the batch, changed as methods ask."""
        for name, change in self.hooks.batches:
            batch = check_type(change(ctx.view(name), batch), Batch, name, "batch", "the batch")
        if self.hooks.perturb is None:
            return Outputs(ctx, batch)
        return RecordedOutputs(ctx, batch)

    def objective(self, ctx: Context, out: Outputs) -> tuple[Tensor, Tensor | None]:
        """What the stage at work descends, and the task loss without added terms if that is a part of it."""
        if self.precision is None:
            return self._objective(ctx, out)
        device = out.batch.inputs.device.type
        with torch.autocast(
            device, self.precision, cache_enabled=False
        ):  # a recorded step must not meet its cache
            return self._objective(ctx, out)

    def _objective(self, ctx: Context, out: Outputs) -> tuple[Tensor, Tensor | None]:
        stage = ctx.stage
        if stage.loss is not None:
            loss = self.hooks.stage_loss(ctx, stage.loss, out)
            return -loss if stage.ascend else loss, None
        task = loss = self.task_loss(ctx, out)
        for name, add in self.hooks.terms:
            loss = check_scalar(add(ctx.view(name), out, loss), name, "loss")
        return -loss if stage.ascend else loss, task

    def task_loss(self, ctx: Context, out: Outputs) -> Tensor:
        """Return the task's loss, a mean over the batch, unless a method replaces it."""
        if self.hooks.loss_owner is None:
            return self.usual_loss(out.logits, out.batch.targets)
        name, replace = self.hooks.loss_owner
        return check_scalar(replace(ctx.view(name), out, out.zero), name, "loss")

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
                for name, correct in self.hooks.corrections:
                    correct(ctx.view(name), part, run)
        if self.clip:
            flat.mul_((self.clip / (flat.norm() + 1e-6)).clamp(max=1.0))
        optimizer.step(steps, parts, rate)

    def _perturbed(self, ctx: Context, group: Group, grad: Tensor, second: SecondPass) -> Tensor:
        """The gradient that the owner of `perturb` makes of this one and those at other points."""

        def gradient_at(shift: Tensor) -> Tensor:
            with second.at(shift, group.runs) as out:
                loss, _ = self.objective(ctx, out)
                return torch.cat([part.reshape(-1) for part in gradients(loss, group.params)])

        assert self.hooks.perturb is not None, "a second pass is prepared for its owner only"
        name, perturb = self.hooks.perturb
        params = torch.cat([self.vector.data[run] for run in group.runs])
        changed: Tensor = perturb(ctx.view(name), params, grad, gradient_at)
        return check_type(changed, Tensor, name, "perturb", "the gradient")

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
            entries = layout.entries_in(trains)
            if not entries:
                raise ValueError(
                    f"nothing to train in {list(trains)}: all parameters there are frozen or missing"
                )
            fixed = next((entry.name for entry in entries if entry.name in self._fixed), "")
            if fixed:
                raise ValueError(
                    f"a stage trains {fixed} among {list(trains)}, which method "
                    f"'{self._fixed[fixed]}' fixes. Leave it out of the stage."
                )
            runs = layout.stretches(entries)
            group = self._groups[key] = Group(
                params=self.vector.tensors(entries),
                views=[self.vector.data[e.start : e.stop].view(e.shape) for e in entries],
                runs=runs,
                shared=tuple(run for run in runs if run.stop <= layout.trained),
            )
        return group
