"""Send jobs to workers and collect the updates.

Where and when a job is trained changes no result; it only decides how busy the workers are. The
jobs of the next aggregation are sent at once. Other jobs wait in a queue, in the order in which
they will be aggregated. A worker with fewer than two calls gets several of them in one message.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from raysim.api.messages import Failure, GroupSums, Job, TrainingResult, Update
from raysim.simulation.assignment import (
    StateHome,
    assign_groups_to_nodes,
    assign_units,
    summable_groups,
    total_work,
    units_by_client,
)
from raysim.simulation.calls import Call, WorkerCalls
from raysim.simulation.client_states import ClientStates, StateUse
from raysim.simulation.group_sums import RemoteSum, add_up_on_nodes
from raysim.simulation.job_queue import JobQueue
from raysim.simulation.runtime import Runtime
from raysim.simulation.versions import Versions

# Of deltas that one call to a worker may hold back until it returns (256 MiB).
MAX_CALL_FLOATS = 1 << 26
MAX_CALLS = 2  # to train, on a worker: it works on one while the other travels
BUNDLE_S = 0.02  # seconds of work that are worth a message

Groups: TypeAlias = Mapping[int, tuple[int, ...]]  # by number of a job: the numbers of its group


@dataclass(eq=False)
class TrainCall(Call):
    """A call that trains jobs."""

    jobs: Sequence[Job] = ()
    groups: Sequence[tuple[int, ...]] = ()  # whose deltas the worker sums
    floats: int = 0  # that it returns, client states apart
    # By job: answered, and not collected yet.
    updates: dict[int, Update | Failure] = field(default_factory=dict)
    sums: GroupSums = field(default_factory=dict)
    is_collected: bool = False  # at least one of its updates is

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients that the worker trains in this call, ascending."""
        return tuple(sorted({job.client for job in self.jobs}))


class Dispatcher:
    """The object that decides which worker trains which jobs, in which calls.

    group_size: the most jobs in a sum that a worker makes. floats: the number of floats in a delta.
    """

    def __init__(
        self,
        calls: WorkerCalls,
        runtime: Runtime,
        client_states: ClientStates,
        versions: Versions,
        group_size: int,
        floats: int,
    ):
        self._calls, self._runtime = calls, runtime
        self._client_states, self._versions = client_states, versions
        self._group_size, self._floats = group_size, floats
        # In a call whose deltas are not summed.
        self._max_jobs = max(1, MAX_CALL_FLOATS // max(1, floats))
        self._queue = JobQueue()
        # By job: from its dispatch to a worker until it is collected.
        self._call_of: dict[int, TrainCall] = {}
        # By worker: samples of its unanswered calls to train.
        self._loads: defaultdict[int, float] = defaultdict(float)
        # Jobs on workers; the client states that they leave do not exist yet.
        self._unanswered: set[int] = set()
        self._trained_samples = 0.0  # of all answered calls
        # By worker: reported seconds of work, and the recent share of time that its GPU worked.
        self.busy_s: dict[str, float] = {}
        self.device_use: dict[str, float] = {}
        self.pending_floats = 0  # of the results that are not collected yet, client states apart
        calls.when_answered, calls.when_moved = self._receive, self._move

    # --- dispatch ---------------------------------------------------------------------------------
    def enqueue(self, job: Job, aggregation: int) -> None:
        """Put a job into the queue, to be trained as soon as a worker has time.

        aggregation: the version that the update will be added to.
        """
        self._queue.put(job, aggregation)

    def submit(self, jobs: Sequence[Job], aggregation: int, summable: bool) -> None:
        """Send the jobs of the next aggregation that are still in the queue.

        Then send other jobs to idle workers. jobs: all jobs of the aggregation, in the order of
        acceptance. summable: True if workers may sum their updates.
        """
        waiting = {job.number for job in self._queue.take_all(aggregation)}
        unsent = [job for job in jobs if job.number in waiting]
        has_one_version = len({(job.replica, job.base) for job in jobs}) == 1
        groups: list[list[Job]] = []
        # A group is summed in one call, and a sum starts from one version.
        if (
            summable
            and len(unsent) == len(jobs)
            and has_one_version
            and not self._client_states.stateful
        ):
            groups = summable_groups(jobs, self._group_size, len(self._calls.active))
        group_of = {
            job.number: tuple(member.number for member in group)
            for group in groups
            for job in group
        }
        group_workers = self._workers_on_nodes(groups)
        if group_workers:
            units, workers = groups, group_workers
        else:
            ungrouped = [job for job in unsent if job.number not in group_of]
            units = sorted(groups, key=total_work, reverse=True) + units_by_client(ungrouped)
            workers = assign_units(units, self._active_loads(), self._active_nodes(), self._home)
        jobs_of: dict[int, list[Job]] = {}
        for unit, place in zip(units, workers, strict=True):
            jobs_of.setdefault(self._calls.active[place], []).extend(unit)
        for worker, worker_jobs in jobs_of.items():
            stays_on_node = bool(group_workers) and self._runtime.nodes[worker] > 0
            for chunk in self._chunks(worker_jobs, group_of):
                self._send(worker, chunk, group_of, "train_apart" if stays_on_node else "train")
        self._fill_workers()

    def _active_loads(self) -> list[float]:
        """Return the load of each active worker."""
        return [self._loads[worker] for worker in self._calls.active]

    def _active_nodes(self) -> list[int]:
        """Return the node of each active worker."""
        return [self._runtime.nodes[worker] for worker in self._calls.active]

    def _workers_on_nodes(self, groups: Sequence[Sequence[Job]]) -> list[int]:
        """Return a worker per group such that nodes can add up the sums; none if that is no use.

        A worker is its place among the active ones.
        """
        nodes = self._active_nodes()
        if (
            not groups
            or self._floats < self._runtime.combine_from
            or not any(nodes)
            or any(self._active_loads())
        ):
            return []
        return assign_groups_to_nodes(groups, nodes)

    def _chunks(self, jobs: Sequence[Job], group_of: Groups) -> Iterator[Sequence[Job]]:
        """Split the jobs for a worker into calls, with a limited number of deltas in each."""
        size = len(jobs) if jobs[0].number in group_of else self._max_jobs
        yield from (jobs[start : start + size] for start in range(0, len(jobs), size))

    def _home(self, client: int) -> StateHome | None:
        """Return the worker that has a client's state, as its place among the active workers."""
        place = self._client_states.place(client)
        if place is None or place[0] not in self._calls.active:
            return None
        return StateHome(self._calls.active.index(place[0]), place[1] in self._unanswered)

    def _fill_workers(self) -> None:
        """Send jobs from the queue to workers that have time."""
        if not self._queue:
            return
        for worker in sorted(self._calls.active, key=self._loads.__getitem__):
            while self._count_train_calls(worker) < MAX_CALLS:
                bundle = self._take_bundle(worker)
                if not bundle:
                    break
                self._send(worker, bundle, {}, "train")

    def _count_train_calls(self, worker: int) -> int:
        return sum(isinstance(call, TrainCall) for call in self._calls.unanswered(worker))

    def _take_bundle(self, worker: int) -> list[Job]:
        """Take jobs from the queue for a worker.

        They are jobs of clients whose state this worker or no worker has. The first job of an idle
        worker may be of a client whose state is on another worker.
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
        return self._queue.take_bundle(accepts, self._max_jobs, max_samples)

    def _send(self, worker: int, jobs: Sequence[Job], group_of: Groups, method: str) -> None:
        """Let a worker train these jobs. method: "train_apart" leaves the sums on the worker."""
        uses: list[StateUse] = []
        if self._client_states.stateful:
            states = [self._client_states.dispatch(job.client, job.number) for job in jobs]
            jobs = [job._replace(state=state) for job, state in zip(jobs, states, strict=True)]
            uses = [StateUse(job.client, job.state, job.number) for job in jobs]
        groups = list(dict.fromkeys(group_of[job.number] for job in jobs if job.number in group_of))
        versions = list(dict.fromkeys(version for job in jobs for version in job.received))
        summed_jobs = sum(map(len, groups))
        # A job sends less than its delta where clients have replicas of their own.
        floats = sum(max(job.up, self._floats) for job in jobs)
        floats -= self._floats * (summed_jobs - len(groups))
        call = TrainCall(
            worker,
            method,
            (jobs, groups, len(versions), *(self._versions.refs[version] for version in versions)),
            uses,
            remote_values=len(groups) if method == "train_apart" else 0,
            jobs=jobs,
            groups=groups,
            floats=floats,
        )
        self.pending_floats += floats
        self._loads[worker] += total_work(jobs)
        self._unanswered.update(job.number for job in jobs)
        self._calls.start(call)
        for job in jobs:
            self._call_of[job.number] = call

    # --- answers ----------------------------------------------------------------------------------
    def _receive(self, call: Call) -> None:
        """Record the answer of a worker, and send more jobs to the worker."""
        if isinstance(call, TrainCall):
            result: TrainingResult = call.value
            call.value = None  # its parts are collected one by one
            call.updates = {update.job: update for update in result.updates}
            call.sums = result.sums
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
        """Record that another worker trains the jobs of a call now."""
        if isinstance(call, TrainCall):
            work = total_work(call.jobs)
            self._loads[previous] -= work
            self._loads[call.worker] += work

    def calls_of(self, jobs: Sequence[Job]) -> list[TrainCall]:
        """Return the calls that train these jobs, each once."""
        return list(dict.fromkeys(self._call_of[job.number] for job in jobs))

    def collect(self, jobs: Sequence[Job]) -> tuple[list[Update | Failure], GroupSums]:
        """Return an aggregation's updates, in the order of acceptance, and workers' sums; waits."""
        calls = self.calls_of(jobs)
        for call in calls:
            self._calls.wait(call)
        updates = [self._call_of.pop(job.number).updates.pop(job.number) for job in jobs]
        for call in calls:
            if not call.is_collected:
                call.is_collected = True
                self.pending_floats -= call.floats
                call.updates = {
                    number: _copy_out_of_store(update) for number, update in call.updates.items()
                }
        sums = self.combine_sums(calls, [job.number for job in jobs])
        for call in calls:
            sums |= call.sums
        return updates, sums

    def combine_sums(
        self, calls: Sequence[TrainCall], order: Sequence[int]
    ) -> dict[tuple[int, ...], np.ndarray]:
        """Return the sum of all groups whose sums stayed on their nodes; empty if there are none.

        order: the numbers of the jobs in the order of acceptance.
        """
        position = {number: index for index, number in enumerate(order)}
        sums = [
            RemoteSum(jobs, call.worker, ref)
            for call in calls
            if call.remote_refs
            for jobs, ref in zip(call.groups, call.remote_refs, strict=True)
        ]
        if not sums:
            return {}
        sums.sort(key=lambda each: position[each.jobs[0]])
        return dict(add_up_on_nodes(sums, self._calls, self._runtime, self._floats))


def _copy_out_of_store(update: Update | Failure) -> Update | Failure:
    """Return an update that does not keep a whole result in an object store.

    Arrays in a store are read-only.
    """
    if not isinstance(update, Update) or update.delta is None:
        return update
    return update if update.delta.flags.writeable else copy.deepcopy(update)
