"""A Flower Grid on virtual time, whose messages are answered by raysim's workers."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from flwr.app import DEFAULT_TTL, Error, Message, Metadata, RecordDict

from raysim.flower.clock import Arrival, VirtualClock
from raysim.flower.local_work import numbers_of
from raysim.flower.messages import RUN_ID, GridMessage, client_number, node_id, reply
from raysim.flower.records import (
    RecordEntry,
    copy_header,
    count_array_bytes,
    structure_of,
    unpack_records,
)
from raysim.flower.replies import ReplayError, StoredReplies
from raysim.flower.simple_grid import SimpleGrid
from raysim.flower.worker import Answer, Request, copy_records
from raysim.simulation.runtime import Runtime, WorkerDiedError

APP_ERROR, LOST_ERROR = 2, 3  # codes of Flower: the app raised an error, the reply is unavailable
QUICK_CALLS = 2  # calls of get_node_ids between messages, before the clock waits for a client
MAX_ATTEMPTS = 3  # an error is raised after this many workers died with the same messages
MAX_ENTRIES = 3  # of a reply, in an error
_CHUNKS_PER_WORKER = 4
_CALLS_AHEAD = 2  # of each worker, so that it has work while this process reads its answers


@dataclass(frozen=True)
class MessageRecord:
    """A row of the table of messages: one message to a client, and what became of it.

    message: the id of the message.
    type: Flower's message type, such as "train" or "evaluate".
    group: the ServerApp's group id, such as the number of a round.
    dispatched: the virtual time of sending, in seconds.
    arrived: the virtual time at which the reply or error arrives, also if this is after the
    timeout.
    fate: "answered", "lost" or "failed". A message is lost if the client drops out, the message
    expires, or the reply comes after the timeout. It fails if the ClientApp raises an error or
    returns no valid reply.
    error: why the message was lost or failed, or "".
    numbers: the metrics of the reply, by name.
    """

    message: str
    client: int
    type: str
    group: str
    dispatched: float
    arrived: float
    fate: str
    error: str
    numbers: dict[str, float]


@dataclass
class _Pending:
    """A message whose reply the ServerApp has not received yet.

    dispatched: the virtual time of sending, in seconds.
    arrival: when the reply arrives, or when the message counts as lost.
    content: the records of the reply; None before a worker has answered, and after an error.
    header: the names of the reply's values, and the names and shapes of its arrays, or b"".
    error: the error of the ClientApp, or "".
    """

    request: Request
    message: GridMessage
    dispatched: float
    arrival: Arrival
    content: RecordDict | None = None
    header: bytes = b""
    error: str = ""

    @property
    def is_answered(self) -> bool:
        """Return True if a worker has answered the message, with a reply or an error."""
        return self.content is not None or bool(self.error)

    def read(self, answer: Answer) -> None:
        """Store a worker's answer in `error`, or in `content` and `header`."""
        self.error = answer.error
        if not answer.error:
            packed = answer.content.data
            self.content, self.header = unpack_records(packed), copy_header(packed)

    @property
    def order(self) -> tuple[float, int, int]:
        """Return the sorting key: the reply's virtual time, the client, the message's number."""
        return self.arrival.time, self.request.client, self.request.number


class VirtualGrid(SimpleGrid):
    """A Grid whose nodes are simulated clients.

    The fleet decides when replies arrive. A call that waits for replies advances the clock.
    `timeout`, and the `ttl` of a message, are virtual seconds.
    replies: the run's file of replies, to which new replies are added. A continued run takes its
    earlier replies from it. None uses no file.
    on_message: function that gets a `MessageRecord` of each answered, lost or failed message.
    fatal_error: the error after which the run cannot continue; None if there is none.
    """

    def __init__(
        self,
        runtime: Runtime,
        clock: VirtualClock,
        replies: StoredReplies | None = None,
        on_message: Callable[[MessageRecord], None] = lambda record: None,
    ):
        super().__init__()
        self.runtime, self.clock = runtime, clock
        self.replies = replies or StoredReplies()
        self._on_message = on_message
        self._pending: dict[str, _Pending] = {}
        self._states: dict[int, bytes] = {}
        self._asked_for_nodes = 0  # calls of get_node_ids since the last message
        self._nodes: list[int] = []
        self._owner = threading.get_ident()
        self._lock = threading.RLock()
        self._free_workers = list(range(runtime.workers))
        self._is_free = threading.Condition()
        self._batch_end: float | None = None  # latest arrival in an open batch
        # By node id: time of its last reply, and its client.
        self._batch_times: dict[int, tuple[float, int]] = {}
        # It is stored, because Flower may catch errors in its threads.
        self.fatal_error: ReplayError | WorkerDiedError | None = None
        self._last_group: tuple[float, str] = (0.0, "")  # virtual time and type of messages
        self._headers: dict[int, bytes] = {}  # of the last replies, by client

    def is_owner(self) -> bool:
        """Return True if this thread runs the ServerApp, False in a thread that Flower started."""
        return threading.get_ident() == self._owner

    # --- nodes --------------------------------------------------------------------------------
    def get_node_ids(self) -> Iterable[int]:
        """Return Flower's node ids of the clients that are available at the current virtual time.

        From the third call without a message in between, each call first advances the clock to the
        next change of a client's availability. A thread that Flower started gets the nodes of the
        ServerApp's last call, if there are any.
        """
        if not self.is_owner():  # the clock does not move in a thread that Flower started
            return list(self._nodes) or self._available_nodes()
        self.end_batch()
        self._asked_for_nodes += 1
        if self._asked_for_nodes > QUICK_CALLS:
            self.clock.wait_for_change()
        self._nodes = self._available_nodes()
        return list(self._nodes)

    def _available_nodes(self) -> list[int]:
        return [node_id(client) for client in self.clock.available_clients()]

    # --- messages -----------------------------------------------------------------------------
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages at the current virtual time; return their ids.

        Raises ValueError for a node id that does not exist.
        """
        with self._lock:
            if self.is_owner():
                self.end_batch()
            return [pending.message.metadata.message_id for pending in self._push(messages)]

    def _push(self, messages: Iterable[Message]) -> list[_Pending]:
        self._asked_for_nodes = 0
        sent = []
        # The app may change records later; messages that share them share a copy. By the id of the
        # records: these, so that the id stays theirs, the copy, and the bytes of its arrays.
        copies: dict[int, tuple[RecordDict, RecordDict, int]] = {}
        for message in messages:
            metadata = message.metadata
            client = client_number(metadata.dst_node_id)
            if not 0 <= client < self.clock.clients:
                raise ValueError(
                    f"dst_node_id={metadata.dst_node_id}: there is no such node. "
                    "Use the ids of get_node_ids()."
                )
            records = message.content
            if id(records) not in copies:
                content = copy_records(records)
                copies[id(records)] = (records, content, count_array_bytes(content))
                self.on_content(content)
            _, content, array_bytes = copies[id(records)]
            pending = self._dispatch(message, client, content, array_bytes)
            self._pending[pending.request.message_id] = pending
            sent.append(pending)
        return sent

    def on_content(self, content: RecordDict) -> None:
        """Do nothing; a subclass may look here at the content of each new message."""

    def _dispatch(
        self, message: Message, client: int, content: RecordDict, array_bytes: int
    ) -> _Pending:
        metadata = message.metadata
        number = self.clock.next_number(client)
        kind = metadata.message_type
        ttl = metadata.ttl or DEFAULT_TTL
        is_training = kind.split(".")[0] == "train"
        arrival = self.clock.arrival(client, number, is_training, array_bytes, ttl)
        request = Request(
            client=client,
            number=number,
            message_type=kind,
            message_id=f"{client}-{number}",
            content=content,
            group_id=metadata.group_id,
            created_at=self.clock.now,
            ttl=ttl,
        )
        app_message = _with_raysim_metadata(message, request)
        return _Pending(request, app_message, self.clock.now, arrival)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, in the order of virtual time.

        If no reply has arrived, first advance the clock to the next arrival. Each reply is returned
        only once; the result is empty if no reply is left.
        message_ids: the ids of the messages, which `push_messages` returned.
        """
        with self._lock:
            waiting = [self._pending[key] for key in dict.fromkeys(message_ids) if self._has(key)]
            if not waiting:
                return []
            waiting.sort(key=lambda pending: pending.order)
            self.clock.now = max(self.clock.now, waiting[0].arrival.time)
            arrived = [one for one in waiting if one.arrival.time <= self.clock.now]
            self._answer(waiting)
            return self._deliver(arrived)

    def _has(self, message_id: str) -> bool:
        return message_id in self._pending

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages, wait for the replies, and return the replies in order of virtual time.

        timeout: the longest wait, in virtual seconds; None waits for all replies. Later replies are
        never returned.
        In a thread that Flower started, `timeout` has no effect, and the order is that of the
        messages.
        """
        if not self.is_owner():
            return self._send_from_thread(messages)
        with self._lock:
            self.end_batch()
            sent = self._push(messages)
            if not sent:
                return []
            end = self.clock.now + timeout if timeout is not None else float("inf")
            in_time = sorted(
                (pending for pending in sent if pending.arrival.time <= end),
                key=lambda pending: pending.order,
            )
            self._answer(in_time)
            last = end if len(in_time) < len(sent) else in_time[-1].arrival.time
            self.clock.now = max(self.clock.now, last)
            for pending in sent:
                if pending.arrival.time > end:
                    self._drop(pending)
            return self._deliver(in_time)

    def _drop(self, pending: _Pending) -> None:
        """Forget a message whose reply would come after the timeout; no worker answers it."""
        del self._pending[pending.request.message_id]
        self._record(pending, "lost", "the reply arrives after the timeout", {})

    # --- messages of several threads ----------------------------------------------------------
    def end_batch(self) -> dict[int, tuple[float, int]]:
        """Advance the virtual clock to the last reply to the messages that threads have sent.

        Flower's older `Server` sends a round's messages from several threads, all at one virtual
        time. Call this function after the threads have ended.
        Return {node id: (time, client)} for the clients that got messages; `time` is the virtual
        time of the last reply, in seconds.
        Raise ReplayError if a resumed run does not repeat the stored run's messages. Raise
        WorkerDiedError if several workers died at the same message.
        """
        with self._lock:
            if self._batch_end is not None:
                self.clock.now = max(self.clock.now, self._batch_end)
                self._batch_end = None
            if self.fatal_error is not None:
                raise self.fatal_error
            return dict(self._batch_times)

    def _send_from_thread(self, messages: Iterable[Message]) -> Iterable[Message]:
        """Send messages from a thread that Flower started; return the replies in the same order.

        The thread waits for a free worker for each message that is not lost and has no stored
        reply. The virtual clock does not move.
        """
        with self._lock:
            if self._batch_end is None:
                self._batch_end = self.clock.now
                self._batch_times.clear()
            sent = self._push(messages)
            unanswered = self._prepare(sent)
        for pending in unanswered:
            worker = self._take_worker()
            try:
                (answer,) = self._call(worker, [pending.request])
            except WorkerDiedError as error:
                self.fatal_error = error
                raise
            finally:
                self._return_worker(worker)
            with self._lock:
                self._keep(pending, answer)
        self.replies.forget_digests()
        with self._lock:
            for pending in sent:
                client, time = pending.request.client, pending.arrival.time
                self._batch_times[node_id(client)] = (time, client)
                earlier_end = time if self._batch_end is None else self._batch_end
                self._batch_end = max(earlier_end, time)
            return self._deliver(sent)

    def _take_worker(self) -> int:
        with self._is_free:
            self._is_free.wait_for(lambda: self._free_workers)
            return self._free_workers.pop(0)

    def _return_worker(self, worker: int) -> None:
        with self._is_free:
            self._free_workers.append(worker)
            self._is_free.notify()

    # --- answers ------------------------------------------------------------------------------
    def _prepare(self, pending: Sequence[_Pending]) -> list[_Pending]:
        """Answer messages from the stored replies; return the messages that need a worker.

        Lost and answered messages are skipped.
        Raises ReplayError if the n-th message to a client differs from the n-th message to this
        client in the stored run.
        """
        unanswered = []
        for one in pending:
            if one.arrival.lost or one.is_answered:
                continue
            try:
                stored = self.replies.find(one.request)
            except ReplayError as error:
                self.fatal_error = error
                raise
            if stored is None:
                unanswered.append(one)
            else:
                one.read(stored)
                if not stored.error:
                    self._states[one.request.client] = stored.state
        return unanswered

    def _answer(self, pending: Sequence[_Pending]) -> None:
        """Let workers answer all messages that have no stored answer.

        pending: the messages. If a client gets several, it answers them one after another.
        """
        unanswered = self._prepare(pending)
        unanswered.sort(key=lambda one: (one.request.number, one.request.client))
        while unanswered:
            # A client's second message needs the state that the first one leaves.
            first: dict[int, _Pending] = {}
            for one in unanswered:
                first.setdefault(one.request.client, one)
            self._answer_round(list(first.values()))
            unanswered = [one for one in unanswered if not one.is_answered]
        self.replies.forget_digests()

    def _answer_round(self, pending: Sequence[_Pending]) -> None:
        """Let workers answer messages; no two of the messages may be for the same client."""
        workers = self.runtime.workers
        count = 1 if self.runtime.is_in_process else min(len(pending), workers * _CHUNKS_PER_WORKER)
        bounds = [len(pending) * chunk // count for chunk in range(count + 1)]
        chunks = [pending[start:stop] for start, stop in pairwise(bounds)]
        # For each worker, the chunks that it answers in turn, and references to their answers.
        queues: list[deque[tuple[int, Any]]] = [deque() for _ in range(workers)]
        attempts = [0] * count
        waiting = deque(range(count))
        while waiting or any(queues):
            for queue_length in range(_CALLS_AHEAD):
                for worker, queue in enumerate(queues):
                    if waiting and len(queue) <= queue_length:
                        chunk = waiting.popleft()
                        requests = [self._with_state(one) for one in chunks[chunk]]
                        (ref,) = self.runtime.call(worker, "answer", requests)
                        queue.append((chunk, ref))
            busy = [worker for worker, queue in enumerate(queues) if queue]
            index = self.runtime.ready([queues[worker][0][1] for worker in busy], float("inf"))
            worker = busy[index or 0]
            chunk, ref = queues[worker].popleft()
            try:
                answers = self.runtime.get(ref)
            except WorkerDiedError:
                attempts[chunk] += 1
                if attempts[chunk] == MAX_ATTEMPTS:
                    raise _describe_deaths(one.request for one in chunks[chunk]) from None
                self.runtime.revive(worker)
                lost = [chunk, *(other for other, _ in queues[worker])]
                queues[worker].clear()
                waiting.extendleft(reversed(lost))
                continue
            for one, answer in zip(chunks[chunk], answers, strict=True):
                self._keep(one, answer)

    def _call(self, worker: int, requests: Sequence[Request]) -> list[Answer]:
        """Let a worker answer messages; if the worker dies, let a new worker answer them.

        worker: the number of the worker.
        requests: the messages.
        Raises WorkerDiedError if `MAX_ATTEMPTS` workers die, one after another.
        """
        for attempt in range(MAX_ATTEMPTS):
            with self._lock:
                current = [self._request_with_state(request) for request in requests]
            try:
                if self.runtime.is_in_process:
                    with self._lock:  # the global generators belong to one message at a time
                        (ref,) = self.runtime.call(worker, "answer", current)
                else:
                    (ref,) = self.runtime.call(worker, "answer", current)
                answers: list[Answer] = self.runtime.get(ref)
                return answers
            except WorkerDiedError:
                if attempt == MAX_ATTEMPTS - 1:
                    raise _describe_deaths(requests) from None
                self.runtime.revive(worker)
        raise AssertionError(
            "the last attempt neither returned nor raised an error. This is a bug in raysim; "
            "please report it."
        )

    def _with_state(self, pending: _Pending) -> Request:
        return self._request_with_state(pending.request)

    def _request_with_state(self, request: Request) -> Request:
        """Return the request with the current state of its client."""
        state = self._states.get(request.client, b"")
        return replace(request, state=state) if state else request

    def _keep(self, pending: _Pending, answer: Answer) -> None:
        pending.read(answer)
        if not answer.error:
            self._states[pending.request.client] = answer.state
        self.replies.add(pending.request, answer)

    def _deliver(self, pending: Sequence[_Pending]) -> list[Message]:
        """Return a reply to each message, in the same order, and stop tracking the messages.

        The reply has an error if the message was lost or the ClientApp failed. `on_message` gets a
        record of each message.
        """
        delivered: list[Message] = []
        for one in pending:
            self._pending.pop(one.request.message_id, None)
            at = one.arrival.time
            if one.arrival.lost:
                error = f"client {one.request.client}: {one.arrival.lost}"
                delivered.append(reply(one.message, at, error=Error(LOST_ERROR, error)))
                self._record(one, "lost", one.arrival.lost, {})
                continue
            if one.error:
                delivered.append(reply(one.message, at, error=Error(APP_ERROR, one.error)))
                self._record(one, "failed", one.error, {})
                continue
            assert one.content is not None, "every delivered message has an answer"
            self._keep_header(one)
            delivered.append(reply(one.message, at, one.content))
            self._record(one, "answered", "", numbers_of(one.content))
        return delivered

    def _keep_header(self, pending: _Pending) -> None:
        """Store the header of a reply, so that `describe_odd_reply` can compare replies.

        pending: the answered message. The header has the names of the reply's values, and the names
        and shapes of its arrays.
        """
        # Only the replies to the last messages of one type, sent at one virtual time, are stored.
        group = pending.dispatched, pending.request.message_type
        if group != self._last_group:
            self._last_group = group
            self._headers.clear()
        self._headers[pending.request.client] = pending.header

    def describe_odd_reply(self) -> str:
        """Describe a reply whose arrays or values differ in name or shape from most replies.

        The replies to the last messages that were sent together are compared. Return "" if none
        differs.
        """
        # raysim adds the text to an error of a strategy, which does not name the client.
        if not self._headers:
            return ""
        structures = {client: structure_of(header) for client, header in self._headers.items()}
        ((usual, _),) = Counter(structures.values()).most_common(1)
        for client, structure in sorted(structures.items()):
            if structure != usual:
                differences = []
                if structure - usual:
                    differences.append(f"has {_list_entries(structure - usual)}")
                if usual - structure:
                    differences.append(f"lacks {_list_entries(usual - structure)}")
                text = " and ".join(differences)
                return f"Unlike other clients' replies, the reply of client {client} {text}."
        return ""

    def _record(self, pending: _Pending, fate: str, error: str, numbers: dict[str, float]) -> None:
        request = pending.request
        self._on_message(
            MessageRecord(
                request.message_id,
                request.client,
                request.message_type,
                request.group_id,
                pending.dispatched,
                pending.arrival.time,
                fate,
                error,
                numbers,
            )
        )


def _describe_deaths(requests: Iterable[Request]) -> WorkerDiedError:
    """Return the error for workers that died while they answered the same messages.

    requests: the messages. `MAX_ATTEMPTS` workers died, one after another.
    """
    clients = ", ".join(str(request.client) for request in requests)
    return WorkerDiedError(
        f"{MAX_ATTEMPTS} workers died, one after another, while they answered the same messages "
        f"(to clients: {clients}). Check whether the app ends its process, or needs more memory "
        "than is available."
    )


def _list_entries(entries: Iterable[RecordEntry]) -> str:
    """Return a text that lists arrays and values of a reply: "A, B, C and 2 more".

    The text gives the name and the shape of an array, and the name of a value.
    """
    texts = [str(entry) for entry in sorted(entries)]
    shown = ", ".join(texts[:MAX_ENTRIES])
    rest = len(texts) - MAX_ENTRIES
    return f"{shown} and {rest} more" if rest > 0 else shown


def _with_raysim_metadata(message: Message, request: Request) -> GridMessage:
    """Return a copy of the ServerApp's message in which raysim sets ids, time and time limit.

    request: has the message's id, its content, its virtual time and its `ttl`.
    """
    sent = message.metadata
    metadata = Metadata(
        run_id=RUN_ID,
        message_id=request.message_id,
        src_node_id=sent.src_node_id,
        dst_node_id=sent.dst_node_id,
        reply_to_message_id="",
        group_id=sent.group_id,
        created_at=request.created_at,
        ttl=request.ttl,
        message_type=sent.message_type,
    )
    return GridMessage(metadata, request.content)
