"""One trial of a search: the runs of a setting, one per seed, round by round; their mean is its history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from raysim.experiment.compose import Node, to_yaml
from raysim.experiment.execute import build
from raysim.experiment.settings import Experiment
from raysim.primitives.checks import known
from raysim.primitives.files import replace_file
from raysim.results.history import Row
from raysim.simulation import checkpoint
from raysim.simulation.events import Event, Finished, Round, RunStopped, Started
from raysim.training.run_spec import Checkpoint

DEVIATION = "_std"  # of the metric, over seeds


@dataclass
class Stream:
    """A run that is followed only as far as it is asked for."""

    events: Iterator[Event]
    rows: list[Row] = field(default_factory=list)
    finished: Finished | None = None

    def until(self, number: int) -> Row:
        """Follow the run up to a round; its row."""
        while len(self.rows) < number:
            self.take()
        return self.rows[number - 1]

    def end(self) -> None:
        """Follow the run to its end."""
        while self.finished is None:
            self.take()

    def take(self) -> None:
        """Follow the run by one event."""
        event = next(self.events)
        if isinstance(event, Started):
            self.rows = list(event.rows)
        elif isinstance(event, Round):
            self.rows.append(event.row)
        elif isinstance(event, Finished):
            self.finished = event


def mean(rows: Sequence[Row], metric: str) -> dict[str, int | float | None]:
    """One row for all seeds: the mean of each column, and the metric's standard deviation (divisor n - 1)."""
    if len(rows) == 1:
        return dict(rows[0])
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: known([row.get(name) for row in rows]) for name in names}
    row: dict[str, int | float | None] = {
        name: float(np.mean(values)) if values else None for name, values in columns.items()
    }
    row["round"] = rows[0]["round"]
    if len(columns.get(metric, ())) == len(rows):
        row[metric + DEVIATION] = float(np.std(columns[metric], ddof=1))
    return row


class Trial:
    """The runs of a setting, one per seed. folders: where each keeps its checkpoints."""

    def __init__(
        self,
        experiments: Sequence[Experiment],
        folders: Sequence[Path],
        streams: Sequence[Iterator[Event]],
        metric: str,
    ):
        self.experiments, self.folders, self.metric = experiments, folders, metric
        self.streams = [Stream(events) for events in streams]
        self.rounds = experiments[0].spec.settings.rounds
        self.done = 0  # rounds reported

    def advance(self) -> list[dict[str, int | float | None]]:
        """Mean rows up to the next in which the metric was measured, or to the end. Raises RunStopped without any."""
        rows = []
        while self.done < self.rounds:
            self.done += 1
            rows.append(mean([stream.until(self.done) for stream in self.streams], self.metric))
            if rows[-1].get(self.metric) is not None:
                break
        else:
            raise RunStopped(self._unmeasured(rows))
        if self.done == self.rounds:
            for stream in self.streams:
                stream.end()
        return rows

    def _unmeasured(self, rows: Sequence[Row]) -> str:
        last = rows[-1] if rows else {}
        names = [name for name in ("accuracy", "accuracy_global") if last.get(name) is not None]
        names += [name for name, value in last.items() if value is not None and name not in (*names, "round")]
        return f"{self.metric} is not measured here: set sweep.metric to one of {', '.join(names)}"

    @property
    def finished(self) -> bool:
        """Whether all rounds were reported."""
        return self.done == self.rounds

    def save(self) -> None:
        """Where a checkpoint is due after the last reported round: follow the runs until it is written."""
        every = self.experiments[0].spec.settings.checkpoint.every
        if not every or self.done % every or self.finished:
            return
        for stream, folder in zip(self.streams, self.folders, strict=True):
            if not (folder / "checkpoints" / f"round-{self.done:06d}").is_dir():
                stream.take()  # it follows its round at once

    def close(self) -> None:
        """Stop what still runs."""
        for stream in self.streams:
            with closing(stream.events):  # type: ignore[type-var]
                pass


def folders(folder: Path, seeds: Sequence[int]) -> list[Path]:
    """Where the run of each seed lies."""
    return [folder] if len(seeds) == 1 else [folder / f"seed-{seed}" for seed in seeds]


def prepared(
    nodes: Sequence[Node], folder: Path, allow: Sequence[str], every: int | None
) -> list[tuple[Experiment, Path, str]]:
    """The experiments of a setting, the folder of each (which is made), and its last checkpoint there ("": none).

    every: rounds between checkpoints, where not as the configuration says. Raises Refused.
    """
    found = []
    for node, own in zip(nodes, folders(folder, [node["seed"] for node in nodes]), strict=True):
        experiment = build(node, allow)
        own.mkdir(parents=True, exist_ok=True)
        replace_file(own / "config.yaml", to_yaml(experiment.config).encode())
        last = checkpoint.available(own / "checkpoints")[-1:]
        if every is not None:
            settings = replace(experiment.spec.settings, checkpoint=Checkpoint(every))
            experiment = replace(experiment, spec=replace(experiment.spec, settings=settings))
        found.append((experiment, own, str(last[0]) if last else ""))
    return found


def score(rows: Sequence[Mapping[str, int | float | None]], metric: str) -> tuple[float | None, float | None]:
    """The last known value of a metric, and its deviation over seeds where there are several."""
    for row in reversed(rows):
        if (value := row.get(metric)) is not None:
            return float(value), row.get(metric + DEVIATION)
    return None, None
