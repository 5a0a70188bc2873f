"""Sum the deltas of groups of jobs on their worker, in the order in which the server would."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from raysim.api.messages import Job


class WorkerSums:
    """Unnormalised weighted sums of deltas, one for each group of jobs.

    groups: numbers of the jobs in each sum, in the order of summation.
    """

    def __init__(self, jobs: Sequence[Job], groups: Sequence[tuple[int, ...]]):
        self.group_of = {number: group for group in groups for number in group}
        self.totals: dict[tuple[int, ...], Tensor] = {}  # on the device
        self._weights = {job.number: job.weight for job in jobs}
        self._due = {group: iter(group) for group in groups}
        self._next = {group: next(due) for group, due in self._due.items()}
        self._early: dict[int, Tensor | None] = {}  # copies of deltas whose turn has not come

    def add(self, job: Job, delta: Tensor | None) -> None:
        """Add the delta of a job; None if the job failed. A job that is in no group is ignored."""
        group = self.group_of.get(job.number)
        if group is None:
            return
        if job.number != self._next[group]:
            self._early[job.number] = None if delta is None else delta.clone()
            return
        self._fold(group, job.number, delta)
        number = next(self._due[group], -1)
        while number in self._early:
            self._fold(group, number, self._early.pop(number))
            number = next(self._due[group], -1)
        self._next[group] = number

    def _fold(self, group: tuple[int, ...], number: int, delta: Tensor | None) -> None:
        if delta is None:
            return
        if group in self.totals:
            self.totals[group].add_(delta, alpha=self._weights[number])
        else:
            self.totals[group] = delta * self._weights[number]
