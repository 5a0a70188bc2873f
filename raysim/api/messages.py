"""Messages between coordinator and workers: immutable objects of numbers and NumPy arrays.

The coordinator dispatches a `Job`, and the worker returns an `Update` or a `Failure`. The
coordinator sends a `ScoringTask`, one part of an evaluation, and the worker returns a
`ScoringReport`. These messages never contain client state, which is returned as a separate object
next to the update.
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
# Weighted sums of deltas, not normalised, [layout.shared] each, by the jobs in each sum. The jobs
# are a part of the tree of an aggregation (`tree_sum`), in the order of acceptance.
GroupSums: TypeAlias = Mapping[tuple[int, ...], np.ndarray]


@dataclass(frozen=True, eq=False)
class Probe:
    """Features and outputs of a local model on rows of the central test set; see `Evaluation`."""

    client: int
    version: int
    labels: Ints  # [n]
    seen: Bools  # [C] True for the classes in the client's training data
    accuracy: float
    features: Reals  # [n, F] of the local model
    received: Reals  # [n, F] of the received model
    probabilities: Reals  # [n, C] of the local model


@dataclass(frozen=True)
class PublishedVersion:
    """A published version: the shared vector and the tensors that all its clients receive."""

    version: int
    vector: np.ndarray  # [layout.shared] parameters, then floating buffers
    counters: np.ndarray  # [layout.shared_counters] int64: integer buffers
    extras: Arrays = field(default_factory=dict)  # by "method.name"
    mark: str = ""  # True: the vector is only scored, and is not the version itself
    number: int = 0  # of all versions of all replicas; with one replica it is `version`

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

    The planner makes the job. The coordinator adds `weight`, `probe`, `extras`, `replica` and
    `base` when the base version exists, and `state` when it dispatches the job to a worker.
    """

    number: int  # position in the run's order of dispatch
    client: int
    participation: int  # jobs of this client before this one
    version: int  # base version: the number of aggregations of its schedule before the dispatch
    state: int = -1  # the job whose final client state this job starts from; -1: the initial state
    weight: float = 1.0  # weight in a plain weighted sum, not normalised
    probe: bool = False  # True: the trained model is probed before it is averaged
    extras: Mapping[str, np.ndarray] = {}  # tensors that only this client receives
    pool: int = -1  # the pool from which its client was drawn; -1: all clients
    start: float = 0.0  # virtual seconds
    finish: float = 0.0  # virtual seconds at which the update arrives or the job is lost
    arrives: bool = True  # False: the job is lost at `finish`
    work: float = 0.0  # samples that pass through the model, in all passes
    down: int = 0  # floats that its client receives
    up: int = 0  # floats that its client sends
    replica: int = 0  # the replica from which it starts and into which its update is aggregated
    base: int = 0  # `PublishedVersion.number` of its base version
    # If the client chooses the replica: the numbers of the current versions of all replicas.
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
        """Return the job with the values that are known when its base version exists."""
        # By position, because `_replace` takes twice as long.
        return Job(
            self.number, self.client, self.participation, self.version, self.state,
            weight, probe, extras,
            self.pool, self.start, self.finish, self.arrives, self.work, self.down, self.up,
            replica, base, bases,
        )  # fmt: skip

    @property
    def received(self) -> tuple[int, ...]:
        """The numbers of the versions that its client receives."""
        return self.bases or (self.base,)


class Update(NamedTuple):
    """The result of a client's job: what the client sends, and what the simulator measured."""

    job: int
    client: int
    version: int
    samples: int  # training samples of the client
    trained: int  # samples that it trained on, in all epochs
    steps: int
    loss: float  # mean over the rows of the steps with the task loss; nan if there are none
    seconds: float  # wall time on its worker; for reports only
    counters: np.ndarray  # [layout.shared_counters]
    extras: Mapping[str, np.ndarray] = {}
    # Parts [start, stop) of the shared parameters, with the sum of the learning rates of the steps.
    moves: tuple[tuple[int, int, float], ...] = ()
    # Measurements of the simulator, which a client would not send:
    report: Mapping[str, float] = {}
    probe: Probe | None = None
    loss_rows: int = 0  # the number of rows over which `loss` is the mean, in all epochs
    norm: float = math.nan  # norm of the delta of the trained parameters
    replica: int = 0  # the replica from which the job started
    delta: np.ndarray | None = None  # [layout.shared] trained minus received; None: it is in a sum

    @property
    def floats(self) -> int:
        """The number of floats that the client sends in addition to its delta."""
        return sum(array.size for array in self.extras.values())


@dataclass(frozen=True)
class Failure:
    """A job that raised an error, or whose result is not finite.

    It is a separate type, so that no rule of the server treats it as an update.
    """

    job: int
    client: int
    version: int
    worker: str
    method: str  # the method whose hook raised the error; "" for an error elsewhere
    error: str
    traceback: str = ""


@dataclass(frozen=True)
class TrainingResult:
    """The result of one call to a worker, which may train several jobs."""

    updates: tuple[Update | Failure, ...]  # one for each job, in order
    sums: GroupSums = field(default_factory=dict)
    worker: str = ""
    busy: float = 0.0  # seconds that this worker worked since its last result; for reports only
    states: tuple[int, ...] = ()  # bytes of the final client state of each job
    device: float | None = None  # share of the last moments in which the GPU worked; None: unknown


@dataclass(frozen=True)
class ScoringTask:
    """Rows of the data set to score with the model of `client`; -1 is the shared model."""

    client: int
    rows: np.ndarray  # int64
    state: int = -1  # the job whose final client state is used; -1: the initial state
    extras: Arrays = field(default_factory=dict)  # tensors that only this client would receive
    personalised: bool = True  # False: the hook `personalise` is not called
    finetune: Finetune | None = None  # adapt the model to the client's training samples first
    name: str = ""  # the name of the set of samples, for a method that scores sets


@dataclass(frozen=True)
class ScoringReport:
    """The scores of one `ScoringTask`, a value for each row.

    scores: for each entry of `row_functions` (metrics.py) an array [n, ...], such as whether the
    predictions are right.
    losses: the loss of each row [n], in the dtype of the run; or float64
    [n, 2], the sum of the losses of the row's labels and the number of labels (`Objective.parts`).
    """

    client: int
    scores: tuple[np.ndarray, ...]
    losses: np.ndarray


@dataclass(frozen=True)
class SetReport:
    """The metrics that a method computed for a set of samples.

    client: the number of the client; -1 for the shared model.
    name: the name of the set: "client", "validation", "central", or the name of a domain.
    metrics: the metrics, by name.
    """

    client: int
    name: str
    metrics: Mapping[str, float]
