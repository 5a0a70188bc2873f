"""Get a Flower app's initial parameters, and the config that its ServerApp sends.

If the user names no function for the parameters, raysim runs the ServerApp until its first message
for training. This message contains the parameters. Without a ServerApp, client 0 provides them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import ServerApp

from raysim.flower.client import AppError, AppRunner
from raysim.flower.identity import set_identity, silent_flower
from raysim.flower.messages import (
    RUN_ID,
    SERVER_NODE_ID,
    instruction,
    node_id,
)
from raysim.flower.project import load_object
from raysim.flower.simple_grid import SimpleGrid
from raysim.primitives.errors import RefusedError
from raysim.primitives.users_lines import users_line
from raysim.training.own_training import seeded_generators

GET_PARAMETERS = "get_parameters"


@dataclass(frozen=True)
class InitialModel:
    """The initial parameters of a Flower app.

    arrays: the parameters of version 0, by name.
    config: the config in the first message for training.
    """

    arrays: dict[str, np.ndarray]
    config: dict[str, Any] = field(default_factory=dict)


def make_initial(
    runner: AppRunner, function: str, server_app: str, client_app: str
) -> InitialModel:
    """Return the initial parameters of a Flower app.

    `function` provides them if it is set, or else `server_app`, or else client 0 of the ClientApp.
    The runner's seed seeds the global random generators.
    function: "module:function", or "".
    server_app: "module:object" of a ServerApp, or "".
    client_app: "module:object" of the ClientApp, for errors.
    Raises `RefusedError` if nothing provides parameters that can be read.
    """
    folder = runner.folder or Path.cwd()
    with seeded_generators(runner.seed, torch.device("cpu")):
        if function:
            setting = f"learner.parameters={function}"
            maker = load_object(function, folder, "learner.parameters")
            if not callable(maker):
                raise RefusedError(f"{setting} cannot be called. Give a function.")
            return from_object(maker(), setting)
        if server_app:
            return from_server_app(server_app, runner, folder)
        if not runner.app.uses_client_fn:
            raise RefusedError(
                f"learner.app={client_app}: nothing provides the initial parameters. "
                "Set learner.parameters=module:function; this function must return the model. Or "
                "set learner.folder to the folder of the app's project, if its pyproject.toml "
                "names a ServerApp."
            )
        try:
            return from_client(runner)
        except AppError as error:
            raise RefusedError(
                f"learner.app={client_app}: get_parameters of client 0 fails ({error}). "
                "Set learner.parameters=module:function, a function that returns the model."
            ) from error


class _FirstMessage(BaseException):
    """The exception that stops a ServerApp at its first message for training."""


class _FirstMessageGrid(SimpleGrid):
    """A Grid that stops the ServerApp at its first training message.

    runner: the ClientApp, which answers all messages before this one.
    first: the first training message; None before the ServerApp sends it.
    """

    def __init__(self, runner: AppRunner):
        super().__init__()
        self.runner = runner
        self.first: Message | None = None

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of all clients."""
        return [node_id(client) for client in range(self.runner.clients)]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the clients' replies; stop the ServerApp at the first training message.

        messages: the messages to clients. A training message is stored in `first`.
        timeout: has no effect.
        """
        replies = []
        for number, message in enumerate(messages):
            kind = message.metadata.message_type
            if kind.split(".")[0] == "train":
                if self.first is None:
                    self.first = message
                raise _FirstMessage
            client = message.metadata.dst_node_id - node_id(0)
            message_to_client = instruction(client, message.content, kind, f"before-{number}")
            content, _ = self.runner.answer(message_to_client, 0, RecordDict())
            replies.append(Message(content, reply_to=message_to_client))
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Stop the ServerApp if a message is for training; otherwise return an empty list."""
        self.send_and_receive(messages)
        return []  # no ids of messages, so that the ServerApp gets no replies


def from_server_app(reference: str, runner: AppRunner, folder: Path) -> InitialModel:
    """Return the parameters and the config in a ServerApp's first message for training.

    reference: "module:object" of the ServerApp.
    runner: the ClientApp, which answers all earlier messages.
    Raises `RefusedError` if `reference` names no ServerApp, or if the app sends no such message.
    Also raises `RefusedError` if the message has not exactly one ArrayRecord.
    """
    key = f"learner.app: its ServerApp {reference}"
    app = load_object(reference, folder, "learner.app: its ServerApp")
    if not isinstance(app, ServerApp):
        raise RefusedError(
            f"{key}: this object is a {type(app).__name__}, not a ServerApp. Correct its name in "
            "pyproject.toml, or set learner.parameters=module:function, a function that "
            "returns the model; then no ServerApp is needed."
        )
    grid = _FirstMessageGrid(runner)
    context = Context(
        run_id=RUN_ID,
        node_id=SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(runner.run_config),
    )
    set_identity()
    try:
        with contextlib.redirect_stdout(sys.stderr), silent_flower():
            app(grid, context)
    except _FirstMessage:
        pass
    except (Exception, SystemExit) as error:
        if grid.first is None:
            place = users_line(error, folder)
            raise RefusedError(
                f"{key} raised {type(error).__name__} before it sent a message for training: "
                f"{error}{place}. Correct the ServerApp, or set "
                "learner.parameters=module:function, a function that returns the model."
            ) from error
    if grid.first is None:
        raise RefusedError(
            f"{key} sends no message for training. raysim reads the initial parameters from the "
            "first message for training. Set learner.parameters=module:function instead, a "
            "function that returns the model."
        )
    content = grid.first.content
    return InitialModel(_only_arrays(content, key), _config_of(content))


def _only_arrays(content: RecordDict, key: str) -> dict[str, np.ndarray]:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise RefusedError(
            f"{key}: its first message for training has {len(records)} ArrayRecords instead of one "
            "with the model. Set learner.parameters=module:function, a function that returns the "
            "model."
        )
    return arrays_of(records[0])


def _config_of(content: RecordDict) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for record in content.config_records.values():
        values.update(record)
    return values


def arrays_of(record: ArrayRecord) -> dict[str, np.ndarray]:
    """Return the arrays of a record, by name."""
    return {name: array.numpy() for name, array in record.items()}


def from_client(runner: AppRunner) -> InitialModel:
    """Return the parameters that client 0 returns from `get_parameters`.

    runner: the ClientApp.
    Raises AppError if the client fails or does not return any.
    """
    content = RecordDict({"getparametersins.config": ConfigRecord()})
    message = instruction(0, content, GET_PARAMETERS, "initial")
    returned, _ = runner.answer(message, 0, RecordDict())
    (record,) = returned.array_records.values()
    # Without arrays, Flower returns an entry without data.
    if not any(array.data for array in record.values()):
        raise AppError("the client has no function get_parameters, or it returned no arrays")
    return InitialModel(arrays_of(record))


def from_object(made: Any, key: str) -> InitialModel:
    """Return the initial parameters in an object that a user's function returned.

    made: a module, arrays by name, a list of arrays, or an ArrayRecord.
    key: the setting that names the function, for errors.
    Raises `RefusedError` for any other object.
    """
    if hasattr(made, "state_dict"):
        made = made.state_dict()
    if isinstance(made, ArrayRecord):
        return InitialModel(arrays_of(made))
    if isinstance(made, Mapping):
        return InitialModel({str(name): _as_array(value) for name, value in made.items()})
    if isinstance(made, list | tuple):
        return InitialModel({str(name): _as_array(value) for name, value in enumerate(made)})
    raise RefusedError(
        f"{key}: the function returned a {type(made).__name__}. Return a torch.nn.Module, "
        "arrays by name, a list of arrays, or an ArrayRecord."
    )


def _as_array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
