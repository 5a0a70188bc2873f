"""The data of a job while it trains: its batches, the model's outputs, and its worker.

The training loop uses a `Context`; hooks use a `LocalJob` with short names. SCAFFOLD's
`job.state["control"]` is `Context.state["scaffold.control"]`.
"""

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
    """The batches of one job, decided before its first step.

    positions: int64 [sum of sizes], the samples of all batches, one batch after another, as indices
    in the client's list of training samples.
    sizes: the number of samples in each batch.
    samples: the number of the client's training samples.
    """

    positions: np.ndarray
    sizes: tuple[int, ...]
    samples: int

    @property
    def steps(self) -> int:
        """The number of batches in the whole job."""
        return len(self.sizes)


class WorkerView(Protocol):
    """The attributes and functions of a worker that a job uses during training.

    local: the settings `local.*`.
    partition: the positions of each client's training samples in the data set.
    labels: the labels of all rows of the data set.
    statistics_layers: the layers of all networks that have running statistics, such as BatchNorm.
    """

    task: Task
    local: Local
    partition: CSR
    labels: Tensor
    statistics_layers: Sequence[nn.Module]

    def gather(
        self, rows: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return normalised inputs [n, ...] and labels of some rows of the data set.

        rows: int64 [n], positions in the data set.
        generator: draws the random augmentation of the inputs; None does not augment them.
        """
        ...

    def client_samples(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (inputs, labels) of a client's training samples, without augmentation.

        The samples are in the order of the partition. The batches are as large as those that the
        worker uses to score models.
        """
        ...

    def class_counts(self, client: int) -> Tensor:
        """Return how many training samples of each class a client has: int64 [C] on the CPU."""
        ...

    def frozen(self, ctx: Context, name: str, values: Tensor | None) -> Mapping[str, nn.Module]:
        """Return copies of all networks, by name, in eval mode and without gradients.

        name: a name of your choice. Calls of a job with the same name return the same copies.
        values: the vector [layout.total] to load, always the same for a name. None means the
        parameters from which training started.
        """
        ...


@dataclass(slots=True)
class Batch:
    """A batch as the model receives it, and its original inputs and targets.

    inputs: [B, ...].
    targets: labels [B, ...], such as int64 [B] for classes, or rows of probabilities [B, C].
    raw_inputs, raw_targets: inputs and targets before a method changed them.
    pair: with Mixup, (first, second, weight), else None. Each row mixes two samples: `first` and
    `second` are their labels [B, ...], and `weight` [] is that of the first sample.
    rows: the inputs passed to `add_rows`, by the name of the method; None if there are none.
    """

    # Not frozen: a frozen dataclass takes longer to create, and there is a `Batch` for each batch.
    inputs: Tensor
    targets: Tensor
    raw_inputs: Tensor
    raw_targets: Tensor
    pair: tuple[Tensor, Tensor, Tensor] | None = None
    rows: dict[str, Tensor] | None = None

    def add_rows(self, method: str, inputs: Tensor) -> None:
        """Pass more inputs through the model, in the same forward pass as the batch.

        method: the name of the method.
        inputs: [R, ...], with any R. In the hook `loss`, `out.rows(method)` returns their features
        [R, F].
        """
        self.rows = {**(self.rows or {}), method: inputs}


@dataclass(frozen=True)
class Stage:
    """One optimizer step on a batch, with the loss and the parameters of this step.

    name: hooks read it as `job.stage.name`. Stages of different names have different optimizers.
    trains: networks or modules to train: "model", "model.head", "fedbr.projector".
    loss: a function of a `LocalJob` and `Outputs` that returns the loss. None means the task loss
    with the terms of methods.
    ascend: True maximises the loss; the hook `gradient` then gets the gradient of minus the loss.
    rate: the factor on the learning rate.
    modes: True for train mode or False for eval mode, by the name of a network or module. The modes
    are set in the order of the mapping.
    """

    name: str = "task"
    trains: tuple[str, ...] = ("model",)
    loss: Callable[..., Tensor] | None = None
    ascend: bool = False
    rate: float = 1.0
    modes: Mapping[str, bool] = field(default_factory=dict)

    @property
    def has_task_loss(self) -> bool:
        """True if the loss of the stage is the task loss."""
        return self.loss is None


@dataclass(slots=True)
class Context:
    """All data of a job during its training.

    The keys of `download`, `state`, `upload`, `report`, `draws` and `kept` are full names, such as
    "scaffold.control".

    participation: the number of this client's earlier jobs that were dispatched.
    version: the number of the base version.
    samples: the number of the client's training samples.
    rate: the learning rate of this job.
    received: [layout.shared], the version that the client received.
    received_counters: int64 [layout.shared_counters], the received buffers of integers.
    base: [layout.shared], the values at the start of training; `received`, unless a method changed
    them.
    download: the tensors that the client received with the model.
    state: the client state. Replace entries, and never change them in place.
    upload: the tensors that the client sends with its update.
    report: columns of the history; a client does not send them.
    draws: the values of `Setup.draw`, one for each step.
    step_factor: the factor on `rate` in the current step.
    step: the number of the current batch, from 0.
    kept: the values in `LocalJob.scratch`.
    start: the client's personal tensors before the first step.
    plan: the batches of this job, known after the hook `begin`.
    losses: the task loss of each step that has one, without terms of methods; known in the hook
    `end`.
    views: the `LocalJob` of each method, by the name of the method.
    """

    trainer: WorkerView
    seed: int
    client: int
    participation: int
    version: int
    samples: int
    rate: float
    vector: Vector
    received: Tensor
    received_counters: Tensor
    base: Tensor
    download: Mapping[str, Tensor]
    state: dict[str, Tensor]
    upload: dict[str, Tensor] = field(default_factory=dict)
    report: dict[str, float] = field(default_factory=dict)
    draws: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    optimizers: Optimizers = field(default_factory=Optimizers)
    step_factor: float = 1.0
    step: int = 0
    stage: Stage = field(default_factory=Stage)
    kept: dict[str, Tensor] = field(default_factory=dict)
    start: ClientState[Tensor] = field(init=False, repr=False, compare=False)
    plan: Plan = field(init=False, repr=False, compare=False)
    losses: Tensor = field(init=False, repr=False, compare=False)
    views: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def view(self, method: str) -> Any:
        """Return the `LocalJob` that the hooks of a method get in this job.

        method: the name of the method.
        """
        return self.views[method]

    @property
    def model(self) -> Classifier:
        """The model that this job trains."""
        return cast("Classifier", self.vector.networks["model"])

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """All networks that this job trains, by full name.

        The full name of the model is "model". If the method "fedbr" has added a network with the
        name "projector", its full name is "fedbr.projector".
        """
        return self.vector.networks

    @property
    def num_classes(self) -> int:
        """The number of the model's outputs: the task's classes and those that a method adds."""
        return self.model.num_classes

    def drawn(self, name: str) -> Any:
        """Return the current step's random value of a method, usually a tensor.

        name: the full name "method.name" under which the method declared the value with
        `Setup.draw`.
        """
        return self.draws[name][self.step]

    def frozen(
        self, name: str = "received", values: Tensor | None = None
    ) -> Mapping[str, nn.Module]:
        """Return copies of all networks, by name, in eval mode and without gradients.

        name: a name of your choice. Calls of a job with the same name return the same copies.
        values: the vector [layout.total] to load, always the same for a name; None for the
        parameters from which training started.
        """
        return self.trainer.frozen(self, name, values)

    def stream(self, purpose: str) -> np.random.Generator:
        """Return a new random generator for a purpose of this job.

        Calls with the same purpose return generators that draw the same numbers.
        purpose: a name for the use of the numbers, such as "moon.shuffle".
        """
        return stream(self.seed, purpose, self.client, self.participation)

    def data(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches (inputs, labels) of the client's training samples, without augmentation."""
        return self.trainer.client_samples(self.client)

    def class_counts(self) -> Tensor:
        """Return how many training samples of each class the client has: int64 [C] on the CPU."""
        return self.trainer.class_counts(self.client)

    @contextmanager
    def keep_statistics(self) -> Iterator[None]:
        """Do not update BatchNorm's running statistics inside `with ctx.keep_statistics():`.

        Forward passes in train mode still normalise with the statistics of their batch.
        """
        for layer in self.trainer.statistics_layers:
            layer.track_running_stats = False  # type: ignore[assignment]
        try:
            yield
        finally:
            for layer in self.trainer.statistics_layers:
                layer.track_running_stats = True  # type: ignore[assignment]


def without_gradient(compute: Callable[[], Tensor]) -> Tensor:
    """Return the tensor that `compute()` returns in inference mode.

    The result is a normal tensor (a copy), so that later computations with gradients may use it.
    """
    with torch.inference_mode():
        value = compute()
    return value.clone()


class Outputs:
    """Features and outputs for one batch, for the hook `loss`.

    They come from the model that the job trains, and from the model from which the training
    started. Each value is computed once for all methods, at its first use.
    """

    __slots__ = ("_kept", "batch", "ctx")

    def __init__(self, ctx: Context, batch: Batch):
        self.ctx = ctx
        self.batch = batch
        self._kept: dict[str, object] = {}

    @property
    def zero(self) -> Tensor:
        """A scalar 0 on the device and in the dtype of the loss."""
        data = self.ctx.vector.data
        return self.once("zero", lambda: torch.zeros((), dtype=data.dtype, device=data.device))

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return the value stored as `name` for this step's batch; compute it at the first use."""
        value = self._kept.get(name)
        if value is None:
            value = self._kept[name] = compute()
        return cast(T, value)

    @property
    def features(self) -> Tensor:
        """The features [B, F] of the batch, computed by the model that the job trains."""
        return self.once("features", self._features)

    def _features(self) -> Tensor:
        added = self.batch.rows
        if not added:
            return self.ctx.model.features(self.batch.inputs)
        inputs = [self.batch.inputs, *added.values()]
        features = self.ctx.model.features(torch.cat(inputs)).split([len(part) for part in inputs])
        for name, part in zip(added, features[1:], strict=True):
            self._kept[f"rows.{name}"] = part
        return cast(Tensor, features[0])

    def rows(self, name: str) -> Tensor:
        """Return the features [R, F] of the R inputs that method `name` added to the batch.

        The method adds them with `Batch.add_rows`.
        """
        _ = self.features
        return cast(Tensor, self._kept[f"rows.{name}"])

    @property
    def logits(self) -> Tensor:
        """The outputs [B, C] for the batch, computed by the model that the job trains."""
        return self.once("logits", lambda: self._outputs_of(self.ctx.model, lambda: self.features))

    def _outputs_of(self, model: Classifier, features: Callable[[], Tensor]) -> Tensor:
        """Return the outputs [B, C] of a model for this batch.

        features: a function without arguments that returns the model's features [B, F]. It is not
        called for a model that has no linear head.
        """
        if is_split(model):
            return cast(Tensor, model.head(features()))
        return cast(Tensor, model(self.batch.inputs))

    @property
    def base_features(self) -> Tensor:
        """The features [B, F] of the model from which training started, without gradient.

        This is the received model, unless a method changed `job.start`.
        """
        return self.once("base_features", lambda: without_gradient(self._received_features))

    def _received_features(self) -> Tensor:
        return self._received.features(self.batch.inputs)

    @property
    def base_logits(self) -> Tensor:
        """The outputs [B, C] of the model from which training started, without gradient.

        This is the received model, unless a method changed `job.start`.
        """
        return self.once("base_logits", lambda: without_gradient(self._received_logits))

    def _received_logits(self) -> Tensor:
        return self._outputs_of(self._received, lambda: self.base_features)

    @property
    def _received(self) -> Classifier:
        return cast("Classifier", self.ctx.frozen()["model"])


@dataclass(frozen=True)
class Contribution:
    """A client's training samples, from which a method computes arrays before round 0.

    raysim passes it to the function `client` of `Setup.gather(client, server)`.
    gather: a function that reads the samples and returns (inputs, labels).
    generator: a random generator that is used only here, and only for this client.
    num_classes: `Task.num_classes`, which does not count outputs that a method adds to the model.
    """

    client: int
    gather: Callable[[], tuple[Tensor, Tensor]]
    generator: np.random.Generator
    num_classes: int

    @cached_property
    def _samples(self) -> tuple[Tensor, Tensor]:
        return self.gather()

    @property
    def inputs(self) -> Tensor:
        """The normalised inputs [n, ...] of the client's training samples, read at first use."""
        return self._samples[0]

    @property
    def labels(self) -> Tensor:
        """The labels of the client's training samples: classes [n], or [n, ...] in other tasks."""
        return self._samples[1]
