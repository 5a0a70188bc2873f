"""Find the scores that a ServerApp computes itself, such as an accuracy on a central test set.

Flower returns them to the app only. A strategy for messages keeps them in a `Result`, and a
`Server` in a `History`; both are variables of a function that calls the Grid.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, TypeAlias

from flwr.server import History
from flwr.serverapp.strategy import Result

AppScores: TypeAlias = Result | History


def calling_scores() -> AppScores | None:
    """Return the `Result` or `History` of the strategy or server that calls this function.

    It is a variable of one of the callers. Return None if there is none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, Result | History):
                return value
        frame = frame.f_back
    return None


def last_scores(scores: AppScores) -> dict[str, float]:
    """Return the numbers that the app computed on the server in its last round, by name."""
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
