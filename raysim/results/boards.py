"""Send the scores of a run to TensorBoard or to Weights & Biases."""

from __future__ import annotations

import math
import uuid
from typing import Any

from raysim.primitives.checks import one_of
from raysim.primitives.extras import import_optional
from raysim.primitives.files import regular_file, replace_file, user_path, without_password
from raysim.results.observers import CurrentRun, Observer
from raysim.results.tracked_run import flatten
from raysim.simulation.events import Finished, Round, Row

MODES = ("online", "offline", "disabled")


class TensorBoard(Observer):
    """An observer that writes every number of a round, and the summary, for TensorBoard.

    folder: the folder for several runs; each run writes to a subfolder with the run's name. None
    writes to `tensorboard` in the run's folder.

    A resumed run continues in the same folder, and replaces the numbers of repeated rounds.
    """

    def __init__(self, folder: str | None = None):
        self._package = import_optional("tensorboardX", "observer=tensorboard")
        self._folder = folder

    def on_start(self, run: CurrentRun) -> None:
        """Open the event file."""
        folder = run.folder / "tensorboard"
        if self._folder:
            folder = user_path(self._folder) / run.folder.name
        done = len(run.rows)
        self._writer: Any = self._package.SummaryWriter(
            str(folder), purge_step=done + 1, filename_suffix=f".{done}"
        )

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Write each number of the round's row.

        TensorBoard shows a column such as "method.name" as `name` in the group `method`.
        """
        for name, value in _finite_numbers(event.row).items():
            self._writer.add_scalar(name.replace(".", "/"), value, int(event.row["round"] or 0))
        self._writer.flush()

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write the numbers of the summary."""
        for name, value in _summary_numbers(run).items():
            self._writer.add_scalar(f"summary/{name}", value, len(run.rows))
        self._writer.close()

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases(Observer):
    """An observer that sends settings, rows, summary and pictures to Weights & Biases.

    project: the project that shows the run.
    entity: the account of the project; None takes the user's default account.
    mode: "online", "offline" (stored until `wandb sync` sends it) or "disabled"; None takes the
    environment variable WANDB_MODE, else "online".

    A resumed run keeps its id.
    """

    ID_FILE = "wandb_id"  # in the run's folder

    def __init__(self, project: str = "raysim", entity: str | None = None, mode: str | None = None):
        self._mode = mode if mode is None else one_of("observer.wandb.mode", mode, MODES)
        self._package = import_optional("wandb", "observer=wandb")
        self._project = project
        self._entity = entity

    def on_start(self, run: CurrentRun) -> None:
        """Begin the run, or continue the run whose id is in the folder."""
        path = run.folder / self.ID_FILE
        run_id = uuid.uuid4().hex[:8]
        if path.exists():
            run_id = regular_file(path).read_text().strip()
        replace_file(path, run_id.encode())
        self._run: Any = self._package.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            name=run.folder.name,
            id=run_id,
            resume="allow",
            dir=str(run.folder),
            config={key: _plain_value(value) for key, value in flatten(run.config).items()},
        )

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Send the row."""
        self._run.log(_finite_numbers(event.row), step=int(event.row["round"] or 0))

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Send the numbers of the summary, and the pictures."""
        numbers = {f"summary/{name}": value for name, value in _summary_numbers(run).items()}
        self._run.summary.update(numbers)
        if run.pictures:
            images = {path.stem: self._package.Image(str(path)) for path in run.pictures}
            self._run.log(images, step=len(run.rows))
        self._run.finish()

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Mark the run as failed, because it stopped before its last round."""
        self._run.finish(exit_code=1)


def _finite_numbers(row: Row) -> dict[str, float]:
    """Return the finite numbers of a row; `round` is left out, because it is passed as the step."""
    numbers = {}
    for name, value in row.items():
        if name != "round" and value is not None and math.isfinite(value):
            numbers[name] = float(value)
    return numbers


def _summary_numbers(run: CurrentRun) -> dict[str, float]:
    """Return the finite numbers of the run's summary, by key; dots join nested keys.

    These keys are left out: columns of the history, the key `rounds`, and the keys in `run.facts`.
    """
    summary = {key: value for key, value in run.summary().items() if key not in run.facts}
    in_rows = {"rounds", *(key for row in run.rows for key in row)}
    numbers = {}
    for key, value in flatten(summary).items():
        is_number = isinstance(value, (int, float)) and math.isfinite(value)
        if is_number and key not in in_rows:
            numbers[key] = float(value)  # type: ignore[arg-type]
    return numbers


def _plain_value(value: object) -> object:
    """Return a number or None unchanged, and any other value as text without passwords."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return without_password(str(value))
