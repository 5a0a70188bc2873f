"""Define the interface of loops that train jobs, and the loop that trains one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raysim.training.trainer import RunningJob, Trainer


class JobHandler(Protocol):
    """The interface with which a loop begins and ends the jobs that it trains.

    In all functions, `place` is the position of a job in `numbers`.
    """

    @property
    def numbers(self) -> Sequence[int]:
        """Return the numbers of the jobs to train; a number is unique in a run."""
        ...

    def is_ready(self, place: int) -> bool:
        """Return True if the job at the position `place` of `numbers` can begin now.

        False if it starts from the client state that an earlier job of this call has yet to make.
        """
        ...

    def begin(self, place: int) -> RunningJob:
        """Load the model and the state of a job's client into the trainer; return the running job.

        The model is then in `Trainer.vector`.
        place: the position of the job in `numbers`.
        """
        ...

    def end(self, place: int, running: RunningJob) -> None:
        """Make the result of a finished job, whose trained model is in `Trainer.vector`.

        place: the position of the job in `numbers`.
        running: the job as `begin` returned it.
        """
        ...

    def fail(self, place: int, error: BaseException) -> None:
        """Record the error that a job raised; the job's result is then a failure.

        place: the position of the job in `numbers`.
        error: the error.
        """
        ...


class OneByOne:
    """The loop that trains one job after another; other loops must have the same results."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the positions of jobs in `numbers`, in the order in which they will begin."""
        return range(len(numbers))

    def train(self, jobs: JobHandler) -> None:
        """Train the jobs in order; every job is ready when its turn comes."""
        for place in range(len(jobs.numbers)):
            try:
                running = jobs.begin(place)
                self.trainer.steps(running)
                self.trainer.end(running)
                jobs.end(place, running)
            # The failure of one client must not stop other clients.
            except (Exception, SystemExit) as error:
                jobs.fail(place, error)
