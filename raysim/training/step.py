"""Define a training step: it trains the model on one batch and calls the hooks of all methods.

A step has one or more stages. Each stage computes a gradient and makes one optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raysim.api.context import Batch, Context, Outputs, Stage
from raysim.api.declare import Declarations
from raysim.api.hook_checks import check_scalar, check_type
from raysim.api.objectives import Loss
from raysim.training.rates import rate_factors
from raysim.training.second_pass import RecordedOutputs, SecondPass
from raysim.vectors.layout import Entry, Vector
from raysim.vectors.optimizer import OptimizerKind, OptimizerSettings


@dataclass(frozen=True)
class OptimizedPart:
    """The parameters of a `ParameterGroup` that one optimizer changes.

    A group has several parts only with Muon or `local.rates`.
    name: the optimizer's kind and rate factor, such as "muon*1"; "" without Muon and `local.rates`.
    factor: the factor on the learning rate.
    indices: the indices of the parameters in `ParameterGroup.params`.
    shared: the slices of the vector with the part's shared parameters.
    """

    name: str
    settings: OptimizerSettings
    factor: float
    indices: tuple[int, ...]
    shared: tuple[slice, ...]


@dataclass(frozen=True)
class ParameterGroup:
    """The parameters that a stage trains.

    params: parameters of the networks, for gradients.
    views: each parameter's slice of the vector, which the optimizer changes.
    runs: the slices of the vector that these parameters cover. A slice has only shared or only
    personal parameters.
    shared: the shared slices of `runs`.
    parts: the parameters of each optimizer.
    """

    params: list[nn.Parameter]
    views: list[Tensor]
    runs: tuple[slice, ...]
    shared: tuple[slice, ...]
    parts: tuple[OptimizedPart, ...]


def _find_module(networks: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Return a network ("fraug.generator") or a part of a network ("model.extractor")."""
    if name in networks:
        return networks[name]
    network, _, path = name.partition(".")
    return networks[network].get_submodule(path)


def set_modes(networks: Mapping[str, nn.Module], modes: Mapping[str, bool]) -> None:
    """Set the train or eval mode of networks and modules, in the order of `modes`.

    modes: True for train mode or False for eval mode, by name. A module must come after the network
    that contains it.
    """
    for name, training in modes.items():
        _find_module(networks, name).train(training)


def gradients(loss: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of each parameter; zeros if the loss does not depend on it."""
    results: tuple[Tensor | None, ...] = torch.autograd.grad(loss, params, allow_unused=True)
    return [
        torch.zeros_like(param) if gradient is None else gradient
        for gradient, param in zip(results, params, strict=True)
    ]


_CORRECTION_ORDER = {"add": 0, "shift": 1, "mix": 2}
NamedHook: TypeAlias = tuple[str, Callable[..., Any]]


class _StepHooks:
    """The hook functions that a step calls, each in a pair with the name of its FL method."""

    def __init__(self, declarations: Declarations | None):
        self.batches: list[NamedHook] = []
        self.loss_owner: NamedHook | None = None
        self.terms: list[NamedHook] = []
        self.corrections: list[NamedHook] = []
        self.perturb: NamedHook | None = None
        self._stager = ""
        if declarations is not None:
            self._fill(declarations)

    def _fill(self, declarations: Declarations) -> None:
        for declared, hook in declarations.hooks_of("batch"):
            self.batches.append((declared.method, hook))
        for declared, hook in declarations.hooks_of("loss"):
            if "loss" in declared.owned:
                self.loss_owner = (declared.method, hook)
            else:
                self.terms.append((declared.method, hook))
        corrections = declarations.hooks_of("gradient")
        corrections.sort(key=lambda pair: _CORRECTION_ORDER[pair[0].correction])
        self.corrections = [(declared.method, hook) for declared, hook in corrections]
        owner = declarations.single_hook("perturb")
        if owner is not None:
            declared, hook = owner
            self.perturb = declared.method, hook
        stager = declarations.declarer("stages")
        if stager is not None:
            self._stager = stager.method

    def stage_loss(self, ctx: Context, loss: Callable[..., Tensor], out: Outputs) -> Tensor:
        """Return the value of `loss`, the loss function that a method declared for this stage."""
        job = ctx.view(self._stager) if self._stager else ctx
        value: Tensor = loss(job, out)
        return value


class Step:
    """A callable that makes one training step, on one batch and with the hooks of all methods.

    clip: the largest norm of a stage's gradient; 0 allows any norm.
    usual_loss: the task's loss, which a method may replace.
    precision: the type of matrix products (autocast); None means the parameters' type.
    rates: factors on the learning rates of parts of the model (`local.rates`); None means 1.
    """

    def __init__(
        self,
        vector: Vector,
        declarations: Declarations | None,
        optimizer: OptimizerSettings,
        clip: float = 0.0,
        usual_loss: Loss = cross_entropy,
        precision: torch.dtype | None = None,
        rates: Mapping[str, float] | None = None,
    ):
        self.precision = precision
        self._rates = rates or {}
        self.vector, self.optimizer, self.clip = vector, optimizer, clip
        hooks = _StepHooks(declarations)
        self.hooks = hooks
        self.usual_loss = usual_loss
        self._fixed = {} if declarations is None else declarations.fixed_parameters
        # True if the gradient is needed as one flat tensor.
        self.is_flat = bool(hooks.corrections) or clip > 0 or hooks.perturb is not None
        # Groups by the address of the vector and the names in `Stage.trains`.
        self._groups: dict[tuple[int, tuple[str, ...]], ParameterGroup] = {}
        # Flat gradients by the address of the vector and their size. CUDA graphs use their memory,
        # so they are never replaced.
        self._flat_gradients: dict[tuple[int, int], Tensor] = {}

    def __call__(self, ctx: Context, batch: Batch, stages: Sequence[Stage]) -> Tensor | None:
        """Make all stages of a step on one batch; return the task loss.

        The returned loss is detached and contains no terms of methods. It is None if no stage
        computes the task loss.
        """
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
        """Return the model's outputs for the batch, after methods have changed the batch."""
        for name, change in self.hooks.batches:
            batch = check_type(change(ctx.view(name), batch), Batch, name, "batch", "the batch")
        if self.hooks.perturb is None:
            return Outputs(ctx, batch)
        return RecordedOutputs(ctx, batch)

    def objective(self, ctx: Context, out: Outputs) -> tuple[Tensor, Tensor | None]:
        """Return the loss that the current stage minimises, and the task loss of this stage.

        The task loss has no terms of methods. It is None if a method has declared the loss of this
        stage.
        """
        if self.precision is None:
            return self._objective(ctx, out)
        device = out.batch.inputs.device.type
        # No cache: a recorded step would use the casts from the time of its recording.
        with torch.autocast(device, self.precision, cache_enabled=False):
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
        """Return the task loss, a mean over the batch; a method may replace the loss function."""
        if self.hooks.loss_owner is None:
            return self.usual_loss(out.logits, out.batch.targets)
        name, replace = self.hooks.loss_owner
        return check_scalar(replace(ctx.view(name), out, out.zero), name, "loss")

    def _descend(self, ctx: Context, stage: Stage, loss: Tensor, second: SecondPass | None) -> None:
        """Compute the gradient of a stage's loss, and make an optimizer step with it.

        Methods may correct the gradient before it is clipped.

        second: computes gradients at shifted parameters for the hook `perturb`. None means that no
        method has this hook, or that the stage has no task loss.
        """
        group = self.group(stage.trains)
        grads = gradients(loss, group.params)
        if not self.is_flat:
            self._optimize(ctx, stage, group, grads)
            return
        flat = self._flatten(grads)
        if second is not None:
            flat = self._perturb(ctx, group, flat, second)
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
        if group.parts[0].name:
            sizes = [view.numel() for view in group.views]
            pieces = zip(flat.split(sizes), group.views, strict=True)
            parts = [piece.view(view.shape) for piece, view in pieces]
        self._optimize(ctx, stage, group, parts)

    def _optimize(
        self, ctx: Context, stage: Stage, group: ParameterGroup, grads: list[Tensor]
    ) -> None:
        """Make a step with each optimizer of a group of parameters.

        grads: the gradient of each tensor that `optimized_tensors` returns. With Muon or
        `local.rates`, the gradient of each parameter in `group.params`.
        """
        rate = ctx.rate * stage.rate * ctx.step_factor
        first = group.parts[0]
        if not first.name:
            targets = self.optimized_tensors(group)
            optimizer = ctx.optimizers.of(
                stage.name, self.optimizer, targets, group.shared, stage.rate
            )
            optimizer.step(targets, grads, rate)
            return
        for part in group.parts:
            targets = [group.views[index] for index in part.indices]
            factor = stage.rate * part.factor
            name = f"{stage.name}.{part.name}"
            optimizer = ctx.optimizers.of(name, part.settings, targets, part.shared, factor)
            optimizer.step(targets, [grads[index] for index in part.indices], rate * part.factor)

    def _perturb(
        self, ctx: Context, group: ParameterGroup, grad: Tensor, second: SecondPass
    ) -> Tensor:
        """Return the gradient from a method's hook `perturb`, which uses shifted parameters.

        grad: the gradient at the current parameters, one flat tensor.
        second: computes gradients at shifted parameters.
        """

        def gradient_at(shift: Tensor) -> Tensor:
            with second.at(shift, group.runs) as out:
                loss, _ = self.objective(ctx, out)
                return torch.cat([part.reshape(-1) for part in gradients(loss, group.params)])

        assert self.hooks.perturb is not None, "only `perturb` needs a second pass"
        name, perturb = self.hooks.perturb
        params = torch.cat([self.vector.data[run] for run in group.runs])
        changed: Tensor = perturb(ctx.view(name), params, grad, gradient_at)
        return check_type(changed, Tensor, name, "perturb", "the gradient")

    def _flatten(self, grads: list[Tensor]) -> Tensor:
        """Return the gradients as one flat tensor."""
        data = self.vector.data
        size = sum(grad.numel() for grad in grads)
        key = data.data_ptr(), size
        if key not in self._flat_gradients:
            self._flat_gradients[key] = torch.empty(size, dtype=data.dtype, device=data.device)
        return torch.cat([grad.reshape(-1) for grad in grads], out=self._flat_gradients[key])

    def optimized_tensors(self, group: ParameterGroup) -> list[Tensor]:
        """Return the views of the parameter vector that the optimizer changes.

        There is one view for each slice in `group.runs` if gradients are flat tensors (`is_flat`),
        else one view for each parameter.
        """
        if self.is_flat:
            return [self.vector.data[run] for run in group.runs]
        return group.views

    def group(self, trains: tuple[str, ...]) -> ParameterGroup:
        """Return the parameters of some networks or modules, for the stages that train them.

        Raises ValueError if there is no trainable parameter, or if a method freezes a parameter.

        trains: the names, such as "model" or "model.head".
        """
        key = self.vector.data.data_ptr(), trains
        group = self._groups.get(key)
        if group is None:
            layout = self.vector.layout
            entries = layout.entries_in(trains)
            if not entries:
                raise ValueError(
                    f"a stage of a method trains {list(trains)}, but these parts have no "
                    "parameters, or only frozen ones. Give Stage(trains=...) a part with "
                    "trainable parameters."
                )
            fixed = next((entry.name for entry in entries if entry.name in self._fixed), "")
            if fixed:
                raise ValueError(
                    f"a stage of a method trains {list(trains)}, but method "
                    f"'{self._fixed[fixed]}' freezes {fixed}. Leave {fixed} out of "
                    "Stage(trains=...), or leave one of the methods out."
                )
            runs = layout.stretches(entries)
            group = self._groups[key] = ParameterGroup(
                params=self.vector.tensors(entries),
                views=[self.vector.data[e.start : e.stop].view(e.shape) for e in entries],
                runs=runs,
                shared=tuple(run for run in runs if run.stop <= layout.trained),
                parts=self._parts(entries),
            )
        return group

    def _parts(self, entries: Sequence[Entry]) -> tuple[OptimizedPart, ...]:
        """Divide a stage's trained parameters into groups, one for each optimizer of the stage.

        A group has one optimizer type and one factor on the learning rate. With muon, parameters of
        fewer than two dimensions use adamw.
        """
        factors = rate_factors(entries, self._rates)
        indices_of: dict[tuple[OptimizerKind, float], list[int]] = {}
        for index, (entry, factor) in enumerate(zip(entries, factors, strict=True)):
            kind: OptimizerKind = self.optimizer.kind
            if kind == "muon" and len(entry.shape) < 2:
                kind = "adamw"
            indices_of.setdefault((kind, factor), []).append(index)
        layout = self.vector.layout
        is_usual = self.optimizer.kind != "muon" and not self._rates
        parts = []
        for (kind, factor), indices in indices_of.items():
            runs = layout.stretches(entries[index] for index in indices)
            shared = tuple(run for run in runs if run.stop <= layout.trained)
            settings = replace(self.optimizer, kind=kind)
            name = "" if is_usual else f"{kind}*{factor:g}"
            parts.append(OptimizedPart(name, settings, factor, tuple(indices), shared))
        return tuple(parts)
