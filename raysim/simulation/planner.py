"""The run on virtual time: which client is dispatched when with which version, and how every job ends.

The plan is a function of configuration and seed alone and does not depend on training. So it can be made ahead of
the training, and the end of every job is known before a worker gets it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from raysim.api.messages import Arrays, Job
from raysim.primitives.streams import stream, stream_key, uniform
from raysim.simulation.availability import Availability
from raysim.simulation.events import RunStoppedError
from raysim.simulation.fleet import Devices
from raysim.simulation.idle_clients import IdleClients
from raysim.simulation.schedule import (
    Aggregate,
    Discard,
    Dispatch,
    Schedule,
    View,
    Wait,
    check_concurrency,
)

# Draws from the whole population: so many per requested client, before idle clients are listed. Where clients come and
# go, so many more, before `IdleClients` tracks the available ones.
DRAWS_PER_CLIENT, EXTRA_DRAWS = 16, 64
BLOCK = 8  # numbers that are cheaper to draw at once than one by one
# Tracking stops when at least one in so many of the population is idle and available, and the request can be filled.
PLENTIFUL_SHARE = 8
MAX_CONSECUTIVE_LOST_JOBS = 10_000  # before a run gives up


_NO_EXTRAS: Arrays = {}


class NoClientsLeftError(RunStoppedError):
    """No client will become available again."""


class Load(NamedTuple):
    """What a job asks of its client: samples (extra passes counted), and floats down and up."""

    work: float
    down: int
    up: int


@dataclass
class PlannedAggregation:
    """An aggregation, and all that happens between the one before and this one."""

    version: int = 0  # the model version that its updates are added to: aggregations made before
    now: float = 0.0  # virtual seconds of the aggregation
    dispatched: list[Job] = field(default_factory=list)  # with `version` as their base version
    aggregated: list[Job] = field(default_factory=list)  # in the order in which they enter the sum
    lost: list[Job] = field(default_factory=list)  # their clients dropped out
    discarded: list[Job] = field(default_factory=list)
    down: int = 0  # floats sent to clients since the start of the run
    up: int = 0  # floats sent by clients since the start of the run

    @property
    def staleness(self) -> list[int]:
        """The staleness of each aggregated job."""
        return [self.version - job.version for job in self.aggregated]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PlannedAggregation:
        """Return the aggregation that `to_json` wrote."""
        names = ("dispatched", "aggregated", "lost", "discarded")
        jobs = {name: [Job(*job) for job in values[name]] for name in names}
        return cls(**{**values, **jobs})


def _places(generator: np.random.Generator, clients: int, count: int) -> Iterator[int]:
    """Draws in blocks that grow, until listing all clients would have cost less."""
    size, left = 2 * count, max(DRAWS_PER_CLIENT * count, clients)
    while left > 0:
        if size < BLOCK:  # the same numbers, at a third of the cost where the first one will do
            yield from (int(generator.integers(clients)) for _ in range(size))
        else:
            yield from generator.integers(clients, size=size).tolist()
        left, size = left - size, 2 * size


class Planner:
    """Follows a schedule over a fleet.

    counts: int64 [clients] training samples; a client without any is never dispatched. load: returns what a job asks of
    the client, given client, version, its earlier participations, and how many of those were aggregated.
    """

    def __init__(
        self,
        schedule: Schedule,
        devices: Devices,
        seed: int,
        counts: np.ndarray,
        load: Callable[[int, int, int, int], Load],
        patience: float = math.inf,
    ):
        self.schedule, self.devices, self.seed, self._load = schedule, devices, seed, load
        check_concurrency(schedule, counts)
        self.eligible = np.flatnonzero(counts)
        self._members = self._pools(counts)
        self._pool_of = np.full(len(counts), -1, np.int16)  # [clients]
        for pool, members in enumerate(self._members):
            self._pool_of[members] = pool
        self._scarce: set[int] = set()  # pools of which hardly anybody is there
        self._waiting: dict[int, IdleClients] = {}  # by pool, of those
        self._keys: dict[str, int] = {}  # of numbers that are looked up, by purpose
        self._short: set[int] = set()  # pools of which too few were there, at this moment
        self.now, self.version = 0.0, 0
        self.cohorts = 0  # drawn so far
        self.dispatched = 0  # jobs so far
        self.participations = np.zeros(len(counts), np.int32)  # [clients] jobs so far
        self.accepted = np.zeros(
            len(counts), np.int32
        )  # [clients] jobs that entered an aggregation
        self.running: dict[int, Job] = {}  # by number: whose result may still be used
        self.arrived: list[Job] = []  # that wait for an aggregation, in order of arrival
        self._events: list[tuple[float, int, Job]] = []  # heap by (time, client) of jobs that end
        self._busy: set[int] = set()
        self._in_pool = [0] * max(0, schedule.pools)
        self._seen = MappingProxyType(self.running)
        self._sent, self._since = 0, 0.0  # jobs of this version, and when the first was sent
        self._next = PlannedAggregation()
        self._patience = patience
        self._lost_in_a_row = 0  # jobs lost since one arrived

    def _pools(self, counts: np.ndarray) -> list[np.ndarray]:
        """The clients of each pool, fastest first: by the seconds of a client's first job."""
        if not self.schedule.pools:
            return []
        work = np.zeros(len(counts))
        work[self.eligible] = np.fromiter(
            (self._load(client, 0, 0, 0).work for client in self.eligible.tolist()), float
        )
        _, down, up = self._load(int(self.eligible[0]), 0, 0, 0)
        seconds = self.devices.seconds(work, down, up)[self.eligible]
        order = self.eligible[np.argsort(seconds, kind="stable")]
        return [np.sort(part) for part in np.array_split(order, self.schedule.pools)]

    def contributed(self, floats: int) -> None:
        """Count what clients sent before the first aggregation."""
        self._next.up += floats

    # --- aggregations --------------------------------------------------------------------------------------------
    def next_aggregation(self) -> PlannedAggregation:
        """Advance virtual time until the schedule aggregates.

        Raises RuntimeError if the schedule contradicts itself, NoClientsLeftError if no client will become available
        again, and ValueError if the first one does not become available soon enough.
        """
        self._short.clear()
        while True:
            action = self.schedule.decide(self._view())
            if isinstance(action, Aggregate):
                return self._aggregate(action.jobs)
            if isinstance(action, Dispatch):
                if self._dispatch(action.count, action.pool) < action.count:
                    again = action.pool < 0 or action.pool in self._short
                    self._short.add(action.pool)
                    if again:
                        self._advance(self._next_arrival())
            elif isinstance(action, Discard):
                self._discard(action.jobs)
            elif isinstance(action, Wait):
                self._advance(
                    min(action.until, self._next_arrival()) if self._short else action.until
                )
            else:
                raise RuntimeError(
                    f"{self._name}: decide returned {action!r}. Return Dispatch, Aggregate, Discard or Wait"
                )

    @property
    def _name(self) -> str:
        return f"schedule {type(self.schedule).__name__}"

    def _view(self) -> View:
        idle = len(self.eligible) - len(self._busy)
        return View(
            self.now, self.version, self._seen, self.arrived, idle, self._sent, self._since, self._in_pool, self._short
        )  # fmt: skip

    def _advance(self, until: float) -> None:
        """To the next instant at which jobs end, and take all of them, ties by client id; or to `until` before that."""
        self._short.clear()
        events = self._events
        if not events or events[0][0] > until:
            if until == math.inf:
                raise RuntimeError(
                    f"{self._name}: decide returned Wait, but no job is in flight and no client will become available"
                )
            self.now = max(self.now, until)
            return
        self.now = events[0][0]
        while events and events[0][0] == self.now:
            self._end(heapq.heappop(events)[2])
        self._expire()

    def _end(self, job: Job) -> None:
        self._busy.discard(job.client)
        for pool, waiting in self._waiting.items():
            if pool < 0 or self._pool_of[job.client] == pool:
                waiting.back(job.client)
        if job.arrives:
            self._next.up += job.up
        if self.running.pop(job.number, None) is None:
            return  # it was discarded
        self._leave_pool(job)
        if job.arrives:
            self.arrived.append(job)
            self._lost_in_a_row = 0
        else:
            self._next.lost.append(job)
            self._lost_in_a_row += 1
            if self._lost_in_a_row == MAX_CONSECUTIVE_LOST_JOBS:
                raise ValueError(
                    f"fleet: {MAX_CONSECUTIVE_LOST_JOBS:,} jobs in a row were lost, because clients went offline or "
                    "dropped out before they finished. Increase fleet.on or fleet.hours, reduce local work, or lower "
                    "fleet.dropout"
                )

    def _leave_pool(self, job: Job) -> None:
        if job.pool >= 0:
            self._in_pool[job.pool] -= 1

    def _expire(self) -> None:
        """Discard what is too stale for the next aggregation."""
        most = self.schedule.max_staleness
        if most is None or not self.arrived:
            return
        if late := [job.number for job in self.arrived if self.version - job.version > most]:
            self._discard(late)

    def _discard(self, numbers: Sequence[int]) -> None:
        if not numbers:
            raise RuntimeError(
                f"{self._name}: decide returned Discard([]), which would repeat forever. Name at least one job"
            )
        jobs: dict[int, Job] = {}
        for number in numbers:
            if (job := self.running.pop(number, None)) is not None:
                self._leave_pool(job)
                jobs[number] = job
        jobs |= self._remove_arrived(set(numbers) - jobs.keys(), "discard")
        self._next.discarded += [jobs[number] for number in numbers]

    def _remove_arrived(self, numbers: set[int], purpose: str) -> dict[int, Job]:
        """Remove jobs from those that have arrived, and return them by number."""
        removed = {job.number: job for job in self.arrived if job.number in numbers}
        if missing := sorted(numbers - removed.keys()):
            raise RuntimeError(
                f"{self._name}: cannot {purpose} jobs {missing}, which are not there"
            )
        self.arrived = [job for job in self.arrived if job.number not in numbers]
        return removed

    def _aggregate(self, numbers: Sequence[int]) -> PlannedAggregation:
        """Return the planned aggregation of these jobs."""
        count = len(numbers)
        jobs = self.arrived[:count]
        if count and [job.number for job in jobs] == list(numbers):
            self.arrived = self.arrived[count:]
        else:
            jobs = self._chosen(numbers)
        step = self._next
        step.now, step.aggregated = self.now, jobs
        for job in jobs:
            self.accepted[job.client] += 1
        self.version += 1
        self._sent, self._since = 0, self.now
        self._next = PlannedAggregation(self.version, down=step.down, up=step.up)
        self._expire()
        return step

    def _chosen(self, numbers: Sequence[int]) -> list[Job]:
        """Return these arrived jobs, in this order. A client's jobs have to keep the order of their dispatch."""
        if not numbers or len(set(numbers)) < len(numbers):
            raise RuntimeError(
                f"{self._name}: Aggregate needs one or more distinct job numbers, got {list(numbers)}"
            )
        removed = self._remove_arrived(set(numbers), "aggregate")
        jobs = [removed[number] for number in numbers]
        left: dict[int, int] = {}  # by client: its first job that goes on waiting
        before: dict[int, int] = {}  # by client: its job in front of the one that is looked at
        for job in self.arrived:
            left.setdefault(job.client, job.number)
        for job in jobs:
            if not before.get(job.client, -1) < job.number < left.get(job.client, self.dispatched):
                raise RuntimeError(
                    f"{self._name}: job {job.number} of client {job.client} would be aggregated before the client's "
                    "earlier job"
                )
            before[job.client] = job.number
        return jobs

    # --- dispatch ------------------------------------------------------------------------------------------------
    def _dispatch(self, count: int, pool: int) -> int:
        """Dispatch up to `count` idle clients with the current version; return the number dispatched."""
        clients = self._sample(count, pool)
        for client in clients:
            earlier = self.participations.item(client)
            self.participations[client] = earlier + 1
            work, down, up = self._load(client, self.version, earlier, self.accepted.item(client))
            finish, arrives = self.devices.trip(client, earlier, self.now, work, down, up)
            # By position: names would double the time, and this is a large part of what a job costs the plan.
            # State, weight, probe and extras are set when the coordinator dispatches the job.
            job = Job(
                self.dispatched, client, earlier, self.version, -1, 1.0, False, _NO_EXTRAS,
                pool, self.now, finish, arrives, work, down, up,
            )  # fmt: skip
            self.dispatched += 1
            self._next.down += down
            self._next.dispatched.append(job)
            self._start(job)
        if clients and not self._sent:
            self._since = self.now
        self._sent += len(clients)
        if pool >= 0:
            self._in_pool[pool] += len(clients)
        return len(clients)

    def _start(self, job: Job) -> None:
        self.running[job.number] = job
        self._busy.add(job.client)
        for waiting in self._waiting.values():
            waiting.sent(job.client)
        heapq.heappush(self._events, (job.finish, job.client, job))

    def _sample(self, count: int, pool: int) -> list[int]:
        """Idle, available clients, uniformly without replacement, ascending.

        Its cost grows with the cohort, and not with the population or with the clients at work: clients are drawn from
        all and put back if they are busy or away. Where hardly anybody is there, they are drawn from those.
        """
        members, presence = (
            self._members[pool] if pool >= 0 else self.eligible,
            self.devices.presence,
        )
        cohort, self.cohorts = self.cohorts, self.cohorts + 1
        if presence is None:
            return self._idle(members, count, stream(self.seed, "cohort", cohort))
        if pool not in self._scarce:
            most = DRAWS_PER_CLIENT * count + EXTRA_DRAWS
            places = (
                int(number * len(members))
                for number in self._numbers("cohort.places", cohort, count)
            )
            if (
                len(drawn := self._drawn(members, itertools.islice(places, most), count, presence))
                == count
            ):
                return sorted(drawn)
            self._scarce.add(pool)
        waiting = self._who_waits(pool)
        if PLENTIFUL_SHARE * len(waiting) > len(members) and len(waiting) >= count:
            self._scarce.discard(pool)
            del self._waiting[pool]
        return waiting.draw(count, self._numbers("cohort.waiting", cohort, count))

    def _idle(self, members: np.ndarray, count: int, generator: np.random.Generator) -> list[int]:
        """Return up to `count` idle clients of a population that is always available."""
        if not self._busy:
            return sorted(
                generator.choice(members, size=min(count, len(members)), replace=False).tolist()
            )
        drawn = self._drawn(members, _places(generator, len(members), count), count)
        if len(drawn) < count:
            free = self._busy | drawn
            if rest := [client for client in members.tolist() if client not in free]:
                most = min(count - len(drawn), len(rest))
                drawn.update(generator.choice(rest, size=most, replace=False).tolist())
        return sorted(drawn)

    def _drawn(
        self,
        members: np.ndarray,
        places: Iterable[int],
        count: int,
        presence: Availability | None = None,
    ) -> set[int]:
        """Return `count` idle, available clients from these places, or as many as there are."""
        busy, now = self._busy, self.now
        drawn: set[int] = set()
        for place in places:
            client = members.item(place)
            if (
                client not in busy
                and client not in drawn
                and (presence is None or presence.available(client, now))
            ):
                drawn.add(client)
                if len(drawn) == count:
                    break
        return drawn

    def _numbers(self, purpose: str, cohort: int, count: int) -> Iterator[float]:
        """Yield uniform numbers in [0, 1) without end.

        Few are made one by one, because a generator costs as much as ten of them.
        """
        if count < EXTRA_DRAWS:
            if (place := self._keys.get(purpose)) is None:
                place = self._keys[purpose] = stream_key(self.seed, purpose)
            return (uniform(place, cohort, each) for each in itertools.count())
        generator = stream(self.seed, purpose, cohort)
        return itertools.chain.from_iterable(
            generator.random(2 * count).tolist() for _ in itertools.count()
        )

    def _who_waits(self, pool: int) -> IdleClients:
        """Return the tracker of the pool's available, idle clients."""
        if (waiting := self._waiting.get(pool)) is None:
            presence = self.devices.presence
            assert presence is not None
            members = self._members[pool] if pool >= 0 else self.eligible
            waiting = self._waiting[pool] = IdleClients(presence, members, self._busy, self.now)
        waiting.at(self.now)
        return waiting

    def _next_arrival(self) -> float:
        """Return when the next client of the short pools becomes available; infinity if never."""
        if self.devices.presence is None:
            return math.inf
        at = min(self._who_waits(pool).next_arrival() for pool in self._short)
        if not self.dispatched and at > self._patience:
            never = "no client will ever be available"
            raise ValueError(
                f"fleet: nobody is available at the start, and {never if at == math.inf else f'for {at:,.0f} s'}: "
                "choose fleet.availability=always, or raise fleet.patience"
            )
        if at == math.inf and not self._events:
            raise NoClientsLeftError(
                f"fleet: no client will be available any more after {self.now:,.0f} s of virtual time and "
                f"{self.version} aggregations: let its trace begin again with fleet.wrap=true, or set "
                f"rounds={self.version}"
            )
        return at

    # --- checkpoints ---------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """All that it holds, as JSON; `participations` and `accepted` apart."""
        return {
            "now": self.now,
            "version": self.version,
            "cohorts": self.cohorts,
            "dispatched": self.dispatched,
            "sent": self._sent,
            "since": self._since,
            "scarce": sorted(self._scarce),
            "events": [job for _, _, job in sorted(self._events)],
            "discarded": sorted({job.number for _, _, job in self._events} - self.running.keys()),
            "arrived": self.arrived,
            "step": self._next.to_json(),
        }

    def restore(
        self, state: dict[str, Any], participations: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Continue from a stored state; for a planner that has not planned anything yet."""
        self.now, self.version = state["now"], state["version"]
        self.cohorts, self.dispatched = state["cohorts"], state["dispatched"]
        self._sent, self._since = state["sent"], state["since"]
        self._scarce = set(state["scarce"])
        self.participations, self.accepted = (
            np.array(participations, np.int32),
            np.array(accepted, np.int32),
        )
        discarded = set(state["discarded"])
        for job in (Job(*each) for each in state["events"]):
            self._start(job)
            if job.number in discarded:
                del self.running[job.number]
            elif job.pool >= 0:
                self._in_pool[job.pool] += 1
        self.running = dict(sorted(self.running.items()))
        self._seen = MappingProxyType(self.running)
        self.arrived = [Job(*each) for each in state["arrived"]]
        self._next = PlannedAggregation.from_json(state["step"])
