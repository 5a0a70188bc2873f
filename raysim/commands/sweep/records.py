"""What is known of a search's trials: kept in one folder each by the process that runs the search, shown, and tracked.

trials/0003/trial.json       setting, state, score: written when the trial starts and when it ends
            config.yaml      as `raysim run` would store it; with several seeds, that of the first
            history.parquet  with several seeds, their mean; each one's checkpoints are in seed-N/
            summary.json     of a trial that went to its end
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from raysim.commands.sweep.search import Search
from raysim.commands.sweep.space import Point
from raysim.experiment.config_files import to_yaml
from raysim.experiment.many_runs import last_score, short_names, value_label
from raysim.primitives.errors import Refused
from raysim.primitives.files import replace_file
from raysim.results.history import read_history, summarise, write_history, write_json
from raysim.results.progress import LOG_INTERVAL_S, format_duration
from raysim.results.tracking import (
    FINISH_TIMEOUT_S,
    NoTracker,
    Tracker,
    default_uri,
    replay,
    source_tags,
)

if TYPE_CHECKING:
    from rich.console import Console

FILE = "trial.json"
ENDED = ("done", "stopped")  # a trial that was stopped is one that the scheduler gave up


@dataclass
class Record:
    """One trial."""

    number: int
    point: Point
    status: str = "running"  # or done, stopped, failed
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # by round
    seconds: float = 0.0  # of work
    error: str = ""
    score: float | None = None
    deviation: float | None = None

    def history(self) -> list[dict[str, Any]]:
        """The rows in order."""
        return [self.rows[number] for number in sorted(self.rows)]

    @property
    def rounds(self) -> int:
        """Rounds made."""
        return max(self.rows, default=0)


class Records:
    """All trials of a search, and what becomes of them. metric: the column that is compared."""

    def __init__(
        self,
        search: Search,
        folder: Path,
        metric: str,
        total: int,
        say: Callable[[str], None],
        tracked: bool,
        uri: str,
    ):
        self.search, self.folder, self.metric, self.total, self._say = (
            search,
            folder,
            metric,
            total,
            say,
        )
        self.all: dict[int, Record] = {}
        self.deadline = float(
            "inf"
        )  # of time.monotonic(): trials that end after it are not given up, but out of time
        self._settled: set[int] = set()  # ended before this process began
        self._uri = uri or default_uri(folder.resolve().parent)
        self._tracked = tracked
        self._trackers: dict[int, Tracker] = {}
        self._parent: Tracker | NoTracker = (
            Tracker(folder, self._uri, say=say, command="raysim sweep") if tracked else NoTracker()
        )
        self._read()

    # --- what was known before ------------------------------------------------------------------------------------
    def _read(self) -> None:
        for path in sorted((self.folder / "trials").glob(f"*/{FILE}")):
            try:
                stored = json.loads(path.read_text())
                record = Record(**{**stored, "rows": {}})
                if record.status in ENDED:
                    rows = read_history(path.parent / "history.parquet")
                    record.rows = {int(row["round"] or 0): row for row in rows}
                    self._settled.add(record.number)
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise Refused(
                    f"{path.parent} is damaged ({error}): delete it, and that trial runs again"
                ) from error
            self.all[record.number] = record

    def measurements(self, number: int) -> list[tuple[int, float]]:
        """What an ended trial reported: round and metric; nothing for any other."""
        if number not in self._settled:
            return []
        rows = self.all[number].history()
        return [
            (int(row["round"]), float(row[self.metric]))
            for row in rows
            if row.get(self.metric) is not None
        ]

    # --- what happens -----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """The search begins, or goes on."""
        tags = {"kind": "sweep", "sweep": self.search.options.name, **source_tags()}
        self._parent.start(self._described(), tags, [])

    def _described(self) -> dict[str, Any]:
        first = next(iter(self.search.drafts.values()))
        return {
            "sweep": self.search.options.__dict__,
            "words": " ".join(self.search.words),
            "choices": first["choices"],
        }

    def started(self, number: int, point: Point) -> None:
        """A trial runs."""
        if number in self._settled:
            return
        record = self.all.setdefault(number, Record(number, point))
        record.status, record.error = "running", ""
        self._keep(record)
        if self._tracked and number not in self._trackers:
            tracker = Tracker(
                self.path(number),
                self._uri,
                name=f"{self.folder.resolve().name} {number}",
                say=_quiet,
            )
            node = self.search.node(point)
            tags = {
                "kind": "trial",
                "sweep": self.search.options.name,
                "setting": self.label(record),
                **source_tags(),
            }
            chosen = {group: value_label(node["choices"][group]) for group in ("method", "data")}
            tags |= {**chosen, "seed": node["seed"]}
            tracker.start(node, tags, parent=self.folder)
            self._trackers[number] = tracker

    def measured(
        self,
        number: int,
        point: Point,
        rows: Sequence[Mapping[str, Any]],
        seconds: float,
        done: bool,
    ) -> None:
        """Rows up to a measurement. A trial that took over another's state goes on from there."""
        record = self.all[number]
        record.point = point
        record.rows = {
            before: row for before, row in record.rows.items() if before < int(rows[0]["round"])
        }
        record.rows |= {int(row["round"]): dict(row) for row in rows}
        record.seconds += seconds
        record.score, record.deviation = last_score(record.history(), self.metric)
        if (tracker := self._trackers.get(number)) is not None:
            for row in rows:
                tracker.log(row)
        if done:
            record.status = "done"

    def failed(self, number: int, error: str) -> None:
        """A trial that could not go on."""
        record = self.all[number]
        record.status, record.error = "failed", error

    def ended(self, number: int) -> None:
        """A trial is over: by itself, or because the scheduler or the time said so."""
        record = self.all[number]
        if number in self._settled:
            return
        if record.status == "running":
            if time.monotonic() >= self.deadline:
                return
            record.status = "stopped"
        self._keep(record)
        self._say(self.line(record))
        if (tracker := self._trackers.get(number)) is not None:
            ending = {
                "status": record.status
            }  # its score and its deviation are those of the last row
            tracker.end(ending, [], status="FAILED" if record.status == "failed" else "FINISHED")
        over = sum(each.status != "running" for each in self.all.values())
        if (best := self.best()) is not None:
            self._parent.log({"round": over, "best": best.score, "score": record.score})

    def _keep(self, record: Record) -> None:
        folder, over = self.path(record.number), record.status != "running"
        folder.mkdir(parents=True, exist_ok=True)
        node = self.search.node(record.point)
        replace_file(folder / "config.yaml", to_yaml(node).encode())
        if over and record.rows:
            write_history(record.history(), folder / "history.parquet")
        if record.status == "done":
            summary = summarise(record.history(), node["thresholds"], choices=node["choices"])
            write_json(summary, folder / "summary.json")
        write_json(
            {key: value for key, value in record.__dict__.items() if key != "rows"}, folder / FILE
        )  # last

    def finish(
        self, summary: Mapping[str, object], files: Sequence[Path], status: str = "FINISHED"
    ) -> None:
        """Nothing more happens: all that is tracked is sent, or left on disk."""
        for number, tracker in self._trackers.items():
            if self.all[number].status == "running":
                tracker.end({}, [], status="KILLED")
        self._parent.finish(summary, files, status)
        until = time.monotonic() + FINISH_TIMEOUT_S
        for tracker in self._trackers.values():
            tracker.wait(max(0.0, until - time.monotonic()))
        if self._tracked:  # what came before its parent, or did not come at all; a server that is away is asked once
            all(replay(self.path(number), self._uri, say=_quiet) for number in self.all)

    # --- to look at ---------------------------------------------------------------------------------------------
    def path(self, number: int) -> Path:
        """The folder of a trial."""
        return self.folder / "trials" / f"{number:04d}"

    def better(self, record: Record) -> tuple[bool, float]:
        """What trials are ordered by, the best first: those that were not given up, then the score."""
        worst = float("inf")
        score = (
            worst
            if record.score is None
            else record.score * (-1 if self.search.options.mode == "max" else 1)
        )
        return record.status not in ("done", "running"), score

    def ordered(self) -> list[Record]:
        """The best first."""
        return sorted(self.all.values(), key=self.better)

    def best(self) -> Record | None:
        """The best of those that have a score."""
        return next((record for record in self.ordered() if record.score is not None), None)

    def as_good(self, best: Record) -> int:
        """How many others have the same score and were not given up either."""
        return sum(self.better(each) == self.better(best) for each in self.all.values()) - 1

    def label(self, record: Record) -> str:
        """A setting in a line."""
        names = dict(zip(self.search.space, short_names(list(self.search.space)), strict=True))
        setting = self.search.setting(record.point)
        return " ".join(f"{names[key]}={value_label(value)}" for key, value in setting.items())

    def line(self, record: Record) -> str:
        """A trial in a line."""
        parts = [f"trial {record.number}", self.label(record)]
        if record.score is not None:
            parts.append(f"{self.metric} {plus_minus(record.score, record.deviation)}")
        parts.append(f"{record.rounds} rounds in {format_duration(record.seconds)}")
        if record.status == "failed":
            parts.append(f"failed: {record.error}")
        elif record.status == "stopped":
            parts.append("stopped early")
        return " · ".join(parts)

    def status(self) -> str:
        """The search in a line."""
        over = sum(record.status != "running" for record in self.all.values())
        parts = [f"{over}/{self.total} trials", f"{len(self.all) - over} running"]
        if (best := self.best()) is not None:
            parts.append(
                f"best {self.metric} {plus_minus(best.score, best.deviation)} (trial {best.number})"
            )
        return " · ".join(parts)


def plus_minus(value: float | None, deviation: float | None) -> str:
    """0.8123 ± 0.0040."""
    if value is None:
        return "–"
    return f"{value:.4f}" if deviation is None else f"{value:.4f} ± {deviation:.4f}"


def _quiet(text: str) -> None:
    """What MLflow did not take is said once, for the whole search."""


class Watch:
    """The line below the trials: a live one in a terminal, one now and then in a log."""

    def __init__(self, console: Console, quiet: bool, clock: Callable[[], float] = time.monotonic):
        from rich.status import Status

        self._console, self._quiet, self._clock, self._at = console, quiet, clock, clock()
        self._live = (
            Status("starting", console=console, spinner="dots")
            if console.is_terminal and not quiet
            else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, text: str) -> None:
        """The state of the search."""
        if self._live:
            self._live.update(text)
        elif not self._quiet and self._clock() - self._at >= LOG_INTERVAL_S:
            self._at = self._clock()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
