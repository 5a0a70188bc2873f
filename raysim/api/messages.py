"""What travels between coordinator and hosts: frozen dataclasses of numbers and NumPy arrays.

`Job` goes to a host; an `Update` or a `Failure` comes back, alone or summed into a `Sum`; `Report` is an evaluation.
Private state is in none of them: it returns beside the update, as an object of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from raysim.api.declarations import Finetune
from raysim.data.partition import Floats, Ints

Arrays: TypeAlias = Mapping[str, np.ndarray]
Reals: TypeAlias = NDArray[np.float32] | Floats
Bools: TypeAlias = NDArray[np.bool_]


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
class Published:
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
        return self.vector.nbytes + self.counters.nbytes + sum(array.nbytes for array in self.extras.values())


@dataclass(frozen=True)
class Job:
    """One participation of one client."""

    number: int  # position in the run's order of dispatch
    client: int
    participation: int  # how often this client was dispatched before
    version: int  # the base version: aggregations made when it was dispatched
    state: int  # number of the job whose private state it starts from; -1 for the initial state
    weight: float  # raw weight in a plain weighted sum
    probe: bool = False  # whether the trained model is probed before it is averaged
    extras: Arrays = field(default_factory=dict)  # what this client alone receives


@dataclass(frozen=True)
class Update:
    """What a client sends besides its delta; every update is a `SingleUpdate` or a `SummedUpdate`."""

    job: int
    client: int
    version: int
    samples: int  # training samples the client holds
    trained: int  # samples it really trained on, epochs counted
    steps: int
    loss: float  # mean over the rows of the iterations with the task loss; nan without one
    seconds: float  # wall time on its host; never decides anything
    counters: np.ndarray  # [layout.shared_counters]
    extras: Arrays = field(default_factory=dict)
    # Stretches [start, stop) of the shared parameters, and the sum of the learning rates of the steps made there.
    moves: tuple[tuple[int, int, float], ...] = ()
    # What the simulator looked at; no part of what travels.
    report: Mapping[str, float] = field(default_factory=dict)
    probe: Probe | None = None
    loss_rows: int = 0  # rows that `loss` was computed on, epochs counted

    @property
    def floats(self) -> int:
        """Floats in the extra upload."""
        return sum(array.size for array in self.extras.values())


@dataclass(frozen=True)
class SingleUpdate(Update):
    """An update that comes with its delta."""

    delta: np.ndarray = field(kw_only=True)  # [layout.shared] trained minus received


@dataclass(frozen=True)
class SummedUpdate(Update):
    """An update whose delta the host has already added to a `Sum`."""


@dataclass(frozen=True)
class Failure:
    """A client that raised or returned something that is not finite. It has weight 0."""

    job: int
    client: int
    version: int
    host: str
    method: str  # the method whose hook raised, or "" for the loop itself
    error: str  # one sentence
    traceback: str = ""


Outcome: TypeAlias = SingleUpdate | SummedUpdate | Failure


@dataclass(frozen=True)
class Sum:
    """Unnormalised weighted sum of the deltas of consecutive accepted clients, in the order of acceptance.

    They are one group, or (of the first sum of an aggregation) all groups up to some place, added one after another.
    """

    jobs: tuple[int, ...]
    total: np.ndarray  # [layout.shared] sum of weight * delta


@dataclass(frozen=True)
class Trained:
    """What one call to a host returns: an outcome per job, in order, and the sums made there."""

    outcomes: tuple[Outcome, ...]
    sums: tuple[Sum, ...] = ()
    host: str = ""
    busy: float = 0.0  # seconds that this host has worked since it last said so; never decides anything
    states: tuple[int, ...] = ()  # bytes of the private state that each job left
    device: float | None = (
        None  # the share of the last moments in which the host's GPU was at work, where that is known
    )


@dataclass(frozen=True)
class Task:
    """One piece of an evaluation: rows of the data set, scored with the model of `client` (-1: the shared model)."""

    client: int
    rows: np.ndarray  # int64
    state: int = -1  # the job whose private state counts
    extras: Arrays = field(default_factory=dict)  # what this client alone would receive
    personalised: bool = True  # whether methods make the model the client's own; else only its personal part does
    finetune: Finetune | None = None  # adapt the model to the client's training samples first


@dataclass(frozen=True)
class Report:
    """Scores of one `Task`, a value per row."""

    client: int
    scores: np.ndarray  # the task's metric; of accuracy, whether it was right
    losses: np.ndarray  # in the dtype of the run
