"""One trial of a search: the runs of a setting, one per seed, round by round; their mean is its history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raysim.experiment.config_files import Node, to_yaml
from raysim.experiment.execute import build
from raysim.experiment.many_runs import FINAL, mean_row
from raysim.experiment.recorder import Follower
from raysim.experiment.run_folder import last_checkpoint
from raysim.experiment.settings import Experiment
from raysim.primitives.files import replace_file
from raysim.results.history import Row, metric_of
from raysim.results.observers import CurrentRun
from raysim.simulation import checkpoint
from raysim.simulation.events import Event, RunStoppedError
from raysim.training.run_spec import Checkpoint


class Trial:
    """The runs of a setting, one per seed. folders: where each keeps its checkpoints."""

    def __init__(
        self,
        experiments: Sequence[Experiment],
        folders: Sequence[Path],
        streams: Sequence[Iterator[Event]],
        metric: str,
    ):
        settings = experiments[0].spec.settings
        self.metric, self.rounds, self.checkpoint_every = (
            metric,
            settings.rounds,
            settings.checkpoint.every,
        )
        self.runs = [
            Follower(CurrentRun(folder, self.rounds), events)
            for folder, events in zip(folders, streams, strict=True)
        ]
        self.done = 0  # rounds reported

    def advance(self) -> list[dict[str, int | float | None]]:
        """Return mean rows up to the next one with the metric, or to the end. Raises RunStoppedError."""
        rows = []
        while self.done < self.rounds:
            self.done += 1
            rows.append(mean_row([run.until(self.done) for run in self.runs], self.metric))
            if rows[-1].get(self.metric) is not None:
                break
        else:
            raise RunStoppedError(self._unmeasured(rows))
        if self.done == self.rounds:
            for run in self.runs:
                run.to_the_end()
        return rows

    def _unmeasured(self, rows: Sequence[Row]) -> str:
        last = rows[-1] if rows else {}
        finals = [f"{metric_of(rows)}{suffix}" for suffix in FINAL]
        names = [name for name in finals if last.get(name) is not None]
        names += [
            name
            for name, value in last.items()
            if value is not None and name not in (*names, "round")
        ]
        return f"{self.metric} is not measured here: set sweep.metric to one of {', '.join(names)}"

    @property
    def finished(self) -> bool:
        """Whether all rounds were reported."""
        return self.done == self.rounds

    def save(self) -> None:
        """Where a checkpoint is due after the last reported round: follow the runs until it is written."""
        every = self.checkpoint_every
        if not every or self.done % every or self.finished:
            return
        for run in self.runs:
            if checkpoint.version_of(last_checkpoint(run.run.folder, Checkpoint())) < self.done:
                run.next_event()  # a checkpoint follows its round at once

    def close(self) -> None:
        """Stop what still runs."""
        for run in self.runs:
            run.close()


def folders(folder: Path, seeds: Sequence[int]) -> list[Path]:
    """Where the run of each seed lies."""
    return [folder] if len(seeds) == 1 else [folder / f"seed-{seed}" for seed in seeds]


def prepared(
    nodes: Sequence[Node], folder: Path, allow: Sequence[str], every: int | None
) -> list[tuple[Experiment, Path, str]]:
    """The experiments of a setting, the folder of each (which is made), and its last checkpoint there ("": none).

    every: rounds between checkpoints, where not as the configuration says. Raises Refused.
    """
    runs = []
    for node, run_folder in zip(
        nodes, folders(folder, [node["seed"] for node in nodes]), strict=True
    ):
        experiment = build(node, allow)
        run_folder.mkdir(parents=True, exist_ok=True)
        replace_file(run_folder / "config.yaml", to_yaml(experiment.config).encode())
        if every is not None:
            settings = replace(experiment.spec.settings, checkpoint=Checkpoint(every))
            experiment = replace(experiment, spec=replace(experiment.spec, settings=settings))
        runs.append(
            (
                experiment,
                run_folder,
                last_checkpoint(run_folder, experiment.spec.settings.checkpoint),
            )
        )
    return runs
