"""Work for hosts: which job goes where, in which call, what is summed there, and where private states lie."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from raysim.messages import Job, Outcome, Sum, Trained, Update

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
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    sums: tuple[Sum, ...] = ()


class Dispatcher:
    """Gives flights to hosts, longest first, and keeps count of which private state lies where.

    A state is known by the job that made it. Its resident copy is on the host that ran the job; the object that the job
    returned besides is the coordinator's, sent along when the client moves, and read for a checkpoint.
    """

    def __init__(self, runtime: Runtime, group: int, stateful: bool, shared: int):
        self.runtime, self.group, self.stateful = runtime, group, stateful
        self.shared = shared
        self._most = max(1, _CALL // max(1, shared))  # unsummed deltas per call
        self.accepted: dict[int, int] = {}  # by client: the job that made its accepted state
        self.states: dict[int, Ref] = {}  # by job: the state it left
        self.held: dict[int, tuple[int, int]] = {}  # by client: its host, and the last job submitted there
        self.sizes: dict[int, int] = {}  # by job: bytes of the state it left, once that is known
        self.busy: dict[str, float] = {}  # by host: seconds that it has worked, as far as is known
        self._known = 0  # sum of the sizes

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
        if self.stateful:
            for job in jobs:
                states.append(self.state_for(job.client, job.state, host))
                self.held[job.client] = (host, job.number)
        returns = 1 + len(jobs) if self.stateful else 1
        first, *rest = self.runtime.call(host, "train", jobs, sums, published, *states, returns=returns)
        summed_here = sum(job.number in summed for job in jobs)
        call = _Call(first, sum(f.up for f in flights) - self.shared * (summed_here - len(sums)))
        for flight in flights:
            flight.call = call
        self.states.update({job.number: ref for job, ref in zip(jobs, rest, strict=False)})

    def state_for(self, client: int, number: int, host: int) -> Ref | None:
        """What to send along with a job or a task: nothing if the host will hold that state by then."""
        return None if number < 0 or self.held.get(client) == (host, number) else self.states[number]

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
        self.busy[trained.host] = max(trained.busy, self.busy.get(trained.host, 0.0))
        for outcome, size in zip(trained.outcomes, trained.states, strict=False):
            self.sized(outcome.job, size)

    def sized(self, number: int, size: int) -> None:
        """Note the bytes of the state that a job left."""
        self.sizes[number] = size
        self._known += size

    @property
    def state_bytes(self) -> int:
        """Of all private states that the coordinator holds; those of jobs under way count as the mean of the others."""
        mean = self._known / len(self.sizes) if self.sizes else 0.0
        return self._known + round(mean * (len(self.states) - len(self.sizes)))

    def floats(self, flights: Sequence[Flight]) -> int:
        """What the results of flights amount to that were submitted and not collected, private states apart."""
        calls = {id(flight.call): flight.call for flight in flights if flight.call is not None}
        return sum(call.floats for call in calls.values() if call.ref is not None)

    def accept(self, flights: Sequence[Flight]) -> None:
        """Commit the private states that these jobs left; nothing else does."""
        if self.stateful:
            for flight in flights:
                before = self.accepted.get(flight.job.client, -1)
                self.states.pop(before, None)
                self._known -= self.sizes.pop(before, 0)
                self.accepted[flight.job.client] = flight.job.number


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
