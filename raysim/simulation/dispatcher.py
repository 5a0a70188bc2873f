"""Work for hosts: which job goes where, in which call, what is summed there, and what is done when a host dies.

Where a job is trained, and in which order, changes no result; it only decides how busy the hosts are. What the next
aggregation takes goes out at once, to the host with the least to do. Other jobs wait in one queue, in the order in
which they will be aggregated, and a host that has fewer than two calls gets as many as are worth a message.
"""

from __future__ import annotations

import copy
import heapq
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from raysim.api.messages import Job, Outcome, SingleUpdate, Sum, Trained
from raysim.simulation.combining import by_node, chain, joined, pieces, turns
from raysim.simulation.events import RunStopped, Waiting
from raysim.simulation.private_states import PrivateStates
from raysim.simulation.runtime import HostDied, Ref, Runtime
from raysim.simulation.schedule import PlannedJob

# Deltas that one call to a host may hold back until it returns, in floats (256 MiB).
_CALL = 1 << 26
_DEATHS = 3  # of one host, with no answer in between, that end a run
_CALLS = 2  # under way on a host: it works on one while the other travels
_BUNDLE = 0.02  # seconds of work that are worth a message
SILENCE = 10.0  # seconds without any answer after which it is told whom everyone waits for
START = 300.0  # seconds for a host to start, before its first answer is late
_SEEN = 64  # jobs of the queue among which a host looks for clients whose state it has


@dataclass
class InFlightJob:
    """A job that will be aggregated, from its dispatch on."""

    plan: PlannedJob
    message: Job  # what its host is sent
    step: int  # the aggregation that takes it: the version that it is added to
    call: Call | None = None  # the call that trains it, once it is submitted

    @property
    def number(self) -> int:
        """Position in the run's order of dispatch."""
        return self.plan.number

    @property
    def client(self) -> int:
        """Whose job it is."""
        return self.plan.client

    @property
    def version(self) -> int:
        """The version of the model that it starts from."""
        return self.plan.version

    @property
    def staleness(self) -> int:
        """Aggregations between its base version and the one that takes it."""
        return self.step - self.plan.version


Entry: TypeAlias = tuple[int, float, int, int, InFlightJob]  # of the queue: what orders a job, and the job


@dataclass(eq=False)
class Call:
    """A call to a host, which can be made again should the host die before it answers."""

    host: int
    method: str
    args: tuple[object, ...]
    # Client and job of the private state that each job or task starts from, in stateful runs.
    states: Sequence[tuple[int, int]] = ()
    jobs: Sequence[Job] = ()  # of a "train"
    work: float = 0.0  # of its jobs, in samples
    floats: int = 0  # that it returns, private states apart
    stay: int = 0  # returned values behind the first one that stay where they are; no call has states and those
    groups: Sequence[tuple[int, ...]] = ()  # of a "train_apart": the jobs of each of those values
    ref: Ref = None
    stayed: Sequence[Ref] = ()  # those values
    read: int = 0  # bytes of private states that were read from disk for it
    value: Any = None
    done: bool = False  # the value is here
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # of a "train", by job: not yet collected
    sums: tuple[Sum, ...] = ()
    collected: bool = False  # some of its outcomes are


class Dispatcher:
    """Gives jobs to hosts, and makes every call to them."""

    def __init__(self, runtime: Runtime, group: int, shared: int, private: PrivateStates, timeout: float = math.inf):
        self.runtime, self.group, self.shared, self.private = runtime, group, shared, private
        self.timeout = timeout  # seconds without an answer to a call after which its host counts as dead
        self._since = [0.0] * runtime.hosts  # by host: when it began with the first of its open calls
        self._started: set[int] = set()  # hosts that have answered
        self._most = max(1, _CALL // max(1, shared))  # unsummed deltas per call
        self.busy: dict[str, float] = {}  # by host: seconds that it has worked, as far as is known
        self.device_use: dict[str, float] = {}  # by host: the share of time that its GPU worked lately, where known
        self.floats = 0  # of the results of jobs that were submitted and not collected, private states apart
        self.deaths = 0  # of hosts
        self._in_a_row = [0] * runtime.hosts  # by host: deaths since its last answer
        self._open: list[list[Call]] = [[] for _ in range(runtime.hosts)]  # by host: calls without an answer, in order
        self._load = [0.0] * runtime.hosts  # by host: samples of the calls to train that it has not answered
        self._kept: tuple[object, ...] | None = None  # what every host was told to keep
        self._queue: list[Entry] = []  # heap of jobs of later aggregations
        self._refs: Mapping[int, Ref] = {}  # what was published, by version
        self._trained = 0.0  # samples, of all calls that have been answered
        self._unanswered: set[int] = set()  # jobs under way: the states that they leave are not there yet

    # --- calls -----------------------------------------------------------------------------------------------------
    def call(self, host: int, method: str, *args: object, states: Sequence[tuple[int, int]] = ()) -> Call:
        """Start a method of `Host`; states: client and job of those that it needs, sent along if they are not there."""
        return self._made(Call(host, method, args, states))

    def wait(self, call: Call) -> Any:
        """What a call returns; a host that died is replaced, and all that it had not answered is done again."""
        for _ in self.awaited([call]):
            pass
        return call.value

    def awaited(self, calls: Iterable[Call]) -> Iterator[Waiting]:
        """Wait for these calls; whenever no host answers for long, says whom they wait for."""
        for call in calls:
            while not call.done:
                if not self._answer():
                    in_hand = tuple(sorted({job.client for job in self._open[call.host][0].jobs}))
                    yield Waiting(call.host, in_hand, time.monotonic() - self._since[call.host])

    def greet(self) -> None:
        """Ask every host whether it is there: from its answer on it may not be late."""
        for host in range(self.runtime.hosts):
            self.call(host, "ready")

    def keep(self, *args: object) -> None:
        """Have every host keep this (`Host.keep`), those to come too; waits."""
        self._kept = args
        for call in [self.call(host, "keep", *args) for host in range(self.runtime.hosts)]:
            self.wait(call)

    def _made(self, call: Call) -> Call:
        if not self._open[call.host]:
            self._since[call.host] = time.monotonic()
        self._open[call.host].append(call)
        self._start(call)
        return call

    def _start(self, call: Call) -> None:
        self.private.returned(call.read)  # 0 unless it is made again
        sent, call.read = self.private.send(call.host, call.states, call.jobs if call.states else ())
        returns = 1 + call.stay + (len(call.jobs) if call.states else 0)
        call.ref, *after = self.runtime.call(call.host, call.method, *call.args, *sent, returns=returns)
        if call.stay:
            call.stayed = after
        elif after:
            self.private.store(call.jobs, after)

    def _answer(self) -> bool:
        """Wait for the next answer of any host, and give that host more to do; whether anything happened in a while."""
        calls = [own[0] for own in self._open if own]
        late, slowest = min((self._late(call.host), call.host) for call in calls)
        left = max(0.0, late - time.monotonic())
        place = self.runtime.ready([call.ref for call in calls], min(left, SILENCE))
        if place is None and left > SILENCE:
            return False
        if place is None:  # a process that was stopped, or a machine that is out of reach
            self._revive(slowest, HostDied(f"no answer for faults.timeout={self.timeout:g} s"))
            return True
        call = calls[place]
        self._since[call.host] = time.monotonic()
        self._started.add(call.host)
        try:
            call.value = self.runtime.get(call.ref)
        except HostDied as died:
            self._revive(call.host, died)
            return True
        call.done, call.args, call.ref = True, (), None
        self._open[call.host].remove(call)
        self._in_a_row[call.host] = 0
        self.private.returned(call.read)
        if isinstance(call.value, Trained):
            self._take(call, call.value)
        self._fill()
        return True

    def _late(self, host: int) -> float:
        """When a host that does not answer counts as dead."""
        return self._since[host] + self.timeout + (0.0 if host in self._started else START)

    def _take(self, call: Call, trained: Trained) -> None:
        """Note what a call to train returned."""
        call.value = None  # its parts are taken one by one
        call.outcomes, call.sums = {outcome.job: outcome for outcome in trained.outcomes}, trained.sums
        self.busy[trained.host] = self.busy.get(trained.host, 0.0) + trained.busy
        if trained.device is not None:
            self.device_use[trained.host] = trained.device
        self._load[call.host] -= call.work
        self._trained += call.work
        self._unanswered.difference_update(call.outcomes)
        self.private.measure(trained)

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
        self._since[host] = time.monotonic()
        self.private.host_died(host)
        if self._kept is not None:
            self.runtime.call(host, "keep", *self._kept)
        for call in self._open[host]:
            self._start(call)

    # --- jobs ------------------------------------------------------------------------------------------------------
    def offer(self, job: InFlightJob) -> None:
        """Let a host train a job whose base version is there, whenever one has time for it."""
        heapq.heappush(self._queue, (job.step, job.plan.finish, job.client, job.number, job))

    def submit(self, taken: Sequence[InFlightJob], published: Mapping[int, Ref], summable: bool) -> None:
        """Give the jobs of the next aggregation to hosts, long ones first, and then others to hosts that have time.

        published: by version; summable: whether hosts may sum the updates of `taken`.
        """
        self._refs = published
        waiting = [job for job in taken if job.call is None]
        fresh = len(waiting) == len(taken) and len({job.version for job in taken}) == 1
        whole = fresh and summable and not self.private.stateful  # one call holds one version, and a group one call
        groups = self._groups(taken) if whole else []
        members = [tuple(job.number for job in unit) for unit in groups]
        summed = {number: group for group in members for number in group}
        combining = self._on_nodes(groups, taken)
        units = groups if combining else sorted(groups, key=_work, reverse=True)
        units = units + _by_client([job for job in waiting if job.number not in summed])
        per_host: dict[int, list[InFlightJob]] = {}
        for unit, host in zip(units, combining or self._assign(units), strict=True):
            per_host.setdefault(host, []).extend(unit)
        for host, jobs in per_host.items():
            for chunk in self._chunks(jobs, summed):
                self._send(host, chunk, summed, apart=bool(combining and self.runtime.nodes[host]))
        self._fill()

    def _groups(self, taken: Sequence[InFlightJob]) -> list[list[InFlightJob]]:
        """The groups of an aggregation for hosts to sum, in its order; none if hosts would idle more that way."""
        size, hosts = self.group, self.runtime.hosts
        groups = [list(taken[i : i + size]) for i in range(0, len(taken), size)]
        if _makespan(groups, hosts) > 1.1 * _makespan([[job] for job in taken], hosts):
            return []
        return groups

    def _on_nodes(self, groups: Sequence[Sequence[InFlightJob]], taken: Sequence[InFlightJob]) -> list[int]:
        """A host for each group such that nodes can add them up; none if that saves nothing or hosts would idle."""
        nodes = self.runtime.nodes
        if not groups or self.shared < self.runtime.combine_from or not any(nodes) or any(self._load):
            return []
        works = [_work(group) for group in groups]
        hosts = by_node(works, nodes)
        busiest = max(np.bincount(hosts, works))
        apart = sum(nodes[host] > 0 for host in hosts)
        idle = busiest > 1.1 * _makespan([[job] for job in taken], len(nodes))
        return [] if idle or apart < 2 else hosts

    def _assign(self, units: Sequence[Sequence[InFlightJob]]) -> list[int]:
        """A host per unit: the least loaded one, but where a client's state lies if that costs at most a tenth; else
        on the same node if that does."""
        loads, nodes = list(self._load), self.runtime.nodes
        fair = 1.1 * (sum(loads) + sum(map(_work, units))) / self.runtime.hosts
        chosen = []
        for unit in units:
            host = min(range(len(loads)), key=loads.__getitem__)
            if (place := self.private.place(unit[0].client)) is not None:
                home, last = place
                near = min((each for each in range(len(loads)) if nodes[each] == nodes[home]), key=loads.__getitem__)
                if loads[home] + _work(unit) <= fair or last in self._unanswered:
                    host = home  # no call waits for a state that another host still has to make
                elif loads[near] + _work(unit) <= fair:
                    host = near
            loads[host] += _work(unit)
            chosen.append(host)
        return chosen

    def _chunks(
        self, jobs: Sequence[InFlightJob], summed: Mapping[int, tuple[int, ...]]
    ) -> Iterator[Sequence[InFlightJob]]:
        """Calls to one host, with not too many deltas in each."""
        together = len(jobs) if jobs[0].number in summed else self._most
        yield from (jobs[i : i + together] for i in range(0, len(jobs), together))

    # --- the queue -------------------------------------------------------------------------------------------------
    def _fill(self) -> None:
        """Give hosts that have time the jobs at the front of the queue."""
        queue = self._queue
        while queue and queue[0][-1].call is not None:
            heapq.heappop(queue)
        if not queue:
            return
        for host in sorted(range(self.runtime.hosts), key=self._load.__getitem__):
            while sum(bool(call.jobs) for call in self._open[host]) < _CALLS and (jobs := self._bundle(host)):
                self._send(host, jobs, {})

    def _bundle(self, host: int) -> list[InFlightJob]:
        """Jobs from the front of the queue for a host: of clients whose states it has or nobody has, else of others."""
        passed: list[Entry] = []
        jobs: list[InFlightJob] = []
        idle = not self._open[host]
        seconds, work = sum(self.busy.values()) / self._trained if self._trained else _BUNDLE, 0.0
        while self._queue and len(passed) < _SEEN and len(jobs) < self._most and work * seconds < _BUNDLE:
            entry = heapq.heappop(self._queue)
            if (job := entry[-1]).call is not None:
                continue
            if self._may(job, host, idle and not jobs):
                jobs.append(job)
                work += job.plan.work
            else:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._queue, entry)
        return jobs

    def _may(self, job: InFlightJob, host: int, move: bool) -> bool:
        """Whether a host takes a job. move: also one whose client's state is elsewhere, if it can be had."""
        place = self.private.place(job.client)
        return place is None or place[0] == host or (move and place[1] not in self._unanswered)

    def _send(
        self, host: int, jobs: Sequence[InFlightJob], summed: Mapping[int, tuple[int, ...]], apart: bool = False
    ) -> None:
        """Have a host train these. apart: the sums that it makes stay there, for its node to add them up."""
        messages = [job.message for job in jobs]
        if self.private.stateful:
            messages = [replace(job, state=self.private.dispatch(job.client, job.number)) for job in messages]
        sums = list({id(group): group for job in jobs if (group := summed.get(job.number)) is not None}.values())
        summed_here = sum(job.number in summed for job in jobs)
        states = [(message.client, message.state) for message in messages] if self.private.stateful else []
        versions = list(dict.fromkeys(job.version for job in jobs))
        args = messages, sums, len(versions), *(self._refs[version] for version in versions)
        floats = sum(job.plan.up for job in jobs) - self.shared * (summed_here - len(sums))
        self.floats += floats
        self._load[host] += (work := _work(jobs))
        self._unanswered.update(job.number for job in jobs)
        call = Call(host, "train_apart" if apart else "train", args, states, messages, work, floats)
        if apart:
            call.stay, call.groups = len(sums), sums
        self._made(call)
        for job in jobs:
            job.call = call

    def collect(self, jobs: Sequence[InFlightJob]) -> tuple[list[Outcome], list[Sum]]:
        """Their outcomes, in the same order, and the sums that hosts made of them; waits."""
        outcomes: list[Outcome] = []
        calls: dict[int, Call] = {}
        for job in jobs:
            call = job.call
            assert call is not None
            self.wait(call)
            outcomes.append(call.outcomes.pop(job.number))
            calls[id(call)] = call
        for call in calls.values():
            if not call.collected:
                call.collected = True
                self.floats -= call.floats
                call.outcomes = {number: _out_of_store(outcome) for number, outcome in call.outcomes.items()}
        order = {job.number: place for place, job in enumerate(jobs)}
        return outcomes, [*self._combined(calls.values(), order), *(s for call in calls.values() for s in call.sums)]

    def _combined(self, calls: Iterable[Call], order: Mapping[int, int]) -> list[Sum]:
        """The sum of all groups whose sums have stayed on their nodes, which add them up; none if there are none."""
        stayed = [
            (order[group[0]], group, call.host, ref)
            for call in calls
            for group, ref in zip(call.groups, call.stayed, strict=True)
        ]
        if not stayed:
            return []
        _, groups, hosts, refs = zip(*sorted(stayed, key=lambda each: each[0]), strict=True)
        links, cuts = chain(hosts, self.runtime.nodes), pieces(self.shared)
        latest: list[Call | None] = [None] * len(cuts)
        for place, index in turns(len(links), len(cuts)):
            link, cut, before = links[place], cuts[index], latest[index]
            if before is not None:
                self.wait(before)
            args = cut.start, cut.stop, before and before.stayed[0], *(refs[own] for own in link)
            latest[index] = self._made(Call(hosts[link[index % len(link)]], "combine", args, stay=1))
        found = []
        for call in latest:
            assert call is not None, "every part goes through every node"
            self.wait(call)
            found.append(self.runtime.get(call.stayed[0]))
        if found[0] is None:  # all clients have failed
            return []
        return [Sum(tuple(number for group in groups for number in group), joined(found))]


def _out_of_store(outcome: Outcome) -> Outcome:
    """A copy of what lies in an object store, read-only: a part of a result would keep all of it there."""
    stored = isinstance(outcome, SingleUpdate) and not outcome.delta.flags.writeable
    return copy.deepcopy(outcome) if stored else outcome


def _work(unit: Sequence[InFlightJob]) -> float:
    return sum(job.plan.work for job in unit)


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
