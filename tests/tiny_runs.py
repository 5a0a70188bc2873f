"""Tiny federated runs from objects, a fraction of a second each, and ways to look into a run."""

from __future__ import annotations

import functools
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raysim.api.composition import SLOTS, owners
from raysim.api.context import Context, Stage
from raysim.api.declarations import Evaluation, Local, Participation, RunFacts, Task
from raysim.api.messages import Failure, Job, Published, SingleUpdate, Trained, Update
from raysim.api.method import Method, Setup
from raysim.api.private_state import PrivateState, StoredState
from raysim.api.server_view import Aggregation
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import CSR, IID, Dirichlet, Partition
from raysim.data.sources import Synthetic
from raysim.models import Classifier, Mlp, ModelRecipe, SmallCnn
from raysim.models.classifier import Shape
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator, Finished, Round, Row, Runtime
from raysim.simulation.events import JobEnd
from raysim.simulation.fleet import Devices, Fate, Fixed, Fleet, Ideal, Lognormal, Speeds, Trip
from raysim.simulation.planner import Step
from raysim.simulation.schedule import Buffered, Schedule, Synchronous
from raysim.training.host import Host
from raysim.training.run_spec import Checkpoint, Faults, RunSettings, RunSpec, State, build_networks


@dataclass(frozen=True)
class NormedMlp(ModelRecipe):
    """The smallest network with BatchNorm."""

    width: int = 12

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        """See `ModelRecipe`."""
        layers = [nn.Flatten(), nn.Linear(math.prod(input_shape), self.width), nn.BatchNorm1d(self.width), nn.ReLU()]
        return nn.Sequential(*layers), self.width


class Bare(NormedMlp):
    """The same network, made without a bias in its head."""

    def build(self, input_shape: Shape, num_classes: int, seed: int) -> Classifier:
        model = super().build(input_shape, num_classes, seed)
        model.head.register_parameter("bias", None)
        return model


class Block(nn.Module):
    """Two convolutions under torchvision's names."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.conv2(self.bn1(self.conv1(x)).relu())).relu()


@dataclass(frozen=True)
class Blocks(ModelRecipe):
    """The smallest network in which InCo finds pairs."""

    channels: int = 3

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        parts = OrderedDict(
            conv1=nn.Conv2d(input_shape[0], self.channels, 3, stride=2, padding=1),
            layer1=nn.Sequential(Block(self.channels), Block(self.channels)),
            pool=nn.AdaptiveAvgPool2d(2),
            flat=nn.Flatten(),
        )
        return nn.Sequential(parts), 4 * self.channels


SEED = 3
# Where other processes find the modules of the tests, for PYTHONPATH.
FOLDERS = os.pathsep.join(map(str, [Path(__file__).parent, *sorted(Path(__file__).parent.glob("[a-z]*/"))]))
LOCAL = Local(lr=0.05, momentum=0.9, weight_decay=1e-3, batch=8)
MLP = Mlp((12,))
NORMED = SmallCnn(norm="batch")
NORMED_MLP = NormedMlp()
BLOCKS = Blocks()
ROUNDS = Synchronous(4)
BUFFER = Buffered(concurrency=4, size=2)


@functools.cache
def tiny(clients: int = 6, samples: int = 150) -> FederatedData:
    """Images of 8 x 8 pixels in 5 classes on clients of unequal sizes."""
    source = Synthetic(samples=samples, test_samples=20, classes=5, mean=[0.5], std=[0.3])
    return federate(source, Dirichlet(clients=clients, alpha=2.0, minimum=5), SEED)


@functools.cache
def even(clients: int = 6, samples: int = 150) -> FederatedData:
    """The same images on clients of equal sizes, which finish together where devices are equal."""
    return federate(Synthetic(samples=samples, test_samples=20, classes=5), IID(clients=clients), SEED)


def sized(counts: Sequence[int]) -> FederatedData:
    """Clients of given sizes, without test samples of their own: for tests that train nothing."""
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    train, test = CSR(np.zeros(offsets[-1], np.int64), offsets), CSR(np.empty(0, np.int64), np.zeros_like(offsets))
    return replace(tiny(), partition=Partition(train, test), central=np.empty(0, np.int64))


def run_spec(
    *methods: Method,
    model: ModelRecipe = MLP,
    local: Local = LOCAL,
    data: FederatedData | None = None,
    seed: int = SEED,
    **others: Any,
) -> RunSpec:
    """A tiny run: 3 rounds, without checkpoints. others: fields of `RunSpec`; `changed` gives it other settings."""
    settings = RunSettings(seed, rounds=3, local=local, checkpoint=Checkpoint(0))
    return RunSpec(model, methods, data or tiny(), settings, **others)


def setup(
    task: Task,
    local: Local,
    networks: Mapping[str, nn.Module],
    methods: Sequence[Method] = (),
    size: int = 4,
    stale: bool = False,
) -> Setup:
    """What `Method.check` is given: by default in rounds of 4."""
    return Setup(task, local, networks, methods, size, stale)


def changed(
    spec: RunSpec,
    *,
    checkpoint_every: int | None = None,
    tolerate: float | None = None,
    state_budget: float = math.inf,
    **settings: Any,
) -> RunSpec:
    """The same run with other settings; short words for those in a group of their own. state_budget: in bytes."""
    if checkpoint_every is not None:
        settings["checkpoint"] = Checkpoint(checkpoint_every)
    if tolerate is not None:
        settings["faults"] = Faults(tolerate)
    if state_budget < math.inf:
        settings["state"] = State(state_budget / 2**30)
    return replace(spec, settings=replace(spec.settings, **settings))


# Columns that depend on clocks, and on where hosts sum.
MEASURED = (
    "wall_seconds",
    "host_seconds",
    "host_busy",
    "host_busy_least",
    "store_bytes",
    "spilled_bytes",
    "host_deaths",
)


@dataclass
class Ran:
    """What a run left behind."""

    coordinator: Coordinator
    finished: Finished
    rows: list[Row]
    failures: list[Failure] = field(default_factory=list)
    jobs: list[JobEnd] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)  # as they were planned

    @property
    def participations(self) -> dict[int, int]:
        """By client that was ever sent off: how often."""
        counts = self.coordinator.planner.participations
        return {client: int(counts[client]) for client in np.flatnonzero(counts).tolist()}

    @property
    def under_way(self) -> set[int]:
        """Numbers of the jobs that were neither aggregated nor dropped."""
        planner = self.coordinator.planner
        return {*planner.running, *(job.number for job in planner.arrived)}

    @property
    def bits(self) -> tuple[str, str]:
        """The two checksums that say whether two runs ended alike."""
        return self.finished.model_sha256, self.finished.state_sha256

    @property
    def history(self) -> list[Row]:
        """The rows without what a clock on the wall measured."""
        return [{key: row[key] for key in row if key not in MEASURED} for row in self.rows]

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """The final shared tensors by name."""
        server = self.coordinator.server
        return {k: v.numpy() for k, v in self.coordinator.initial.named(server.vector, server.counters).items()}

    @property
    def private(self) -> dict[str, np.ndarray]:
        """Every tensor of the clients' accepted private states: "client/name"."""
        return self.coordinator.private.named()

    def state(self, client: int) -> StoredState:
        """A client's accepted private state."""
        return dict(self.coordinator.private.accepted())[client]


def private(methods: Mapping[str, Tensor]) -> PrivateState[Tensor]:
    """A private state in which only methods keep something."""
    return PrivateState(torch.empty(0), torch.empty(0, dtype=torch.int64), methods)


NOTHING = private({})


def coordinate(
    spec: RunSpec,
    schedule: Schedule = ROUNDS,
    fleet: Fleet | None = None,
    runtime: Runtime | None = None,
    folder: str = "",
    resume: str = "",
    **settings: Any,
) -> Coordinator:
    """A coordinator in this process, of a host in this process unless a runtime is given; settings: see `changed`."""
    spec = changed(spec, **settings)
    return Coordinator(spec, schedule, fleet or Lognormal(), runtime or InProcess(Host(spec)), folder, resume)


def ran(coordinator: Coordinator) -> Ran:
    """Run to the end."""
    steps: list[Step] = []
    make = coordinator.planner.step

    def step() -> Step:
        steps.append(make())
        return steps[-1]

    coordinator.planner.step = step  # type: ignore[method-assign]
    events = list(coordinator.run())
    rounds = [event for event in events if isinstance(event, Round)]
    failures = [failure for event in rounds for failure in event.failures]
    jobs = [job for event in rounds for job in event.jobs]
    assert isinstance(events[-1], Finished)
    return Ran(coordinator, events[-1], coordinator.rows, failures, jobs, steps)


def run(spec: RunSpec, schedule: Schedule = ROUNDS, fleet: Fleet | None = None, **settings: Any) -> Ran:
    """Run in this process; see `coordinate`."""
    return ran(coordinate(spec, schedule, fleet, **settings))


def taking_part(
    spec: RunSpec | None, samples: int, trained: float, earlier: int = 0, version: int = 0, accepted: int = 0
) -> Participation:
    """What a method's `cost` is asked of, in a run (None: in one whose facts do not matter)."""
    spec = spec or run_spec()
    filled = frozenset(slot for slot in SLOTS if owners(spec.methods, slot))
    facts = RunFacts(
        spec.task, build_networks(spec)[1], int(np.count_nonzero(spec.data.partition.train.counts)), filled
    )
    return Participation(version, samples, trained, earlier, accepted, facts)


class Spy(InProcess):
    """A runtime that keeps everything that passes between coordinator and host."""

    def __init__(self, spec: RunSpec):
        super().__init__(Host(spec))
        self.sent: list[tuple[Job, Published]] = []
        self.trained: list[Trained] = []
        self.states: list[StoredState] = []
        self.contributed: list[Mapping[str, np.ndarray]] = []
        self.kept: Mapping[str, np.ndarray] = {}

    def call(self, host: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """See `InProcess`."""
        results = super().call(host, method, *args, returns=returns)
        if method == "train":
            published = {each.version: each for each in args[3 : 3 + args[2]]}
            self.sent += [(job, published[job.version]) for job in args[0]]
            self.trained.append(results[0])
            self.states += results[1:]
        elif method == "keep":
            self.kept = args[0]
        elif method == "contribute":
            self.contributed += results[0]
        return results

    @property
    def updates(self) -> list[Update]:
        """All updates, in the order in which they were trained."""
        return [outcome for trained in self.trained for outcome in trained.outcomes if isinstance(outcome, Update)]


def several(spec: RunSpec, count: int) -> InProcess:
    """Some hosts in this process, to see what moves between them without starting others."""
    return InProcess(*(Host(spec, f"host-{index}") for index in range(count)))


class Silent(InProcess):
    """A runtime that trains nothing: every update is zero, every evaluation empty. For the order of events."""

    def __init__(self, shared: int, counts: np.ndarray):
        super().__init__(None)
        self.shared, self.counts = shared, counts
        self.jobs: list[Job] = []

    def call(self, host: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """What a host would return if clients learnt nothing."""
        if method != "train":
            return [[]]
        jobs, groups = args[:2]
        assert not groups, "ask for single updates with a method that weighs"
        self.jobs += jobs
        return [Trained(tuple(self._update(job) for job in jobs))]

    def _update(self, job: Job) -> SingleUpdate:
        samples = int(self.counts[job.client])
        delta, counters = np.zeros(self.shared, np.float32), np.empty(0, np.int64)
        return SingleUpdate(job.number, job.client, job.version, samples, samples, 1, 0.0, 0.0, counters, delta=delta)


@dataclass(frozen=True)
class Clock(Fleet):
    """A fleet whose client k needs `seconds[k]`, however much it has to do."""

    seconds: tuple[float, ...] = field(kw_only=False, default=())

    def devices(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Devices:
        return Ticking(self.seconds)


class Ticking(Fixed):
    """The devices of a `Clock`."""

    def __init__(self, seconds: Sequence[float]):
        everything = np.full(len(seconds), np.inf)
        super().__init__(Speeds(everything, everything, everything), Fate())
        self._each = np.asarray(seconds)

    def trip(self, client: int, participation: int, start: float, samples: float, down: int, up: int) -> Trip:
        return Trip(start + float(self._each[client]), True)

    def seconds(self, samples: np.ndarray, down: int, up: int) -> np.ndarray:
        return self._each


class Ledger(Method):
    """Writes down which updates are combined, in their order; it changes no weight."""

    name = "ledger"
    paper = "a test"

    def __init__(self) -> None:
        self.cohorts: list[list[int]] = []
        self.staleness: list[list[int]] = []

    def weigh(self, aggregation: Aggregation, server: Any) -> Aggregation:
        self.cohorts.append([update.client for update in aggregation.updates])
        self.staleness.append(list(aggregation.staleness))
        return aggregation


class Asking(Method):
    """Takes the gradient at a shifted point, in every stage, and remembers both."""

    name = "asking"
    paper = "a test"

    def __init__(self, shift: float = 0.0, take: bool = True):
        self.shift, self.take = shift, take
        self.seen: list[tuple[Stage, Tensor, Tensor, Tensor]] = []

    def perturb(self, ctx: Context, params: Tensor, grad: Tensor, gradient_at: Callable[[Tensor], Tensor]) -> Tensor:
        there = gradient_at(torch.full_like(params, self.shift))
        self.seen.append((ctx.stage, params.clone(), grad.clone(), there.clone()))
        return there if self.take else grad


def silent(
    counts: Sequence[int], schedule: Schedule, fleet: Fleet | None = None, seed: int = SEED, **settings: Any
) -> tuple[Coordinator, Ledger, Silent]:
    """A coordinator whose clients learn nothing, and what it combined and dispatched."""
    ledger = Ledger()
    spec = run_spec(ledger, model=Mlp((1,)), data=sized(counts), seed=seed)
    runtime = Silent(0, np.asarray(counts))
    settings = {"evaluate": Evaluation(every=10**9)} | settings
    coordinator = coordinate(spec, schedule, fleet or Ideal(), runtime, **settings)
    runtime.shared = coordinator.layout.shared
    return coordinator, ledger, runtime


def same(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    """Whether two sets of named arrays have the same names and the same bits."""
    return left.keys() == right.keys() and all(_bits(left[key]) == _bits(right[key]) for key in left)


def _bits(array: np.ndarray) -> tuple[Any, ...]:
    return array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()


def pairs(items: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every two of them."""
    for index, first in enumerate(items):
        yield from ((first, second) for second in items[index + 1 :])
