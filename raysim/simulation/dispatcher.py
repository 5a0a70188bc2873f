"""Work for hosts: which job goes where, in which call, what is summed there, and what is done when a host dies."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysim.api.messages import Job, Outcome, SingleUpdate, Sum, Trained
from raysim.simulation.events import RunStopped
from raysim.simulation.private_states import PrivateStates
from raysim.simulation.runtime import HostDied, Ref, Runtime

# Deltas that one call to a host may hold back until it returns, in floats (256 MiB).
_CALL = 1 << 26
_DEATHS = 3  # of one host, with no answer in between, that end a run


@dataclass
class InFlightJob:
    """A job between its dispatch and its aggregation."""

    message: Job  # what its host is sent
    finish: float  # virtual time of its arrival
    work: float  # samples, extra passes counted
    up: int  # floats that its client uploads
    call: Call | None = None  # the call that trains it, once it is submitted
    staleness: int = 0  # aggregations since its dispatch, once it has arrived

    @property
    def number(self) -> int:
        """Position in the run's order of dispatch."""
        return self.message.number

    @property
    def client(self) -> int:
        """Whose job it is."""
        return self.message.client

    @property
    def version(self) -> int:
        """The version of the model that it starts from."""
        return self.message.version


@dataclass(eq=False)
class Call:
    """A call to a host, which can be made again should the host die before it answers."""

    host: int
    method: str
    args: tuple[object, ...]
    # Client and job of the private state that each job or task starts from, in stateful runs.
    states: Sequence[tuple[int, int]] = ()
    jobs: Sequence[Job] = ()  # of a "train"
    floats: int = 0  # that it returns, private states apart
    ref: Ref = None
    read: int = 0  # bytes of private states that were read from disk for it
    value: Any = None
    done: bool = False  # the value is here
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # of a "train", by job: not yet collected
    sums: tuple[Sum, ...] = ()


class Dispatcher:
    """Gives jobs to hosts, longest first, and makes every call to them."""

    def __init__(self, runtime: Runtime, group: int, shared: int, private: PrivateStates):
        self.runtime, self.group, self.shared, self.private = runtime, group, shared, private
        self._most = max(1, _CALL // max(1, shared))  # unsummed deltas per call
        self.busy: dict[str, float] = {}  # by host: seconds that it has worked, as far as is known
        self.deaths = 0  # of hosts
        self._in_a_row = [0] * runtime.hosts  # by host: deaths since its last answer
        self._open: list[list[Call]] = [[] for _ in range(runtime.hosts)]  # by host: calls without an answer
        self._kept: tuple[object, ...] | None = None  # what every host was told to keep

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
                self.private.returned(call.read)
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
        self.private.returned(call.read)  # 0 unless it is made again
        sent, call.read = self.private.send(call.host, call.states, call.jobs if call.states else ())
        returns = 1 + (len(call.jobs) if call.states else 0)
        call.ref, *after = self.runtime.call(call.host, call.method, *call.args, *sent, returns=returns)
        if after:
            self.private.store(call.jobs, after)

    def _revive(self, host: int, died: HostDied) -> None:
        """Start another host in the place of a dead one, and make all calls again that it had not answered."""
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
        self.private.host_died(host)
        if self._kept is not None:
            self.runtime.call(host, "keep", *self._kept)
        for call in self._open[host]:
            self._start(call)

    # --- jobs ------------------------------------------------------------------------------------------------------
    def submit(
        self, taken: Sequence[InFlightJob], others: Sequence[InFlightJob], published: Mapping[int, Ref], summable: bool
    ) -> None:
        """Give every job that no host has to a host: those in `taken` first, long ones first.

        taken: the jobs of the next aggregation. published: by version; summable: whether hosts may sum the updates of
        `taken`.
        """
        waiting = [job for job in (*taken, *others) if job.call is None]
        fresh = all(job.call is None for job in taken) and len({job.version for job in taken}) == 1
        whole = fresh and summable and not self.private.stateful  # one call holds one version, and a group one call
        groups = self._groups(taken) if whole else []
        members = [tuple(job.number for job in unit) for unit in groups]
        summed = {number: group for group in members for number in group}
        units = groups + _by_client([job for job in waiting if job.number not in summed])
        per_host: dict[int, list[list[InFlightJob]]] = {}
        unaccepted = {job.number for job in (*taken, *others)}  # no call waits for a state of another host
        for unit, host in zip(units, self._assign(units, unaccepted), strict=True):
            per_host.setdefault(host, []).append(unit)
        urgent = {job.number for job in taken}
        for host, own in per_host.items():
            for chunk in self._chunks(own, urgent, summed):
                self._send(host, chunk, summed, published[chunk[0].version])

    def _groups(self, taken: Sequence[InFlightJob]) -> list[list[InFlightJob]]:
        """The groups of an aggregation for hosts to sum, long ones first; none if hosts would idle more that way."""
        size, hosts = self.group, self.runtime.hosts
        groups = [list(taken[i : i + size]) for i in range(0, len(taken), size)]
        if _makespan(groups, hosts) > 1.1 * _makespan([[job] for job in taken], hosts):
            return []
        return sorted(groups, key=_work, reverse=True)

    def _assign(self, units: Sequence[Sequence[InFlightJob]], unaccepted: set[int]) -> list[int]:
        """A host per unit: the least loaded one, but where a client's state lies if that costs at most a tenth."""
        loads = [0.0] * self.runtime.hosts
        fair = 1.1 * sum(map(_work, units)) / self.runtime.hosts
        chosen = []
        for unit in units:
            host = min(range(len(loads)), key=loads.__getitem__)
            if (place := self.private.place(unit[0].client)) is not None:
                home, last = place
                if loads[home] + _work(unit) <= fair or last in unaccepted:
                    host = home
            loads[host] += _work(unit)
            chosen.append(host)
        return chosen

    def _chunks(
        self, units: Sequence[list[InFlightJob]], urgent: set[int], summed: Mapping[int, tuple[int, ...]]
    ) -> Iterator[list[InFlightJob]]:
        """Calls to one host: urgent jobs first, one version and not too many deltas in each."""
        calls: dict[tuple[bool, int], list[InFlightJob]] = {}
        for job in (job for unit in units for job in unit):
            calls.setdefault((job.number not in urgent, job.version), []).append(job)
        for _, jobs in sorted(calls.items()):
            together = len(jobs) if jobs[0].number in summed else self._most
            yield from (jobs[i : i + together] for i in range(0, len(jobs), together))

    def _send(
        self, host: int, jobs: Sequence[InFlightJob], summed: Mapping[int, tuple[int, ...]], published: Ref
    ) -> None:
        messages = [job.message for job in jobs]
        sums = list({id(group): group for job in jobs if (group := summed.get(job.number)) is not None}.values())
        summed_here = sum(job.number in summed for job in jobs)
        states = [(message.client, message.state) for message in messages] if self.private.stateful else []
        floats = sum(job.up for job in jobs) - self.shared * (summed_here - len(sums))
        call = self._made(Call(host, "train", (messages, sums, published), states, messages, floats))
        for job in jobs:
            job.call = call

    def collect(self, jobs: Sequence[InFlightJob]) -> tuple[list[Outcome], list[Sum]]:
        """Their outcomes, in the same order, and the sums that hosts made of them; waits."""
        outcomes: list[Outcome] = []
        new: list[Call] = []
        calls: dict[int, Call] = {}
        for job in jobs:
            call = job.call
            assert call is not None
            if not call.done:
                self._take(call)
                new.append(call)
            outcomes.append(call.outcomes.pop(job.number))
            calls[id(call)] = call
        for call in new:
            call.outcomes = {number: _out_of_store(outcome) for number, outcome in call.outcomes.items()}
        return outcomes, [part for call in calls.values() for part in call.sums]

    def _take(self, call: Call) -> None:
        """Wait for what a call to train returned."""
        trained: Trained = self.wait(call)
        call.value = None  # its parts are taken one by one
        call.outcomes, call.sums = {outcome.job: outcome for outcome in trained.outcomes}, trained.sums
        self.busy[trained.host] = self.busy.get(trained.host, 0.0) + trained.busy
        self.private.measure(trained)

    def floats(self, jobs: Sequence[InFlightJob]) -> int:
        """What the results of jobs amount to that were submitted and not collected, private states apart."""
        calls = {id(job.call): job.call for job in jobs if job.call is not None}
        return sum(call.floats for call in calls.values() if not call.done)


def _out_of_store(outcome: Outcome) -> Outcome:
    """A copy of what lies in an object store, read-only: a part of a result would keep all of it there."""
    stored = isinstance(outcome, SingleUpdate) and not outcome.delta.flags.writeable
    return copy.deepcopy(outcome) if stored else outcome


def _work(unit: Sequence[InFlightJob]) -> float:
    return sum(job.work for job in unit)


def _by_client(jobs: Sequence[InFlightJob]) -> list[list[InFlightJob]]:
    """The jobs of each client, in order, which must go to one host; clients with much work first."""
    each: dict[int, list[InFlightJob]] = {}
    for job in sorted(jobs, key=lambda job: job.number):
        each.setdefault(job.client, []).append(job)
    return sorted(each.values(), key=_work, reverse=True)


def _makespan(units: Sequence[Sequence[InFlightJob]], hosts: int) -> float:
    """How long the busiest host works when long units are given out first."""
    loads = [0.0] * hosts
    for work in sorted(map(_work, units), reverse=True):
        index = min(range(hosts), key=loads.__getitem__)
        loads[index] += work
    return max(loads)
