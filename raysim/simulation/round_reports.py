"""Keep aggregated rounds until their scores are computed, then report them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from raysim.api.messages import Failure, Probe
from raysim.simulation.best_model import BestModel
from raysim.simulation.calls import WorkerCalls
from raysim.simulation.evaluator import Evaluator, Scoring
from raysim.simulation.events import JobRecord, Notice, Round, Row, Waiting
from raysim.simulation.history_row import RowWriter


@dataclass
class PendingRound:
    """An aggregation that the server has made and the run has not reported yet.

    row: the columns of the history so far, without scores.
    probes: the probes of local models, if `evaluate.probe` is set.
    jobs: the jobs that ended in this round.
    scorings: the calls that score this round's models.
    scored: the vector and the integer buffers of the scored model; None without scores.
    """

    row: Row
    failures: tuple[Failure, ...]
    probes: tuple[Probe, ...]
    jobs: tuple[JobRecord, ...]
    scorings: list[Scoring] = field(default_factory=list)
    scored: tuple[Tensor, Tensor] | None = None


class RoundReports:
    """The object that adds scores to the rows of rounds and reports the rounds.

    calls: waits for the scores of workers.
    history: gets the rows.
    best_model: gets each scored model, and keeps the model of the best round.
    """

    def __init__(
        self, evaluator: Evaluator, calls: WorkerCalls, history: RowWriter, best_model: BestModel
    ):
        self._evaluator, self._calls, self._history = evaluator, calls, history
        self._best_model = best_model
        self._pending: list[PendingRound] = []

    def add(self, pending: PendingRound) -> None:
        """Add a round that the next `report` will report."""
        self._pending.append(pending)

    def report(self) -> Iterator[Round | Waiting | Notice]:
        """Wait for the scores of all added rounds, and yield each round.

        `Waiting` and `Notice` events are yielded while it waits.
        """
        for pending in self._pending:
            for scoring in pending.scorings:
                yield from self._calls.wait_with_events(scoring.calls)
                pending.row |= self._evaluator.columns(scoring)
            if pending.scored is not None:
                self._best_model.take(pending.row, *pending.scored)
            self._history.rows.append(pending.row)
            scores = self._evaluator.scores(pending.scorings)
            yield Round(pending.row, pending.failures, pending.probes, pending.jobs, scores)
        self._pending = []
