"""Collect the scores that a ServerApp computes itself, such as an accuracy on a central test set.

raysim reads these scores from Flower's log records. An app with its own training loop must log its
scores with the same texts as Flower.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

# The words in which message-based strategies log a MetricRecord.
_RECORD_TEXTS = ("Initial global evaluation results: %s", "└──> MetricRecord: %s")
# The words in which an older `Server` logs a loss and a dictionary of metrics, and the place of the
# loss among the logged values.
_LOSS_TEXTS = {
    "initial parameters (loss, other metrics): %s, %s": 0,
    "fit progress: (%s, %s, %s, %s)": 1,
}


class ScoreHandler(logging.Handler):
    """A handler of Flower's log that stores the scores of the ServerApp.

    scores: the last value of each score, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scores: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Find the scores in a message that Flower logged, and store them in this handler.

        record: the logged message; a message without scores has no effect.
        """
        text = str(record.msg).strip()
        if text in _RECORD_TEXTS and isinstance(record.args, Mapping):
            self._keep(record.args)
        elif text in _LOSS_TEXTS and isinstance(record.args, tuple):
            place = _LOSS_TEXTS[text]
            loss, metrics = record.args[place : place + 2]
            self._keep({"loss": loss})
            if isinstance(metrics, Mapping):
                self._keep(metrics)

    def _keep(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.scores[name] = float(value)


@contextlib.contextmanager
def collect_scores() -> Iterator[dict[str, float]]:
    """Yield a dictionary for the scores of the ServerApp that runs in the `with` block.

    The dictionary maps the name of a score to its value. It stays empty if the level of the logger
    "flwr" is above INFO.
    """
    handler = ScoreHandler()
    logger = logging.getLogger("flwr")
    logger.addHandler(handler)
    try:
        yield handler.scores
    finally:
        logger.removeHandler(handler)
