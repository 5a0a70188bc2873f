"""What a run and its methods declare before anything is trained: the task, networks, costs, local training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from raysim.api.losses import RowLoss
from raysim.api.objectives import OBJECTIVES, Metric, Objective
from raysim.models.split import example_inputs
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.kinds import Kind, Tokens
from raysim.vectors.layout import Layout
from raysim.vectors.optimizer import OptimizerSettings


@dataclass(frozen=True)
class Task:
    """What is learnt: shape of an input ([channels, height, width] of images), number of classes (or other outputs of
    the model), floats in use, and of which kind it is, which names the loss and the metrics.

    tokens: of inputs that are sequences of token numbers. scored_by: the metric's name; None: the kind's usual one.
    loss: of each sample, outputs [B, C] and labels to [B]; None: the kind's usual one.
    unseen: how many of the clients are never trained.
    """

    shape: tuple[int, ...]
    num_classes: int
    clients: int
    dtype: torch.dtype = torch.float32
    kind: Kind = "classification"
    tokens: Tokens | None = None
    scored_by: str | None = None
    loss: RowLoss | None = None
    unseen: int = 0

    @property
    def population(self) -> int:
        """The clients that may be trained, whether they have samples or not."""
        return self.clients - self.unseen

    @property
    def objective(self) -> Objective:
        """Its loss and its metrics."""
        usual = OBJECTIVES[self.kind]
        return usual if self.loss is None else usual.descending(self.loss)

    @property
    def metric(self) -> Metric:
        """What its models are scored with. Raises ValueError where another kind's was asked for."""
        return self.objective.metric(self.scored_by, self.kind)

    @property
    def is_images(self) -> bool:
        """Whether an input is an array [channels, height, width] of numbers."""
        return self.tokens is None and len(self.shape) == 3

    def example(self, rows: int) -> Tensor:
        """Inputs that a model of this task has to take, for trying it out; always the same."""
        return example_inputs(self.shape, self.tokens, rows)


@dataclass(frozen=True)
class Network:
    """A network besides the model; a personal one never travels."""

    module: nn.Module
    personal: bool = False


# A forward pass alone, in units of a forward and backward pass.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Finetune:
    """Adapting a client's model to its own data before it is scored; nothing of it is kept.

    epochs: of the run's local optimiser, started anew, on the cross-entropy alone. head: step the head only, with the
    extractor in eval mode. last: only after the final round. samples: "own" are the client's training samples, "all"
    also those of it that `partition.fraction` left out of training.
    """

    epochs: int = 0
    head: bool = False
    last: bool = False
    samples: Literal["own", "all"] = "own"

    def __post_init__(self) -> None:
        at_least("evaluate.finetune.epochs", self.epochs, 0)
        one_of("evaluate.finetune.samples", self.samples, ("own", "all"))


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated: `evaluate.*` of the configuration. How often is counted in aggregations; 0: never.

    clients: how many are drawn each time. finetune: how models are adapted first, for scores of their own. common:
    whether clients' own models are scored on the central test set. probe: of local models before they are averaged, on
    `probe_rows` images of the central test set. decompose: the loss decomposition, on at most `decompose_rows` training
    samples of a client. metric: what models are scored with, "mae" for example; None: what is usual for the data.
    unseen: share of the clients that are drawn at the start, never trained, and scored in columns of their own.
    """

    every: int = 1
    clients: int | Literal["all"] = "all"
    finetune: Finetune = field(default_factory=Finetune)
    common: bool = False
    probe: int = 0
    probe_rows: int = 1000
    decompose: int = 0
    decompose_rows: int = 1000
    metric: str | None = None
    unseen: float = 0.0

    def __post_init__(self) -> None:
        in_range("evaluate.unseen", self.unseen, least=0, below=1)
        for key, least in (
            ("every", 1),
            ("probe", 0),
            ("probe_rows", 1),
            ("decompose", 0),
            ("decompose_rows", 1),
        ):
            at_least(f"evaluate.{key}", getattr(self, key), least)
        if self.clients != "all":
            at_least("evaluate.clients", self.clients, 1)

    def evaluates(self, version: int, rounds: int) -> bool:
        """Whether this version is scored."""
        return version % self.every == 0 or version == rounds

    def probes(self, version: int) -> bool:
        """Whether the local models of the step to this version are probed."""
        return self.probe > 0 and version % self.probe == 0

    def decomposes(self, version: int) -> bool:
        """Whether the step to this version is decomposed."""
        return self.decompose > 0 and version % self.decompose == 0


@dataclass(frozen=True)
class Local:
    """How a client trains: `local.*` of the configuration.

    Either `epochs` passes over the client's samples or `steps` batches. lr_decay multiplies the rate once per version.
    sampling: "shuffle" reshuffles every pass and keeps the smaller last batch; "replacement" draws full batches.
    phases: into how many parts a budget of steps is cut for methods that select samples per epoch. keep_optimizer: a
    client's optimisers go on, with momentum and counts of steps, where its last participation left them.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float = 0.0
    lr_decay: float = 1.0
    epochs: int | None = 1
    steps: int | None = None
    batch: int = 32
    sampling: Literal["shuffle", "replacement"] = "shuffle"
    phases: int = 10
    keep_optimizer: bool = False

    def __post_init__(self) -> None:
        above("local.lr", self.lr, 0)
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"local.epochs={self.epochs} and local.steps={self.steps}: give exactly one, and null for the other"
            )
        at_least("local.epochs", self.epochs if self.epochs is not None else 1, 1)
        at_least("local.steps", self.steps if self.steps is not None else 1, 1)
        at_least("local.batch", self.batch, 1)
        at_least("local.clip", self.clip, 0.0)
        at_least("local.phases", self.phases, 1)
        in_range("local.lr_decay", self.lr_decay, above=0, most=1)
        self.settings()

    def settings(self) -> OptimizerSettings:
        """The optimiser's part."""
        return OptimizerSettings(self.optimizer, self.momentum, self.nesterov, self.weight_decay)

    def rate(self, version: int) -> float:
        """Return the learning rate of a job that starts from this version."""
        return self.lr * self.lr_decay**version

    def budget(self, samples: int) -> float:
        """Samples that a client with so many will train on, all passes counted."""
        return (
            samples * self.epochs if self.epochs else (self.steps or 0) * min(self.batch, samples)
        )


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run, as a method's `cost` and `when` see them.

    local: the settings `local.*`. clients_with_samples: how many clients have training samples.
    filled_hooks: the hooks that a method of the list fills.
    """

    task: Task
    local: Local
    layout: Layout
    clients_with_samples: int
    filled_hooks: frozenset[str]


class Participation(NamedTuple):
    """What is known of a job when it is dispatched."""

    version: int
    samples: int  # that the client holds
    trained_samples: float  # samples that it trains on, epochs counted
    earlier_jobs: int  # how often the client was dispatched before
    aggregated_jobs: int  # how many of those jobs entered an aggregation before this version
    run: RunFacts
