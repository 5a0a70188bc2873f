"""The events of a run, and the errors that stop it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from raysim.api.messages import Failure, Probe
from raysim.data.partition import Floats, Ints
from raysim.primitives.spans import Track
from raysim.training.identity import Identity


class JobRecord(NamedTuple):
    """A job that has ended, or was in flight when the run ended.

    version: its base version. start, finish: virtual seconds. fate: "aggregated", "failed",
    "discarded", "lost" or "in flight". round: the aggregation that took it, or the next one after
    its end, or after the run. staleness: of an aggregated or failed job; 0 otherwise.
    """

    client: int
    participation: int
    version: int
    start: float
    finish: float
    fate: str
    round: int
    staleness: int


Row: TypeAlias = dict[str, float | int | None]


@dataclass(frozen=True, eq=False)
class ClientScores:
    """The scores of single clients, by the column of the history that has the mean."""

    clients: Ints  # [n], ascending
    columns: Mapping[str, Floats]  # [n] each, such as "accuracy" and "accuracy_finetuned"


@dataclass(frozen=True)
class Started:
    """The start of a run, with the rows of the rounds that a resumed run already has.

    processes: those that take part, if there are several.
    """

    rows: list[Row]
    processes: tuple[Identity, ...] = ()


@dataclass(frozen=True)
class Round:
    """One finished aggregation."""

    row: Row
    failures: tuple[Failure, ...]
    probes: tuple[Probe, ...] = ()  # of this round's local models
    jobs: tuple[JobRecord, ...] = ()  # that ended in this round
    scores: ClientScores | None = None  # of a round that scores clients


@dataclass(frozen=True)
class Waiting:
    """No worker has answered for a while.

    worker: the one that the run waits for. clients: those that it trains, if any. seconds: since
    its last answer, or since it began with this call.
    """

    worker: int
    clients: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    version: int
    path: str


@dataclass(frozen=True)
class Profiled:
    """The time of the coordinator and of every worker by activity, over the same wall time.

    Reported before the end of a run with a profile.
    """

    start: float  # seconds since the epoch
    stop: float
    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Finished:
    """The end of a run.

    jobs: those that no aggregation took. best_model: round, column that decided, its value, and
    sha256 of the weights. processes: those that took part, if there are several.
    """

    model_sha256: str
    state_sha256: str
    peak_memory_bytes: int
    jobs: tuple[JobRecord, ...] = ()
    best_model: Mapping[str, object] | None = None
    processes: tuple[Identity, ...] = ()


Event: TypeAlias = Started | Waiting | Round | Saved | Profiled | Finished


class RunStoppedError(RuntimeError):
    """A run that could not continue; its results so far are in its folder."""


class ProcessLostError(RunStoppedError):
    """A process or machine of the run is lost; it can continue from its last checkpoint."""


class TooManyFailuresError(RunStoppedError):
    """More clients failed in one aggregation than `faults.tolerate` allows."""


TooManyFailures = TooManyFailuresError  # the name in version 0.1
