"""What a run is made of: its settings, and the objects that they and the configuration's groups name."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from raysim.api.declarations import Evaluation, Local, Task
from raysim.api.declare import Declarations, RunSettingsForMethods, declare
from raysim.api.losses import RowLoss, check_loss, loss_name
from raysim.api.method import Method
from raysim.api.server_view import Weighting
from raysim.data.federated import FederatedData
from raysim.models import Classifier, ModelRecipe, is_split, split_network
from raysim.primitives.checks import above, at_least, between, in_range
from raysim.training.attack import Attack, Attackers
from raysim.training.initial_weights import Init, InitialWeights
from raysim.vectors.layout import Layout

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True)
class Checkpoint:
    """How often a checkpoint is written, in rounds (0: never), how many are kept, and where.

    folder: a folder for this run alone, or a URL that fsspec knows; None: in the run's own.
    """

    every: int = 10
    keep: int = 2
    folder: str | None = None

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)

    def folder_for(self, run_folder: str | Path) -> str:
        """Where the checkpoints of a run in this folder are."""
        return self.folder or str(Path(run_folder) / "checkpoints")


@dataclass(frozen=True)
class Faults:
    """The largest share of an aggregation's clients that may fail before the run stops, and when a client has failed.

    norm: the largest norm that the update of a client's parameters may have; None: any. timeout: seconds after which a
    worker that has not answered a call is replaced; None: never.
    """

    tolerate: float = 0.1
    norm: float | None = None
    timeout: float | None = 3600.0

    def __post_init__(self) -> None:
        between("faults.tolerate", self.tolerate, 0, 1)
        if self.norm is not None:
            above("faults.norm", self.norm, 0)
        if self.timeout is not None:
            above("faults.timeout", self.timeout, 0)


@dataclass(frozen=True)
class StateBudget:
    """How many GiB of clients' accepted client states stay in memory; those idle for longest lie on disk beyond it.

    device: how many GiB of them each worker keeps on its GPU; those idle for longest lie in ordinary memory beyond it.
    """

    budget: float | None = None  # None: no limit
    device: float | None = None

    def __post_init__(self) -> None:
        for key, most in (("budget", self.budget), ("device", self.device)):
            if most is not None:
                at_least(f"state.{key}", most, 0)

    @property
    def bytes(self) -> float:
        """The budget; infinite if there is none."""
        return math.inf if self.budget is None else self.budget * 2**30

    @property
    def device_bytes(self) -> float:
        """The budget on a GPU; infinite if there is none."""
        return math.inf if self.device is None else self.device * 2**30


@dataclass(frozen=True)
class RunSettings:
    """The numbers of a run, under the names of the configuration's keys: how it trains, aggregates and evaluates.

    weighting: None: by samples, unless a method asks for uniform. summation: how many consecutive updates are summed as
    one group. Coordinator and workers read this very object; nothing is copied out of it under another name.
    """

    seed: int = 0
    rounds: int = 60
    weighting: Weighting | None = None
    summation: int = 5
    local: Local = field(default_factory=Local)
    evaluate: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    faults: Faults = field(default_factory=Faults)
    attack: Attack = field(default_factory=Attack)
    state: StateBudget = field(default_factory=StateBudget)
    init: Init = field(default_factory=Init)

    def __post_init__(self) -> None:
        in_range("seed", self.seed, least=0, below=2**63)
        at_least("rounds", self.rounds, 1)
        at_least("summation", self.summation, 1)


@dataclass(frozen=True)
class RunSpec:
    """All that a worker or a coordinator is built from: plain values and NumPy arrays, which travel to other processes.

    device: where this process computes ("cpu", "cuda", "cuda:1", "mps"). lanes: how many clients a worker trains at
    once, on which bits depend. score_batch: samples scored at once. profile: measure where the time goes.
    graph: whether a step is recorded once and replayed; bits depend on it. precision: what products
    of a step are computed in. loss: in place of the usual one; see `Task`.
    weights: saved ones, where networks start. packages: those
    besides raysim whose code the run uses.
    """

    model: ModelRecipe
    methods: tuple[Method, ...]
    data: FederatedData
    settings: RunSettings = field(default_factory=RunSettings)
    device: str = "cpu"
    threads: int = 1
    lanes: int = 1
    dtype: torch.dtype = torch.float32
    score_batch: int = 1024
    profile: bool = False
    graph: bool = False
    precision: Precision = "float32"
    loss: RowLoss | None = None
    weights: InitialWeights | None = None
    size: int = sys.maxsize  # most updates in one aggregation
    stale: bool = False  # whether updates may start from an earlier version than the current one
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        at_least("runtime.lanes", self.lanes, 1)

    @property
    def autocast(self) -> torch.dtype | None:
        """What products of a step are computed in, unless it is the vector's own kind."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    @property
    def task(self) -> Task:
        """What is learnt."""
        dataset = self.data.open()
        clients, metric = len(self.data.partition.train), self.settings.evaluate.metric
        about = (
            dataset.shape,
            dataset.num_classes,
            clients,
            self.dtype,
            dataset.kind,
            dataset.tokens,
        )
        return Task(
            *about, scored_by=metric, loss=self.loss, unseen=self.data.partition.unseen_count
        )

    @cached_property
    def attackers(self) -> Attackers:
        """The clients that attack, and how; none if `attack.kind` is "none"."""
        settings = self.settings
        train, max_norm = self.data.partition.train, settings.faults.norm
        return Attackers(settings.attack, settings.seed, train, max_norm, self.data.label)

    @property
    def all_methods(self) -> tuple[Method, ...]:
        """The run's methods, with the attack in front if there is one."""
        if self.settings.attack.kind == "none":
            return self.methods
        return (self.attackers, *self.methods)


def build_model(spec: RunSpec) -> nn.Module:
    """The model as its recipe makes it, before methods change it; the same in every process."""
    task, recipe = spec.task, spec.model
    about = (task.shape, task.num_classes, spec.settings.seed)
    model: nn.Module = (
        recipe.build(*about) if task.tokens is None else recipe.build(*about, task.tokens)
    )
    # A recipe of the user's own may make any module.
    return (
        model
        if is_split(model) or isinstance(model, Classifier)
        else split_network(model, task.num_classes, task.example(2))
    )


def declare_run(spec: RunSpec) -> Declarations:
    """Return what the methods of a run declare, with its networks; the same in every process."""
    settings, task = spec.settings, spec.task
    facts = RunSettingsForMethods(
        settings.local,
        settings.rounds,
        settings.seed,
        settings.weighting,
        int(np.count_nonzero(spec.data.partition.train.counts)),
        spec.size,
        spec.stale,
    )
    with torch.random.fork_rng(devices=[]):
        model = build_model(spec)
        has_head = is_split(model)
        declarations = declare(spec.all_methods, task, model, facts)
    _check_loss(task, declarations)
    _check_evaluation(evaluation_of(spec, declarations), task, has_head, declarations.pools)
    if spec.weights is not None:
        spec.weights.load_into(declarations.networks, declarations.private_names)
    return declarations


def build_networks(spec: RunSpec) -> tuple[dict[str, nn.Module], Layout]:
    """Return model and extra networks with their initial values, and the layout."""
    declarations = declare_run(spec)
    return declarations.networks, declarations.layout


def evaluation_of(spec: RunSpec, declarations: Declarations) -> Evaluation:
    """Return what is evaluated: a method's own fine-tuning takes the place of the settings'."""
    declared = declarations.declarer("finetune")
    if declared is None or declared.finetune is None:
        return spec.settings.evaluate
    return replace(spec.settings.evaluate, finetune=declared.finetune)


def _check_loss(task: Task, declarations: Declarations) -> None:
    """Refuse a loss that does not fit the data, or that a method would take no notice of."""
    if task.loss is None:
        return
    check_loss(task.loss, task.kind, task.num_classes)
    if (owner := declarations.owner("loss")) is not None:
        raise ValueError(
            f"method '{owner.method}' brings a loss of its own, and loss={loss_name(task.loss)} would change nothing: "
            "leave one of them out"
        )


def _check_evaluation(evaluation: Evaluation, task: Task, has_head: bool, pools: bool) -> None:
    """Raise ValueError for an evaluation that the data, the model or the methods do not allow."""
    _ = task.metric  # refuses one of another kind of task
    if pools and evaluation.finetune.epochs:
        raise ValueError(
            f"evaluate.finetune.epochs={evaluation.finetune.epochs:g} gives every client a model of its own, and a "
            "method trains one model on the data of all clients. Set it to 0, or leave the method out."
        )
    if evaluation.finetune.head and not has_head:
        raise ValueError(
            "evaluate.finetune.head=true, or a method, steps the head only, and this model has none "
            "that is known: name its last linear layer with model.head"
        )
    if evaluation.probe and not (has_head and task.kind == "classification"):
        what = (
            f"this data is for {task.kind}"
            if has_head
            else "this model cannot be split into features and a head"
        )
        raise ValueError(
            f"evaluate.probe={evaluation.probe} looks at features and classes, and {what}: set evaluate.probe=0"
        )


def sample_flops(spec: RunSpec) -> float:
    """Floating-point operations of one sample's forward and backward pass through the model, as PyTorch counts them."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports a compiler, and few runs ask

    networks, _ = build_networks(spec)
    inputs = spec.task.example(2)
    with FlopCounterMode(display=False) as counter:
        networks["model"].float()(inputs).sum().backward()
    return float(counter.get_total_flops()) / len(inputs)
