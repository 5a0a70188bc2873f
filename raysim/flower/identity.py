"""Give this process the identity that it needs to make Flower messages.

Flower gives an identity only to the processes that it starts. In any other process, running a
`ServerApp` with a `Server` once, without clients, sets the identity.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

from flwr.app import Context, RecordDict
from flwr.server import History, Server, ServerApp, ServerAppComponents, SimpleClientManager

from raysim.flower.messages import RUN_ID, SERVER_NODE_ID
from raysim.flower.simple_grid import SimpleGrid


# No other public object of Flower sets the identity.
class _IdleServer(Server):
    """A server that sends no messages."""

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[History, float]:
        """Return an empty history and 0 seconds; both arguments have no effect."""
        return History(), 0.0


@contextlib.contextmanager
def silent_flower() -> Iterator[None]:
    """Let Flower log only errors in a `with` block."""
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def set_identity() -> None:
    """Run an empty ServerApp, so that this process can create Flower messages.

    Flower allows messages only in processes that it started or that ran a ServerApp. Only the first
    call has an effect.
    """
    app = ServerApp(server_fn=_components)
    context = Context(
        run_id=RUN_ID,
        node_id=SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config={},
    )
    with silent_flower():
        app(SimpleGrid(), context)


def _components(context: Context) -> ServerAppComponents:
    return ServerAppComponents(server=_IdleServer(client_manager=SimpleClientManager()))
