"""One run: a configuration becomes objects, the objects become a run, the run becomes a folder of results.

The only reader of configurations; below it there are objects."""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from omegaconf import DictConfig
from safetensors import SafetensorError
from torch import nn

from raysim.api.composition import check_names, failing_method_name, suspicious_methods
from raysim.api.declarations import Local
from raysim.api.declare import Declarations
from raysim.api.hook_checks import HookError, format_error, format_traceback
from raysim.api.losses import RowLoss
from raysim.api.method import Method
from raysim.data.federated import (
    FederatedData,
    data_warnings,
    drop_single_rows,
    federate,
    hold_out_clients,
    pool_clients,
)
from raysim.data.partition import Partitioner
from raysim.data.sources import Source
from raysim.experiment.compose import compose
from raysim.experiment.config_files import Node, drop_set_keys, is_set, load_yaml, to_dict, to_yaml
from raysim.experiment.describe import overview
from raysim.experiment.groups import LISTS
from raysim.experiment.instantiate import (
    TARGET,
    arguments,
    build_object,
    format_value,
    import_target,
    resolve,
)
from raysim.experiment.many_runs import new_folder
from raysim.experiment.objects import (
    PARTS,
    UserObjects,
    describe_objects,
    refuse_missing,
    separate_objects,
)
from raysim.experiment.plugins import allow_packages, used_packages
from raysim.experiment.recorder import OnRound, load_finished, record, say, users_observers, warn
from raysim.experiment.result import Result
from raysim.experiment.run_folder import CONFIG, Place, apart, config_drafts, last_checkpoint, place
from raysim.experiment.run_overrides import extract_overrides
from raysim.experiment.settings import ExecutionOptions, Experiment, Interrupted
from raysim.models import ModelRecipe
from raysim.models.split import DATA_ARGUMENTS, CustomModel, ExternalModel
from raysim.primitives.errors import Refused, errors_as_refusals, suggest
from raysim.primitives.files import is_disk_full, lock_folder, make_folder, replace_file, user_path
from raysim.primitives.output import lossy_output
from raysim.primitives.stores import open_store
from raysim.results.observers import Observer, ObserverError, PrintLine
from raysim.results.progress import waiting_line
from raysim.results.report import load_run
from raysim.runtime.placement import NoRoomError, RayOptions, listen_on_loopback
from raysim.simulation.events import Event, ProcessLostError, RunStoppedError, TooManyFailuresError
from raysim.simulation.fleet import Fleet
from raysim.simulation.schedule import Schedule, Synchronous, check_concurrency
from raysim.simulation.server import default_weighting
from raysim.training.batch_plan import layer_needing_two_rows
from raysim.training.initial_weights import read_initial_weights
from raysim.training.run_spec import Checkpoint, RunSettings, RunSpec, declare_run, sample_flops
from raysim.training.step_mode import check_step_mode, default_lanes, uses_graph

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Experiment",
    "Interrupted",
    "Observer",
    "ObserverError",
    "Refused",
    "Result",
    "TooManyFailuresError",
    "build",
    "class_of",
    "compose",
    "load",
    "partition",
    "run",
]


GO_ON = "resume=latest goes on from the last checkpoint"
TRIES = 3  # at going on where a process was lost, without a new checkpoint in between
Values: TypeAlias = Mapping[Any, object]  # of an option, by their keys
# Words as on the command line, in one text or several; or a whole configuration.
Config: TypeAlias = DictConfig | Mapping[str, Any] | Sequence[str]
T = TypeVar("T")


# --- configuration to objects ---------------------------------------------------------------------------------------
def _object(config: Node, group: str, allow: Sequence[str], parts: Mapping[str, object]) -> Any:
    if group in parts:
        return parts[group]
    node = config.get(group)
    if not isinstance(node, Mapping) or TARGET not in node:
        raise Refused(
            f"{group}={format_value(node)} names no class: choose an option of the group {group}"
        )
    refuse_missing(node, group)
    if group == "model" and (recipe := _own_model(node, allow)) is not None:
        return recipe
    if group == "loss" and (function := _own_loss(node, allow)) is not None:
        return function
    cls = resolve(node[TARGET], group, allow)
    if not hasattr(cls, PARTS[group]):
        raise Refused(
            f"{group}.{TARGET}={node[TARGET]} is no {group}: it has no method '{PARTS[group]}'"
        )
    return build_object(cls, node, group)


def _own_model(node: Mapping[str, Any], allow: Sequence[str]) -> CustomModel | None:
    """A recipe for what `_target_` names, where that is a module's class or a function that makes one.

    The keys besides `head` and `lora` are its arguments.
    """
    made = import_target(node[TARGET], "model", allow)
    if not (inspect.isfunction(made) or (isinstance(made, type) and issubclass(made, nn.Module))):
        return None
    ours = build_object(
        ExternalModel, {key: node[key] for key in ("head", "lora") if key in node}, "model"
    )
    given = {key: value for key, value in node.items() if key not in ("head", "lora")}
    options = arguments(made, given, "model", later=DATA_ARGUMENTS)
    return CustomModel(made, options, head=ours.head, lora=ours.lora)


def _own_loss(node: Mapping[str, Any], allow: Sequence[str]) -> RowLoss | None:
    """The function that `_target_` names, if it is one; the keys are what it takes after outputs and labels."""
    if not inspect.isfunction(made := import_target(node[TARGET], "loss", allow)):
        return None
    options = arguments(made, node, "loss", later=list(inspect.signature(made).parameters)[:2])
    return functools.partial(made, **options) if options else made


def _methods(config: Node, allow: Sequence[str], parts: Mapping[str, object]) -> tuple[Method, ...]:
    methods = _listed(config, "method", Method, allow, parts)
    check_names(methods)
    return methods


def _listed(
    config: Node, group: str, kind: type[T], allow: Sequence[str], parts: Mapping[str, object]
) -> tuple[T, ...]:
    """The objects of a group of which any number of options is chosen."""
    found: list[T] = []
    if not isinstance(nodes := config.get(group, {}), Mapping):
        raise Refused(f"{group}={format_value(nodes)} is no mapping: name each part of it")
    for name, node in nodes.items():
        path = f"{group}.{name}"
        if path in parts:
            found.append(cast(T, parts[path]))
            continue
        found.append(build_object(class_of(node, path, kind, allow), node, path))
    return tuple(found)


def class_of(node: Any, path: str, kind: type[T], allow: Sequence[str]) -> type[T]:
    """What a node of a method or an observer names."""
    if not isinstance(node, Mapping) or TARGET not in node:
        raise Refused(
            f"{path}={format_value(node)} names no class: give a value to one of its keys instead"
        )
    refuse_missing(node, path)
    cls = resolve(node[TARGET], path, allow)
    if not issubclass(cls, kind):
        group = path.partition(".")[0]
        raise Refused(
            f"{path}.{TARGET}={node[TARGET]} is no {group}: name a subclass of raysim.{kind.__name__}"
        )
    return cls


def _device(asked: str, elsewhere: bool) -> str:
    """The device's name; "auto" is decided here. elsewhere: workers run on other machines than this one."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not (index.isdecimal() and len(index) < 4)):
        raise Refused(
            f"device={asked} does not exist: {suggest(asked, ('auto', 'cpu', 'cuda', 'mps'))}"
        )
    if kind == "cuda" and not elsewhere and int(index or 0) >= torch.cuda.device_count():
        raise Refused(
            f"device={asked} needs a GPU that torch does not see (it sees {torch.cuda.device_count()}): set device=cpu"
        )
    if kind != "cuda" and index not in ("", "0"):
        raise Refused(f"device={asked} does not exist, there is one: set device={kind}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise Refused("device=mps needs a Mac with Metal: set device=cpu")
    return asked


def _plain(
    config: Config, allow: Sequence[str], settings: Mapping[str, object] | None = None
) -> Node:
    """The configuration that words or values say, or that one with these values."""
    folders = allow_packages(allow)
    if isinstance(config, (DictConfig, Mapping)):
        node, settings = to_dict(config), dict(settings or {})
        if settings.get("method") == []:  # objects take the place of its methods
            node |= {"method": {}, "choices": node["choices"] | {"method": settings.pop("method")}}
        if settings:
            raise Refused(
                f"{next(iter(settings))}=... has no effect beside a whole configuration: set it in that one"
            )
        return node
    return to_dict(compose(_words(config), folders, settings=settings))


def _words(config: Sequence[str]) -> Sequence[str]:
    return shlex.split(config) if isinstance(config, str) else config


def partition(config: Config = (), allow: Sequence[str] = ()) -> FederatedData:
    """The data of a run alone, split over its clients. Raises Refused."""
    with errors_as_refusals():
        node = _plain(config, allow)
        source: Source = _object(node, "data", allow, {})
        partitioner: Partitioner = _object(node, "partition", allow, {})
        return federate(source, partitioner, _settings(node)[0].seed)


def _settings(node: Node) -> tuple[RunSettings, ExecutionOptions]:
    """The part of a configuration that names no classes."""
    rest = {key: value for key, value in node.items() if key not in {*PARTS, *LISTS, "choices"}}
    ours, others = ({f.name for f in fields(cls)} for cls in (RunSettings, ExecutionOptions))
    for key in rest:
        if key not in ours | others:
            raise Refused(
                f"{key} does not exist: {suggest(key, sorted(ours | others), 'a run has')}"
            )
    run = build_object(RunSettings, {key: value for key, value in rest.items() if key in ours}, "")
    return run, build_object(
        ExecutionOptions, {key: value for key, value in rest.items() if key in others}, ""
    )


def check_values(node: Node) -> None:
    """Refuse values that no machine would take. Data, devices and code that is not raysim's own are not looked for."""
    with errors_as_refusals():
        _settings(node)
        parts = {group: node.get(group) for group in PARTS}
        parts |= {f"{group}.{name}": part for group in LISTS for name, part in node[group].items()}
        for path, part in parts.items():
            if isinstance(part, Mapping) and str(part.get(TARGET)).startswith("raysim."):
                cls = resolve(part[TARGET], path)
                if issubclass(cls, Method):
                    build_object(cls, part, path)
                else:  # some constructors look at files
                    arguments(cls, part, path)


def build(
    config: Config = (),
    allow: Sequence[str] = (),
    *,
    methods: Sequence[Method | str] | None = None,
    model: object = None,
    data: object = None,
    partition: Partitioner | Values | Sequence[object] | str | None = None,
    schedule: Schedule | Values | str | None = None,
    fleet: Fleet | Values | str | None = None,
    loss: RowLoss | Values | str | None = None,
    **settings: object,
) -> Experiment:
    """Build and check all objects of a run; downloads and caches its data if need be, writes nothing else.

    See `run` for the arguments. Raises Refused with one sentence.
    """
    with errors_as_refusals():
        parts = {
            "model": model,
            "data": data,
            "partition": partition,
            "schedule": schedule,
            "fleet": fleet,
        }
        parts["loss"] = loss
        found, chosen = separate_objects(parts, methods)
        if both := next(iter(chosen.keys() & settings.keys()), None):
            raise Refused(f"{both} is given twice, by name and in methods: keep one of them")
        words = () if isinstance(config, (DictConfig, Mapping)) else _words(config)
        rest, others, aside = extract_overrides(words, chosen | settings, found)
        node = _plain(config if isinstance(config, (DictConfig, Mapping)) else rest, allow, others)
        objects = describe_objects(found, aside, node)
        return _built(objects.into(node), allow, objects)


def _built(node: Node, allow: Sequence[str], objects: UserObjects) -> Experiment:
    methods = _methods(node, allow, objects.parts)
    node, changes = _meet_requirements(node, methods)
    node = drop_set_keys(node)
    settings, execution = _settings(node)
    observers = _listed(node, "observer", Observer, allow, {})
    schedule: Schedule = _object(node, "schedule", allow, objects.parts)
    fleet: Fleet = _object(node, "fleet", allow, objects.parts)
    model: ModelRecipe = _object(node, "model", allow, objects.parts)
    device = _device(execution.device, execution.runtime.name == "cluster")
    settings = replace(
        settings,
        weighting=settings.weighting or default_weighting(methods),
        checkpoint=_absolute(settings.checkpoint),
    )
    init, weights = read_initial_weights(settings.init)
    settings = replace(settings, init=init)
    node = {**node, "device": device, "weighting": settings.weighting}
    if weights is not None:
        node["init"] = asdict(init)
    source, partitioner = (
        _object(node, group, allow, objects.parts) for group in ("data", "partition")
    )
    data = federate(source, partitioner, settings.seed)
    data = hold_out_clients(data, settings.evaluate.unseen, settings.seed)
    pooling = next((method.name for method in methods if method.pools), "")
    if pooling:
        data, schedule, local = _pooled(data, schedule, settings.local, pooling)
        settings = replace(settings, local=local)
    check_concurrency(schedule, data.partition.train.counts)
    loss = (
        _object(node, "loss", allow, objects.parts) if node.get("loss") else None
    )  # older runs have no such group
    threads, timed = execution.runtime.threads, execution.profile
    packages = used_packages(node, allow)
    spec = RunSpec(
        model,
        methods,
        data,
        settings,
        device,
        threads,
        profile=timed,
        loss=loss,
        weights=weights,
        packages=packages,
        size=schedule.size,
        stale=schedule.stale,
    )
    # What a fleet cannot be, such as a damaged trace, is found here and not in another process.
    fleet.devices(
        settings.seed, len(data.partition.train.counts), functools.partial(sample_flops, spec)
    )
    declarations = declare_run(spec)
    spec, left_out = _without_batches_of_one(spec, declarations, partitioner)
    if left_out:
        check_concurrency(schedule, spec.data.partition.train.counts)
        declarations = declare_run(spec)
    runtime = execution.runtime
    if runtime.precision == "tf32" and not device.startswith("cuda"):
        raise Refused(
            f"runtime.precision=tf32 is what GPUs of NVIDIA compute in, and device={device}: set "
            "runtime.precision=float32, or device=cuda"
        )
    spec = replace(
        spec,
        graph=uses_graph(spec, declarations.networks, runtime.graph),
        precision=runtime.precision,
    )
    spec = replace(
        spec, lanes=runtime.lanes or default_lanes(spec, declarations, schedule.concurrency)
    )
    check_step_mode(spec, declarations)
    node = {**node, "runtime": {**node["runtime"], "lanes": spec.lanes, "graph": spec.graph}}
    warnings = [*declarations.warnings]
    warnings = [
        *suspicious_methods(methods),
        *data_warnings(data),
        *left_out,
        *warnings,
        *objects.warnings(),
    ]
    watches = tuple(watch for each in declarations.methods for watch in each.round_warnings)
    return Experiment(
        node, spec, schedule, fleet, execution, tuple(warnings), observers, changes, watches
    )


def _meet_requirements(node: Node, methods: Sequence[Method]) -> tuple[Node, tuple[str, ...]]:
    """Set what methods cannot run without, unless the user set it: then `Method.setup` refuses it.

    Also returns a sentence for each setting that changed.
    """
    sentences = []
    for method in methods:
        required = method.settings(_settings(node)[0].local)
        for key, value in required.items():
            section, _, name = key.rpartition(".")
            values = node.get(section) if section else node
            if not isinstance(values, Mapping) or name not in values:
                raise Refused(
                    f"method '{method.name}' requires {key}={format_value(value)}, a key that does not exist. "
                    "Correct what its function settings returns."
                )
            if values[name] == value or is_set(key, node):
                continue
            sentences.append(
                f"{key}={format_value(value)} in place of {format_value(values[name])}, "
                f"because method '{method.name}' requires it"
            )
            changed = {**values, name: value}
            node = {**node, section: changed} if section else changed
    return node, tuple(sentences)


def _without_batches_of_one(
    spec: RunSpec, declarations: Declarations, partitioner: Partitioner
) -> tuple[RunSpec, tuple[str, ...]]:
    """Leave out clients of one training sample if the model cannot train on it, with a sentence that says so.

    Raises ValueError where every batch, or every client, has one row.
    """
    counts, batch = spec.data.partition.train.counts, spec.settings.local.batch
    single, clients = int(np.count_nonzero(counts == 1)), len(counts)
    if batch > 1 and not single:
        return spec, ()
    layer = layer_needing_two_rows(declarations)
    if not layer:
        return spec, ()
    other = (
        "choose model.norm=group"
        if hasattr(spec.model, "norm")
        else "choose a model without such a layer"
    )
    if batch == 1:
        raise ValueError(
            f"local.batch: batches of 1 row cannot train the model, because of its {layer}. "
            f"Set local.batch=2 or more, or {other}."
        )
    more = (
        "raise partition.minimum"
        if hasattr(partitioner, "minimum")
        else "give each client two samples or more"
    )
    if single == np.count_nonzero(counts):
        raise ValueError(
            f"partition: no client has two training samples, and one cannot train the model, because of its {layer}. "
            f"Have fewer clients, or {other}."
        )
    return replace(spec, data=drop_single_rows(spec.data)), (
        f"partition: {single} of {clients} clients have one training sample and never train, because the model "
        f"cannot train on a batch of one row (its {layer}). To let them train, {more}, or {other}.",
    )


def _absolute(kept: Checkpoint) -> Checkpoint:
    """With a local folder as other processes find it, too."""
    if not kept.folder or "://" in kept.folder:
        return kept
    return replace(kept, folder=str(user_path(kept.folder).absolute()))


def _pooled(
    data: FederatedData, schedule: Schedule, local: Local, method: str
) -> tuple[FederatedData, Schedule, Local]:
    """One model on all clients' samples: each round processes as many as the cohort of a federated run on average."""
    if not isinstance(schedule, Synchronous):
        raise Refused(
            f"method '{method}' trains one model, of which nothing can be late: set schedule=synchronous"
        )
    check_concurrency(schedule, data.partition.train.counts)
    share = schedule.cohort / np.count_nonzero(data.partition.train.counts)
    if local.steps is not None:
        local = replace(local, steps=local.steps * schedule.cohort)
    elif local.epochs is not None and not float(local.epochs * share).is_integer():
        samples = len(data.partition.train.indices)
        local = replace(
            local, epochs=None, steps=max(1, round(local.epochs * share * samples / local.batch))
        )
    elif local.epochs is not None:
        local = replace(local, epochs=int(local.epochs * share))
    return pool_clients(data), Synchronous(1), local


# --- the run --------------------------------------------------------------------------------------------------------
def run(
    config: Config | Experiment = (),
    *,
    methods: Sequence[Method | str] | None = None,
    model: object = None,
    data: object = None,
    partition: Partitioner | Values | Sequence[object] | str | None = None,
    schedule: Schedule | Values | str | None = None,
    fleet: Fleet | Values | str | None = None,
    loss: RowLoss | Values | str | None = None,
    on_round: OnRound | None = None,
    observers: Sequence[Observer] = (),
    quiet: bool = False,
    allow: Sequence[str] = (),
    console: Console | None = None,
    **settings: object,
) -> Result:
    """Run to the end; a run that is refused leaves no folder.

        raysim.run("method=fedprox", rounds=20, runtime="inprocess")
        raysim.run(methods=[FedProx(mu=0.1)], data=((x, y), (x_test, y_test)), rounds=20, local={"lr": 0.05})

    config: words as on the command line, in one text or a list; or what `compose` or `build` returned. settings: the
    same words as arguments, groups by the name of an option (`fleet="lognormal"`), values by their keys.

    methods: objects, and names of options. model, data, partition, schedule, fleet, loss: an object, or the name of
    an option. data: also (inputs, labels) or (inputs, labels, users), or a pair of those for training and for central
    tests: arrays, tensors, or a torch Dataset in place of a pair. partition: also the rows of each client, in a list of
    lists or a dictionary. loss: also a function of outputs and labels to a loss per sample. An object whose class can
    be imported, with plain values as arguments, is written into config.yaml, so that the run is continued and repeated
    like any other; any other has to be given again.

    on_round: called with the row of each round when it is done (a dictionary: `row["round"]`, ...). observers: those
    of your own, for more moments than that; they come after all that raysim itself does, and after those that the
    configuration names. Neither is told of a run that had finished before, nor is it stored.
    quiet: print nothing but warnings, which go to standard error.
    allow: packages besides raysim whose classes and options the configuration may name.

    Raises Refused (nothing was written), TooManyFailuresError (clients failed; a checkpoint was written),
    ObserverError (an observer of yours raised an error; the history was written), Interrupted.
    """
    from rich.console import Console

    console = console or Console(quiet=quiet)
    parts = {
        "methods": methods,
        "model": model,
        "data": data,
        "partition": partition,
        "schedule": schedule,
    }
    parts |= {"fleet": fleet, "loss": loss}
    experiment = _made(
        config, {key: part for key, part in parts.items() if part is not None} | settings, allow
    )
    users = users_observers(on_round, [*experiment.observers, *observers])
    with ExitStack() as stack:
        stack.enter_context(lossy_output(sys.stdout, sys.stderr, console.file))
        with errors_as_refusals():
            where = place(experiment)
            if not where.exists:
                folder = stack.enter_context(
                    new_folder(where.folder, dated=not experiment.execution.out)
                )
                where = replace(where, folder=folder)
            elif not where.finished:
                stack.enter_context(lock_folder(where.folder))
        return _run_to_end(experiment, where, console, quiet, users)


def _run_to_end(
    experiment: Experiment, where: Place, console: Console, quiet: bool, users: Sequence[Observer]
) -> Result:
    """Run to the end; continue from the last checkpoint where a process was lost."""
    tries, kept = TRIES, experiment.spec.settings.checkpoint
    while True:
        reached = last_checkpoint(where.folder, kept)
        try:
            return _tried(experiment, where, console, quiet, users)
        except ProcessLostError as error:
            tries = TRIES if last_checkpoint(where.folder, kept) != reached else tries - 1
            if not (tries and (where.folder / CONFIG).is_file()):
                raise ProcessLostError(f"{error}; {GO_ON}") from error
            say(console, f"{error}. The run goes back to its last checkpoint and on by itself")
        except Refused as error:
            if not where.again:
                raise
            raise RunStoppedError(f"{error}; {GO_ON}") from error
        again = replace(experiment.execution, out=str(where.folder), resume="latest")
        experiment = replace(experiment, execution=again)
        with errors_as_refusals():
            where = replace(place(experiment), again=True)


def _tried(
    experiment: Experiment, where: Place, console: Console, quiet: bool, users: Sequence[Observer]
) -> Result:
    """Run to the end, or to the loss of a process."""
    if where.finished:
        say(console, where.note)
        return load_finished(experiment, where.folder, console)
    with ExitStack() as stack:
        stack.enter_context(explain_errors(where.folder))
        with errors_as_refusals():
            plan = overview(experiment, where.folder)
        for text in (plan, where.note):
            say(console, text)
        for text in experiment.warnings:
            warn(console, text)
        with waiting_line(console) as waits_for, errors_as_refusals():
            events = stack.enter_context(closing(_events(experiment, where, console, waits_for)))
            started = next(events)  # only now workers are known to fit
            for folder in apart(experiment.spec.settings.checkpoint, where.folder):
                stack.enter_context(lock_folder(make_folder(folder)))
            begin_folder(experiment, where)
        return record(experiment, where.folder, chain([started], events), console, quiet, users)


def _made(
    config: Config | Experiment, parts: Mapping[str, Any], allow: Sequence[str]
) -> Experiment:
    if not isinstance(config, Experiment):
        return build(config, allow, **parts)
    if parts:
        raise Refused(
            f"{next(iter(parts))}=... has no effect on what build returned: give it to build"
        )
    return config


def load(folder: str | Path, *, allow: Sequence[str] = (), **parts: Any) -> Result:
    """The result of a run, by its folder; of one that goes on, as far as it is.

    allow: as for `run`. parts: objects (methods, model, data, ...) that config.yaml could not hold. Raises Refused.
    """
    with errors_as_refusals():
        found = load_run(user_path(folder))
        config = load_yaml(found.folder / "config.yaml") | {
            "device": "cpu",
            "out": str(folder),
            "resume": None,
        }
        return Result(
            found.folder,
            found.summary,
            found.rows,
            functools.partial(build, config, allow, **parts),
        )


@contextmanager
def explain_errors(folder: Path) -> Iterator[None]:
    """Raise `RunStopped` with one sentence for a hook that fails and for a file that cannot be written."""
    with _unwritable(folder), _named():
        yield


@contextmanager
def _named() -> Iterator[None]:
    """A hook that fails where no client is to blame, in scoring for example, ends a run with its method's name."""
    try:
        yield
    except (Refused, RunStoppedError):
        raise
    except (Exception, SystemExit) as error:
        name = failing_method_name(error)
        if not (name or isinstance(error, HookError)):
            raise
        text = f"method {name!r} failed: {format_error(error)}" if name else format_error(error)
        text += ". resume=latest goes on once it is mended"
        raise RunStoppedError(f"{text}\n{format_traceback(error)}".rstrip("\n")) from error


@contextmanager
def _unwritable(folder: Path) -> Iterator[None]:
    """What cannot be written, for want of room or otherwise, ends a run in one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        what = error.strerror if is_disk_full(error) and isinstance(error, OSError) else str(error)
        begun = (folder / CONFIG).is_file()
        again = f"out={folder} and resume=latest" if begun else "the same command"
        mend = "make room" if is_disk_full(error) else "mend that"
        raise RunStoppedError(
            f"{what}; {mend}, then {again} goes on from the last checkpoint"
        ) from error


def _events(
    experiment: Experiment, where: Place, console: Console, waits_for: PrintLine
) -> Generator[Event, None, None]:
    """The chosen runtime's stream of events. waits_for: is told what has to start before the first of them."""
    if experiment.execution.runtime.name == "inprocess":
        from raysim.runtime import inprocess

        parts = experiment.spec, experiment.schedule, experiment.fleet
        yield from inprocess.run(*parts, str(where.folder.absolute()), where.resume)
        return
    yield from _on_ray(experiment, where, console, waits_for)


def _on_ray(
    experiment: Experiment, where: Place, console: Console, waits_for: PrintLine
) -> Iterator[Event]:
    waits_for("waiting for Ray")
    listen_on_loopback(experiment.execution.runtime)
    from raysim.runtime import ray

    def tell(text: str) -> None:
        say(console, f"{'':<10}{text}")

    options, spec = experiment.execution.runtime, experiment.spec
    folder = str(where.folder.absolute())

    def events(options: RayOptions) -> Iterator[Event]:
        size = ray.plan_workers(options, spec, experiment.schedule.concurrency, tell)
        if options.workers is None:
            tell(f"{size} fit")
        if experiment.execution.device == "auto" and spec.device == "cpu" and ray.has_gpus():
            tell(
                "device=auto is the CPU because this process sees no GPU, but the cluster has some: set device=cuda"
            )
        waits_for("waiting for the workers")
        yield from ray.run(
            spec, experiment.schedule, experiment.fleet, size, options, tell, folder, where.resume
        )

    with ray.connection(options):
        try:
            yield from events(options)
        except NoRoomError as error:  # before anything has started
            if not where.again or options.workers is None:
                raise
            tell(f"{error}. It goes on with as many as fit")
            yield from events(replace(options, workers=None))


def begin_folder(experiment: Experiment, where: Place) -> None:
    """Write the configuration into the folder of a run that begins."""
    for draft in config_drafts(where.folder):
        draft.unlink()
    config = to_yaml(experiment.config).encode()
    replace_file(where.folder / CONFIG, config)
    if (
        apart := experiment.spec.settings.checkpoint.folder
    ):  # so that they can be continued without the run's folder
        with open_store(apart).new(CONFIG) as draft:
            draft.write_bytes(config)
    (where.folder / "summary.json").unlink(missing_ok=True)  # of a shorter run that is continued
