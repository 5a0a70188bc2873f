"""Make tiny federated runs in this process, and read their results."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn

from raysim.api.client_state import StoredState
from raysim.api.declarations import Local
from raysim.api.messages import Failure, Job, PublishedVersion, TrainingResult, Update
from raysim.api.method import Method
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.models import Lora, Mlp, ModelRecipe
from raysim.models.classifier import Shape
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Finished, JobRecord, Round, Row
from raysim.simulation.fleet import Fleet, Lognormal
from raysim.simulation.planner import PlannedAggregation
from raysim.simulation.runtime import Runtime
from raysim.simulation.schedule import Buffered, Schedule, Synchronous
from raysim.training.run_spec import Checkpoint, Faults, RunSettings, RunSpec, StateBudget
from raysim.training.worker import Worker


@dataclass(frozen=True)
class NormedMlp(ModelRecipe):
    """The smallest network with BatchNorm: one hidden layer.

    width: the number of units in the hidden layer.
    lora: the settings of adapters; by default there are none.
    """

    width: int = 12
    lora: Lora = field(default_factory=Lora)

    def extractor(self, input_shape: Shape) -> tuple[nn.Module, int]:
        """Return the layers in front of the head, and the number of features."""
        layers = [
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), self.width),
            nn.BatchNorm1d(self.width),
            nn.ReLU(),
        ]
        return nn.Sequential(*layers), self.width


SEED = 3
LOCAL = Local(lr=0.05, momentum=0.9, weight_decay=1e-3, batch=12)
MLP = Mlp((12,))
NORMED_MLP = NormedMlp()
ROUNDS = Synchronous(4)
BUFFER = Buffered(concurrency=4, size=2)


@functools.cache
def tiny_data(clients: int = 6, samples: int = 150) -> FederatedData:
    """Return a small data set: images of 8 x 8 pixels in 5 classes.

    clients: the number of clients, which have unequal numbers of samples.
    samples: the number of all training samples. The central test set has 20 samples.
    """
    source = Synthetic(samples=samples, test_samples=20, classes=5, mean=[0.5], std=[0.3])
    return federate(source, Dirichlet(clients=clients, alpha=2.0, minimum=5), SEED)


def run_spec(
    *methods: Method,
    model: ModelRecipe = MLP,
    local: Local = LOCAL,
    data: FederatedData | None = None,
    seed: int = SEED,
    **others: Any,
) -> RunSpec:
    """Return a tiny run: 3 rounds, without checkpoints.

    data: None uses `tiny_data`.
    others: other fields of `RunSpec`, such as `selection`. Use `with_settings` to change fields of
    `RunSettings`, such as the number of rounds.
    """
    settings = RunSettings(seed, rounds=3, local=local, checkpoint=Checkpoint(0))
    return RunSpec(model, methods, data or tiny_data(), settings, **others)


def with_settings(
    spec: RunSpec,
    *,
    checkpoint_every: int | None = None,
    tolerate: float | None = None,
    state_budget: float = math.inf,
    **settings: Any,
) -> RunSpec:
    """Return the same run with other settings.

    checkpoint_every, tolerate: `checkpoint.every` and `faults.tolerate`; None changes nothing.
    state_budget: `state.budget` in bytes instead of GiB; inf changes nothing.
    settings: new values for other fields of `RunSettings`, such as rounds=3.
    """
    if checkpoint_every is not None:
        settings["checkpoint"] = Checkpoint(checkpoint_every)
    if tolerate is not None:
        settings["faults"] = Faults(tolerate)
    if state_budget < math.inf:
        settings["state"] = StateBudget(state_budget / 2**30)
    return replace(spec, settings=replace(spec.settings, **settings))


# Columns that depend on wall time, or on the worker that sums the updates.
MEASURED = (
    "wall_seconds",
    "worker_seconds",
    "worker_busy",
    "worker_busy_least",
    "device_busy",
    "store_bytes",
    "spilled_bytes",
    "worker_deaths",
)
NODE_BYTES = re.compile(r"node_\d+_(in|out)_bytes")


@dataclass
class FinishedRun:
    """A finished run, with its coordinator, events and history.

    finished: the last event, with the checksums and the jobs that were still in flight.
    jobs: the records of all jobs that ended, in the order of the rounds.
    """

    coordinator: Coordinator
    finished: Finished
    rows: list[Row]
    failures: list[Failure] = field(default_factory=list)
    jobs: list[JobRecord] = field(default_factory=list)
    aggregations: list[PlannedAggregation] = field(default_factory=list)

    @property
    def participations(self) -> dict[int, int]:
        """The number of dispatched jobs by client; clients without a job are left out."""
        counts = self.coordinator.planner.participations
        return {client: int(counts[client]) for client in np.flatnonzero(counts).tolist()}

    @property
    def in_flight(self) -> set[int]:
        """The numbers of the dispatched jobs that had no outcome yet at the run's end.

        An outcome is: aggregated, lost, discarded or failed. The jobs are in flight, or finished
        too late for the last aggregation.
        """
        planner = self.coordinator.planner
        return {*planner.running, *(job.number for job in planner.arrived)}

    @property
    def bits(self) -> tuple[str, str]:
        """The checksums of the model, and of client states and server state.

        Bit-identical runs have equal checksums.
        """
        return self.finished.model_sha256, self.finished.state_sha256

    @property
    def history(self) -> list[Row]:
        """The rows of the history without measurements of wall time."""
        return [
            {key: row[key] for key in row if key not in MEASURED and not NODE_BYTES.fullmatch(key)}
            for row in self.rows
        ]

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """The final shared tensors, by name."""
        server = self.coordinator.server
        return {
            k: v.numpy()
            for k, v in self.coordinator.initial.named(server.vector, server.counters).items()
        }

    @property
    def private(self) -> dict[str, np.ndarray]:
        """The tensors of the client states at the end of the run, by "client/name"."""
        states = self.coordinator.client_states.named_tensors()
        return {
            f"{client}/{name}": array
            for client, state in states.items()
            for name, array in state.items()
        }

    def state(self, client: int) -> StoredState:
        """Return the state of a client at the end of the run."""
        return self.coordinator.client_states.committed_state(client)


def coordinate(
    spec: RunSpec,
    schedule: Schedule = ROUNDS,
    fleet: Fleet | None = None,
    runtime: Runtime | None = None,
    folder: str = "",
    resume: str = "",
    **settings: Any,
) -> Coordinator:
    """Return a coordinator of a run in this process.

    fleet: None uses `Lognormal`.
    runtime: None uses one worker in this process.
    folder: the folder for checkpoints; "" writes none.
    resume: the folder of the checkpoint to continue from; "" starts a new run.
    settings: settings of `spec` to change, see `with_settings`.
    """
    spec = with_settings(spec, **settings)
    return Coordinator(
        spec, schedule, fleet or Lognormal(), runtime or InProcess(Worker(spec)), folder, resume
    )


def run_to_end(coordinator: Coordinator) -> FinishedRun:
    """Run a coordinator to the end and return the finished run."""
    aggregations: list[PlannedAggregation] = []
    plan = coordinator.planner.next_aggregation

    def next_aggregation() -> PlannedAggregation:
        aggregations.append(plan())
        return aggregations[-1]

    coordinator.planner.next_aggregation = next_aggregation  # type: ignore[method-assign]
    events = list(coordinator.run())
    rounds = [event for event in events if isinstance(event, Round)]
    failures = [failure for event in rounds for failure in event.failures]
    jobs = [job for event in rounds for job in event.jobs]
    assert isinstance(events[-1], Finished)
    return FinishedRun(coordinator, events[-1], coordinator.rows, failures, jobs, aggregations)


def run(
    spec: RunSpec, schedule: Schedule = ROUNDS, fleet: Fleet | None = None, **settings: Any
) -> FinishedRun:
    """Execute a run in this process to its end, and return the finished run.

    fleet: None uses `Lognormal`.
    settings: `runtime`, `folder` and `resume` are passed to `coordinate`. Any other name is a
    setting of `spec` that gets a new value, such as rounds=3.
    """
    return run_to_end(coordinate(spec, schedule, fleet, **settings))


class Spy(InProcess):
    """A runtime with one worker in this process, which records what it transports.

    sent: each dispatched job, with its base version.
    states: the client states that the worker returned.
    contributed: the arrays that clients sent before the first round.
    constants: the arrays that a client receives only with its first job, by name.
    """

    def __init__(self, spec: RunSpec):
        super().__init__(Worker(spec))
        self.sent: list[tuple[Job, PublishedVersion]] = []
        self.trained: list[TrainingResult] = []
        self.states: list[StoredState] = []
        self.contributed: list[Mapping[str, np.ndarray]] = []
        self.constants: Mapping[str, np.ndarray] = {}

    def call(self, worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Call a function of the worker; return a list of its results.

        For "train", "store_constants" and "contribute", also record arguments or results in this
        object's attributes.
        worker: the worker's number.
        method: the function's name.
        returns: the number of the function's results.
        """
        results = super().call(worker, method, *args, returns=returns)
        if method == "train":
            published = {version.number: version for version in args[3 : 3 + args[2]]}
            self.sent += [(job, published[job.base]) for job in args[0]]
            self.trained.append(results[0])
            self.states += map(self.get, results[1:])
        elif method == "store_constants":
            self.constants = args[0]
        elif method == "contribute":
            self.contributed += results[0]
        return results

    @property
    def updates(self) -> list[Update]:
        """All updates, in the order in which they were trained."""
        return [
            update
            for result in self.trained
            for update in result.updates
            if isinstance(update, Update)
        ]


def several_workers(spec: RunSpec, count: int) -> InProcess:
    """Return an `InProcess` runtime with several `Worker` objects, all in the current process.

    spec: the run that the workers train.
    count: the number of workers.
    """
    return InProcess(*(Worker(spec, f"worker-{index}") for index in range(count)))


def same_arrays(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> bool:
    """Return True if two sets of named arrays have the same names and bits."""
    return left.keys() == right.keys() and all(
        _bits(left[key]) == _bits(right[key]) for key in left
    )


def _bits(array: np.ndarray) -> tuple[Any, ...]:
    return array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()
