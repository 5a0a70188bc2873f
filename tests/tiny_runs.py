"""Helpers for tests: small federated runs, each of which takes a fraction of a second.

The runs are made from Python objects, without a configuration.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.client_state import ClientState
from raysim.api.composition import check_names, filled_hooks
from raysim.api.context import Context, Stage
from raysim.api.declarations import Evaluation, Local, Participation, RunFacts, Task
from raysim.api.declare import Declarations
from raysim.api.local_job import LocalJob
from raysim.api.messages import Job, TrainingResult, Update
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.api.setup import MethodDeclaration, Setup
from raysim.conformance.runs import (
    BUFFER as BUFFER,
    LOCAL as LOCAL,
    MLP as MLP,
    NORMED_MLP as NORMED_MLP,
    ROUNDS as ROUNDS,
    SEED as SEED,
    FinishedRun as FinishedRun,
    NormedMlp as NormedMlp,
    Spy as Spy,
    coordinate as coordinate,
    run as run,
    run_spec as run_spec,
    run_to_end as run_to_end,
    same_arrays as same_arrays,
    several_workers as several_workers,
    tiny_data as tiny_data,
    with_settings as with_settings,
)
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import CSR, IID, Partition
from raysim.data.sources import Synthetic
from raysim.models import Classifier, Mlp, ModelRecipe, SmallCnn
from raysim.models.classifier import Shape
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Devices, Fate, Fixed, Fleet, Ideal, Speeds, Trip
from raysim.simulation.schedule import Schedule
from raysim.simulation.server import Server
from raysim.training.run_spec import RunSpec, declare_run
from raysim.training.step import Step
from raysim.vectors.layout import Layout, Vector


class BiasFreeMlp(NormedMlp):
    """The network of `NormedMlp` without a bias in its head."""

    def build(self, input_shape: Shape, num_classes: int, seed: int) -> Classifier:
        model = super().build(input_shape, num_classes, seed)
        model.head.register_parameter("bias", None)
        return model


class Block(nn.Module):
    """A residual block of two convolutions, whose layers are named as in torchvision."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.conv2(self.bn1(self.conv1(x)).relu())).relu()


@dataclass(frozen=True)
class Blocks(ModelRecipe):
    """A small residual network with torchvision's names, for tests of InCo.

    The layers of both blocks have the same shape. This allows InCo to mix the mean update of one
    layer into the mean update of another layer.
    """

    channels: int = 3

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        parts = OrderedDict(
            conv1=nn.Conv2d(input_shape[0], self.channels, 3, stride=2, padding=1),
            layer1=nn.Sequential(Block(self.channels), Block(self.channels)),
            pool=nn.AdaptiveAvgPool2d(2),
            flat=nn.Flatten(),
        )
        return nn.Sequential(parts), 4 * self.channels


# The folders of the tests' modules, for PYTHONPATH of other processes.
FOLDERS = os.pathsep.join(
    map(str, [Path(__file__).parent, *sorted(Path(__file__).parent.glob("[a-z]*/"))])
)
NORMED = SmallCnn(norm="batch")
BLOCKS = Blocks()


@functools.cache
def equal_clients(clients: int = 6, samples: int = 150) -> FederatedData:
    """Return data of clients that all have the same number of samples.

    On equal devices, these clients finish at the same time.
    """
    return federate(
        Synthetic(samples=samples, test_samples=20, classes=5), IID(clients=clients), SEED
    )


def clients_of_sizes(counts: Sequence[int]) -> FederatedData:
    """Return clients of given sizes without test samples, for tests that train nothing."""
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    train, test = (
        CSR(np.zeros(offsets[-1], np.int64), offsets),
        CSR(np.empty(0, np.int64), np.zeros_like(offsets)),
    )
    return replace(tiny_data(), partition=Partition(train, test), central=np.empty(0, np.int64))


def check_composition(methods: Sequence[Method], model: ModelRecipe = NORMED_MLP) -> None:
    """Raise ValueError if methods do not fit together."""
    check_names(methods)
    declare_run(run_spec(*methods, model=model))


def declare_methods(
    methods: Sequence[Method],
    networks: Mapping[str, nn.Module],
    layout: Layout,
    task: Task | None = None,
    local: Local = LOCAL,
) -> Declarations:
    """Return what methods declare for these networks and this layout."""
    task = task or run_spec().task
    all_declared = []
    for method in methods:
        declared = MethodDeclaration(
            method.name, hooks={h: getattr(method, h) for h in filled_hooks(method)}
        )
        facts = Setup(
            method.name,
            task,
            local,
            networks,
            {},
            declared,
            clients_with_samples=task.clients,
            _layout=[layout],
        )
        method.setup(facts)
        all_declared.append(declared)
    return Declarations(task, dict(networks), layout, tuple(all_declared))


def make_server(
    layout: Layout,
    vector: Tensor,
    counters: Tensor,
    methods: Sequence[Method],
    counts: np.ndarray,
    seed: int,
    task: Task,
    *others: Any,
    **settings: Any,
) -> Server:
    """Return a server with these methods, for tests that need no neural network.

    vector, counters: the initial parameters and integer buffers.
    counts: the number of training samples of each client.
    others, settings: further arguments of `Server`.
    """
    networks = {"model": nn.Sequential()}
    declarations = declare_methods(methods, networks, layout, task)
    settings = {"local": Local()} | settings
    return Server(declarations, vector, counters, counts, seed, task, *others, **settings)


def make_step(vector: Vector, methods: Sequence[Method], *others: Any, **settings: Any) -> Step:
    """Return the `Step` of methods on a vector.

    others, settings: further arguments of `Step`.
    """
    declarations = declare_methods(methods, vector.networks, vector.layout)
    return Step(vector, declarations, *others, **settings)


def method_views(ctx: Context, declarations: Declarations) -> dict[str, Any]:
    """Return for each method the `LocalJob` that its hooks get in a job."""
    return {each.method: LocalJob(ctx, each.method) for each in declarations.methods}


def method_state(methods: Mapping[str, Tensor]) -> ClientState[Tensor]:
    """Return a client state that contains only tensors of methods.

    methods: these tensors, by "method.name".
    """
    return ClientState(torch.empty(0), torch.empty(0, dtype=torch.int64), methods)


EMPTY_STATE = method_state({})


def participation_facts(
    spec: RunSpec | None,
    samples: int,
    trained: float,
    earlier: int = 0,
    version: int = 0,
    accepted: int = 0,
) -> Participation:
    """Return the facts about a job that the function `cost` of a method receives.

    spec: the run; None takes the default run of this module.
    samples: the number of the client's training samples.
    trained: the number of samples that the job trains on, over all epochs.
    earlier: how many earlier jobs of the client were dispatched.
    version: the job's base version.
    accepted: how many jobs of the client were aggregated before this version.
    """
    spec = spec or run_spec()
    declarations = declare_run(spec)
    filled = frozenset(hook for each in declarations.methods for hook in each.hooks)
    facts = RunFacts(
        spec.task,
        spec.settings.local,
        declarations.layout,
        int(np.count_nonzero(spec.data.partition.train.counts)),
        filled,
    )
    return Participation(version, samples, trained, earlier, accepted, facts)


class UntrainedRuntime(InProcess):
    """A runtime that trains nothing, for tests of the order of events.

    Updates are zero and reports are empty.
    """

    def __init__(self, shared: int, counts: np.ndarray):
        super().__init__(None)
        self.shared, self.counts = shared, counts
        self.jobs: list[Job] = []

    def call(self, worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Return what a worker would return if clients learned nothing."""
        if method != "train":
            return [[]]
        jobs, groups = args[:2]
        assert not groups, "ask for single updates with a method that weighs"
        self.jobs += jobs
        return [TrainingResult(tuple(self._update(job) for job in jobs))]

    def _update(self, job: Job) -> Update:
        samples = int(self.counts[job.client])
        delta, counters = np.zeros(self.shared, np.float32), np.empty(0, np.int64)
        return Update(
            job.number,
            job.client,
            job.version,
            samples,
            samples,
            1,
            0.0,
            0.0,
            counters,
            delta=delta,
        )


@dataclass(frozen=True)
class TimedFleet(Fleet):
    """A fleet whose client k needs `seconds[k]` for every job."""

    seconds: tuple[float, ...] = field(kw_only=False, default=())

    def devices(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Devices:
        return TimedDevices(self.seconds)


class TimedDevices(Fixed):
    """The devices of a `TimedFleet`.

    seconds: for each client, the duration of each of its jobs in virtual seconds.
    """

    def __init__(self, seconds: Sequence[float]):
        everything = np.full(len(seconds), np.inf)
        super().__init__(Speeds(everything, everything, everything), Fate())
        self._each = np.asarray(seconds)

    def trip(
        self, client: int, participation: int, start: float, samples: float, down: int, up: int
    ) -> Trip:
        return Trip(start + float(self._each[client]), True)

    def seconds(
        self, samples: np.ndarray, down: int | np.ndarray, up: int | np.ndarray
    ) -> np.ndarray:
        return self._each


class AggregationLog(Method):
    """A method that records which updates are aggregated, in their order, and changes nothing."""

    name = "ledger"
    paper = "a test"

    def __init__(self) -> None:
        self.cohorts: list[list[int]] = []
        self.staleness: list[list[int]] = []

    def weigh(self, aggregation: Aggregation, server: ServerView) -> Aggregation:
        self.cohorts.append([update.client for update in aggregation.updates])
        self.staleness.append(list(aggregation.staleness))
        return aggregation


class ShiftedGradient(Method):
    """A method that computes a second gradient in each step, with all parameters set to `shift`.

    take: True makes the step with the second gradient.
    seen: for each step, the stage, the parameters, the usual and the second gradient.
    """

    name = "asking"
    paper = "a test"

    def __init__(self, shift: float = 0.0, take: bool = True):
        self.shift, self.take = shift, take
        self.seen: list[tuple[Stage, Tensor, Tensor, Tensor]] = []

    def perturb(
        self,
        job: LocalJob,
        params: Tensor,
        grad: Tensor,
        gradient_at: Callable[[Tensor], Tensor],
    ) -> Tensor:
        there = gradient_at(torch.full_like(params, self.shift))
        self.seen.append((job.stage, params.clone(), grad.clone(), there.clone()))
        return there if self.take else grad


def untrained_run(
    counts: Sequence[int],
    schedule: Schedule,
    fleet: Fleet | None = None,
    seed: int = SEED,
    **settings: Any,
) -> tuple[Coordinator, AggregationLog, UntrainedRuntime]:
    """Return a coordinator whose clients learn nothing, its aggregation log and its runtime.

    counts: for each client, the number of training samples.
    fleet: the fleet of the run; None uses `Ideal`.
    settings: further arguments of `coordinate`.
    """
    ledger = AggregationLog()
    spec = run_spec(ledger, model=Mlp((1,)), data=clients_of_sizes(counts), seed=seed)
    runtime = UntrainedRuntime(0, np.asarray(counts))
    settings = {"evaluate": Evaluation(every=10**9)} | settings
    coordinator = coordinate(spec, schedule, fleet or Ideal(), runtime, **settings)
    runtime.shared = coordinator.layout.shared
    return coordinator, ledger, runtime


def pairs(items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each pair of two different items once: for a, b, c it yields (a, b), (a, c), (b, c)."""
    for index, first in enumerate(items):
        yield from ((first, second) for second in items[index + 1 :])
