"""What follows a run: one small observer for each thing that a run shows, writes or sends away."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from raysim.api.messages import Failure
from raysim.api.setup import RoundWarning
from raysim.data.federated import FederatedData
from raysim.primitives.errors import first_line
from raysim.primitives.files import replace_file
from raysim.results import profile
from raysim.results.clients import client_labels, write_clients, write_split
from raysim.results.curves import draw_run
from raysim.results.figures import (
    draw_bias,
    draw_decomposition,
    draw_domains,
    draw_features,
    draw_outputs,
    draw_reports,
)
from raysim.results.history import COLUMNS, THRESHOLDS, summarise, write_history, write_json
from raysim.results.jobs import JobWriter, read_jobs
from raysim.results.probes import load_probes, save_probes
from raysim.results.progress import Progress
from raysim.results.shared_model import load_shared_model
from raysim.results.timeline import draw_timeline
from raysim.results.tracking import Tracker, save_model
from raysim.simulation.events import (
    ClientScores,
    Finished,
    Profiled,
    Round,
    Row,
    RunStoppedError,
    Saved,
    Waiting,
)
from raysim.training.identity import are_equal, describe_processes

if TYPE_CHECKING:
    from rich.console import Console

    from raysim.training.run_spec import RunSpec

HISTORY, FAILURES, SUMMARY = "history.parquet", "failures.jsonl", "summary.json"
PROBES = "probes"  # folder of what was seen of the local models
_ENDING = (
    "model_sha256",
    "state_sha256",
    "peak_memory_bytes",
    "best_model",
)  # what the summary says of the end
PrintLine: TypeAlias = Callable[[str], None]  # prints one line
ShowActivity: TypeAlias = Callable[[str], AbstractContextManager[None]]  # says what goes on inside


@dataclass
class CurrentRun:
    """A run while it goes on, as its observers see it; they read it and leave it as it is.

    rounds: how many there will be. rows: the history so far, a row per round; a resumed run's earlier rounds are in it
    from the start. facts: what the summary says besides the numbers of the history. pictures: those drawn at the end.
    config: the settings. profile: where the time went, just before the end, if the run was asked for it.
    """

    folder: Path
    rounds: int
    title: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    thresholds: Sequence[float] = THRESHOLDS
    rows: list[Row] = field(default_factory=list)
    finished: Finished | None = None
    profile: Profiled | None = None
    pictures: list[Path] = field(default_factory=list)
    config: Mapping[str, object] = field(default_factory=dict)

    def summary(self) -> dict[str, object]:
        """What summary.json says, of the rows so far; with the checksums of the model once the run has finished."""
        ending: dict[str, object] = {}
        if self.finished is not None:
            ending = {key: getattr(self.finished, key) for key in _ENDING}
            if processes := self.finished.processes:
                ending |= {
                    "processes": describe_processes(processes),
                    "same_bits_promised": are_equal(processes),
                }
        return summarise(self.rows, self.thresholds, **self.facts, **ending)


class Observer:
    """Follows a run: override the moments that matter, the others do nothing.

    After `on_start` an observer is told one end: `on_finish`, or `on_stop` where the run (or `on_finish` of any
    observer up to this one) raised an error or was interrupted. A run that lost a process stops and starts again.
    """

    def on_start(self, run: CurrentRun) -> None:
        """The workers are ready, and the run's folder exists."""

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """An aggregation is done and scored; `event.row` is the last of `run.rows`."""

    def on_wait(self, run: CurrentRun, event: Waiting) -> None:
        """No worker has answered for some seconds; told again every few seconds until one does."""

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """A checkpoint was written."""

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """The last round is done, and the workers are gone."""

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """The run ended early, by this error; a KeyboardInterrupt where the user stopped it."""


# --- what a person sees ---------------------------------------------------------------------------------------------
class ProgressLine(Observer):
    """The bar in a terminal, or a line now and then in a log."""

    def __init__(self, console: Console, quiet: bool, data: FederatedData):
        self._console, self._quiet, self._data, self._shown = console, quiet, data, ExitStack()

    def on_start(self, run: CurrentRun) -> None:
        """Show the bar."""
        progress = Progress(
            run.rounds, done=len(run.rows), quiet=self._quiet, console=self._console
        )
        self._progress = self._shown.enter_context(progress)

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Move the bar."""
        self._progress.update(event.row)

    def on_wait(self, run: CurrentRun, event: Waiting) -> None:
        """Say whom everyone waits for."""
        clients = [self._data.number(client) for client in event.clients]
        self._progress.wait(event.worker, clients, event.seconds)

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Leave the last state on the screen."""
        self._shown.close()

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Leave the last state on the screen."""
        self._shown.close()


class WorkerDeaths(Observer):
    """A line for each round in which processes of workers died."""

    def __init__(self, note: PrintLine):
        self._note = note

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Say what happened, and why it does no harm."""
        if count := int(event.row.get("worker_deaths") or 0):
            died = (
                "1 worker process died and was"
                if count == 1
                else f"{count} worker processes died and were"
            )
            self._note(
                f"round {event.row['round']}: {died} replaced; clients' jobs that were lost are trained again from the "
                "same states with the same random numbers, so no result changes"
            )


class MethodWarnings(Observer):
    """Warn of what methods find unusual during a run, each once."""

    def __init__(self, warnings: Sequence[RoundWarning], note: PrintLine):
        self._warnings, self._note = list(warnings), note

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Ask those that have not warned yet."""
        for warning in [*self._warnings]:
            text = warning.text(event.row)
            if text:
                self._note(f"round {event.row['round']}: {text}")
                self._warnings.remove(warning)


class ClosingLine(Observer):
    """The last line: accuracies, and where the results are."""

    def __init__(self, say: PrintLine):
        self._say = say

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Print it."""
        names = {
            "_global": "on the central test set",
            "": "mean of the clients",
            "_worst": "worst client",
            "_shared": "shared model, mean of the clients",
            "_finetuned": "after fine-tuning, mean of the clients",
            "_common": "clients' models on the central test set",
            "_best": "mean of the clients, each in its best round by validation",
            "_unseen": "clients that were never trained",
        }
        summary: dict[str, Any] = run.summary()
        found = {
            text: summary.get(f"{summary['metric']}{suffix}") for suffix, text in names.items()
        }
        known = (
            ", ".join(f"{value:.4f} {text}" for text, value in found.items() if value is not None)
            or "unknown"
        )
        self._say(
            f"{summary['metric']} {known} after {summary['rounds']} rounds; results are in {run.folder}"
        )
        self._say(f"raysim report {shlex.quote(str(run.folder))} makes a page of them")


# --- what is written into the run's folder --------------------------------------------------------------------------
class HistoryFile(Observer):
    """history.parquet: written with each checkpoint, and however the run ends.

    Of a long run, with those by which it has grown by a tenth: so a round costs the same, however many there were. The
    rows in between are in the checkpoint.
    """

    LONG = 1000  # rounds

    def __init__(self) -> None:
        self._written = 0  # rows

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Write it."""
        if len(run.rows) <= self.LONG or len(run.rows) >= 1.1 * self._written:
            write_history(run.rows, run.folder / HISTORY)
            self._written = len(run.rows)

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write it."""
        write_history(run.rows, run.folder / HISTORY)

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Write it."""
        write_history(run.rows, run.folder / HISTORY)


class JobFiles(Observer):
    """jobs.parquet: every job on virtual time; written with each checkpoint, and however the run ends.

    A run that is continued without it, from before there was such a file or into another folder, goes on without it.
    """

    def on_start(self, run: CurrentRun) -> None:
        """Of an earlier session, keep the jobs of the rounds that the checkpoint holds: later ones come again."""
        self._writer = JobWriter.open(run.folder, len(run.rows))

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Add this round's."""
        if self._writer:
            self._writer.add(event.jobs)

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Write them."""
        self._write()

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write them, and those that are under way."""
        if self._writer:
            self._writer.add(event.jobs)
        self._write()

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Write them."""
        self._write()

    def _write(self) -> None:
        if self._writer:
            self._writer.write()


class ClientFiles(Observer):
    """split.parquet and clients.parquet: what each client has, and what its last score was."""

    def __init__(self, data: FederatedData):
        self._data = data
        self._scores: ClientScores | None = None

    def on_start(self, run: CurrentRun) -> None:
        """Write the split, which stays as it is."""
        write_split(client_labels(self._data), run.folder)

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Keep the last scores."""
        self._scores = event.scores or self._scores

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write them."""
        write_clients(self._data, self._scores, run.folder)

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Write them."""
        write_clients(self._data, self._scores, run.folder)


class FailureFile(Observer):
    """failures.jsonl: a line for each client that failed and was left out of a round."""

    def __init__(self, note: PrintLine, data: FederatedData):
        self._note, self._data = note, data

    def on_start(self, run: CurrentRun) -> None:
        """Of an earlier session, keep the failures of the rounds that the checkpoint holds: later ones come again."""
        path = run.folder / FAILURES
        if path.exists():
            earlier = [
                line for line in path.read_text().splitlines() if _round_of(line) <= len(run.rows)
            ]
            replace_file(path, "".join(line + "\n" for line in earlier).encode())

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Append this round's; the first of a run is shown as well."""
        path = run.folder / FAILURES
        for failure in event.failures:
            if not path.exists():
                self._note(
                    f"a client failed and was left out of its round: {failure.error} (all failures: {path})"
                )
            with path.open("a") as stream:
                stream.write(
                    json.dumps({"round": int(event.row["round"] or 0), **self._fields(failure)})
                    + "\n"
                )

    def _fields(self, failure: Failure) -> dict[str, object]:
        found: dict[str, object] = {}
        for each in fields(failure):
            found[each.name] = getattr(failure, each.name)
            user = self._data.user(failure.client) if each.name == "client" else None
            if user is not None:
                found["user"] = user
        return found


def _round_of(line: str) -> int:
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):  # a line that a crash cut short
        return 1 << 62


class ProbeFiles(Observer):
    """probes/round-N.safetensors: what was seen of the local models in a round that probes them."""

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Write them."""
        if event.probes:
            path = run.folder / PROBES / f"round-{int(event.row['round'] or 0):06d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_probes(event.probes, path)


class Pictures(Observer):
    """The plots of the history, of the jobs, of the methods' reports and of the probes."""

    def __init__(self, doing: ShowActivity):
        self._doing = doing

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Draw those that there are numbers for."""
        with self._doing("drawing pictures"):
            self._draw(run)

    def _draw(self, run: CurrentRun) -> None:
        run.pictures += [*draw_run(run.rows, run.folder, run.title), *self._probes(run)]
        jobs = read_jobs(run.folder)
        if jobs is not None and draw_timeline(
            jobs, run.rows, path := run.folder / "timeline.png", run.title
        ):
            run.pictures.append(path)
        for name, draw in (
            ("methods", draw_reports),
            ("domains", draw_domains),
            ("decomposition", draw_decomposition),
        ):
            if draw(run.rows, path := run.folder / f"{name}.png", run.title):
                run.pictures.append(path)

    def _probes(self, run: CurrentRun) -> list[Path]:
        """What the probes showed: numbers over the rounds, and the last round's features and outputs."""
        files = sorted((run.folder / PROBES).glob("round-*.safetensors"))
        if not files:
            return []
        probes = load_probes(files[-1])
        paths = [run.folder / f"{name}.png" for name in ("bias", "features", "outputs")]
        last = f"{run.title}, round {int(files[-1].stem.removeprefix('round-'))}"
        drawn = draw_bias(run.rows, paths[0], run.title)
        draw_features(probes, paths[1], last)
        draw_outputs(probes, paths[2], last)
        return paths if drawn else paths[1:]


class ProfileFiles(Observer):
    """profile.json, trace.json and profile.png, where a run was asked for them; and the table on the screen."""

    def __init__(self, show: Callable[[object], object]):
        self._show = show

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write and show them."""
        if run.profile is not None:
            run.pictures.append(profile.write(run.profile, run.folder, run.title)[-1])
            self._show(profile.table(run.profile))


class SummaryFile(Observer):
    """summary.json: comes after all other results, because it says that the run is complete."""

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write it."""
        write_json(run.summary(), run.folder / SUMMARY)


# --- what is sent away ----------------------------------------------------------------------------------------------
class TrackingObserver(Observer):
    """The same rows, what they sum up to, and files on a tracking server; the model, too, where all share one."""

    FILES = ("config.yaml", HISTORY, SUMMARY, "model.safetensors", "best.safetensors", FAILURES)

    def __init__(
        self,
        tracker: Tracker,
        config: Mapping[str, object],
        tags: Mapping[str, object],
        spec: RunSpec,
        note: PrintLine,
        doing: ShowActivity,
        study: Path | None = None,
    ):
        self._tracker, self._config, self._tags, self._doing = tracker, config, tags, doing
        self._spec, self._note, self._study = spec, note, study

    def on_start(self, run: CurrentRun) -> None:
        """Begin, or continue, the run on the server."""
        data = self._spec.data
        told: dict[str, object] = {
            "name": data.title,
            "digest": data.dataset_path.stem.rpartition("-")[2],
        }
        told |= {"clients": len(data.partition), "samples": len(data.partition.train.indices)}
        self._tracker.start(self._config, self._tags, run.rows, self._study, told)

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Hand the row over; nothing waits for the server."""
        self._tracker.log(event.row)

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Send the rest, the summary and the files."""
        with self._doing("sending the rest to MLflow"):
            self._send(run)

    def _send(self, run: CurrentRun) -> None:
        files = [run.folder / name for name in self.FILES if (run.folder / name).exists()]
        try:
            if (
                model := load_shared_model(self._spec, run.folder / "model.safetensors")
            ) is not None:
                save_model(*model, run.folder)
        except Exception as error:  # of a tracer that many models are too much for
            self._note(f"MLflow gets the model's weights alone, as {_why(error)}")
        self._tracker.finish(_scores(run), [*files, *run.pictures])

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Send the rest, and how it ended."""
        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        self._tracker.finish(_scores(run), status=status)


def _why(error: Exception) -> str:
    """Why a model could not be written as a program."""
    if not isinstance(error, OSError):
        return f"it cannot be traced: {first_line(error)}"
    try:
        Path.cwd()
    except FileNotFoundError:  # which an error without a name is most often about
        return "the folder that this process works in is gone"
    return f"a file fails: {first_line(error)}"


def _scores(run: CurrentRun) -> dict[str, object]:
    """What the summary says besides the last row and what settings and tags say, so that no number is there twice."""
    told = {"rounds", *COLUMNS, *(key for row in run.rows for key in row), *run.facts} - {"split"}
    return {key: value for key, value in run.summary().items() if key not in told}


# --- a user's own ---------------------------------------------------------------------------------------------------
class ObserverError(RunStoppedError):
    """A user's own observer raised an error, which is this one's cause; the run's history was written."""


ObserverFailed = ObserverError  # the name in version 0.1


class RoundCallback(Observer):
    """Calls a function with the row of each finished round."""

    def __init__(self, function: Callable[[Row], object]):
        self._function = function

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Call it."""
        self._function(event.row)


class UserObserver(Observer):
    """Stands around an observer of the user's own: says whose an error is, and keeps the run's rows from changes."""

    def __init__(self, observer: Observer, name: str):
        self._observer, self._name = observer, name

    def on_start(self, run: CurrentRun) -> None:
        """Pass it on."""
        self._tell("on_start", run)

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Pass it on, with a row of its own."""
        self._tell("on_round", run, replace(event, row=dict(event.row)))

    def on_wait(self, run: CurrentRun, event: Waiting) -> None:
        """Pass it on."""
        self._tell("on_wait", run, event)

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Pass it on."""
        self._tell("on_checkpoint", run, event)

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Pass it on."""
        self._tell("on_finish", run, event)

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Pass it on."""
        self._tell("on_stop", run, error)

    def _tell(self, moment: str, run: CurrentRun, *about: object) -> None:
        try:
            getattr(self._observer, moment)(run, *about)
        except Exception as error:
            what = (
                f"your observer {self._name} raised {type(error).__name__} in {moment}: {error}. "
            )
            if run.finished is not None:
                raise ObserverError(
                    f"{what}The run itself had finished; its results are in {run.folder}"
                ) from error
            raise ObserverError(
                f"{what}The run was stopped after round {len(run.rows)} and its history is written: repair the "
                f"observer, then run with the same settings, out={run.folder} and resume=latest to go on"
            ) from error
