"""Run a Flower app with its ServerApp on virtual time, and store the results."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp import ServerApp

from raysim.experiment.settings import RuntimeOptions
from raysim.flower.central_scores import collect_scores
from raysim.flower.clock import VirtualClock
from raysim.flower.grid import MessageRecord, VirtualGrid
from raysim.flower.identity import set_identity
from raysim.flower.local_work import EXAMPLES_NAMES
from raysim.flower.messages import RUN_ID, SERVER_NODE_ID
from raysim.flower.ordering import order_app
from raysim.flower.project import LoadedClientApp
from raysim.flower.replies import ReplayError, StoredReplies
from raysim.flower.worker import AppSpec, AppWorker
from raysim.primitives.checks import at_least
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import lock_folder, make_folder, replace_file
from raysim.primitives.streams import torch_seed
from raysim.primitives.users_lines import users_line
from raysim.runtime.inprocess import InProcess, preserve_torch_settings
from raysim.simulation.events import RunStoppedError
from raysim.simulation.fleet import Fleet, Ideal
from raysim.simulation.runtime import Runtime, WorkerDiedError
from raysim.training.determinism import make_deterministic
from raysim.training.own_training import seeded_generators

SETTINGS, REPLIES, MESSAGES, SUMMARY = (
    "flower.json",
    "replies.bin",
    "messages.csv",
    "summary.json",
)
ROUND_COLUMNS = ("type", "round", "dispatched", "arrived", "answered", "failed", "lost")


@dataclass(frozen=True)
class AppRun:
    """The settings of a run of a Flower app.

    client_app: "module:object" of a ClientApp, or a loaded one.
    folder: the project's folder.
    run_config: Flower's run config, which the app reads from its context.
    seed: the seed of `random`, NumPy and torch in the app, and of the fleet.
    samples: the samples that a training message takes on the virtual clock.
    runtime: where the workers run, and their resources.
    device: the device of each worker, such as "cpu".
    out: the run's folder; None stores nothing.
    resumes: True continues the run in `out`.
    """

    client_app: str | LoadedClientApp
    server_app: ServerApp
    folder: Path
    clients: int = 10
    run_config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    samples: int = 100
    fleet: Fleet = field(default_factory=Ideal)
    runtime: RuntimeOptions = field(default_factory=lambda: RuntimeOptions(name="inprocess"))
    device: str = "cpu"
    out: Path | None = None
    resumes: bool = False

    def __post_init__(self) -> None:
        at_least("clients", self.clients, 1)
        at_least("samples", self.samples, 0)

    def spec(self) -> AppSpec:
        """Return what each worker needs to start."""
        return AppSpec(
            self.client_app,
            self.folder,
            self.clients,
            self.run_config,
            self.seed,
            self.runtime.threads,
        )

    def identity(self) -> dict[str, Any]:
        """Return the settings that a continued run must not change, by name.

        They must be equal to those of the stored run in its folder.
        """
        app = self.client_app if isinstance(self.client_app, str) else "an object from Python"
        return {
            "app": app,
            "folder": str(self.folder),
            "clients": self.clients,
            "samples": self.samples,
            "seed": self.seed,
            "run_config": dict(self.run_config),
            "fleet": repr(self.fleet),
            "threads": self.runtime.threads,
            "device": self.device,
        }


@dataclass(frozen=True)
class AppResult:
    """The result of a run of a Flower app.

    messages: a row for each message that was answered, lost or failed.
    rounds: a row for all messages of one type and one virtual time of sending, with weighted means
    of the numbers in the replies.
    summary: results by name. The last round's scores start with "train." or "evaluate.", the
    ServerApp's scores with "server.".
    out: the run's folder; None if nothing is stored.
    """

    messages: pd.DataFrame
    rounds: pd.DataFrame
    summary: dict[str, Any]
    out: Path | None = None


def run_app(run: AppRun, say: Callable[[str], None] = print) -> AppResult:
    """Run a Flower app until its ServerApp returns; return the tables and scores of the run.

    say: function that shows a text to the user.
    Raises `RefusedError` if the app cannot be imported, or if `run.out` contains another run.
    Without `run.resumes`, any content of `run.out` is refused.
    Raises ReplayError if a continued run does not send the same messages again.
    Raises RunStoppedError if the ServerApp fails, or if several workers die on the same messages.
    """
    records: list[MessageRecord] = []
    with contextlib.ExitStack() as stack:
        replies = stack.enter_context(_open_folder(run, say))
        stack.enter_context(preserve_torch_settings())
        runtime = stack.enter_context(_workers(run, say))
        clock = VirtualClock(run.fleet, run.seed, run.clients, run.samples)
        grid = _WatchingGrid(runtime, clock, replies, records.append)
        make_deterministic(run.runtime.threads)
        scores = _call_server_app(run, grid)
    result = _summarise(run, records, grid, scores)
    if run.out is not None:
        _store(run.out, result)
    return result


def _call_server_app(run: AppRun, grid: VirtualGrid) -> dict[str, float]:
    """Call the ServerApp with seeded generators; return the scores that Flower's server logs.

    Raises RunStoppedError if the ServerApp fails, or if several workers die; the error names a
    failed line of the app.
    Raises ReplayError if a continued run does not send the same messages again.
    """
    context = Context(
        run_id=RUN_ID,
        node_id=SERVER_NODE_ID,
        node_config={},
        state=RecordDict(),
        run_config=dict(run.run_config),
    )
    set_identity()
    seed = torch_seed(run.seed, "flower.server")
    try:
        with (
            seeded_generators(seed, torch.device(run.device)),
            collect_scores() as scores,
            order_app(run.server_app, grid) as server_app,
        ):
            server_app(grid, context)
            grid.end_batch()
    except SystemExit as error:
        if error.code not in (None, 0):
            place = users_line(error, run.folder)
            raise RunStoppedError(
                f"the ServerApp called sys.exit({error.code!r}){place}. Raise an error instead."
            ) from error
    except (ReplayError, RefusedError):
        raise
    except Exception as error:
        cause = grid.fatal_error or error
        if isinstance(cause, ReplayError):
            raise cause from error
        if isinstance(cause, WorkerDiedError):
            raise RunStoppedError(str(cause)) from error
        place = users_line(error, run.folder)
        text = f"the ServerApp raised {type(error).__name__}: {error}{place}".removesuffix(".")
        odd_reply = grid.describe_odd_reply()
        possible_cause = f" {odd_reply} This may be the cause." if odd_reply else ""
        raise RunStoppedError(
            f"{text}.{possible_cause} Correct the app or its settings."
        ) from error
    return scores


@contextlib.contextmanager
def _workers(run: AppRun, say: Callable[[str], None]) -> Iterator[Runtime]:
    """Yield the workers: one in this process, or actors on Ray.

    say: function that prints a text for the user.
    Raises `RefusedError` if the app cannot be imported.
    """
    spec = run.spec()
    if run.runtime.name == "inprocess":
        yield InProcess(AppWorker(spec))
        return
    from raysim.runtime.ray import object_workers

    spec.runner()  # import the app here, too: Ray would start failing workers again and again
    with object_workers(
        AppWorker, spec, run.runtime, run.device, run.runtime.threads, run.clients, say
    ) as runtime:
        yield runtime


# --- the folder -----------------------------------------------------------------------------------
@contextlib.contextmanager
def _open_folder(run: AppRun, say: Callable[[str], None]) -> Iterator[StoredReplies]:
    """Lock the run's folder inside `with`, and yield the replies that the folder stores.

    say: prints a text for the user.
    Raises `RefusedError` if the folder contains another run, is in use, or is not empty although
    the run does not resume.
    """
    if run.out is None:
        yield StoredReplies()
        return
    settings = run.out / SETTINGS
    if run.out.is_dir() and any(run.out.iterdir()) and not run.resumes:
        raise RefusedError(
            f"out={run.out}: the folder is not empty. Choose another one, or continue its run "
            "with resume=latest."
        )
    make_folder(run.out)
    with lock_folder(run.out):
        identity = run.identity()
        if settings.exists():
            _check_same_run(json.loads(settings.read_text()), identity, run.out)
        else:
            replace_file(settings, json.dumps(identity, indent=2).encode())
        replies = StoredReplies(run.out / REPLIES)
        if replies.count:
            say(
                f"{run.out} has {replies.count} stored replies: the ServerApp receives these "
                "replies first, and the clients that sent them do not train again"
            )
        try:
            yield replies
        finally:
            replies.close()


def _check_same_run(stored: Mapping[str, Any], identity: Mapping[str, Any], out: Path) -> None:
    for key, value in identity.items():
        if stored.get(key) != value:
            raise RefusedError(
                f"{key}={value}: the run in {out} has {key}={stored.get(key)}. "
                "Use the same settings, or another folder."
            )


# --- results --------------------------------------------------------------------------------------
class _WatchingGrid(VirtualGrid):
    """A Grid that remembers the last sent model, so that the summary can have its checksum.

    model: the parameters in the last message with parameters; None before such a message.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.model: ArrayRecord | None = None

    def on_content(self, content: RecordDict) -> None:
        """Remember the model in the content of a message that is sent."""
        for record in content.array_records.values():
            self.model = record


def _digest(model: ArrayRecord | None) -> str:
    """Return the SHA-256 of parameters in hexadecimal; "" for None."""
    if model is None:
        return ""
    digest = hashlib.sha256()
    for name, array in model.items():
        digest.update(name.encode() + b"\0" + array.data)
    return digest.hexdigest()


def _summarise(
    run: AppRun, records: list[MessageRecord], grid: _WatchingGrid, scores: dict[str, float]
) -> AppResult:
    rows = []
    for record in records:
        row = {name: value for name, value in vars(record).items() if name != "numbers"}
        rows.append({**row, **record.numbers})
    rows_of_rounds = _rounds(records)
    rounds = pd.DataFrame(rows_of_rounds)
    fates = Counter(record.fate for record in records)
    summary: dict[str, Any] = {
        "seed": run.seed,
        "clients": run.clients,
        "messages": len(records),
        "answered": fates["answered"],
        "failed": fates["failed"],
        "lost": fates["lost"],
        "replayed": grid.replies.replayed,
        "virtual_seconds": grid.clock.now,
        "model_sha256": _digest(grid.model),
    }
    for kind in ("train", "evaluate"):
        of_kind = [row for row in rows_of_rounds if row["type"] == kind]
        if of_kind:
            numbers = {name: of_kind[-1][name] for name in of_kind[-1] if name not in ROUND_COLUMNS}
            summary.update({f"{kind}.{name}": value for name, value in numbers.items()})
    for name, value in scores.items():
        summary[f"server.{name}"] = value
    return AppResult(pd.DataFrame(rows), rounds, summary, run.out)


def _rounds(records: list[MessageRecord]) -> list[dict[str, Any]]:
    """Return one row for each group of messages with equal type and virtual time of dispatch.

    A row counts the answered, failed and lost messages, and has the weighted means of the numbers
    in the replies.
    """
    groups: dict[tuple[float, str], list[MessageRecord]] = defaultdict(list)
    for record in records:
        groups[record.dispatched, record.type].append(record)
    numbers: Counter[str] = Counter()
    rows = []
    for (dispatched, kind), members in groups.items():
        numbers[kind] += 1
        answered = [member for member in members if member.fate == "answered"]
        row: dict[str, Any] = {
            "type": kind,
            "round": numbers[kind],
            "dispatched": dispatched,
            "arrived": max(member.arrived for member in members),
            "answered": len(answered),
            "failed": sum(member.fate == "failed" for member in members),
            "lost": sum(member.fate == "lost" for member in members),
        }
        rows.append({**row, **_means(answered)})
    return rows


def _means(members: list[MessageRecord]) -> dict[str, float]:
    """Return the weighted mean of each number in some replies.

    The weight of a reply is its number of examples; without this number, the weight is 1.
    members: the replies of a group of messages.
    """
    totals: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)
    for member in members:
        weight = 1.0
        for name in EXAMPLES_NAMES:
            weight = member.numbers.get(name, weight)
        for name, value in member.numbers.items():
            if name not in EXAMPLES_NAMES:
                totals[name] += weight * value
                weights[name] += weight
    return {name: totals[name] / weights[name] for name in totals if weights[name]}


def _store(out: Path, result: AppResult) -> None:
    replace_file(out / MESSAGES, result.messages.to_csv(index=False).encode())
    replace_file(out / SUMMARY, json.dumps(result.summary, indent=2).encode())


def warn_on_stderr(text: str) -> None:
    """Print a text to stderr, so that stdout contains only what the app prints."""
    print(text, file=sys.stderr)
