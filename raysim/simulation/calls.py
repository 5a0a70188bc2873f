"""Make calls to workers, wait for the answers, and repeat calls when a worker dies."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from raysim.simulation.client_states import ClientStates, StateUse
from raysim.simulation.events import Notice, ProcessLostError, RunStoppedError, Waiting
from raysim.simulation.runtime import START_TIMEOUT_S, LostNode, Ref, Runtime, WorkerDiedError

# After this many deaths without an answer in between, a worker is not replaced any more. The run
# ends if no other worker can take its calls.
MAX_DEATHS = 3
# After this many deaths of workers in the same call, no other worker gets this call.
MAX_CALL_DEATHS = 2 * MAX_DEATHS
# After this many deaths of workers within the window, a node gets one worker less.
MAX_NODE_DEATHS = 3
DEATH_WINDOW_S = 600.0
# Calls that any worker can carry out, so that another one gets them if a node is lost.
REPEATABLE = ("ready", "store_constants", "contribute", "train", "train_apart", "evaluate")
# After this time without an answer, a run reports which worker it waits for.
SILENCE_WARNING_S = 10.0


@dataclass(eq=False)
class Call:
    """A call to a worker, which can be repeated if the worker dies before it answers.

    worker: the number of the worker; it changes if another worker gets the call.
    args: the arguments of the method, without the client states, which are in `states`.
    remote_values: the number of returned values that stay on the worker's node.
    ref, remote_refs: the references to the answer and to the values that stay on the node.
    bytes_read: the bytes of client states that were read from disk.
    value: the answer; None before it arrives.
    deaths: how many workers died while they executed this call.
    """

    worker: int
    method: str
    args: tuple[object, ...]
    states: Sequence[StateUse] = ()
    remote_values: int = 0
    ref: Ref = None
    remote_refs: Sequence[Ref] = ()
    bytes_read: int = 0
    value: Any = None
    is_answered: bool = False
    deaths: int = 0

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients that the worker trains in this call, ascending."""
        return ()


AnyCall = TypeVar("AnyCall", bound=Call)


class WorkerCalls:
    """The object that makes calls to workers, and repeats them if a worker dies.

    Other workers get the calls of a worker that is not replaced. This happens if its node is lost,
    or if workers die too often. The attribute `workers` counts all workers; `active` lists those
    that get new calls.
    timeout_s: a worker that does not answer for this number of seconds counts as dead.
    """

    def __init__(self, runtime: Runtime, client_states: ClientStates, timeout_s: float = math.inf):
        self._runtime, self._client_states, self._timeout_s = runtime, client_states, timeout_s
        self.workers = runtime.workers
        self.active = list(range(self.workers))
        self.deaths = 0  # deaths of workers so far
        self.when_answered: Callable[[Call], None] = lambda call: None
        # Called with a call that another worker has now, and the worker that had it.
        self.when_moved: Callable[[Call, int], None] = lambda call, previous: None
        self._notices: list[Notice] = []
        # By worker: its unanswered calls in order, and when it began with the first of them.
        self._unanswered: list[list[Call]] = [[] for _ in range(self.workers)]
        self._waiting_since = [0.0] * self.workers
        self._has_started = [False] * self.workers
        self._deaths_in_a_row = [0] * self.workers  # by worker: deaths since its last answer
        self._node_deaths: defaultdict[int, deque[float]] = defaultdict(deque)  # times, by node
        self._constants: tuple[object, ...] | None = None  # what every worker was told to keep

    # --- making calls -----------------------------------------------------------------------------
    def call(
        self, worker: int, method: str, *args: object, states: Sequence[StateUse] = ()
    ) -> Call:
        """Start a Python method of a worker; return the call. `wait` returns its answer.

        method: the name of a Python method of `Worker`.
        args: the method's arguments, without client states.
        states: the client states that the worker needs.
        """
        return self.start(Call(worker, method, args, states))

    def start(self, call: AnyCall) -> AnyCall:
        """Start a call and return it.

        If the call's worker gets no new calls any more, the call goes to another worker, and
        `call.worker` changes.
        Raises ProcessLostError if the call needs values that only the first worker had.
        """
        if call.worker not in self.active:
            if call.method not in REPEATABLE:
                raise ProcessLostError(
                    f"worker {call.worker} is lost, and with it the sums of updates that only this "
                    "worker had"
                )
            call.worker = self._least_busy(self.active)
        if not self._unanswered[call.worker]:
            self._waiting_since[call.worker] = time.monotonic()
        self._unanswered[call.worker].append(call)
        self._send(call)
        return call

    def unanswered(self, worker: int) -> Sequence[Call]:
        """Return the calls that a worker has not answered yet, in the order they were made."""
        return self._unanswered[worker]

    def call_all(self) -> None:
        """Call every worker once, so that all of them start.

        Until its first answer a worker has more time than `timeout_s`, because it must start.
        """
        for worker in self.active:
            self.call(worker, "ready")

    def store_constants(self, *args: object) -> None:
        """Send every worker the values that do not change in a run, and wait for the answers.

        Workers that start later get the same values.
        args: the tensors that methods send to each client only once, and the rows of the central
        test set for `evaluate.probe`.
        """
        self._constants = args
        for call in [self.call(worker, "store_constants", *args) for worker in self.active]:
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
        """Wait until a call is answered; return the value that the worker returned."""
        while not call.is_answered:
            self._wait_for_any()
        return call.value

    def wait_with_events(self, calls: Iterable[Call]) -> Iterator[Waiting | Notice]:
        """Wait until these calls are answered; yield events meanwhile.

        `Waiting` is yielded whenever no worker has answered for a long time, and `Notice` when a
        worker leaves, is replaced, or is not replaced after its death.
        """
        for call in calls:
            while not call.is_answered:
                if not self._wait_for_any():
                    yield self._describe_wait(call.worker)
                yield from self.take_notices()

    def take_notices(self) -> list[Notice]:
        """Return notices of what happened to workers since the last call of this function."""
        notices, self._notices = self._notices, []
        return notices

    def _describe_wait(self, worker: int) -> Waiting:
        since = self._waiting_since[worker]
        node_timeout = self._runtime.silent_node_timeout(worker)
        return Waiting(
            worker,
            self._unanswered[worker][0].clients,
            seconds=time.monotonic() - since,
            node=self._runtime.node_name(worker),
            replaced_after=self._deadline(worker) - since,
            node_timeout=node_timeout,
            stacks="" if node_timeout is not None else self._runtime.stacks(worker),
        )

    def _wait_for_any(self) -> bool:
        """Wait a limited time for any worker's answer; return False if nothing happened.

        For a worker that has died, or whose time to answer is over, see `_replace`.
        """
        if self._leave_lost_nodes():
            return True
        first_calls = [calls[0] for calls in self._unanswered if calls]
        slowest = min([call.worker for call in first_calls], key=self._deadline)
        left_s = max(0.0, self._deadline(slowest) - time.monotonic())
        index = self._runtime.ready(
            [call.ref for call in first_calls], min(left_s, SILENCE_WARNING_S)
        )
        if index is None and self._leave_lost_nodes():
            return True
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
        """Return the time until which a worker must answer, or it counts as dead.

        The time is in seconds of `time.monotonic`.
        """
        start_s = 0.0 if self._has_started[worker] else START_TIMEOUT_S
        return self._waiting_since[worker] + self._timeout_s + start_s

    def _receive(self, call: Call) -> None:
        """Process the answer to a call; if the worker has died, replace the worker."""
        worker = call.worker
        self._waiting_since[worker] = time.monotonic()
        self._has_started[worker] = True
        try:
            call.value = self._runtime.get(call.ref)
        except WorkerDiedError as death:
            if not self._leave_lost_nodes():
                self._replace(worker, death)
            return
        call.is_answered, call.args, call.ref = True, (), None
        self._unanswered[worker].remove(call)
        self._deaths_in_a_row[worker] = 0
        self._client_states.release_read(call.bytes_read)
        self.when_answered(call)

    # --- deaths -----------------------------------------------------------------------------------
    def _replace(self, worker: int, death: WorkerDiedError) -> None:
        """Replace a worker that died, and send its unanswered calls again.

        Other workers get the calls if many workers of the node died recently, or if this worker
        died `MAX_DEATHS` times in a row.
        Raises RunStoppedError in the last case if no other worker can get the calls.
        """
        self.deaths += 1
        self._deaths_in_a_row[worker] += 1
        cause = self._runtime.explain_death(worker, death)
        executed = self._unanswered[worker][:1]  # a worker executes its calls in their order
        for call in executed:
            call.deaths += 1
        dies_in_a_row = self._deaths_in_a_row[worker] >= MAX_DEATHS
        many_died = self._dies_too_often(worker)
        if many_died or dies_in_a_row:
            # A call that kills every worker would end them all, one after another.
            may_help = all(call.deaths < MAX_CALL_DEATHS for call in executed)
            if may_help and self._continue_without(worker, cause, many_died):
                return
        if dies_in_a_row:
            raise RunStoppedError(self._describe_deaths(worker, cause))
        try:
            self._runtime.revive(worker)
        except WorkerDiedError:
            self.deaths -= 1  # a worker that leaves with its node is counted there
            if self._leave_lost_nodes():
                return
            raise
        node = self._runtime.node_name(worker)
        if node:
            self._notices.append(Notice(f"worker {worker} on {node} was replaced ({cause})"))
        self._waiting_since[worker] = time.monotonic()
        self._client_states.worker_died(worker)
        if self._constants is not None:
            self._runtime.call(worker, "store_constants", *self._constants)
        for call in self._unanswered[worker]:
            self._send(call)

    def _dies_too_often(self, worker: int) -> bool:
        """Record that a worker died; return True if too many workers of its node died.

        This is so if `MAX_NODE_DEATHS` workers of the node died in the last `DEATH_WINDOW_S`
        seconds.
        """
        now = time.monotonic()
        deaths = self._node_deaths[self._runtime.nodes[worker]]
        deaths.append(now)
        while deaths[0] < now - DEATH_WINDOW_S:
            deaths.popleft()
        if len(deaths) < MAX_NODE_DEATHS:
            return False
        deaths.clear()
        return True

    def _continue_without(self, worker: int, cause: str, many_died: bool) -> bool:
        """Give a dead worker's calls to the other workers; return False if that is impossible.

        It is impossible without another worker, or if an unanswered call needs values of the dead
        worker.
        cause: why the worker died.
        many_died: True if many workers of the node died within a short time; False if only this
        worker died, repeatedly.
        """
        remaining = [other for other in self.active if other != worker]
        calls = self._unanswered[worker]
        if not remaining or any(call.method not in REPEATABLE for call in calls):
            return False
        self.active = remaining
        self._runtime.release(worker, may_return=False)
        self._client_states.worker_died(worker)
        self._move_calls(worker, remaining)
        node = self._runtime.node_name(worker) or "its node"
        count = len(remaining)
        deaths = f"it died {MAX_DEATHS} times in a row on {node}"
        if many_died:
            window = f"within {DEATH_WINDOW_S / 60:g} minutes"
            deaths = f"workers of {node} died {MAX_NODE_DEATHS} times {window}"
        self._notices.append(
            Notice(
                f"worker {worker} is not replaced: {deaths} (last: {cause}). The run continues "
                f"with {count} worker{'s' * (count > 1)}. If memory is short, set "
                f"runtime.workers={count} next time, or reduce local.batch"
            )
        )
        return True

    # --- nodes that leave or join -----------------------------------------------------------------
    def _leave_lost_nodes(self) -> bool:
        """Stop using workers on nodes that are lost or will leave the cluster.

        Return True if one of these nodes is out of reach. The unanswered calls of its workers are
        then moved to other workers. If a leaving node can still be reached, its workers answer
        their calls. They get new calls only if no other node has workers.
        """
        lost_workers = self._runtime.find_lost_workers()
        has_moved = False
        for worker, node in lost_workers.items():
            remaining = [other for other in self.active if other not in lost_workers]
            if node.is_reachable:
                self._retire(worker, node, remaining)
            else:
                has_moved = True
                self._move_calls_of_lost_node(worker, node, remaining)
        return has_moved

    def _retire(self, worker: int, node: LostNode, remaining: Sequence[int]) -> None:
        """Give no more calls to a worker whose node will leave the cluster, and release it.

        The worker is released once it has no unanswered calls. Until then, call this function
        repeatedly.
        remaining: the workers that get the new calls. If there are none, the worker stays active.
        """
        if worker in self.active:
            if not remaining:  # no other worker is left
                return
            self.active.remove(worker)
            self._note_departure(worker, node.reason)
        if not self._unanswered[worker]:
            self._client_states.copy_states_of(worker)
            self._release(worker)

    def _move_calls_of_lost_node(
        self, worker: int, node: LostNode, remaining: Sequence[int]
    ) -> None:
        """Move the unanswered calls of a worker on a lost node to other workers.

        remaining: the workers that can get these calls.
        Raises ProcessLostError if the run cannot continue without the node.
        """
        name = self._runtime.node_name(worker) or f"the node of worker {worker}"
        has_states = bool(self._client_states.states_of(worker))
        self._release(worker)
        calls = self._unanswered[worker]
        if has_states:
            raise ProcessLostError(
                f"{name} {node.reason}, and no other node has a copy of the client states that "
                "this node had"
            )
        if not remaining:
            raise ProcessLostError(f"{name} {node.reason}, and no other worker is left")
        for call in calls:
            if call.method not in REPEATABLE:
                raise ProcessLostError(
                    f"{name} {node.reason}, and no other node has a copy of the sums of updates "
                    "that this node had"
                )
        if worker in self.active:
            self.active.remove(worker)
            self.deaths += 1
            self._note_departure(worker, node.reason)
        self._move_calls(worker, remaining)

    def _move_calls(self, worker: int, remaining: Sequence[int]) -> None:
        calls, self._unanswered[worker] = self._unanswered[worker], []
        # A job may start from the state that the previous job leaves, so all calls go to one
        # worker.
        stays_together = self._client_states.stateful
        heir = self._least_busy(remaining)
        for call in calls:
            if call.method == "ready" or call.method == "store_constants":
                call.is_answered = True
                continue
            call.worker = heir if stays_together else self._least_busy(remaining)
            self.when_moved(call, worker)
            self.start(call)

    def _least_busy(self, workers: Sequence[int]) -> int:
        return min(workers, key=lambda worker: len(self._unanswered[worker]))

    def _release(self, worker: int) -> None:
        self._runtime.release(worker)
        self._client_states.worker_died(worker)

    def _note_departure(self, worker: int, reason: str) -> None:
        name = self._runtime.node_name(worker)
        place = f"{name} {reason}" if name else reason
        count = len(self.active)
        workers = "1 worker is" if count == 1 else f"{count} workers are"
        self._notices.append(Notice(f"worker {worker} leaves: {place}; {workers} left"))

    def update_workers(self) -> list[Notice]:
        """Stop using lost nodes, and start using new workers; return notices of these changes."""
        self._leave_lost_nodes()
        for worker in self._runtime.take_new_workers():
            while worker >= len(self._unanswered):
                self._unanswered.append([])
                self._waiting_since.append(0.0)
                self._has_started.append(True)
                self._deaths_in_a_row.append(0)
            self.workers = len(self._unanswered)
            self._has_started[worker], self._deaths_in_a_row[worker] = True, 0
            self.active = sorted({*self.active, worker})
            if self._constants is not None:
                self.call(worker, "store_constants", *self._constants)
            name = self._runtime.node_name(worker)
            self._notices.append(Notice(f"worker {worker} joins" + (f" on {name}" if name else "")))
        self._notices += map(Notice, self._runtime.take_notices())
        return self.take_notices()

    # --- texts ------------------------------------------------------------------------------------
    def _describe_deaths(self, worker: int, cause: str) -> str:
        clients = list(self._unanswered[worker][0].clients) if self._unanswered[worker] else []
        work = f", last while training clients {clients}" if clients else ""
        node = self._runtime.node_name(worker)
        place = f" on {node}" if node else ""
        return (
            f"runtime.workers: worker {worker}{place} died {MAX_DEATHS} times in a row "
            f"({cause}){work}. "
            "If memory is short, reduce local.batch or runtime.workers; then continue from the "
            "last checkpoint with resume=latest."
        )
