"""A schedule: synchronous rounds whose cohort grows by one client per round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.primitives.checks import at_least
from raysim.simulation.schedule import Action, Aggregate, Dispatch, View, Wait


@dataclass(frozen=True)
class MySchedule:
    """Synchronous rounds that grow by one client each, from `first` to `most` clients.

    Every schedule has three further attributes:
    max_staleness: the largest staleness of an update that is not discarded; None discards none.
    pools: the number of groups of clients of similar speed; 0 means no groups.
    stale: True if an aggregated update may start from an older version than the current one.
    """

    first: int = 2
    most: int = 6

    max_staleness: ClassVar[int | None] = None
    pools: ClassVar[int] = 0
    stale: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least("schedule.first", self.first, 1)
        at_least("schedule.most", self.most, self.first)

    @property
    def concurrency(self) -> int:
        """Return the largest number of clients in flight at once."""
        return self.most

    @property
    def size(self) -> int:
        """Return the largest number of updates in one aggregation."""
        return self.most

    def decide(self, view: View) -> Action:
        """Return what happens next in virtual time: dispatch, aggregate or wait.

        view: the run's state: the jobs in flight (`running`), the jobs whose updates can be
        aggregated (`arrived`) and the number of aggregations (`version`). The result must depend
        only on `view`.
        """
        if view.running:
            return Wait()
        if view.arrived:
            return Aggregate([job.number for job in view.arrived])
        return Dispatch(min(self.first + view.version, self.most))
