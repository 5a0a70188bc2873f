"""Define the observers of a run, which show, write or send its results."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from raysim.api.messages import Failure
from raysim.api.setup import RoundWarning
from raysim.api.topology import Network
from raysim.data.federated import FederatedData
from raysim.primitives.files import replace_file
from raysim.primitives.stacks import RAY_MESSAGES, stack_file, write_stacks
from raysim.results import profile
from raysim.results.clients import (
    ScoreWriter,
    client_labels,
    read_clients,
    write_clients,
    write_split,
)
from raysim.results.curves import draw_run
from raysim.results.figures import (
    draw_bias,
    draw_decomposition,
    draw_domains,
    draw_features,
    draw_outputs,
    draw_reports,
)
from raysim.results.history import (
    COLUMNS,
    THRESHOLDS,
    lower_metrics,
    mean_worker_busy,
    metrics_of,
    summarise,
    write_history,
    write_json,
)
from raysim.results.jobs import JobWriter, read_jobs
from raysim.results.mlflow_server import save_model, save_problem
from raysim.results.number_format import format_amount
from raysim.results.probes import load_probes, save_probes
from raysim.results.progress import Progress
from raysim.results.shared_model import load_shared_model
from raysim.results.timeline import draw_timeline
from raysim.results.topology_picture import draw_topology
from raysim.results.tracked_run import PENDING
from raysim.results.tracking import NoTracker, StoredTracker
from raysim.simulation.availability import Availability
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
PROBES = "probes"  # folder with a file for each probed round
# Keys of the summary that a run has at its end.
_END_KEYS = ("model_sha256", "state_sha256", "peak_memory_bytes", "best_model")
PrintLine: TypeAlias = Callable[[str], None]  # prints one line
# shows a text during a `with` block
ShowActivity: TypeAlias = Callable[[str], AbstractContextManager[None]]


@dataclass
class CurrentRun:
    """A run while it is running, as its observers see it. Observers must not change it.

    rounds: the planned number of rounds.
    facts: the entries of the summary that are not computed from the history.
    thresholds: target scores; `rounds_to` in the summary has the first round that reached each of
    them.
    rows: the history so far, with the earlier rounds of a resumed run.
    finished: the event that ends the run; None while the run continues.
    profile: the division of the wall time; None before the end, or without `profile=true`.
    url: the address of a copy of the run's folder, without a password; "" if there is none.
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
    url: str = ""

    @property
    def address(self) -> str:
        """Return the URL of the run; without a URL, its folder."""
        return self.url or str(self.folder)

    def summary(self) -> dict[str, object]:
        """Return the content of summary.json for the rows so far.

        Once the run has finished, the content includes the checksums of the model, the peak memory
        and the processes of the run.
        """
        end_facts: dict[str, object] = {}
        if self.finished is not None:
            end_facts = {key: getattr(self.finished, key) for key in _END_KEYS}
            processes = self.finished.processes
            if processes:
                end_facts["processes"] = describe_processes(processes)
                end_facts["same_bits_promised"] = are_equal(processes)
        lower = lower_metrics(self.config)
        return summarise(self.rows, self.thresholds, lower, **self.facts, **end_facts)


class Observer:
    """The base class of observers.

    Override the methods that you need; by default they do nothing. A run calls `on_finish` at its
    end, or `on_stop` if an error ends it after `on_start`. An error in `on_finish` calls `on_stop`
    for this observer and all later ones. A run that lost a process calls `on_stop`, and usually
    `on_start` again.
    """

    def on_start(self, run: CurrentRun) -> None:
        """Act when the workers are ready and the run's folder exists."""

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Act when an aggregation is done and scored.

        `event.row` is the row of the history, which is also the last of `run.rows`.
        """

    def on_wait(self, run: CurrentRun, event: Waiting) -> None:
        """Act every few seconds while no worker answers."""

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Act when a checkpoint was written."""

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Act after the last round, when the workers have ended."""

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Act when the run has ended early.

        error: what ended the run. It is a `KeyboardInterrupt` if the user stopped the run.
        """


# --- screen ---------------------------------------------------------------------------------------
class ProgressLine(Observer):
    """An observer that shows a progress bar in a terminal, or prints lines in a log.

    console: the terminal, or the log, which gets a line every few seconds.
    quiet: True shows nothing.
    data: the clients' data; names of the clients' users (persons), if known, are shown.
    """

    def __init__(self, console: Console, quiet: bool, data: FederatedData):
        self._console = console
        self._quiet = quiet
        self._data = data
        self._stack = ExitStack()

    def on_start(self, run: CurrentRun) -> None:
        """Show the progress."""
        progress = Progress(
            run.rounds, done=len(run.rows), quiet=self._quiet, console=self._console
        )
        self._progress = self._stack.enter_context(progress)

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Update the progress."""
        self._progress.update(event.row)

    def on_wait(self, run: CurrentRun, event: Waiting) -> None:
        """Show which worker the run waits for."""
        clients = [self._data.number(client) for client in event.clients]
        stacks = ""
        if event.stacks:
            stacks = str(write_stacks(run.folder, f"worker-{event.worker}", event.stacks))
        ray_messages = stack_file(run.folder, RAY_MESSAGES)
        has_messages = event.node_timeout is not None and ray_messages.exists()
        self._progress.wait(
            event.worker,
            clients,
            event.seconds,
            event.node,
            event.replaced_after,
            event.node_timeout,
            stacks,
            str(ray_messages) if has_messages else "",
        )

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Close the bar; its last state stays on the screen."""
        self._stack.close()

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Close the bar; its last state stays on the screen."""
        self._stack.close()


class WorkerDeaths(Observer):
    """An observer that prints a line for each round in which a worker process was lost.

    note: function that prints a line.
    """

    def __init__(self, note: PrintLine):
        self._note = note

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Print the number of lost worker processes, and why no result changes."""
        count = int(event.row.get("worker_deaths") or 0)
        if not count:
            return
        deaths = f"{count} worker processes were lost; their"
        if count == 1:
            deaths = "1 worker process was lost; its"
        self._note(
            f"round {event.row['round']}: {deaths} jobs are trained again with the same "
            "client states and random numbers, so no result changes"
        )


class RemovalFailures(Observer):
    """An observer that prints why old checkpoints could not be removed, each reason once.

    note: function that prints a line.
    """

    def __init__(self, note: PrintLine):
        self._note = note
        self._printed: set[str] = set()

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Print why older checkpoints could not be removed; print each reason only once."""
        reason = event.removal_failure
        if not reason or reason in self._printed:
            return
        self._printed.add(reason)
        self._note(
            f"checkpoint of round {event.version} is written, but older checkpoints could not be "
            f"removed ({reason}). They only use space; remove them when the run has ended."
        )


class MethodWarnings(Observer):
    """An observer that prints the warnings of methods during a run, each once.

    note: function that prints a line.
    """

    def __init__(self, warnings: Sequence[RoundWarning], note: PrintLine):
        self._pending = list(warnings)
        self._note = note

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Print the warnings of methods about this round."""
        pending = []
        for warning in self._pending:
            text = warning.text(event.row)
            if text:
                self._note(f"round {event.row['round']}: {text}")
            else:
                pending.append(warning)
        self._pending = pending


class UndefinedMetrics(Observer):
    """An observer that prints a line when a metric is nan for the first time.

    note: function that prints a line.
    """

    def __init__(self, note: PrintLine):
        self._note = note
        self._printed: set[str] = set()

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Print each metric that is nan in this round and was not nan in any earlier round."""
        for metric in metrics_of([event.row]):
            columns = [
                name for name in event.row if name == metric or name.startswith(f"{metric}_")
            ]
            undefined = [name for name in columns if _is_nan(event.row[name])]
            if not undefined or metric in self._printed:
                continue
            self._printed.add(metric)
            self._note(
                f"round {event.row['round']}: the metric {metric} is nan in the column "
                f"{', '.join(undefined)}, because it is not defined for these samples or outputs "
                "are not finite. Best rounds, thresholds and means leave nan out."
            )


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


class AbsentClients(Observer):
    """An observer that warns at the end about clients that were never available in the run.

    With more than `MAX_CLIENTS` clients it does nothing.
    find_presence: function that returns when clients are available; None if they always are.
    clients: the numbers of the clients that have training samples.
    """

    MAX_CLIENTS = 100_000  # with more clients, the check would take seconds

    def __init__(
        self,
        find_presence: Callable[[], Availability | None],
        clients: np.ndarray,
        note: PrintLine,
    ):
        self._find_presence = find_presence
        self._clients = clients
        self._note = note

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Print the number of clients that were never available."""
        if not run.rows or len(self._clients) > self.MAX_CLIENTS:
            return
        presence = self._find_presence()
        if presence is None:
            return
        end = float(run.rows[-1].get("virtual_seconds") or 0.0)
        start = np.zeros(len(self._clients))
        is_absent = ~presence.are_available(self._clients, start)
        is_absent &= presence.next_changes(self._clients, start) > end
        count = int(is_absent.sum())
        if count:
            self._note(
                f"fleet: {count:,} of {len(self._clients):,} clients were not available in the "
                f"{end:,.0f} virtual seconds of the run, so they were never trained. "
                "Use more rounds or longer jobs, or set fleet.availability=always."
            )


class IdleWorkers(Observer):
    """An observer that prints, at the end, the share of time in which workers were busy.

    Use it only if workers may have to wait for the planner.
    reason: why the run plans only one aggregation at a time, without a full stop.
    """

    def __init__(self, say: PrintLine, reason: str):
        self._say, self._reason = say, reason

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Print the percentage of wall time in which workers were busy, and why they were idle."""
        busy = mean_worker_busy(run.rows)
        if busy is not None:
            self._say(
                f"workers were busy for {busy:.0%} of the time, because one aggregation is "
                f"planned at a time ({self._reason})"
            )


class ClosingLine(Observer):
    """An observer that prints the last lines: the scores, the folder, and the next commands.

    say: function that prints a line.
    is_stored: True if `raysim ui` can show the run in MLflow.
    """

    LABELS: ClassVar = {
        "_global": "on the central test set",
        "": "mean of the clients",
        "_worst": "worst client",
        "_shared": "shared model, mean of the clients",
        "_finetuned": "after fine-tuning, mean of the clients",
        "_common": "clients' models on the central test set",
        "_best": "mean of the clients, each in its best round by validation",
        "_unseen": "clients that were never trained",
    }

    def __init__(self, say: PrintLine, is_stored: bool = False):
        self._say = say
        self._is_stored = is_stored

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Print the run's scores, the address of its results, and the commands that show them."""
        summary: dict[str, Any] = run.summary()
        metric = summary["metric"]
        scores = []
        for suffix, label in self.LABELS.items():
            value = summary.get(f"{metric}{suffix}")
            if value is not None:
                scores.append(f"{value:.4f} {label}")
        text = ", ".join(scores) or "unknown"
        rounds = format_amount(summary["rounds"], "round")
        self._say(f"{metric} {text} after {rounds}; results are in {run.address}")
        self._say(f"create a report with: raysim report {shlex.quote(run.address)}")
        if self._is_stored:
            folder = shlex.quote(str(run.folder.parent))
            self._say(f"see the run in MLflow with: raysim ui {folder}")


# --- files in the run's folder --------------------------------------------------------------------
class HistoryFile(Observer):
    """An observer that writes history.parquet at checkpoints and when the run ends or stops.

    In a long run, a checkpoint writes the file only if the history has grown by a tenth.
    """

    LONG_RUN_ROUNDS = 1000

    def __init__(self) -> None:
        self._written_rows = 0

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Write the history. In a long run, write it only if it has grown by a tenth."""
        rows = len(run.rows)
        if rows <= self.LONG_RUN_ROUNDS or rows >= 1.1 * self._written_rows:
            write_history(run.rows, run.folder / HISTORY)
            self._written_rows = rows

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write the history."""
        write_history(run.rows, run.folder / HISTORY)

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Write the history."""
        write_history(run.rows, run.folder / HISTORY)


class JobFiles(Observer):
    """An observer that writes all jobs into jobs.parquet, at checkpoints and at the end.

    A resumed run without this file does not get one, because earlier jobs would be missing.
    """

    def on_start(self, run: CurrentRun) -> None:
        """Open jobs.parquet.

        If the run is resumed, keep only the jobs of rounds up to the checkpoint, because later
        rounds are trained again.
        """
        self._writer = JobWriter.open(run.folder, len(run.rows))

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Add the records of the jobs that ended in this round."""
        if self._writer:
            self._writer.add(event.jobs)

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Write the records of finished jobs into jobs.parquet."""
        self._write()

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write the records of all jobs into jobs.parquet, also of jobs still in flight."""
        if self._writer:
            self._writer.add(event.jobs)
        self._write()

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Write the records of finished jobs into jobs.parquet."""
        self._write()

    def _write(self) -> None:
        if self._writer:
            self._writer.write()


class ClientFiles(Observer):
    """An observer that writes each client's samples, last scores, and scores of all rounds.

    The files are split.parquet, clients.parquet and client_scores.parquet, in this order.
    network: the server's models (replicas), and which of them serves each client.
    """

    def __init__(self, data: FederatedData, network: Network):
        self._data, self._network = data, network
        self._scores: ClientScores | None = None

    def on_start(self, run: CurrentRun) -> None:
        """Write how many training samples of each class every client has.

        If the run is resumed, also delete the stored scores of rounds after the checkpoint, because
        these rounds are trained again.
        """
        write_split(client_labels(self._data), run.folder)
        self._writer = ScoreWriter(run.folder, len(run.rows))

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Add the scores of this round."""
        if event.scores is not None:
            self._scores = event.scores
            self._writer.add(int(event.row["round"] or 0), event.scores)

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Write the new scores into the folder client_scores.parquet.

        The folder has numbered files. Only the last file is written again.
        """
        self._writer.write()

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write clients.parquet and the scores of all rounds.

        clients.parquet has each client's scores of the last evaluation.
        """
        self._write(run)

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Write clients.parquet and the scores of all rounds so far.

        clients.parquet has each client's scores of the last evaluation since `on_start`, if any.
        """
        self._write(run)

    def _write(self, run: CurrentRun) -> None:
        self._writer.write()
        write_clients(self._data, self._scores, run.folder, self._network)


class FailureFile(Observer):
    """An observer that writes failures.jsonl: a line for each client that failed in a round.

    data: the clients' data; names of the clients' users (persons), if known, are written.
    """

    def __init__(self, note: PrintLine, data: FederatedData):
        self._note = note
        self._data = data

    def on_start(self, run: CurrentRun) -> None:
        """In a resumed run, remove from failures.jsonl the rounds after the checkpoint.

        These rounds are trained again.
        """
        path = run.folder / FAILURES
        if path.exists():
            lines = path.read_text().splitlines()
            earlier = [line for line in lines if _round_of(line) <= len(run.rows)]
            replace_file(path, "".join(line + "\n" for line in earlier).encode())

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Append the failures of this round to the file; print the first failure of the run."""
        path = run.folder / FAILURES
        for failure in event.failures:
            if not path.exists():
                self._note(
                    f"a client failed and was left out of its round: {failure.error} "
                    f"(all failures: {path})"
                )
            record = {"round": int(event.row["round"] or 0), **self._fields(failure)}
            with path.open("a") as stream:
                stream.write(json.dumps(record) + "\n")

    def _fields(self, failure: Failure) -> dict[str, object]:
        """Return the entries of a line in failures.jsonl."""
        values: dict[str, object] = {}
        for field_ in fields(failure):
            values[field_.name] = getattr(failure, field_.name)
            if field_.name == "client":
                user = self._data.user(failure.client)
                if user is not None:
                    values["user"] = user
        return values


def _round_of(line: str) -> int:
    """Return the round of a line in failures.jsonl.

    If a crash cut off the line, return a number larger than any round.
    """
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62


class ProbeFiles(Observer):
    """An observer that writes features and outputs of local models in each round with probes.

    A run makes probes if `evaluate.probe` is set: it measures clients' models before they are
    aggregated. The files are probes/round-N.safetensors.
    """

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Write the probes of this round, if it has any."""
        if event.probes:
            number = int(event.row["round"] or 0)
            path = run.folder / PROBES / f"round-{number:06d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_probes(event.probes, path)


class Pictures(Observer):
    """An observer that draws a run's pictures at its end, such as history, jobs and probes.

    activity: takes a text and returns a context manager that shows the text.
    network: the server's models; several are drawn with their links.
    only_rounds: True draws the history only against rounds, False also against quantities such as
    virtual time.
    """

    def __init__(self, activity: ShowActivity, network: Network, only_rounds: bool = False):
        self._activity, self._network, self._only_rounds = activity, network, only_rounds

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Draw each picture for which the run has numbers."""
        with self._activity("drawing pictures"):
            self._draw(run)

    def _draw(self, run: CurrentRun) -> None:
        run.pictures += draw_run(run.rows, run.folder, run.title, self._only_rounds)
        run.pictures += self._draw_probes(run)
        jobs = read_jobs(run.folder)
        path = run.folder / "timeline.png"
        if jobs is not None and draw_timeline(jobs, run.rows, path, run.title):
            run.pictures.append(path)
        path, clients = run.folder / "topology.png", read_clients(run.folder)
        if clients and draw_topology(self._network, clients, run.rows, path, run.title):
            run.pictures.append(path)
        for name, draw in (
            ("methods", draw_reports),
            ("domains", draw_domains),
            ("decomposition", draw_decomposition),
        ):
            path = run.folder / f"{name}.png"
            if draw(run.rows, path, run.title):
                run.pictures.append(path)

    def _draw_probes(self, run: CurrentRun) -> list[Path]:
        """Draw the probes; return the paths of the pictures.

        features.png and outputs.png show the last round with probes. bias.png shows all rounds, if
        the history has columns that come from probes.
        """
        files = sorted((run.folder / PROBES).glob("round-*.safetensors"))
        if not files:
            return []
        probes = load_probes(files[-1])
        number = int(files[-1].stem.removeprefix("round-"))
        bias, features, outputs = (
            run.folder / f"{name}.png" for name in ("bias", "features", "outputs")
        )
        is_bias_drawn = draw_bias(run.rows, bias, run.title)
        draw_features(probes, features, f"{run.title}, round {number}")
        draw_outputs(probes, outputs, f"{run.title}, round {number}")
        return [bias, features, outputs] if is_bias_drawn else [features, outputs]


class ProfileFiles(Observer):
    """An observer that writes the profile of a run with `profile=true` and prints a table.

    The files are profile.json, trace.json and profile.png.
    show: function that prints the table.
    """

    def __init__(self, show: Callable[[object], object]):
        self._show = show

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """If the run has a profile, write its files and print its table."""
        if run.profile is not None:
            run.pictures.append(profile.write(run.profile, run.folder, run.title)[-1])
            self._show(profile.table(run.profile))


class SummaryFile(Observer):
    """An observer that writes summary.json.

    It is called after all observers that write files, because summary.json marks a complete run.
    """

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write the summary."""
        write_json(run.summary(), run.folder / SUMMARY)


# --- MLflow ---------------------------------------------------------------------------------------
class TrackingObserver(Observer):
    """An observer that passes rows, summary and files to a tracker, which sends them to MLflow.

    It also saves the model in MLflow's format, if all clients share one model.

    config, tags: the parameters and the tags that MLflow shows.
    spec: the description of the run, with which the model is built.
    activity: shows a text while the model is saved.
    study: the folder of the run's study or sweep; None if there is none.
    leaves_model: True if `raysim ui` will save the model later.
    """

    FILES = (
        "config.yaml",
        HISTORY,
        SUMMARY,
        "model.safetensors",
        "best.safetensors",
        FAILURES,
        "samples.txt",
    )

    def __init__(
        self,
        tracker: StoredTracker | NoTracker,
        config: Mapping[str, object],
        tags: Mapping[str, object],
        spec: RunSpec,
        note: PrintLine,
        activity: ShowActivity,
        study: Path | None = None,
        leaves_model: bool = False,
    ):
        self._tracker = tracker
        self._config = config
        self._tags = tags
        self._spec = spec
        self._note = note
        self._activity = activity
        self._study = study
        self._leaves_model = leaves_model

    def on_start(self, run: CurrentRun) -> None:
        """Begin or continue the run in the tracker."""
        data = self._spec.data
        description = {
            "name": data.title,
            "digest": data.dataset_path.stem.rpartition("-")[2],
            "clients": len(data.partition),
            "samples": len(data.partition.train.indices),
        }
        self._tracker.start(self._config, self._tags, run.rows, self._study, description)

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Give this round's row of the history to the tracker.

        The tracker sends the row to MLflow later or from another thread, so the run does not wait.
        """
        self._tracker.log(event.row)

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Give the summary, the files and the model to the tracker, which sends them to MLflow.

        If `leaves_model` is True, the model is not sent. The command `raysim ui` later makes the
        model for MLflow from the run's folder.
        """
        files = [run.folder / name for name in self.FILES if (run.folder / name).exists()]
        artifacts = [*files, *run.pictures]
        if self._leaves_model:
            self._tracker.finish(_summary_only(run), artifacts, model=PENDING)
            return
        with self._activity("sending the rest to MLflow"):
            self._save_model(run)
            self._tracker.finish(_summary_only(run), artifacts)

    def _save_model(self, run: CurrentRun) -> None:
        try:
            model = load_shared_model(self._spec, run.folder / "model.safetensors")
            if model is not None:
                save_model(*model, run.folder)
        except Exception as error:  # PyTorch cannot trace every model
            self._note(f"MLflow gets only the weights of the model: {save_problem(error)}")

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Send the unsent rows, and the way in which the run ended."""
        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        self._tracker.finish(_summary_only(run), status=status)


def _summary_only(run: CurrentRun) -> dict[str, object]:
    """Return the entries of the summary that neither history, configuration nor tags have."""
    sent = {"rounds", *COLUMNS, *(key for row in run.rows for key in row), *run.facts} - {"split"}
    return {key: value for key, value in run.summary().items() if key not in sent}


# --- observers of users ---------------------------------------------------------------------------
class ObserverError(RunStoppedError):
    """The error that stops a run because a user's observer raised an error.

    Its cause is the error of the observer. The history is written before the run stops.
    """


ObserverFailed = ObserverError  # the name in version 0.1


class RoundCallback(Observer):
    """An observer that calls a function with the row of each finished round.

    function: receives the round's row of the history.
    """

    def __init__(self, function: Callable[[Row], object]):
        self._function = function

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Call the callback function with this round's row of the history."""
        self._function(event.row)


class UserObserver(Observer):
    """A wrapper of an observer that a user has written.

    The wrapper adds the observer's name to errors, and passes a copy of each round's row.
    observer: the user's observer.
    name: the name of the user's observer, for errors.
    """

    def __init__(self, observer: Observer, name: str):
        self._observer = observer
        self._name = name

    def on_start(self, run: CurrentRun) -> None:
        """Call `on_start` of the user's observer."""
        self._call("on_start", run)

    def on_round(self, run: CurrentRun, event: Round) -> None:
        """Call `on_round` of the user's observer with a copy of the history row."""
        self._call("on_round", run, replace(event, row=dict(event.row)))

    def on_wait(self, run: CurrentRun, event: Waiting) -> None:
        """Call `on_wait` of the user's observer."""
        self._call("on_wait", run, event)

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        """Call `on_checkpoint` of the user's observer."""
        self._call("on_checkpoint", run, event)

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Call `on_finish` of the user's observer."""
        self._call("on_finish", run, event)

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        """Call `on_stop` of the user's observer."""
        self._call("on_stop", run, error)

    def _call(self, method: str, run: CurrentRun, *arguments: object) -> None:
        try:
            getattr(self._observer, method)(run, *arguments)
        except Exception as error:
            problem = (
                f"your observer {self._name} raised {type(error).__name__} in {method}: {error}."
            )
            if run.finished is not None:
                raise ObserverError(
                    f"{problem} The run itself had finished; its results are in {run.folder}"
                ) from error
            raise ObserverError(
                f"{problem} The run was stopped after round {len(run.rows)} and its history is "
                "written. Repair the observer, then continue with the same settings, "
                f"out={run.folder} and resume=latest"
            ) from error
