"""Give the results of older strategies an order that does not depend on threads.

A `flwr.server.Server` asks its clients in threads and collects the results in the order of a set,
so that sums of floats would differ from run to run. It asks the Grid for nodes before each round.
raysim then replaces, in the object of the server's strategy, the two functions that aggregate
results: they sort the results by virtual time first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from flwr.server import Server

from raysim.flower.grid import VirtualGrid

_AGGREGATE = ("aggregate_fit", "aggregate_evaluate")
_MARK = "raysim_grid"


class OrderedGrid(VirtualGrid):
    """A Grid that orders the results of the strategy of a `Server`."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the available nodes. A call of a `Server` begins a batch of messages."""
        if self.is_owner():
            server = calling_server()
            if server is not None:
                order_results(server.strategy, self)
                self.begin_batch()
        return super().get_node_ids()


def calling_server() -> Server | None:
    """Return the `Server` whose function is being called, or None."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Server):
            return owner
        frame = frame.f_back
    return None


def order_results(strategy: Any, grid: VirtualGrid) -> None:
    """Let a strategy sort results before it aggregates them; do nothing the second time."""
    if getattr(strategy, _MARK, None) is grid:
        return
    setattr(strategy, _MARK, grid)
    for name in _AGGREGATE:
        usual = getattr(type(strategy), name)
        setattr(strategy, name, _with_order(usual, strategy, grid))


def _with_order(usual: Callable[..., Any], strategy: Any, grid: VirtualGrid) -> Callable[..., Any]:
    def aggregate(server_round: int, results: list[Any], failures: list[Any]) -> Any:
        times = grid.end_batch()
        ordered = sorted(results, key=lambda result: times.get(result[0].node_id, (0.0, 0)))
        return usual(strategy, server_round, ordered, sorted(failures, key=str))

    return aggregate
