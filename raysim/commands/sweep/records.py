"""Record the trials of a sweep: write them to files, print them, and track them in MLflow.

trials/0003/trial.json       setting, state, score: written when the trial starts and when it ends
            history.parquet  the mean of the runs' rows over the seeds, once the trial has ended
runs/0003_seed-0/            the trial's run with seed 0 (see `raysim/experiment/run_table.py`)

Only the process of the sweep uses this module.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from raysim.commands.sweep.plan import SweepPlan
from raysim.commands.sweep.space import Point
from raysim.commands.sweep.trial import run_folders
from raysim.experiment.many_runs import last_score, value_label
from raysim.experiment.run_table import describe_outcome, plus_minus
from raysim.primitives.errors import RefusedError
from raysim.results.history import Row, read_history, write_history, write_json
from raysim.results.observers import HISTORY
from raysim.results.progress import LOG_INTERVAL_S
from raysim.results.stored_runs import short_names
from raysim.results.tracking import (
    FINISH_TIMEOUT_S,
    NoTracker,
    StoredTracker,
    make_tracker,
    replay,
    source_tags,
)

if TYPE_CHECKING:
    from rich.console import Console

FILE = "trial.json"
ENDED = ("done", "stopped")  # the scheduler stops a trial if other trials are better


@dataclass
class TrialRecord:
    """One trial of a sweep.

    point: the values of the searched keys.
    status: "running", "done", "stopped" (by the scheduler) or "failed".
    rows: the history's rows by round, with means over the seeds.
    seconds: wall seconds of all rounds.
    score: the last value of the sweep's metric, or None.
    deviation: the standard deviation of the score over the seeds; None with one seed.
    """

    number: int
    point: Point
    status: str = "running"
    rows: dict[int, Row] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    score: float | None = None
    deviation: float | None = None

    def history(self) -> list[Row]:
        """Return the rows in the order of the rounds."""
        return [self.rows[number] for number in sorted(self.rows)]

    @property
    def rounds(self) -> int:
        """Return the number of rounds that the trial has reported so far."""
        return max(self.rows, default=0)


class TrialRecords:
    """All trials of a sweep.

    metric: the column of the history by which trials are compared.
    say: function that prints a line for the user.
    uri: MLflow's server, which gets each row at once; "" leaves the sending to `raysim ui`.
    """

    def __init__(
        self,
        plan: SweepPlan,
        folder: Path,
        metric: str,
        total: int,
        say: Callable[[str], None],
        tracked: bool,
        uri: str,
    ):
        self.plan = plan
        self.folder = folder
        self.metric = metric
        self.total = total
        self.all: dict[int, TrialRecord] = {}
        self.deadline = float("inf")  # of the sweep's time limit, as time.monotonic()
        self._say = say
        self._ended_before: set[int] = set()
        # trials that lost a process, and unfinished trials of an earlier session
        self._waiting: set[int] = set()
        self.most_running = 0  # trials that ran at once in this session
        self._uri = uri
        self._is_tracked = tracked
        self._trackers: dict[int, StoredTracker] = {}
        self._parent: StoredTracker | NoTracker = NoTracker()
        if tracked:
            self._parent = make_tracker(folder, uri, say=say, command="raysim sweep")
        self._read()

    # --- earlier sessions -----------------------------------------------------------------------
    def _read(self) -> None:
        for path in sorted((self.folder / "trials").glob(f"*/{FILE}")):
            try:
                stored = json.loads(path.read_text())
                record = TrialRecord(**{**stored, "rows": {}})
                if record.status in ENDED:
                    rows = read_history(path.parent / HISTORY)
                    record.rows = {int(row["round"] or 0): row for row in rows}
                    self._ended_before.add(record.number)
                elif record.status == "running":
                    self._waiting.add(record.number)
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise RefusedError(
                    f"{path}: the trial cannot be read ({error}). Delete the file to run the "
                    "trial again."
                ) from error
            self.all[record.number] = record

    def measurements(self, number: int) -> list[tuple[int, float]]:
        """Return pairs (round, value) of the compared column, for the rounds that have a value.

        Only a trial that ended before the sweep was continued has pairs; the list of any other
        trial is empty.
        """
        if number not in self._ended_before:
            return []
        measured = []
        for row in self.all[number].history():
            value = row.get(self.metric)
            if value is not None:
                measured.append((int(row["round"] or 0), float(value)))
        return measured

    # --- this session ---------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin or continue MLflow's parent run of all trials; do nothing without tracking."""
        options = self.plan.options
        choices = next(iter(self.plan.drafts.values()))["choices"]
        facts = {
            "sweep": options.__dict__,
            "overrides": " ".join(self.plan.overrides),
            "choices": choices,
        }
        self._parent.start(facts, {"kind": "sweep", "sweep": options.name, **source_tags()}, [])

    def start(self, number: int, point: Point) -> None:
        """Record that a trial starts, or starts again."""
        if number in self._ended_before:
            return
        record = self.all.setdefault(number, TrialRecord(number, point))
        self._waiting.discard(number)
        record.status = "running"
        record.error = ""
        self.most_running = max(self.most_running, self.running)
        self._write(record)
        if self._is_tracked and number not in self._trackers:
            self._trackers[number] = self._start_tracker(record)

    def report_restart(self, number: int, details: str) -> None:
        """Print that a trial lost a process and will continue from its last checkpoint.

        number: the trial's number.
        details: text to append to the line, such as the path of the file with Ray's messages.
        """
        self._waiting.add(number)
        self._say(
            f"trial {number} has lost a process. It continues from its last checkpoint as soon "
            f"as the cluster has room for it{details}"
        )

    def _start_tracker(self, record: TrialRecord) -> StoredTracker:
        name = f"{self.folder.resolve().name} {record.number}"
        tracker = make_tracker(self.path(record.number), self._uri, name, say=_ignore)
        config = self.plan.node(record.point)
        tags = {
            "kind": "trial",
            "sweep": self.plan.options.name,
            "setting": self.label(record),
            **source_tags(),
            "method": value_label(config["choices"]["method"]),
            "data": value_label(config["choices"]["data"]),
            "seed": config["seed"],
        }
        tracker.start(config, tags, parent=self.folder)
        return tracker

    def add_rows(
        self, number: int, point: Point, rows: Sequence[Row], seconds: float, is_done: bool
    ) -> None:
        """Add rows to a trial's history; they replace all stored rows from their first round on.

        point: the searched values, which population-based training may have changed.
        rows: a row for each round since the last report.
        seconds: the wall seconds of these rounds.
        is_done: True if the trial is finished with these rows.
        """
        record = self.all[number]
        record.point = point
        first = int(rows[0]["round"] or 0)
        record.rows = {number: row for number, row in record.rows.items() if number < first}
        for row in rows:
            record.rows[int(row["round"] or 0)] = dict(row)
        record.seconds += seconds
        record.score, record.deviation = last_score(record.history(), self.metric)
        if number in self._trackers:
            for row in rows:
                self._trackers[number].log(row)
        if is_done:
            record.status = "done"

    def fail(self, number: int, error: str) -> None:
        """Record that a trial failed."""
        record = self.all[number]
        record.status = "failed"
        record.error = error

    def end(self, number: int) -> None:
        """Record the end of a trial, and print its line.

        Do nothing if the sweep's time limit ended the trial, or if the trial ended in an earlier
        session.
        """
        record = self.all[number]
        self._waiting.discard(number)
        if number in self._ended_before:
            return
        if record.status == "running":
            if time.monotonic() >= self.deadline:
                return
            record.status = "stopped"
        self._write(record)
        self._say(self.line(record))
        if number in self._trackers:
            # The score and its deviation are in the last row.
            status = "FAILED" if record.status == "failed" else "FINISHED"
            self._trackers[number].end({"status": record.status}, [], status=status)
        best = self.best()
        if best is not None:
            scores = {"round": self.ended, "best": best.score, "score": record.score}
            self._parent.log(scores)

    def _write(self, record: TrialRecord) -> None:
        folder = self.path(record.number)
        folder.mkdir(parents=True, exist_ok=True)
        if record.status != "running" and record.rows:
            write_history(record.history(), folder / HISTORY)
        content = {key: value for key, value in record.__dict__.items() if key != "rows"}
        write_json(content, folder / FILE)  # last, because it marks the other files as complete

    def finish(
        self, summary: Mapping[str, object], files: Sequence[Path], status: str = "FINISHED"
    ) -> None:
        """End the tracking: send the sweep's results and all rows of the trials to MLflow.

        If MLflow's server does not answer, or if no address is set, the rows stay in the folders.
        They can be sent later.
        summary: the numbers of the sweep's summary.
        files: the sweep's result files.
        status: FINISHED, FAILED or KILLED.
        """
        for number, tracker in self._trackers.items():
            if self.all[number].status == "running":
                tracker.end({}, [], status="KILLED")
        self._parent.finish(summary, files, status)
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        for tracker in self._trackers.values():
            tracker.wait(max(0.0, deadline - time.monotonic()))
        if not self._is_tracked or not self._uri:
            return
        for number in self.all:  # runs that were sent before their parent, or whose rows were lost
            if not replay(self.path(number), self._uri, say=_ignore):
                break  # the server does not answer, so the other runs are not tried

    # --- for reports ----------------------------------------------------------------------------
    def path(self, number: int) -> Path:
        """Return the folder with a trial's own files.

        number: the trial's number.
        """
        return self.folder / "trials" / f"{number:04d}"

    def run_folders(self, number: int) -> list[Path]:
        """Return the folders of a trial's runs, in the order of the seeds.

        number: the trial's number.
        """
        return run_folders(self.folder, number, self.plan.seeds())

    @property
    def ended(self) -> int:
        """Return the number of trials that have ended."""
        return sum(record.status != "running" for record in self.all.values())

    @property
    def running(self) -> int:
        """Return the number of trials that run; those that wait to start again do not count."""
        return len(self.all) - self.ended - len(self._waiting)

    def rank(self, record: TrialRecord) -> tuple[bool, float]:
        """Return the sort key of a trial.

        The best trial comes first; stopped and failed trials come last. Among others, a trial
        without a finite score comes last.
        """
        is_partial = record.status not in ("done", "running")
        if record.score is None or not math.isfinite(record.score):
            return is_partial, float("inf")
        sign = 1 if self.plan.options.mode == "min" else -1
        return is_partial, sign * record.score

    def ordered(self) -> list[TrialRecord]:
        """Return all trials, the best first."""
        return sorted(self.all.values(), key=self.rank)

    def best(self) -> TrialRecord | None:
        """Return the best trial that has a finite score; None if there is none."""
        for record in self.ordered():
            if record.score is not None and math.isfinite(record.score):
                return record
        return None

    def count_equal(self, best: TrialRecord) -> int:
        """Return how many trials are as good as `best`, without `best` itself."""
        return sum(self.rank(record) == self.rank(best) for record in self.all.values()) - 1

    def label(self, record: TrialRecord) -> str:
        """Return a trial's setting in one line: "lr=0.1 mu=1"."""
        space = list(self.plan.space)
        names = dict(zip(space, short_names(space), strict=True))
        setting = self.plan.setting(record.point)
        return " ".join(f"{names[key]}={value_label(value)}" for key, value in setting.items())

    def line(self, record: TrialRecord) -> str:
        """Return a line for the user about a trial that has ended."""
        outcome = describe_outcome(
            self.metric, record.score, record.deviation, record.rounds, record.seconds
        )
        if record.status == "failed":
            outcome = f"failed: {record.error}"
        elif record.status == "stopped":
            outcome += ", stopped early"
        return f"trial {record.number} ({self.ended}/{self.total}) {self.label(record)}: {outcome}"

    def status(self) -> str:
        """Return the state of the sweep in one line."""
        parts = [f"{self.ended}/{self.total} trials have ended", f"{self.running} running"]
        if self._waiting:
            parts.append(f"{len(self._waiting)} waiting to start again")
        best = self.best()
        if best is not None:
            score = plus_minus(best.score, best.deviation)
            parts.append(f"best {self.metric} {score} (trial {best.number})")
        return " · ".join(parts)


def _ignore(text: str) -> None:
    """Ignore a line about a problem with MLflow, because the sweep's own tracker reports it."""


class StatusLine:
    """A display of the sweep's state: a live line in a terminal, a few lines in a log."""

    def __init__(self, console: Console, quiet: bool, clock: Callable[[], float] = time.monotonic):
        from rich.status import Status

        self._console = console
        self._is_quiet = quiet
        self._clock = clock
        self._printed_at = clock()
        self._live = None
        if console.is_terminal and not quiet:
            self._live = Status("starting", console=console, spinner="dots")

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, text: str) -> None:
        """Display the state of the sweep, in place of the last text.

        A log gets a new line instead, at most every `LOG_INTERVAL_S` seconds. With `quiet`, display
        nothing.
        text: the state, such as the number of ended trials.
        """
        if self._live:
            self._live.update(text)
        elif not self._is_quiet and self._clock() - self._printed_at >= LOG_INTERVAL_S:
            self._printed_at = self._clock()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
