"""Show the progress of a run: a bar in a terminal, a line every few seconds in a log."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from raysim.results.history import Row, metric_of

if TYPE_CHECKING:
    from rich.console import Console

PACE_ROUNDS = 20  # the time left follows from the median of so many rounds
LOG_INTERVAL_S = 10.0  # between two lines of a log
MAX_NAMED_CLIENTS = 5


def format_duration(seconds: float) -> str:
    """Return a duration as text: 0.42 s, 12 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@contextmanager
def waiting_line(console: Console) -> Iterator[Callable[..., None]]:
    """Yield a function show(text, progress="") that shows what the program is waiting for.

    In a terminal, a line shows the text, the progress and the elapsed seconds. In a log, each call
    without `progress` writes a line.
    """
    if not console.is_terminal:

        def print_line(text: str, progress: str = "") -> None:
            if not progress:
                console.print(f"{'':<10}{text}", markup=False, highlight=False, soft_wrap=True)

        yield print_line
        return
    from rich.progress import Progress as Bar, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", style="default", markup=False),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(text: str, progress: str = "") -> None:
            if not progress:
                bar.reset(task)  # the seconds of a new text start at 0
            bar.update(task, description=f"{text}{progress}")

        yield show


@contextmanager
def activity_line(console: Console, text: str) -> Iterator[None]:
    """Show a text while the `with` block runs; in a log, print it as a line."""
    with waiting_line(console) as show:
        show(text)
        yield


class Progress:
    """The progress of a run: round, scores, seconds per round, time left and failures.

    total: the planned rounds.
    done: the finished rounds of a resumed run.
    quiet: True shows neither the bar nor lines.
    console: the terminal or the log; None prints to the standard output.
    clock: returns a time in seconds; tests replace it.
    """

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

        self.total = total
        self.round = done
        self.failures = 0
        self.quiet = quiet
        self.clock = clock
        self.console = console or Console()
        self.metric = "accuracy"
        self.scores: dict[str, float] = {}  # the newest known scores
        self.round_seconds: deque[float] = deque(maxlen=PACE_ROUNDS)
        self.round_samples: deque[int] = deque(maxlen=PACE_ROUNDS)
        # Shares of wall time that workers and devices were busy in the last round.
        self.busy: dict[str, float] = {}
        # cumulative wall time at the last row; None if unknown
        self._wall_s = 0.0 if done == 0 else None
        self._last_line = ""
        self._last_line_at = clock()
        self._wait_text = ""
        self._bar = Bar(
            BarColumn(24), TextColumn("{task.description}"), console=self.console, transient=False
        )
        self._is_live = self.console.is_terminal and not quiet
        description = "first round" if done == 0 else "next round"
        self._task = self._bar.add_task(description, total=total, completed=done)

    def __enter__(self) -> Self:
        if self._is_live:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._bar.stop()
        elif self._last_line != self.line():
            self._print_line()

    def line(self) -> str:
        """Return the state of the run in one line."""
        parts = [f"round {self.round}/{self.total}"]
        if self.scores:
            scores = ", ".join(f"{name} {value:.3f}" for name, value in self.scores.items())
            parts.append(f"{self.metric}: {scores}")
        if self.round_seconds:
            seconds = statistics.median(self.round_seconds)
            parts.append(f"{format_duration(seconds)}/round")
            parts.append(f"{format_duration(seconds * (self.total - self.round))} left")
            if any(self.round_samples):
                rate = sum(self.round_samples) / max(sum(self.round_seconds), 1e-9)
                parts.append(f"{rate:,.0f} samples/s")
        if self.busy:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in self.busy.items())
            parts.append(f"{shares} busy")
        if self.failures:
            parts.append(f"{self.failures} failed job{'s' if self.failures > 1 else ''}")
        if self._wait_text:
            parts.append(self._wait_text)
        return " · ".join(parts)

    def update(self, row: Row) -> None:
        """Show a new row of the history."""
        self.round = int(row["round"] or 0)
        self.failures += int(row.get("failures") or 0)
        self.metric = metric_of([row])
        scores = {
            "mean of clients": row.get(self.metric),
            "central test set": row.get(f"{self.metric}_global"),
        }
        self.scores.update({name: value for name, value in scores.items() if value is not None})
        wall_s = float(row.get("wall_seconds") or 0.0)
        if self._wall_s is not None:
            self.round_seconds.append(max(0.0, wall_s - self._wall_s))
            self.round_samples.append(int(row.get("samples") or 0))
        self._wall_s = wall_s
        self._wait_text = ""
        shares = {"workers": row.get("worker_busy"), "devices": row.get("device_busy")}
        self.busy = {name: share for name, share in shares.items() if share is not None}
        self._show(is_line_due=self.clock() - self._last_line_at >= LOG_INTERVAL_S)

    def wait(
        self,
        worker: int,
        clients: Sequence[str],
        seconds: float,
        node: str = "",
        replaced_after: float = math.inf,
        node_timeout: float | None = None,
        stacks: str = "",
        ray_messages: str = "",
    ) -> None:
        """Show which worker the run waits for, and for how long.

        seconds: the time since the worker's last answer.
        node: name and address of the worker's node; "" if unknown.
        replaced_after: the seconds after which the worker is replaced; infinity means never.
        node_timeout: None if the node answers; otherwise the seconds after which it counts as lost.
        stacks, ray_messages: the files with the worker's call stacks and with Ray's messages; ""
        without one.
        """
        who = f"worker {worker} on {node}" if node else f"worker {worker}"
        if clients:
            names = ", ".join(clients[:MAX_NAMED_CLIENTS])
            ellipsis = ", ..." if len(clients) > MAX_NAMED_CLIENTS else ""
            who += f" with client{'s' if len(clients) > 1 else ''} {names}{ellipsis}"
        self._wait_text = f"{who} has not answered for {format_duration(seconds)}"
        if node_timeout is not None:
            limit = format_duration(node_timeout)
            self._wait_text += (
                f", and its node does not answer either; after {limit} (faults.node_timeout) other "
                "workers get its jobs"
            )
        elif node and math.isfinite(replaced_after):
            limit = format_duration(replaced_after)
            self._wait_text += f", and is replaced after {limit} (faults.timeout)"
        if stacks:
            self._wait_text += f"; see what its threads execute: {stacks}"
        if ray_messages:
            self._wait_text += f"; see Ray's own messages: {ray_messages}"
        self._show(is_line_due=True)

    def _show(self, is_line_due: bool) -> None:
        """Update the progress bar; without a terminal, print a line if `is_line_due` is True."""
        if self._is_live:
            self._bar.update(self._task, completed=self.round, description=self.line())
        elif is_line_due:
            self._print_line()

    def note(self, text: str) -> None:
        """Print one line, above the bar if there is one."""
        if not self.quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_line(self) -> None:
        self._last_line = self.line()
        self._last_line_at = self.clock()
        self.note(self._last_line)
