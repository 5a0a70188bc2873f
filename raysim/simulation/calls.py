"""Calls to workers: make them, wait for answers, and repeat them when a worker dies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raysim.simulation.client_states import ClientStates, StateUse
from raysim.simulation.events import RunStoppedError, Waiting
from raysim.simulation.runtime import START_TIMEOUT_S, Ref, Runtime, WorkerDiedError

MAX_DEATHS = 3  # of one worker, without an answer in between, that end a run
SILENCE_WARNING_S = 10.0  # without any answer, after which a run reports which worker it waits for


@dataclass(eq=False)
class Call:
    """A call to a worker, which can be repeated if the worker dies before it answers."""

    worker: int
    method: str
    args: tuple[object, ...]
    states: Sequence[StateUse] = ()  # client states that the call starts from
    remote_values: int = 0  # returned values behind the first one that stay on the worker
    ref: Ref = None
    remote_refs: Sequence[Ref] = ()
    bytes_read: int = 0  # of client states that were read from disk for it
    value: Any = None  # the first returned value
    is_answered: bool = False

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients that the worker trains in this call, ascending."""
        return ()


AnyCall = TypeVar("AnyCall", bound=Call)


class WorkerCalls:
    """The object that makes every call to workers.

    A dead worker is replaced, and its unanswered calls are repeated. timeout_s: a worker counts as
    dead if it does not answer a call for so many seconds.
    """

    def __init__(self, runtime: Runtime, client_states: ClientStates, timeout_s: float = math.inf):
        self._runtime, self._client_states, self._timeout_s = runtime, client_states, timeout_s
        self.workers = runtime.workers
        self.deaths = 0  # of workers
        self.when_answered: Callable[[Call], None] = lambda call: None
        # By worker: its unanswered calls in order, and when it began with the first of them.
        self._unanswered: list[list[Call]] = [[] for _ in range(self.workers)]
        self._waiting_since = [0.0] * self.workers
        self._has_started = [False] * self.workers
        self._deaths_in_a_row = [0] * self.workers  # by worker: deaths since its last answer
        self._constants: tuple[object, ...] | None = None  # what every worker was told to keep

    # --- making calls -----------------------------------------------------------------------------
    def call(
        self, worker: int, method: str, *args: object, states: Sequence[StateUse] = ()
    ) -> Call:
        """Start a method of `Worker`."""
        return self.start(Call(worker, method, args, states))

    def start(self, call: AnyCall) -> AnyCall:
        """Make a call for the first time."""
        if not self._unanswered[call.worker]:
            self._waiting_since[call.worker] = time.monotonic()
        self._unanswered[call.worker].append(call)
        self._send(call)
        return call

    def unanswered(self, worker: int) -> Sequence[Call]:
        """Return the calls that a worker has not answered yet, in order."""
        return self._unanswered[worker]

    def call_all(self) -> None:
        """Call every worker once. A worker has more time until its first answer."""
        for worker in range(self.workers):
            self.call(worker, "ready")

    def keep(self, *args: object) -> None:
        """Send these constants to every worker (`Worker.store_constants`) and wait.

        Workers that start later get them, too.
        """
        self._constants = args
        for call in [self.call(worker, "store_constants", *args) for worker in range(self.workers)]:
            self.wait(call)

    def _send(self, call: Call) -> None:
        self._client_states.release_read(call.bytes_read)  # 0 unless the call is made again
        sent, call.bytes_read = self._client_states.send(call.worker, call.states)
        state_jobs = [use.next_job for use in call.states if use.next_job >= 0]
        returns = 1 + len(state_jobs) + call.remote_values
        refs = self._runtime.call(call.worker, call.method, *call.args, *sent, returns=returns)
        state_end = 1 + len(state_jobs)
        call.ref, call.remote_refs = refs[0], refs[state_end:]
        self._client_states.store(state_jobs, refs[1:state_end])

    # --- waiting ----------------------------------------------------------------------------------
    def wait(self, call: Call) -> Any:
        """Wait for a call, and return its value."""
        for _ in self.wait_with_events([call]):
            pass
        return call.value

    def wait_with_events(self, calls: Iterable[Call]) -> Iterator[Waiting]:
        """Wait for these calls; yield an event whenever no answer came for a long time."""
        for call in calls:
            while not call.is_answered:
                if not self._wait_for_any():
                    yield self._describe_wait(call.worker)

    def _describe_wait(self, worker: int) -> Waiting:
        since = self._waiting_since[worker]
        return Waiting(
            worker,
            self._unanswered[worker][0].clients,
            seconds=time.monotonic() - since,
            node=self._runtime.node_name(worker),
            replaced_after=self._deadline(worker) - since,
        )

    def _wait_for_any(self) -> bool:
        """Wait a limited time for an answer of any worker; return False if nothing happened."""
        first_calls = [calls[0] for calls in self._unanswered if calls]
        deadline, slowest = min((self._deadline(call.worker), call.worker) for call in first_calls)
        left_s = max(0.0, deadline - time.monotonic())
        index = self._runtime.ready(
            [call.ref for call in first_calls], min(left_s, SILENCE_WARNING_S)
        )
        if index is None and left_s > SILENCE_WARNING_S:
            return False
        if index is None:  # its process was stopped, or its node is out of reach
            self._replace(
                slowest, WorkerDiedError(f"no answer for faults.timeout={self._timeout_s:g} s")
            )
            return True
        self._receive(first_calls[index])
        return True

    def _deadline(self, worker: int) -> float:
        """Return the time at which a worker without an answer counts as dead."""
        start_s = 0.0 if self._has_started[worker] else START_TIMEOUT_S
        return self._waiting_since[worker] + self._timeout_s + start_s

    def _receive(self, call: Call) -> None:
        """Process the answer to a call, or replace the worker if it died."""
        worker = call.worker
        self._waiting_since[worker] = time.monotonic()
        self._has_started[worker] = True
        try:
            call.value = self._runtime.get(call.ref)
        except WorkerDiedError as death:
            self._replace(worker, death)
            return
        call.is_answered, call.args, call.ref = True, (), None
        self._unanswered[worker].remove(call)
        self._deaths_in_a_row[worker] = 0
        self._client_states.release_read(call.bytes_read)
        self.when_answered(call)

    # --- deaths -----------------------------------------------------------------------------------
    def _replace(self, worker: int, death: WorkerDiedError) -> None:
        """Start a worker that replaces a dead one, and repeat the unanswered calls."""
        self.deaths += 1
        self._deaths_in_a_row[worker] += 1
        if self._deaths_in_a_row[worker] == MAX_DEATHS:
            raise RunStoppedError(self._describe_deaths(worker, death))
        self._runtime.revive(worker)
        self._waiting_since[worker] = time.monotonic()
        self._client_states.worker_died(worker)
        if self._constants is not None:
            self._runtime.call(worker, "store_constants", *self._constants)
        for call in self._unanswered[worker]:
            self._send(call)

    def _describe_deaths(self, worker: int, death: WorkerDiedError) -> str:
        clients = list(self._unanswered[worker][0].clients) if self._unanswered[worker] else []
        work = f", last while training clients {clients}" if clients else ""
        return (
            f"runtime.workers: worker {worker} died {MAX_DEATHS} times in a row ({death}){work}. "
            "If memory is short, reduce local.batch or runtime.workers; then continue from the "
            "last checkpoint with resume=latest."
        )
