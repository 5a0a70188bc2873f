"""The part of a Grid that does not depend on how messages are answered."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from raysim.flower.messages import RUN_ID


class SimpleGrid(Grid):
    """A Grid of one run. A subclass says which nodes there are and what messages return."""

    def __init__(self) -> None:
        self._run: Any = SimpleNamespace(run_id=RUN_ID, override_config={}, fab_id="")

    def set_run(self, run: Any) -> None:
        """Replace the description of the run."""
        self._run = run

    @property
    def run(self) -> Any:
        """The run; its `run_id` is that of all messages."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a new message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are available."""
        return []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse messages."""
        raise NotImplementedError(f"{type(self).__name__} needs a function 'push_messages'")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Refuse to return replies."""
        raise NotImplementedError(f"{type(self).__name__} needs a function 'pull_messages'")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refuse messages."""
        raise NotImplementedError(f"{type(self).__name__} needs a function 'send_and_receive'")
