"""Build the objects of a run from its configuration, such as methods, model and settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, cast

import torch
from torch import nn

from raysim.api.composition import check_names
from raysim.api.compression import Compressor
from raysim.api.losses import RowLoss
from raysim.api.method import Method
from raysim.api.metrics import Metric
from raysim.experiment.config_files import Node
from raysim.experiment.groups import LISTS
from raysim.experiment.instantiate import (
    TARGET,
    arguments,
    build_object,
    format_value,
    import_target,
    resolve,
)
from raysim.experiment.objects import CUSTOM_MODEL_KEYS, PARTS, refuse_missing
from raysim.experiment.settings import ExecutionOptions
from raysim.models.split import DATA_ARGUMENTS, CustomModel, ExternalModel
from raysim.primitives.errors import RefusedError, errors_as_refusals, suggest
from raysim.training.run_spec import RunSettings

T = TypeVar("T")

DEVICE_KINDS = ("cpu", "cuda", "mps")


def build_part(
    config: Node, group: str, allow: Sequence[str], objects: Mapping[str, object]
) -> Any:
    """Return the part of a group, such as "fleet": the user's object, or a new object.

    config: the run's configuration, which describes the new object.
    allow: the packages besides raysim whose classes may be used.
    objects: the user's objects, by group.
    Raise `RefusedError` if the configuration names no class of the group.
    """
    if group in objects:
        return objects[group]
    node = config.get(group)
    if not isinstance(node, Mapping) or TARGET not in node:
        raise RefusedError(
            f"{group}={format_value(node)} does not name a class. Choose an option of the group "
            f"{group}."
        )
    refuse_missing(node, group)
    if group == "model":
        recipe = _custom_model(node, allow)
        if recipe is not None:
            return recipe
    if group == "loss":
        function = _loss_function(node, allow)
        if function is not None:
            return function
    cls = resolve(node[TARGET], group, allow)
    if not hasattr(cls, PARTS[group]):
        raise RefusedError(
            f"{group}.{TARGET}={node[TARGET]} is not a {group}, because it has no function "
            f"'{PARTS[group]}'. Give a class that has this function."
        )
    return build_object(cls, node, group)


def _custom_model(node: Mapping[str, Any], allow: Sequence[str]) -> CustomModel | None:
    """Return the description of the user's network; None if `_target_` names no network.

    `_target_` may name a subclass of `nn.Module`, or a function that returns a module.
    node: the entry of the group `model`. All keys except `head` and `lora` are arguments of
    `_target_`.
    """
    target: Any = import_target(node[TARGET], "model", allow)
    is_module_class = isinstance(target, type) and issubclass(target, nn.Module)
    if not (inspect.isfunction(target) or is_module_class):
        return None
    recipe_node = {key: value for key, value in node.items() if key in CUSTOM_MODEL_KEYS}
    recipe = build_object(ExternalModel, recipe_node, "model")
    other_node = {key: value for key, value in node.items() if key not in CUSTOM_MODEL_KEYS}
    options = arguments(target, other_node, "model", later=DATA_ARGUMENTS)
    return CustomModel(target, options, head=recipe.head, lora=recipe.lora)


def _loss_function(node: Mapping[str, Any], allow: Sequence[str]) -> RowLoss | None:
    """Return the loss function that `_target_` names; None if `_target_` names no function.

    node: the configuration of the loss. Keys besides `_target_` are the function's arguments after
    outputs and labels.
    allow: further packages that may be used, besides raysim and the installed packages that extend
    it.
    """
    function = import_target(node[TARGET], "loss", allow)
    if not inspect.isfunction(function):
        return None
    outputs_and_labels = list(inspect.signature(function).parameters)[:2]
    options = arguments(function, node, "loss", later=outputs_and_labels)
    return functools.partial(function, **options) if options else function


def build_methods(
    config: Node, allow: Sequence[str], objects: Mapping[str, object]
) -> tuple[Method, ...]:
    """Return all methods of a run: its learner, the entries of `method`, and its compressor.

    config: the run's configuration.
    allow: packages besides raysim that the configuration may name.
    objects: the user's objects, by group or by "method.NAME".
    Raise `RefusedError` for a class that cannot be used, and for a repeated name.
    """
    methods = build_list(config, "method", Method, allow, objects)
    if config.get("learner"):  # older runs have no group learner
        learner = build_part(config, "learner", allow, objects)
        if not isinstance(learner, Method):
            raise RefusedError(
                f"learner={type(learner).__name__} is not a learner. Give a raysim.Learner, or a "
                "raysim.Method that trains clients with run.train."
            )
        methods = (learner, *methods)
    if config.get("compression"):  # older runs have no group compression
        compressor = build_part(config, "compression", allow, objects)
        if not isinstance(compressor, Compressor):
            raise RefusedError(
                f"compression={type(compressor).__name__} is not a compressor. Give a "
                "raysim.Compressor."
            )
        methods = (*methods, compressor)
    check_names(methods)
    return methods


def build_list(
    config: Node, group: str, kind: type[T], allow: Sequence[str], objects: Mapping[str, object]
) -> tuple[T, ...]:
    """Build all methods or all observers of a run, in the order of the configuration.

    group: "method" or "observer".
    kind: the class that all objects must extend, `Method` or `Observer`.
    allow: packages besides raysim that the configuration may name.
    objects: the user's objects by "GROUP.NAME". They are used instead of the configuration's
    entries of these names.
    Raise `RefusedError` for an entry without a class of this kind.
    """
    nodes = config.get(group, {})
    if not isinstance(nodes, Mapping):
        raise RefusedError(
            f"{group}={format_value(nodes)} must be a mapping. "
            "Give each part a name, as in {mine: ...}."
        )
    parts: list[T] = []
    for name, node in nodes.items():
        path = f"{group}.{name}"
        if path in objects:
            parts.append(cast(T, objects[path]))
        else:
            parts.append(build_object(class_of(node, path, kind, allow), node, path))
    return tuple(parts)


def class_of(node: Any, path: str, kind: type[T], allow: Sequence[str]) -> type[T]:
    """Return the class that `_target_` names in the configuration of a method or an observer.

    path: the key of this configuration, such as "method.fedprox", for errors.
    kind: `Method` or `Observer`.
    allow: packages besides raysim that the configuration may name.
    Raise `RefusedError` if `node` names no class of this kind.
    """
    if not isinstance(node, Mapping) or TARGET not in node:
        raise RefusedError(
            f"{path}={format_value(node)} names no class. Give a mapping with {TARGET}, or set "
            f"keys below {path} instead."
        )
    refuse_missing(node, path)
    cls = resolve(node[TARGET], path, allow)
    if not issubclass(cls, kind):
        group = path.partition(".")[0]
        raise RefusedError(
            f"{path}.{TARGET}={node[TARGET]} is not a {group}. Give a subclass of "
            f"raysim.{kind.__name__}."
        )
    return cls


def build_metrics(
    names: Sequence[str], allow: Sequence[str], own: Mapping[str, Metric]
) -> dict[str, Metric]:
    """Return the user's own metrics among `names`, by name; leave out raysim's metrics.

    names: the names in `evaluate.metrics` and `evaluate.metric`. A name with dots is the full path
    of a function, a `raysim.Metric`, or a class whose objects can be called.
    allow: packages besides raysim that the configuration may name.
    own: metrics that the user passed as Python objects, by name.
    Raise `RefusedError` for a metric that cannot be imported.
    """
    metrics: dict[str, Metric] = {}
    for name in names:
        if name in own:
            metrics[name] = own[name]
        elif "." in name:
            metrics[name] = _import_metric(name, allow)
    return metrics


def _import_metric(name: str, allow: Sequence[str]) -> Metric:
    target: Any = import_target(name, "evaluate.metrics", allow, key="")
    if isinstance(target, Metric):
        return target
    if not callable(target):
        raise RefusedError(
            f"evaluate.metrics={name} is not a function. Give the path of a function, such as "
            "mine.metrics.brier."
        )
    return Metric(target() if isinstance(target, type) else target)


def build_settings(node: Node) -> tuple[RunSettings, ExecutionOptions]:
    """Return a run's settings and its execution options.

    node: the run's configuration. Keys of parts, such as `data` and `method`, are ignored.
    Raise `RefusedError` for a key that does not exist, or for a wrong value.
    """
    values = {key: value for key, value in node.items() if key not in {*PARTS, *LISTS, "choices"}}
    run_keys = {field.name for field in fields(RunSettings)}
    execution_keys = {field.name for field in fields(ExecutionOptions)}
    valid_keys = run_keys | execution_keys
    for key in values:
        if key not in valid_keys:
            raise RefusedError(
                f"{key} does not exist: {suggest(key, sorted(valid_keys), 'a run has')}"
            )
    run_values = {key: value for key, value in values.items() if key in run_keys}
    execution_values = {key: value for key, value in values.items() if key in execution_keys}
    settings = build_object(RunSettings, run_values, "")
    return settings, build_object(ExecutionOptions, execution_values, "")


def check_values(node: Node) -> None:
    """Raise `RefusedError` if a run's configuration has values with which no computer can run it.

    Data, devices and code outside raysim may be missing on this computer, so they are not checked.
    node: the configuration.
    """
    with errors_as_refusals():
        build_settings(node)
        parts = {group: node.get(group) for group in PARTS}
        for group in LISTS:
            for name, part in node[group].items():
                parts[f"{group}.{name}"] = part
        for path, part in parts.items():
            if not isinstance(part, Mapping) or not str(part.get(TARGET)).startswith("raysim."):
                continue
            cls = resolve(part[TARGET], path)
            if issubclass(cls, Method):
                build_object(cls, part, path)
            else:  # some constructors read files, which may be on another machine
                arguments(cls, part, path)


def choose_device(name: str, is_remote: bool) -> str:
    """Return the device's name; for "auto", choose a device.

    is_remote: True if workers run on other machines.
    Raise `RefusedError` for a device that does not exist.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    is_index = index.isdecimal() and len(index) < 4
    if kind not in DEVICE_KINDS or (index and not is_index):
        raise RefusedError(
            f"device={name} does not exist: {suggest(name, ('auto', *DEVICE_KINDS))}"
        )
    if kind == "cuda" and not is_remote and int(index or 0) >= torch.cuda.device_count():
        raise RefusedError(
            f"device={name} does not exist, because torch sees {torch.cuda.device_count()} GPUs. "
            "Set device=cpu, or check the GPU's driver."
        )
    if kind != "cuda" and index not in ("", "0"):
        raise RefusedError(
            f"device={name} does not exist, because there is only one {kind} device. "
            f"Set device={kind}."
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise RefusedError("device=mps needs a Mac with Metal. Set device=cpu.")
    return name
