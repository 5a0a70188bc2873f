"""What hooks see of the job at work: its plan, its batch, what the model makes of it, and what the worker can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.client_state import ClientState
from raysim.api.declarations import Local, Task
from raysim.data.partition import CSR
from raysim.models.classifier import is_split
from raysim.primitives.streams import stream
from raysim.vectors.layout import Vector
from raysim.vectors.optimizer import Optimizers

if TYPE_CHECKING:
    from raysim.models import Classifier


T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The batches of one job, decided before its first step: positions in the client's samples, and batch sizes."""

    positions: np.ndarray  # int64 [sum of sizes]
    sizes: tuple[int, ...]  # rows of each step's batch
    samples: int

    @property
    def steps(self) -> int:
        """Number of iterations."""
        return len(self.sizes)


class WorkerView(Protocol):
    """What hooks may ask of the worker that trains: its settings, its data, a second set of networks."""

    task: Task
    local: Local
    partition: CSR
    labels: Tensor  # of all rows of the data set
    statistics_layers: Sequence[nn.Module]  # layers with running statistics

    def gather(
        self, rows: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Normalised inputs (augmented if a generator is given) and labels of some rows of the data set."""
        ...

    def client_samples(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's own training samples, in order, in batches fit for evaluation."""
        ...

    def class_counts(self, client: int) -> Tensor:
        """See `Context.class_counts`."""
        ...

    def frozen(self, ctx: Context, name: str, values: Tensor | None) -> Mapping[str, nn.Module]:
        """See `Context.frozen`."""
        ...


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
    rows: dict[str, Tensor] | None = None  # more inputs for the same forward pass, by method

    def add_rows(self, method: str, inputs: Tensor) -> None:
        """Pass more inputs [R, ...] through the model; `out.rows(method)` has their features."""
        self.rows = {**(self.rows or {}), method: inputs}


@dataclass(frozen=True)
class Stage:
    """One optimiser step within an iteration.

    trains: networks or modules whose parameters it steps ("model", "model.head", "fedbr.projector").
    loss: its own loss, called with (job, out); None is the task loss, to which methods add terms.
    ascend: step uphill; the gradient that hooks see is that of the negated loss.
    rate: factor on the run's learning rate. modes: networks or modules that are in train (True) or eval (False) mode
    meanwhile, set in this order.
    """

    name: str = "task"
    trains: tuple[str, ...] = ("model",)
    loss: Callable[..., Tensor] | None = None
    ascend: bool = False
    rate: float = 1.0
    modes: Mapping[str, bool] = field(default_factory=dict)

    @property
    def has_task_loss(self) -> bool:
        """True if the stage minimises the task loss."""
        return self.loss is None


@dataclass(slots=True)
class Context:
    """What a method's hooks see of the job at work."""

    trainer: WorkerView
    seed: int
    client: int
    participation: int  # participations of this client before this one
    version: int  # aggregations behind the received vector
    samples: int
    rate: float  # learning rate of this job
    vector: Vector
    received: Tensor  # [layout.shared] the received vector, from which the update is measured
    received_counters: Tensor  # int64 [layout.shared_counters] the received integer buffers
    base: Tensor  # [layout.shared] where training starts: the received vector, unless a method mixes it with others
    download: Mapping[
        str, Tensor
    ]  # what it received besides the vector, now or once, alone or with all others
    state: dict[str, Tensor]  # private; replace entries, never change them in place
    upload: dict[str, Tensor] = field(default_factory=dict)
    report: dict[str, float] = field(
        default_factory=dict
    )  # columns of the history, by "method.name"; does not travel
    draws: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    optimizers: Optimizers = field(default_factory=Optimizers)  # of this job
    step: int = 0
    stage: Stage = field(default_factory=Stage)
    kept: dict[str, Tensor] = field(
        default_factory=dict
    )  # what hooks keep for the rest of the job, by full name
    # What stays on the client, as training starts from it; for frozen networks.
    start: ClientState[Tensor] = field(init=False, repr=False, compare=False)
    plan: Plan = field(init=False, repr=False, compare=False)  # known after `receive` and `select`
    # [iterations with the task] its loss without added terms; known in `finish`.
    losses: Tensor = field(init=False, repr=False, compare=False)
    # What the hooks of each method see, by its name.
    views: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def view(self, method: str) -> Any:
        """Return what the hooks of a method see of this job."""
        return self.views[method]

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

    def frozen(
        self, name: str = "received", values: Tensor | None = None
    ) -> Mapping[str, nn.Module]:
        """A second set of networks in eval mode, without gradients; loaded once per job and name.

        By default as received, with this client's own personal part; else with `values` [layout.total], e.g. a vector
        that a method kept from an earlier participation.
        """
        return self.trainer.frozen(self, name, values)

    def stream(self, purpose: str) -> np.random.Generator:
        """A random stream of this participation's own."""
        return stream(self.seed, purpose, self.client, self.participation)

    def data(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised inputs and labels of the client's own training samples, in order, unaugmented, in batches."""
        return self.trainer.client_samples(self.client)

    def class_counts(self) -> Tensor:
        """The client's training samples of each class of the data: int64 [C], on the CPU."""
        return self.trainer.class_counts(self.client)

    @contextmanager
    def keep_statistics(self) -> Iterator[None]:
        """Forward passes inside normalise with their own batch but leave running statistics alone."""
        for layer in self.trainer.statistics_layers:
            layer.track_running_stats = False  # type: ignore[assignment]
        try:
            yield
        finally:
            for layer in self.trainer.statistics_layers:
                layer.track_running_stats = True  # type: ignore[assignment]


def without_gradient(compute: Callable[[], Tensor]) -> Tensor:
    """A forward pass without gradient; the copy of its result may take part in one with gradient."""
    with torch.inference_mode():
        value = compute()
    return value.clone()


class Outputs:
    """What the model makes of a batch, each computed at most once however many methods ask."""

    __slots__ = ("_kept", "batch", "ctx")

    def __init__(self, ctx: Context, batch: Batch):
        self.ctx, self.batch = ctx, batch
        self._kept: dict[str, object] = {}

    @property
    def zero(self) -> Tensor:
        """A scalar zero where the loss is computed."""
        data = self.ctx.vector.data
        return self.once("zero", lambda: torch.zeros((), dtype=data.dtype, device=data.device))

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
        more = self.batch.rows
        if not more:
            return self.ctx.model.features(self.batch.inputs)
        parts = [self.batch.inputs, *more.values()]
        own, *others = self.ctx.model.features(torch.cat(parts)).split(
            [len(part) for part in parts]
        )
        self._kept |= {
            f"rows.{name}": features for name, features in zip(more, others, strict=True)
        }
        return cast(Tensor, own)

    def rows(self, name: str) -> Tensor:
        """[R, F] features of what the method of that name added with `rows`, out of the same forward pass."""
        _ = self.features
        return cast(Tensor, self._kept[f"rows.{name}"])

    @property
    def logits(self) -> Tensor:
        """[B, C] raw logits of the model in training."""
        return self.once("logits", lambda: self._outputs_of(self.ctx.model, lambda: self.features))

    def _outputs_of(self, model: Classifier, features: Callable[[], Tensor]) -> Tensor:
        """Of its features, which others may ask for too; of a model without features, of the inputs."""
        return cast(Tensor, model.head(features()) if is_split(model) else model(self.batch.inputs))

    @property
    def base_features(self) -> Tensor:
        """[B, F] of the received model, without gradient."""
        return self.once(
            "base_features",
            lambda: without_gradient(lambda: self._received.features(self.batch.inputs)),
        )

    @property
    def base_logits(self) -> Tensor:
        """[B, C] of the received model, without gradient."""
        return self.once(
            "base_logits",
            lambda: without_gradient(
                lambda: self._outputs_of(self._received, lambda: self.base_features)
            ),
        )

    @property
    def _received(self) -> Classifier:
        return cast("Classifier", self.ctx.frozen()["model"])


@dataclass(frozen=True)
class Contribution:
    """What a method's `contribute` sees of a client, before round 0."""

    client: int
    gather: Callable[[], tuple[Tensor, Tensor]]
    generator: np.random.Generator
    num_classes: int

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        return self.gather()

    @property
    def inputs(self) -> Tensor:
        """[n, ...] normalised; gathered on demand."""
        return self._samples[0]

    @property
    def labels(self) -> Tensor:
        """[n]"""
        return self._samples[1]
