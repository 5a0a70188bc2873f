"""Schedules: when to dispatch and when to aggregate, decided on virtual time alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from raysim.primitives.checks import at_least


@dataclass(frozen=True)
class View:
    """What a schedule sees after all events of one instant."""

    running: int  # jobs that have not arrived
    arrived: Sequence[int]  # numbers of jobs that have, in order of arrival (ties by client id); only to be read
    idle: int  # clients that could be dispatched


@dataclass(frozen=True)
class Dispatch:
    """Sample and start so many clients with the current version."""

    count: int


@dataclass(frozen=True)
class Aggregate:
    """Take these arrived jobs and step."""

    jobs: Sequence[int]


@dataclass(frozen=True)
class Wait:
    """Go on to the next event."""


Action: TypeAlias = Dispatch | Aggregate | Wait


class Schedule(Protocol):
    """Decides the next action; asked again until it says Wait, then after the next instant's events."""

    @property
    def concurrency(self) -> int:
        """Most jobs that are under way at once."""
        ...

    @property
    def size(self) -> int:
        """Most results in one aggregation."""
        ...

    def decide(self, view: View) -> Action:
        """The next action."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """Rounds: dispatch a cohort, wait for all of it, aggregate."""

    cohort: int = 10

    def __post_init__(self) -> None:
        at_least("schedule.cohort", self.cohort, 1)

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
        return Aggregate(view.arrived) if view.arrived else Dispatch(self.cohort)


@dataclass(frozen=True)
class Buffered:
    """Aggregate whenever `size` results have arrived; keep `concurrency` clients at work (FedBuff)."""

    concurrency: int = 20
    size: int = 10

    def __post_init__(self) -> None:
        at_least("schedule.concurrency", self.concurrency, 1)
        at_least("schedule.size", self.size, 1)

    def decide(self, view: View) -> Action:
        """See `Schedule`."""
        if len(view.arrived) >= self.size:
            return Aggregate(view.arrived[: self.size])
        free = min(self.concurrency - view.running, view.idle)
        return Dispatch(free) if free > 0 else Wait()


def check_concurrency(schedule: Schedule, counts: np.ndarray) -> None:
    """Refuse a schedule that keeps more clients at work than have samples (counts: of each client)."""
    able = int(np.count_nonzero(counts))
    if schedule.concurrency > able:
        key = "cohort" if hasattr(schedule, "cohort") else "concurrency"
        raise ValueError(
            f"schedule.{key}={schedule.concurrency} is more than the {able} clients that have samples "
            f"(of {len(counts)}): set schedule.{key}={able} or less"
        )
