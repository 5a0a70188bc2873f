"""A worker that lets a Flower app's clients answer messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from raysim.flower.client import AppError, AppRunner
from raysim.flower.messages import instruction
from raysim.flower.project import LoadedClientApp, load_client_app
from raysim.flower.records import pack_records, unpack_records
from raysim.training.determinism import make_deterministic


@dataclass(frozen=True)
class AppSpec:
    """All that a worker for an app is made from; it can be pickled.

    app: "module:object", or an app that is loaded already.
    folder: the project's folder.
    clients: the number of clients.
    seed: of the run.
    threads: of torch in each worker.
    """

    app: str | LoadedClientApp
    folder: Path
    clients: int
    run_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    threads: int = 1
    key: str = "clientapp"

    def runner(self) -> AppRunner:
        """Load the app in this process."""
        app = self.app
        if isinstance(app, str):
            app = load_client_app(app, self.folder, self.key)
        return AppRunner(app, self.clients, self.run_config, self.seed, self.folder)


@dataclass(frozen=True)
class Request:
    """A message that a client shall answer.

    number: how many messages the client received before.
    state: the client's packed records, or b"".
    content: the records of the message.
    """

    client: int
    number: int
    message_type: str
    message_id: str
    content: RecordDict
    state: bytes = b""
    group_id: str = ""
    created_at: float = 0.0
    ttl: float = 0.0


@dataclass(frozen=True)
class Answer:
    """A client's reply: packed content and state, or the text of an error."""

    content: bytes = b""
    state: bytes = b""
    error: str = ""


class AppWorker:
    """A worker that lets the clients of an app answer messages, one after another."""

    def __init__(self, spec: AppSpec):
        make_deterministic(spec.threads)
        self.runner = spec.runner()

    def ready(self) -> bool:
        """Return True once the app is loaded."""
        return True

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answer to each message. An app that fails answers with an error."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer:
        message = instruction(
            request.client,
            copy_records(request.content),
            request.message_type,
            request.message_id,
            group_id=request.group_id,
            created_at=request.created_at,
            ttl=request.ttl,
        )
        state = unpack_records(request.state) if request.state else RecordDict()
        try:
            content, state = self.runner.answer(message, request.number, state)
            packed = pack_records(content)
        except AppError as error:
            return Answer(error=f"client {request.client}: {error}")
        return Answer(packed, pack_records(state) if len(state) else b"")


def copy_records(content: RecordDict) -> RecordDict:
    """Return new records with the same arrays, because an app may remove entries from them."""
    copied = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            copied[name] = ArrayRecord(dict(record))
        elif isinstance(record, MetricRecord):
            copied[name] = MetricRecord(dict(record))
        else:
            copied[name] = ConfigRecord(dict(record))
    return copied
