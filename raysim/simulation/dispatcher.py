"""Send jobs to workers and collect the updates.

No result depends on where and when a job is trained. The jobs of the next aggregation are sent
without delay. Later jobs wait in a queue, until a worker has fewer than two unanswered training
calls.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from raysim.api.messages import Failure, GroupSums, Job, TrainingResult, Update
from raysim.simulation.assignment import (
    StateHome,
    assign_consecutive_jobs,
    assign_groups,
    assign_units,
    total_work,
    units_by_client,
)
from raysim.simulation.calls import Call, WorkerCalls
from raysim.simulation.client_states import ClientStates, StateUse
from raysim.simulation.group_sums import Group, RemoteSum, SumTrees, fetch_sums
from raysim.simulation.job_queue import JobQueue
from raysim.simulation.runtime import Runtime
from raysim.simulation.versions import Versions

# One call to a worker returns at most this many floats of updates (256 MiB), or one larger update.
MAX_CALL_FLOATS = 1 << 26
# Training calls per worker: it works on one while the message of the other one is sent.
MAX_CALLS = 2
BUNDLE_S = 0.02  # a call contains at least this many seconds of work, if enough jobs wait


@dataclass(eq=False)
class TrainCall(Call):
    """A call in which a worker trains jobs.

    groups: the groups of jobs for which the worker returns one sum of all updates.
    floats: the number of floats that the call returns, without client states.
    is_collected: True if an aggregation has used at least one update.

    Results that no aggregation has used:

    updates: the received updates and failures, by the number of the job.
    sums: the received sums, by group.
    remote_sums: references to the sums that are still on the worker's node, by group.
    """

    jobs: Sequence[Job] = ()
    groups: Sequence[Group] = ()
    floats: int = 0
    updates: dict[int, Update | Failure] = field(default_factory=dict)
    sums: dict[Group, np.ndarray] = field(default_factory=dict)
    remote_sums: dict[Group, RemoteSum] = field(default_factory=dict)
    is_collected: bool = False

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients that the worker trains in this call, ascending."""
        return tuple(sorted({job.client for job in self.jobs}))

    def copy_out_of_store(self) -> None:
        """Copy this call's unused updates and sums from the object store to process memory.

        Unused means that no aggregation has used them yet. Afterwards the object store can free the
        result of the call.
        """
        for number, update in self.updates.items():
            if not isinstance(update, Update) or update.delta is None:
                continue
            if not update.delta.flags.writeable:  # an array in a store is read-only
                self.updates[number] = copy.deepcopy(update)
        for group, total in self.sums.items():
            if not total.flags.writeable:
                self.sums[group] = total.copy()


class Dispatcher:
    """The object that decides which worker trains which jobs, and in which calls.

    versions: the published versions, from which jobs start.
    floats: the number of floats in an update's parameters.
    has_lanes: True if workers train several clients at once.
    """

    def __init__(
        self,
        calls: WorkerCalls,
        runtime: Runtime,
        client_states: ClientStates,
        versions: Versions,
        floats: int,
        has_lanes: bool,
    ):
        self._calls, self._runtime = calls, runtime
        self._client_states, self._versions = client_states, versions
        self._floats, self._has_lanes = floats, has_lanes
        # The most vectors that one call returns; a sum is one vector.
        self._max_vectors = max(1, MAX_CALL_FLOATS // max(1, floats))
        self._queue = JobQueue()
        self._trees = SumTrees()
        # By job: its call, from the time it is sent to a worker until it is collected.
        self._call_of: dict[int, TrainCall] = {}
        # By worker: the samples in its unanswered training calls.
        self._loads: defaultdict[int, float] = defaultdict(float)
        # Jobs that workers have not answered; the client states that these jobs leave do not exist
        # yet.
        self._unanswered: set[int] = set()
        self._trained_samples = 0.0  # samples in all answered calls
        # By worker: reported seconds of work, and the recent share of time that its GPU worked.
        self.busy_s: dict[str, float] = {}
        self.device_use: dict[str, float] = {}
        # Floats of the results that are not collected yet, without client states.
        self.pending_floats = 0
        calls.when_answered, calls.when_moved = self._receive, self._move

    # --- dispatch ---------------------------------------------------------------------------------
    def enqueue(self, job: Job, aggregation: int) -> None:
        """Put a job into the queue, from which it is sent to a worker later.

        aggregation: the number (from 0) of the aggregation that will use the job's update.
        """
        self._queue.put(job, aggregation)

    def plan_sums(self, group: Group) -> None:
        """Allow workers to sum the updates of an aggregation, instead of sending each update.

        Call this once for each replica that aggregates.
        group: the numbers of the jobs, in the order of aggregation.
        """
        self._trees.plan(group)

    def submit(self, jobs: Sequence[Job], aggregation: int) -> None:
        """Send all jobs of the next aggregation to workers, if they were not sent earlier.

        Workers with few unanswered calls also get jobs of later aggregations.
        jobs: the jobs, in the order of aggregation.
        aggregation: the number of the aggregation, from 0.
        """
        waiting = {job.number for job in self._queue.take_all(aggregation)}
        unsent = [job for job in jobs if job.number in waiting]
        for worker, worker_jobs in self._assign(unsent).items():
            for chunk in self._chunks(worker_jobs):
                self._send(worker, chunk)
        self._fill_workers()

    def _active_loads(self) -> list[float]:
        """Return the load of each active worker: the number of samples that it still has to train.

        A worker is active if it gets new calls (`WorkerCalls.active`). The loads are in the order
        of the workers' numbers.
        """
        return [self._loads[worker] for worker in self._calls.active]

    def _active_nodes(self) -> list[int]:
        nodes = self._runtime.nodes
        return [nodes[worker] for worker in self._calls.active]

    def _adds_on_nodes(self, nodes: Iterable[int]) -> bool:
        """Return True if at least one of these nodes adds up the sums of its workers.

        The coordinator's node (number 0) never does so. No node does so if the model is smaller
        than `Runtime.combine_from`.
        """
        return self._floats >= self._runtime.combine_from and any(nodes)

    def _assign(self, jobs: Sequence[Job]) -> dict[int, list[Job]]:
        """Divide an aggregation's jobs among workers; return the jobs by the worker's number.

        A worker without jobs has no entry. If clients have states, each client's jobs are in the
        order of their dispatch.
        """
        workers, loads, nodes = self._calls.active, self._active_loads(), self._active_nodes()
        groups = self._trees.groups(job.number for job in jobs)
        if groups and not self._client_states.stateful:
            job_of = {job.number: job for job in jobs}
            whole = [[job_of[number] for number in group] for group in groups]
            if self._has_lanes:
                consecutive = [*itertools.chain(*whole)]
                shares = assign_consecutive_jobs(consecutive, loads, nodes)
            else:
                shares = assign_groups(whole, loads, nodes, keeps_nodes=self._adds_on_nodes(nodes))
            return {worker: share for worker, share in zip(workers, shares, strict=True) if share}
        units = units_by_client(jobs)
        assigned: dict[int, list[Job]] = {}
        places = assign_units(units, loads, nodes, self._home)
        for unit, place in zip(units, places, strict=True):
            assigned.setdefault(workers[place], []).extend(unit)
        return assigned

    def _chunks(self, jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
        """Divide a worker's jobs into calls, each of which returns a limited number of vectors.

        A vector is the update of a job, or the sum of the updates of several jobs.
        """
        if len(jobs) <= self._max_vectors:
            yield jobs
            return
        units = [[job] for job in jobs]
        groups = self._trees.groups(job.number for job in jobs)
        if groups and not self._client_states.stateful:
            job_of = {job.number: job for job in jobs}
            units = [[job_of[number] for number in group] for group in groups]
        for start in range(0, len(units), self._max_vectors):
            chunk: list[Job] = []
            for unit in units[start : start + self._max_vectors]:
                chunk += unit
            yield chunk

    def _home(self, client: int) -> StateHome | None:
        """Return the active worker that has, or will have, a client's newest state.

        `StateHome.worker` is the worker's position in the list of active workers. Return None if no
        active worker has the newest state.
        """
        newest = self._client_states.newest_state(client)
        if newest is None or newest[0] not in self._calls.active:
            return None
        return StateHome(self._calls.active.index(newest[0]), newest[1] in self._unanswered)

    def _fill_workers(self) -> None:
        """Send queued jobs to workers until each has `MAX_CALLS` unanswered training calls.

        The worker with the smallest load is first. A worker gets fewer calls if the queue has no
        job for this worker.
        """
        if not self._queue:
            return
        for worker in sorted(self._calls.active, key=self._loads.__getitem__):
            while self._count_train_calls(worker) < MAX_CALLS:
                bundle = self._take_bundle(worker)
                if not bundle:
                    break
                self._send(worker, bundle)

    def _count_train_calls(self, worker: int) -> int:
        return sum(isinstance(call, TrainCall) for call in self._calls.unanswered(worker))

    def _take_bundle(self, worker: int) -> list[Job]:
        """Remove jobs for a worker's next training call from the queue, and return these jobs.

        A job stays in the queue if a different worker has, or will have, the client's newest state.
        An idle worker may take one such job if the state exists already.
        """
        is_idle = not self._calls.unanswered(worker)

        def accepts(job: Job, is_first: bool) -> bool:
            home = self._home(job.client)
            if home is None or self._calls.active[home.worker] == worker:
                return True
            return is_idle and is_first and not home.is_pending

        sample_s = BUNDLE_S  # before the first answer a bundle is one job
        if self._trained_samples:
            sample_s = sum(self.busy_s.values()) / self._trained_samples
        max_samples = BUNDLE_S / sample_s if sample_s else math.inf
        return self._queue.take_bundle(accepts, self._max_vectors, max_samples)

    def _send(self, worker: int, jobs: Sequence[Job]) -> None:
        """Let a worker train these jobs in one call.

        If the worker is not on the coordinator's node, the sums of updates may stay on the worker's
        node. `fetch_sums` fetches them later.
        """
        numbers = [job.number for job in jobs]
        groups = self._trees.summed_groups(numbers)
        uses: list[StateUse] = []
        if self._client_states.stateful:
            states = [self._client_states.dispatch(job.client, job.number) for job in jobs]
            jobs = [job._replace(state=state) for job, state in zip(jobs, states, strict=True)]
            uses = [StateUse(job.client, job.state, job.number) for job in jobs]
        # A lost sum is trained again, and a client's state may have changed by then.
        is_apart = bool(groups) and not uses and self._adds_on_nodes([self._runtime.nodes[worker]])
        method = "train_apart" if is_apart else "train"
        call = self._start(worker, method, jobs, groups, uses)
        self._call_of.update(dict.fromkeys(numbers, call))

    def _start(
        self,
        worker: int,
        method: str,
        jobs: Sequence[Job],
        groups: Sequence[Group],
        uses: Sequence[StateUse] = (),
    ) -> TrainCall:
        """Start a call in which a worker trains jobs; return the call.

        method: "train" sends the sums of updates to the coordinator; "train_apart" leaves the sums
        on the worker's node.
        groups: the groups of jobs whose updates the worker sums.
        """
        versions = list(dict.fromkeys(version for job in jobs for version in job.received))
        # A job sends less than its delta where clients have replicas of their own.
        floats = sum(max(job.up, self._floats) for job in jobs)
        floats -= self._floats * (sum(map(len, groups)) - len(groups))
        refs = [self._versions.ref(version) for version in versions]
        call = TrainCall(
            worker,
            method,
            (jobs, groups, len(versions), *refs),
            uses,
            remote_values=len(groups) if method == "train_apart" else 0,
            jobs=jobs,
            groups=groups,
            floats=floats,
        )
        self.pending_floats += floats
        self._loads[worker] += total_work(jobs)
        self._unanswered.update(job.number for job in jobs)
        return self._calls.start(call)

    # --- answers ----------------------------------------------------------------------------------
    def _receive(self, call: Call) -> None:
        """Record the answer of a worker, and send more jobs to the worker."""
        if isinstance(call, TrainCall):
            result: TrainingResult = call.value
            call.value = None  # its parts are collected one by one
            call.updates = {update.job: update for update in result.updates}
            call.sums = dict(result.sums)
            # This waits for the answer, because a repeated call returns other references.
            node = self._runtime.nodes[call.worker]
            for group, ref in zip(call.groups, call.remote_refs, strict=False):
                call.remote_sums[group] = RemoteSum(group, node, ref)
            call.remote_refs = ()
            self.busy_s[result.worker] = self.busy_s.get(result.worker, 0.0) + result.busy
            if result.device is not None:
                self.device_use[result.worker] = result.device
            work = total_work(call.jobs)
            self._loads[call.worker] -= work
            self._trained_samples += work
            self._unanswered.difference_update(call.updates)
            self._client_states.note_sizes(result)
        self._fill_workers()

    def _move(self, call: Call, previous: int) -> None:
        """Record that a call of the worker `previous` was given to the worker `call.worker`."""
        if isinstance(call, TrainCall):
            work = total_work(call.jobs)
            self._loads[previous] -= work
            self._loads[call.worker] += work

    def calls_of(self, jobs: Sequence[Job]) -> list[TrainCall]:
        """Return the calls that train these jobs, without repetitions."""
        return list(dict.fromkeys(self._call_of[job.number] for job in jobs))

    def collect(self, jobs: Sequence[Job]) -> tuple[list[Update | Failure], GroupSums]:
        """Wait until the jobs of an aggregation are trained; return their updates and their sums.

        The first result has an update or a failure for each job. The second result has the sums of
        updates that workers made. If an update is in a sum, its entry in the first result has no
        delta.
        jobs: the jobs, in the order of aggregation.
        """
        calls = self.calls_of(jobs)
        for call in calls:
            self._calls.wait(call)
        updates = [self._call_of.pop(job.number).updates.pop(job.number) for job in jobs]
        sums = self.fetch_sums(calls, {job.number for job in jobs})
        for call in calls:
            if not call.is_collected:
                call.is_collected = True
                self.pending_floats -= call.floats
                call.copy_out_of_store()
        self._trees.forget(job.number for job in jobs)
        return updates, sums

    def fetch_sums(
        self, calls: Sequence[TrainCall], numbers: Collection[int]
    ) -> dict[Group, np.ndarray]:
        """Fetch the sums of updates that workers made for one aggregation; return them by group.

        If a sum was lost with its node, the jobs of this sum are trained again.
        numbers: the numbers of the aggregation's jobs.
        """
        sums: dict[Group, np.ndarray] = {}
        remote: list[RemoteSum] = []
        for call in calls:
            for group in call.groups:
                if group[0] not in numbers:
                    continue
                if group in call.sums:
                    sums[group] = call.sums.pop(group)
                elif group in call.remote_sums:
                    remote.append(call.remote_sums.pop(group))
        if not remote:
            return sums
        fetched, lost = fetch_sums(remote, self._trees, self._runtime)
        if lost:
            fetched |= self._train_again(calls, lost)
        return sums | fetched

    def _train_again(
        self, calls: Sequence[TrainCall], groups: Sequence[Group]
    ) -> dict[Group, np.ndarray]:
        """Train jobs again because sums of their updates were lost; return the new sums.

        calls: the calls that trained the jobs before.
        groups: the job numbers of each lost sum.
        """
        job_of = {job.number: job for call in calls for job in call.jobs}
        repeated: list[TrainCall] = []
        for group in groups:
            worker = min(self._calls.active, key=self._loads.__getitem__)
            jobs = [job_of[number] for number in group]
            repeated.append(self._start(worker, "train", jobs, [group]))
        sums: dict[Group, np.ndarray] = {}
        for call in repeated:
            self._calls.wait(call)
            self.pending_floats -= call.floats
            sums |= call.sums
        return sums
