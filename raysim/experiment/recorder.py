"""Follows one run: takes its events one by one, and tells them to its observers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.experiment.describe import identity, split
from raysim.experiment.result import Result
from raysim.experiment.run_folder import last_checkpoint
from raysim.experiment.settings import Experiment, Interrupted
from raysim.primitives.commit import source_commit
from raysim.primitives.errors import Refused
from raysim.results.history import read_history
from raysim.results.observers import (
    HISTORY,
    SUMMARY,
    ClientFiles,
    ClosingLine,
    CurrentRun,
    FailureFile,
    HistoryFile,
    JobFiles,
    MethodWarnings,
    Observer,
    Pictures,
    ProbeFiles,
    ProfileFiles,
    ProgressLine,
    RoundCallback,
    ShowActivity,
    SummaryFile,
    TrackingObserver,
    UserObserver,
    WorkerDeaths,
)
from raysim.results.progress import activity_line
from raysim.results.tracking import Tracker, flatten, read_record, replay, source_tags
from raysim.simulation.events import Event, Finished, Profiled, Round, Row, Saved, Started, Waiting

if TYPE_CHECKING:
    from rich.console import Console

OnRound = Callable[[Row], object]


def say(console: Console, text: str) -> None:
    """Print a line as it is, without markup; nothing for ""."""
    if text:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Print a warning; to standard error where the console is quiet."""
    from rich.console import Console

    say(Console(stderr=True) if console.quiet else console, text)


class Follower:
    """Takes the events of a run, as far as it is asked to, and tells its observers, in their order.

    Whatever ends the run early is told to those observers that had started and had not finished.
    """

    def __init__(
        self, run: CurrentRun, events: Iterator[Event], observers: Sequence[Observer] = ()
    ):
        self.run, self.events = run, events
        self._waiting = list(observers)  # for the start
        self._observers: list[Observer] = []  # those that follow the run now

    def until(self, number: int) -> Row:
        """Follow the run up to a round; its row."""
        with self._stopping():
            while len(self.run.rows) < number:
                self._take(next(self.events))
        return self.run.rows[number - 1]

    def next_event(self) -> None:
        """Follow the run by one event."""
        with self._stopping():
            self._take(next(self.events))

    def to_the_end(self) -> None:
        """Follow the run to its end."""
        with self._stopping():
            for event in (
                self.events
            ):  # to exhaustion: the runtime lets its workers go before results are drawn and sent
                self._take(event)
            assert self.run.finished is not None, "a run ends with Finished"
            while self._observers:
                self._observers[0].on_finish(self.run, self.run.finished)
                del self._observers[0]

    def _take(self, event: Event) -> None:
        if isinstance(event, Started):
            self.run.rows[:] = event.rows
            while self._waiting:
                self._waiting[0].on_start(self.run)
                self._observers.append(self._waiting.pop(0))
        elif isinstance(event, Round):
            self.run.rows.append(event.row)
            for observer in self._observers:
                observer.on_round(self.run, event)
        elif isinstance(event, Waiting):
            for observer in self._observers:
                observer.on_wait(self.run, event)
        elif isinstance(event, Saved):
            for observer in self._observers:
                observer.on_checkpoint(self.run, event)
        elif isinstance(event, Profiled):
            self.run.profile = event
        elif isinstance(event, Finished):
            self.run.finished = event

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._stop(error)
            raise

    def _stop(self, error: BaseException) -> None:
        """Tell all that are left, even if one of them fails at it."""
        problems = []
        while self._observers:
            try:
                self._observers.pop(0).on_stop(self.run, error)
            except Exception as problem:
                problems.append(problem)
        if problems:
            raise problems[0] from error


def record(
    experiment: Experiment,
    folder: Path,
    events: Iterator[Event],
    console: Console,
    quiet: bool,
    users: Sequence[Observer] = (),
) -> Result:
    """Follow a run to its end, with all that writes and shows its results, and with the user's own observers.

    Whatever ends it early, its history so far is written and its tracking closed. Raises Interrupted.
    """
    run = current_run(experiment, folder)
    follower = Follower(run, events, [*run_observers(experiment, folder, console, quiet), *users])
    try:
        follower.to_the_end()
    except KeyboardInterrupt:
        again = f"raysim run with the same settings, out={folder} and resume=latest"
        at = (
            "the last checkpoint"
            if last_checkpoint(folder, experiment.spec.settings.checkpoint)
            else "round 0, for want of a checkpoint"
        )
        raise Interrupted(
            f"stopped after round {len(run.rows)}: {again} continues from {at}"
        ) from None
    return Result(folder, json.loads((folder / SUMMARY).read_text()), run.rows, experiment)


def current_run(experiment: Experiment, folder: Path) -> CurrentRun:
    """What observers are told of a run."""
    facts = {
        "methods": [method.name for method in experiment.spec.methods],
        "title": experiment.spec.data.title,
        "choices": experiment.config["choices"],
        "identity": identity(experiment),
        "source": source_commit(),
        "split": split(experiment.spec.data),
    }
    rounds, thresholds = experiment.spec.settings.rounds, experiment.execution.thresholds
    return CurrentRun(folder, rounds, experiment.title, facts, thresholds, config=experiment.config)


def run_observers(
    experiment: Experiment, folder: Path, console: Console, quiet: bool, *, is_trial: bool = False
) -> list[Observer]:
    """Return the observers of a run in the order in which they are called.

    is_trial: whether a sweep makes the run. The sweep sends the trial's rows to MLflow and draws one picture of all
    trials, so the run itself does neither.
    """

    def note(text: str) -> None:
        if not quiet:
            say(console, text)

    def warns(text: str) -> None:
        warn(console, text)

    def says(text: str) -> AbstractContextManager[None]:
        return nullcontext() if quiet else activity_line(console, text)

    pictures = [] if is_trial else [Pictures(says)]
    tracking = [] if is_trial else _tracking(experiment, folder, console, says)
    return [
        ProgressLine(console, quiet, experiment.spec.data),
        HistoryFile(),
        JobFiles(),
        ClientFiles(experiment.spec.data),
        FailureFile(warns, experiment.spec.data),
        WorkerDeaths(note),
        MethodWarnings(experiment.round_warnings, warns),
        ProbeFiles(),
        *pictures,
        ProfileFiles(lambda table: None if quiet else console.print(table)),
        SummaryFile(),  # after all other files
        *tracking,  # sends these files
        ClosingLine(lambda text: say(console, text)),
    ]


def _tracking(
    experiment: Experiment, folder: Path, console: Console, says: ShowActivity
) -> list[Observer]:
    options = experiment.execution.tracking
    if options.name == "none":
        return []

    def tell(text: str) -> None:
        say(console, text)

    tracker = Tracker(folder, options.uri or "", name=folder.resolve().name, say=tell)
    spec, study = experiment.spec, _study_of(folder)
    tags = {
        "kind": "run",
        "method": "+".join(method.name for method in spec.methods) or "fedavg",
        "seed": spec.settings.seed,
        "data": spec.data.title,
        **({"study": study.name} if study else {}),
        **{key: value for key, value in flatten(identity(experiment)).items() if key != "seed"},
        **source_tags(),
    }
    return [TrackingObserver(tracker, experiment.config, tags, spec, tell, says, study)]


def _study_of(folder: Path) -> Path | None:
    """The folder of the tracked study that a run is a part of, in STUDY/runs/NAME."""
    study = folder.resolve().parent.parent
    return study if (study / "study.yaml").is_file() and read_record(study) else None


def users_observers(on_round: OnRound | None, observers: Sequence[Observer]) -> list[Observer]:
    """The user's own observers, each of which is named if it fails. Raises Refused for what cannot be one."""
    wrapped: list[Observer] = []
    if on_round is not None:
        if not callable(on_round):
            raise Refused(
                f"on_round={on_round!r} cannot be called: give a function that takes the row of a round"
            )
        name = getattr(on_round, "__qualname__", type(on_round).__qualname__)
        wrapped.append(UserObserver(RoundCallback(on_round), f"on_round={name}"))
    for observer in observers:
        if not isinstance(observer, Observer):
            raise Refused(
                f"observers={observer!r} is no observer: give an object of a subclass of raysim.Observer"
            )
        wrapped.append(UserObserver(observer, type(observer).__qualname__))
    return wrapped


def load_finished(experiment: Experiment, folder: Path, console: Console) -> Result:
    """The result of a run that had finished before; what MLflow lacks of it is sent."""
    if experiment.execution.tracking.name == "mlflow":
        replay(folder, experiment.execution.tracking.uri or "", say=lambda text: say(console, text))
    summary = json.loads((folder / SUMMARY).read_text())
    return Result(folder, summary, read_history(folder / HISTORY), experiment)
