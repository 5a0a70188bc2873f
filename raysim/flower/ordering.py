"""Sort the results that older Flower strategies aggregate, so that runs are bit-identical.

Flower's older `Server` collects the clients' results in a random order. raysim therefore runs a
copy of the ServerApp whose strategy sorts the results by virtual time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flwr.server import Server
from flwr.server.strategy import Strategy
from flwr.serverapp import ServerApp

from raysim.flower.grid import VirtualGrid


@contextlib.contextmanager
def order_app(app: ServerApp, grid: VirtualGrid) -> Iterator[ServerApp]:
    """Yield a copy of a ServerApp whose strategy aggregates results in the order of virtual time.

    If the app has no strategy, its copy behaves like the app. If the app has a `Server`, the
    strategy of this server is replaced by one that sorts results, until the `with` block ends.
    grid: the Grid, which has the virtual time of each reply.
    """
    kind: Any = type(app)
    changed: list[tuple[Server, Strategy]] = []

    class OrderedServerApp(kind):
        """A ServerApp whose strategy sorts clients' results before it aggregates them."""

        def __init__(self) -> None:
            for name, value in vars(app).items():
                setattr(self, name, value)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute; if the value is a strategy, set a copy that sorts results.

            If the value is a `Server`, replace the strategy of this server by such a copy.
            """
            if isinstance(value, Strategy):
                value = order_results(value, grid)
            elif isinstance(value, Server):
                changed.append((value, value.strategy))
                value.set_strategy(order_results(value.strategy, grid))
            super().__setattr__(name, value)

    try:
        yield OrderedServerApp()
    finally:
        # The copy shares its servers with the app, which may run again.
        for server, strategy in reversed(changed):
            server.set_strategy(strategy)


def order_results(strategy: Strategy, grid: VirtualGrid) -> Strategy:
    """Return a copy of a strategy that sorts results by virtual time before it aggregates them.

    The copy and `strategy` share all attributes, so a change of an attribute affects both.
    grid: the Grid, which has the virtual time of each reply.
    """
    kind: Any = type(strategy)

    class OrderedStrategy(kind):
        """A strategy that sorts clients' results by virtual time before it aggregates them."""

        def __init__(self) -> None:
            self.__dict__ = strategy.__dict__

        def aggregate_fit(
            self, server_round: int, results: list[Any], failures: list[Any], *more: Any
        ) -> Any:
            """Sort training results by virtual time; let the base class aggregate them."""
            ordered = _in_order(results, failures, grid)
            return super().aggregate_fit(server_round, *ordered, *more)

        def aggregate_evaluate(
            self, server_round: int, results: list[Any], failures: list[Any], *more: Any
        ) -> Any:
            """Sort evaluation results by virtual time; let the base class aggregate them."""
            ordered = _in_order(results, failures, grid)
            return super().aggregate_evaluate(server_round, *ordered, *more)

    ordered_strategy: Strategy = OrderedStrategy()
    return ordered_strategy


def _in_order(
    results: list[Any], failures: list[Any], grid: VirtualGrid
) -> tuple[list[Any], list[Any]]:
    """Sort results and failures, so that their order does not depend on threads; return both.

    Results are pairs of a client and its reply, sorted by the virtual time of the reply. Failures
    are errors and such pairs. The errors come first, sorted by their texts; the pairs follow,
    sorted by virtual time.
    """
    times = grid.end_batch()

    def arrival(result: Any) -> tuple[float, int]:
        return times.get(result[0].node_id, (0.0, 0))

    errors = [failure for failure in failures if isinstance(failure, BaseException)]
    pairs = [failure for failure in failures if not isinstance(failure, BaseException)]
    return sorted(results, key=arrival), sorted(errors, key=str) + sorted(pairs, key=arrival)
