"""Follows the events of one run: history, failures, progress, tracking, summary, plots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysim.api.messages import Failure
from raysim.experiment.describe import identity
from raysim.experiment.settings import Experiment, Interrupted, Result, Rows
from raysim.primitives.files import replace_file
from raysim.results.figures import (
    draw_bias,
    draw_decomposition,
    draw_domains,
    draw_features,
    draw_outputs,
    draw_reports,
)
from raysim.results.history import read_history, summarise, write_history, write_json
from raysim.results.probes import load_probes, save_probes
from raysim.results.progress import Progress
from raysim.results.report import draw_run
from raysim.results.tracking import NoTracker, Tracker, flatten, replay
from raysim.simulation import checkpoint
from raysim.simulation.events import Event, Finished, Round, Saved, Started

if TYPE_CHECKING:
    from rich.console import Console

PROBES = "probes"  # folder of what was seen of the local models


def say(console: Console, text: str) -> None:
    """Print a line as it is, without markup; nothing for ""."""
    if text:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


class Session:
    """Follows the events of one run and keeps its folder up to date."""

    def __init__(self, experiment: Experiment, folder: Path, console: Console, quiet: bool):
        self.experiment, self.folder, self.console, self.quiet = experiment, folder, console, quiet
        self.rows: Rows = []
        self.tracker = _tracker(experiment, folder, console)
        self.finished: Finished | None = None

    def follow(self, started: Event, events: Iterator[Event]) -> Result:
        """To the end. Whatever ends a run early, its history so far is written and its tracking closed."""
        assert isinstance(started, Started)
        self.rows = list(started.rows)
        self._forget_failures(len(self.rows))
        tags = {
            "methods": self.experiment.title,
            "data": self.experiment.spec.data.title,
            **flatten(identity(self.experiment)),
        }
        self.tracker.start(self.experiment.config, tags, self.rows)
        try:
            with Progress(
                self.experiment.spec.settings.rounds, done=len(self.rows), quiet=self.quiet, console=self.console
            ) as progress:
                for event in events:
                    self._take(event, progress)
            return self._end()
        except KeyboardInterrupt:
            self._stop("KILLED")
            again = f"raysim run with the same settings, out={self.folder} and resume=latest"
            at = (
                "the last checkpoint"
                if checkpoint.available(self.folder / "checkpoints")
                else "round 0, for want of a checkpoint"
            )
            raise Interrupted(f"stopped after round {len(self.rows)}: {again} continues from {at}") from None
        except BaseException:
            self._stop("FAILED")
            raise

    def _take(self, event: Event, progress: Progress) -> None:
        if isinstance(event, Round):
            self.rows.append(event.row)
            self.tracker.log(event.row)
            progress.update(event.row)
            self._record(event.failures, int(event.row["round"] or 0), progress)
            if deaths := event.row.get("host_deaths"):
                progress.note(
                    f"round {event.row['round']}: hosts died ({deaths}); others took their place and their work"
                )
            if event.probes:
                path = self.folder / PROBES / f"round-{int(event.row['round'] or 0):06d}.safetensors"
                path.parent.mkdir(exist_ok=True)
                save_probes(event.probes, path)
        elif isinstance(event, Saved):
            write_history(self.rows, self.folder / "history.parquet")
        elif isinstance(event, Finished):
            self.finished = event

    def _record(self, failures: Sequence[Failure], number: int, progress: Progress) -> None:
        """Append failures to their file; the first of a run is shown."""
        path = self.folder / "failures.jsonl"
        for failure in failures:
            if not path.exists():
                progress.note(f"left out: {failure.error} (all failures: {path})")
            entry = {f.name: getattr(failure, f.name) for f in fields(failure)}
            with path.open("a") as stream:
                stream.write(json.dumps({"round": number, **entry}) + "\n")

    def _forget_failures(self, rounds: int) -> None:
        """Of an earlier session, keep the failures of the rounds that the checkpoint holds."""
        path = self.folder / "failures.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _round_of(line) <= rounds]
            replace_file(path, "".join(line + "\n" for line in kept).encode())

    def _end(self) -> Result:
        assert self.finished is not None, "a run ends with Finished"
        summary = self._summary(
            model_sha256=self.finished.model_sha256,
            state_sha256=self.finished.state_sha256,
            peak_memory_bytes=self.finished.peak_memory_bytes,
        )
        write_history(self.rows, self.folder / "history.parquet")
        title = self.experiment.title
        pictures = [*draw_run(self.rows, self.folder, title), *self._draw_probes()]
        for name, draw in (("methods", draw_reports), ("domains", draw_domains), ("decomposition", draw_decomposition)):
            if draw(self.rows, path := self.folder / f"{name}.png", title):
                pictures.append(path)
        write_json(summary, self.folder / "summary.json")  # last: it says that the run is complete
        names = ("config.yaml", "history.parquet", "summary.json", "model.safetensors", "failures.jsonl")
        files = [self.folder / name for name in names if (self.folder / name).exists()]
        self.tracker.finish(summary, [*files, *pictures])
        say(self.console, _closing(summary, self.folder))
        return Result(self.folder, json.loads((self.folder / "summary.json").read_text()), self.rows)

    def _draw_probes(self) -> list[Path]:
        """What the probes showed: numbers over the rounds, and the last round's features and outputs."""
        found = sorted((self.folder / PROBES).glob("round-*.safetensors"))
        if not found:
            return []
        title, probes = self.experiment.title, load_probes(found[-1])
        paths = [self.folder / f"{name}.png" for name in ("bias", "features", "outputs")]
        last = f"{title}, round {int(found[-1].stem.removeprefix('round-'))}"
        drawn = draw_bias(self.rows, paths[0], title)
        draw_features(probes, paths[1], last)
        draw_outputs(probes, paths[2], last)
        return paths if drawn else paths[1:]

    def _stop(self, status: str) -> None:
        write_history(self.rows, self.folder / "history.parquet")
        self.tracker.finish(self._summary(), status=status)

    def _summary(self, **more: object) -> dict[str, object]:
        config = self.experiment.config
        return summarise(
            self.rows,
            self.experiment.execution.thresholds,
            methods=[method.name for method in self.experiment.spec.methods],
            title=self.experiment.spec.data.title,
            choices=config["choices"],
            identity=identity(self.experiment),
            **more,
        )


def _round_of(line: str) -> int:
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):  # a line that a crash cut short
        return 1 << 62


def _closing(summary: Mapping[str, Any], folder: Path) -> str:
    names = {
        "accuracy_global": "on the central test set",
        "accuracy": "mean of the clients",
        "accuracy_worst": "worst client",
        "accuracy_shared": "shared model, mean of the clients",
        "accuracy_finetuned": "after fine-tuning, mean of the clients",
        "accuracy_common": "clients' models on the central test set",
    }
    scores = [f"{summary[key]:.4f} {text}" for key, text in names.items() if summary.get(key) is not None]
    return f"accuracy {', '.join(scores) or 'unknown'} after {summary['rounds']} rounds; results are in {folder}"


def _tracker(experiment: Experiment, folder: Path, console: Console) -> Tracker | NoTracker:
    tracking = experiment.execution.tracking
    if tracking.name == "none":
        return NoTracker()
    return Tracker(folder, tracking.uri or "", name=folder.resolve().name, say=lambda text: say(console, text))


def finished(experiment: Experiment, folder: Path, console: Console) -> Result:
    """The result of a run that had finished before; what MLflow lacks of it is sent."""
    if experiment.execution.tracking.name == "mlflow":
        replay(folder, experiment.execution.tracking.uri or "", say=lambda text: say(console, text))
    summary = json.loads((folder / "summary.json").read_text())
    return Result(folder, summary, read_history(folder / "history.parquet"))
