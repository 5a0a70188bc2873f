"""One study: a configuration becomes objects, the objects become a run, the run becomes a folder of results.

The only reader of configurations; below it there are objects. From Python:

    from raysim.experiment import run
    result = run(["method=[fedprox]", "runtime=inprocess", "rounds=20"])
    result.summary["accuracy_global"]
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from omegaconf import DictConfig
from torch import nn

from raysim import checkpoint
from raysim.building import TARGET, build as build_object, resolve, shown
from raysim.client import Local
from raysim.config import Node, compose, groups, load_yaml, plain, to_yaml
from raysim.coordinator import Event, Finished, Round, Saved, Settings, Started, TooManyFailures
from raysim.data.federated import FederatedData, federate, statistics
from raysim.data.partition import Partitioner
from raysim.data.sources import Source
from raysim.errors import Refused, instead, refusing
from raysim.fleet import Fleet
from raysim.host import Recipe, build_networks
from raysim.messages import Failure
from raysim.methods.method import SLOTS, Method, at_least, between, check_composition
from raysim.metrics import THRESHOLDS, read_history, replace_file, summarise, write_history, write_json
from raysim.models import ModelRecipe
from raysim.progress import Progress
from raysim.report import draw_run
from raysim.schedule import Schedule
from raysim.server import Weighting
from raysim.tracking import NoTracker, Tracker, flatten, replay

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Experiment",
    "Interrupted",
    "Refused",
    "Result",
    "TooManyFailures",
    "build",
    "catalogue",
    "compose",
    "partition",
    "run",
]

Rows: TypeAlias = list[dict[str, int | float | None]]

# Keys that may change when a run is resumed: no bit of it depends on them.
FREE = (
    "rounds",
    "out",
    "resume",
    "choices",
    "tracking",
    "checkpoint",
    "faults",
    "thresholds",
    "data.cache",
    "data.download",
)
FREE_RUNTIME = ("name", "hosts", "cpus", "gpus", "address")  # but not threads
LIBRARIES = ("raysim", "torch", "numpy", "ray", "pyarrow", "mlflow")


# --- the keys outside of groups whose options are classes -----------------------------------------------------------
@dataclass(frozen=True)
class Evaluate:
    """How often (in aggregations), and how many clients."""

    every: int = 1
    clients: int | Literal["all"] = "all"

    def __post_init__(self) -> None:
        at_least("evaluate.every", self.every, 1)
        if self.clients != "all":
            at_least("evaluate.clients", self.clients, 1)


@dataclass(frozen=True)
class RuntimeOptions:
    """Where a run's hosts live, and what each of them gets; None: as many as fit."""

    name: Literal["inprocess", "local", "cluster"] = "local"
    hosts: int | None = None
    threads: int = 1
    cpus: float | None = None
    gpus: float | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        at_least("runtime.threads", self.threads, 1)
        if self.hosts is not None:
            at_least("runtime.hosts", self.hosts, 1)
        for key, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if value is not None:
                at_least(f"runtime.{key}", value, 0)
        if self.name == "cluster" and not self.address:
            raise ValueError(
                "runtime.address=null names no cluster: set it to auto, or to the address of its head node"
            )


@dataclass(frozen=True)
class Tracking:
    """Where metrics go besides the run's folder."""

    name: Literal["mlflow", "none"] = "mlflow"
    uri: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """How often, in rounds; 0: never."""

    every: int = 10

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)


@dataclass(frozen=True)
class Faults:
    """Share of an aggregation's clients that may fail."""

    tolerate: float = 0.1

    def __post_init__(self) -> None:
        between("faults.tolerate", self.tolerate, 0, 1)


@dataclass(frozen=True)
class Study:
    """What a configuration says besides the objects it names."""

    seed: int = 0
    rounds: int = 60
    out: str | None = None
    resume: str | None = None
    device: str = "auto"
    weighting: Weighting | None = None
    summation: int = 5
    thresholds: list[float] = field(default_factory=lambda: list(THRESHOLDS))
    local: Local = field(default_factory=Local)
    evaluate: Evaluate = field(default_factory=Evaluate)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    tracking: Tracking = field(default_factory=Tracking)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        at_least("rounds", self.rounds, 1)
        at_least("summation", self.summation, 1)


@dataclass(frozen=True)
class Experiment:
    """Everything a run needs, built and checked; nothing has been written yet."""

    config: Node  # resolved, as stored in the run's folder
    study: Study
    recipe: Recipe
    schedule: Schedule
    fleet: Fleet
    settings: Settings
    warnings: tuple[str, ...]

    @property
    def title(self) -> str:
        """Methods and data, for file names and plots: "fedbr+mixup-mnist"."""
        methods = "+".join(method.name for method in self.recipe.methods) or "fedavg"
        return f"{methods}-{self.config['choices']['data']}"


@dataclass(frozen=True)
class Result:
    """A finished run: where it lies, its summary, and its history (a row per aggregation)."""

    folder: Path
    summary: dict[str, Any]
    rows: Rows


class Interrupted(KeyboardInterrupt):
    """The user stopped the run; the text says how to go on."""


# --- configuration to objects ---------------------------------------------------------------------------------------
# What the class of a group must have, so that a mistaken _target_ is refused before it is used.
_NEEDS = {"schedule": "decide", "fleet": "duration", "data": "read", "partition": "split", "model": "build"}


def _object(config: Node, group: str, allow: Sequence[str]) -> Any:
    node = config[group]
    if not isinstance(node, Mapping) or TARGET not in node:
        raise Refused(f"{group}={shown(node)} names no class: choose an option of the group {group}")
    cls = resolve(node[TARGET], group, allow)
    if not hasattr(cls, _NEEDS[group]):
        raise Refused(f"{group}.{TARGET}={node[TARGET]} is no {group}: it has no method '{_NEEDS[group]}'")
    return build_object(cls, node, group)


def _methods(config: Node, allow: Sequence[str]) -> tuple[Method, ...]:
    parts = []
    for name, node in config["method"].items():
        path = f"method.{name}"
        if not isinstance(node, Mapping) or TARGET not in node:
            raise Refused(f"{path}={shown(node)} names no class: give a value to one of its keys instead")
        cls = resolve(node[TARGET], path, allow)
        if not issubclass(cls, Method):
            raise Refused(
                f"{path}.{TARGET}={node[TARGET]} is no method: name a subclass of raysim.methods.method.Method"
            )
        parts.append(build_object(cls, node, path))
    check_composition(parts)
    return tuple(parts)


def _device(asked: str, elsewhere: bool) -> str:
    """The device's name; "auto" is decided here. elsewhere: hosts run on other machines than this one."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdigit()):
        raise Refused(f"device={asked} does not exist: {instead(asked, ('auto', 'cpu', 'cuda', 'mps'))}")
    if kind == "cuda" and not elsewhere and int(index or 0) >= torch.cuda.device_count():
        raise Refused(
            f"device={asked} needs a GPU that torch does not see (it sees {torch.cuda.device_count()}): set device=cpu"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise Refused("device=mps needs a Mac with Metal: set device=cpu")
    return asked


def _plain(config: DictConfig | Mapping[str, Any] | Sequence[str]) -> Node:
    return plain(config if isinstance(config, (DictConfig, Mapping)) else compose(config))


def partition(config: DictConfig | Mapping[str, Any] | Sequence[str] = (), allow: Sequence[str] = ()) -> FederatedData:
    """The data of a study alone, split over its clients. Raises Refused."""
    with refusing():
        node = _plain(config)
        source: Source = _object(node, "data", allow)
        partitioner: Partitioner = _object(node, "partition", allow)
        return federate(source, partitioner, build_object(Study, _own(node), "").seed)


def _own(node: Node) -> Node:
    """The part of a configuration that is `Study`."""
    named = {*_NEEDS, "method", "choices"}
    return {key: value for key, value in node.items() if key not in named}


def build(config: DictConfig | Mapping[str, Any] | Sequence[str] = (), allow: Sequence[str] = ()) -> Experiment:
    """Build and check all objects of a study; downloads and caches its data if need be, writes nothing else.

    config: from `compose`, or the overrides themselves. allow: prefixes, besides raysim, of classes that the
    configuration may name. Raises Refused with one sentence.
    """
    with refusing():
        node = _plain(config)
        study = build_object(Study, _own(node), "")
        methods = _methods(node, allow)
        schedule: Schedule = _object(node, "schedule", allow)
        fleet: Fleet = _object(node, "fleet", allow)
        model: ModelRecipe = _object(node, "model", allow)
        device = _device(study.device, study.runtime.name == "cluster")
        uniform = any(getattr(method, "weighting", "samples") == "uniform" for method in methods)
        weighting: Weighting = study.weighting or ("uniform" if uniform else "samples")
        node = {**node, "device": device, "weighting": weighting}
        data = federate(_object(node, "data", allow), _object(node, "partition", allow), study.seed)
        recipe = Recipe(model, methods, study.local, data, study.seed, device, study.runtime.threads)
        _check_concurrency(schedule, data)
        networks, _ = build_networks(recipe)
        warnings = tuple(text for method in methods for text in method.check(study.local, networks))
    settings = Settings(
        rounds=study.rounds,
        weighting=weighting,
        group=study.summation,
        evaluate_every=study.evaluate.every,
        evaluate_clients=None if study.evaluate.clients == "all" else study.evaluate.clients,
        checkpoint_every=study.checkpoint.every,
        tolerate=study.faults.tolerate,
    )
    return Experiment(node, study, recipe, schedule, fleet, settings, warnings)


def _check_concurrency(schedule: Schedule, data: FederatedData) -> None:
    counts = data.partition.train.counts
    able = int((counts > 0).sum())
    if schedule.concurrency > able:
        key = next((key for key in ("cohort", "concurrency") if hasattr(schedule, key)), "cohort")
        raise ValueError(
            f"schedule.{key}={schedule.concurrency} is more than the {able} clients that have samples "
            f"(partition has {len(counts)}): set schedule.{key}={able} or less"
        )


# --- what a run says before it starts -------------------------------------------------------------------------------
def plan(experiment: Experiment, folder: Path) -> str:
    """A few lines: methods, model, data, clients, hosts, BatchNorm's policy, device, folder."""
    recipe, study, node = experiment.recipe, experiment.study, experiment.config
    networks, layout = build_networks(recipe)
    numbers = statistics(recipe.data)
    sizes: Any = numbers["sizes"]
    runtime = study.runtime
    hosts = (
        "in this process"
        if runtime.name == "inprocess"
        else f"{runtime.hosts or 'as many hosts as fit'} ({runtime.name})"
    )
    stays = f", {layout.personal:,} of them personal" if layout.personal else ""
    weights = experiment.settings.weighting
    lines = {
        "methods": ", ".join(f"{m!r} [{', '.join(slots(type(m)))}]" for m in recipe.methods) or "fedavg",
        "model": f"{node['choices']['model']}: {_parameters(networks):,} parameters, {layout.total:,} floats{stays}",
        "data": recipe.data.title,
        "clients": f"{numbers['clients']} with {sizes['min']} to {sizes['max']} training samples, "
        f"{numbers['empty_clients']} without; {numbers['central_test']} central test samples",
        "rounds": f"{study.rounds} of {experiment.schedule!r}, {weights} weights; {_local(study.local)}",
        "BatchNorm": _batchnorm(networks, {entry.name for entry in layout.entries if entry.personal}),
        "hosts": f"{hosts}, {runtime.threads} thread{'s' if runtime.threads > 1 else ''} each, device {recipe.device}",
        "folder": str(folder),
    }
    return "\n".join(f"{key:<10}{text}" for key, text in lines.items() if text)


def slots(cls: type[Method]) -> list[str]:
    """The slots that a method fills."""
    return [slot for slot in SLOTS if getattr(cls, slot) is not getattr(Method, slot)]


def _parameters(networks: Mapping[str, nn.Module]) -> int:
    return sum(parameter.numel() for network in networks.values() for parameter in network.parameters())


def _local(local: Local) -> str:
    amount = f"{local.epochs} epoch{'s' if local.epochs != 1 else ''}" if local.epochs else f"{local.steps} steps"
    return f"{amount} of batch {local.batch}, {local.optimizer} lr {local.lr:g}"


def _batchnorm(networks: Mapping[str, nn.Module], personal: set[str]) -> str:
    """What happens to the running statistics and the weights of BatchNorm; "" without such layers."""
    kinds = {"parameters": [], "statistics": []}  # type: dict[str, list[str]]
    for network, module in networks.items():
        for path, layer in module.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                kinds["parameters"] += [f"{network}.{path}.{name}" for name, _ in layer.named_parameters()]
                kinds["statistics"] += [
                    f"{network}.{path}.{name}" for name, b in layer.named_buffers() if b.is_floating_point()
                ]
    if not any(kinds.values()):
        return ""
    return ", ".join(
        f"{kind} {'personal' if set(names) <= personal else 'shared'}" for kind, names in kinds.items() if names
    )


def identity(experiment: Experiment) -> dict[str, object]:
    """What the bits of a run depend on besides its methods and data."""
    recipe = experiment.recipe
    device = recipe.device
    return {
        "device": torch.cuda.get_device_name(device)
        if device.startswith("cuda") and torch.cuda.is_available()
        else device,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": recipe.threads,
        "seed": recipe.seed,
        "summation": experiment.settings.group,
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


# --- the run's folder -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where a run writes, and what it continues from."""

    folder: Path
    exists: bool = False
    resume: str = ""  # a checkpoint's folder
    finished: bool = False
    note: str = ""


def place(experiment: Experiment) -> Place:
    """Decide on folder and checkpoint; refuses a folder that is taken or holds another study. Writes nothing."""
    study = experiment.study
    if study.resume is None:
        folder = Path(study.out).expanduser() if study.out else _dated(experiment.title)
        if folder.exists() or folder.is_symlink():
            raise Refused(f"out={folder} exists already: choose another folder, or continue it with resume=latest")
        _check_writable(folder)
        return Place(folder)
    if study.resume != "latest":
        return _continued(experiment, Path(study.resume).expanduser())
    if not study.out:
        raise Refused("resume=latest needs the folder of the run: add out=DIR")
    folder = Path(study.out).expanduser()
    if folder.exists() and not (folder / "config.yaml").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"out={folder} is not the folder of a run: choose another one, or leave resume out")
    _check_writable(folder)
    if (folder / "config.yaml").is_file():
        _check_same(load_yaml(folder / "config.yaml"), experiment.config, folder)
    if (done := _rounds_done(folder)) >= study.rounds:
        return Place(folder, True, finished=True, note=f"{folder} has finished its {done} rounds: nothing to do")
    if not (found := checkpoint.available(folder / "checkpoints")):
        return Place(folder, folder.exists(), note=f"{folder} has no checkpoint yet: starting at round 0")
    return _from(found[-1], Place(folder, True), study.rounds)


def _continued(experiment: Experiment, path: Path) -> Place:
    """resume=PATH: in the folder that the checkpoint is in, or from there into a new `out`."""
    origin = path.resolve().parent.parent
    if not path.is_dir():
        raise Refused(
            f"resume={path} is no folder: name a checkpoint such as runs/NAME/checkpoints/round-000010, or latest"
        )
    if (origin / "config.yaml").is_file():
        _check_same(load_yaml(origin / "config.yaml"), experiment.config, origin)
    folder = Path(experiment.study.out).expanduser() if experiment.study.out else origin
    same = folder.resolve() == origin
    if folder.exists() and not same:
        raise Refused(
            f"out={folder} exists already, and {path} does not belong to it: choose another out, or leave it out"
        )
    _check_writable(folder)
    return _from(path, Place(folder, same), experiment.study.rounds)


def _from(path: Path, where: Place, rounds: int) -> Place:
    checkpoint.read(path)  # a damaged one is refused before anything starts
    number = path.name.rpartition("-")[2]
    if number.isdigit() and int(number) > rounds:
        raise Refused(f"rounds={rounds} is below round {int(number)} of {path}: set rounds={int(number)} or more")
    return replace(where, resume=str(path), note=f"continuing from {path}")


def _dated(title: str) -> Path:
    root, name = Path("runs"), f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{title}"
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    return next(root / name for name in names if not (root / name).exists())


def _check_writable(folder: Path) -> None:
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise Refused(f"out={folder} cannot be made because {parent} is a file: choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise Refused(f"out={folder} cannot be written because {parent} is read-only: choose another folder")


def _check_same(stored: Node, config: Node, folder: Path) -> None:
    """Refuse to resume another study than the folder's."""
    before, now = flatten(stored), flatten(config)
    for key in dict.fromkeys([*before, *now]):
        head = key.partition(".")[0]
        free = head in FREE or key in FREE or (head == "runtime" and key.partition(".")[2] in FREE_RUNTIME)
        if not free and before.get(key) != now.get(key):
            old, new = (shown(values[key]) if key in values else "absent" for values in (before, now))
            raise Refused(
                f"{key}={new} differs from {key}={old} of the run in {folder}: set it back, or choose another out"
            )


def _rounds_done(folder: Path) -> int:
    """Rounds of a run that has finished; 0 for any other."""
    try:
        return int(json.loads((folder / "summary.json").read_text())["rounds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


# --- the run --------------------------------------------------------------------------------------------------------
def run(
    config: DictConfig | Mapping[str, Any] | Sequence[str] | Experiment = (),
    *,
    quiet: bool = False,
    allow: Sequence[str] = (),
    console: Console | None = None,
) -> Result:
    """Run a study to its end; the folder appears once its hosts are ready.

    config: overrides, what `compose` returned, or what `build` returned. Raises Refused (nothing was written),
    TooManyFailures (clients failed; a checkpoint was), Interrupted.
    """
    from rich.console import Console

    console = console or Console(quiet=quiet)
    experiment = config if isinstance(config, Experiment) else build(config, allow)
    with refusing():
        where = place(experiment)
    if where.finished:
        _say(console, where.note)
        return _finished(experiment, where.folder, console)
    for text in (plan(experiment, where.folder), where.note, *experiment.warnings):
        _say(console, text)
    settings = replace(experiment.settings, folder=str(where.folder.absolute()), resume=where.resume)
    with closing(_events(experiment, settings, console)) as events:
        with refusing():
            started = next(events)  # only now hosts are known to fit
            _make_folder(experiment, where)
        return _Session(experiment, where.folder, console, quiet).follow(started, events)


def _say(console: Console, text: str) -> None:
    if text:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _events(experiment: Experiment, settings: Settings, console: Console) -> Generator[Event, None, None]:
    """The chosen runtime's stream of events."""
    if experiment.study.runtime.name == "inprocess":
        from raysim.runtime import inprocess

        yield from inprocess.run(experiment.recipe, experiment.schedule, experiment.fleet, settings)
        return
    yield from _on_ray(experiment, settings, console)


def _on_ray(experiment: Experiment, settings: Settings, console: Console) -> Iterator[Event]:
    from raysim.runtime import ray

    asked = experiment.study.runtime
    mine = ray.connect(options := ray.RayOptions(asked.hosts, asked.cpus, asked.gpus, asked.address or "local"))
    try:
        size = ray.fit(options, experiment.recipe, experiment.schedule.concurrency)
        if asked.hosts is None:
            count, cpus, gpus = size
            each = f"{cpus:g} CPU{f' and {gpus:g} GPU' if gpus else ''}"
            _say(console, f"{'':<10}{count} host{'s' if count != 1 else ''} of {each} fit")
        yield from ray.run(experiment.recipe, experiment.schedule, experiment.fleet, settings, size)
    finally:
        if mine:
            ray.disconnect()


def _make_folder(experiment: Experiment, where: Place) -> None:
    where.folder.mkdir(parents=True, exist_ok=where.exists)
    replace_file(where.folder / "config.yaml", to_yaml(experiment.config).encode())
    (where.folder / "summary.json").unlink(missing_ok=True)  # of a shorter run that is continued


def _tracker(experiment: Experiment, folder: Path, console: Console) -> Tracker | NoTracker:
    tracking = experiment.study.tracking
    if tracking.name == "none":
        return NoTracker()
    return Tracker(folder, tracking.uri or "", name=folder.resolve().name, say=lambda text: _say(console, text))


def _finished(experiment: Experiment, folder: Path, console: Console) -> Result:
    if experiment.study.tracking.name == "mlflow":
        replay(folder, experiment.study.tracking.uri or "", say=lambda text: _say(console, text))
    summary = json.loads((folder / "summary.json").read_text())
    return Result(folder, summary, read_history(folder / "history.parquet"))


class _Session:
    """Follows the events of one run and keeps its folder up to date."""

    def __init__(self, experiment: Experiment, folder: Path, console: Console, quiet: bool):
        self.experiment, self.folder, self.console, self.quiet = experiment, folder, console, quiet
        self.rows: Rows = []
        self.tracker = _tracker(experiment, folder, console)
        self.checkpoint = ""
        self.finished: Finished | None = None

    def follow(self, started: Event, events: Iterator[Event]) -> Result:
        """To the end. Whatever ends a run early, its history so far is written and its tracking closed."""
        assert isinstance(started, Started)
        self.rows = list(started.rows)
        self._forget_failures(len(self.rows))
        tags = {
            "methods": self.experiment.title,
            "data": self.experiment.recipe.data.title,
            **flatten(identity(self.experiment)),
        }
        self.tracker.start(self.experiment.config, tags, self.rows)
        try:
            with Progress(
                self.experiment.study.rounds, done=len(self.rows), quiet=self.quiet, console=self.console
            ) as progress:
                for event in events:
                    self._take(event, progress)
            return self._end()
        except KeyboardInterrupt:
            self._stop("KILLED")
            again = f"raysim run with the same settings, out={self.folder} and resume=latest"
            at = (
                "the last checkpoint"
                if checkpoint.available(self.folder / "checkpoints")
                else "round 0, for want of a checkpoint"
            )
            raise Interrupted(f"stopped after round {len(self.rows)}: {again} continues from {at}") from None
        except BaseException:
            self._stop("FAILED")
            raise

    def _take(self, event: Event, progress: Progress) -> None:
        if isinstance(event, Round):
            self.rows.append(event.row)
            self.tracker.log(event.row)
            progress.update(event.row)
            self._record(event.failures, int(event.row["round"] or 0), progress)
        elif isinstance(event, Saved):
            write_history(self.rows, self.folder / "history.parquet")
        elif isinstance(event, Finished):
            self.finished = event

    def _record(self, failures: Sequence[Failure], number: int, progress: Progress) -> None:
        """Append failures to their file; the first of a run is shown."""
        path = self.folder / "failures.jsonl"
        for failure in failures:
            if not path.exists():
                progress.note(f"left out: {failure.error} (all failures: {path})")
            entry = {f.name: getattr(failure, f.name) for f in fields(failure)}
            with path.open("a") as stream:
                stream.write(json.dumps({"round": number, **entry}) + "\n")

    def _forget_failures(self, rounds: int) -> None:
        """Of an earlier session, keep the failures of the rounds that the checkpoint holds."""
        path = self.folder / "failures.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _round_of(line) <= rounds]
            replace_file(path, "".join(line + "\n" for line in kept).encode())

    def _end(self) -> Result:
        assert self.finished is not None, "a run ends with Finished"
        summary = self._summary(
            model_sha256=self.finished.model_sha256,
            state_sha256=self.finished.state_sha256,
            peak_memory_bytes=self.finished.peak_memory_bytes,
        )
        write_history(self.rows, self.folder / "history.parquet")
        pictures = draw_run(self.rows, self.folder, self.experiment.title)
        write_json(summary, self.folder / "summary.json")  # last: it says that the run is complete
        names = ("config.yaml", "history.parquet", "summary.json", "model.safetensors", "failures.jsonl")
        files = [self.folder / name for name in names if (self.folder / name).exists()]
        self.tracker.finish(summary, [*files, *pictures])
        _say(self.console, _closing(summary, self.folder))
        return Result(self.folder, json.loads((self.folder / "summary.json").read_text()), self.rows)

    def _stop(self, status: str) -> None:
        write_history(self.rows, self.folder / "history.parquet")
        self.tracker.finish(self._summary(), status=status)

    def _summary(self, **more: object) -> dict[str, object]:
        config = self.experiment.config
        return summarise(
            self.rows,
            self.experiment.study.thresholds,
            methods=[method.name for method in self.experiment.recipe.methods],
            title=self.experiment.recipe.data.title,
            choices=config["choices"],
            identity=identity(self.experiment),
            **more,
        )


def _round_of(line: str) -> int:
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):  # a line that a crash cut short
        return 1 << 62


def _closing(summary: Mapping[str, Any], folder: Path) -> str:
    names = {
        "accuracy_global": "on the central test set",
        "accuracy": "mean of the clients",
        "accuracy_worst": "worst client",
    }
    scores = [f"{summary[key]:.4f} {text}" for key, text in names.items() if summary.get(key) is not None]
    return f"accuracy {', '.join(scores) or 'unknown'} after {summary['rounds']} rounds; results are in {folder}"


# --- what there is to choose from ----------------------------------------------------------------------------------
def catalogue() -> list[dict[str, Any]]:
    """Every part of every method in `conf`: option, name, paper, what it does, slots, parameters with defaults."""
    entries = []
    for option, path in groups().files["method"].items():
        for name, node in load_yaml(path).items():
            cls = resolve(node[TARGET], f"method.{name}")
            assert issubclass(cls, Method)
            entries.append(
                {
                    "name": name,
                    "option": option,
                    "paper": cls.paper,
                    "about": (cls.__doc__ or "").strip().split("\n")[0],
                    "slots": slots(cls),
                    "parameters": {key: value for key, value in node.items() if key != TARGET},
                }
            )
    return entries
