"""A schedule: rounds that begin small and grow by a client each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.primitives.checks import at_least
from raysim.simulation.schedule import Action, Aggregate, Dispatch, View, Wait


@dataclass(frozen=True)
class MySchedule:
    """Rounds of `first` clients, then one more in each, up to `most`. Keeps nothing: it decides by what it sees."""

    first: int = 2
    most: int = 6

    max_staleness: ClassVar[int | None] = None  # nothing is discarded for being late
    pools: ClassVar[int] = 0  # clients are drawn from all of them
    stale: ClassVar[bool] = False  # every result starts from the current version

    def __post_init__(self) -> None:
        at_least("schedule.first", self.first, 1)
        at_least("schedule.most", self.most, self.first)

    @property
    def concurrency(self) -> int:
        """Most clients at work at once."""
        return self.most

    @property
    def size(self) -> int:
        """Most results in one aggregation."""
        return self.most

    def decide(self, view: View) -> Action:
        """Asked after every event, on virtual time."""
        if view.running:
            return Wait()
        if view.arrived:
            return Aggregate([job.number for job in view.arrived])
        return Dispatch(min(self.first + view.version, self.most))
