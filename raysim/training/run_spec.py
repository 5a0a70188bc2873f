"""Define a run: its settings, and the objects that its configuration names."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import nn

from raysim.api.declarations import Evaluation, Generation, Labels, Local, Task
from raysim.api.declare import Declarations, RunSettingsForMethods, declare
from raysim.api.losses import RowLoss, check_loss, loss_name
from raysim.api.method import Method
from raysim.api.metrics import Metric
from raysim.api.selection import Random, Selection
from raysim.api.server_view import Weighting
from raysim.api.setup import number_of_floats
from raysim.api.topology import Star, Topology
from raysim.data.causal import stored_vocabulary
from raysim.data.dataset import Dataset
from raysim.data.federated import FederatedData
from raysim.models import Classifier, ModelRecipe, is_split, split_network
from raysim.models.lora import find_adapters
from raysim.models.split import ExternalModel, WholeNetwork, check_outputs
from raysim.models.stored_weights import store_base
from raysim.primitives.checks import above, at_least, between, in_range
from raysim.primitives.kinds import PackedShape
from raysim.training.attack import Attack, Attackers
from raysim.training.frozen_weights import FrozenWeights, base_sha256, collect_arrays
from raysim.training.initial_weights import Init, InitialWeights
from raysim.training.rates import PARTS, is_in_part
from raysim.vectors.layout import Layout

Precision: TypeAlias = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True)
class Checkpoint:
    """The settings of checkpoints.

    every: rounds from one checkpoint to the next; 0 writes none regularly.
    keep: the number of checkpoints to keep.
    folder: a folder only for this run, or a URL that fsspec supports; None means the run's folder.
    """

    every: int = 10
    keep: int = 2
    folder: str | None = None

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)

    def folder_for(self, run_folder: str | Path) -> str:
        """Return the folder or URL of a run's checkpoints."""
        return self.folder or str(Path(run_folder) / "checkpoints")


@dataclass(frozen=True)
class Faults:
    """The settings that decide when a job has failed, and how many failures a run tolerates.

    tolerate: the largest share of an aggregation's jobs that may fail; above it, the run stops.
    norm: the largest norm of an update; None allows any finite norm.
    timeout: a worker that does not answer for this many seconds is replaced; None waits forever.
    node_timeout: a node that does not answer for this many seconds counts as lost, and other
    workers get its jobs. None waits until Ray declares the node dead.
    """

    tolerate: float = 0.1
    norm: float | None = None
    timeout: float | None = 3600.0
    node_timeout: float | None = 30.0

    def __post_init__(self) -> None:
        between("faults.tolerate", self.tolerate, 0, 1)
        if self.norm is not None:
            above("faults.norm", self.norm, 0)
        if self.timeout is not None:
            above("faults.timeout", self.timeout, 0)
        if self.node_timeout is not None:
            above("faults.node_timeout", self.node_timeout, 0)


@dataclass(frozen=True)
class StateBudget:
    """The limits of memory for client states and for replicas.

    Above a limit, the least recently used states are moved: from CPU memory to disk, or from a GPU
    to CPU memory.

    budget: GiB of client states in CPU memory, and as many GiB of replicas; None means no limit.
    States of jobs that have not been aggregated do not count.
    device: GiB of client states on the GPU of each worker; None means no limit.
    """

    budget: float | None = None
    device: float | None = None

    def __post_init__(self) -> None:
        for key, gib in (("budget", self.budget), ("device", self.device)):
            if gib is not None:
                at_least(f"state.{key}", gib, 0)

    @property
    def bytes(self) -> float:
        """The limit of client states or of replicas in memory, in bytes; inf without a limit."""
        return math.inf if self.budget is None else self.budget * 2**30

    @property
    def device_bytes(self) -> float:
        """The limit of client states on a GPU (`device`) in bytes; infinite without a limit."""
        return math.inf if self.device is None else self.device * 2**30


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run, named like the keys of the configuration.

    rounds: the number of aggregations.
    weighting: the weights of updates. None means "samples", unless a method asks for "uniform".
    state: the limits of memory for client states and replicas.
    init: the settings of the initial weights.
    """

    seed: int = 0
    rounds: int = 60
    weighting: Weighting | None = None
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
        last_rate = self.local.rate(self.rounds - 1)
        if last_rate <= 0:
            raise ValueError(
                f"local.schedule={self.local.schedule}: the learning rate is 0 in round "
                f"{self.rounds}. Set local.schedule_rounds={self.rounds} or more, or "
                "local.final_lr above 0."
            )


@dataclass(frozen=True)
class RunSpec:
    """A picklable description of a run, from which its workers and coordinator are built.

    methods: the methods in their order; empty means FedAvg.
    data: the clients' data and the central test set.
    device: the device of each worker: "cpu", "cuda", "cuda:1" or "mps".
    threads: torch's threads in each process.
    lanes: the number of clients that a worker trains at the same time; changes the last bits of
    results.
    dtype: the type of the parameters.
    score_batch: the number of samples in a batch for scoring.
    profile: True measures how the time is spent.
    graph: True records and replays training steps; changes the last bits of results.
    precision: the type of matrix products in a training step.
    loss: the user's loss of each sample; None uses the loss of the task.
    weights: saved initial weights; None keeps the weights with which the model is built.
    size: the largest number of updates in an aggregation.
    stale: True if the schedule aggregates updates from older versions.
    packages: packages besides raysim whose code the run uses.
    devices: the type of each client's device, such as "phone"; None if the fleet is not known.
    frozen: frozen weights that the processes of a node share; None builds them in each process.
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
    own_metrics: Mapping[str, Metric] = field(default_factory=dict)
    weights: InitialWeights | None = None
    size: int = sys.maxsize
    stale: bool = False
    packages: tuple[str, ...] = ()
    selection: Selection = field(default_factory=Random)
    topology: Topology = field(default_factory=Star)
    devices: Labels | None = None
    frozen: FrozenWeights | None = None

    def __post_init__(self) -> None:
        at_least("runtime.lanes", self.lanes, 1)

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of matrix products in a step (autocast); None without autocast."""
        return torch.bfloat16 if self.precision == "bfloat16" else None

    @property
    def task(self) -> Task:
        """Return the task that the clients learn."""
        dataset, partition = self.data.open(), self.data.partition
        evaluate = self.settings.evaluate
        scores = tuple(self.own_metrics.get(name, name) for name in evaluate.metrics)
        return Task(
            dataset.shape,
            dataset.num_classes,
            len(partition.train),
            self.dtype,
            dataset.kind,
            dataset.tokens,
            scored_by=evaluate.metric,
            loss=self.loss,
            unseen=partition.unseen_count,
            scores=scores,
            lower=evaluate.lower,
            label_shape=dataset.label_shape,
            has_unlabelled=dataset.has_unlabelled,
            targets=dataset.targets,
        )

    @cached_property
    def attackers(self) -> Attackers:
        """The clients that attack, and how; none if `attack.kind` is "none"."""
        settings = self.settings
        train, max_norm = self.data.partition.train, settings.faults.norm
        return Attackers(settings.attack, settings.seed, train, max_norm, self.data.label)

    @property
    def all_methods(self) -> tuple[Method, ...]:
        """The run's methods, with the attack before them if there is one."""
        if self.settings.attack.kind == "none":
            return self.methods
        return (self.attackers, *self.methods)


def build_model(spec: RunSpec) -> nn.Module:
    """Return the model that `spec.model` builds, before methods change it.

    The model has the same initial values in every process.
    """
    task = spec.task
    if isinstance(task.shape, PackedShape) and not isinstance(spec.model, ExternalModel):
        raise ValueError(
            f"the model {type(spec.model).__name__} takes one input, but samples of this data have "
            f"{len(task.shape.fields)} inputs. Give your own network, whose forward has these "
            "inputs."
        )
    arguments: list[Any] = [task.shape, task.num_classes, spec.settings.seed]
    if task.tokens is not None:
        arguments.append(task.tokens)
    model: nn.Module = spec.model.build(*arguments)
    if not is_split(model) and not isinstance(model, Classifier):
        # A user's `spec.model` may make any module.
        model = split_network(model, task.num_classes, task.example(2))
    if task.kind == "structure" and is_split(model):
        raise ValueError(
            f"the model {type(spec.model).__name__} returns one tensor, of class scores or "
            "numbers. Each target of this data is a dictionary or a list, which needs another "
            "output. Give your own network."
        )
    if task.kind != "structure" and (len(task.output_shape) > 1 or not is_split(model)):
        author = model.net if isinstance(model, WholeNetwork) else spec.model
        check_outputs(type(author).__name__, model, task.example(2), task.output_shape)
    return model


def declare_run(spec: RunSpec) -> Declarations:
    """Return the declarations of a run's methods, together with the run's networks.

    The result is the same in every process. The networks use the frozen weights in `spec.frozen`
    without copies. If `spec.frozen` is None, frozen weights are converted to the dtype
    `model.lora.base`.
    """
    declarations = declare_as_drawn(spec)
    store_base(declarations.networks["model"], spec.model.lora, spec.dtype)
    if spec.frozen is not None:
        spec.frozen.put_into(declarations.networks)
    return declarations


def share_frozen_weights(spec: RunSpec) -> RunSpec:
    """Return a copy of the spec with the frozen weights of its model as arrays in `spec.frozen`.

    Processes of a node share the memory of these arrays. If the model has no adapters, return
    `spec`.
    """
    if not spec.model.lora.rank and "peft" not in sys.modules:
        return spec  # no model has adapters
    networks = declare_as_drawn(spec).networks
    if not find_adapters(networks["model"]):
        return spec
    checksum = base_sha256(networks["model"])
    store_base(networks["model"], spec.model.lora, spec.dtype)
    return replace(spec, frozen=FrozenWeights(collect_arrays(networks, spec.dtype), checksum))


def check_base(spec: RunSpec) -> None:
    """Raise ValueError if the adapters in `init.file` were trained with other frozen weights.

    The file of a run with adapters has no frozen weights, but a checksum of them. Without a
    checksum, nothing is checked.
    """
    if spec.weights is not None and spec.weights.base:
        declarations = declare_as_drawn(spec)
        spec.weights.check_base(declarations.networks, declarations.private_names)


def declare_as_drawn(spec: RunSpec) -> Declarations:
    """Return the declarations of a run's methods, without a conversion of frozen weights.

    The networks have initial weights. `declare_run` also converts frozen weights to the dtype
    `model.lora.base`.
    Raises ValueError if settings do not fit the data, the model or the methods.
    """
    settings, task = spec.settings, spec.task
    facts = RunSettingsForMethods(
        settings.local,
        settings.rounds,
        settings.seed,
        settings.weighting,
        int(np.count_nonzero(spec.data.partition.train.counts)),
        spec.size,
        spec.stale,
        spec.devices,
    )
    with torch.random.fork_rng(devices=[]):
        model = build_model(spec)
        has_head = is_split(model)
        declarations = declare(spec.all_methods, task, model, facts)
    _check_loss(task, declarations)
    _check_rates(settings.local, declarations)
    pooling = next((method.name for method in spec.all_methods if method.pools), "")
    _check_evaluation(evaluation_of(spec, declarations), task, has_head, pooling)
    _check_generation(spec.settings.evaluate.generate, spec.data.open())
    _check_own_training(spec, declarations)
    if spec.weights is not None:
        spec.weights.load_into(declarations.networks, declarations.private_names)
    return declarations


def build_networks(spec: RunSpec) -> tuple[dict[str, nn.Module], Layout]:
    """Return model and extra networks with their initial values, and the layout."""
    declarations = declare_run(spec)
    return declarations.networks, declarations.layout


def evaluation_of(spec: RunSpec, declarations: Declarations) -> Evaluation:
    """Return the evaluation settings, with a method's own fine-tuning if it declares one."""
    declared = declarations.declarer("finetune")
    if declared is None or declared.finetune is None:
        return spec.settings.evaluate
    return replace(spec.settings.evaluate, finetune=declared.finetune)


def _check_rates(local: Local, declarations: Declarations) -> None:
    """Raise ValueError if a name in `local.rates` selects no parameter of the run."""
    names = [entry.name for entry in declarations.layout.entries if entry.parameter]
    for part in local.rates:
        if not any(is_in_part(name, part) for name in names):
            usual = [name for name in PARTS if any(is_in_part(path, name) for path in names)]
            modules = sorted({name.rpartition(".")[0] for name in names})
            raise ValueError(
                f"local.rates.{part}: the model has no such part with parameters. Use "
                f"{', '.join(usual)}, or one of {', '.join(modules[:8])}."
            )


def _check_loss(task: Task, declarations: Declarations) -> None:
    """Raise ValueError if the user's loss does not fit the data, or if a method replaces it."""
    if task.kind == "structure":
        _ = task.objective  # raises an error without a loss
    if task.loss is None:
        return
    if task.kind != "structure":
        check_loss(task.loss, task.kind, task.output_shape, task.label_shape)
    owner = declarations.owner("loss")
    if owner is not None:
        raise ValueError(
            f"loss={loss_name(task.loss)} has no effect, because method '{owner.method}' has a "
            "loss of its own. Leave one of them out."
        )


def _check_evaluation(evaluation: Evaluation, task: Task, has_head: bool, pooling: str) -> None:
    """Raise ValueError if settings of the evaluation do not fit data, model or methods.

    has_head: True if the model is split into features and a head.
    pooling: the method that trains one model on all clients' data; "" if none does.
    """
    _ = task.metrics  # raises an error for a metric of another kind of task
    if pooling and evaluation.finetune.epochs:
        raise ValueError(
            f"evaluate.finetune.epochs={evaluation.finetune.epochs:g} gives every client its own "
            f"model, but method '{pooling}' trains one model on the data of all clients. Set "
            f"evaluate.finetune.epochs=0, or remove '{pooling}' from the methods."
        )
    if evaluation.finetune.head and not has_head:
        raise ValueError(
            "evaluate.finetune.head=true (set by you or by a method) fine-tunes only the head, "
            "but raysim does not know which layer of this model is the head. Set "
            "evaluate.finetune.head=false to fine-tune the whole model. For a model of "
            "torchvision, timm or huggingface, or your own one, you can also set model.head to the "
            "name of its last linear layer."
        )
    has_classes = task.kind == "classification" and not task.has_unlabelled
    if evaluation.probe and not (has_head and has_classes):
        problem = "this model cannot be split into features and a head"
        if has_head:
            problem = f"this data is for {task.kind}"
            if task.has_unlabelled:
                problem = "some samples of this data have no class"
        raise ValueError(
            f"evaluate.probe={evaluation.probe} measures features and classes, but {problem}. Set "
            "evaluate.probe=0."
        )


def _check_generation(generate: Generation, dataset: Dataset) -> None:
    """Raise ValueError for prompts that do not fit the data.

    They fit if the data is language data whose tokenizer can encode them.
    """
    if not generate.prompts:
        return
    if dataset.kind != "causal":
        raise ValueError(
            f"evaluate.generate.prompts={generate.prompts} are for language data, but this data is "
            f"for {dataset.kind}. Set evaluate.generate.prompts=[], or choose data.kind=causal."
        )
    vocabulary = stored_vocabulary(dataset.tokenizer, dataset.class_names)
    for prompt in generate.beginnings:
        try:
            vocabulary.encode(prompt)
        except ValueError as error:
            raise ValueError(
                f"evaluate.generate.prompts={prompt!r} cannot be encoded ({error}). Change the "
                "prompt."
            ) from error


def _check_own_training(spec: RunSpec, declarations: Declarations) -> None:
    """Raise ValueError for settings that do not fit a method or learner with its own training.

    For example, `local.warmup_steps` needs raysim's own training steps.
    """
    declared = declarations.declarer("train")
    if declared is None:
        return
    evaluation, local = evaluation_of(spec, declarations), spec.settings.local
    over_steps = local.schedule if local.schedule_over == "steps" else ""
    needs: list[tuple[str, object, str]] = [
        ("local.rates", local.rates, "raysim's own training steps"),
        ("local.warmup_steps", local.warmup_steps, "raysim's own training steps"),
        ("local.keep_optimizer", local.keep_optimizer, "raysim's own training steps"),
        ("local.schedule_over=steps local.schedule", over_steps, "raysim's own training steps"),
    ]
    if not declared.has_gradients:
        needs += [
            ("evaluate.finetune.epochs", evaluation.finetune.epochs, "gradients"),
            ("evaluate.probe", evaluation.probe, "features of a network"),
        ]
    if declared.evaluate is not None:
        needs += [
            ("evaluate.common", evaluation.common, "scores of single samples"),
            ("evaluate.decompose", evaluation.decompose, "losses of single samples"),
        ]
    if not declared.has_parameters:
        needs += [
            ("evaluate.decompose", evaluation.decompose, "parameters that can be added"),
            ("init.file", spec.settings.init.file, "parameters that are arrays"),
            ("faults.norm", spec.settings.faults.norm, "parameters that are arrays"),
        ]
    for key, value, needed in needs:
        if value:
            raise ValueError(
                f"{key}={value} needs {needed}, but '{declared.method}' does not have them. Leave "
                f"{key} out."
            )


def sample_flops(spec: RunSpec) -> float:
    """Return PyTorch's count of floating-point operations for one sample, forward and backward.

    For a learner without gradients, such as a tree, return an estimate: 6 operations for each float
    that a client sends in a job.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports a compiler; few runs need it

    declarations = declare_run(spec)
    networks, layout = declarations.networks, declarations.layout
    if not all(declared.has_gradients for declared in declarations.methods):
        floats = layout.shared
        for declared in declarations.methods:
            for upload in declared.uploads.values():
                floats += number_of_floats(upload, layout)
        return 6.0 * floats
    inputs = spec.task.example(2)
    with FlopCounterMode(display=False) as counter:
        networks["model"].float()(inputs).sum().backward()
    return float(counter.get_total_flops()) / len(inputs)
