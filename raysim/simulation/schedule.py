"""Schedules: when to dispatch, when to aggregate and what to discard, on virtual time.

A schedule stores nothing: the action that `decide` returns depends only on the given `View`.
Therefore a run can plan ahead.
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
    """The facts from which a schedule decides its next action; it must not change them.

    If each replica has a schedule of its own, the facts are about one replica and its clients. A
    pool is a group of clients with similar speed (`schedule=tiered`).

    now: the virtual time in seconds. Events at this time have already happened.
    version: the number of aggregations so far.
    running: the jobs in flight by number, in the order of their dispatch. Jobs that the schedule
    has decided to discard are left out.
    arrived: the jobs whose updates have arrived, in the order of arrival. Updates that arrive
    together are in the order of their clients' numbers.
    idle: the number of clients that have samples and no job, available or not.
    sent: the number of jobs that were dispatched since the last aggregation.
    since: the virtual time of the first of these dispatches. Without any, it is the time of the
    last aggregation.
    in_pool: for each pool, the number of its jobs in `running`.
    short: the pools in which a `Dispatch` at this virtual time has found too few available clients.
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
    """The action to draw idle, available clients and to send them the current version.

    If fewer than `count` clients are idle and available, all of them are dispatched. The schedule
    then decides again when a job ends or a client becomes available. If the action names a pool,
    the schedule decides again at once, and `View.short` then contains this pool.

    pool: the pool (group of clients with similar speed) to draw from; -1 draws from all clients.
    """

    count: int
    pool: int = -1


@dataclass(frozen=True)
class Aggregate:
    """The action to aggregate arrived jobs.

    jobs: the numbers of the jobs, in the order in which their updates are summed.
    """

    jobs: Sequence[int]


@dataclass(frozen=True)
class Discard:
    """The action to discard jobs that are in flight or have arrived.

    The client of a discarded job stays busy until the job would have ended.
    jobs: the numbers of the jobs.
    """

    jobs: Sequence[int]


@dataclass(frozen=True)
class Wait:
    """The action to wait for the next event, for example for the end of a job.

    until: the virtual time in seconds at which the schedule decides again, even if no event comes
    before; infinity waits for an event.
    """

    until: float = math.inf


Action: TypeAlias = Dispatch | Aggregate | Discard | Wait


class Schedule(Protocol):
    """A rule that decides the next action.

    At each instant with events, `decide` is called until it returns `Wait`, or a `Dispatch` without
    a pool finds too few clients. A client's jobs are aggregated in the order of their dispatch.
    """

    @property
    def concurrency(self) -> int:
        """The largest number of jobs in flight, without late jobs.

        Only a schedule with a deadline has late jobs; with them, more jobs can be in flight.
        """
        ...

    @property
    def size(self) -> int:
        """The largest number of updates in one aggregation, without late updates.

        Only a schedule with a deadline aggregates late updates; with them, an aggregation can be
        larger.
        """
        ...

    @property
    def max_staleness(self) -> int | None:
        """The largest staleness of an aggregated update; staler updates are discarded.

        None discards no update.
        """
        ...

    @property
    def pools(self) -> int:
        """The number of pools into which clients are divided by their speed; 0 means no pools.

        Pool 0 has the fastest clients.
        """
        ...

    @property
    def stale(self) -> bool:
        """True if the schedule may aggregate updates whose base version is not the current one."""
        ...

    def decide(self, view: View) -> Action:
        """Return the next action, which may depend only on `view`."""
        ...


class _Policy:
    """The base class of this module's schedules, which checks their arguments."""

    max_staleness: int | None = None
    pools: ClassVar[int] = 0

    def _check(self, **counts: int) -> None:
        for name, count in counts.items():
            at_least(f"schedule.{name}", count, 1)
        if self.max_staleness is not None:
            at_least("schedule.max_staleness", self.max_staleness, 0)


@dataclass(frozen=True)
class Synchronous(_Policy):
    """A schedule with rounds: dispatch a cohort, wait for all updates, aggregate.

    cohort: the number of clients in a round.
    """

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
        """Dispatch a cohort; when all its jobs have ended, aggregate the updates that arrived.

        If no update has arrived, because all jobs were lost, dispatch another cohort.
        """
        if view.running:
            return Wait()
        if view.arrived:
            return Aggregate(_numbers(view.arrived))
        return Dispatch(self.cohort)


@dataclass(frozen=True)
class Oversample(_Policy):
    """A schedule whose rounds dispatch more clients than are needed.

    A round ends when `cohort` updates have arrived; all other jobs of the round are discarded. If
    fewer updates arrive, the round ends with its last job.
    factor: the number of dispatched clients divided by `cohort` (1.3 in Bonawitz et al., MLSys
    2019).
    """

    cohort: int = 10
    factor: float = 1.3

    stale: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check(cohort=self.cohort)
        at_least("schedule.factor", self.factor, 1)

    @property
    def concurrency(self) -> int:
        """The number of clients that a round dispatches."""
        return math.ceil(round(self.cohort * self.factor, 9))

    @property
    def size(self) -> int:
        """The largest number of updates in an aggregation."""
        return self.cohort

    def decide(self, view: View) -> Action:
        """Dispatch a round; when `cohort` updates have arrived, discard late jobs and aggregate.

        If all jobs of the round have ended and fewer than `cohort` updates have arrived, aggregate
        these updates.
        """
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
    """A schedule whose rounds have a time limit.

    If no update has arrived at the limit, the round waits for the first one.
    cohort: the number of clients that a round dispatches.
    seconds: the time limit in virtual seconds.
    late: "discard" discards updates that arrive after the limit. "stale" aggregates them in the
    round in which they arrive.
    max_staleness: the largest staleness of an aggregated update; None means no limit.
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
        """The number of clients that a round dispatches."""
        return self.cohort

    @property
    def size(self) -> int:
        """The number of clients that a round dispatches."""
        return self.cohort

    @property
    def stale(self) -> bool:
        """True if updates that miss the deadline are aggregated later."""
        return self.late == "stale"

    def decide(self, view: View) -> Action:
        """Dispatch a round; at the time limit, aggregate the updates that have arrived.

        Aggregate earlier if all jobs have ended, and later if no update has arrived at the limit.
        With late="discard", first discard the jobs in flight.
        """
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
    """A schedule that aggregates whenever `size` updates have arrived (FedBuff).

    concurrency: the number of clients that are kept busy.
    size: the number of updates in an aggregation.
    max_staleness: the largest staleness of an aggregated update; None means no limit.
    """

    concurrency: int = 20
    size: int = 10
    max_staleness: int | None = None

    stale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check(concurrency=self.concurrency, size=self.size)

    def decide(self, view: View) -> Action:
        """Aggregate if `size` updates have arrived.

        Otherwise dispatch clients until `concurrency` jobs are in flight, and then wait.
        """
        if len(view.arrived) >= self.size:
            return Aggregate(_numbers(view.arrived[: self.size]))
        return _refill(view, self.concurrency)


@dataclass(frozen=True)
class Immediate(_Policy):
    """A schedule that aggregates each update as soon as it arrives (FedAsync).

    concurrency: the number of clients that are kept busy.
    max_staleness: the largest staleness of an aggregated update; None means no limit.
    """

    concurrency: int = 10
    max_staleness: int | None = None

    stale: ClassVar[bool] = True
    size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._check(concurrency=self.concurrency)

    def decide(self, view: View) -> Action:
        """Aggregate the update that arrived first.

        If none has arrived, dispatch clients until `concurrency` jobs are in flight, and then wait.
        """
        if view.arrived:
            return Aggregate((view.arrived[0].number,))
        return _refill(view, self.concurrency)


@dataclass(frozen=True)
class Tiered(_Policy):
    """A schedule that divides clients into tiers by their speed; each tier has its own rounds.

    All tiers update one model (FedAT, Chai et al., SC 2021).
    cohort: the number of clients in a round of a tier.
    max_staleness: the largest staleness of an aggregated update; None means no limit.
    """

    tiers: int = 3
    cohort: int = 5
    max_staleness: int | None = None

    stale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check(tiers=self.tiers, cohort=self.cohort)

    @property
    def pools(self) -> int:  # type: ignore[override]
        """The number of tiers."""
        return self.tiers

    @property
    def concurrency(self) -> int:
        """The number of clients in a round, summed over all tiers."""
        return self.tiers * self.cohort

    @property
    def size(self) -> int:
        """The number of clients in a round of one tier."""
        return self.cohort

    def decide(self, view: View) -> Action:
        """Aggregate or dispatch for the first tier that can act; wait if no tier can.

        A tier cannot act if it has jobs in flight, or if a dispatch at this virtual time found too
        few clients. Arrived updates are aggregated; without such updates, a cohort is dispatched.
        """
        for tier, running in enumerate(view.in_pool):
            if running or tier in view.short:
                continue
            arrived = [job.number for job in view.arrived if job.pool == tier]
            return Aggregate(arrived) if arrived else Dispatch(self.cohort, tier)
        return Wait()


def _numbers(jobs: Sequence[Job]) -> list[int]:
    return [job.number for job in jobs]


def _refill(view: View, concurrency: int) -> Action:
    """Return the action that dispatches idle clients until `concurrency` jobs are in flight.

    Return `Wait` if so many jobs are in flight already, or if no client is idle.
    """
    free = min(concurrency - len(view.running), view.idle)
    return Dispatch(free) if free > 0 else Wait()


def check_sites(schedule: Schedule, counts: np.ndarray, network: Network) -> None:
    """Raise ValueError if a schedule does not fit the clients or the topology of a run.

    Each schedule needs `concurrency` clients with samples. If each replica has a schedule of its
    own, pools are not allowed.

    counts: int [clients], the training samples of each client.
    """
    if not network.own_schedules:
        check_concurrency(schedule, counts)
        return
    if schedule.pools:
        raise ValueError(
            f"schedule={type(schedule).__name__.lower()} divides clients into tiers by their "
            "speed, but this topology has a separate schedule for each model. Set another "
            "schedule, for example schedule=synchronous."
        )
    for replica, members in enumerate(network.members(np.arange(len(counts)))):
        check_concurrency(schedule, counts[members], f" of {network.name} {replica}")


def check_concurrency(schedule: Schedule, counts: np.ndarray, of: str = "") -> None:
    """Raise ValueError if a schedule needs more clients in flight than have samples.

    counts: int [clients], the number of training samples of each client.
    of: text after the word "clients" in the error, such as " of edge server 2".
    """
    able = int(np.count_nonzero(counts))
    if schedule.concurrency <= able:
        return
    for name in ("cohort", "concurrency"):
        if not hasattr(schedule, name):
            continue
        value = getattr(schedule, name)
        largest = int(value * able / schedule.concurrency)
        advice = f"Set schedule.{name}={largest} or less."
        if not largest:
            advice = "Choose another schedule, or give samples to more clients."
        raise ValueError(
            f"schedule.{name}={value} needs {schedule.concurrency} clients with samples, but only "
            f"{able} of {len(counts)} clients{of} have samples. {advice}"
        )
