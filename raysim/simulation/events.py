"""The events of a run, and the errors that stop it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from raysim.api.messages import Failure, Probe
from raysim.data.partition import Floats, Ints
from raysim.primitives.spans import Track
from raysim.training.identity import Identity


class JobRecord(NamedTuple):
    """A job that has ended, or that was in flight when the run ended.

    version: the base version.
    start, finish: virtual seconds.
    fate: "aggregated", "failed", "discarded", "lost" or "in flight".
    round: the aggregation that used the update; for other jobs the first aggregation after the
    job's end, or after the run.
    staleness: of an aggregated or failed job; 0 for other jobs.
    energy_wh, money, co2_g: what the job costs, as far as the fleet has costs; of a job in flight,
    what it will cost.
    """

    client: int
    participation: int
    version: int
    start: float
    finish: float
    fate: str
    round: int
    staleness: int
    energy_wh: float = 0.0
    money: float = 0.0
    co2_g: float = 0.0


Row: TypeAlias = dict[str, float | int | None]


@dataclass(frozen=True, eq=False)
class ClientScores:
    """The scores of single clients. column: the history's column that has their mean."""

    clients: Ints  # [n], ascending
    columns: Mapping[str, Floats]  # [n] each, such as "accuracy" and "accuracy_finetuned"


@dataclass(frozen=True)
class Started:
    """The start of a run.

    rows: the rounds that a resumed run already has.

    processes: the processes that take part, if there are several.
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
    """The event that no worker has answered for a long time.

    worker: the worker that the run waits for.
    clients: the clients that it trains, if any.
    seconds: the time since its last answer or, if it has not answered yet, since its current call
    began.
    node: name and address of its machine; "" if unknown.
    replaced_after: the seconds without an answer after which another worker takes its place;
    infinite if none does.
    node_timeout: if the machine does not answer either, the seconds after which it counts as lost;
    otherwise None.
    stacks: where the threads of the worker's process stand; "" if that is unknown.
    """

    worker: int
    clients: tuple[int, ...]
    seconds: float
    node: str = ""
    replaced_after: float = math.inf
    node_timeout: float | None = None
    stacks: str = ""


@dataclass(frozen=True)
class Notice:
    """The event that something happened which the user should know, such as a lost node.

    text: one sentence or more.
    """

    text: str


@dataclass(frozen=True)
class Saved:
    """The event that a checkpoint was written.

    removal_failure: why older checkpoints could not be removed; "" if they were.
    """

    version: int
    path: str
    removal_failure: str = ""


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

    jobs: the jobs that no aggregation used.
    best_model: the round, the column that decided, its value, and the sha256 of the weights.
    processes: the processes that took part, if there were several.
    """

    model_sha256: str
    state_sha256: str
    peak_memory_bytes: int
    jobs: tuple[JobRecord, ...] = ()
    best_model: Mapping[str, object] | None = None
    processes: tuple[Identity, ...] = ()


Event: TypeAlias = Started | Waiting | Notice | Round | Saved | Profiled | Finished


class RunStoppedError(RuntimeError):
    """The error of a run that could not continue. The results so far are in its folder."""


class ProcessLostError(RunStoppedError):
    """The error of a run that lost a process or a machine.

    The run can continue from its last checkpoint.
    """


class TooManyFailuresError(RunStoppedError):
    """More clients failed in one aggregation than `faults.tolerate` allows."""


TooManyFailures = TooManyFailuresError  # the name in version 0.1
