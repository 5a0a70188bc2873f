"""Train K clients at the same time in lanes; a lane trains one client after another.

Subclasses compute one matrix product for all lanes, or replay recorded steps. For a given number of
lanes, a client's result does not depend on the clients in the other lanes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

from torch import Tensor

from raysim.api.context import Batch, Context, Stage
from raysim.primitives.errors import RefusedError
from raysim.training.job_loop import JobHandler
from raysim.training.trainer import RunningJob, Trainer
from raysim.vectors.layout import VectorStorage


class LanesError(RefusedError):
    """The error of a step that cannot be computed for several clients, or cannot be recorded."""


@dataclass(eq=False)
class Lane:
    """One of the K lanes of a worker: a vector, and the job that trains in it.

    row: the lane's number, and its row in tensors that contain all lanes.
    position: the index of the job in the list of jobs to train.
    running: None if the lane has no job.
    batch: the next batch; None if the job is finished.
    step: the number of finished steps.
    """

    row: int
    storage: VectorStorage
    position: int = 0
    running: RunningJob | None = None
    batch: Batch | None = None
    step: int = 0

    @property
    def job(self) -> RunningJob:
        """Return the job in the lane."""
        assert self.running is not None, f"lane {self.row} has no job"
        return self.running

    @property
    def next_batch(self) -> Batch:
        """Return the batch of the next step."""
        assert self.batch is not None, f"lane {self.row} is done"
        return self.batch

    @property
    def ctx(self) -> Context:
        """Return the context of the job in the lane."""
        return self.job.ctx

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of the next step; each stage makes one optimizer step."""
        cycle = self.job.cycle
        return tuple(cycle[self.step % len(cycle)])

    def advance(self, loss: Tensor | None) -> None:
        """End a step: store its task loss in the job, and take the next batch.

        loss: the task loss of the step; None if no stage computed it.
        """
        if loss is not None:
            self.job.losses.append(loss)
        self.step += 1
        self.batch = next(self.job.batches, None)


L = TypeVar("L", bound=Lane)


class LaneLoop(ABC, Generic[L]):
    """A loop that trains jobs in K lanes.

    data: [K, layout.total], the vectors of the lanes.
    counters: [K, layout.total_counters], the integer buffers of the lanes.
    """

    def __init__(self, trainer: Trainer, data: Tensor, counters: Tensor, lane_type: type[L]):
        vector = trainer.vector
        self.trainer, self.data, self.counters, self.count = trainer, data, counters, len(data)
        self.lanes = [
            lane_type(row, vector.storage(data[row], counters[row])) for row in range(self.count)
        ]
        self._own_home = vector.storage(vector.data, vector.counters)

    @abstractmethod
    def start(self, lane: L) -> None:
        """Prepare a lane for its new job."""

    @abstractmethod
    def step_lanes(self, busy: Sequence[L]) -> None:
        """Make the next step of these lanes, and call `advance` of each lane.

        busy: the lanes that have a job.
        """

    @abstractmethod
    def finish(self, lane: L) -> None:
        """Prepare the end of a lane's job.

        For example, a subclass gives the lane's optimizer to the job.
        """

    def order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the order in which jobs will probably begin, as indices into `numbers`.

        The order is an estimate, because jobs may have different numbers of steps.
        numbers: the job numbers, which identify the jobs in the run.
        """
        order: list[int] = []
        for turn in zip_longest(*self._assign(numbers)):
            order += [position for position in turn if position is not None]
        return order

    def train(self, jobs: JobHandler) -> None:
        """Train all jobs. Raises LanesError if a step cannot be computed in lanes.

        jobs: the object that begins and ends the jobs.
        """
        waiting = self._assign(jobs.numbers)
        try:
            while True:
                for lane in self.lanes:
                    self._fill(lane, waiting[lane.row], jobs)
                busy = [lane for lane in self.lanes if lane.running is not None]
                if busy:
                    self.step_lanes(busy)
                elif not any(waiting):
                    return
        finally:
            for lane in self.lanes:
                lane.running = lane.batch = None
            self.trainer.vector.use_storage(self._own_home)

    def enter(self, lane: L) -> None:
        """Let the trainer's networks use the lane's vector."""
        if self.trainer.vector.data is not lane.storage.data:
            self.trainer.vector.use_storage(lane.storage)

    def _assign(self, numbers: Sequence[int]) -> list[list[int]]:
        """Divide jobs among the K lanes; return for each lane its jobs, as indices into `numbers`.

        The job with number n trains in the lane (n + n // K) % K. With this rule, jobs whose
        numbers are multiples of K do not all train in the same lane.
        """
        # The last bit of a result may depend on the lane, because kernels may compute the last
        # entries of a tensor in another way. Therefore the lane depends only on the job's number.
        positions: list[list[int]] = [[] for _ in self.lanes]
        for position, number in enumerate(numbers):
            positions[(number + number // self.count) % self.count].append(position)
        return positions

    def _fill(self, lane: L, waiting: list[int], jobs: JobHandler) -> None:
        """End a lane's job if it is finished, and begin the lane's next job that is ready.

        waiting: the positions in `jobs.numbers` of the lane's jobs that have not begun. The new job
        is removed from this list.
        """
        while lane.batch is None:
            try:
                if lane.running is not None:
                    self._end(lane, jobs)
                    continue
                position = next(filter(jobs.is_ready, waiting), None)
                if position is None:
                    return
                lane.position = position
                waiting.remove(position)
                self._begin(lane, jobs)
            # The failure of one client must not stop other clients.
            except (Exception, SystemExit) as error:
                jobs.fail(lane.position, error)
                lane.running = lane.batch = None

    def _begin(self, lane: L, jobs: JobHandler) -> None:
        self.enter(lane)
        lane.running = jobs.begin(lane.position)
        lane.step = 0
        self.start(lane)
        lane.batch = next(lane.running.batches, None)

    def _end(self, lane: L, jobs: JobHandler) -> None:
        self.enter(lane)
        self.finish(lane)
        self.trainer.end(lane.job)
        jobs.end(lane.position, lane.job)
        lane.running = None
