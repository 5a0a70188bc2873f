"""Read samples of the data set as normalised tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from raysim.api.context import Batch, Plan
from raysim.api.declarations import Task
from raysim.api.messages import Job
from raysim.data.batches import Pipeline
from raysim.data.partition import CSR
from raysim.primitives.streams import stream
from raysim.training.batch_plan import BatchPlanner
from raysim.training.transfer import to_device

# Number of floats that are gathered and normalised at once: so many that calls take little time,
# so few that they fit into the cache.
CHUNK_FLOATS = 1 << 20


class ClientData:
    """The samples of all clients, on the device of a worker.

    inputs, labels: [n, ...], as the data set stores them (images: uint8 [n, c, h, w]).
    partition: the rows of each client's training samples.
    """

    def __init__(
        self,
        task: Task,
        inputs: Tensor,
        labels: Tensor,
        partition: CSR,
        pipeline: Pipeline,
        seed: int,
    ):
        self.task, self.inputs, self.partition, self.seed = task, inputs, partition, seed
        self.labels = labels.to(task.dtype) if labels.is_floating_point() else labels
        self.pipeline = pipeline
        self.row_floats = int(np.prod(task.shape))

    def gather(
        self, rows: np.ndarray, generator: np.random.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return normalised inputs and labels of rows of the data set.

        generator: the source of random numbers for augmentation; None does not augment.
        """
        index = to_device(rows, self.inputs.device)
        stored = self.inputs.index_select(0, index)
        if generator is not None:
            stored = self.pipeline.augment_images(stored, generator)
        return self.pipeline.normalise(stored, self.task.dtype), self.labels.index_select(0, index)

    def gather_parts(self, rows: np.ndarray, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised inputs and labels of rows in order, `size` rows at a time."""
        for start in range(0, len(rows), size):
            yield self.gather(rows[start : start + size])

    def client_samples(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's training samples in order, in batches for evaluation."""
        size = max(1, min(1024, CHUNK_FLOATS // self.row_floats))
        return self.gather_parts(self.partition.rows(client), size)

    def class_counts(self, client: int) -> Tensor:
        """Return how many training samples of each class the client has: int64 [C] on the CPU."""
        rows = torch.from_numpy(self.partition.rows(client)).to(self.labels.device)
        labels = self.labels.index_select(0, rows).cpu()
        return torch.bincount(labels, minlength=self.task.num_classes)

    def batches(self, plan: Plan, rows: np.ndarray, purpose: str, *keys: int) -> Iterator[Batch]:
        """Yield the batches of a plan.

        plan: the positions of the samples in each batch, as indices into `rows`.
        rows: rows of the data set.
        purpose, keys: text and numbers that decide the random numbers for augmentation.
        """
        rows = rows[plan.positions]
        generator = stream(self.seed, purpose, *keys) if self.pipeline.augment else None
        start = first = 0
        while first < plan.steps:
            last, stop = first, start
            while last < plan.steps and (
                last == first or (stop - start + plan.sizes[last]) * self.row_floats <= CHUNK_FLOATS
            ):
                stop += plan.sizes[last]
                last += 1
            inputs, labels = self.gather(rows[start:stop], generator)
            sizes = plan.sizes[first:last]
            for x, y in zip(inputs.split(sizes), labels.split(sizes), strict=True):
                yield Batch(x, y, x, y)
            start, first = stop, last


class PreparedBatches:
    """The batches of many small jobs, which are read with one data access before the jobs begin.

    Separate accesses would be slower: the overhead of an access takes longer than copying a small
    job's data.
    """

    def __init__(self, data: ClientData, planner: BatchPlanner):
        self.data, self.planner = data, planner
        self._prepared: dict[int, tuple[Plan, list[Batch]]] = {}  # by job

    def has(self, job: Job) -> bool:
        """Return True if the batches of a job are prepared."""
        return job.number in self._prepared

    def pop(self, job: Job) -> tuple[Plan, list[Batch]] | None:
        """Remove and return the plan and the batches of a job; None if they are not prepared."""
        return self._prepared.pop(job.number, None)

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Prepare the batches of the next jobs with one data access of up to `CHUNK_FLOATS` values.

        Prepare nothing if fewer than two jobs fit, if a method selects samples, or if inputs are
        augmented.

        jobs: the next jobs, in their order.
        """
        # Selection and augmentation are possible only after a job has begun.
        if self.planner.selector is not None or self.data.pipeline.augment:
            return
        fitting = self._jobs_in_chunk([job for job in jobs if not self.has(job)])
        if len(fitting) < 2:
            return
        plans: list[tuple[int, Plan]] = []
        rows: list[np.ndarray] = []
        for job in fitting:
            client_rows = self.data.partition.rows(job.client)
            plan = self.planner.plan_all(len(client_rows), job.client, job.participation)
            plans.append((job.number, plan))
            rows.append(client_rows[plan.positions])
        inputs, labels = self.data.gather(np.concatenate(rows))
        sizes = [size for _, plan in plans for size in plan.sizes]
        parts = zip(inputs.split(sizes), labels.split(sizes), strict=True)
        for number, plan in plans:
            batches = [Batch(x, y, x, y) for x, y in islice(parts, plan.steps)]
            self._prepared[number] = plan, batches

    def _jobs_in_chunk(self, jobs: Sequence[Job]) -> list[Job]:
        fitting: list[Job] = []
        free_rows = CHUNK_FLOATS / self.data.row_floats
        for job in jobs:
            free_rows -= self.planner.local.budget(len(self.data.partition.rows(job.client)))
            if free_rows < 0:
                break
            fitting.append(job)
        return fitting
