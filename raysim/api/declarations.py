"""The facts of a run before training: the task, networks, costs, scores, local training."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from raysim.api.losses import RowLoss
from raysim.api.metrics import Metric, resolve_metrics
from raysim.api.objectives import OBJECTIVES, MetricRule, Objective
from raysim.models.split import example_inputs
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.kinds import Kind, Tokens
from raysim.vectors.layout import Layout
from raysim.vectors.optimizer import OptimizerSettings


@dataclass(frozen=True)
class Task:
    """The learning task: inputs, outputs, loss and metrics.

    shape: the shape of one input; [channels, height, width] for an image. num_classes: the number
    of classes, or of other outputs of the model. clients: the number of all clients of the run.
    dtype: the type of all floats. kind: decides the usual loss and metrics. tokens: the number of
    different tokens if inputs are sequences of token numbers. scored_by: the name of the main
    metric; None for the first of `scores`, or the usual one. loss: function from outputs [B, C] and
    labels to a loss for each sample [B]; None for the usual one. unseen: the number of clients that
    are never trained. scores: the metrics that are computed, names and metrics of the user. lower:
    the names of metrics for which a lower score is better, in addition to those that say so.
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
    scores: tuple[str | Metric, ...] = ()
    lower: Collection[str] = ()

    @property
    def population(self) -> int:
        """The number of clients that may be trained, with or without samples."""
        return self.clients - self.unseen

    @property
    def objective(self) -> Objective:
        """The loss and the metrics of the task."""
        usual = OBJECTIVES[self.kind]
        return usual if self.loss is None else usual.with_loss(self.loss)

    @cached_property
    def metrics(self) -> tuple[MetricRule, ...]:
        """The metrics of scores, the main one first. Raises ValueError for one that cannot be."""
        rules = resolve_metrics(self.scored_by, self.scores, self)
        return tuple(
            replace(rule, higher=False) if rule.name in self.lower else rule for rule in rules
        )

    @property
    def metric(self) -> MetricRule:
        """The main metric: it decides thresholds, best rounds and what a search compares."""
        return self.metrics[0]

    @property
    def is_images(self) -> bool:
        """True if an input is an array [channels, height, width] of numbers."""
        return self.tokens is None and len(self.shape) == 3

    def example(self, rows: int) -> Tensor:
        """Return example inputs [rows, ...] to try a model with; always the same."""
        return example_inputs(self.shape, self.tokens, rows)


@dataclass(frozen=True)
class Network:
    """A network next to the model; a personal one never travels."""

    module: nn.Module
    personal: bool = False


# A forward pass alone, in units of a forward and backward pass.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Finetune:
    """Fine-tuning of a client's model on the client's data before a score; then it is discarded.

    epochs: passes with a new local optimizer and the usual loss; 0 for none. head: True trains only
    the head, with the extractor in eval mode. last: True fine-tunes after the final round only.
    samples: "own" uses the client's training samples; "all" also uses the samples that
    `partition.fraction` left out of training.
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
    """The settings `evaluate.*`: which models are scored on which data, and how often.

    Numbers of aggregations between scores: 0 is never. every: for all scores. clients: the number
    of clients that are drawn for each score. finetune: how client models are adapted before they
    are scored; these scores have columns of their own. common: True also scores client models on
    the central test set. probe: for local models before they are averaged, on `probe_rows` images
    of the central test set. decompose: for the loss decomposition, on at most `decompose_rows`
    training samples of a client. metrics: names of the metrics that are computed. metric: the main
    one; None is the first of them, or the usual metric for the data. lower: metrics of the user for
    which a lower score is better.
    unseen: the share of clients that is drawn at the start, never trained, and scored in separate
    columns.
    """

    every: int = 1
    clients: int | Literal["all"] = "all"
    finetune: Finetune = field(default_factory=Finetune)
    common: bool = False
    probe: int = 0
    probe_rows: int = 1000
    decompose: int = 0
    decompose_rows: int = 1000
    metrics: list[str] = field(default_factory=list)
    metric: str | None = None
    lower: list[str] = field(default_factory=list)
    unseen: float = 0.0

    def __post_init__(self) -> None:
        in_range("evaluate.unseen", self.unseen, least=0, below=1)
        minimums = {"every": 1, "probe": 0, "probe_rows": 1, "decompose": 0, "decompose_rows": 1}
        for key, minimum in minimums.items():
            at_least(f"evaluate.{key}", getattr(self, key), minimum)
        if self.clients != "all":
            at_least("evaluate.clients", self.clients, 1)

    def evaluates(self, version: int, rounds: int) -> bool:
        """Return True if this version is scored. rounds: the number of the last version."""
        return version % self.every == 0 or version == rounds

    def probes(self, version: int) -> bool:
        """Return True if this version's step is probed: local models before they are averaged."""
        return self.probe > 0 and version % self.probe == 0

    def decomposes(self, version: int) -> bool:
        """Return True if the loss of the step to this version is decomposed."""
        return self.decompose > 0 and version % self.decompose == 0


@dataclass(frozen=True)
class Local:
    """The settings `local.*`: how a client trains.

    optimizer: "sgd", "adam" or "adamw". lr: learning rate. lr_decay: factor on the learning rate
    for each version. clip: largest norm of a gradient; 0 for no limit.
    epochs, steps: number of passes over the client's samples, or number of batches; one is None.
    batch: number of samples in a batch. sampling: "shuffle" shuffles for every pass and keeps the
    smaller last batch; "replacement" draws full batches. phases: number of parts that `steps` are
    cut into, for methods that select the samples of an epoch. keep_optimizer: True lets a client's
    optimizer continue, with momentum and step counts, where the client's last job left it.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
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
                f"local.epochs={self.epochs} and local.steps={self.steps}: exactly one of them "
                "counts. Set the other one to null."
            )
        at_least("local.epochs", self.epochs if self.epochs is not None else 1, 1)
        at_least("local.steps", self.steps if self.steps is not None else 1, 1)
        at_least("local.batch", self.batch, 1)
        at_least("local.clip", self.clip, 0.0)
        at_least("local.phases", self.phases, 1)
        in_range("local.lr_decay", self.lr_decay, above=0, most=1)
        self.settings()

    def settings(self) -> OptimizerSettings:
        """Return the settings that the optimizer's constructor receives."""
        return OptimizerSettings(self.optimizer, self.momentum, self.nesterov, self.weight_decay)

    def rate(self, version: int) -> float:
        """Return the learning rate of a job that starts from this version."""
        return self.lr * self.lr_decay**version

    def budget(self, samples: int) -> float:
        """Return the number of samples that a client trains on, with every pass counted."""
        if self.epochs:
            return samples * self.epochs
        return (self.steps or 0) * min(self.batch, samples)


@dataclass(frozen=True)
class RunFacts:
    """The facts of a run that a method's `cost` and `when` receive.

    local: the settings `local.*`. clients_with_samples: how many clients have training samples.
    filled_hooks: the hooks that methods of the list override.
    """

    task: Task
    local: Local
    layout: Layout
    clients_with_samples: int
    filled_hooks: frozenset[str]


class Participation(NamedTuple):
    """A job when it is dispatched: the argument of `cost` and of `when`."""

    version: int
    samples: int  # training samples of the client
    trained_samples: float  # samples that it trains on, epochs counted
    earlier_jobs: int  # jobs of the client that were dispatched before
    aggregated_jobs: int  # those of them that were aggregated before this version
    run: RunFacts
