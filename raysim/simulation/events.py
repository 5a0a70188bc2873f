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

    participation: the number of earlier jobs of the client.
    version: the base version.
    start, finish: virtual seconds.
    fate: "aggregated", "failed", "discarded", "lost" or "in flight".
    round: the number of an aggregation, from 1. An aggregated or failed job was planned for this
    aggregation. For a lost or discarded job, it is the first aggregation after the loss or the
    decision to discard. For a job in flight, it is the last round plus 1.
    staleness: 0 unless the job is aggregated or failed.
    energy_wh, money, co2_g: the cost of the job; 0 if the fleet has no such cost. A job in flight
    has the cost until its planned end.
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
    """The scores of single clients.

    clients: int [n], the scored clients, ascending.
    columns: float [n] by name; nan for a client without this score. If clients move between
    replicas, "replica" is the number of each client's replica.
    """

    clients: Ints  # [n], ascending
    columns: Mapping[str, Floats]  # [n] each, such as "accuracy" and "accuracy_finetuned"


@dataclass(frozen=True)
class Started:
    """The event that a run has started.

    rows: the rows of earlier rounds, if the run was resumed.
    processes: the processes of the run, if there are several.
    """

    rows: list[Row]
    processes: tuple[Identity, ...] = ()


@dataclass(frozen=True)
class Round:
    """The event that an aggregation is finished.

    row: the row of the history.
    probes: the probes of local models; only with `evaluate.probe`.
    jobs: the jobs that ended in this round.
    scores: the scores of each client; None if this round does not score clients.
    """

    row: Row
    failures: tuple[Failure, ...]
    probes: tuple[Probe, ...] = ()  # scores of this round's local models
    jobs: tuple[JobRecord, ...] = ()  # jobs that ended in this round
    scores: ClientScores | None = None  # None for a round that does not score clients


@dataclass(frozen=True)
class Waiting:
    """The event that a run has received no answer from any worker for a long time.

    worker: the worker whose answer the run needs next.
    clients: the clients that this worker trains now.
    seconds: the wall time for which this worker has not answered.
    node: name and address of the worker's node; "" if unknown.
    replaced_after: the `seconds` after which the worker is replaced; infinity if never.
    node_timeout: the seconds for which the node may be silent before it counts as lost; None if the
    node answers.
    stacks: the call stacks of the worker's threads; "" if unknown.
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
    """The event that reports something that the user should know, such as the loss of a node.

    text: the message for the user, one or more sentences.
    """

    text: str


@dataclass(frozen=True)
class Saved:
    """The event that a checkpoint was written.

    version: the number of aggregations before the checkpoint.
    path: the address of the checkpoint.
    removal_failure: why older checkpoints could not be removed; "" if there was no problem.
    """

    version: int
    path: str
    removal_failure: str = ""


@dataclass(frozen=True)
class Profiled:
    """The event that reports the profile of a run: the time of each process by activity.

    A run with `profile=true` yields this event shortly before the run ends.
    start, stop: the period of the profile, in seconds since the epoch.
    tracks: the profile of each process.
    """

    start: float  # seconds since the epoch
    stop: float
    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Finished:
    """The event that a run has ended.

    model_sha256: the checksum of the final model.
    state_sha256: the checksum of all client states and the server state.
    peak_memory_bytes: the peak memory of the coordinator's process.
    jobs: the jobs that were in flight when the run ended.
    best_model: the entry `best_model` of summary.json; None without a best model.
    processes: the processes of the run, if there were several.
    """

    model_sha256: str
    state_sha256: str
    peak_memory_bytes: int
    jobs: tuple[JobRecord, ...] = ()
    best_model: Mapping[str, object] | None = None
    processes: tuple[Identity, ...] = ()


Event: TypeAlias = Started | Waiting | Notice | Round | Saved | Profiled | Finished


class RunStoppedError(RuntimeError):
    """The error of a run that could not continue; the run's folder has the results so far."""


class ProcessLostError(RunStoppedError):
    """The error of a run that lost a process or a machine.

    The run can continue from its last checkpoint, if there is one.
    """


class TooManyFailuresError(RunStoppedError):
    """The error of a run in which more jobs failed than `faults.tolerate` allows.

    The jobs of each aggregation are counted separately.
    """


TooManyFailures = TooManyFailuresError  # the name in version 0.1
