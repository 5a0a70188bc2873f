"""What a person sees while a run goes on: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from raysim.results.history import Row, metric_of

if TYPE_CHECKING:
    from rich.console import Console

PACE_ROUNDS = 20  # rounds whose median is the pace
LOG_INTERVAL_S = 10.0  # seconds between two lines of a log


def format_duration(seconds: float) -> str:
    """Seconds as a person says them: 0.42 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@contextmanager
def waiting_line(console: Console) -> Iterator[Callable[..., None]]:
    """Takes what is waited for: in a log a line for each; in a terminal one line, with seconds.

    What is given behind it later is how far that is: a terminal shows it, and its seconds go on.
    """
    if not console.is_terminal:

        def note(text: str, far: str = "") -> None:
            if not far:
                console.print(f"{'':<10}{text}", markup=False, highlight=False, soft_wrap=True)

        yield note
        return
    from rich.progress import Progress as Bar, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", style="default", markup=False),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as line:
        task = line.add_task("", total=None)

        def show(text: str, far: str = "") -> None:
            if not far:
                line.reset(task)
            line.update(task, description=f"{text}{far}")

        yield show


@contextmanager
def activity_line(console: Console, text: str) -> Iterator[None]:
    """Says what goes on after the last round, as `waiting` does before the first."""
    with waiting_line(console) as says:
        says(text)
        yield


class Progress:
    """Shows round, scores, seconds per round, time left and failures; `done` rounds were made by an earlier run."""

    def __init__(
        self,
        total: int,
        *,
        done: int = 0,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress as Bar, TextColumn

        self.total, self.round, self.failures = total, done, 0
        self.quiet, self.clock, self.console = quiet, clock, console or Console()
        self.metric = "accuracy"
        self.scores: dict[str, float] = {}  # last known ones
        self.pace: deque[float] = deque(maxlen=PACE_ROUNDS)
        self.samples: deque[int] = deque(maxlen=PACE_ROUNDS)  # trained on in the same rounds
        self.busy: dict[
            str, float
        ] = {}  # shares of wall time, of workers and devices, in the last round
        self._wall = 0.0 if done == 0 else None  # cumulative seconds at the last row
        self._said, self._at = "", clock()
        self._waits_for = ""
        self._bar = Bar(
            BarColumn(24), TextColumn("{task.description}"), console=self.console, transient=False
        )
        self._live = self.console.is_terminal and not quiet
        self._task = self._bar.add_task(
            "first round" if done == 0 else "next round", total=total, completed=done
        )

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()
        elif self._said != self.line():
            self._say()

    def line(self) -> str:
        """The state of the run in one line."""
        parts = [f"round {self.round}/{self.total}"]
        if self.scores:
            parts.append(
                f"{self.metric} "
                + ", ".join(f"{value:.3f} {name}" for name, value in self.scores.items())
            )
        if self.pace:
            pace = statistics.median(self.pace)
            parts += [
                f"{format_duration(pace)}/round",
                f"{format_duration(pace * (self.total - self.round))} left",
            ]
            parts += (
                [f"{sum(self.samples) / max(sum(self.pace), 1e-9):,.0f} samples/s"]
                if any(self.samples)
                else []
            )
        if self.busy:
            parts.append(
                ", ".join(f"{name} {share:.0%}" for name, share in self.busy.items()) + " busy"
            )
        if self.failures:
            parts.append(f"{self.failures} failure{'s' if self.failures > 1 else ''}")
        if self._waits_for:
            parts.append(self._waits_for)
        return " · ".join(parts)

    def update(self, row: Row) -> None:
        """Take in one row of the history."""
        self.round, wall = int(row["round"] or 0), float(row.get("wall_seconds") or 0.0)
        self.failures += int(row.get("failures") or 0)
        self.metric = metric_of([row])
        named = {"clients": row.get(self.metric), "global": row.get(f"{self.metric}_global")}
        self.scores.update({name: value for name, value in named.items() if value is not None})
        if self._wall is not None:
            self.pace.append(max(0.0, wall - self._wall))
            self.samples.append(int(row.get("samples") or 0))
        self._wall, self._waits_for = wall, ""
        shares = {"workers": row.get("worker_busy"), "devices": row.get("device_busy")}
        self.busy = {name: share for name, share in shares.items() if share is not None}
        self._show(self.clock() - self._at >= LOG_INTERVAL_S)

    def wait(self, worker: int, clients: Sequence[str], seconds: float) -> None:
        """Say which worker the run waits for, the clients that it trains, and for how long."""
        some = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
        whose = f" with client{'s' if len(clients) > 1 else ''} {some}" if clients else ""
        self._waits_for = f"worker {worker}{whose} has not answered for {format_duration(seconds)}"
        self._show(True)

    def _show(self, say: bool) -> None:
        """In a terminal always, in a log where there is something to say."""
        if self._live:
            self._bar.update(self._task, completed=self.round, description=self.line())
        elif say:
            self._say()

    def note(self, text: str) -> None:
        """Print one line, above the bar where there is one."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _say(self) -> None:
        self._said, self._at = self.line(), self.clock()
        self.note(self._said)
