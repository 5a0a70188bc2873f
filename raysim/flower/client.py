"""Let a ClientApp answer messages, with seeded random generators and clear errors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict

from raysim.api.hook_checks import HookError
from raysim.flower.messages import RUN_ID, GridMessage, client_number
from raysim.flower.project import LoadedClientApp
from raysim.flower.records import check_records
from raysim.primitives.streams import torch_seed
from raysim.primitives.users_lines import users_line
from raysim.training.own_training import preserved_generators, seed_generators


class AppError(HookError):
    """The error of a ClientApp that did not answer a message.

    The text contains the line of the app that failed, if there is one.
    """


@dataclass(frozen=True)
class AppRunner:
    """A ClientApp that answers messages for all clients of a run, one after another.

    run_config: Flower's run config, which the app can read.
    seed: the seed of the app's random generators.
    folder: the folder of the app's code, for errors; None if unknown.
    """

    app: LoadedClientApp
    clients: int
    run_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    folder: Path | None = None

    def context(self, node: int, state: RecordDict) -> Context:
        """Return Flower's context for a client.

        node: the node id of the client.
        state: the records that the client keeps.
        """
        node_config = {"partition-id": client_number(node), "num-partitions": self.clients}
        return Context(
            run_id=RUN_ID,
            node_id=node,
            node_config=node_config,
            state=state,
            run_config=dict(self.run_config),
        )

    @contextlib.contextmanager
    def preserved_generators(self) -> Iterator[None]:
        """Restore the states of the global random generators at the end of a `with` block."""
        with preserved_generators(_device()):
            yield

    def answer(
        self, message: GridMessage, number: int, state: RecordDict
    ) -> tuple[RecordDict, RecordDict]:
        """Return the content of the client's reply, and the records that the client keeps.

        The global generators of `random`, NumPy and torch are seeded from `seed`, the message's
        type, the client and `number`, and restored afterwards.
        state: the records that the client has kept so far.
        Raise AppError if the app raises an error, exits, returns no message with content, or uses
        records that cannot be stored.
        """
        with self.preserved_generators():
            return self.answer_next(message, number, state)

    def answer_next(
        self, message: GridMessage, number: int, state: RecordDict
    ) -> tuple[RecordDict, RecordDict]:
        """Do the same as `answer`, but do not restore the global random generators.

        A caller that needs many answers restores them once, with `preserved_generators`.
        """
        node = message.metadata.dst_node_id
        context = self.context(node, state)
        kind = message.metadata.message_type
        seed_generators(
            torch_seed(self.seed, f"flower.{kind}", client_number(node), number), _device()
        )
        with torch.enable_grad(), self._app_errors():
            returned = self.app.app(message, context)
        if not isinstance(returned, Message):
            raise AppError(
                f"the app returned a {type(returned).__name__}. Return a Message that replies to "
                "the received one."
            )
        if returned.has_error():
            error = returned.error
            raise AppError(
                f"the app replied with an error, code {error.code}: {error.reason}. Correct the "
                "function of the app that handles this type of message."
            )
        try:
            check_records(returned.content, "the content of the reply")
            check_records(context.state, "context.state")
        except TypeError as error:
            raise AppError(str(error)) from error
        return returned.content, context.state

    @contextlib.contextmanager
    def _app_errors(self) -> Iterator[None]:
        """Raise `AppError` for errors of the user's app; print the app's output to stderr."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except SystemExit as error:
            place = users_line(error, self.folder)
            raise AppError(
                f"the app called sys.exit({error.code!r}){place}. Raise an error instead."
            ) from error
        except Exception as error:
            place = users_line(error, self.folder)
            raise AppError(f"the app raised {type(error).__name__}: {error}{place}") from error


def _device() -> torch.device:
    """Return the device whose random generator must be seeded, in addition to that of the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
