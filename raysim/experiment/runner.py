"""Execute the runs of a study or a sweep, each in its own folder and with its own log.

A finished run is not executed again; an unfinished one continues at its last checkpoint. A study
executes a whole run (`attempt`), a sweep one round after another (`SteppedRun`). A sweep's runs
have no pictures and no samples.txt.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from raysim.experiment.build import build
from raysim.experiment.config_files import Node, to_yaml
from raysim.experiment.execute import run
from raysim.experiment.failures import explain_errors
from raysim.experiment.recorder import (
    Follower,
    OnRound,
    current_run,
    run_observers,
    say,
    warn,
    wrap_observers,
)
from raysim.experiment.run_folder import CONFIG, begin_folder, choose_place, last_checkpoint
from raysim.experiment.settings import Experiment
from raysim.primitives.errors import RefusedError, errors_as_refusals, first_line
from raysim.primitives.files import lock_folder, replace_file
from raysim.results.history import Row, read_history, write_history
from raysim.results.observers import HISTORY
from raysim.simulation import checkpoint
from raysim.simulation.events import Event, RunStoppedError

if TYPE_CHECKING:
    from rich.console import Console

LOG_WIDTH = 120  # characters in a line of a log
LOCK_TIMEOUT_S = 30.0  # until the process of a killed sweep has released a run's folder
# Starts a run's events in a folder, from a checkpoint's address ("": from round 0).
StartEvents: TypeAlias = Callable[[Experiment, Path, str], Iterator[Event]]


class RunFailedError(Exception):
    """The error of a failed run. Its message is one sentence; the run's log has more.

    The log has the whole text of the error, and the traceback of an unexpected error.
    """


@contextmanager
def record_failure(log: Path) -> Iterator[None]:
    """Write an error of the `with` block into a log; raise `RunFailedError` with one sentence."""
    try:
        yield
    except (RefusedError, RunStoppedError) as error:
        text = str(error).strip()  # with the traceback of a client's error, if there is one
        _append(log, f"raysim: {text}\n")
        raise RunFailedError(first_line(error)) from error
    except Exception as error:  # the other runs continue
        _append(log, traceback.format_exc())
        raise RunFailedError(f"{type(error).__name__}: {first_line(error)} (see {log})") from error


def _append(log: Path, text: str) -> None:
    with log.open("a", encoding="utf-8") as stream:
        stream.write(text)


@contextmanager
def log_console(log: Path) -> Iterator[Console]:
    """Yield a console that appends to a run's log."""
    from rich.console import Console

    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as stream:
        yield Console(file=stream, width=LOG_WIDTH)


def attempt(
    config: Node, log: Path, allow: Sequence[str] = (), on_round: OnRound | None = None
) -> str:
    """Execute a complete run; return "", or a sentence that says why the run failed.

    config: the run's configuration, with its folder in `out`.
    log: the file for the printed output and the error.
    allow: the packages besides raysim whose classes may be used.
    """
    try:
        with record_failure(log), log_console(log) as console:
            run(config, allow=allow, console=console, on_round=on_round)
    except RunFailedError as error:
        return str(error)
    return ""


class SteppedRun:
    """A run in its own folder that advances round by round, as far as the caller requests.

    config: the run's configuration, as `configure_run` returns it.
    log: the file for the printed output and the error.
    start_events: function that starts the run and returns its events. It gets the run, the run's
    folder and a checkpoint's address ("" for none).
    allow: packages besides raysim that the configuration may name.
    accepts_changes: True if an unfinished run may continue with other settings.
    Raise `RunFailedError` if the run cannot be built or started.
    """

    def __init__(
        self,
        config: Node,
        log: Path,
        start_events: StartEvents,
        *,
        allow: Sequence[str] = (),
        accepts_changes: bool = False,
    ):
        self.log = log
        self._session = ExitStack()
        with record_failure(log), ExitStack() as session:
            console = session.enter_context(log_console(log))
            experiment = build(config, allow)
            self.folder = Path(config["out"])
            with self._lock_for_a_call(), explain_errors(self.folder):
                if accepts_changes:
                    replace_file(self.folder / CONFIG, to_yaml(experiment.config).encode())
                self._follower = self._follow(experiment, start_events, console, session)
            self._session = session.pop_all()
        self._settings = experiment.spec.settings

    def _follow(
        self,
        experiment: Experiment,
        start_events: StartEvents,
        console: Console,
        session: ExitStack,
    ) -> Follower:
        with errors_as_refusals():
            where = choose_place(experiment)
        say(console, where.note)
        current = current_run(experiment, self.folder)
        self.is_finished = where.is_finished
        if where.is_finished:
            current.rows = read_history(self.folder / HISTORY)
            return Follower(current, iter(()))
        for warning in experiment.warnings:
            warn(console, warning)
        with errors_as_refusals():
            events = start_events(experiment, self.folder, where.resume)
            session.callback(_close_events, events)
            started = next(events)
            begin_folder(experiment, where)
        observers = run_observers(experiment, self.folder, console, quiet=False, is_trial=True)
        own_observers = wrap_observers(None, experiment.observers)
        return Follower(current, chain([started], events), [*observers, *own_observers])

    @property
    def rounds(self) -> int:
        """Return the number of rounds of the whole run."""
        return self._settings.rounds

    def until(self, number: int) -> Row:
        """Advance the run until a round is finished, and return the row of this round.

        number: the number of the round, from 1. If it is finished already, only the row is
        returned.
        """
        with self._recorded():
            return self._follower.follow_until(number)

    def to_the_end(self) -> None:
        """Run all remaining rounds, and write the results of the run.

        Do nothing if the run is finished.
        """
        if self.is_finished:
            return
        with self._recorded():
            self._follower.follow_to_end()
        self.is_finished = True

    def write_history(self) -> None:
        """Write the history so far, because the caller may stop calling at any time."""
        with self._recorded():
            write_history(self._follower.run.rows, self.folder / HISTORY)

    def write_due_checkpoint(self, number: int) -> None:
        """Advance the run until the checkpoint of a round is written; do nothing if none is due.

        number: the number of the round, from 1.
        """
        every = self._settings.checkpoint.every
        if self.is_finished or not every or number % every:
            return
        with self._recorded():
            if (
                checkpoint.version_of(last_checkpoint(self.folder, self._settings.checkpoint))
                < number
            ):
                self._follower.follow_event()  # a checkpoint follows its round at once

    def close(self) -> None:
        """Stop the run at its current round, without writing anything."""
        self._session.close()

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        with record_failure(self.log), self._lock_for_a_call(), explain_errors(self.folder):
            yield

    @contextmanager
    def _lock_for_a_call(self) -> Iterator[None]:
        """Lock the run's folder during a `with` block, which contains the work of one method call.

        Between the calls, Ray Tune may move the paused trial to another process.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        with ExitStack() as lock:
            while True:
                try:
                    lock.enter_context(lock_folder(self.folder))
                    break
                except RefusedError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.1)
            yield


def _close_events(events: Iterator[Event]) -> None:
    """Stop a run and its workers, if they have not ended, by closing the generator of its events.

    Do nothing if `events` cannot be closed.
    """
    close = getattr(events, "close", None)
    if close is not None:
        close()
