"""Collect the scores that a ServerApp computes itself, such as an accuracy on a central test set.

Flower returns these scores only to the app: a message-based strategy returns a `Result`, an older
`Server` a `History`. An app may override the function that makes them. Therefore raysim wraps the
constructors of both classes while the app runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

from flwr.server import History
from flwr.serverapp.strategy import Result

AppScores: TypeAlias = Result | History


@contextlib.contextmanager
def collect_scores() -> Iterator[list[AppScores]]:
    """Yield a list that gets each `Result` and each `History` that is made inside `with`."""
    made: list[AppScores] = []
    with _collect_objects(Result, made), _collect_objects(History, made):
        yield made


@contextlib.contextmanager
def _collect_objects(kind: Any, made: list[Any]) -> Iterator[None]:
    """Add each object of a class, and of its subclasses, to a list when it is made.

    kind: the class.
    made: the list that gets the objects.
    """
    constructor = kind.__init__

    @functools.wraps(constructor)
    def make(self: Any, *arguments: Any, **named: Any) -> None:
        constructor(self, *arguments, **named)
        made.append(self)

    kind.__init__ = make
    try:
        yield
    finally:
        kind.__init__ = constructor


def last_scores(scores: AppScores) -> dict[str, float]:
    """Return the numbers that the app computed on the server in its last round, by name.

    scores: the `Result` of a strategy, or the `History` of an older server.
    """
    numbers = {}
    for name, value in _last_values(scores):
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def _last_values(scores: AppScores) -> Iterator[tuple[str, Any]]:
    if isinstance(scores, Result):
        rounds = scores.evaluate_metrics_serverapp
        if rounds:
            yield from rounds[max(rounds)].items()
        return
    if scores.losses_centralized:
        yield "loss", scores.losses_centralized[-1][1]
    for name, values in scores.metrics_centralized.items():
        yield name, values[-1][1]
