"""Work for hosts: which job goes where, in which call, what is summed there, and what is done when a host dies."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysim.api.messages import Job, Outcome, SingleUpdate, Sum, Trained
from raysim.simulation.client_states import States
from raysim.simulation.events import RunStopped
from raysim.simulation.runtime import HostDied, Ref, Runtime

# Deltas that one call to a host may hold back until it returns, in floats (256 MiB).
_CALL = 1 << 26
_DEATHS = 3  # of one host, with no answer in between, that end a run


@dataclass
class Flight:
    """A job between its dispatch and its aggregation."""

    job: Job
    finish: float
    work: float  # samples, extra passes counted
    up: int
    call: Call | None = None  # once it is submitted
    staleness: int = 0  # once it has arrived


@dataclass(eq=False)
class Call:
    """A call to a host, which can be made again should the host die before it answers."""

    host: int
    method: str
    args: tuple[object, ...]
    # Client and job of the state that each job or task starts from, in stateful runs.
    states: Sequence[tuple[int, int]] = ()
    jobs: Sequence[Job] = ()  # of a "train"
    floats: int = 0  # that it returns, private states apart
    ref: Ref = None
    lent: int = 0  # bytes of states that were read from disk for it
    value: Any = None
    done: bool = False  # the value is here
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # of a "train", by job: not yet collected
    sums: tuple[Sum, ...] = ()


class Dispatcher:
    """Gives flights to hosts, longest first, and makes every call to them.

    The resident copy of a private state is on the host that ran the job; what the job returned besides is in `states`,
    sent along when the client moves or a new host has taken the place of one that died.
    """

    def __init__(self, runtime: Runtime, group: int, stateful: bool, shared: int, states: States):
        self.runtime, self.group, self.stateful, self.shared, self.states = runtime, group, stateful, shared, states
        self._most = max(1, _CALL // max(1, shared))  # unsummed deltas per call
        self.held: dict[int, tuple[int, int]] = {}  # by client: its host, and the last job submitted there
        self.busy: dict[str, float] = {}  # by host: seconds that it has worked, as far as is known
        self.deaths = 0  # of hosts
        self._in_a_row = [0] * runtime.hosts  # by host: deaths since its last answer
        self._open: list[list[Call]] = [[] for _ in range(runtime.hosts)]  # by host: calls without an answer
        self._kept: tuple[object, ...] | None = None  # what every host was told to keep
        self._lent = 0  # bytes read from disk for calls that have not returned

    # --- calls -----------------------------------------------------------------------------------------------------
    def call(self, host: int, method: str, *args: object, states: Sequence[tuple[int, int]] = ()) -> Call:
        """Start a method of `Host`; states: client and job of those that it needs, sent along if they are not there."""
        return self._made(Call(host, method, args, states))

    def wait(self, call: Call) -> Any:
        """What a call returns; a host that died is replaced, and all that it had not answered is done again."""
        while not call.done:
            try:
                call.value = self.runtime.get(call.ref)
            except HostDied as died:
                self._revive(call.host, died)
            else:
                call.done, call.args, call.ref = True, (), None
                self._open[call.host].remove(call)
                self._in_a_row[call.host] = 0
                self._lent -= call.lent
        return call.value

    def keep(self, *args: object) -> None:
        """Have every host keep this (`Host.keep`), those to come too; waits."""
        self._kept = args
        for call in [self.call(host, "keep", *args) for host in range(self.runtime.hosts)]:
            self.wait(call)

    def _made(self, call: Call) -> Call:
        self._open[call.host].append(call)
        self._start(call)
        return call

    def _start(self, call: Call) -> None:
        sent: list[Ref] = []
        lent, left = 0, dict[int, list[int]]()
        for index, (client, number) in enumerate(call.states):
            resident = number < 0 or self.held.get(client) == (call.host, number)
            sent.append(None if resident else self.states.ref(client, number))
            lent += 0 if resident else self.states.on_disk(client)
            if call.jobs:
                home, _ = self.held.get(client, (call.host, -1))
                if home != call.host:
                    left.setdefault(home, []).append(client)
                self.held[client] = (call.host, call.jobs[index].number)
        self._release(left)
        returns = 1 + (len(call.jobs) if call.states else 0)
        call.ref, *after = self.runtime.call(call.host, call.method, *call.args, *sent, returns=returns)
        self.states.stored.update({job.number: ref for job, ref in zip(call.jobs, after, strict=False)})
        self._lent += lent - call.lent
        call.lent = lent

    def _revive(self, host: int, died: HostDied) -> None:
        self.deaths += 1
        self._in_a_row[host] += 1
        if self._in_a_row[host] == _DEATHS:
            clients = sorted({job.client for call in self._open[host][:1] for job in call.jobs})
            raise RunStopped(
                f"host {host} died {_DEATHS} times in a row ({died}), the last time with {clients or 'no client'} "
                "in hand; if memory is short lower local.batch or runtime.hosts; resume=latest goes on from the last "
                "checkpoint"
            )
        self.runtime.revive(host)
        self.held = {client: place for client, place in self.held.items() if place[0] != host}
        if self._kept is not None:
            self.runtime.call(host, "keep", *self._kept)
        for call in self._open[host]:
            self._start(call)

    def _release(self, left: Mapping[int, list[int]]) -> None:
        """Tell hosts which clients' states they need no longer."""
        for host, clients in left.items():
            self.runtime.call(host, "release", clients)

    # --- flights ---------------------------------------------------------------------------------------------------
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
        unsettled = {flight.job.number for flight in (*taken, *others)}  # no call waits for a state of another host
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
        summed_here = sum(job.number in summed for job in jobs)
        states = [(job.client, job.state) for job in jobs] if self.stateful else []
        floats = sum(flight.up for flight in flights) - self.shared * (summed_here - len(sums))
        call = self._made(Call(host, "train", (jobs, sums, published), states, jobs, floats))
        for flight in flights:
            flight.call = call

    def collect(self, flights: Sequence[Flight]) -> tuple[list[Outcome], list[Sum]]:
        """Outcomes in the order of the flights; waits."""
        outcomes: list[Outcome] = []
        calls: list[Call] = []
        used: dict[int, Call] = {}
        for flight in flights:
            call = flight.call
            assert call is not None
            if not call.done:
                self._take(call)
                calls.append(call)
            outcomes.append(call.outcomes.pop(flight.job.number))
            used[id(call)] = call
        for call in calls:
            call.outcomes = {number: _apart(outcome) for number, outcome in call.outcomes.items()}
        return outcomes, [part for call in used.values() for part in call.sums]

    def _take(self, call: Call) -> None:
        """Wait for what a call to train returned."""
        trained: Trained = self.wait(call)
        call.value = None  # its parts are taken one by one
        call.outcomes, call.sums = {outcome.job: outcome for outcome in trained.outcomes}, trained.sums
        self.busy[trained.host] = self.busy.get(trained.host, 0.0) + trained.busy
        for outcome, size in zip(trained.outcomes, trained.states, strict=False):
            self.states.sized(outcome.job, size)

    @property
    def state_bytes(self) -> int:
        """Of private states in the store, and of those read from disk for calls under way."""
        return self.states.bytes + self._lent

    def floats(self, flights: Sequence[Flight]) -> int:
        """What the results of flights amount to that were submitted and not collected, private states apart."""
        calls = {id(flight.call): flight.call for flight in flights if flight.call is not None}
        return sum(call.floats for call in calls.values() if not call.done)

    def accept(self, flights: Sequence[Flight]) -> None:
        """Commit the private states that these jobs left; nothing else does."""
        if self.stateful:
            for flight in flights:
                self.states.accept(flight.job.client, flight.job.number)
            left: dict[int, list[int]] = {}
            for client in self.states.spill(self._idle):
                home, _ = self.held.pop(client, (-1, -1))
                if home >= 0:
                    left.setdefault(home, []).append(client)
            self._release(left)

    def _idle(self, client: int) -> bool:
        """Whether the client is not at work."""
        number = self.states.accepted[client]
        return self.held.get(client, (-1, number))[1] == number


def _apart(outcome: Outcome) -> Outcome:
    """A copy of what lies in an object store, read-only: a part of a result would keep all of it there."""
    stored = isinstance(outcome, SingleUpdate) and not outcome.delta.flags.writeable
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
