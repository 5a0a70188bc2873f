"""Schedules: when to dispatch, when to aggregate and what to throw away, decided on virtual time alone.

A schedule keeps nothing: what it decides follows from what it sees. So a run can look ahead, and a checkpoint holds
nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from raysim.api.messages import Job
from raysim.primitives.checks import above, at_least, one_of


class View(NamedTuple):
    """What a schedule sees after all events of one instant; only to be read."""

    now: float = 0.0  # virtual seconds
    version: int = 0  # aggregations made
    running: Mapping[
        int, Job
    ] = {}  # by number, in order of dispatch: neither back, nor lost, nor discarded
    arrived: Sequence[Job] = ()  # that are back, in order of arrival (ties by client id)
    idle: int = (
        0  # clients that are not at work; of a pool perhaps fewer, and not all need be available
    )
    sent: int = 0  # jobs dispatched with this version
    since: float = 0.0  # when the first of them was dispatched
    in_pool: Sequence[int] = ()  # by pool: how many of `running`
    short: Collection[
        int
    ] = ()  # pools of which fewer were there, at this moment, than a dispatch asked for


@dataclass(frozen=True)
class Dispatch:
    """Sample so many idle, available clients (of a pool) and send them off with the current version.

    If fewer are there, those are sent, and the schedule is asked again when somebody comes back or becomes available;
    with pools at once, for the sake of the others: then the pool is in `View.short`.
    """

    count: int
    pool: int = -1


@dataclass(frozen=True)
class Aggregate:
    """Take these arrived jobs (numbers, in the order in which they enter the sum) and step."""

    jobs: Sequence[int]


@dataclass(frozen=True)
class Discard:
    """Throw these jobs away, running or arrived (numbers). A running one keeps its client busy to its end."""

    jobs: Sequence[int]


@dataclass(frozen=True)
class Wait:
    """Go on to the next event, or to a moment if that comes first."""

    until: float = math.inf


Action: TypeAlias = Dispatch | Aggregate | Discard | Wait


class Schedule(Protocol):
    """Decides the next action; asked again until it says Wait, then after the next instant's events.

    A client's jobs are aggregated in the order in which it did them.
    """

    @property
    def concurrency(self) -> int:
        """Most jobs that are under way at once (deadline: most that a round begins)."""
        ...

    @property
    def size(self) -> int:
        """Most results in one aggregation (deadline: without late ones)."""
        ...

    @property
    def max_staleness(self) -> int | None:
        """Results that missed more aggregations than this are discarded; None: none are."""
        ...

    @property
    def pools(self) -> int:
        """Into how many pools, from the fastest clients to the slowest, the population is cut; 0: none."""
        ...

    @property
    def stale(self) -> bool:
        """Whether a result may be based on an older version than the one that it is added to."""
        ...

    def decide(self, view: View) -> Action:
        """The next action."""
        ...


class _Policy:
    """What most schedules have in common."""

    max_staleness: int | None = None
    pools: ClassVar[int] = 0

    def _check(self, **counts: int) -> None:
        for name, count in counts.items():
            at_least(f"schedule.{name}", count, 1)
        if self.max_staleness is not None:
            at_least("schedule.max_staleness", self.max_staleness, 0)


@dataclass(frozen=True)
class Synchronous(_Policy):
    """Rounds: dispatch a cohort, wait for all of it, aggregate."""

    cohort: int = 10

    stale: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check(cohort=self.cohort)

    @property
    def concurrency(self) -> int:
        """See `Schedule`."""
        return self.cohort

    @property
    def size(self) -> int:
        """See `Schedule`."""
        return self.cohort

    def decide(self, view: View) -> Action:
        """See `Schedule`."""
        if view.running:
            return Wait()
        return Aggregate(_numbers(view.arrived)) if view.arrived else Dispatch(self.cohort)


@dataclass(frozen=True)
class Oversample(_Policy):
    """Rounds that begin with more clients than they need, and end when `cohort` are back; the others' work is lost.

    factor: clients dispatched, in cohorts (Bonawitz et al., MLSys 2019: 1.3).
    """

    cohort: int = 10
    factor: float = 1.3

    stale: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check(cohort=self.cohort)
        at_least("schedule.factor", self.factor, 1)

    @property
    def concurrency(self) -> int:
        """See `Schedule`."""
        return math.ceil(round(self.cohort * self.factor, 9))

    @property
    def size(self) -> int:
        """See `Schedule`."""
        return self.cohort

    def decide(self, view: View) -> Action:
        """See `Schedule`."""
        if len(view.arrived) >= self.cohort:
            late = [*view.running, *_numbers(view.arrived[self.cohort :])]
            return Discard(late) if late else Aggregate(_numbers(view.arrived))
        if view.running:
            return Wait()
        return Aggregate(_numbers(view.arrived)) if view.arrived else Dispatch(self.concurrency)


@dataclass(frozen=True)
class Deadline(_Policy):
    """Rounds of at most so many virtual seconds; with nobody back by then, a round waits for its first client.

    late: what becomes of the others' results. "discard": they are thrown away; "stale": they enter the aggregation of
    the round in which they come (never more than `max_staleness` rounds later).
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
        """See `Schedule`."""
        return self.cohort

    @property
    def size(self) -> int:
        """See `Schedule`."""
        return self.cohort

    @property
    def stale(self) -> bool:
        """See `Schedule`."""
        return self.late == "stale"

    def decide(self, view: View) -> Action:
        """See `Schedule`."""
        if not view.sent or not (view.running or view.arrived):
            return Dispatch(min(self.cohort, view.idle)) if view.idle else Wait()
        ends = view.since + self.seconds
        if view.running and (view.now < ends or not view.arrived):
            return Wait(ends) if view.now < ends else Wait()
        if view.running and not self.stale:
            return Discard(list(view.running))
        return Aggregate(_numbers(view.arrived))


@dataclass(frozen=True)
class Buffered(_Policy):
    """Aggregate whenever `size` results have arrived; keep `concurrency` clients at work (FedBuff)."""

    concurrency: int = 20
    size: int = 10
    max_staleness: int | None = None

    stale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check(concurrency=self.concurrency, size=self.size)

    def decide(self, view: View) -> Action:
        """See `Schedule`."""
        if len(view.arrived) >= self.size:
            return Aggregate(_numbers(view.arrived[: self.size]))
        free = min(self.concurrency - len(view.running), view.idle)
        return Dispatch(free) if free > 0 else Wait()


@dataclass(frozen=True)
class Immediate(_Policy):
    """Aggregate every result by itself, as soon as it is back (FedAsync); keep `concurrency` clients at work."""

    concurrency: int = 10
    max_staleness: int | None = None

    stale: ClassVar[bool] = True
    size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self._check(concurrency=self.concurrency)

    def decide(self, view: View) -> Action:
        """See `Schedule`."""
        if view.arrived:
            return Aggregate((view.arrived[0].number,))
        free = min(self.concurrency - len(view.running), view.idle)
        return Dispatch(free) if free > 0 else Wait()


@dataclass(frozen=True)
class Tiered(_Policy):
    """Tiers of equally fast clients, each with rounds of its own into one model (FedAT, Chai et al., SC 2021).

    tiers: into how many the clients are cut, by the time that one job takes them; cohort: clients of a tier's round.
    """

    tiers: int = 3
    cohort: int = 5
    max_staleness: int | None = None

    stale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check(tiers=self.tiers, cohort=self.cohort)

    @property
    def pools(self) -> int:  # type: ignore[override]
        """See `Schedule`."""
        return self.tiers

    @property
    def concurrency(self) -> int:
        """See `Schedule`."""
        return self.tiers * self.cohort

    @property
    def size(self) -> int:
        """See `Schedule`."""
        return self.cohort

    def decide(self, view: View) -> Action:
        """See `Schedule`."""
        for tier, running in enumerate(view.in_pool):
            if not running and tier not in view.short:
                own = [job.number for job in view.arrived if job.pool == tier]
                return Aggregate(own) if own else Dispatch(self.cohort, tier)
        return Wait()


def _numbers(jobs: Sequence[Job]) -> list[int]:
    return [job.number for job in jobs]


def check_concurrency(schedule: Schedule, counts: np.ndarray) -> None:
    """Refuse a schedule that keeps more clients at work than have samples (counts: of each client)."""
    able = int(np.count_nonzero(counts))
    if isinstance(schedule, Buffered) and schedule.size > schedule.concurrency:
        raise ValueError(
            f"schedule.size={schedule.size} is more than the {schedule.concurrency} clients at work, so the buffer "
            f"would wait for clients that come twice: set schedule.size={schedule.concurrency} or less, or raise "
            "schedule.concurrency"
        )
    if schedule.concurrency <= able:
        return
    for name in ("cohort", "concurrency"):
        if hasattr(schedule, name):
            most = max(1, int(getattr(schedule, name) * able / schedule.concurrency))
            raise ValueError(
                f"schedule.{name}={getattr(schedule, name)} is more than the {able} clients that have samples "
                f"(of {len(counts)}) can fill: set schedule.{name}={most} or less"
            )
