"""The facts of a run that are known before training: task, networks, costs, settings."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.losses import RowLoss
from raysim.api.metrics import Metric, resolve_metrics
from raysim.api.objectives import (
    OBJECTIVES,
    PARTLY_LABELLED,
    MetricRule,
    Objective,
    structure_objective,
)
from raysim.models.split import example_inputs
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.kinds import POSITION_KINDS, Kind, TargetField, Tokens
from raysim.vectors.layout import Layout
from raysim.vectors.optimizer import OptimizerKind, OptimizerSettings

FinetuneSamples: TypeAlias = Literal["own", "all"]
RateSchedule: TypeAlias = Literal["constant", "cosine", "linear", "step"]
RateUnit: TypeAlias = Literal["rounds", "steps"]


@dataclass(frozen=True)
class Task:
    """The learning task: inputs, outputs, loss and metrics.

    shape: the shape of one input; [channels, height, width] for an image.
    num_classes: the number of classes, or of outputs if labels are not classes.
    clients: the number of all clients, including unseen ones.
    dtype: the type of all floats.
    kind: decides the usual loss and the usual metrics.
    tokens: the number of different tokens for sequences of token numbers; else None.
    scored_by: the main metric; None means the first one that is computed.
    loss: a function from outputs [B, C] and labels to losses [B]; None means the usual loss.
    unseen: the number of unseen clients.
    scores: the metrics to compute, in addition to `scored_by`. Without both, the usual metrics are
    computed.
    lower: the user's metrics for which a lower score is better.
    label_shape: the shape of one label: () for a class per sample, (height, width) for a class per
    pixel.
    has_unlabelled: True if some samples have no class.
    targets: the arrays of structured labels, such as boxes and classes; () for other labels.
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
    label_shape: tuple[int, ...] = ()
    has_unlabelled: bool = False
    targets: tuple[TargetField, ...] = ()

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of the model's output for one sample, such as (classes,)."""
        if self.kind in POSITION_KINDS:
            return (self.num_classes, *self.label_shape)
        return self.label_shape or (self.num_classes,)

    @property
    def population(self) -> int:
        """The number of clients except the unseen ones, including clients without samples."""
        return self.clients - self.unseen

    @property
    def objective(self) -> Objective:
        """The loss and the metrics of the task."""
        if self.kind == "structure":
            return structure_objective(self.loss, self.targets)
        usual = PARTLY_LABELLED if self.has_unlabelled else OBJECTIVES[self.kind]
        return usual if self.loss is None else usual.with_loss(self.loss)

    @cached_property
    def metrics(self) -> tuple[MetricRule, ...]:
        """The metrics that are computed, the main one first.

        Raises ValueError for a metric that does not exist or does not fit the task.
        """
        rules = resolve_metrics(self.scored_by, self.scores, self)
        return tuple(
            replace(rule, higher=False) if rule.name in self.lower else rule for rule in rules
        )

    @property
    def metric(self) -> MetricRule:
        """The main metric of the task, such as accuracy.

        The scores of this metric decide the best round of a run and, by default, the best trial of
        a sweep. A run reports the round in which the score first reaches each value of the setting
        `thresholds`.
        """
        return self.metrics[0]

    @property
    def is_images(self) -> bool:
        """True if an input is an array [channels, height, width] of numbers."""
        return self.tokens is None and len(self.shape) == 3

    def example(self, rows: int) -> Tensor:
        """Return example inputs [rows, ...] to try a model with; always the same."""
        return example_inputs(self.shape, self.tokens, rows)


@dataclass(frozen=True)
class ExtraNetwork:
    """A network that a method adds to the run, next to the model.

    module: the network with its initial parameters.
    personal: True if each client has its own copy, which is never sent.
    """

    module: nn.Module
    personal: bool = False


# The cost of a forward pass, as a share of the cost of a forward and a backward pass.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Finetune:
    """Fine-tuning: a client's model is trained on the client's samples, only to be scored.

    epochs: passes over the samples, with a new local optimizer and the usual loss; 0 means none.
    head: True trains only the head, with the extractor in eval mode.
    last: True fine-tunes only after the final round.
    samples: "all" adds the samples that `partition.fraction` left out of training.
    """

    epochs: int = 0
    head: bool = False
    last: bool = False
    samples: FinetuneSamples = "own"

    def __post_init__(self) -> None:
        at_least("evaluate.finetune.epochs", self.epochs, 0)
        one_of("evaluate.finetune.samples", self.samples, get_args(FinetuneSamples))


@dataclass(frozen=True)
class Generation:
    r"""The settings `evaluate.generate.*`: texts that the final language model writes.

    tokens: the largest number of added tokens; 0 writes no texts.
    prompts: the beginnings of texts, with \n for a line break. [] makes one text without a prompt.
    temperature: the divisor of the logits; 0 takes the most probable token.
    """

    tokens: int = 200
    prompts: list[str] = field(default_factory=list)
    temperature: float = 0.8

    def __post_init__(self) -> None:
        at_least("evaluate.generate.tokens", self.tokens, 0)
        at_least("evaluate.generate.temperature", self.temperature, 0)

    @property
    def beginnings(self) -> list[str]:
        """Return the texts that the model continues: the prompts, or [""] without prompts.

        In a prompt, a backslash followed by n becomes a line break.
        """
        return [prompt.replace("\\n", "\n") for prompt in self.prompts] or [""]


@dataclass(frozen=True)
class Evaluation:
    """The settings `evaluate.*`: which models are scored on which data, and how often.

    every: aggregations between two evaluations, at least 1; the last version is always evaluated.
    clients: the number of clients that are drawn for each evaluation, or "all".
    common: True also scores client models on the central test set.
    probe: aggregations between two probes; 0 means never.
    probe_rows: the approximate number of samples of the central test set for a probe.
    decompose: aggregations between two loss decompositions (`raysim.methods.loss_decomposition`); 0
    means never.
    decompose_rows: the largest number of a client's training samples for a loss decomposition.
    metrics: the metrics to compute, in addition to `metric`. Without both, the usual metrics are
    computed.
    metric: the main metric; None means the first one that is computed.
    lower: the user's metrics for which a lower score is better.
    unseen: the share of clients that are never trained. Their scores are in separate columns.
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
    generate: Generation = field(default_factory=Generation)

    def __post_init__(self) -> None:
        in_range("evaluate.unseen", self.unseen, least=0, below=1)
        minimums = {"every": 1, "probe": 0, "probe_rows": 1, "decompose": 0, "decompose_rows": 1}
        for key, minimum in minimums.items():
            at_least(f"evaluate.{key}", getattr(self, key), minimum)
        if self.clients != "all":
            at_least("evaluate.clients", self.clients, 1)

    def evaluates(self, version: int, rounds: int) -> bool:
        """Return True if this version is scored.

        version: the number of the version.
        rounds: the number of the last version, which is always scored.
        """
        return version % self.every == 0 or version == rounds

    def probes(self, version: int) -> bool:
        """Return True if clients' models are probed before they are aggregated into this version.

        `Evaluation` explains what a probe is.
        version: the number of the version.
        """
        return self.probe > 0 and version % self.probe == 0

    def decomposes(self, version: int) -> bool:
        """Return True if there is a loss decomposition for this version.

        `Evaluation` explains what a loss decomposition is.
        """
        return self.decompose > 0 and version % self.decompose == 0


@dataclass(frozen=True)
class Local:
    """The settings `local.*`: how a client trains.

    optimizer: the kind of optimizer. "muon" uses AdamW for parameters with fewer than two
    dimensions.
    lr: the learning rate.
    momentum, nesterov: only for "sgd".
    clip: the largest norm of a gradient; 0 for no limit.
    lr_decay: each new version multiplies the learning rate by this factor.
    schedule: a further change of the learning rate; `Local.rate` has the formulas.
    schedule_over: the schedule's unit of time: versions ("rounds"), or the steps of each job.
    schedule_rounds: with schedule_over="rounds", the version at which "cosine" and "linear" end.
    Not used otherwise.
    final_lr: the learning rate at the end of "cosine" and "linear".
    drop_every: for "step", versions or steps between two drops of the learning rate. Not used
    otherwise.
    drop_factor: for "step", the factor on the learning rate at each drop.
    warmup_rounds: the number of versions at the start in which the learning rate grows.
    warmup_steps: the number of steps at the start of each job in which the learning rate grows.
    rates: factors on the learning rate, by "head", "body", "adapters", or the full name of a module
    or parameter.
    epochs: the number of passes of a job over the client's samples; None with `steps`.
    steps: the number of batches of a job; None with `epochs`.
    sampling: "shuffle" makes passes in a new random order; the last batch of a pass may be smaller.
    "replacement" draws every batch at random, with replacement.
    phases: with `steps`, the number of parts of a job, at most `steps`. A method that selects
    samples for each epoch selects them for each part instead.
    keep_optimizer: True keeps a client's optimizer state for the client's next job.
    """

    optimizer: OptimizerKind = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: float = 0.0
    lr_decay: float = 1.0
    schedule: RateSchedule = "constant"
    schedule_rounds: int | None = None
    final_lr: float = 0.0
    drop_every: int | None = None
    drop_factor: float = 0.1
    warmup_rounds: int = 0
    schedule_over: RateUnit = "rounds"
    warmup_steps: int = 0
    rates: dict[str, float] = field(default_factory=dict, hash=False)
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
                f"local.epochs={self.epochs} and local.steps={self.steps}: set one of them to a "
                "number, and the other one to null."
            )
        at_least("local.epochs", self.epochs if self.epochs is not None else 1, 1)
        at_least("local.steps", self.steps if self.steps is not None else 1, 1)
        at_least("local.batch", self.batch, 1)
        at_least("local.clip", self.clip, 0.0)
        at_least("local.phases", self.phases, 1)
        in_range("local.lr_decay", self.lr_decay, above=0, most=1)
        for name, factor in self.rates.items():
            at_least(f"local.rates.{name}", factor, 0.0)
        self._check_schedule()
        self.settings()

    def _check_schedule(self) -> None:
        """Raise ValueError if a setting of the learning-rate schedule is missing or invalid."""
        one_of("local.schedule", self.schedule, get_args(RateSchedule))
        one_of("local.schedule_over", self.schedule_over, get_args(RateUnit))
        at_least("local.warmup_rounds", self.warmup_rounds, 0)
        at_least("local.warmup_steps", self.warmup_steps, 0)
        in_range("local.final_lr", self.final_lr, least=0, most=self.lr)
        in_range("local.drop_factor", self.drop_factor, above=0, most=1)
        needs_rounds = self.schedule in ("cosine", "linear") and self.schedule_over == "rounds"
        if needs_rounds and self.schedule_rounds is None:
            raise ValueError(
                f"local.schedule={self.schedule} needs the number of rounds over which the "
                "learning rate decreases. Set local.schedule_rounds."
            )
        self._check_warmup()
        if self.schedule == "step" and self.drop_every is None:
            raise ValueError(
                f"local.schedule=step needs the number of {self.schedule_over} between two "
                "decreases of the learning rate. Set local.drop_every."
            )
        for name in ("schedule_rounds", "drop_every"):
            if getattr(self, name) is not None:
                at_least(f"local.{name}", getattr(self, name), 1)

    def _check_warmup(self) -> None:
        """Raise ValueError if the learning rate has no rounds or steps left after the warm-up.

        Only `schedule="cosine"` and `schedule="linear"` are checked.
        """
        if self.schedule not in ("cosine", "linear"):
            return
        key, end_key = "warmup_rounds", "schedule_rounds"
        if self.schedule_over == "steps":
            key, end_key = "warmup_steps", "steps"
        warmup, end = getattr(self, key), getattr(self, end_key)
        if end is not None and warmup >= end > 0:
            raise ValueError(
                f"local.{key}={warmup} leaves no time for local.schedule={self.schedule}, which "
                f"ends after local.{end_key}={end}. Reduce local.{key}, or increase "
                f"local.{end_key}."
            )

    def settings(self) -> OptimizerSettings:
        """Return the optimizer's kind, momentum, nesterov and weight decay.

        The learning rate is not part of them, because it changes from job to job.
        """
        return OptimizerSettings(self.optimizer, self.momentum, self.nesterov, self.weight_decay)

    def rate(self, version: int) -> float:
        """Return the learning rate of a job that starts from this version.

        The rate is s * lr_decay^version * w. The warm-up w is (version + 1) / (W + 1) if version <
        W = `warmup_rounds`, else 1. `schedule` decides s. Let T be `schedule_rounds`, and x =
        (version - W) / (T - W), limited to 0 to 1:

            constant   lr
            cosine     final_lr + (lr - final_lr) (1 + cos(pi x)) / 2
            linear     lr + (final_lr - lr) x
            step       lr drop_factor^floor(version / drop_every)

        With `schedule_over="steps"`, s is lr, and `step_factors` has the schedule.
        """
        rate = self.lr * self.lr_decay**version
        if self.schedule_over == "rounds":
            length = self.schedule_rounds or 1
            rate = (
                self._scheduled_rate(version, length, self.warmup_rounds) * self.lr_decay**version
            )
        if version < self.warmup_rounds:
            rate *= (version + 1) / (self.warmup_rounds + 1)
        return rate

    def step_factors(self, steps: int) -> list[float] | None:
        """Return the factor on the job's learning rate for each step; None means 1 in all steps.

        The factor of step k, from 0, is s * w. The warm-up w is (k + 1) / (W + 1) if k < W =
        `warmup_steps`, else 1. `schedule` decides s. Let f be final_lr / lr, and x = (k - W) /
        max(1, steps - W), limited to 0 to 1:

            constant   1
            cosine     f + (1 - f) (1 + cos(pi x)) / 2
            linear     1 + (f - 1) x
            step       drop_factor^floor(k / drop_every)

        With `schedule_over="rounds"`, s is 1.
        """
        if self.schedule_over == "rounds" and not self.warmup_steps:
            return None
        factors = [1.0] * steps
        if self.schedule_over == "steps":
            warmup = self.warmup_steps
            factors = [self._scheduled_rate(step, steps, warmup) / self.lr for step in range(steps)]
        for step in range(min(self.warmup_steps, steps)):
            factors[step] *= (step + 1) / (self.warmup_steps + 1)
        return factors

    def _scheduled_rate(self, time: int, end: int, warmup: int) -> float:
        """Return the learning rate that `local.schedule` gives, without warm-up and `lr_decay`.

        All arguments count model versions with `schedule_over="rounds"`, and a job's steps with
        "steps".
        time: the current version or step, from 0.
        end: the version or step at which "cosine" and "linear" end.
        warmup: the length of the warm-up, after which "cosine" and "linear" begin.
        """
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "step":
            assert self.drop_every is not None, "checked at the start"
            return self.lr * self.drop_factor ** (time // self.drop_every)
        length = max(1, end - warmup)
        progress = min(1.0, max(0, time - warmup) / length)
        if self.schedule == "linear":
            return self.lr + (self.final_lr - self.lr) * progress
        return self.final_lr + (self.lr - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2

    def budget(self, samples: int) -> float:
        """Return how many samples a job trains on, summed over all of its epochs or steps.

        The true number may be smaller if a method selects samples, or if the last batch of a pass
        is small or left out.
        samples: the number of the client's training samples.
        """
        if self.epochs:
            return samples * self.epochs
        return (self.steps or 0) * min(self.batch, samples)


class Labels(NamedTuple):
    """The kinds of the fleet's devices, such as "phone", and the kind of each client's device.

    names: the names of all kinds.
    kinds: int [clients], for each client the position of its kind in `names`.
    """

    names: tuple[str, ...]
    kinds: np.ndarray


@dataclass(frozen=True)
class RunFacts:
    """The facts in a `Participation` that are the same for all jobs of a run.

    local: the settings `local.*`.
    layout: the position of each tensor in the flat vector.
    clients_with_samples: how many clients have training samples.
    filled_hooks: the names of the hooks that the run's methods override.
    """

    task: Task
    local: Local
    layout: Layout
    clients_with_samples: int
    filled_hooks: frozenset[str]


class Participation(NamedTuple):
    """A job when it is dispatched: the argument of `Method.cost` and of functions in `Setup`.

    version: the base version.
    samples: the number of the client's training samples.
    trained_samples: the planned number of samples that the job trains on.
    earlier_jobs: the number of the client's jobs that were dispatched before.
    aggregated_jobs: the number of the client's jobs in earlier aggregations, with failed jobs.
    client: -1 if it is unknown.
    """

    version: int
    samples: int
    trained_samples: float
    earlier_jobs: int
    aggregated_jobs: int
    run: RunFacts
    client: int = -1
