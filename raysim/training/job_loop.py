"""Train jobs one after another; define the interface that every loop has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raysim.training.trainer import RunningJob, Trainer


class JobHandler(Protocol):
    """The interface that begins and ends jobs for a loop. A place is an index into `numbers`."""

    @property
    def numbers(self) -> Sequence[int]:
        """Return the numbers of the jobs in the run."""
        ...

    def is_ready(self, place: int) -> bool:
        """Return True if no other job has to end before this one begins."""
        ...

    def begin(self, place: int) -> RunningJob:
        """Load the trainer's vector for a job."""
        ...

    def end(self, place: int, running: RunningJob) -> None:
        """Make the result of a job from the trainer's vector."""
        ...

    def fail(self, place: int, error: BaseException) -> None:
        """Record the error that a job raised."""
        ...


class OneByOne:
    """The loop that trains one job after another. All other loops are compared with it."""

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
