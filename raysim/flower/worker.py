"""A worker in which the clients of a Flower app answer messages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from raysim.flower.client import AppError, AppRunner
from raysim.flower.messages import instruction
from raysim.flower.project import LoadedClientApp, load_client_app
from raysim.flower.records import pack_records, unpack_records
from raysim.training.determinism import make_deterministic


@dataclass(frozen=True)
class AppSpec:
    """What a worker of an app needs to start; it can be pickled.

    app: "module:object" of a ClientApp, or a loaded one.
    folder: the project's folder.
    run_config: Flower's run config.
    key: the setting that gives the app, for errors.
    """

    app: str | LoadedClientApp
    folder: Path
    clients: int
    run_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    threads: int = 1
    key: str = "clientapp"

    def runner(self) -> AppRunner:
        """Load the app in this process; return the object through which it answers messages."""
        app = self.app
        if isinstance(app, str):
            app = load_client_app(app, self.folder, self.key)
        return AppRunner(app, self.clients, self.run_config, self.seed, self.folder)


@dataclass(frozen=True)
class Request:
    """A message for a client to answer.

    number: how many messages the client has received before.
    message_type: Flower's type, such as "train" or "evaluate".
    message_id: unique in the run.
    state: the packed records that the client keeps; b"" for none.
    group_id: the app's name for a group of messages, such as the number of the round; "" for none.
    created_at: the virtual time of sending, in seconds.
    ttl: the virtual seconds after which the message expires.
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
    """A client's answer: a reply, or an error.

    content: the packed records of the reply, uint8; empty for an error.
    state: the packed records that the client keeps; b"" for none.
    error: the text of the error; "" for a reply.
    """

    content: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    state: bytes = b""
    error: str = ""


class AppWorker:
    """A worker in which clients of an app answer messages, one after another.

    spec: the app, and the settings of the run.
    """

    def __init__(self, spec: AppSpec):
        make_deterministic(spec.threads)
        self.runner = spec.runner()

    def ready(self) -> bool:
        """Return True. With Ray, the answer comes only after the worker has loaded the app."""
        return True

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Return an answer for each message; if the app fails, the answer has an error."""
        with self.runner.preserved_generators():
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
            content, state = self.runner.answer_next(message, request.number, state)
            packed = pack_records(content)
        except AppError as error:
            return Answer(error=f"client {request.client}: {error}")
        kept = pack_records(state) if len(state) else b""
        return Answer(np.frombuffer(packed, np.uint8), kept)


def copy_records(content: RecordDict) -> RecordDict:
    """Return a copy of records whose arrays use the same memory as the original arrays.

    An app gets such a copy, because it may add, replace or remove entries of the records.
    """
    copied = content.copy()
    for name, record in content.items():
        copied[name] = record.copy()
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                copied[name][key] = copy.copy(array)
    return copied
