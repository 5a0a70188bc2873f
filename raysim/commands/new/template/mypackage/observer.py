"""An observer: writes the best round so far into the run's folder."""

from __future__ import annotations

from raysim import Observer
from raysim.results.observers import CurrentRun
from raysim.simulation.events import Round


class MyObserver(Observer):
    """An observer that finds the round with the highest value of a column of the history.

    It writes this round's number and the value into best.txt. `raysim.Observer` lists the functions
    of observers.
    column: the name of the column.
    """

    def __init__(self, column: str = "accuracy_global"):
        self.column = column

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Write the best round so far; raysim calls this after every round.

        run: the run in progress. `run.rows` is the history so far, `run.folder` the run's folder.
        event: not used here.
        """
        measured = [row for row in run.rows if row.get(self.column) is not None]
        if measured:
            best = max(measured, key=lambda row: row[self.column] or 0.0)
            text = f"round {best['round']}: {self.column} {best[self.column]:.4f}\n"
            (run.folder / "best.txt").write_text(text)
