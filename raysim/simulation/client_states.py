"""Store the client states of a run, send them to workers, and move them to disk if necessary."""

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
from raysim.simulation.spill import SpillFile
from raysim.simulation.state_log import StatesByClient
from raysim.training.run_spec import RunSpec
from raysim.vectors.layout import Layout


class StateUse(NamedTuple):
    """The client state that a call to a worker needs for one client.

    job: the number of the job that made the state; -1 means the initial state.
    next_job: the job of this call that makes the client's next state; -1 means none.
    """

    client: int
    job: int
    next_job: int = -1


class ClientStates:
    """The store of a run's client states; a state is identified by the job that made it.

    A new state is on the worker that trained the job, and in the object store. It is committed when
    its job is aggregated. Scores and checkpoints use only committed states.

    stateful: False starts every job from the initial state.
    budget: the most bytes of committed states in memory. Above this size, states of the clients
    that have been idle longest move to `folder`.
    """

    def __init__(
        self,
        runtime: Runtime,
        layout: Layout,
        stateful: bool,
        budget: float = math.inf,
        folder: str = "",
    ):
        self.runtime, self.layout = runtime, layout
        self.stateful, self.budget, self.folder = stateful, budget, folder
        self._last: dict[int, int] = {}  # by client: its last job, committed or not
        # By client: the worker of its last submitted job, and the number of that job.
        self._newest_states: dict[int, tuple[int, int]] = {}
        self._committed: dict[int, int] = {}  # by client: the job that made its committed state
        self._stored: dict[int, Ref] = {}  # by job: the state that it made, unless that is on disk
        self._makers: dict[int, int] = {}  # by job: the worker that makes its state
        self._sizes: dict[int, int] = {}  # by job: bytes of the state that it made, once known
        self._total_size = 0  # sum of them
        # By client: bytes of its committed state, unless that is on disk, in the order in which the
        # states were committed.
        self._in_memory: dict[int, int] = {}
        self._in_memory_bytes = 0  # sum of them
        self._file: SpillFile | None = None
        self._on_disk: dict[int, int] = {}  # by client: bytes of its committed state on disk
        self._last_spilled_bytes = 0  # size of the state that was written to disk last
        self._read_bytes = 0  # bytes read from disk for calls that are not answered yet

    # --- the state that a job starts from ---------------------------------------------------------
    def dispatch(self, client: int, number: int) -> int:
        """Record a new job of a client; return the number of the client's previous job.

        The new job starts from the state of this previous job; -1 is the initial state. Do not call
        this for a job that will be lost or discarded.
        """
        if not self.stateful:
            return -1
        previous = self._last.get(client, -1)
        self._last[client] = number
        return previous

    def committed_job(self, client: int) -> int:
        """Return the job that made the client's committed state; -1 for the initial state."""
        return self._committed.get(client, -1)

    @property
    def committed_jobs(self) -> Mapping[int, int]:
        """The number of the job that made each client's committed state, by client.

        A client's state is committed when the job that made it is aggregated. Clients that still
        have the initial state are left out.
        """
        return self._committed

    # --- places -----------------------------------------------------------------------------------
    def newest_state(self, client: int) -> tuple[int, int] | None:
        """Return the worker that has a client's newest state, and the job that makes the state.

        Both are numbers. The job may still be in flight. Return None if no worker has a state of
        the client.
        """
        return self._newest_states.get(client)

    def worker_died(self, worker: int) -> None:
        """Record that a worker died and has no states any more.

        The states are sent again with the next jobs of their clients.
        """
        self._newest_states = {
            client: newest for client, newest in self._newest_states.items() if newest[0] != worker
        }

    def states_of(self, worker: int) -> list[int]:
        """List the jobs whose new client states exist only on this worker's node.

        A job is listed by its job number.
        """
        return [
            number
            for number, maker in self._makers.items()
            if maker == worker and number in self._sizes
        ]

    def copy_states_of(self, worker: int) -> None:
        """Copy client states that exist only on this worker's node, and wait for the copies.

        The copies are on the coordinator's node.
        """
        for number in self.states_of(worker):
            self._stored[number] = self.runtime.put(self.runtime.get(self._stored[number]))
            del self._makers[number]

    def split_reads(self, clients: Sequence[int]) -> Iterator[slice]:
        """Divide a list of clients into slices, so that each slice reads few bytes from disk.

        A slice reads at most `budget` / (number of workers) bytes. If a state is larger, its slice
        reads no other state.
        """
        limit = self.budget / self.runtime.workers
        start = total = 0
        for index, client in enumerate(clients):
            client_bytes = self._on_disk.get(client, 0)
            if total and total + client_bytes > limit:
                yield slice(start, index)
                start, total = index, 0
            total += client_bytes
        yield slice(start, len(clients))

    # --- sending ----------------------------------------------------------------------------------
    def send(self, worker: int, uses: Sequence[StateUse]) -> tuple[list[Ref], int]:
        """Return references to the states that a call to a worker needs.

        There is one reference for each of `uses`. It is None for the initial state, or if the
        worker has the state. Also return the number of bytes read from disk. Pass it to
        `release_read` after the answer.

        If the call trains a client's job, this worker will have the client's newest state. If
        another worker has the client's older state, that worker deletes it.
        """
        sent: list[Ref] = []
        read_bytes, moved = 0, dict[int, list[int]]()
        for client, number, next_job in uses:
            if number < 0 or self._newest_states.get(client) == (worker, number):
                sent.append(None)
            else:
                sent.append(self._ref(client, number))
                if self._is_on_disk(client, number):
                    read_bytes += self._on_disk[client]
            if next_job >= 0:
                previous, _ = self._newest_states.get(client, (worker, -1))
                if previous != worker:
                    moved.setdefault(previous, []).append(client)
                self._newest_states[client] = worker, next_job
                self._makers[next_job] = worker
        self._evict(moved)
        self._read_bytes += read_bytes
        return sent, read_bytes

    def release_read(self, read_bytes: int) -> None:
        """Reduce the counted memory by the bytes that `send` read from disk for one call.

        Do this when the worker has answered the call, or before `send` prepares the call again.
        read_bytes: what `send` returned for the call.
        """
        self._read_bytes -= read_bytes

    def store(self, numbers: Sequence[int], refs: Sequence[Ref]) -> None:
        """Record references to the states that jobs make.

        numbers: the numbers of the jobs.
        refs: a reference for each job.
        """
        self._stored.update(zip(numbers, refs, strict=True))

    def note_sizes(self, result: TrainingResult) -> None:
        """Record the size in bytes of the new client state of each job.

        result: what a worker returned for a call that trained these jobs.
        """
        for update, state_bytes in zip(result.updates, result.states, strict=False):
            self._note_size(update.job, state_bytes)

    def _note_size(self, number: int, state_bytes: int) -> None:
        self._sizes[number] = state_bytes
        self._total_size += state_bytes

    def _ref(self, client: int, number: int) -> Ref:
        if self._is_on_disk(client, number):
            return self.runtime.put(self._read(client))
        return self._stored[number]

    def _is_on_disk(self, client: int, number: int) -> bool:
        """Return True if the state that job `number` of the client made is on disk.

        A client can have one state on disk: the state of its last aggregated job.
        """
        return client in self._on_disk and self._committed[client] == number

    def _evict(self, clients_of_worker: Mapping[int, list[int]]) -> None:
        """Tell each worker to forget the states of some clients.

        clients_of_worker: the clients to forget, by worker.
        """
        for worker, clients in clients_of_worker.items():
            self.runtime.call(worker, "release", clients)

    # --- committing and spilling ------------------------------------------------------------------
    def commit(self, jobs: Sequence[Job]) -> None:
        """Replace client states by the states that the jobs of an aggregation have made.

        Some states move to disk if the states in memory exceed the budget.
        jobs: all jobs of the aggregation. A failed job leaves its client's state unchanged.
        """
        if not self.stateful:
            return
        for job in jobs:
            self._drop(job.client, self.committed_job(job.client))
            self._on_disk.pop(job.client, None)
            self._commit(job.client, job.number)
        evicted: dict[int, list[int]] = {}
        for client in self._spill():
            worker, _ = self._newest_states.pop(client, (-1, -1))
            if worker >= 0:
                evicted.setdefault(worker, []).append(client)
        self._evict(evicted)

    def _commit(self, client: int, number: int) -> None:
        self._committed[client] = number
        self._in_memory[client] = self._sizes.get(number, 0)
        self._in_memory_bytes += self._in_memory[client]

    def _drop(self, client: int, number: int) -> None:
        """Remove a client's committed state, made by job `number`, from the object store."""
        self._stored.pop(number, None)
        self._makers.pop(number, None)
        self._total_size -= self._sizes.pop(number, 0)
        self._in_memory_bytes -= self._in_memory.pop(client, 0)

    def _spill(self) -> list[int]:
        """Write states of idle clients to disk until the states in memory fit the budget.

        Return the clients whose states were written.
        """
        spilled: list[int] = []
        if self._in_memory_bytes <= self.budget:
            return spilled
        for client in list(self._in_memory):
            if self._in_memory_bytes <= self.budget:
                break
            number = self._committed[client]
            _, last_submitted = self._newest_states.get(client, (-1, number))
            if last_submitted != number:  # the client is busy
                continue
            if self._file is None:
                self._file = SpillFile(self.folder)
            self._file.write(client, to_flat_arrays(self.runtime.get(self._stored[number])))
            self._last_spilled_bytes = self._on_disk[client] = self._in_memory[client]
            self._drop(client, number)
            spilled.append(client)
        return spilled

    # --- what there is ----------------------------------------------------------------------------
    @property
    def bytes(self) -> int:
        """The bytes of all client states in memory, partly an estimate.

        States in memory are in the object store, or were read from disk for unanswered calls. The
        size of a state that a job in flight will make is not known. It is estimated as the mean
        size of the known states in the object store. Without any, it is the size of the state that
        was moved to disk last.
        """
        mean: float = self._last_spilled_bytes
        if self._sizes:
            mean = self._total_size / len(self._sizes)
        unknown = len(self._stored) - len(self._sizes)
        return self._total_size + round(mean * unknown) + self._read_bytes

    @property
    def spilled_bytes(self) -> int:
        """The bytes of all client states that were moved to disk, because memory was too small."""
        return sum(self._on_disk.values())

    def committed(self) -> Iterator[tuple[int, StoredState]]:
        """Yield pairs: a client's number, and its committed state (after its last aggregated job).

        Before a pair is yielded, wait until its state is available in this process. Clients in the
        initial state are left out.
        """
        for client in self._committed:
            yield client, self.committed_state(client)

    def committed_state(self, client: int) -> StoredState:
        """Return the client's state after its last aggregated job; wait until it is available.

        The client must have had an aggregated job.
        """
        if client in self._on_disk:
            return self._read(client)
        state: StoredState = self.runtime.get(self._stored[self._committed[client]])
        return state

    def _read(self, client: int) -> StoredState:
        assert self._file is not None
        return from_flat_arrays(self._file.read(client))

    def state(self, client: int) -> StoredState | None:
        """Return the client's state after its last aggregated job; None for the initial state.

        Wait until the state is available in this process.
        """
        return self.committed_state(client) if client in self._committed else None

    # --- checkpoints ------------------------------------------------------------------------------
    def named_tensors(self) -> Mapping[int, Arrays]:
        """Return each client's committed state as tensors by name.

        A state is read when it is accessed; the access waits until the state is available. Examples
        of tensor names are "model.bn1.weight" and "scaffold.control".
        """
        return StatesByClient(
            self._committed,
            lambda client: to_named_arrays(self.committed_state(client), self.layout),
        )

    def restore(self, committed: Mapping[int, int], states: Mapping[int, Arrays]) -> None:
        """Continue from a checkpoint; jobs that were in flight must be dispatched again.

        committed: the result of `committed_jobs` in the checkpoint.
        states: the result of `named_tensors` in the checkpoint.
        """
        self._committed, self._last = dict(committed), dict(committed)
        for client, arrays in states.items():
            number, state = committed[client], from_named_arrays(arrays, self.layout)
            self._stored[number] = self.runtime.put(state)
            self._note_size(number, num_bytes(state))
            self._commit(client, number)
            self._spill()


def make_client_states(
    spec: RunSpec, declarations: Declarations, runtime: Runtime, folder: str
) -> ClientStates:
    """Return the client states of a run; every client has the initial state.

    folder: the run's folder, to which states move if they exceed `state.budget`.
    """
    settings = spec.settings
    is_stateful = declarations.keeps_client_state or settings.local.keep_optimizer
    return ClientStates(runtime, declarations.layout, is_stateful, settings.state.bytes, folder)
