"""Boards of others that follow a run besides MLflow: TensorBoard and Weights & Biases, each where its package is."""

from __future__ import annotations

import math
import uuid
from typing import Any

from raysim.primitives.checks import one_of
from raysim.primitives.extras import import_optional
from raysim.primitives.files import regular_file, replace_file, user_path, without_password
from raysim.results.observers import CurrentRun, Observer
from raysim.results.tracking import flatten
from raysim.simulation.events import Finished, Round, Row

MODES = ("online", "offline", "disabled")


class TensorBoard(Observer):
    """Every number of a round as a scalar, and the numbers of the summary at the end.

    folder: where the events go; None: `tensorboard` in the run's folder. A run that is continued goes on there, and
    rounds that it makes again take the place of the earlier ones.
    """

    def __init__(self, folder: str | None = None):
        self._package, self._folder = (
            import_optional("tensorboardX", "observer=tensorboard"),
            folder,
        )

    def on_start(self, run: CurrentRun) -> None:
        """Open the file of events."""
        folder = (
            user_path(self._folder) / run.folder.name
            if self._folder
            else run.folder / "tensorboard"
        )
        done = len(run.rows)
        purge = done + 1 if done else None
        self._writer: Any = self._package.SummaryWriter(
            str(folder), purge_step=purge, filename_suffix=f".{done}"
        )

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Write the row; "method.name" stands below "method"."""
        for name, value in _numbers(event.row).items():
            self._writer.add_scalar(name.replace(".", "/"), value, int(event.row["round"] or 0))
        self._writer.flush()

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write what the run sums up to."""
        for name, value in _scores(run).items():
            self._writer.add_scalar(f"summary/{name}", value, len(run.rows))
        self._writer.close()

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Leave the file as it is."""
        self._writer.close()


class WeightsAndBiases(Observer):
    """The run's settings, a row a round, the summary and the pictures.

    project, entity: where the run appears. mode: "online", "offline" (kept in the run's folder until `wandb sync` sends
    it) or "disabled"; None: as the environment says, else online. A run that is continued keeps its id.
    """

    ID = "wandb_id"  # file in the run's folder

    def __init__(self, project: str = "raysim", entity: str | None = None, mode: str | None = None):
        self._mode = mode if mode is None else one_of("observer.wandb.mode", mode, MODES)
        self._package, self._project, self._entity = (
            import_optional("wandb", "observer=wandb"),
            project,
            entity,
        )

    def on_start(self, run: CurrentRun) -> None:
        """Begin the run, or continue the one that the folder names."""
        path = run.folder / self.ID
        identity = regular_file(path).read_text().strip() if path.exists() else uuid.uuid4().hex[:8]
        replace_file(path, identity.encode())
        self._run: Any = self._package.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            name=run.folder.name,
            id=identity,
            resume="allow",
            dir=str(run.folder),
            config={key: _plain(value) for key, value in flatten(run.config).items()},
        )

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Send the row."""
        self._run.log(_numbers(event.row), step=int(event.row["round"] or 0))

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Send what the run sums up to, and the pictures."""
        self._run.summary.update({f"summary/{name}": value for name, value in _scores(run).items()})
        if run.pictures:
            self._run.log(
                {path.stem: self._package.Image(str(path)) for path in run.pictures},
                step=len(run.rows),
            )
        self._run.finish()

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Say that it ended early."""
        self._run.finish(exit_code=1)


def _numbers(row: Row) -> dict[str, float]:
    """Those of a row that are finite; the round is the step."""
    known = {name: value for name, value in row.items() if value is not None and name != "round"}
    return {name: float(value) for name, value in known.items() if math.isfinite(value)}


def _scores(run: CurrentRun) -> dict[str, float]:
    """The numbers of the summary that no row has."""
    flat = flatten({key: value for key, value in run.summary().items() if key not in run.facts})
    in_rows = {"rounds", *(key for row in run.rows for key in row)}
    return {
        key: float(value)
        for key, value in flat.items()
        if key not in in_rows and isinstance(value, (int, float)) and math.isfinite(value)
    }


def _plain(value: object) -> object:
    """What a board can show: numbers as they are, all else as text without passwords."""
    return (
        value
        if value is None or isinstance(value, (bool, int, float))
        else without_password(str(value))
    )
