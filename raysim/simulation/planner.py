"""Plan a run on virtual time: dispatches, base versions, and how each job ends.

The plan follows from configuration and seed. If the selection needs reports of clients, or if
messages change in size, it also depends on training results. Then an aggregation is planned after
the server has made the previous one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from raysim.api.messages import Arrays, Job, Update
from raysim.api.selection import Random, Selection
from raysim.api.topology import Network, one_replica
from raysim.primitives.streams import stream, stream_key, uniform
from raysim.simulation.availability import Availability
from raysim.simulation.costs import Costs, JobCost
from raysim.simulation.events import RunStoppedError
from raysim.simulation.fleet import Devices, expected_seconds
from raysim.simulation.idle_clients import IdleClients
from raysim.simulation.schedule import (
    Aggregate,
    Discard,
    Dispatch,
    Schedule,
    View,
    Wait,
    check_sites,
)
from raysim.simulation.selector import MeasureLosses, SelectionError, Selector

# For each requested client, this many clients are drawn from all before idle clients are listed. If
# availability changes, EXTRA_DRAWS more are drawn before `IdleClients` tracks the available ones.
DRAWS_PER_CLIENT, EXTRA_DRAWS = 16, 64
BLOCK = 8  # numbers that are cheaper to draw at once than one by one
# Tracking stops when more than 1 of this many clients is idle and available, and the request can be
# met.
PLENTIFUL_SHARE = 8
MAX_CONSECUTIVE_LOST_JOBS = 10_000  # jobs lost in a row after which the run stops


_NO_EXTRAS: Arrays = {}
_NO_COST = JobCost()


class NoClientsLeftError(RunStoppedError):
    """The error of a run in which no client will become available again."""


class Load(NamedTuple):
    """The number of samples that a job processes, and the floats that its client exchanges.

    work: the trained samples, plus what methods add with the hook `cost`. A sample with only a
    forward pass counts as a third.
    down, up: the floats received and sent.
    """

    work: float
    down: int
    up: int


class Messages(Protocol):
    """Compressed messages with the change of the parameters from one version to the next.

    Clients receive these messages in place of all parameters.
    received: int32 [clients], the base version of each client's last job; -1 for a client without a
    job.
    """

    received: np.ndarray

    def saved(self, client: int, version: int) -> int:
        """Return by how many floats messages make a client's next download smaller.

        The result is 0 for a client's first job, or if the parameters are smaller than the
        messages. Call this once for each job, because it records that the client has `version`.
        version: the base version of the client's next job.
        """
        ...


@dataclass(slots=True)
class PlannedAggregation:
    """A planned aggregation, and all events since the previous aggregation.

    version: the number of the run's earlier aggregations.
    site: if each replica has its own schedule, the replica that aggregates; otherwise 0.
    site_version: the number of earlier aggregations of this site.
    site_down, site_up: the floats that the clients of this site have received and sent so far.
    meets: True if the replicas exchange in this aggregation.
    now: the virtual time in seconds; if the replicas exchange, the end of the exchange.
    dispatched, lost, discarded: the jobs with these events since the previous aggregation.
    aggregated: the aggregated jobs, in the order in which their updates are summed.
    down, up: the floats that all clients have received and sent so far.
    between: the floats that replicas have sent to each other so far.
    costs: energy, money and CO2 of the run so far, by column of the history.
    """

    version: int = 0
    site: int = 0
    site_version: int = 0
    site_down: int = 0
    site_up: int = 0
    meets: bool = False
    now: float = 0.0
    dispatched: list[Job] = field(default_factory=list)
    aggregated: list[Job] = field(default_factory=list)
    lost: list[Job] = field(default_factory=list)
    discarded: list[Job] = field(default_factory=list)
    down: int = 0
    up: int = 0
    between: int = 0
    costs: dict[str, float] = field(default_factory=dict)

    @property
    def staleness(self) -> list[int]:
        """The staleness of each aggregated job."""
        return [self.site_version - job.version for job in self.aggregated]

    def to_json(self) -> dict[str, Any]:
        """Return the fields, by name, as values that JSON can store."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PlannedAggregation:
        """Return the aggregation with the fields that `to_json` returned."""
        names = ("dispatched", "aggregated", "lost", "discarded")
        jobs = {name: [Job.from_json(job) for job in values[name]] for name in names}
        return cls(**{**values, **jobs})


def _draw_positions(generator: np.random.Generator, clients: int, count: int) -> Iterator[int]:
    """Yield random positions in an array of clients; a position may be repeated.

    The iterator stops when it would be faster to list all idle clients.
    clients: the length of the array.
    count: the number of different, idle clients that the caller needs.
    """
    size, left = 2 * count, max(DRAWS_PER_CLIENT * count, clients)
    while left > 0:
        # Both branches draw the same numbers. One by one costs a third if the first number is
        # enough.
        if size < BLOCK:
            yield from (int(generator.integers(clients)) for _ in range(size))
        else:
            yield from generator.integers(clients, size=size).tolist()
        left, size = left - size, 2 * size


class Site:
    """The clients for which one schedule decides, and the jobs of these clients.

    A run has one site, or one for each replica if each replica has a schedule.
    pool: the site's replica, or -1 for all clients.
    members: the number of clients of this site that have samples.
    pools: the number of pools into which the schedule divides the clients by their speed.
    """

    def __init__(self, pool: int, members: int, pools: int):
        self.pool, self.members = pool, members
        self.version = 0  # aggregations so far
        # Jobs by number that are in flight and not discarded; schedules see it read-only.
        self.running: dict[int, Job] = {}
        self.running_view = MappingProxyType(self.running)
        self.arrived: list[Job] = []  # wait for an aggregation, in order of arrival
        self.busy = 0  # clients whose jobs have not ended
        self.in_pool = [0] * pools
        self.sent, self.since = 0, 0.0  # jobs of this version, and when the first was dispatched
        self.down, self.up = 0, 0  # floats that its clients received and sent
        self.since_meeting = 0  # aggregations since the replicas exchanged
        self.waits = False  # True while it waits for other sites, to exchange


class Planner:
    """The simulation of a schedule and a fleet on virtual time, without training.

    counts: int64 [clients], the number of training samples of each client. A client without samples
    is never dispatched.
    load: returns the `Load` of a client's next job. It has four arguments: the client, the base
    version, and the numbers of the client's earlier jobs and aggregated jobs.
    patience: the run fails if no client is available in its first `patience` virtual seconds.
    selection: the rule that chooses the clients; None draws at random.
    network: the replicas of the run; None means one replica.
    messages: the compressed changes that clients receive in place of the parameters; None if they
    receive the parameters.
    loads_vary: True if the sizes of messages change. A job is then planned only when its base
    version exists.
    """

    def __init__(
        self,
        schedule: Schedule,
        devices: Devices,
        seed: int,
        counts: np.ndarray,
        load: Callable[[int, int, int, int], Load],
        patience: float = math.inf,
        selection: Selection | None = None,
        network: Network | None = None,
        costs: Costs | None = None,
        messages: Messages | None = None,
        loads_vary: bool = False,
    ):
        self._network = network or one_replica(len(counts))
        check_sites(schedule, counts, self._network)
        self.schedule, self.devices, self.seed = schedule, devices, seed
        # Properties of the schedule and the network, read once and not for each event.
        self._max_staleness = schedule.max_staleness
        self._exchanges = self._network.exchanges
        self._load = load
        self._patience = patience
        self._costs, self._messages = costs, messages
        self._loads_vary = loads_vary
        self.eligible = np.flatnonzero(counts)
        self._members = self._divide_into_pools(counts)
        self._sites = [Site(-1, len(self.eligible), max(0, schedule.pools))]
        if self._network.own_schedules:
            self._members = self._network.members(self.eligible)
            self._sites = [
                Site(pool, len(members), 0) for pool, members in enumerate(self._members)
            ]
        self._pool_of = np.full(len(counts), -1, np.int16)  # [clients]
        for pool, members in enumerate(self._members):
            self._pool_of[members] = pool
        self.now, self.version = 0.0, 0
        self.cohorts = 0  # cohorts drawn so far
        self.dispatched = 0  # jobs so far
        self.participations = np.zeros(len(counts), np.int32)  # [clients] jobs so far
        self.accepted = np.zeros(len(counts), np.int32)  # [clients] jobs in aggregations so far
        self._events: list[tuple[float, int, Job]] = []  # ends of jobs: a heap by time and client
        self._busy: set[int] = set()
        # Exchanges of the replicas so far; with `network.seconds`, the periods that have passed.
        self._met = 0
        self._next = PlannedAggregation()
        self._lost_in_a_row = 0  # jobs lost since one arrived
        self._scarce: set[int] = set()  # pools in which hardly any client is available and idle
        self._idle_clients: dict[int, IdleClients] = {}  # by scarce pool
        self._short: set[int] = set()  # pools that had too few clients at this moment
        self._keys: dict[str, int] = {}  # by purpose: the key of single random numbers
        self._selector: Selector | None = (
            None  # None for `Random`, which `_sample` does in less time
        )
        if selection is not None and type(selection) is not Random:
            self._selector = Selector(
                selection,
                devices,
                seed,
                counts,
                self._members,
                schedule.concurrency,
                load,
                self.participations,
                self.accepted,
            )

    @property
    def plans_ahead(self) -> bool:
        """True if the plan does not depend on the training."""
        if self._loads_vary:
            return False
        return self._selector is None or self._selector.rule.plans_ahead

    def cost_of(self, job: Job) -> JobCost:
        """Return the energy, money and CO2 of a job; zeros if the fleet has no costs."""
        return _NO_COST if self._costs is None else self._costs.of(job)

    def measure_with(self, measure: MeasureLosses) -> None:
        """Set the function with which the selection rule measures the losses of clients.

        measure: returns the loss of the current version for each client. The first argument is the
        clients. The second one is the largest number of samples that a client uses; None uses all.
        """
        if self._selector is not None:
            self._selector.measure = measure

    def report(self, updates: Iterable[Update]) -> None:
        """Pass the reports in the updates of the last aggregation to the selection."""
        if self._selector is not None:
            self._selector.report(updates)

    def _divide_into_pools(self, counts: np.ndarray) -> list[np.ndarray]:
        """Sort clients by the duration of their first job, and divide them into equal pools.

        The sizes of the pools differ by at most one client. Return the numbers of the clients of
        each pool, ascending; the fastest pool is first. Return [] if the schedule has no pools.
        counts: [clients], the number of training samples of each client.
        """
        if not self.schedule.pools:
            return []
        seconds = expected_seconds(self.devices, self._load, self.eligible, len(counts))
        order = self.eligible[np.argsort(seconds[self.eligible], kind="stable")]
        return [np.sort(part) for part in np.array_split(order, self.schedule.pools)]

    def count_contributions(self, floats: int) -> None:
        """Count arrays that clients sent before round 0 as traffic of the first aggregation.

        floats: the number of floats that all clients together sent.
        """
        self._next.up += floats

    def count_unplanned(self, aggregation: PlannedAggregation, floats: int) -> None:
        """Correct the planned traffic for updates that have other sizes than planned.

        aggregation: the last aggregation.
        floats: the number of floats by which its updates together are larger than planned. It is
        negative if they are smaller.
        """
        aggregation.up += floats
        aggregation.site_up += floats
        self._sites[aggregation.site].up += floats
        self._next.up += floats

    @property
    def running(self) -> Mapping[int, Job]:
        """The jobs in flight, by number, without jobs that the schedule has decided to discard."""
        if len(self._sites) == 1:
            return self._sites[0].running_view
        return {number: job for site in self._sites for number, job in site.running.items()}

    @property
    def arrived(self) -> list[Job]:
        """The jobs whose updates have arrived and wait for an aggregation."""
        return [job for site in self._sites for job in site.arrived]

    # --- aggregations -----------------------------------------------------------------------------
    def next_aggregation(self) -> PlannedAggregation:
        """Advance virtual time until the schedule aggregates; return this aggregation.

        Raises RuntimeError for a forbidden action of the schedule.
        Raises SelectionError for a forbidden choice of the selection rule.
        Raises NoClientsLeftError if no client will become available again.
        Raises ValueError if no client is available in the first `patience` seconds, or if
        `MAX_CONSECUTIVE_LOST_JOBS` jobs in a row are lost.
        """
        self._short.clear()
        sites = self._sites
        while True:
            until = math.inf
            for site in sites:
                if site.waits:
                    continue
                decided = self._decide(site)
                if isinstance(decided, PlannedAggregation):
                    return decided
                if decided < until:
                    until = decided
            if self._short:
                until = min(until, self._next_arrival())
            self._advance(until)

    def _decide(self, site: Site) -> PlannedAggregation | float:
        """Execute the schedule's actions for a site until the schedule aggregates or waits.

        If the schedule aggregates, return the planned aggregation. If it waits, return the virtual
        time at which it must decide again, even if no job has ended by then. Infinity means that
        there is no such time.
        site: the clients of one schedule and their jobs.
        """
        decide, in_pool, short = self.schedule.decide, site.in_pool, self._short
        while True:
            view = View(
                self.now, site.version, site.running_view, site.arrived, site.members - site.busy,
                site.sent, site.since, in_pool, short,
            )  # fmt: skip
            action = decide(view)
            if isinstance(action, Aggregate):
                return self._aggregate(site, action.jobs)
            if isinstance(action, Dispatch):
                pool = site.pool if action.pool < 0 else action.pool
                if self._dispatch(site, action.count, pool) < action.count:
                    is_known = action.pool < 0 or pool in self._short
                    self._short.add(pool)
                    if is_known:
                        return math.inf
            elif isinstance(action, Discard):
                self._discard(site, action.jobs)
            elif isinstance(action, Wait):
                return action.until
            else:
                raise RuntimeError(
                    f"{self._name}: decide returned {action!r}. Return Dispatch, Aggregate, "
                    "Discard or Wait."
                )

    @property
    def _name(self) -> str:
        return f"schedule {type(self.schedule).__name__}"

    def _site_of(self, job: Job) -> Site:
        sites = self._sites
        return sites[0] if len(sites) == 1 else sites[job.pool]

    def _advance(self, until: float) -> None:
        """Advance virtual time to the next end of a job, at most to `until`.

        Record the end of all jobs that end at this time, in the order of their clients' numbers.
        """
        self._short.clear()
        events = self._events
        if not events or events[0][0] > until:
            if until == math.inf:
                raise RuntimeError(
                    f"{self._name}: decide returned Wait, but no job is in flight and no client "
                    "will become available. Return Dispatch or Aggregate."
                )
            self.now = max(self.now, until)
            return
        self.now = events[0][0]
        while events and events[0][0] == self.now:
            self._end(heapq.heappop(events)[2])
        if self._max_staleness is not None:
            for site in self._sites:
                self._discard_stale(site)

    def _end(self, job: Job) -> None:
        sites, client = self._sites, job.client
        site = sites[0] if len(sites) == 1 else sites[job.pool]
        self._busy.discard(client)
        if self._costs is not None:
            self._costs.end(job, self.now)
        if self._selector is not None:
            self._selector.end(job, self.now)
        site.busy -= 1
        if self._idle_clients:
            for pool, idle_clients in self._idle_clients.items():
                if pool < 0 or self._pool_of[client] == pool:
                    idle_clients.add_finished(client)
        if job.arrives:
            self._next.up += job.up
            site.up += job.up
        if site.running.pop(job.number, None) is None:
            return  # it was discarded
        if site.in_pool:
            site.in_pool[job.pool] -= 1
        if job.arrives:
            site.arrived.append(job)
            self._lost_in_a_row = 0
            return
        self._next.lost.append(job)
        self._lost_in_a_row += 1
        if self._lost_in_a_row == MAX_CONSECUTIVE_LOST_JOBS:
            raise ValueError(
                f"fleet: {MAX_CONSECUTIVE_LOST_JOBS:,} jobs in a row were lost, because clients "
                "went offline or dropped out before they finished. Increase fleet.on or "
                "fleet.hours, decrease local.epochs or local.steps, or decrease fleet.dropout."
            )

    def _discard_stale(self, site: Site) -> None:
        """Discard the arrived jobs of a site that are too stale for its next aggregation.

        site: the clients for which one schedule decides, and the jobs of these clients.
        """
        if self._max_staleness is None or not site.arrived:
            return
        oldest = site.version - self._max_staleness
        stale = [job.number for job in site.arrived if job.version < oldest]
        if stale:
            self._discard(site, stale)

    def _discard(self, site: Site, numbers: Sequence[int]) -> None:
        if not numbers:
            raise RuntimeError(
                f"{self._name}: decide returned Discard([]), which would repeat forever. Give at "
                "least one job."
            )
        jobs: dict[int, Job] = {}
        for number in numbers:
            job = site.running.pop(number, None)
            if job is not None:
                if site.in_pool:
                    site.in_pool[job.pool] -= 1
                jobs[number] = job
        jobs |= self._remove_arrived(site, set(numbers) - jobs.keys(), "discard")
        self._next.discarded += [jobs[number] for number in numbers]

    def _remove_arrived(self, site: Site, numbers: set[int], purpose: str) -> dict[int, Job]:
        """Remove jobs from the list `site.arrived`; return the removed jobs by number.

        purpose: "aggregate" or "discard", for errors.
        Raises RuntimeError if `site.arrived` lacks one of the jobs.
        """
        removed = {job.number: job for job in site.arrived if job.number in numbers}
        missing = sorted(numbers - removed.keys())
        if missing:
            state, allowed = "whose updates have not arrived", "view.arrived"
            if purpose == "discard":
                state = "which are neither in flight nor waiting for an aggregation"
                allowed = "view.running or view.arrived"
            raise RuntimeError(
                f"{self._name}: decide returned {purpose.capitalize()} with jobs {missing}, "
                f"{state}. Return {purpose.capitalize()} only with jobs of {allowed}."
            )
        site.arrived = [job for job in site.arrived if job.number not in numbers]
        return removed

    def _aggregate(self, site: Site, numbers: Sequence[int]) -> PlannedAggregation:
        """Aggregate arrived jobs of a site on the virtual clock; return the planned aggregation.

        numbers: the numbers of the jobs, in the order in which they are aggregated.
        """
        count = len(numbers)
        jobs = site.arrived[:count]
        if count and [job.number for job in jobs] == list(numbers):
            site.arrived = site.arrived[count:]
        else:
            jobs = self._take_arrived(site, numbers)
        aggregation = self._next
        aggregation.now, aggregation.aggregated = self.now, jobs
        if site.pool > 0:
            aggregation.site = site.pool
        aggregation.site_version = site.version
        aggregation.site_down, aggregation.site_up = site.down, site.up
        if self._costs is not None:
            aggregation.costs = self._costs.totals(self.now)
        for job in jobs:
            self.accepted[job.client] += 1
        if self._selector is not None:
            self._selector.aggregate(jobs, site.version)
        self.version += 1
        site.version += 1
        site.sent, site.since = 0, self.now
        self._next = PlannedAggregation(
            self.version, down=aggregation.down, up=aggregation.up, between=aggregation.between
        )
        if self._max_staleness is not None:
            self._discard_stale(site)
        if self._exchanges:
            self._exchange_if_due(site, aggregation)
        return aggregation

    def _exchange_if_due(self, site: Site, aggregation: PlannedAggregation) -> None:
        """Let the replicas exchange after an aggregation of `site`, if an exchange is due now.

        Virtual time advances to the end of the exchange. Jobs can end in this time, but none is
        dispatched or aggregated. The exchange is added to `aggregation`.
        """
        network = self._network
        site.since_meeting += 1
        if network.seconds:
            is_due = self.now >= (self._met + 1) * network.seconds
        else:
            site.waits = site.since_meeting >= network.every
            is_due = all(other.waits for other in self._sites)
        if not is_due:
            return
        aggregation.meets = True
        aggregation.between += network.link_floats
        self._next.between = aggregation.between
        end = self.now + network.link_seconds
        while self.now < end:
            self._advance(end)
        aggregation.now = end
        self._met = int(end // network.seconds) if network.seconds else self._met + 1
        for other in self._sites:
            other.since_meeting, other.waits = 0, False

    def _take_arrived(self, site: Site, numbers: Sequence[int]) -> list[Job]:
        """Remove jobs from the list `site.arrived`; return the jobs in the order of `numbers`.

        Raises RuntimeError if a job would be aggregated before an earlier job of the same client,
        if `site.arrived` lacks a job, or if `numbers` is empty or has a number twice.
        """
        if not numbers or len(set(numbers)) < len(numbers):
            raise RuntimeError(
                f"{self._name}: decide returned Aggregate({list(numbers)}). Give one or more jobs, "
                "each only once."
            )
        removed = self._remove_arrived(site, set(numbers), "aggregate")
        jobs = [removed[number] for number in numbers]
        first_left: dict[int, int] = {}  # by client: its first job that stays
        for job in site.arrived:
            first_left.setdefault(job.client, job.number)
        previous: dict[int, int] = {}  # by client: its job before the current one
        for job in jobs:
            earliest = previous.get(job.client, -1)
            latest = first_left.get(job.client, self.dispatched)
            if not earliest < job.number < latest:
                raise RuntimeError(
                    f"{self._name}: job {job.number} of client {job.client} would be aggregated "
                    "before the client's earlier job. Change this schedule's decide to aggregate "
                    "a client's jobs in the order of their dispatch."
                )
            previous[job.client] = job.number
        return jobs

    # --- dispatch ---------------------------------------------------------------------------------
    def _dispatch(self, site: Site, count: int, pool: int) -> int:
        """Dispatch up to `count` idle clients of a site; return the number of dispatched clients.

        site: the clients of one schedule and their jobs.
        pool: the pool of clients to draw from; -1 draws from all clients.
        """
        version, selector = site.version, self._selector
        if selector is None:
            clients, loss_pass = self._sample(count, pool), None
        else:
            clients, loss_pass = self._select(count, pool, version), selector.loss_pass
        # Local names for what does not change in the loop: attributes would take 5 % of a plan's
        # time.
        now, number, total_down = self.now, self.dispatched, 0
        participations, load_of, trip = self.participations, self._load, self.devices.trip
        earlier_of, accepted_of = participations.item, self.accepted.item
        messages = self._messages
        jobs: list[Job] = []
        for client in clients:
            earlier = earlier_of(client)
            participations[client] = earlier + 1
            work, down, up = load_of(client, version, earlier, accepted_of(client))
            if messages is not None:
                down -= messages.saved(client, version)
            if loss_pass is None:
                finish, arrives = trip(client, earlier, now, work, down, up)
            else:
                if client in loss_pass.work:
                    down = 0  # it has received the model for the pass
                load = work, down, up
                finish, arrives = loss_pass.trip(self.devices, client, earlier, now, load)
            # Arguments are given by position. By name this call would take twice as long.
            # State, weight, probe, extras, replica, base and bases are set when the coordinator
            # dispatches the job.
            jobs.append(
                Job(
                    number, client, earlier, version, -1, 1.0, False, _NO_EXTRAS,
                    pool, now, finish, arrives, work, down, up,
                )
            )  # fmt: skip
            number += 1
            total_down += down
        self.dispatched = number
        self._next.down += total_down
        self._next.dispatched += jobs
        self._start(site, jobs)
        site.down += total_down
        if jobs and not site.sent:
            site.since = now
        site.sent += len(jobs)
        if site.in_pool:
            site.in_pool[pool] += len(jobs)
        return len(jobs)

    def _start(self, site: Site, jobs: Sequence[Job]) -> None:
        running, busy, events = site.running, self._busy, self._events
        for job in jobs:
            running[job.number] = job
            busy.add(job.client)
            heapq.heappush(events, (job.finish, job.client, job))
        site.busy += len(jobs)
        if self._costs is not None:
            for job in jobs:
                self._costs.start(job, self.now)
        if self._selector is not None:
            for job in jobs:
                self._selector.start(job.client)
        for idle_clients in self._idle_clients.values():
            for job in jobs:
                idle_clients.remove(job.client)

    def _select(self, count: int, pool: int, version: int) -> list[int]:
        """Return up to `count` clients that the selection rule chooses, ascending.

        pool: the pool to choose from; -1 means all clients.
        version: the current version, from which the chosen clients will start.
        """
        selector = self._selector
        assert selector is not None
        decision = self.cohorts
        self.cohorts += 1
        clients = selector.choose(count, pool, self.now, version, decision)
        if selector.loss_pass is not None:
            self._next.down += sum(selector.loss_pass.down.values())
            self._next.up += len(selector.loss_pass.down)
            if self._costs is not None:
                for client, work in selector.loss_pass.work.items():
                    self._costs.add_pass(client, work, selector.loss_pass.down[client], 1)
        if len(clients) == count:
            self._idle_clients.pop(pool, None)
        elif selector.offered and not clients and not self._events:
            raise SelectionError(
                f"{selector.name}: select returned no client, although {selector.offered} clients "
                "can be dispatched and no job is in flight. Return at least one."
            )
        return clients

    def _sample(self, count: int, pool: int) -> list[int]:
        """Draw idle, available clients uniformly without replacement; return them ascending.

        count: the number of clients to draw; if there are fewer, all of them are returned.
        pool: the pool to draw from; -1 means all clients.
        """
        # The cost grows with `count`, and not with the number of all clients: clients are drawn
        # from all clients, and rejected if they are busy or unavailable. Only if very few clients
        # are available, they are drawn from a list of the available ones.
        members = self._members[pool] if pool >= 0 else self.eligible
        presence = self.devices.presence
        cohort = self.cohorts
        self.cohorts += 1
        if presence is None:
            return self._sample_idle(members, count, stream(self.seed, "cohort", cohort))
        if pool not in self._scarce:
            draws = DRAWS_PER_CLIENT * count + EXTRA_DRAWS
            numbers = itertools.islice(self._numbers("cohort.places", cohort, count), draws)
            positions = (int(number * len(members)) for number in numbers)
            drawn = self._draw_free(members, positions, count, presence)
            if len(drawn) == count:
                return sorted(drawn)
            self._scarce.add(pool)
        idle_clients = self._track_idle(pool)
        is_plentiful = PLENTIFUL_SHARE * len(idle_clients) > len(members)
        if is_plentiful and len(idle_clients) >= count:
            self._scarce.discard(pool)
            del self._idle_clients[pool]
        return idle_clients.draw(count, self._numbers("cohort.waiting", cohort, count))

    def _sample_idle(
        self, members: np.ndarray, count: int, generator: np.random.Generator
    ) -> list[int]:
        """Draw up to `count` idle clients of `members`; return them ascending.

        members: the clients to draw from, all of which are always available.
        generator: the source of the random numbers.
        """
        if not self._busy:
            size = min(count, len(members))
            return sorted(generator.choice(members, size=size, replace=False).tolist())
        drawn = self._draw_free(members, _draw_positions(generator, len(members), count), count)
        if len(drawn) < count:
            excluded = self._busy | drawn
            rest = [client for client in members.tolist() if client not in excluded]
            if rest:
                size = min(count - len(drawn), len(rest))
                drawn.update(generator.choice(rest, size=size, replace=False).tolist())
        return sorted(drawn)

    def _draw_free(
        self,
        members: np.ndarray,
        positions: Iterable[int],
        count: int,
        presence: Availability | None = None,
    ) -> set[int]:
        """Return the first `count` different clients that are idle and available, or fewer.

        Try the clients `members[position]` in the order of `positions`.
        presence: the availability of the clients; None means that all are always available.
        """
        busy, now = self._busy, self.now
        drawn: set[int] = set()
        for position in positions:
            client = members.item(position)
            if client in busy or client in drawn:
                continue
            if presence is None or presence.available(client, now):
                drawn.add(client)
                if len(drawn) == count:
                    break
        return drawn

    def _numbers(self, purpose: str, cohort: int, count: int) -> Iterator[float]:
        """Yield uniform random numbers in [0, 1), without end.

        The numbers depend on the run's seed and on all arguments.
        count: about how many numbers the caller needs; it decides how they are drawn.
        """
        if count < EXTRA_DRAWS:
            key = self._keys.get(purpose)
            if key is None:
                key = self._keys[purpose] = stream_key(self.seed, purpose)
            return (uniform(key, cohort, index) for index in itertools.count())
        generator = stream(self.seed, purpose, cohort)
        blocks = (generator.random(2 * count).tolist() for _ in itertools.count())
        return itertools.chain.from_iterable(blocks)

    def _track_idle(self, pool: int) -> IdleClients:
        """Return a pool's list of available, idle clients, updated to the current time."""
        idle_clients = self._idle_clients.get(pool)
        if idle_clients is None:
            presence = self.devices.presence
            assert presence is not None
            members = self._members[pool] if pool >= 0 else self.eligible
            idle_clients = IdleClients(presence, members, self._busy, self.now)
            self._idle_clients[pool] = idle_clients
        idle_clients.advance(self.now)
        return idle_clients

    def _next_arrival(self) -> float:
        """Return the virtual time at which a client of a short pool next becomes available.

        A short pool has fewer idle, available clients than the schedule has just requested. The
        result is infinity if clients are always available. It is also infinity if no client becomes
        available any more, but a job is in flight.

        Raises NoClientsLeftError if no client becomes available any more and no job is in flight.
        Raises ValueError if no job was dispatched yet and the result is above `patience` seconds.
        """
        if self.devices.presence is None:
            return math.inf
        arrival = min(self._track_idle(pool).next_arrival() for pool in self._short)
        if not self.dispatched and arrival > self._patience:
            wait = "no client is ever available"
            if arrival < math.inf:
                wait = f"no client is available for the first {arrival:,.0f} s"
            raise ValueError(
                f"fleet: {wait}. A run waits at most fleet.patience={self._patience:g} s of "
                "virtual time for its first client. Set fleet.availability=always, or increase "
                "fleet.patience."
            )
        if arrival == math.inf and not self._events:
            advice = "Set fleet.wrap=true to repeat the trace"
            if self.version:
                advice += f", or rounds={self.version} to end the run there"
            raise NoClientsLeftError(
                f"fleet: no client is available any more after {self.now:,.0f} s of virtual time "
                f"and {self.version} aggregations. {advice}."
            )
        return arrival

    # --- checkpoints ------------------------------------------------------------------------------
    def selection_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays from which a checkpoint restores the selection; {} for `Random`."""
        return {} if self._selector is None else self._selector.arrays()

    @property
    def received(self) -> np.ndarray | None:
        """The base version of each client's last job, int32 [clients]; -1 before its first job.

        None if the server sends all parameters and not compressed changes between versions.
        """
        return None if self._messages is None else self._messages.received

    def state(self) -> dict[str, Any]:
        """Return the state of the planner as JSON values.

        Arrays with a value for each client are left out.
        """
        return {
            "now": self.now,
            "version": self.version,
            "cohorts": self.cohorts,
            "dispatched": self.dispatched,
            "met": self._met,
            "scarce": sorted(self._scarce),
            "events": [job for _, _, job in sorted(self._events)],
            "discarded": sorted({job.number for _, _, job in self._events} - self.running.keys()),
            "sites": [
                {
                    "version": site.version,
                    "sent": site.sent,
                    "since": site.since,
                    "down": site.down,
                    "up": site.up,
                    "since_meeting": site.since_meeting,
                    "waits": site.waits,
                    "arrived": site.arrived,
                }
                for site in self._sites
            ],
            "step": self._next.to_json(),
            "costs": [] if self._costs is None else self._costs.state(),
        }

    def restore(
        self,
        state: dict[str, Any],
        participations: np.ndarray,
        accepted: np.ndarray,
        selection: Arrays = _NO_EXTRAS,
        received: np.ndarray | None = None,
    ) -> None:
        """Continue from a stored state; this planner must not have planned anything yet.

        state, selection, received: what `state`, `selection_arrays` and `received` returned.
        participations: int32 [clients], the number of each client's jobs.
        accepted: int32 [clients], the number of each client's jobs in aggregations.
        """
        self.now, self.version = state["now"], state["version"]
        self.cohorts, self.dispatched = state["cohorts"], state["dispatched"]
        self._met = state["met"]
        self._scarce = set(state["scarce"])
        self.participations[:] = participations
        self.accepted[:] = accepted
        if self._selector is not None:
            self._selector.restore(selection)
        if self._messages is not None and received is not None:
            self._messages.received[:] = received
        discarded = set(state["discarded"])
        for values in state["events"]:
            job = Job.from_json(values)
            site = self._site_of(job)
            self._start(site, [job])
            if job.number in discarded:
                del site.running[job.number]
            elif site.in_pool:
                site.in_pool[job.pool] += 1
        for site, values in zip(self._sites, state["sites"], strict=True):
            running = sorted(site.running.items())
            site.running.clear()
            site.running.update(running)
            site.version, site.sent, site.since = values["version"], values["sent"], values["since"]
            site.down, site.up = values["down"], values["up"]
            site.since_meeting, site.waits = values["since_meeting"], values["waits"]
            site.arrived = [Job.from_json(job) for job in values["arrived"]]
        if self._costs is not None and state.get("costs"):  # older checkpoints have none
            self._costs.restore(state["costs"])
        self._next = PlannedAggregation.from_json(state["step"])
