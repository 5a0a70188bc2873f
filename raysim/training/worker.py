"""Define the worker, which trains and scores many clients on one device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from raysim.api.client_state import ClientState, StoredState
from raysim.api.messages import (
    Arrays,
    Failure,
    Job,
    PublishedVersion,
    ScoringReport,
    ScoringTask,
    SetReport,
    TrainingResult,
    Update,
)
from raysim.primitives.spans import Spans
from raysim.training.batched_lanes import BatchedLanes
from raysim.training.broadcast import Broadcast, Receiver
from raysim.training.client_vector import copy_client_state
from raysim.training.determinism import allow_tf32, make_deterministic
from raysim.training.job_loop import OneByOne
from raysim.training.lanes import LaneLoop
from raysim.training.local_probe import probe_local_model
from raysim.training.profile import WORKER_CALLS, WorkerTrack, gpu_utilization, watch
from raysim.training.recorded_lanes import RecordedLanes
from raysim.training.resident import StateHandle
from raysim.training.run_spec import RunSpec, declare_run
from raysim.training.scorer import Scorer
from raysim.training.step_mode import check_step_mode
from raysim.training.trainer import RunningJob, Trainer
from raysim.training.transfer import MemoryCopies, dataset_on_device
from raysim.training.updates import UpdateBuilder
from raysim.training.worker_states import WorkerStates
from raysim.training.worker_sums import SeparateSums, WorkerSums
from raysim.vectors.layout import Vector


class Worker(SeparateSums):
    """A worker: it trains and scores many clients on one device, and keeps their states."""

    def __init__(self, spec: RunSpec, name: str = "worker-0"):
        make_deterministic(spec.threads)
        self.spec, self.name = spec, name
        self.device = torch.device(spec.device)
        self.declarations = declare_run(spec)
        self.layout = self.declarations.layout
        check_step_mode(spec, self.declarations)
        self.vector = Vector(self.declarations.networks, self.layout, self.device, spec.dtype)
        self.receiver = Receiver(self.device)
        self.copies = MemoryCopies(self.device)
        self.states = WorkerStates(
            self.vector,
            self.declarations,
            spec.data.partition.all_train,
            spec.settings.state.device_bytes,
        )
        self.trainer = self._make_trainer()
        self.loop = self._make_loop()
        self.updates = UpdateBuilder(spec, self.trainer, self.copies, name)
        self.scorer = Scorer(spec, self.trainer, self.states, self.receiver)
        self.probed_rows = np.empty(0, np.int64)
        self._busy_s = 0.0  # seconds of work that are not yet in a training result
        self.spans = self._watch() if spec.profile else None

    def _make_trainer(self) -> Trainer:
        spec, partition = self.spec, self.spec.data.partition
        inputs, labels = dataset_on_device(spec.data.open(), self.device)
        for declared in self.declarations.methods:
            if declared.change_labels is not None:
                labels = declared.change_labels(labels)
        return Trainer(
            task=spec.task,
            vector=self.vector,
            declarations=self.declarations,
            local=spec.settings.local,
            inputs=inputs,
            labels=labels,
            partition=partition.all_train,
            pipeline=spec.data.pipeline,
            seed=spec.settings.seed,
            precision=spec.autocast,
        )

    def _make_loop(self) -> OneByOne | LaneLoop[Any]:
        """Return the loop that trains jobs: one by one, in lanes, or by replaying recordings."""
        if self.spec.graph:
            return RecordedLanes(self.trainer, self.spec.lanes)
        if self.spec.lanes > 1:
            return BatchedLanes(self.trainer, self.spec.lanes)
        return OneByOne(self.trainer)

    def _watch(self) -> Spans:
        """Start to measure how long this worker's calls and their parts take."""
        trainer = self.trainer
        parts: list[tuple[object, dict[str, str]]] = [
            (self, WORKER_CALLS),
            (self, {"add_to_sums": "sums"}),
            (self.receiver, {"receive": "copies", "tensors": "copies"}),
            (self.states, {"get": "copies"}),
            (self.copies, {"copy": "copies", "wait": "copies"}),
            (trainer, {"load": "copies", "steps": "steps"}),
            (trainer.data, {"gather": "gathering"}),
            (trainer.prepared, {"prepare": "gathering"}),
            (self.loop, {"step_lanes": "steps"}),
        ]
        return watch(parts, self.device)

    @property
    def personalises(self) -> bool:
        """True if a method makes each client's own model before the client is scored."""
        return bool(self.scorer.personalisers)

    def ready(self) -> str:
        """Return the worker's name. The call returns when the worker is ready."""
        return self.name

    def store_constants(self, constants: Arrays, probed_rows: np.ndarray) -> None:
        """Store the rows for probes, and the tensors that clients receive only once in a run.

        constants: these tensors, with keys "method.name".
        probed_rows: the rows of the central test set on which `evaluate.probe` scores local models.
        """
        self.receiver.store_constants(constants)
        self.probed_rows = probed_rows

    def release(self, clients: Sequence[int]) -> None:
        """Forget the states of clients whose newest state is on another worker."""
        self.states.release(clients)

    def profile(self) -> WorkerTrack:
        """Return the wall and CPU times of this worker since the last call of `profile`.

        The result has separate times for each kind of work.
        """
        assert self.spans is not None, "only a run with profile=true asks for it"
        calls = [(span.start, span.stop) for span in self.spans.calls]
        return WorkerTrack(self.spans.take(self.name), calls)

    def contribute(self, clients: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return the arrays that each client sends before round 0, by "method.name"."""
        contributions = []
        for client in clients:
            view = self.trainer.contribution(client)
            arrays: dict[str, np.ndarray] = {}
            for declared in self.declarations.methods:
                if declared.contribute is None:
                    continue
                for name, array in declared.contribute(view).items():
                    arrays[f"{declared.method}.{name}"] = array
            contributions.append(arrays)
        return contributions

    # --- training ----------------------------------------------------------------------------
    def train(
        self,
        jobs: Sequence[Job],
        groups: Sequence[tuple[int, ...]],
        versions: int,
        *values: PublishedVersion | StoredState | None,
    ) -> TrainingResult | tuple[TrainingResult | StateHandle, ...]:
        """Train jobs, and add up the deltas of each group of jobs.

        Return a `TrainingResult` with the updates in the order of `jobs`. If clients have states,
        return a tuple: the `TrainingResult`, and then the final client state of each job. A failed
        job ends with the state from which it started.

        groups: the job numbers of each group. The result has the sum of each group in place of the
        deltas of its jobs. A group whose jobs all failed has no sum.
        versions: the number of published versions in `values`.
        values: the published versions, and then one client state for each job, if clients have
        states. None means the initial state, or that this worker has the state.
        """
        since = time.perf_counter()
        published = cast("tuple[PublishedVersion, ...]", values[:versions])
        sent = cast("tuple[StoredState | None, ...]", values[versions:])
        sums = WorkerSums(groups)
        published_of = {version.number: version for version in published}
        results: dict[int, _JobResult] = {}
        # Ascending, because a client's earlier jobs start from earlier versions.
        for version in sorted({job.version for job in jobs}):
            positions = [position for position, job in enumerate(jobs) if job.version == version]
            call = _TrainingCall(
                self,
                [jobs[position] for position in positions],
                published_of,
                [sent[position] for position in positions] if sent else None,
                sums,
            )
            results |= zip(positions, call.train(), strict=True)
        updates = tuple(results[position][0] for position in range(len(jobs)))
        handles = [results[position][1] for position in range(len(jobs))]
        states = [handle for handle in handles if handle is not None]
        totals = {group: self.copies.copy(total) for group, total in sums.totals.items()}
        self.copies.wait()
        busy_s = self._busy_s + time.perf_counter() - since
        self._busy_s = 0.0
        sizes = tuple(handle.size for handle in states)
        use = gpu_utilization(self.device)
        result = TrainingResult(updates, totals, self.name, busy_s, sizes, use)
        return (result, *states) if sent else result

    def add_to_sums(self, sums: WorkerSums, job: Job, delta: Tensor | None) -> None:
        """Add the delta of a job to the sum of its group.

        With `profile=true`, the worker measures the time of this method.
        delta: the change of the parameters; None if the job failed.
        """
        sums.add(job, delta)

    # --- scoring -----------------------------------------------------------------------------
    def evaluate(
        self, tasks: Sequence[ScoringTask], published: PublishedVersion, *states: StoredState | None
    ) -> list[ScoringReport | SetReport]:
        """Score clients or the shared model of the version `published`; return one report per task.

        states: for each task, the client state, or None if this worker has this state. `states` may
        be left out if this worker has all states.
        """
        since = time.perf_counter()
        reports = self.scorer.evaluate(tasks, published, states)
        self._busy_s += time.perf_counter() - since
        return reports

    def scored_tensors(
        self, task: ScoringTask, published: PublishedVersion, sent: StoredState | None = None
    ) -> dict[str, Tensor]:
        """Return all tensors of the model that a task would score, by full name.

        sent: the state of the task's client. None if this worker has this state, or if the scored
        model belongs to no client.
        """
        return self.scorer.scored_tensors(task, published, sent)

    def client_tensors(
        self, task: ScoringTask, sent: StoredState | None = None
    ) -> dict[str, np.ndarray]:
        """Return the client state of the task's client, by the full names of the tensors.

        sent: the client state, if the caller sends it; None means that this worker has the state.
        """
        return self.scorer.client_tensors(task, sent)

    def predictions(
        self, task: ScoringTask, published: PublishedVersion, sent: StoredState | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return labels [n] and the model's outputs [n, C] for a task's rows.

        published: the version whose model is used.
        sent: the client's state, or None if it is on this worker or no client's model is scored.
        """
        return self.scorer.predictions(task, published, sent)


# The update or failure of a job, and in stateful runs its final client state.
_JobResult = tuple[Update | Failure, StateHandle | None]


class _TrainingCall:
    """Jobs of one call of `Worker.train` that start after the same number of aggregations.

    With several replicas, these jobs may start from different vectors.

    published: the versions, by `PublishedVersion.number`.
    sent: the client state of each job. None stands for the initial state, or for a state that this
    worker has. Without client states, `sent` itself is None.
    sums: the sums to which the jobs' deltas are added.
    """

    def __init__(
        self,
        worker: Worker,
        jobs: Sequence[Job],
        published: Mapping[int, PublishedVersion],
        sent: Sequence[StoredState | None] | None,
        sums: WorkerSums,
    ):
        self.worker, self.jobs, self.published = worker, list(jobs), published
        self.sent, self.sums = sent, sums
        self.numbers = [job.number for job in jobs]
        self._order = worker.loop.order(self.numbers)
        self._unfinished = set(self.numbers)
        # By position: the time at which the job began, its first client state and its first vector.
        self._begun: dict[int, tuple[float, ClientState[Tensor], Broadcast]] = {}
        self._results: dict[int, _JobResult] = {}
        self._received: tuple[int, Broadcast] | None = None  # the last version, and its number

    def train(self) -> list[_JobResult]:
        """Train the jobs; return the result of each job."""
        with allow_tf32(self.worker.spec.precision == "tf32"):
            self.worker.loop.train(self)
        return [self._results[position] for position in range(len(self.jobs))]

    def is_ready(self, position: int) -> bool:
        """Return True if a job can begin.

        A job must wait until the job that makes its client state has ended.
        position: the position of the job among the jobs of this call.
        """
        return self.jobs[position].state not in self._unfinished

    def begin(self, position: int) -> RunningJob:
        """Begin a job with its client state and the tensors that its client receives.

        position: the position of the job among the jobs of this call.
        """
        worker, job = self.worker, self.jobs[position]
        sent = None if self.sent is None else self.sent[position]
        state = worker.states.get(job.client, job.state, sent)
        if job.bases:
            received = [self.published[number] for number in job.bases]
            replica = worker.scorer.best_version(job.client, received, state)
            job = self.jobs[position] = job._replace(replica=replica, base=job.bases[replica])
        broadcast = self._receive(job.base)
        self._begun[position] = time.perf_counter(), state, broadcast
        prepared = worker.trainer.prepared
        # A method that trains by itself gathers the samples that it needs.
        uses_batches = worker.trainer.own_training is None
        if uses_batches and not prepared.has(job):
            coming = self._order[self._order.index(position) :]
            prepared.prepare([self.jobs[later] for later in coming])
        download = broadcast.download
        if job.extras:
            download = {**download, **worker.receiver.tensors(job.extras)}
        base, counters = broadcast.base, broadcast.counters
        return worker.trainer.begin(job, base, counters, download, state)

    def _receive(self, number: int) -> Broadcast:
        """Return a version on the device; copy it there unless the previous job used it as well.

        number: the number of the version.
        """
        if self._received is None or self._received[0] != number:
            broadcast = self.worker.receiver.receive(self.published[number])
            self._received = number, broadcast
        return self._received[1]

    def end(self, position: int, running: RunningJob) -> None:
        """Store the update and the client state of a finished job, from the trainer's vector.

        position: the position of the job among the jobs of this call.
        running: the object that `begin` returned for this job.
        """
        worker, job = self.worker, self.jobs[position]
        begun, state, broadcast = self._begun[position]
        seconds = (time.perf_counter() - begun) / worker.spec.lanes
        is_summed = self.sums.has(job)
        probe = None
        if job.probe:
            score_batch = worker.spec.score_batch
            probe = probe_local_model(worker.trainer, running.ctx, worker.probed_rows, score_batch)
        updates, base = worker.updates, broadcast.base
        update, delta = updates.update(job, running, base, seconds, is_summed, probe)
        methods = running.ctx.state
        if worker.layout.has_personal:
            left = copy_client_state(worker.vector, methods)
        else:  # two empty copies would take 5 us per job
            left = ClientState(state.personal, state.counters, methods)
        self._settle(position, update, delta if is_summed else None, left)

    def fail(self, position: int, error: BaseException) -> None:
        """Record that a job has failed, without a change of its client's state.

        position: the index of the job among the jobs of this call.
        Raises `error` if the job had not yet received its client state and its version.
        """
        if position not in self._begun:
            raise error
        failure = self.worker.updates.failure(self.jobs[position], error)
        self._settle(position, failure, None, self._begun[position][1])

    def _settle(
        self,
        position: int,
        update: Update | Failure,
        delta: Tensor | None,
        state: ClientState[Tensor],
    ) -> None:
        job = self.jobs[position]
        self._unfinished.remove(job.number)
        self.worker.add_to_sums(self.sums, job, delta)
        handle = None
        if self.sent is not None:
            handle = self.worker.states.put(job.client, job.number, state)
        self._results[position] = update, handle
