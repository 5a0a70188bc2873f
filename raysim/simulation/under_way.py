"""The jobs of a run between dispatch and aggregation, and the part of the plan that lies ahead of the server.

What becomes of a job is known as soon as the plan has come so far; only what an aggregation will take goes to a host.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from raysim.api.messages import Failure, Job, Outcome
from raysim.simulation.dispatcher import Dispatcher, InFlightJob
from raysim.simulation.events import JobEnd
from raysim.simulation.planner import Deserted, Planner, Step
from raysim.simulation.schedule import PlannedJob
from raysim.simulation.server import Server
from raysim.simulation.snapshot import Plan
from raysim.training.run_spec import RunSettings

_AHEAD = 64  # aggregations, at most, by which the planner is ahead of the server


class UnderWay:
    """Pulls steps from the planner, sends clients off when the server is at their version, and offers jobs to hosts."""

    def __init__(self, planner: Planner, server: Server, dispatcher: Dispatcher, settings: RunSettings):
        self._planner, self._server, self._dispatcher, self._settings = planner, server, dispatcher, settings
        self._steps: deque[Step] = deque()  # planned, not yet made
        self._planned: dict[int, PlannedJob] = {}  # of those steps and what is under way, by number
        self._takers: dict[int, int] = {}  # by job: the version that it is added to, if that is planned
        self._dropped: set[int] = set()  # jobs that are planned to be lost or discarded
        self._undecided: set[int] = set()  # jobs under way of which that is not known yet
        self._messages: dict[int, Job] = {}  # what the host of each job under way is sent
        self._jobs: dict[int, InFlightJob] = {}  # under way, known to be taken
        self._bases: Counter[int] = Counter()  # jobs under way, by base version
        self._freed: list[int] = []  # versions that no job under way starts from any more
        self._sent = -1  # the last version of which the jobs are under way

    def needs(self, version: int) -> bool:
        """Whether a job starts from this version."""
        return version in self._bases

    def freed(self) -> list[int]:
        """The versions that a last job left since this was last asked."""
        freed, self._freed = self._freed, []
        return freed

    def taken(self, step: Step) -> list[InFlightJob]:
        """The jobs that a step aggregates, in their order."""
        return [self._jobs[number] for number, _ in step.taken]

    # --- the plan ------------------------------------------------------------------------------------------------
    def next_step(self) -> Step:
        """The step to the next version; later ones are planned until it is known what becomes of the jobs under way."""
        version = self._server.version
        if not self._steps:
            self.plan()
        step = self._steps[0]
        if self._sent < version:
            self._sent = version
            for job in step.dispatched:
                self._dispatch(job)
        while self._undecided and self._planner.version < min(self._settings.rounds, version + _AHEAD):
            if not self._planned_one():
                break
        return step

    def look_ahead(self) -> None:
        """Plan the step after the next one, while hosts work on that."""
        if len(self._steps) < 2 and self._planner.version < self._settings.rounds:
            self._planned_one()

    def _planned_one(self) -> bool:
        """One more step, if there is one; where clients are gone, that is told once the steps before it are done."""
        try:
            self.plan()
        except Deserted:
            return False
        return True

    def plan(self) -> None:
        """One more step of the planner."""
        version, step = self._planner.version, self._planner.step()
        self._steps.append(step)
        self._planned |= {job.number: job for job in step.dispatched}
        for number, _ in step.taken:
            self._takers[number] = version
            if number in self._undecided:
                self._will_be_taken(number)
        for number in (*step.lost, *step.discarded):
            self._dropped.add(number)
            if number in self._undecided:
                self._undecided.discard(number)
                self._forget(number)

    def _dispatch(self, job: PlannedJob) -> None:
        """A client is sent off with the current version, unless nothing will come of it."""
        if job.number in self._dropped:
            return
        version, extras = self._server.version, self._server.sent_to(job.client)
        weight, probe = self._server.weight(job.client), self._settings.evaluate.probes(version + 1)
        message = Job(job.number, job.client, job.participation, version, -1, weight, probe, extras)
        self._messages[job.number] = message
        self._bases[version] += 1
        self._undecided.add(job.number)
        if job.number in self._takers:
            self._will_be_taken(job.number)

    def _will_be_taken(self, number: int) -> None:
        """A host may train this job."""
        self._undecided.discard(number)
        job = self._jobs[number] = InFlightJob(self._planned[number], self._messages[number], self._takers.pop(number))
        self._dispatcher.offer(job)

    def _forget(self, number: int) -> None:
        """A job is under way no longer."""
        version = self._messages.pop(number).version
        self._bases[version] -= 1
        if not self._bases[version]:
            del self._bases[version]
            self._freed.append(version)
        self._jobs.pop(number, None)

    def made(self, step: Step, outcomes: Sequence[Outcome]) -> tuple[JobEnd, ...]:
        """The server made this step: what became of the jobs that ended in it, of which nothing is known afterwards."""
        self._steps.popleft()
        for number, _ in step.taken:
            self._forget(number)
        fates = [
            (each.number, "failed" if isinstance(outcome, Failure) else "aggregated", each.staleness)
            for each, outcome in zip(step.taken, outcomes, strict=True)
        ]
        fates += [(number, "lost", 0) for number in step.lost] + [(number, "discarded", 0) for number in step.discarded]
        self._dropped.difference_update(step.lost, step.discarded)
        version = self._server.version
        return tuple(_end(self._planned.pop(number), fate, version, staleness) for number, fate, staleness in fates)

    def unfinished(self) -> tuple[JobEnd, ...]:
        """At the end of a run: the jobs that no aggregation takes any more."""
        return tuple(_end(job, "under way", self._server.version + 1) for job in self._planned.values())

    # --- checkpoints ---------------------------------------------------------------------------------------------
    def offer(self) -> None:
        """After `restore`, once hosts can work: let them train what was under way."""
        for number in self._takers.keys() & self._undecided:
            self._will_be_taken(number)

    def state(self) -> Plan:
        """What a checkpoint needs of it."""
        return Plan(self._planner, list(self._steps), self._sent, self._planned.values(), self._messages)

    def restore(self, plan: Plan) -> None:
        """Go on from a checkpoint; the planner is already where it was."""
        self._steps, self._sent = deque(plan.steps), plan.sent
        self._planned, self._messages = {job.number: job for job in plan.jobs}, dict(plan.messages)
        for step in plan.steps:
            self._dropped.update(step.lost, step.discarded)
        self._bases.update(job.version for job in plan.messages.values())
        first = self._planner.version - len(plan.steps)
        self._takers = {each.number: first + index for index, step in enumerate(plan.steps) for each in step.taken}
        self._undecided = set(plan.messages)


def _end(job: PlannedJob, fate: str, version: int, staleness: int = 0) -> JobEnd:
    return JobEnd(job.client, job.participation, job.version, job.start, job.finish, fate, version, staleness)
