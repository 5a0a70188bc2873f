"""A Flower Grid without nodes, from which all Grids of raysim are derived.

A Flower ServerApp sends messages to nodes and gets replies through a Grid. `SimpleGrid` only
creates messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from raysim.flower.messages import RUN_ID


class SimpleGrid(Grid):
    """A Flower Grid that creates messages but has no nodes and sends nothing.

    It is the base class of all Grids in raysim. A subclass overrides `get_node_ids` and the
    functions that send messages.
    """

    def __init__(self) -> None:
        self._run: Any = SimpleNamespace(run_id=RUN_ID, override_config={}, fab_id="")

    def set_run(self, run: Any) -> None:
        """Replace the description of the run, which apps read as the attribute `run` of the Grid.

        run: the new description: Flower's `Run`, or an object with the same attributes.
        """
        self._run = run

    @property
    def run(self) -> Any:
        """The description of the run; all messages have its `run_id`."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message to a node; this function does not send it.

        message_type: Flower's type, such as "train".
        dst_node_id: the receiver.
        group_id: the name of a group of messages, such as the round.
        ttl: the message's lifetime in seconds; None for Flower's default.
        """
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the available nodes: none."""
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Raise NotImplementedError; a subclass must override this function."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a function 'push_messages'. Define it."
        )

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Raise NotImplementedError; a subclass must override this function."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a function 'pull_messages'. Define it."
        )

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Raise NotImplementedError; a subclass must override this function."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a function 'send_and_receive'. Define it."
        )
