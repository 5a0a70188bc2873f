"""The loop that keeps K lanes busy: each lane trains one client after another.

Subclasses compute the steps: by batched products (`batched_lanes.py`) or from recordings of `Step`
(`recorded_lanes.py`). For a given number of lanes, a client's result does not depend on the other
clients in the batch. It may depend, in the last bit, on the lane, because kernels treat the end of
a tensor in another way. So the number of the job decides the lane, whichever worker trains it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

from torch import Tensor

from raysim.api.context import Batch, Context, Stage
from raysim.primitives.errors import Refused
from raysim.training.job_loop import JobHandler
from raysim.training.trainer import RunningJob, Trainer
from raysim.vectors.layout import VectorStorage


class LanesError(Refused):
    """A step cannot be computed for several clients at once, or cannot be recorded."""


@dataclass(eq=False)
class Lane:
    """A vector of its own, and the client that trains in it."""

    row: int
    home: VectorStorage
    index: int = 0  # the client's place among those to train
    work: RunningJob | None = None  # None: no client
    batch: Batch | None = None  # the next one; None: the client is done
    step: int = 0

    @property
    def client(self) -> RunningJob:
        """The job in it."""
        assert self.work is not None, f"lane {self.row} has no client"
        return self.work

    @property
    def next_batch(self) -> Batch:
        """The batch of the next iteration."""
        assert self.batch is not None, f"lane {self.row} is done"
        return self.batch

    @property
    def ctx(self) -> Context:
        """The context of the job in it."""
        return self.client.ctx

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the next iteration."""
        cycle = self.client.cycle
        return tuple(cycle[self.step % len(cycle)])

    def advance(self, loss: Tensor | None) -> None:
        """Note the loss of the task, if the iteration had one, and take the next batch."""
        if loss is not None:
            self.client.losses.append(loss)
        self.step += 1
        self.batch = next(self.client.batches, None)


L = TypeVar("L", bound=Lane)


class LaneLoop(ABC, Generic[L]):
    """The loop that fills K lanes with clients.

    data [K, D], counters [K, C]: the lanes' vectors.
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
        """Prepare a lane for a client that has begun."""

    @abstractmethod
    def step_lanes(self, busy: Sequence[L]) -> None:
        """Do the next iteration of these lanes' clients, and `advance` each lane."""

    @abstractmethod
    def finish(self, lane: L) -> None:
        """Hand the client what the lane holds for it, before its job ends."""

    def order(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return about the order in which jobs begin; lanes that end early begin early."""
        turns = zip_longest(*self._assign(numbers))
        return [place for turn in turns for place in turn if place is not None]

    def train(self, jobs: JobHandler) -> None:
        """Train all clients. Raises LanesError if a step cannot be computed in this way."""
        waiting = self._assign(jobs.numbers)
        try:
            while True:
                for lane in self.lanes:
                    self._fill(lane, waiting[lane.row], jobs)
                busy = [lane for lane in self.lanes if lane.work is not None]
                if busy:
                    self.step_lanes(busy)
                elif not any(waiting):
                    return
        finally:
            for lane in self.lanes:
                lane.work = lane.batch = None
            self.trainer.vector.use_storage(self._own_home)

    def enter(self, lane: L) -> None:
        """Let the trainer's networks see the lane's vector."""
        if self.trainer.vector.data is not lane.home.data:
            self.trainer.vector.use_storage(lane.home)

    def _assign(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the places of each lane's jobs.

        The quotient is added so that numbers that are multiples of K are spread, too.
        """
        places: list[list[int]] = [[] for _ in self.lanes]
        for place, number in enumerate(numbers):
            places[(number + number // self.count) % self.count].append(place)
        return places

    def _fill(self, lane: L, waiting: list[int], jobs: JobHandler) -> None:
        """End the lane's client if it is done, and begin the next one that is ready."""
        while lane.batch is None:
            try:
                if lane.work is not None:
                    self._end(lane, jobs)
                    continue
                index = next(filter(jobs.is_ready, waiting), None)
                if index is None:
                    return
                lane.index = index
                waiting.remove(index)
                self._begin(lane, jobs)
            except (Exception, SystemExit) as error:  # one client must not take the others down
                jobs.fail(lane.index, error)
                lane.work = lane.batch = None

    def _begin(self, lane: L, jobs: JobHandler) -> None:
        self.enter(lane)
        lane.work = jobs.begin(lane.index)
        lane.step = 0
        self.start(lane)
        lane.batch = next(lane.work.batches, None)

    def _end(self, lane: L, jobs: JobHandler) -> None:
        self.enter(lane)
        self.finish(lane)
        self.trainer.end(lane.client)
        jobs.end(lane.index, lane.client)
        lane.work = None
