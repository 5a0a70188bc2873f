"""Who is dispatched when and whose results have arrived: the run on virtual time, without any training in it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from raysim.api.composition import owners
from raysim.api.messages import Job
from raysim.primitives.streams import stream
from raysim.simulation.dispatcher import InFlightJob
from raysim.simulation.fleet import Fleet
from raysim.simulation.private_states import PrivateStates
from raysim.simulation.schedule import Aggregate, Dispatch, Schedule, View, check_concurrency
from raysim.simulation.server import Server
from raysim.training.run_spec import RunSpec


class Planner:
    """Follows the schedule on virtual time, draws the clients, and makes their jobs."""

    def __init__(
        self,
        spec: RunSpec,
        schedule: Schedule,
        fleet: Fleet,
        server: Server,
        private: PrivateStates,
    ):
        self.spec, self.schedule, self.fleet, self.server = spec, schedule, fleet, server
        self.private = private
        self.eligible = np.flatnonzero(server.counts)
        check_concurrency(schedule, server.counts)
        self.now = 0.0
        self.cohorts = 0  # drawn so far
        self.dispatched = 0  # jobs so far
        self.participations: dict[int, int] = {}  # by client: its jobs so far
        self.in_flight: dict[int, InFlightJob] = {}  # dispatched, not aggregated; by number
        self.running: list[tuple[float, int, int]] = []  # heap of (finish, client, number)
        self.arrived: list[int] = []  # numbers of jobs that wait for their aggregation, in order of acceptance
        self.floats = {"down": 0, "up": 0}  # sent so far
        self.once = 0  # floats that a client receives at its first participation only
        self._costers = owners(spec.methods, "cost")

    def look_ahead(self, download: int) -> list[InFlightJob]:
        """Go on until the schedule aggregates; the jobs that it takes, in order of acceptance.

        download: floats that every client of the current version receives.
        """
        while True:
            idle = len(self.eligible) - len(self.running)
            action = self.schedule.decide(View(len(self.running), self.arrived, idle))
            if isinstance(action, Aggregate):
                self.arrived = self.arrived[len(action.jobs) :]
                return [self.in_flight.pop(number) for number in action.jobs]
            if isinstance(action, Dispatch):
                self._dispatch(action.count, download)
            else:
                self._next_instant()

    def put_back(self, taken: Sequence[InFlightJob]) -> None:
        """Undo the last `look_ahead`: the aggregation that it was for does not take place."""
        self.arrived = [job.number for job in taken] + self.arrived
        self.in_flight |= {job.number: job for job in taken}
        self.in_flight = dict(sorted(self.in_flight.items()))

    def _next_instant(self) -> None:
        """Advance the clock to the next arrival and take all arrivals of that instant, ties by client id."""
        self.now = self.running[0][0]
        while self.running and self.running[0][0] == self.now:
            _, _, number = heapq.heappop(self.running)
            job = self.in_flight[number]
            job.staleness = self.server.version - job.version
            self.floats["up"] += job.up
            self.arrived.append(number)

    def _dispatch(self, count: int, download: int) -> None:
        """Send so many idle clients off with the current version."""
        for client in self._sample(count):
            job = self._job(client, download)
            self.in_flight[job.number] = job
            heapq.heappush(self.running, (job.finish, client, job.number))

    def _job(self, client: int, download: int) -> InFlightJob:
        """The next job of this client, and what it costs."""
        earlier = self.participations.get(client, 0)
        self.participations[client] = earlier + 1
        samples = int(self.server.counts[client])
        trained = self.spec.settings.local.budget(samples)
        costs = [method.cost(self.server, samples, trained, earlier) for method in self._costers]
        extras = self.server.sent_to(client)
        message = Job(
            number=self.dispatched,
            client=client,
            participation=earlier,
            version=self.server.version,
            state=self.private.dispatch(client, self.dispatched),
            weight=self.server.weight(client),
            extras=extras,
            probe=self.spec.settings.evaluate.probes(self.server.version + 1),
        )
        self.dispatched += 1
        once = self.once if earlier == 0 else 0
        work = trained + sum(cost.samples for cost in costs)
        down = download + once + sum(a.size for a in extras.values()) + sum(cost.down for cost in costs)
        up = self.server.layout.shared + sum(cost.up for cost in costs)
        self.floats["down"] += down
        return InFlightJob(
            message, self.now + self.fleet.duration(self.spec.settings.seed, client, work, down, up), work, up
        )

    def _sample(self, count: int) -> list[int]:
        """Idle clients, uniformly without replacement, ascending; its cost grows with the cohort."""
        busy = np.searchsorted(self.eligible, np.sort(np.array([client for _, client, _ in self.running], np.int64)))
        generator = stream(self.spec.settings.seed, "cohort", self.cohorts)
        self.cohorts += 1
        ranks = generator.choice(len(self.eligible) - len(busy), size=count, replace=False)
        places = ranks + np.searchsorted(busy - np.arange(len(busy)), ranks, side="right")  # step over the busy ones
        return [int(client) for client in np.sort(self.eligible[places])]
