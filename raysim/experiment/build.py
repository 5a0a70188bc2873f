"""Build and check all objects of a run from its configuration."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeAlias

from omegaconf import DictConfig

from raysim.api.composition import suspicious_methods
from raysim.api.compression import Compressor
from raysim.api.declare import Declarations
from raysim.api.learner import Learner
from raysim.api.losses import RowLoss
from raysim.api.method import Method
from raysim.api.metrics import Metric
from raysim.api.selection import Random, Selection
from raysim.api.topology import Star, Topology
from raysim.data.federated import FederatedData, data_warnings, federate, hold_out_clients
from raysim.data.partition import Partitioner
from raysim.data.sources import Source
from raysim.experiment.adjustments import (
    drop_untrainable_clients,
    make_folder_absolute,
    meet_requirements,
    pool_training,
)
from raysim.experiment.compose import compose
from raysim.experiment.config_files import Node, drop_set_keys, to_dict
from raysim.experiment.model_warnings import output_warnings, weight_warnings
from raysim.experiment.objects import (
    UserObjects,
    describe_objects,
    separate_metrics,
    separate_objects,
)
from raysim.experiment.parts import (
    build_list,
    build_methods,
    build_metrics,
    build_part,
    build_settings,
    choose_device,
)
from raysim.experiment.plugins import allow_packages, used_packages
from raysim.experiment.run_overrides import extract_overrides
from raysim.experiment.settings import Experiment, RuntimeOptions
from raysim.primitives.errors import RefusedError, errors_as_refusals, suggest
from raysim.primitives.kinds import LOWER_IS_BETTER
from raysim.results.observers import Observer
from raysim.simulation.fleet import Fleet
from raysim.simulation.load import varying_tensors
from raysim.simulation.network import make_network
from raysim.simulation.schedule import Schedule, check_concurrency, check_sites
from raysim.simulation.server import default_weighting
from raysim.training.initial_weights import read_initial_weights
from raysim.training.run_spec import RunSettings, RunSpec, check_base, declare_run, sample_flops
from raysim.training.step_mode import check_step_mode, default_lanes, uses_graph

# Values of an option, by their keys.
Values: TypeAlias = Mapping[Any, object]
# Overrides, in one text or several; or a whole configuration.
Config: TypeAlias = DictConfig | Mapping[str, Any] | Sequence[str]


def build(
    config: Config = (),
    allow: Sequence[str] = (),
    *,
    methods: Sequence[Method | str] | None = None,
    model: object = None,
    data: object = None,
    partition: Partitioner | Values | Sequence[object] | str | None = None,
    schedule: Schedule | Values | str | None = None,
    selection: Selection | Values | str | None = None,
    fleet: Fleet | Values | str | None = None,
    topology: Topology | Values | str | None = None,
    loss: RowLoss | Values | str | None = None,
    learner: Method | Values | str | None = None,
    compression: Compressor | Values | str | None = None,
    metrics: Sequence[object] | None = None,
    **settings: object,
) -> Experiment:
    """Build and check all objects of a run; return them as an `Experiment`, which `run` takes.

    Data and pretrained weights are downloaded and cached if necessary; no other file is written.
    `raysim.run` explains the other arguments.
    config: overrides as on the command line, in one text or a list; or a complete configuration.
    allow: packages besides raysim whose classes and options the configuration may use.
    Raise `RefusedError` for settings or objects with which no run is possible.
    """
    parts = {
        "model": model,
        "data": data,
        "partition": partition,
        "schedule": schedule,
        "selection": selection,
        "fleet": fleet,
        "topology": topology,
        "loss": loss,
        "learner": learner,
        "compression": compression,
    }
    with errors_as_refusals():
        objects, options = separate_objects(parts, methods)
        metric_names, own_metrics = separate_metrics(metrics)
        if metric_names:
            options["evaluate.metrics"] = metric_names
        duplicates = options.keys() & settings.keys()
        if duplicates:
            raise RefusedError(
                f"{next(iter(duplicates))} is given twice, as a keyword argument and by the "
                "argument methods or metrics. Keep one of them."
            )
        is_whole = isinstance(config, (DictConfig, Mapping))
        overrides: Sequence[str] = ()
        if not isinstance(config, (DictConfig, Mapping)):
            overrides = _split_text(config)
        extracted = extract_overrides(overrides, options | settings, objects)
        rest: Config = config if is_whole else extracted.overrides
        node = _compose_node(rest, allow, extracted.settings)
        user_objects = describe_objects(objects, extracted.by_place, node)
        return _build_experiment(user_objects.into(node), allow, user_objects, own_metrics)


def partition(config: Config = (), allow: Sequence[str] = ()) -> FederatedData:
    """Return the data of a run, split over its clients.

    config: overrides in one text or a list, or a complete configuration.
    allow: packages besides raysim whose classes and options may be used.
    Raise `RefusedError` for wrong settings, and for data that cannot be read or split.
    """
    with errors_as_refusals():
        node = _compose_node(config, allow)
        source: Source = build_part(node, "data", allow, {})
        partitioner: Partitioner = build_part(node, "partition", allow, {})
        return federate(source, partitioner, build_settings(node)[0].seed)


def _compose_node(
    config: Config, allow: Sequence[str], settings: Mapping[str, object] | None = None
) -> Node:
    """Return a run's complete configuration.

    config: overrides, or a complete configuration.
    allow: packages besides raysim whose options the overrides may use.
    settings: more overrides, as Python values by key.
    Raise `RefusedError` for settings that would change a complete configuration.
    """
    folders = allow_packages(allow)
    if not isinstance(config, (DictConfig, Mapping)):
        return to_dict(compose(_split_text(config), folders, settings=settings))
    node = to_dict(config)
    settings = dict(settings or {})
    if settings.get("method") == []:  # objects replace the methods of the configuration
        del settings["method"]
        node |= {"method": {}, "choices": node["choices"] | {"method": []}}
    if settings:
        raise RefusedError(
            f"{next(iter(settings))}=... has no effect, because the argument config is already a "
            f"complete configuration. Set {next(iter(settings))} in config instead."
        )
    return node


def _split_text(config: Sequence[str]) -> Sequence[str]:
    return shlex.split(config) if isinstance(config, str) else config


def _build_experiment(
    node: Node,
    allow: Sequence[str],
    user_objects: UserObjects,
    own_metrics: Mapping[str, Metric],
) -> Experiment:
    objects = user_objects.parts
    methods = build_methods(node, allow, objects)
    node, changes = meet_requirements(node, methods)
    node = drop_set_keys(node)

    settings, execution = build_settings(node)
    observers = build_list(node, "observer", Observer, allow, {})
    schedule: Schedule = build_part(node, "schedule", allow, objects)
    selection: Selection = Random()  # older runs have no group selection
    if node.get("selection"):
        selection = build_part(node, "selection", allow, objects)
    fleet: Fleet = build_part(node, "fleet", allow, objects)
    model = build_part(node, "model", allow, objects)
    device = choose_device(execution.device, is_remote=execution.runtime.name == "cluster")
    init, weights = read_initial_weights(settings.init)
    settings = replace(
        settings,
        weighting=settings.weighting or default_weighting(methods),
        checkpoint=make_folder_absolute(settings.checkpoint),
        init=init,
    )
    node = {**node, "device": device, "weighting": settings.weighting}
    if weights is not None:
        node["init"] = asdict(init)

    source: Source = build_part(node, "data", allow, objects)
    partitioner: Partitioner = build_part(node, "partition", allow, objects)
    data = federate(source, partitioner, settings.seed)
    data = hold_out_clients(data, settings.evaluate.unseen, settings.seed)
    pooling = next((method.name for method in methods if method.pools), "")
    if pooling:
        data, schedule, local = pool_training(data, schedule, settings.local, pooling)
        settings = replace(settings, local=local)
    # Older runs have no groups loss and topology.
    loss = build_part(node, "loss", allow, objects) if node.get("loss") else None
    evaluate = settings.evaluate
    metric_names = [*evaluate.metrics, *([evaluate.metric] if evaluate.metric else [])]
    metrics = build_metrics(metric_names, allow, own_metrics)
    topology: Topology = Star()
    if node.get("topology"):
        topology = build_part(node, "topology", allow, objects)
    spec = RunSpec(
        model,
        methods,
        data,
        settings,
        device,
        execution.runtime.threads,
        profile=execution.profile,
        loss=loss,
        own_metrics=metrics,
        weights=weights,
        packages=used_packages(node, allow, [name for name in metrics if "." in name]),
        size=schedule.size,
        stale=schedule.stale,
        selection=selection,
        topology=topology,
        devices=fleet.labels(settings.seed, len(data.partition.train.counts)),
    )
    node, spec = _record_lower_metrics(node, spec)
    # A fleet that cannot exist, such as a damaged trace, is refused here and not in another
    # process.
    flops = functools.partial(sample_flops, spec)
    fleet.devices(settings.seed, len(data.partition.train.counts), flops)

    # with other topologies, the clients of a replica are not known yet
    if isinstance(topology, Star):
        check_concurrency(schedule, data.partition.train.counts)
    declarations = declare_run(spec)
    check_base(spec)
    spec, client_warnings = drop_untrainable_clients(spec, declarations, partitioner)
    if client_warnings:
        declarations = declare_run(spec)
    network = make_network(spec, declarations, fleet)
    check_sites(schedule, spec.data.partition.train.counts, network)
    spec = _choose_step_mode(spec, declarations, execution.runtime, schedule)
    runtime_node = {**node["runtime"], "lanes": spec.lanes, "graph": spec.graph}
    round_warnings = []
    for method_declarations in declarations.methods:
        round_warnings += method_declarations.round_warnings
    warnings = (
        *suspicious_methods(methods),
        *data_warnings(data),
        *client_warnings,
        *network.warnings,
        *declarations.warnings,
        *_rate_warnings(settings),
        *output_warnings(spec, declarations.networks["model"]),
        *weight_warnings(declarations.networks["model"]),
    )
    return Experiment(
        {**node, "runtime": runtime_node},
        spec,
        schedule,
        fleet,
        execution,
        warnings,
        observers,
        (*changes, *user_objects.notes()),
        tuple(round_warnings),
        network,
        _reason_for_late_planning(spec, declarations),
    )


def _rate_warnings(settings: RunSettings) -> list[str]:
    """Return a warning for each setting of the learning rate that is probably a mistake.

    Such a setting has no effect, or the run, or each of its jobs, ends before the warm-up does.
    """
    local, texts = settings.local, []
    if local.drop_every is not None and local.schedule != "step":
        texts.append(
            f"local.drop_every={local.drop_every} has no effect with local.schedule="
            f"{local.schedule}; set local.schedule=step to let the learning rate drop"
        )
    if local.final_lr and local.schedule not in ("cosine", "linear"):
        texts.append(
            f"local.final_lr={local.final_lr:g} has no effect with local.schedule="
            f"{local.schedule}; set local.schedule=cosine or linear to let the learning rate fall"
        )
    if local.warmup_rounds and local.warmup_rounds >= settings.rounds:
        texts.append(
            f"local.warmup_rounds={local.warmup_rounds}: the run has rounds={settings.rounds}, so "
            f"the learning rate never reaches local.lr={local.lr:g}; reduce local.warmup_rounds, "
            "or increase rounds"
        )
    if local.warmup_steps and local.steps is not None and local.warmup_steps >= local.steps:
        texts.append(
            f"local.warmup_steps={local.warmup_steps}: a job has local.steps={local.steps}, so the "
            f"learning rate never reaches local.lr={local.lr:g}; reduce local.warmup_steps, or "
            "increase local.steps"
        )
    return texts


def _reason_for_late_planning(spec: RunSpec, declarations: Declarations) -> str:
    """Return why the planner must wait until earlier aggregations are trained.

    Return "" if it can plan all aggregations before the training.
    declarations: what the run's methods declared, such as messages that change in size.
    """
    if not spec.selection.plans_ahead:
        return "the selection needs reports"
    if varying_tensors(declarations):
        return "messages change in size"
    return ""


def _record_lower_metrics(node: Node, spec: RunSpec) -> tuple[Node, RunSpec]:
    """Add to `evaluate.lower` the names of the metrics for which a lower score is better.

    The names in `LOWER_IS_BETTER` are not added. Return the new configuration and the new `spec`.
    Raise ValueError if the user named a metric in `evaluate.lower` that the run does not have. Runs
    with a learner are not checked, because learners may report more metrics.
    """
    metrics = [metric.name for metric in spec.task.metrics]
    has_learner = any(isinstance(method, Learner) for method in spec.methods)
    for name in () if has_learner else spec.settings.evaluate.lower:
        if name not in metrics:
            raise ValueError(
                f"evaluate.lower: {name} is not a metric of this run; {suggest(name, metrics)}"
            )
    names = {metric.name for metric in spec.task.metrics if not metric.higher} - LOWER_IS_BETTER
    lower = sorted(names | set(spec.settings.evaluate.lower))
    if lower == spec.settings.evaluate.lower:
        return node, spec
    evaluate = replace(spec.settings.evaluate, lower=lower)
    node = {**node, "evaluate": {**node["evaluate"], "lower": lower}}
    return node, replace(spec, settings=replace(spec.settings, evaluate=evaluate))


def _choose_step_mode(
    spec: RunSpec, declarations: Declarations, runtime: RuntimeOptions, schedule: Schedule
) -> RunSpec:
    """Choose the lanes, the precision and whether steps are recorded; return the changed spec.

    If `runtime.lanes` or `runtime.graph` is None, the model, the device and the schedule decide it.
    Raise `RefusedError` if the device does not have the precision.
    """
    if runtime.precision == "tf32" and not spec.device.startswith("cuda"):
        raise RefusedError(
            f"runtime.precision=tf32 needs an NVIDIA GPU, but device={spec.device}. Set "
            "runtime.precision=float32, or device=cuda."
        )
    graph = uses_graph(spec, declarations.networks, runtime.graph)
    spec = replace(spec, graph=graph, precision=runtime.precision)
    lanes = runtime.lanes or default_lanes(spec, declarations, schedule.concurrency)
    spec = replace(spec, lanes=lanes)
    check_step_mode(spec, declarations)
    return spec
