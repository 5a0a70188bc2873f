"""Work for hosts: which job goes where, in which call, what is summed there, and where private states lie."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from raysim.messages import Arrays, Job, Outcome, Sum, Trained, Update
from raysim.spill import Spill

Ref: TypeAlias = Any  # a runtime's handle on a result that may not exist yet

# Deltas that one call to a host may hold back until it returns, in floats (256 MiB).
_CALL = 1 << 26


class Runtime(Protocol):
    """How a coordinator reaches its hosts. Calls to one host run in the order in which they were made."""

    @property
    def hosts(self) -> int:
        """How many there are."""
        ...

    def put(self, value: object) -> Ref:
        """Store a value once for all hosts; a Ref may be an argument of `call`."""
        ...

    def call(self, host: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        """Start a method of `Host`; a Ref per returned value."""
        ...

    def get(self, ref: Ref) -> Any:
        """Wait for a value."""
        ...


@dataclass
class Flight:
    """A job between its dispatch and its aggregation."""

    job: Job
    finish: float
    work: float  # samples, extra passes counted
    up: int
    call: _Call | None = None  # once it is submitted
    staleness: int = 0  # once it has arrived


@dataclass
class _Call:
    """A call to a host, and what it returned once that is known."""

    ref: Ref
    floats: int = 0  # that it returns, private states apart
    lent: int = 0  # bytes of states that were read from disk for it
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    sums: tuple[Sum, ...] = ()


class Dispatcher:
    """Gives flights to hosts, longest first, and keeps count of which private state lies where.

    A state is known by the job that made it. Its resident copy is on the host that ran the job; the object that the job
    returned besides is the coordinator's, sent along when the client moves, and read for a checkpoint. Where accepted
    states outgrow `budget` [bytes], those idle for longest go to disk (`folder`), object and resident copy both.
    """

    def __init__(
        self, runtime: Runtime, group: int, stateful: bool, shared: int, budget: float = math.inf, folder: str = ""
    ):
        self.runtime, self.group, self.stateful = runtime, group, stateful
        self.shared, self.budget, self.folder = shared, budget, folder
        self._most = max(1, _CALL // max(1, shared))  # unsummed deltas per call
        self.accepted: dict[int, int] = {}  # by client: the job that made its accepted state
        self.states: dict[int, Ref] = {}  # by job: the state it left, unless it is on disk
        self.held: dict[int, tuple[int, int]] = {}  # by client: its host, and the last job submitted there
        self.sizes: dict[int, int] = {}  # by job: bytes of the state it left, once that is known
        self.busy: dict[str, float] = {}  # by host: seconds that it has worked, as far as is known
        self._known = 0  # sum of the sizes
        # By client: bytes of its accepted state, unless that is on disk; who was accepted last comes last.
        self._settled: dict[int, int] = {}
        self._kept = 0  # sum of them
        self._disk: Spill | None = None
        self._spilled: dict[int, int] = {}  # by client: bytes of its accepted state, which is on disk
        self._typical = 0  # bytes of the state that was written last
        self._lent = 0  # bytes read from there for calls that have not returned

    def submit(
        self, taken: Sequence[Flight], others: Sequence[Flight], published: Mapping[int, Ref], summable: bool
    ) -> None:
        """Give every flight that is not under way to a host: those in `taken` first, long ones first.

        published: by version; summable: whether hosts may sum the updates of `taken`.
        """
        waiting = [flight for flight in (*taken, *others) if flight.call is None]
        fresh = all(flight.call is None for flight in taken) and len({flight.job.version for flight in taken}) == 1
        whole = fresh and summable and not self.stateful  # one call holds one version, and a group one call
        groups = self._groups(taken) if whole else []
        members = [tuple(flight.job.number for flight in unit) for unit in groups]
        summed = {number: group for group in members for number in group}
        units = groups + _chains([flight for flight in waiting if flight.job.number not in summed])
        per_host: dict[int, list[list[Flight]]] = {}
        unsettled = {flight.job.number for flight in others}
        for unit, host in zip(units, self._assign(units, unsettled), strict=True):
            per_host.setdefault(host, []).append(unit)
        urgent = {flight.job.number for flight in taken}
        for host, own in per_host.items():
            for chunk in self._chunks(own, urgent, summed):
                self._send(host, chunk, summed, published[chunk[0].job.version])

    def _groups(self, taken: Sequence[Flight]) -> list[list[Flight]]:
        """The groups of an aggregation for hosts to sum, long ones first; none if hosts would idle more that way."""
        size, hosts = self.group, self.runtime.hosts
        groups = [list(taken[i : i + size]) for i in range(0, len(taken), size)]
        if _makespan(groups, hosts) > 1.1 * _makespan([[flight] for flight in taken], hosts):
            return []
        return sorted(groups, key=_work, reverse=True)

    def _assign(self, units: Sequence[Sequence[Flight]], unsettled: set[int]) -> list[int]:
        """A host per unit: the least loaded one, but where a client's state lies if that costs at most a tenth."""
        loads = [0.0] * self.runtime.hosts
        fair = 1.1 * sum(map(_work, units)) / self.runtime.hosts
        chosen = []
        for unit in units:
            host = min(range(len(loads)), key=loads.__getitem__)
            home, last = self.held.get(unit[0].job.client, (host, -1))
            if self.stateful and (loads[home] + _work(unit) <= fair or last in unsettled):
                host = home
            loads[host] += _work(unit)
            chosen.append(host)
        return chosen

    def _chunks(
        self, units: Sequence[list[Flight]], urgent: set[int], summed: Mapping[int, tuple[int, ...]]
    ) -> Iterator[list[Flight]]:
        """Calls to one host: urgent jobs first, one version and not too many deltas in each."""
        calls: dict[tuple[bool, int], list[Flight]] = {}
        for flight in (flight for unit in units for flight in unit):
            calls.setdefault((flight.job.number not in urgent, flight.job.version), []).append(flight)
        for _, flights in sorted(calls.items()):
            together = len(flights) if flights[0].job.number in summed else self._most
            yield from (flights[i : i + together] for i in range(0, len(flights), together))

    def _send(
        self, host: int, flights: Sequence[Flight], summed: Mapping[int, tuple[int, ...]], published: Ref
    ) -> None:
        jobs = [flight.job for flight in flights]
        sums = list({id(group): group for job in jobs if (group := summed.get(job.number)) is not None}.values())
        states: list[Ref] = []
        lent, left = 0, dict[int, list[int]]()
        if self.stateful:
            for job in jobs:
                states.append(self.state_for(job.client, job.state, host))
                if states[-1] is not None:
                    lent += self._spilled.get(job.client, 0)
                home, _ = self.held.get(job.client, (host, -1))
                if home != host:
                    left.setdefault(home, []).append(job.client)
                self.held[job.client] = (host, job.number)
        self._release(left)
        returns = 1 + len(jobs) if self.stateful else 1
        first, *rest = self.runtime.call(host, "train", jobs, sums, published, *states, returns=returns)
        summed_here = sum(job.number in summed for job in jobs)
        call = _Call(first, sum(f.up for f in flights) - self.shared * (summed_here - len(sums)), lent)
        self._lent += lent
        for flight in flights:
            flight.call = call
        self.states.update({job.number: ref for job, ref in zip(jobs, rest, strict=False)})

    def state_for(self, client: int, number: int, host: int) -> Ref | None:
        """What to send along with a job or a task: nothing if the host will hold that state by then."""
        if number < 0 or self.held.get(client) == (host, number):
            return None
        return self.runtime.put(self.state(client, number)) if client in self._spilled else self.states[number]

    def state(self, client: int, number: int) -> Arrays:
        """The accepted state of a client, which job `number` left; waits."""
        if client in self._spilled:
            assert self._disk is not None and self.accepted[client] == number
            return self._disk.read(client)
        state: Arrays = self.runtime.get(self.states[number])
        return state

    def parts(self, clients: Sequence[int]) -> Iterator[slice]:
        """Cut a list of clients so that of each part no more than a host's share of the budget is read from disk."""
        start = size = 0
        for index, client in enumerate(clients):
            own = self._spilled.get(client, 0)
            if size and size + own > self.budget / self.runtime.hosts:
                yield slice(start, index)
                start, size = index, 0
            size += own
        yield slice(start, len(clients))

    def collect(self, flights: Sequence[Flight]) -> tuple[list[Outcome], list[Sum]]:
        """Outcomes in the order of the flights; waits."""
        outcomes: list[Outcome] = []
        calls: list[_Call] = []
        used: dict[int, _Call] = {}
        for flight in flights:
            call = flight.call
            assert call is not None
            if call.ref is not None:
                self._take(call, calls)
            outcomes.append(call.outcomes.pop(flight.job.number))
            used[id(call)] = call
        for call in calls:
            call.outcomes = {number: _apart(outcome) for number, outcome in call.outcomes.items()}
        return outcomes, [part for call in used.values() for part in call.sums]

    def _take(self, call: _Call, calls: list[_Call]) -> None:
        """Wait for what a call returned."""
        trained: Trained = self.runtime.get(call.ref)
        call.outcomes, call.sums, call.ref = {outcome.job: outcome for outcome in trained.outcomes}, trained.sums, None
        calls.append(call)
        self._lent -= call.lent
        self.busy[trained.host] = max(trained.busy, self.busy.get(trained.host, 0.0))
        for outcome, size in zip(trained.outcomes, trained.states, strict=False):
            self.sized(outcome.job, size)

    def sized(self, number: int, size: int) -> None:
        """Note the bytes of the state that a job left."""
        self.sizes[number] = size
        self._known += size

    @property
    def state_bytes(self) -> int:
        """Of all private states in the store; those of jobs under way count as the mean of the others."""
        mean = self._known / len(self.sizes) if self.sizes else self._typical
        return self._known + round(mean * (len(self.states) - len(self.sizes))) + self._lent

    @property
    def spilled_bytes(self) -> int:
        """Of the accepted private states on disk."""
        return sum(self._spilled.values())

    def floats(self, flights: Sequence[Flight]) -> int:
        """What the results of flights amount to that were submitted and not collected, private states apart."""
        calls = {id(flight.call): flight.call for flight in flights if flight.call is not None}
        return sum(call.floats for call in calls.values() if call.ref is not None)

    def accept(self, flights: Sequence[Flight]) -> None:
        """Commit the private states that these jobs left; nothing else does."""
        if self.stateful:
            for flight in flights:
                client, number = flight.job.client, flight.job.number
                self._drop(client, self.accepted.get(client, -1))
                self._spilled.pop(client, None)
                self._settle(client, number)
            self._spill()

    def restore(self, client: int, state: Arrays) -> None:
        """The accepted state of a client, as a checkpoint holds it."""
        number = self.accepted[client]
        self.states[number] = self.runtime.put(state)
        self.sized(number, sum(array.nbytes for array in state.values()))
        self._settle(client, number)
        self._spill()

    def _settle(self, client: int, number: int) -> None:
        self.accepted[client] = number
        self._settled[client] = self.sizes.get(number, 0)
        self._kept += self._settled[client]

    def _drop(self, client: int, number: int) -> None:
        """The object of an accepted state."""
        self.states.pop(number, None)
        self._known -= self.sizes.pop(number, 0)
        self._kept -= self._settled.pop(client, 0)

    def _spill(self) -> None:
        """Write accepted states to disk until the others are within the budget; not those of clients at work."""
        left: dict[int, list[int]] = {}
        for client in list(self._settled) if self._kept > self.budget else ():
            number = self.accepted[client]
            home, last = self.held.get(client, (-1, number))
            if last != number:
                continue
            if self._disk is None:
                self._disk = Spill(self.folder)
            self._disk.write(client, self.runtime.get(self.states[number]))
            self._typical = self._spilled[client] = self._settled[client]
            self._drop(client, number)
            if home >= 0:
                left.setdefault(home, []).append(client)
                del self.held[client]
            if self._kept <= self.budget:
                break
        self._release(left)

    def _release(self, left: Mapping[int, list[int]]) -> None:
        """Tell hosts which clients' states they need no longer."""
        for host, clients in left.items():
            self.runtime.call(host, "release", clients)


def _apart(outcome: Outcome) -> Outcome:
    """A copy of what lies in an object store, read-only: a part of a result would keep all of it there."""
    stored = isinstance(outcome, Update) and outcome.delta is not None and not outcome.delta.flags.writeable
    return copy.deepcopy(outcome) if stored else outcome


def _work(unit: Sequence[Flight]) -> float:
    return sum(flight.work for flight in unit)


def _chains(flights: Sequence[Flight]) -> list[list[Flight]]:
    """Jobs of one client, in order, which must go to one host; long chains first."""
    chains: dict[int, list[Flight]] = {}
    for flight in sorted(flights, key=lambda flight: flight.job.number):
        chains.setdefault(flight.job.client, []).append(flight)
    return sorted(chains.values(), key=_work, reverse=True)


def _makespan(units: Sequence[Sequence[Flight]], hosts: int) -> float:
    """How long the busiest host works when long units are given out first."""
    loads = [0.0] * hosts
    for work in sorted(map(_work, units), reverse=True):
        index = min(range(hosts), key=loads.__getitem__)
        loads[index] += work
    return max(loads)
