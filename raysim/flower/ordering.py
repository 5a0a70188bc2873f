"""Give the results of older strategies an order that does not depend on threads.

A `flwr.server.Server` asks its clients in threads and collects the results in the order of a set,
so that sums of floats differ from run to run. raysim wraps the functions of the strategy: a round
begins when the strategy has chosen clients, and its results are sorted before they are aggregated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flwr.server import Server

from raysim.flower.grid import VirtualGrid

_CHOOSE = ("configure_fit", "configure_evaluate")
_AGGREGATE = ("aggregate_fit", "aggregate_evaluate")
_MARK = "raysim_grid"


@contextmanager
def ordered_strategies(grid: VirtualGrid) -> Iterator[None]:
    """Order the results of the strategy of each `Server` that a ServerApp starts meanwhile.

    Flower calls `Server.client_manager` before it starts a server; this is the only public moment
    at which its strategy exists.
    """
    usual = Server.client_manager

    def client_manager(server: Server) -> Any:
        order_results(server.strategy, grid)
        return usual(server)

    Server.client_manager = client_manager
    try:
        yield
    finally:
        Server.client_manager = usual


def order_results(strategy: Any, grid: VirtualGrid) -> None:
    """Wrap the functions of a strategy that choose clients and aggregate their results."""
    if getattr(strategy, _MARK, None) is grid:
        return
    setattr(strategy, _MARK, grid)
    for name in _CHOOSE:
        setattr(strategy, name, _beginning_batch(getattr(type(strategy), name), strategy, grid))
    for name in _AGGREGATE:
        setattr(strategy, name, _with_order(getattr(type(strategy), name), strategy, grid))


def _beginning_batch(
    choose: Callable[..., Any], strategy: Any, grid: VirtualGrid
) -> Callable[..., Any]:
    def chosen(*args: Any, **kwargs: Any) -> Any:
        instructions = choose(strategy, *args, **kwargs)
        if instructions:
            grid.begin_batch()
        return instructions

    return chosen


def _with_order(
    aggregate: Callable[..., Any], strategy: Any, grid: VirtualGrid
) -> Callable[..., Any]:
    def aggregated(server_round: int, results: list[Any], failures: list[Any]) -> Any:
        times = grid.end_batch()
        ordered = sorted(results, key=lambda result: times.get(result[0].cid, (0.0, 0)))
        return aggregate(strategy, server_round, ordered, sorted(failures, key=str))

    return aggregated
