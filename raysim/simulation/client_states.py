"""Where the client state of every client is: the one place that locates, sends, commits, spills and evicts it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from raysim.api.client_state import (
    StoredState,
    from_flat_arrays,
    from_named_arrays,
    num_bytes,
    to_flat_arrays,
    to_named_arrays,
)
from raysim.api.declare import Declarations
from raysim.api.messages import Arrays, Job, TrainingResult
from raysim.simulation.runtime import Ref, Runtime
from raysim.simulation.spill import Spill
from raysim.simulation.state_log import StatesByClient
from raysim.training.run_spec import RunSpec
from raysim.vectors.layout import Layout


class StateUse(NamedTuple):
    """The client state that a part of a call starts from.

    job: the number of the job that left it; -1: the initial state. next_job: the number of the job in the call that
    leaves the client's next state; -1: the call only reads the state.
    """

    client: int
    job: int
    next_job: int = -1


class ClientStates:
    """The client states of a run's clients. A state is known by the number of the job that left it.

    The worker that ran the job keeps a copy, from which the client's next job there starts; what the job returned is in
    the object store, and is sent along when the client moves to another worker or its worker died. A client's state
    counts once its job is accepted: only that one is scored and saved, and only `accept` changes which one it is. Where
    the accepted states outgrow `budget` [bytes], those of the clients that were idle longest go to disk (in `folder`),
    and neither the store nor a worker keeps them.

    stateful: whether clients keep anything at all; if not, every job starts from the initial state.
    """

    def __init__(
        self,
        runtime: Runtime,
        layout: Layout,
        stateful: bool,
        budget: float = math.inf,
        folder: str = "",
    ):
        self.runtime, self.layout, self.stateful, self.budget, self.folder = (
            runtime,
            layout,
            stateful,
            budget,
            folder,
        )
        self._last: dict[int, int] = {}  # by client: its last job, accepted or not
        self._places: dict[
            int, tuple[int, int]
        ] = {}  # by client: the worker of its last submitted job, and that job
        self._accepted: dict[int, int] = {}  # by client: the job that left its accepted state
        self._stored: dict[int, Ref] = {}  # by job: the state it left, unless that is on disk
        self._sizes: dict[int, int] = {}  # by job: bytes of the state it left, once that is known
        self._known = 0  # sum of the sizes
        # By client: bytes of its accepted state, unless that is on disk; who was accepted last comes last.
        self._in_memory: dict[int, int] = {}
        self._in_memory_bytes = 0  # sum of them
        self._disk: Spill | None = None
        self._on_disk: dict[
            int, int
        ] = {}  # by client: bytes of its accepted state, which is on disk
        self._typical = 0  # bytes of the state that was written to disk last
        self._read = 0  # bytes read from disk for calls that have not returned

    # --- which state a job starts from ---------------------------------------------------------------------------
    def dispatch(self, client: int, number: int) -> int:
        """Note a client's new job; returns the job whose state it starts from, -1 for the initial state.

        A job that is lost or discarded never comes here: the client's next one starts as if it had not been.
        """
        if not self.stateful:
            return -1
        before = self._last.get(client, -1)
        self._last[client] = number
        return before

    def accepted_job(self, client: int) -> int:
        """The job that left the accepted state of a client; -1 for the initial state."""
        return self._accepted.get(client, -1)

    @property
    def accepted_jobs(self) -> Mapping[int, int]:
        """By client: the job that left its accepted state, if it has one."""
        return self._accepted

    # --- locating ------------------------------------------------------------------------------------------------
    def place(self, client: int) -> tuple[int, int] | None:
        """The worker to which a client's last job was submitted, and that job; None if no worker knows the client."""
        return self._places.get(client)

    def worker_died(self, worker: int) -> None:
        """What this worker had is lost; its clients' next jobs are sent the state that they start from."""
        self._places = {
            client: place for client, place in self._places.items() if place[0] != worker
        }

    def parts(self, clients: Sequence[int]) -> Iterator[slice]:
        """Cut a list of clients so that of each part no more than a worker's share of the budget is read from disk."""
        start = total = 0
        for index, client in enumerate(clients):
            own = self._on_disk.get(client, 0)
            if total and total + own > self.budget / self.runtime.workers:
                yield slice(start, index)
                start, total = index, 0
            total += own
        yield slice(start, len(clients))

    # --- sending -------------------------------------------------------------------------------------------------
    def send(self, worker: int, uses: Sequence[StateUse]) -> tuple[list[Ref], int]:
        """Return the states that a call to `worker` must take along, and how many bytes were read from disk.

        A state is None if the worker has it. Clients that leave a next state are on this worker from now on, and other
        workers forget them. Pass the bytes to `returned` when the call is answered.
        """
        sent: list[Ref] = []
        read, moved = 0, dict[int, list[int]]()
        for client, number, next_job in uses:
            there = number < 0 or self._places.get(client) == (worker, number)
            sent.append(None if there else self._ref(client, number))
            read += 0 if there or not self._is_on_disk(client, number) else self._on_disk[client]
            if next_job >= 0:
                before, _ = self._places.get(client, (worker, -1))
                if before != worker:
                    moved.setdefault(before, []).append(client)
                self._places[client] = worker, next_job
        self._evict(moved)
        self._read += read
        return sent, read

    def returned(self, read: int) -> None:
        """A call came back, or is made again, for which `send` had read so many bytes."""
        self._read -= read

    def store(self, numbers: Sequence[int], refs: Sequence[Ref]) -> None:
        """Note where the states will be that the jobs with these numbers leave."""
        self._stored.update(zip(numbers, refs, strict=True))

    def measure(self, result: TrainingResult) -> None:
        """Note the bytes of the states that the jobs of a call left."""
        for update, own in zip(result.updates, result.states, strict=False):
            self._measured(update.job, own)

    def _ref(self, client: int, number: int) -> Ref:
        on_disk = self._is_on_disk(client, number)
        return self.runtime.put(self._spilled(client)) if on_disk else self._stored[number]

    def _is_on_disk(self, client: int, number: int) -> bool:
        """Whether the state that this job left is: only an accepted one ever is, and a newer one may be under way."""
        return client in self._on_disk and self._accepted[client] == number

    def _evict(self, clients: Mapping[int, list[int]]) -> None:
        """Tell workers which clients' states they need no longer."""
        for worker, own in clients.items():
            self.runtime.call(worker, "release", own)

    # --- committing and spilling -----------------------------------------------------------------------------------
    def accept(self, jobs: Sequence[Job]) -> None:
        """The states that these jobs left are their clients' from now on; what is beyond the budget goes to disk."""
        if not self.stateful:
            return
        for job in jobs:
            self._drop(job.client, self.accepted_job(job.client))
            self._on_disk.pop(job.client, None)
            self._commit(job.client, job.number)
        moved: dict[int, list[int]] = {}
        for client in self._spill():
            worker, _ = self._places.pop(client, (-1, -1))
            if worker >= 0:
                moved.setdefault(worker, []).append(client)
        self._evict(moved)

    def _commit(self, client: int, number: int) -> None:
        self._accepted[client] = number
        self._in_memory[client] = self._sizes.get(number, 0)
        self._in_memory_bytes += self._in_memory[client]

    def _drop(self, client: int, number: int) -> None:
        """The object of an accepted state leaves the store."""
        self._stored.pop(number, None)
        self._known -= self._sizes.pop(number, 0)
        self._in_memory_bytes -= self._in_memory.pop(client, 0)

    def _spill(self) -> list[int]:
        """Write accepted states of idle clients to disk until the others are within the budget; whose."""
        written = []
        for client in list(self._in_memory) if self._in_memory_bytes > self.budget else ():
            number = self._accepted[client]
            if self._places.get(client, (-1, number))[1] != number:  # at work
                continue
            if self._disk is None:
                self._disk = Spill(self.folder)
            self._disk.write(client, to_flat_arrays(self.runtime.get(self._stored[number])))
            self._typical = self._on_disk[client] = self._in_memory[client]
            self._drop(client, number)
            written.append(client)
            if self._in_memory_bytes <= self.budget:
                break
        return written

    def _measured(self, number: int, own: int) -> None:
        self._sizes[number] = own
        self._known += own

    # --- what there is -----------------------------------------------------------------------------------------------
    @property
    def bytes(self) -> int:
        """Of all states in the store, and of those read from disk for calls under way.

        States that jobs under way will leave count as the mean of the others.
        """
        mean = self._known / len(self._sizes) if self._sizes else self._typical
        return self._known + round(mean * (len(self._stored) - len(self._sizes))) + self._read

    @property
    def spilled_bytes(self) -> int:
        """Of the accepted states on disk."""
        return sum(self._on_disk.values())

    def accepted(self) -> Iterator[tuple[int, StoredState]]:
        """Every client that has an accepted state, and that state; waits."""
        for client in self._accepted:
            yield client, self.accepted_state(client)

    def accepted_state(self, client: int) -> StoredState:
        """The accepted state of a client that has one; waits."""
        if client in self._on_disk:
            return self._spilled(client)
        state: StoredState = self.runtime.get(self._stored[self._accepted[client]])
        return state

    def _spilled(self, client: int) -> StoredState:
        assert self._disk is not None
        return from_flat_arrays(self._disk.read(client))

    def state(self, client: int) -> StoredState | None:
        """The accepted state of a client, None for the initial one; waits."""
        return self.accepted_state(client) if client in self._accepted else None

    # --- checkpoints -------------------------------------------------------------------------------------------------
    def named(self) -> Mapping[int, Arrays]:
        """By client: every tensor of its accepted state, by name ("model.bn1.weight", "method.name"); waits."""
        return StatesByClient(
            self._accepted, lambda client: to_named_arrays(self.accepted_state(client), self.layout)
        )

    def restore(self, accepted: Mapping[int, int], states: Mapping[int, Arrays]) -> None:
        """Go on from a checkpoint's `accepted_jobs` and `named`; jobs that were under way are submitted again."""
        self._accepted, self._last = dict(accepted), dict(accepted)
        for client, arrays in states.items():
            number, state = accepted[client], from_named_arrays(arrays, self.layout)
            self._stored[number] = self.runtime.put(state)
            self._measured(number, num_bytes(state))
            self._commit(client, number)
            self._spill()


def make_client_states(
    spec: RunSpec, declarations: Declarations, runtime: Runtime, folder: str
) -> ClientStates:
    """Return the client states of a run at its start. folder: of the run."""
    settings = spec.settings
    is_stateful = declarations.keeps_client_state or settings.local.keep_optimizer
    return ClientStates(runtime, declarations.layout, is_stateful, settings.state.bytes, folder)
