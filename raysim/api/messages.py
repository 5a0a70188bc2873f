"""Messages between coordinator and workers: immutable objects of numbers and NumPy arrays.

A worker answers a `Job` with an `Update` or a `Failure`. It answers a `ScoringTask` with a
`ScoringReport`, or with a `SetReport` if a method scores sets. Messages never contain client state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysim.api.declarations import Finetune
from raysim.data.partition import Floats, Ints

Arrays: TypeAlias = Mapping[str, np.ndarray]
Reals: TypeAlias = NDArray[np.float32] | Floats
Bools: TypeAlias = NDArray[np.bool_]
# Weighted sums of deltas, not normalised, [layout.shared] each. The key of a sum is the numbers of
# its jobs, in the order in which they are aggregated: one part of the summation tree (`tree_sum`).
GroupSums: TypeAlias = Mapping[tuple[int, ...], np.ndarray]


@dataclass(frozen=True, eq=False)
class Probe:
    """Features and outputs of a client's trained model on n samples of the central test set.

    version: the base version.
    labels: [n], the labels of the samples.
    seen: [C], True for the classes in the client's training data.
    accuracy: the trained model's accuracy on all samples of the probe, about `evaluate.probe_rows`.
    The n samples are a part of them.
    features: [n, F], the features of the trained model.
    received: [n, F], the features of the model from which training started.
    probabilities: [n, C], the trained model's probabilities.
    """

    client: int
    version: int
    labels: Ints
    seen: Bools
    accuracy: float
    features: Reals
    received: Reals
    probabilities: Reals


@dataclass(frozen=True)
class PublishedVersion:
    """A version as workers receive it: the shared vector, and the tensors that methods send.

    version: the number of aggregations before it.
    vector: [layout.shared], the parameters, then the float buffers.
    counters: int64 [layout.shared_counters], the integer buffers.
    extras: the methods' tensors for all clients, by "method.name".
    mark: "" if clients train from this version. A version that is only scored has "scored", or
    "scored 2" for replica 2.
    number: the position, from 0, among the published versions of all replicas.
    """

    version: int
    vector: np.ndarray
    counters: np.ndarray
    extras: Arrays = field(default_factory=dict)
    mark: str = ""
    number: int = 0

    @property
    def floats(self) -> int:
        """The number of floats that one client downloads."""
        return self.vector.size + sum(array.size for array in self.extras.values())

    @property
    def nbytes(self) -> int:
        """The size in memory, in bytes."""
        extras = sum(array.nbytes for array in self.extras.values())
        return self.vector.nbytes + self.counters.nbytes + extras


class Job(NamedTuple):
    """One local training of one client, planned on virtual time and dispatched to a worker.

    The planner makes the job. The coordinator then sets `state`, `weight`, `probe`, `extras`,
    `replica`, `base` and `bases`.

    number: the position in the run's order of dispatch.
    participation: the number of this client's earlier jobs that were dispatched.
    version: the number of the base version.
    state: the number of the job whose final client state this job starts from; -1 means the initial
    state.
    weight: the weight of the update, not normalised.
    extras: the tensors for this client only, by "method.name".
    pool: the pool from which the client was drawn; -1 means all clients.
    start: the virtual second of the dispatch.
    finish: the virtual second in which the update arrives, or in which the job is lost.
    arrives: False if the job is lost.
    work: the training work in samples; a forward pass alone counts 1/3.
    down, up: the floats that the client receives and sends.
    base: `PublishedVersion.number` of the base version.
    bases: if the client chooses a replica, `PublishedVersion.number` of each replica's newest
    version; else ().
    """

    number: int
    client: int
    participation: int
    version: int
    state: int = -1
    weight: float = 1.0
    probe: bool = False
    extras: Mapping[str, np.ndarray] = {}
    pool: int = -1
    start: float = 0.0
    finish: float = 0.0
    arrives: bool = True
    work: float = 0.0
    down: int = 0
    up: int = 0
    replica: int = 0
    base: int = 0
    bases: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Job:
        """Return the job from its fields as JSON, which has lists in place of tuples."""
        job = cls(*values)
        return job._replace(bases=tuple(job.bases))

    def dispatched(
        self,
        weight: float,
        probe: bool,
        extras: Mapping[str, np.ndarray],
        replica: int,
        base: int,
        bases: tuple[int, ...],
    ) -> Job:
        """Return a copy of the job in which six fields have the values of the arguments.

        The coordinator calls this function at dispatch, because the planner, which makes jobs
        earlier, cannot know these values.
        """
        # By position, because `_replace` takes twice as long.
        return Job(
            self.number, self.client, self.participation, self.version, self.state,
            weight, probe, extras,
            self.pool, self.start, self.finish, self.arrives, self.work, self.down, self.up,
            replica, base, bases,
        )  # fmt: skip

    @property
    def received(self) -> tuple[int, ...]:
        """The numbers (`PublishedVersion.number`) of the versions that the job's client receives.

        A client receives one version. If it chooses its replica itself, it receives the current
        version of each replica.
        """
        return self.bases or (self.base,)


class Update(NamedTuple):
    """The result of a client's job: what the client sends, and what the simulator measured.

    A real client would not send `seconds`, `report`, `probe`, `loss_rows`, `norm` and `replica`, so
    traffic does not count them.

    job: `Job.number`.
    version: the base version.
    samples: the number of the client's training samples.
    trained: the number of samples that the job trained on, summed over all epochs.
    loss: the mean task loss over `loss_rows` samples; nan if no step had the task loss.
    seconds: the wall seconds of the job on its worker.
    counters: int64 [layout.shared_counters], the integer buffers after training.
    extras: the tensors that methods upload, by "method.name".
    moves: (start, stop, rates) for each trained range [start:stop] of the shared parameters.
    `rates` is the sum of the learning rates of all optimizer steps on the range. `moves` is ()
    unless a method calls `Setup.read_updates`.
    report: numbers for the history, by "method.column".
    loss_rows: the number of samples in all steps with the task loss.
    norm: the Euclidean norm of the update before compression, without buffers.
    delta: [layout.shared], the trained minus the received parameters and buffers. With compression
    it is what the server decodes. None if a worker has added it to a sum of several updates.
    """

    job: int
    client: int
    version: int
    samples: int
    trained: int
    steps: int
    loss: float
    seconds: float
    counters: np.ndarray
    extras: Mapping[str, np.ndarray] = {}
    moves: tuple[tuple[int, int, float], ...] = ()
    report: Mapping[str, float] = {}
    probe: Probe | None = None
    loss_rows: int = 0
    norm: float = math.nan
    replica: int = 0
    delta: np.ndarray | None = None

    @property
    def floats(self) -> int:
        """The number of floats that methods upload, in addition to the change of the parameters."""
        return sum(array.size for array in self.extras.values())


@dataclass(frozen=True)
class Failure:
    """A job that raised an error, or whose update cannot be aggregated.

    An update cannot be aggregated if it is not finite, or if its norm is above `faults.norm`.

    job: `Job.number`.
    version: the base version.
    worker: the worker's name; "server" if the update failed after a simulated attack.
    method: the method whose hook raised the error or whose tensor is not finite; "" for other
    errors.
    traceback: "" if there is none.
    """

    job: int
    client: int
    version: int
    worker: str
    method: str
    error: str
    traceback: str = ""


@dataclass(frozen=True)
class TrainingResult:
    """The result of one call to a worker, which may train several jobs.

    updates: the update or the failure of each job, in the order of the jobs.
    sums: weighted sums of deltas, [layout.shared], each for a group of jobs. The key is a tuple
    with the numbers of the group's jobs. Updates in a sum have `delta=None`.
    busy: wall seconds of work since the worker's previous result.
    states: the size in bytes of each job's final client state.
    device: the GPU's utilization from 0 to 1; None if unknown.
    """

    updates: tuple[Update | Failure, ...]
    sums: GroupSums = field(default_factory=dict)
    worker: str = ""
    busy: float = 0.0
    states: tuple[int, ...] = ()
    device: float | None = None


@dataclass(frozen=True)
class ScoringTask:
    """One part of an evaluation: a model, and the samples to score it on.

    client: the number of the client; -1 means the shared model.
    rows: int64 [n], the positions of the samples in the data set.
    state: the number of the job whose final client state is used; -1 means the initial state.
    extras: the methods' tensors for this client only, by "method.name".
    personalised: True calls the hook `personalise` before scoring.
    finetune: None means no fine-tuning.
    name: the name of the set of samples, such as "central".
    """

    client: int
    rows: np.ndarray
    state: int = -1
    extras: Arrays = field(default_factory=dict)
    personalised: bool = True
    finetune: Finetune | None = None
    name: str = ""


@dataclass(frozen=True)
class ScoringReport:
    """The result of one `ScoringTask` with n samples.

    client: -1 means the shared model.
    scores: one array [n, ...] for each of `metrics.row_functions`.
    losses: the loss of each sample [n]. For tasks with `Objective.parts`, such as language models,
    it is float64 [n, 2]: the sum of a sample's losses, and their number.
    """

    client: int
    scores: tuple[np.ndarray, ...]
    losses: np.ndarray


@dataclass(frozen=True)
class SetReport:
    """The metrics that a method computed for a set of samples.

    client: the number of the client; -1 for the shared model.
    name: "client", "validation", "central", "domain:NAME" for the domain NAME of the clients' test
    samples, or "central:NAME" for the domain NAME of the central test set.
    metrics: the metrics, by name.
    """

    client: int
    name: str
    metrics: Mapping[str, float]
