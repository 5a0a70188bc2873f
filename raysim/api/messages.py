"""Messages between coordinator and workers: immutable objects of numbers and NumPy arrays.

A `Job` is dispatched, and an `Update` or a `Failure` comes back. A `Task` is a piece of an evaluation,
and a `Report` comes back. Client state is in none of them: it returns next to the update, as an object of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysim.api.declarations import Finetune
from raysim.data.partition import Floats, Ints

Arrays: TypeAlias = Mapping[str, np.ndarray]
Reals: TypeAlias = NDArray[np.float32] | Floats
Bools: TypeAlias = NDArray[np.bool_]
# The unnormalised weighted sums of deltas, [layout.shared] each, by the numbers of the jobs in each sum.
GroupSums: TypeAlias = Mapping[tuple[int, ...], np.ndarray]


@dataclass(frozen=True, eq=False)
class Probe:
    """What a client's local model says of the n balanced rows, and what the model said that it had received."""

    client: int
    version: int
    labels: Ints  # [n]
    seen: Bools  # [C], the classes in the client's training data
    accuracy: float  # on all balanced rows
    features: Reals  # [n, F], of the local model
    received: Reals  # [n, F], of the received model
    probabilities: Reals  # [n, C], of the local model


@dataclass(frozen=True)
class PublishedVersion:
    """What every client of one version receives: the shared prefix and what methods send beside it."""

    version: int
    vector: np.ndarray  # [layout.shared] parameters, then floating buffers
    counters: np.ndarray  # [layout.shared_counters] int64: integer buffers
    extras: Arrays = field(default_factory=dict)  # by "method.name"
    mark: str = ""  # tells vectors that are only evaluated from the version itself

    @property
    def floats(self) -> int:
        """What one client downloads, in floats."""
        return self.vector.size + sum(array.size for array in self.extras.values())

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return (
            self.vector.nbytes
            + self.counters.nbytes
            + sum(array.nbytes for array in self.extras.values())
        )


class Job(NamedTuple):
    """One local training of one client, as it is planned on virtual time and dispatched to a worker.

    The planner makes it. The coordinator adds `weight`, `probe` and `extras` once the base version exists, and
    `state` when the job goes to a worker.
    """

    number: int  # position in the run's order of dispatch
    client: int
    participation: int  # how often this client was dispatched before
    version: int  # the base version: aggregations made when it was dispatched
    state: int = (
        -1
    )  # number of the job that left the client state it starts from; -1: the initial state
    weight: float = 1.0  # raw weight in a plain weighted sum
    probe: bool = False  # whether the trained model is probed before it is averaged
    extras: Mapping[str, np.ndarray] = {}  # what this client alone receives
    pool: int = -1  # the pool that its client was drawn from; -1: all clients
    start: float = 0.0  # virtual seconds
    finish: float = 0.0  # virtual seconds at which the update arrives or the client is lost
    arrives: bool = True  # False: it is lost at `finish`
    work: float = 0.0  # samples, extra passes counted
    down: int = 0  # floats that its client receives
    up: int = 0  # floats that its client sends


@dataclass(frozen=True)
class Update:
    """What a client's job sends back."""

    job: int
    client: int
    version: int
    samples: int  # training samples the client holds
    trained: int  # samples it really trained on, epochs counted
    steps: int
    loss: float  # mean over the rows of the iterations with the task loss; nan without one
    seconds: float  # wall time on its worker; never decides anything
    counters: np.ndarray  # [layout.shared_counters]
    extras: Arrays = field(default_factory=dict)
    # Stretches [start, stop) of the shared parameters, and the sum of the learning rates of the steps made there.
    moves: tuple[tuple[int, int, float], ...] = ()
    # What the simulator looked at; no part of what travels.
    report: Mapping[str, float] = field(default_factory=dict)
    probe: Probe | None = None
    loss_rows: int = 0  # rows that `loss` was computed on, epochs counted
    # [layout.shared] trained minus received; None: the worker has added it to the sum of a group of jobs.
    delta: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def floats(self) -> int:
        """Floats in the extra upload."""
        return sum(array.size for array in self.extras.values())


@dataclass(frozen=True)
class Failure:
    """A job that raised, or whose result is not finite. It has weight 0.

    A type of its own, so that no rule of the server can mistake it for an update: it has nothing to aggregate.
    """

    job: int
    client: int
    version: int
    worker: str
    method: str  # the method whose hook raised, or "" for the loop itself
    error: str  # one sentence
    traceback: str = ""


@dataclass(frozen=True)
class TrainingResult:
    """What one call to a worker returns: it is about the call and the worker, not about a single job."""

    updates: tuple[Update | Failure, ...]  # one per job, in order
    sums: GroupSums = field(default_factory=dict)
    worker: str = ""
    busy: float = (
        0.0  # seconds of work of this worker since its last answer; never decides anything
    )
    states: tuple[int, ...] = ()  # bytes of the client state that each job left
    device: float | None = (
        None  # share of the last moments in which the GPU was at work; None: unknown
    )


@dataclass(frozen=True)
class ScoringTask:
    """One piece of an evaluation: rows of the data set, scored with the model of `client` (-1: the shared model)."""

    client: int
    rows: np.ndarray  # int64
    state: int = -1  # the job whose client state counts
    extras: Arrays = field(default_factory=dict)  # what this client alone would receive
    personalised: bool = (
        True  # whether methods make the model the client's own; else only its personal part does
    )
    finetune: Finetune | None = None  # adapt the model to the client's training samples first


@dataclass(frozen=True)
class ScoringReport:
    """Scores of one `Task`, a value per row."""

    client: int
    scores: np.ndarray  # the task's metric; of accuracy, whether it was right
    losses: np.ndarray  # in the dtype of the run
