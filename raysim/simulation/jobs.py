"""The jobs of a run with their states, from the plan to their end.

If the planner is ahead of the training, the end of a job is known soon after its dispatch. Only
jobs whose updates will be aggregated are sent to workers.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from raysim.api.messages import Failure, Job, Update
from raysim.simulation.dispatcher import Dispatcher
from raysim.simulation.events import JobRecord
from raysim.simulation.planner import NoClientsLeftError, PlannedAggregation, Planner
from raysim.simulation.replicas import Replicas
from raysim.simulation.versions import Versions
from raysim.training.run_spec import RunSettings

MAX_PLANNED_AGGREGATIONS = 64  # the planner is at most this far ahead of the server


class JobState(enum.StrEnum):
    """The state of a job, from the plan to its end.

    PLANNED: the base version of the job does not exist yet.
    DISPATCHED: the base version exists, but it is not known yet how the job will end.
    IN_FLIGHT: it is known that the update will be aggregated, so a worker will train the job.
    FAILED: the job raised an error, or its result is not finite.
    LOST: the client dropped out or became unavailable.
    DISCARDED: the update was too stale, or is not needed.
    """

    PLANNED = "planned"
    DISPATCHED = "dispatched"
    IN_FLIGHT = "in flight"
    AGGREGATED = "aggregated"
    FAILED = "failed"
    LOST = "lost"
    DISCARDED = "discarded"


# States in which a job holds its base version: a worker may still have to start from it.
_HOLDING = (JobState.DISPATCHED, JobState.IN_FLIGHT)


@dataclass(slots=True)
class JobRow:
    """A planned job, its state, and the aggregation that will use its update.

    aggregation: the number of this aggregation, from 0. -1 means that the aggregation is not known
    yet, or that no aggregation will use the update.
    """

    job: Job
    state: JobState = JobState.PLANNED
    aggregation: int = -1


class JobTable:
    """The planned jobs that have not ended, and the planned aggregations.

    versions: the published versions. A version is kept while a job that starts from it has the
    state DISPATCHED or IN_FLIGHT.
    """

    def __init__(
        self,
        planner: Planner,
        replicas: Replicas,
        versions: Versions,
        dispatcher: Dispatcher,
        settings: RunSettings,
    ):
        self._planner, self._replicas, self._versions = planner, replicas, versions
        self._dispatcher, self._settings = dispatcher, settings
        self._rows: dict[int, JobRow] = {}  # by number of the job
        self._dispatched = 0  # rows in the state `DISPATCHED`
        # Planned, and not made by the server yet.
        self._aggregations: deque[PlannedAggregation] = deque()

    @property
    def rows(self) -> Iterable[JobRow]:
        """The planned jobs that have not ended, each with its state."""
        return self._rows.values()

    @property
    def aggregations(self) -> Sequence[PlannedAggregation]:
        """The planned aggregations that the server has not made yet, in order."""
        return self._aggregations

    def jobs_of(self, aggregation: PlannedAggregation) -> list[Job]:
        """Return the jobs of a planned aggregation, in the order in which they are aggregated.

        Until a job is dispatched, some of its fields, such as `weight`, have default values.
        """
        return [self._rows[job.number].job for job in aggregation.aggregated]

    # --- the plan ---------------------------------------------------------------------------------
    def next_aggregation(self) -> PlannedAggregation:
        """Dispatch the jobs of the next aggregation, and return this aggregation.

        Then plan further aggregations, until the end of every dispatched job is known, but at most
        `MAX_PLANNED_AGGREGATIONS`. Plan none if the plan depends on updates of the returned
        aggregation.
        Raises NoClientsLeftError if no aggregation can be planned.
        """
        if not self._aggregations:
            self.plan()
        aggregation = self._aggregations[0]
        self._dispatch(aggregation)
        end = min(self._settings.rounds, self._replicas.version + MAX_PLANNED_AGGREGATIONS)
        while self._planner.plans_ahead and self._dispatched and self._planner.version < end:
            if not self._try_to_plan():
                break
        return aggregation

    def look_ahead(self) -> None:
        """Plan the aggregation after the next one, while workers train.

        Do nothing if it is planned already, or if the plan depends on the training.
        """
        if not self._planner.plans_ahead:
            return
        if len(self._aggregations) < 2 and self._planner.version < self._settings.rounds:
            self._try_to_plan()

    def _try_to_plan(self) -> bool:
        """Plan one more aggregation; return False if no clients are left for it.

        In that case the run stops after the server has made all planned aggregations.
        """
        try:
            self.plan()
        except NoClientsLeftError:
            return False
        return True

    def plan(self) -> None:
        """Plan one more aggregation.

        Raises NoClientsLeftError if no clients are left for it.
        """
        aggregation = self._planner.next_aggregation()
        self._aggregations.append(aggregation)
        for job in aggregation.dispatched:
            self._rows[job.number] = JobRow(job)
        self._plan_sums(aggregation)
        for job in aggregation.aggregated:
            row = self._rows[job.number]
            row.aggregation = aggregation.version
            if row.state is JobState.DISPATCHED:
                self._put_in_flight(row)
        for job in aggregation.lost:
            self._set_state(self._rows[job.number], JobState.LOST)
        for job in aggregation.discarded:
            self._set_state(self._rows[job.number], JobState.DISCARDED)

    def _plan_sums(self, aggregation: PlannedAggregation) -> None:
        """Let workers sum the updates of an aggregation, unless single updates are needed."""
        decomposes = self._settings.evaluate.decomposes(aggregation.version + 1)
        if decomposes or not self._replicas.summable:
            return
        trees: dict[int, list[int]] = {}  # by replica
        for job in aggregation.aggregated:
            trees.setdefault(self._replicas.replica_of(job.client), []).append(job.number)
        for tree in trees.values():
            self._dispatcher.plan_sums(tuple(tree))

    # --- from one state to the next ---------------------------------------------------------------
    # Only this function changes the state of a job. A job gets the state LOST or DISCARDED as soon
    # as the planner has decided it, and leaves the table with the first aggregation after its end.
    def _set_state(self, row: JobRow, state: JobState) -> None:
        has_held, holds = row.state in _HOLDING, state in _HOLDING
        self._dispatched += (state is JobState.DISPATCHED) - (row.state is JobState.DISPATCHED)
        row.state = state
        if holds and not has_held:
            for version in row.job.received:
                self._versions.hold(version)
        elif has_held and not holds:
            for version in row.job.received:
                self._versions.release(version)

    def _dispatch(self, aggregation: PlannedAggregation) -> None:
        """Dispatch the jobs that are planned to be dispatched before an aggregation.

        Set the fields of these jobs that the planner cannot know, such as `weight`.
        """
        replicas = self._replicas
        probe = self._settings.evaluate.probes(replicas.version + 1)
        bases = tuple(replicas.numbers) if replicas.network.chosen_by_loss else ()
        for planned in aggregation.dispatched:
            row = self._rows[planned.number]
            if row.state is not JobState.PLANNED:
                continue
            client = planned.client
            replica = replicas.replica_of(client)
            server, base = replicas.servers[replica], replicas.numbers[replica]
            row.job = planned.dispatched(
                server.weight(client), probe, server.sent_to(client), replica, base, bases
            )
            if row.aggregation >= 0:
                self._put_in_flight(row)
            else:
                self._set_state(row, JobState.DISPATCHED)

    def _put_in_flight(self, row: JobRow) -> None:
        self._set_state(row, JobState.IN_FLIGHT)
        self._dispatcher.enqueue(row.job, row.aggregation)

    def end(
        self, aggregation: PlannedAggregation, updates: Sequence[Update | Failure]
    ) -> tuple[JobRecord, ...]:
        """Remove the ended jobs of an aggregation from this table; return a record of each job.

        The ended jobs are the aggregated, lost and discarded jobs of `aggregation`.
        updates: an update or a failure for each job in `aggregation.aggregated`, in the same order.
        """
        self._aggregations.popleft()
        for job, update in zip(aggregation.aggregated, updates, strict=True):
            state = JobState.FAILED if isinstance(update, Failure) else JobState.AGGREGATED
            self._set_state(self._rows[job.number], state)
        ended = (*aggregation.aggregated, *aggregation.lost, *aggregation.discarded)
        return tuple(self._remove(job.number, aggregation) for job in ended)

    def _remove(self, number: int, aggregation: PlannedAggregation) -> JobRecord:
        row, staleness = self._rows.pop(number), 0
        if row.aggregation >= 0:
            staleness = aggregation.site_version - row.job.version
        return self._record(row.job, row.state, aggregation.version + 1, staleness)

    def unfinished(self) -> tuple[JobRecord, ...]:
        """Return a record of each job that has not ended when the run ends.

        The state in these records is "in flight". Jobs that were aggregated, lost, discarded or
        failed before are not among them.
        """
        next_round = self._replicas.version + 1
        return tuple(self._record(row.job, JobState.IN_FLIGHT, next_round, 0) for row in self.rows)

    def _record(self, job: Job, state: JobState, round_number: int, staleness: int) -> JobRecord:
        return JobRecord(
            job.client,
            job.participation,
            job.version,
            job.start,
            job.finish,
            state.value,
            round_number,
            staleness,
            *self._planner.cost_of(job),
        )

    # --- checkpoints ------------------------------------------------------------------------------
    def restore(self, aggregations: Iterable[PlannedAggregation], rows: Iterable[JobRow]) -> None:
        """Continue from a checkpoint; the planner must already be restored.

        Jobs that were in flight get the state DISPATCHED. `resume` lets workers train them again.
        aggregations, rows: the planned aggregations and the jobs in the checkpoint.
        """
        self._aggregations.extend(aggregations)
        for row in rows:
            state, row.state = row.state, JobState.PLANNED
            self._rows[row.job.number] = row
            self._set_state(row, JobState.DISPATCHED if state in _HOLDING else state)
        for aggregation in self._aggregations:
            self._plan_sums(aggregation)
            for job in aggregation.aggregated:
                self._rows[job.number].aggregation = aggregation.version

    def resume(self) -> None:
        """Let workers train the restored jobs that will be aggregated; workers must be ready."""
        for row in self.rows:
            if row.state is JobState.DISPATCHED and row.aggregation >= 0:
                self._put_in_flight(row)
