"""What a run tells its driver, as it happens, and how it may stop early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from raysim.api.messages import Failure, Probe
from raysim.data.partition import Floats, Ints
from raysim.primitives.spans import Track
from raysim.training.identity import Identity


class JobRecord(NamedTuple):
    """What is recorded of a job when it has ended, or when the run has."""

    client: int
    participation: int
    version: int  # that it started from
    start: float  # virtual seconds
    finish: float
    fate: str  # "aggregated", "failed", "discarded", "lost", or "in flight" when the run ended
    round: int  # the aggregation that took it, or the next one after it was lost or discarded, or after the run
    staleness: int  # of an aggregated or failed job; 0 otherwise


Row: TypeAlias = dict[str, float | int | None]


@dataclass(frozen=True, eq=False)
class ClientScores:
    """What each scored client's own test samples say, by the column of the history that holds the mean."""

    clients: Ints  # [n], ascending
    columns: Mapping[str, Floats]  # [n] each, such as "accuracy" and "accuracy_finetuned"


@dataclass(frozen=True)
class Started:
    """Rows of the rounds that a resumed run already has.

    processes: those that take part, where they are several.
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
    """No answer has come for a while. clients: those that the awaited worker trains, if it trains any."""

    worker: int
    clients: tuple[int, ...]
    seconds: float  # since the worker's last answer, or since it was given this


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    version: int
    path: str


@dataclass(frozen=True)
class Profiled:
    """Where the time of a run went: the coordinator and every worker, over the same wall time.

    Reported before the end of a run that asked for a profile.
    """

    start: float  # seconds since the epoch
    stop: float
    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Finished:
    """The end of a run."""

    model_sha256: str
    state_sha256: str
    peak_memory_bytes: int
    jobs: tuple[JobRecord, ...] = ()  # that no aggregation took, because there was none any more
    best_model: Mapping[str, object] | None = (
        None  # round, by which column, its value, sha256 of the weights
    )
    processes: tuple[Identity, ...] = ()  # that took part, where they are several


Event: TypeAlias = Started | Waiting | Round | Saved | Profiled | Finished


class RunStoppedError(RuntimeError):
    """A run that could not go on; what it did is in its folder."""


class ProcessLostError(RunStoppedError):
    """A process or a machine of the run is gone, and what it held with it: the last checkpoint is all that is left."""


class TooManyFailuresError(RunStoppedError):
    """More clients failed in one aggregation than `faults.tolerate` allows."""


TooManyFailures = TooManyFailuresError  # the name in version 0.1
