"""The step: one batch through the model, the losses of all methods, one gradient, one optimiser step per stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raysim.methods.method import Method, Stage, at_least, owner, owners
from raysim.streams import stream
from raysim.vector import Vector

if TYPE_CHECKING:
    from raysim.client import Plan, Trainer
    from raysim.models import Classifier


T = TypeVar("T")


@dataclass(slots=True)
class Batch:
    """A batch as the model sees it, and as it was before any method changed it. Not frozen only because that is slow.

    inputs [B, ...]; targets int64 [B] or rows of probabilities [B, C]; pair: Mixup's (y, y_permuted, weight of y).
    """

    inputs: Tensor
    targets: Tensor
    raw_inputs: Tensor
    raw_targets: Tensor
    pair: tuple[Tensor, Tensor, Tensor] | None = None


@dataclass(slots=True)
class Context:
    """What a method's hooks see of the job at work."""

    trainer: Trainer
    seed: int
    client: int
    turn: int  # participations of this client before this one
    version: int  # aggregations behind the received vector
    samples: int
    rate: float  # learning rate of this job
    vector: Vector
    received: Tensor  # [layout.shared] the received vector, from which the update is measured
    base: Tensor  # [layout.shared] where training starts: the received vector, unless a method mixes it with others
    published: Mapping[str, Tensor]  # what all clients of this version received, now or once
    extras: Mapping[str, Tensor]  # what this client alone received
    state: dict[str, Tensor]  # private; replace entries, never change them in place
    upload: dict[str, Tensor] = field(default_factory=dict)
    report: dict[str, float] = field(default_factory=dict)  # columns of the history, by "method.name"; does not travel
    draws: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    plan: Plan | None = None
    step: int = 0
    stage: Stage = field(default_factory=Stage)
    kept: dict[str, Tensor] = field(default_factory=dict)  # what hooks keep for the rest of the job, by full name
    losses: Tensor | None = None  # [iterations with the task] its loss without added terms, once training is over

    @property
    def model(self) -> Classifier:
        """The model that is trained."""
        return cast("Classifier", self.vector.networks["model"])

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """All networks that are trained."""
        return self.vector.networks

    @property
    def num_classes(self) -> int:
        """Outputs of the model: the task's classes, and whatever a method adds to them."""
        return self.model.num_classes

    def drawn(self, name: str) -> Tensor:
        """This step's entry of what a method's `draws` returned."""
        return self.draws[name][self.step]

    def frozen(self, name: str = "received", values: Tensor | None = None) -> Mapping[str, nn.Module]:
        """A second set of networks in eval mode, without gradients; loaded once per job and name.

        By default as received, with this client's own personal part; else with `values` [layout.total], e.g. a vector
        that a method kept from an earlier participation.
        """
        return self.trainer.frozen(self, name, values)

    def stream(self, purpose: str) -> np.random.Generator:
        """A random stream of this participation's own."""
        return stream(self.seed, purpose, self.client, self.turn)

    def data(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised inputs and labels of the client's own training samples, in order, unaugmented, in batches."""
        return self.trainer.own(self.client)

    def class_counts(self) -> Tensor:
        """The client's training samples of each class of the data: int64 [C], on the CPU."""
        return self.trainer.class_counts(self.client)

    @contextmanager
    def statistics_kept(self) -> Iterator[None]:
        """Forward passes inside normalise with their own batch but leave running statistics alone."""
        for layer in self.trainer.tracking:
            layer.track_running_stats = False  # type: ignore[assignment]
        try:
            yield
        finally:
            for layer in self.trainer.tracking:
                layer.track_running_stats = True  # type: ignore[assignment]


def inferred(compute: Callable[[], Tensor]) -> Tensor:
    """A forward pass without gradient; the copy of its result may take part in one with gradient."""
    with torch.inference_mode():
        value = compute()
    return value.clone()


class Outputs:
    """What the model makes of a batch, each computed at most once however many methods ask."""

    __slots__ = ("_kept", "_more", "batch", "ctx")

    def __init__(self, ctx: Context, batch: Batch, more: Mapping[str, Tensor] | None = None):
        self.ctx, self.batch, self._more = ctx, batch, more
        self._kept: dict[str, object] = {}

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """The value of that name, computed on first demand and kept for the rest of the iteration."""
        value = self._kept.get(name)
        if value is None:
            value = self._kept[name] = compute()
        return cast(T, value)

    @property
    def features(self) -> Tensor:
        """[B, F] of the model in training."""
        return self.once("features", self._features)

    def _features(self) -> Tensor:
        if not self._more:
            return self.ctx.model.features(self.batch.inputs)
        parts = [self.batch.inputs, *self._more.values()]
        own, *others = self.ctx.model.features(torch.cat(parts)).split([len(part) for part in parts])
        self._kept |= {f"rows.{name}": features for name, features in zip(self._more, others, strict=True)}
        return cast(Tensor, own)

    def rows(self, name: str) -> Tensor:
        """[R, F] features of what the method of that name added with `rows`, out of the same forward pass."""
        _ = self.features
        return cast(Tensor, self._kept[f"rows.{name}"])

    @property
    def logits(self) -> Tensor:
        """[B, C] raw logits of the model in training."""
        return self.once("logits", lambda: cast(Tensor, self.ctx.model.head(self.features)))

    @property
    def base_features(self) -> Tensor:
        """[B, F] of the received model, without gradient."""
        return self.once("base_features", lambda: inferred(lambda: self._received.features(self.batch.inputs)))

    @property
    def base_logits(self) -> Tensor:
        """[B, C] of the received model, without gradient."""
        return self.once("base_logits", lambda: inferred(lambda: cast(Tensor, self._received.head(self.base_features))))

    @property
    def _received(self) -> Classifier:
        return cast("Classifier", self.ctx.frozen()["model"])


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
        self.flat = bool(self.corrections) or clip > 0
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
        out = Outputs(ctx, batch, more)
        reported: Tensor | None = None
        for stage in stages:
            ctx.stage = stage
            for part, training in stage.modes.items():
                _part(ctx.networks, part).train(training)
            if stage.loss is not None:
                loss = stage.loss(ctx, out, batch)
            else:
                loss = self.task_loss(ctx, out, batch)
                reported = loss.detach()
                for method in self.terms:
                    loss = loss + method.term(ctx, out, batch)
            self._descend(ctx, stage, -loss if stage.ascend else loss)
        return reported

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

    def _descend(self, ctx: Context, stage: Stage, loss: Tensor) -> None:
        group = self._group(stage.trains)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, group.params, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(found, group.params, strict=True)]
        steps = [self.vector.data[run] for run in group.runs] if self.flat else group.views
        descent = self._descent(stage, steps)
        rate = ctx.rate * stage.rate
        if not self.flat:
            descent.step(steps, grads, rate)
            return
        flat = self._flatten(grads)
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
