"""Schedules: when to dispatch, when to aggregate and what to discard, on virtual time.

A schedule stores nothing: its decisions depend only on its argument. A run can therefore plan
ahead, and a checkpoint contains nothing of a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from raysim.api.messages import Job
from raysim.api.topology import Network
from raysim.primitives.checks import above, at_least, one_of


class View(NamedTuple):
    """The read-only view that a schedule decides on, after all events of one instant.

    now: virtual seconds.
    version: the number of aggregations made.
    running: the jobs in flight by number, in the order of their dispatch, without discarded ones.
    arrived: the jobs whose updates have arrived, in the order of arrival; equal times are ordered
    by client.
    idle: the number of clients that are not busy; some may be unavailable.
    sent: the number of jobs dispatched with this version.
    since: when the first of them was dispatched.
    in_pool: how many of `running` each pool has.
    short: the pools in which, at this moment, fewer clients were available than a dispatch
    requested.
    """

    now: float = 0.0
    version: int = 0
    running: Mapping[int, Job] = {}
    arrived: Sequence[Job] = ()
    idle: int = 0
    sent: int = 0
    since: float = 0.0
    in_pool: Sequence[int] = ()
    short: Collection[int] = ()


@dataclass(frozen=True)
class Dispatch:
    """The action to sample idle, available clients and send them the current version.

    If fewer are available, those are dispatched, and the schedule decides again when a job ends or
    a client becomes available. With pools it decides again at once, because of the other pools; the
    pool is then in `View.short`.
    """

    count: int
    pool: int = -1


@dataclass(frozen=True)
class Aggregate:
    """The action to aggregate arrived jobs, given by number in the order of the sum."""

    jobs: Sequence[int]


@dataclass(frozen=True)
class Discard:
    """The action to discard jobs, given by number, in flight or arrived.

    A client stays busy until its job would have ended.
    """

    jobs: Sequence[int]


@dataclass(frozen=True)
class Wait:
    """The action to go on to the next event, or to a given time if that comes first."""

    until: float = math.inf


Action: TypeAlias = Dispatch | Aggregate | Discard | Wait


class Schedule(Protocol):
    """A rule that decides the next action.

    It is asked repeatedly until it returns Wait, and again after the events of the next instant.
    Jobs of one client are aggregated in the order of their dispatch.
    """

    @property
    def concurrency(self) -> int:
        """The largest number of jobs in flight; for a deadline, at the start of a round."""
        ...

    @property
    def size(self) -> int:
        """The largest number of updates in one aggregation; for a deadline, without late ones."""
        ...

    @property
    def max_staleness(self) -> int | None:
        """The staleness above which updates are discarded; None discards no update."""
        ...

    @property
    def pools(self) -> int:
        """The number of pools, from the fastest clients to the slowest; 0 means no pools."""
        ...

    @property
    def stale(self) -> bool:
        """True if an update may start from an older version than the current one."""
        ...

    def decide(self, view: View) -> Action:
        """Return the next action."""
        ...


class _Policy:
    """The base class of most schedules."""

    max_staleness: int | None = None
    pools: ClassVar[int] = 0

    def _check(self, **counts: int) -> None:
        for name, count in counts.items():
            at_least(f"schedule.{name}", count, 1)
        if self.max_staleness is not None:
            at_least("schedule.max_staleness", self.max_staleness, 0)


@dataclass(frozen=True)
class Synchronous(_Policy):
    """A schedule with rounds: dispatch a cohort, wait for all updates, aggregate."""

    cohort: int = 10

    stale: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check(cohort=self.cohort)

    @property
    def concurrency(self) -> int:
        """The number of clients in a round."""
        return self.cohort

    @property
    def size(self) -> int:
        """The number of clients in a round."""
        return self.cohort

    def decide(self, view: View) -> Action:
        """Aggregate when no job is in flight."""
        if view.running:
            return Wait()
        if view.arrived:
            return Aggregate(_numbers(view.arrived))
        return Dispatch(self.cohort)


@dataclass(frozen=True)
class Oversample(_Policy):
    """Rounds that begin with more clients than needed and end after `cohort` updates.

    The other jobs are discarded.
    factor: the number of dispatched clients divided by `cohort` (Bonawitz et al., MLSys 2019: 1.3).
    """

    cohort: int = 10
    factor: float = 1.3

    stale: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check(cohort=self.cohort)
        at_least("schedule.factor", self.factor, 1)

    @property
    def concurrency(self) -> int:
        """The number of clients that start at the beginning of a round."""
        return math.ceil(round(self.cohort * self.factor, 9))

    @property
    def size(self) -> int:
        """The number of clients in a round."""
        return self.cohort

    def decide(self, view: View) -> Action:
        """Discard late jobs and aggregate when `cohort` updates have arrived."""
        if len(view.arrived) >= self.cohort:
            late = [*view.running, *_numbers(view.arrived[self.cohort :])]
            if late:
                return Discard(late)
            return Aggregate(_numbers(view.arrived))
        if view.running:
            return Wait()
        if view.arrived:
            return Aggregate(_numbers(view.arrived))
        return Dispatch(self.concurrency)


@dataclass(frozen=True)
class Deadline(_Policy):
    """Rounds with a time limit of `seconds` virtual seconds.

    If no update has arrived at the limit, a round waits for the first one.
    late: decides about later updates. "discard": they are discarded. "stale": they enter the
    aggregation of the round in which they arrive, if that is at most `max_staleness` rounds later.
    """

    cohort: int = 10
    seconds: float = 60.0
    late: str = "stale"
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        self._check(cohort=self.cohort)
        above("schedule.seconds", self.seconds, 0)
        one_of("schedule.late", self.late, ("stale", "discard"))

    @property
    def concurrency(self) -> int:
        """The number of clients in a round."""
        return self.cohort

    @property
    def size(self) -> int:
        """The number of clients in a round."""
        return self.cohort

    @property
    def stale(self) -> bool:
        """True if updates that miss the deadline are aggregated later."""
        return self.late == "stale"

    def decide(self, view: View) -> Action:
        """Aggregate at the end of the round, or when the first update arrives after it."""
        if not view.sent or not (view.running or view.arrived):
            if view.idle:
                return Dispatch(min(self.cohort, view.idle))
            return Wait()
        end = view.since + self.seconds
        if view.running:
            if view.now < end:
                return Wait(end)
            if not view.arrived:
                return Wait()
            if not self.stale:
                return Discard(list(view.running))
        return Aggregate(_numbers(view.arrived))


@dataclass(frozen=True)
class Buffered(_Policy):
    """Aggregate every `size` arrived updates; keep `concurrency` clients busy (FedBuff)."""

    concurrency: int = 20
    size: int = 10
    max_staleness: int | None = None

    stale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check(concurrency=self.concurrency, size=self.size)

    def decide(self, view: View) -> Action:
        """Aggregate a full buffer; otherwise dispatch, or wait."""
        if len(view.arrived) >= self.size:
            return Aggregate(_numbers(view.arrived[: self.size]))
        return _refill(view, self.concurrency)


@dataclass(frozen=True)
class Immediate(_Policy):
    """Aggregate each update as soon as it arrives (FedAsync); keep `concurrency` clients busy."""

    concurrency: int = 10
    max_staleness: int | None = None

    stale: ClassVar[bool] = True
    size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._check(concurrency=self.concurrency)

    def decide(self, view: View) -> Action:
        """Aggregate the first arrived update; otherwise dispatch, or wait."""
        if view.arrived:
            return Aggregate((view.arrived[0].number,))
        return _refill(view, self.concurrency)


@dataclass(frozen=True)
class Tiered(_Policy):
    """A schedule with tiers of equally fast clients; each tier has rounds of its own.

    All tiers update one model (FedAT, Chai et al., SC 2021).
    tiers: the number of tiers; clients are divided by the time of one job.
    cohort: clients in a round of a tier.
    """

    tiers: int = 3
    cohort: int = 5
    max_staleness: int | None = None

    stale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check(tiers=self.tiers, cohort=self.cohort)

    @property
    def pools(self) -> int:  # type: ignore[override]
        """The tiers."""
        return self.tiers

    @property
    def concurrency(self) -> int:
        """The cohorts of all tiers."""
        return self.tiers * self.cohort

    @property
    def size(self) -> int:
        """The cohort of one tier."""
        return self.cohort

    def decide(self, view: View) -> Action:
        """Aggregate or dispatch the first tier that has no job in flight."""
        for tier, running in enumerate(view.in_pool):
            if running or tier in view.short:
                continue
            arrived = [job.number for job in view.arrived if job.pool == tier]
            return Aggregate(arrived) if arrived else Dispatch(self.cohort, tier)
        return Wait()


def _numbers(jobs: Sequence[Job]) -> list[int]:
    return [job.number for job in jobs]


def _refill(view: View, concurrency: int) -> Action:
    """Return the action that keeps `concurrency` clients busy."""
    free = min(concurrency - len(view.running), view.idle)
    return Dispatch(free) if free > 0 else Wait()


def check_sites(schedule: Schedule, counts: np.ndarray, network: Network) -> None:
    """Raise ValueError if a schedule does not fit all clients, or the clients of each replica.

    counts: [clients], training samples.
    network: the replicas, which may have own schedules.
    """
    if not network.own_schedules:
        check_concurrency(schedule, counts)
        return
    if schedule.pools:
        raise ValueError(
            f"schedule={type(schedule).__name__.lower()} divides clients into groups, but this "
            "topology has a separate schedule for each model. Choose another schedule."
        )
    for replica, members in enumerate(network.members(np.arange(len(counts)))):
        check_concurrency(schedule, counts[members], f" of {network.name} {replica}")


def check_concurrency(schedule: Schedule, counts: np.ndarray, of: str = "") -> None:
    """Raise ValueError if a schedule needs more busy clients than there are with samples.

    counts: [clients], training samples.
    of: the end of "clients" in the error.
    """
    able = int(np.count_nonzero(counts))
    if isinstance(schedule, Buffered) and schedule.size > schedule.concurrency:
        raise ValueError(
            f"schedule.size={schedule.size} is more than the {schedule.concurrency} clients in "
            f"flight, so the buffer could not fill up. Set schedule.size={schedule.concurrency} or "
            "less, or increase schedule.concurrency."
        )
    if schedule.concurrency <= able:
        return
    for name in ("cohort", "concurrency"):
        if not hasattr(schedule, name):
            continue
        value = getattr(schedule, name)
        largest = max(1, int(value * able / schedule.concurrency))
        raise ValueError(
            f"schedule.{name}={value} needs {schedule.concurrency} clients with samples, but only "
            f"{able} of {len(counts)} clients{of} have samples. Set schedule.{name}={largest} or "
            "less."
        )
