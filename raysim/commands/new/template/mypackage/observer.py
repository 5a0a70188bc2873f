"""An observer: writes the best round so far into the run's folder."""

from __future__ import annotations

from raysim import Observer
from raysim.results.observers import CurrentRun
from raysim.simulation.events import Round


class MyObserver(Observer):
    """An observer that writes best.txt: the round in which a column has its highest value.

    `raysim.Observer` lists the other moments at which an observer can act.
    """

    def __init__(self, column: str = "accuracy_global"):
        self.column = column

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Write the best round so far; `run.rows` is the history up to this round."""
        measured = [row for row in run.rows if row.get(self.column) is not None]
        if measured:
            best = max(measured, key=lambda row: row[self.column] or 0.0)
            text = f"round {best['round']}: {self.column} {best[self.column]:.4f}\n"
            (run.folder / "best.txt").write_text(text)
