"""An observer: writes the best round so far into the run's folder."""

from __future__ import annotations

from raysim import Observer
from raysim.results.observers import CurrentRun
from raysim.simulation.events import Round


class MyObserver(Observer):
    """best.txt: the round with the highest value of a column. `raysim.Observer` lists the moments that it is told."""

    def __init__(self, column: str = "accuracy_global"):
        self.column = column

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Of the history so far, which is in `run.rows`."""
        known = [row for row in run.rows if row.get(self.column) is not None]
        if known:
            best = max(known, key=lambda row: row[self.column] or 0.0)
            (run.folder / "best.txt").write_text(
                f"round {best['round']}: {self.column} {best[self.column]:.4f}\n"
            )
