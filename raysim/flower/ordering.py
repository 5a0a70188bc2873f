"""Sort the results that older Flower strategies aggregate, so that threads change nothing.

A `flwr.server.Server` calls its clients in threads and collects the results in the order of a set.
Therefore sums of floats would differ from run to run. Before each round the server asks the Grid
for nodes. At this moment raysim replaces the two functions of the server's strategy that aggregate
results. The new functions sort the results by virtual time, and then call the old ones.
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
    """A Grid that sorts the results of a `Server` before the server's strategy gets them."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the available nodes; if a `Server` calls this, begin a batch."""
        if self.is_owner():
            server = calling_server()
            if server is not None:
                order_results(server.strategy, self)
                self.begin_batch()
        return super().get_node_ids()


def calling_server() -> Server | None:
    """Return the `Server` that is among the callers of this function; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Server):
            return owner
        frame = frame.f_back
    return None


def order_results(strategy: Any, grid: VirtualGrid) -> None:
    """Let a strategy sort results before it aggregates them.

    A second call with the same strategy and Grid changes nothing.
    strategy: the strategy of Flower's older `Server`.
    grid: knows the virtual time of each reply.
    """
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
