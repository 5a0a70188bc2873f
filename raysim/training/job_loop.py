"""Train jobs one after another, and the interface through which every loop trains them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raysim.training.trainer import RunningJob, Trainer


class JobHandler(Protocol):
    """Begins and ends the jobs that a loop trains. A place is an index into `numbers`."""

    @property
    def numbers(self) -> Sequence[int]:
        """Return the numbers of the jobs in the run."""
        ...

    def is_ready(self, place: int) -> bool:
        """Return whether no other job has to end before this one begins."""
        ...

    def begin(self, place: int) -> RunningJob:
        """Load the trainer's vector for a job."""
        ...

    def end(self, place: int, running: RunningJob) -> None:
        """Take the result of a job out of the trainer's vector."""
        ...

    def fail(self, place: int, error: BaseException) -> None:
        """Note the error that a job raised."""
        ...


class OneByOne:
    """Trains one job after another: the loop with which all others are compared."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the places of jobs in the order in which they will begin."""
        return range(len(numbers))

    def train(self, jobs: JobHandler) -> None:
        """Train the jobs in order; every job is ready when its turn comes."""
        for place in range(len(jobs.numbers)):
            try:
                running = jobs.begin(place)
                self.trainer.steps(running)
                self.trainer.end(running)
                jobs.end(place, running)
            except (Exception, SystemExit) as error:  # one client must not take the others down
                jobs.fail(place, error)
