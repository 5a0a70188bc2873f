"""Define the interface of training loops, and the loop that trains jobs one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raysim.training.trainer import RunningJob, Trainer


class JobHandler(Protocol):
    """The interface with which a training loop begins and ends jobs.

    The property `numbers` of this class lists the numbers of all jobs to train. The other functions
    get a job's index in this list.
    """

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of the jobs to train; a number is unique in a run."""
        ...

    def is_ready(self, position: int) -> bool:
        """Return True if a job can begin now.

        A job must wait for an earlier job of its client that makes the client state for it.
        position: the index of the job in `JobHandler.numbers`.
        """
        ...

    def begin(self, position: int) -> RunningJob:
        """Load the model and the state of a job's client into the trainer; return the running job.

        Afterwards `Trainer.vector` contains the model.
        position: the index of the job in `JobHandler.numbers`, from 0.
        """
        ...

    def end(self, position: int, running: RunningJob) -> None:
        """Store the result of a finished job, whose trained model is in `Trainer.vector`.

        position: the index of the job in `JobHandler.numbers`, from 0.
        running: the object that `begin` returned for this job.
        """
        ...

    def fail(self, position: int, error: BaseException) -> None:
        """Store the error that a job raised; the result of the job is then a failure.

        position: the index of the job in `JobHandler.numbers`, from 0.
        error: the error.
        """
        ...


class OneByOne:
    """The loop that trains one job after another; other loops must have the same results."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the order in which jobs will begin, as indices into `numbers`.

        numbers: the numbers of the jobs.
        """
        return range(len(numbers))

    def train(self, jobs: JobHandler) -> None:
        """Train the jobs one after another, in the order of `jobs.numbers`.

        Jobs are not checked with `is_ready`: a job waits only for earlier jobs, and these have
        ended.

        jobs: the handler that begins and ends the jobs.
        """
        for position in range(len(jobs.numbers)):
            try:
                running = jobs.begin(position)
                self.trainer.steps(running)
                self.trainer.end(running)
                jobs.end(position, running)
            # The failure of one client must not stop other clients.
            except (Exception, SystemExit) as error:
                jobs.fail(position, error)
