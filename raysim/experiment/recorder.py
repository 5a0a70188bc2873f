"""Follow one run: read its events one by one and pass them to its observers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.experiment.describe import identity, split_facts
from raysim.experiment.objects import has_objects
from raysim.experiment.result import Result
from raysim.experiment.run_folder import last_checkpoint
from raysim.experiment.settings import Experiment, Interrupted
from raysim.primitives.commit import source_commit
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import without_password
from raysim.primitives.interrupts import keep_interrupts
from raysim.results.history import read_history
from raysim.results.observers import (
    HISTORY,
    SUMMARY,
    AbsentClients,
    ClientFiles,
    ClosingLine,
    CurrentRun,
    FailureFile,
    HistoryFile,
    IdleWorkers,
    JobFiles,
    MethodWarnings,
    Observer,
    Pictures,
    PrintLine,
    ProbeFiles,
    ProfileFiles,
    ProgressLine,
    RemovalFailures,
    RoundCallback,
    ShowActivity,
    SummaryFile,
    TrackingObserver,
    UndefinedMetrics,
    UserObserver,
    WorkerDeaths,
)
from raysim.results.progress import activity_line
from raysim.results.text_samples import TextSamples
from raysim.results.tracked_run import flatten, read_record
from raysim.results.tracking import make_tracker, replay, source_tags
from raysim.simulation.availability import Availability
from raysim.simulation.events import Event, Finished, Profiled, Round, Row, Saved, Started, Waiting
from raysim.training.run_spec import sample_flops

if TYPE_CHECKING:
    from rich.console import Console

OnRound = Callable[[Row], object]


def say(console: Console, text: str) -> None:
    """Print a line on a console as it is, without interpreting Rich's markup.

    Print nothing if the text is "".
    """
    if text:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def warn(console: Console, text: str) -> None:
    """Print a warning on a console.

    If the console is quiet, so that it prints nothing, the warning goes to standard error.
    """
    from rich.console import Console

    say(Console(stderr=True) if console.quiet else console, text)


class Follower:
    """A reader of a run's events that calls the run's observers in order.

    If an error ends the run, all observers that have started and not finished get the error.
    run: what observers can see of the run.
    """

    def __init__(
        self, run: CurrentRun, events: Iterator[Event], observers: Sequence[Observer] = ()
    ):
        self.run, self.events = run, events
        self._unstarted = list(observers)
        self._started: list[Observer] = []

    def follow_until(self, number: int) -> Row:
        """Read events until a round is done, and return the round's row.

        number: the number of the round, from 1.
        """
        with self._stop_on_error():
            while len(self.run.rows) < number:
                self._handle(next(self.events))
        return self.run.rows[number - 1]

    def follow_event(self) -> None:
        """Read one event, and pass it to the observers."""
        with self._stop_on_error():
            self._handle(next(self.events))

    def follow_to_end(self) -> None:
        """Pass all events to the observers until the run ends; then call their `on_finish`."""
        with self._stop_on_error():
            # The events are exhausted first: the runtime stops its workers before results are
            # drawn and sent.
            for event in self.events:
                self._handle(event)
            assert self.run.finished is not None, "a run ends with Finished"
            while self._started:
                self._started[0].on_finish(self.run, self.run.finished)
                del self._started[0]

    def _handle(self, event: Event) -> None:
        if isinstance(event, Started):
            self.run.rows[:] = event.rows
            while self._unstarted:
                self._unstarted[0].on_start(self.run)
                self._started.append(self._unstarted.pop(0))
        elif isinstance(event, Round):
            self.run.rows.append(event.row)
            for observer in self._started:
                observer.on_round(self.run, event)
        elif isinstance(event, Waiting):
            for observer in self._started:
                observer.on_wait(self.run, event)
        elif isinstance(event, Saved):
            for observer in self._started:
                observer.on_checkpoint(self.run, event)
        elif isinstance(event, Profiled):
            self.run.profile = event
        elif isinstance(event, Finished):
            self.run.finished = event

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            with keep_interrupts():
                yield
        except BaseException as error:
            self._notify_all(error)
            raise

    def _notify_all(self, error: BaseException) -> None:
        """Call `on_stop` of all started observers, even if some of these calls fail.

        error: the error that stopped the run.
        If calls fail, raise the error of the first call that failed.
        """
        problems: list[Exception] = []
        while self._started:
            try:
                self._started.pop(0).on_stop(self.run, error)
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
    user_observers: Sequence[Observer] = (),
) -> Result:
    """Follow a run to its end with all observers, raysim's and the user's; return its result.

    If an error ends the run, its history is still written and its tracking closed.
    quiet: True prints only warnings and the closing line.
    Raise `Interrupted` if the user stops the run.
    """
    run = current_run(experiment, folder)
    own_observers = run_observers(experiment, folder, console, quiet)
    follower = Follower(run, events, [*own_observers, *user_observers])
    try:
        follower.follow_to_end()
    except KeyboardInterrupt:
        address = without_password(experiment.url) or folder
        start = "round 0, because there is no checkpoint"
        if last_checkpoint(folder, experiment.spec.settings.checkpoint):
            start = "the last checkpoint"
        raise Interrupted(
            f"stopped after round {len(run.rows)}. A continued run starts from {start}. To "
            f"continue, start this run again with the same settings, out={address} and "
            "resume=latest."
        ) from None
    summary = json.loads((folder / SUMMARY).read_text())
    return Result(folder, summary, run.rows, experiment, experiment.url)


def current_run(experiment: Experiment, folder: Path) -> CurrentRun:
    """Return the description of a run that its observers get: its folder, title and settings.

    folder: the run's folder.
    """
    facts = {
        "methods": [method.name for method in experiment.spec.methods],
        "title": experiment.spec.data.title,
        "choices": experiment.config["choices"],
        "identity": identity(experiment),
        "source": source_commit(),
        "split": split_facts(experiment.spec.data),
    }
    rounds, thresholds = experiment.spec.settings.rounds, experiment.execution.thresholds
    return CurrentRun(
        folder,
        rounds,
        experiment.title,
        facts,
        thresholds,
        config=experiment.config,
        url=without_password(experiment.url),
    )


def run_observers(
    experiment: Experiment, folder: Path, console: Console, quiet: bool, *, is_trial: bool = False
) -> list[Observer]:
    """Return raysim's observers of a run in the order in which they are called.

    folder: the run's folder.
    quiet: True prints only warnings and the closing line.
    is_trial: True for a run of a sweep. Such a run sends nothing to MLflow and draws no picture.
    """

    def print_line(text: str) -> None:
        say(console, text)

    def print_unless_quiet(text: str) -> None:
        if not quiet:
            say(console, text)

    def print_table(table: object) -> None:
        if not quiet:
            console.print(table)

    def print_warning(text: str) -> None:
        warn(console, text)

    def show_activity(text: str) -> AbstractContextManager[None]:
        return nullcontext() if quiet else activity_line(console, text)

    reason = experiment.late_planning
    idleness = [IdleWorkers(print_unless_quiet, reason)] if reason else []
    texts = [] if is_trial else [TextSamples(experiment.spec, print_unless_quiet)]
    is_part = _study_folder(folder) is not None
    pictures = [] if is_trial else [Pictures(show_activity, experiment.network, is_part)]
    tracking = [] if is_trial else _tracking(experiment, folder, print_line, show_activity)
    uri = experiment.execution.tracking.uri
    is_stored = bool(tracking) and not uri and not experiment.url
    return [
        ProgressLine(console, quiet, experiment.spec.data),
        HistoryFile(),
        JobFiles(),
        ClientFiles(experiment.spec.data, experiment.network),
        FailureFile(print_warning, experiment.spec.data),
        WorkerDeaths(print_unless_quiet),
        RemovalFailures(print_unless_quiet),
        MethodWarnings(experiment.round_warnings, print_warning),
        UndefinedMetrics(print_warning),
        *idleness,
        AbsentClients(
            functools.partial(_find_availability, experiment),
            np.flatnonzero(experiment.spec.data.partition.train.counts),
            print_warning,
        ),
        ProbeFiles(),
        *texts,
        *pictures,
        ProfileFiles(print_table),
        SummaryFile(),  # after all other files
        *tracking,  # sends these files
        ClosingLine(print_line, is_stored=is_stored),
    ]


def _find_availability(experiment: Experiment) -> Availability | None:
    """Return the times at which each client is available; None if all are always available."""
    spec = experiment.spec
    clients = len(spec.data.partition.train.counts)
    flops = functools.partial(sample_flops, spec)
    return experiment.fleet.devices(spec.settings.seed, clients, flops).presence


def _tracking(
    experiment: Experiment, folder: Path, print_line: PrintLine, show_activity: ShowActivity
) -> list[Observer]:
    options = experiment.execution.tracking
    if options.name == "none":
        return []

    tracker = make_tracker(folder, options.uri, say=print_line)
    spec, study = experiment.spec, _tracked_study(folder)
    tags: dict[str, object] = {
        "kind": "run",
        "method": "+".join(method.name for method in spec.methods) or "fedavg",
        "data": spec.data.title,
    }
    if study is not None:
        tags["study"] = study.name
    tags |= flatten(identity(experiment))  # with the seed
    tags |= source_tags()
    observer = TrackingObserver(
        tracker,
        experiment.config,
        tags,
        spec,
        print_line,
        show_activity,
        study,
        leaves_model=not options.uri and _can_be_rebuilt(experiment),
    )
    return [observer]


def _can_be_rebuilt(experiment: Experiment) -> bool:
    """Return True if config.yaml and raysim are enough to build the run again.

    Python objects and the code of other packages are then not needed.
    """
    spec = experiment.spec
    return not spec.packages and not spec.own_metrics and not has_objects(experiment.config)


def _tracked_study(folder: Path) -> Path | None:
    """Return the folder STUDY if `folder` is STUDY/runs/NAME and the study is tracked, else None.

    A study is tracked if its folder has a tracking.json that can be read.
    """
    study = _study_folder(folder)
    return study if study is not None and read_record(study) else None


def _study_folder(folder: Path) -> Path | None:
    """Return STUDY for the folder STUDY/runs/NAME of a study's run; None for any other folder."""
    study = folder.resolve().parent.parent
    return study if (study / "study.yaml").is_file() else None


def wrap_observers(on_round: OnRound | None, observers: Sequence[Observer]) -> list[Observer]:
    """Wrap the user's observers and round function so that an error says which one failed.

    on_round: a function that gets the row of each round; None for no function. The result starts
    with this function's wrapper.
    Raise `RefusedError` for an object that is not an observer, and for an `on_round` that cannot be
    called.
    """
    wrapped: list[Observer] = []
    if on_round is not None:
        if not callable(on_round):
            raise RefusedError(
                f"on_round={on_round!r} cannot be called. "
                "Give a function that takes the row of a round."
            )
        name = getattr(on_round, "__qualname__", type(on_round).__qualname__)
        wrapped.append(UserObserver(RoundCallback(on_round), f"on_round={name}"))
    for observer in observers:
        if not isinstance(observer, Observer):
            raise RefusedError(
                f"observers={observer!r} is no observer. "
                "Give an object of a subclass of raysim.Observer."
            )
        wrapped.append(UserObserver(observer, type(observer).__qualname__))
    return wrapped


def load_finished(experiment: Experiment, folder: Path, console: Console) -> Result:
    """Return the result of a run that had finished before; send its missing rows to MLflow.

    Rows are sent only if `tracking.uri` is set.
    folder: the run's folder.
    console: prints messages about the sent rows.
    """

    def print_line(text: str) -> None:
        say(console, text)

    tracking = experiment.execution.tracking
    if tracking.name == "mlflow" and tracking.uri:
        replay(folder, tracking.uri, say=print_line)
    summary = json.loads((folder / SUMMARY).read_text())
    return Result(folder, summary, read_history(folder / HISTORY), experiment, experiment.url)
