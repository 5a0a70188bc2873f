"""Let a selection rule choose clients: tell the rule what it may know, and check its choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from raysim.api.declarations import FORWARD
from raysim.api.messages import Arrays, Job, Update
from raysim.api.selection import ClientFacts, Selection, SelectionView
from raysim.data.partition import Floats
from raysim.primitives.streams import stream
from raysim.simulation.availability import Availability, Change
from raysim.simulation.events import RunStoppedError
from raysim.simulation.fleet import Devices, DevicesWithPhases, Trip, expected_seconds

# A function that returns clients' losses of the current model, given the clients and the most
# samples of each.
MeasureLosses = Callable[[Sequence[int], int | None], Floats]


class SelectionError(RunStoppedError):
    """The error of a selection rule that chose invalid clients or misused `view.measure`."""


@dataclass(frozen=True)
class LossPass:
    """A forward pass in which some clients compute their loss of the current model.

    A selection rule then chooses clients, whose jobs start after this pass.

    seconds: the virtual seconds until the slowest of these clients has sent its loss.
    work: for each client, the number of samples to process. A sample of this pass counts as
    `FORWARD` samples of a training.
    down: for each client, the floats that it receives.
    """

    seconds: float
    work: Mapping[int, float]
    down: Mapping[int, int]

    def trip(
        self,
        devices: Devices,
        client: int,
        participation: int,
        now: float,
        load: tuple[float, int, int],
    ) -> Trip:
        """Return the virtual time at which a job ends, and whether its update arrives.

        The training starts `self.seconds` after `now`. If the client becomes unavailable earlier,
        the job ends at that moment.

        participation: the number of the client's earlier jobs; random numbers depend on it.
        now: the virtual time of the dispatch in seconds.
        load: the samples to process, and the floats to receive and to send.
        """
        start = now + self.seconds
        if devices.presence is not None:
            leaves = devices.presence.next_change(client, now, start)
            if leaves < start:
                return Trip(leaves, False)
        return devices.trip(client, participation, start, *load)


class IdleMask:
    """A bool mask [clients]: True for each idle, available client that has samples.

    presence: None means that all clients are always available.
    busy: bool [clients]; the caller updates this array.
    now: the virtual time in seconds.
    """

    def __init__(
        self, presence: Availability | None, eligible: np.ndarray, busy: np.ndarray, now: float
    ):
        # A change costs the same for any number of clients. In the sorted array of `IdleClients` it
        # costs more if more clients are available.
        self._busy, self._eligible = busy, eligible
        self._available = np.zeros(len(busy), bool)
        present = eligible
        self._changes: Iterator[Change] = iter(())
        if presence is not None:
            present = presence.available_clients(eligible, now)
            self._changes = presence.changes(eligible, now)
        self._next: Change | None = next(self._changes, None)
        self._available[present] = True
        self.mask = self._available & ~busy
        self.count = int(np.count_nonzero(self.mask))

    def set_idle(self, client: int, is_idle: bool) -> None:
        """Record that a client became idle or busy.

        The mask is True for an idle client only if the client is available.
        is_idle: True if the client became idle, False if it became busy.
        """
        value = is_idle and bool(self._available[client])
        self.count += value - bool(self.mask[client])
        self.mask[client] = value

    def advance(self, now: float) -> None:
        """Apply all changes of availability up to the virtual time `now`."""
        while self._next is not None and self._next.at <= now:
            for clients, is_available in ((self._next.gone, False), (self._next.came, True)):
                self._available[clients] = is_available
                before = np.count_nonzero(self.mask[clients])
                self.mask[clients] = is_available & ~self._busy[clients]
                self.count += int(np.count_nonzero(self.mask[clients]) - before)
            self._next = next(self._changes, None)


class Selector:
    """The object that lets a selection rule choose clients, and stores what the rule may know.

    counts, load: as in `Planner`.
    pools: the clients of each tier of `schedule=tiered` or of each replica; empty without pools.
    concurrency: the largest number of jobs in flight.
    participations, accepted: int32 [clients], the number of each client's jobs so far, and how many
    of them were in an aggregation. The planner updates these arrays.
    """

    def __init__(
        self,
        rule: Selection,
        devices: Devices,
        seed: int,
        counts: np.ndarray,
        pools: Sequence[np.ndarray],
        concurrency: int,
        load: Callable[[int, int, int, int], tuple[float, int, int]],
        participations: np.ndarray,
        accepted: np.ndarray,
    ):
        self.rule, self._devices, self._seed, self._load = rule, devices, seed, load
        self._concurrency = concurrency
        self._eligible = np.flatnonzero(counts)
        self._pools = pools
        clients = len(counts)
        unknown = np.broadcast_to(np.nan, clients)
        self._facts = ClientFacts(
            np.asarray(counts, np.int64),
            participations,
            accepted,
            loss=np.full(clients, np.nan) if "loss" in rule.reports else unknown,
            norm=np.full(clients, np.nan) if "norm" in rule.reports else unknown,
            seconds=np.full(clients, np.nan),
            staleness=np.full(clients, np.nan),
            last_finish=np.full(clients, np.nan),
        )
        self._visible_facts = self._facts.read_only()
        self._state = dict(rule.state(clients))
        self._busy = np.zeros(clients, bool)
        self._idle: IdleMask | None = None  # made at the first decision
        self._seconds: Floats | None = None  # [clients], made when a rule reads it
        self.measure: MeasureLosses | None = None  # None in a forecast
        self.loss_pass: LossPass | None = None  # the pass of the last decision; None if it had none
        self.offered = 0  # clients that the rule could choose from at the last decision

    @property
    def name(self) -> str:
        """The name by which error messages call the selection rule."""
        return f"selection {type(self.rule).__name__}"

    # --- decisions --------------------------------------------------------------------------------
    def choose(self, count: int, pool: int, now: float, version: int, decision: int) -> list[int]:
        """Let the rule choose up to `count` clients; return them ascending.

        pool: the pool to choose from; -1 means all clients.
        decision: the number of earlier decisions, which decides the random numbers.
        Raises SelectionError if a chosen client cannot be dispatched.
        """
        self.loss_pass, self.offered = None, 0
        if self._idle is None:
            self._idle = IdleMask(self._devices.presence, self._eligible, self._busy, now)
        idle = self._idle
        idle.advance(now)
        mask, self.offered = idle.mask, idle.count
        if pool >= 0:
            mask = np.zeros_like(idle.mask)
            members = self._pools[pool]
            mask[members] = idle.mask[members]
            self.offered = int(np.count_nonzero(mask))
        if not self.offered:
            return []

        def measure(clients: Sequence[int], samples: int | None) -> Floats:
            if not clients:
                raise SelectionError(
                    f"{self.name}: view.measure got no clients. Use clients of view.clients."
                )
            self._check(clients, len(clients), mask, "view.measure got")
            return self._measure(clients, samples, version)

        visible_mask = mask.view()
        visible_mask.flags.writeable = False
        view = SelectionView(
            count=count,
            pool=pool,
            now=now,
            version=version,
            concurrency=self._concurrency,
            facts=self._visible_facts,
            is_idle=visible_mask,
            state=self._state,
            make_generator=lambda: stream(self._seed, "selection", decision),
            measure_losses=measure,
            estimate_seconds=self._expected_seconds,
            estimate_sending=self._sending_seconds,
        )
        chosen = self.rule.select(view)
        return sorted(self._check(chosen, count, mask, "select returned"))

    def _check(
        self, chosen: Iterable[int] | np.ndarray, count: int, mask: np.ndarray, start: str
    ) -> list[int]:
        """Return the clients that a rule chose, as a list of numbers, if the choice is allowed.

        chosen: the rule's choice; it may have any type.
        count: the largest number of clients that may be chosen.
        mask: bool [clients], True for a client that may be chosen.
        start: the words after the rule's name in the error, such as "select returned".
        Raises SelectionError if the choice is not allowed.
        """
        text = f"{self.name}: {start}"
        try:
            clients = np.asarray(chosen)
        except ValueError:  # lists of different lengths
            clients = np.array(None)
        if not clients.size:
            return []
        if clients.ndim != 1 or clients.dtype.kind not in "iu":
            raise SelectionError(
                f"{text} {chosen!r}. Use a sequence of integers: the numbers that identify the "
                "chosen clients, from view.clients."
            )
        numbers: list[int] = clients.tolist()
        if len(numbers) > count:
            raise SelectionError(f"{text} {len(numbers)} clients. Use at most view.count={count}.")
        unknown = [client for client in numbers if not 0 <= client < len(mask)]
        if unknown:
            raise SelectionError(
                f"{text} client {unknown[0]}, but clients have the numbers 0 to {len(mask) - 1}. "
                "Use clients of view.clients."
            )
        if not mask[clients].all():
            client = next(client for client in numbers if not mask[client])
            raise SelectionError(
                f"{text} client {client}, which {self._why_not_idle(client)}. Use "
                "clients of view.clients."
            )
        if len(set(numbers)) < len(numbers):
            client = next(client for client in numbers if numbers.count(client) > 1)
            raise SelectionError(f"{text} client {client} more than once. Use each client once.")
        return numbers

    def _why_not_idle(self, client: int) -> str:
        assert self._idle is not None
        if self._busy[client]:
            return "is busy"
        if not self._facts.samples[client]:
            return "has no samples"
        return "belongs to another pool" if self._idle.mask[client] else "is not available"

    # --- what a rule may ask for ------------------------------------------------------------------
    def _expected_seconds(self) -> Floats:
        """Return the expected virtual seconds of each client's first job, float64 [clients].

        The values are also used for later jobs. They have no meaning for clients without samples.
        """
        if self._seconds is None:
            self._seconds = expected_seconds(
                self._devices, self._load, self._eligible, len(self._busy)
            )
            self._seconds.flags.writeable = False
        return self._seconds

    def _sending_seconds(self, clients: Sequence[int]) -> Floats:
        """Return the virtual seconds that each client needs to send its first update.

        The result, float64 [len(clients)], is also used for later updates. The values are 0 if the
        fleet does not tell how long sending takes.
        """
        if not isinstance(self._devices, DevicesWithPhases):
            return np.zeros(len(clients))
        loads = ((client, *self._load(client, 0, 0, 0)) for client in clients)
        return np.array([self._devices.phases(*load)[2] for load in loads])

    def _measure(self, clients: Sequence[int], samples: int | None, version: int) -> Floats:
        """Return the loss of each of these clients, and record the cost in `loss_pass`.

        If the run is only planned, all losses are nan.
        samples: a client's loss is computed on at most this number of its samples; None uses all.
        Raises SelectionError if the rule does not declare `measures`, or measures twice in one
        decision.
        """
        if not self.rule.measures:
            raise SelectionError(
                f"{self.name}: select calls view.measure, but its class does not declare that it "
                "measures losses. Write measures = True in the class."
            )
        if self.loss_pass is not None:
            raise SelectionError(
                f"{self.name}: select called view.measure twice in one decision. Call it only once."
            )
        facts = self._facts
        most = math.inf if samples is None else samples
        work = {client: FORWARD * min(most, int(facts.samples[client])) for client in clients}
        earlier, accepted = facts.participations, facts.accepted
        down = {
            client: self._load(client, version, int(earlier[client]), int(accepted[client]))[1]
            for client in clients
        }
        work_of_all, down_of_all = np.zeros(len(self._busy)), np.zeros(len(self._busy))
        work_of_all[list(work)] = list(work.values())
        down_of_all[list(down)] = list(down.values())
        seconds = self._devices.seconds(work_of_all, down_of_all, 1)[list(clients)]
        self.loss_pass = LossPass(float(seconds.max()), work, down)
        if self.measure is None:
            return np.full(len(clients), np.nan)
        return self.measure(clients, samples)

    # --- events -----------------------------------------------------------------------------------
    def start(self, client: int) -> None:
        """Record that a client is busy."""
        self._busy[client] = True
        if self._idle is not None:
            self._idle.set_idle(client, False)

    def end(self, job: Job, now: float) -> None:
        """Record that a job ended; if its update arrived, record its duration.

        now: the current virtual time in seconds.
        """
        self._busy[job.client] = False
        if self._idle is not None:
            self._idle.advance(now)
            self._idle.set_idle(job.client, True)
        if job.arrives:
            self._facts.seconds[job.client] = job.finish - job.start
            self._facts.last_finish[job.client] = job.finish

    def aggregate(self, jobs: Iterable[Job], version: int) -> None:
        """Record the staleness of the jobs of an aggregation.

        version: the number of the current version, just before the aggregation.
        """
        for job in jobs:
            self._facts.staleness[job.client] = version - job.version

    def report(self, updates: Iterable[Update]) -> None:
        """Record the losses and norms that aggregated updates report, if the rule uses them."""
        for update in updates:
            if "loss" in self.rule.reports:
                self._facts.loss[update.client] = update.loss
            if "norm" in self.rule.reports:
                self._facts.norm[update.client] = update.norm

    # --- checkpoints ------------------------------------------------------------------------------
    def arrays(self) -> dict[str, np.ndarray]:
        """Return everything that a checkpoint needs, by name."""
        facts = {f"facts/{name}": getattr(self._facts, name) for name in self._stored_facts()}
        return facts | {f"state/{name}": np.asarray(array) for name, array in self._state.items()}

    def restore(self, arrays: Arrays) -> None:
        """Continue with the arrays of a checkpoint."""
        for name in self._stored_facts():
            getattr(self._facts, name)[:] = arrays[f"facts/{name}"]
        self._state = {
            name.removeprefix("state/"): np.array(array)
            for name, array in arrays.items()
            if name.startswith("state/")
        }

    def _stored_facts(self) -> list[str]:
        known_elsewhere = ("samples", "participations", "accepted")
        names = [entry.name for entry in fields(ClientFacts) if entry.name not in known_elsewhere]
        reports = ("loss", "norm")
        return [name for name in names if name not in reports or name in self.rule.reports]
