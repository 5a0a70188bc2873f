"""Use Python objects as parts of a run, and describe them in the run's configuration.

The configuration stores an object's class and arguments if the class can be imported and the
arguments are plain values. Any other object is only described; the user must give the object again
to continue or repeat the run.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from raysim.api.composition import check_name
from raysim.api.method import Method
from raysim.api.metrics import Metric
from raysim.data.arrays import Arrays, store_arrays
from raysim.data.frames import is_table, store_table
from raysim.data.listed import Listed, is_lists_of_rows, store_lists
from raysim.data.parquet import Parquet
from raysim.experiment.config_files import Node
from raysim.experiment.instantiate import TARGET, arguments, build_object
from raysim.experiment.run_overrides import SetValue
from raysim.models.split import CustomModel, ExternalModel
from raysim.primitives.errors import RefusedError, suggest

# The values that the user set for the object at a place, by key.
Overrides: TypeAlias = Mapping[str, SetValue]

# The key of a node whose object no file can store.
OBJECT = "_object_"
# Settings of every network of the user's own.
CUSTOM_MODEL_KEYS = ("head", "lora")
# The method that an object of each group must have.
PARTS = {
    "schedule": "decide",
    "selection": "select",
    "fleet": "devices",
    "topology": "connect",
    "data": "read",
    "partition": "split",
    "model": "build",
    "loss": "__call__",
    "learner": "setup",
    "compression": "encode",
}


@dataclass(frozen=True)
class UserObjects:
    """The Python objects that a user gives for a run, such as a model or a method.

    The keys of both dictionaries are places: a group, such as "model", or "method.NAME".
    nodes: the entries of config.yaml that describe the objects.
    """

    parts: Mapping[str, object] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)

    def into(self, config: Node) -> Node:
        """Return a copy of a configuration with the descriptions of these objects.

        A method is added after the methods in `config`. Any other object replaces the option of its
        group.
        """
        config = config | {"choices": dict(config["choices"]), "method": dict(config["method"])}
        for place, node in self.nodes.items():
            group, _, name = place.partition(".")
            if not name:
                config[group] = node
                config["choices"][group] = _title(self.parts[place])
                continue
            if name in config[group]:
                raise RefusedError(
                    f"methods holds {name} twice, by its name and as an object. Keep one of them."
                )
            config[group][name] = node
            config["choices"][group] = [*config["choices"][group], name]
        return config

    def notes(self) -> list[str]:
        """Return a note for each object that the user must give again to continue the run."""
        return [
            f"{_argument(place)}: config.yaml cannot store this object; {_give_again(place)}"
            for place, node in self.nodes.items()
            if OBJECT in node
        ]


# --- what the user gives --------------------------------------------------------------------------
def separate_objects(
    parts: Mapping[str, object], methods: Sequence[object] | None = None
) -> tuple[dict[str, object], dict[str, object]]:
    """Separate the arguments of `raysim.run` into Python objects and values for the configuration.

    Return the objects by group or by "method.NAME", and the values by group. A value is an option's
    name, a dictionary of settings or, for "method", a list of names.
    parts: the arguments by group; each may be None. A dictionary is a value, but an object for
    "data" and, with lists of rows, for "partition".
    methods: a list of method objects and names, or None.
    Raise `RefusedError` if `methods` is no such list, or has two objects of the same name.
    """
    options: dict[str, object] = {}
    objects: dict[str, object] = {}
    for group, part in parts.items():
        if part is None:
            continue
        has_values = (
            isinstance(part, Mapping) and group != "data" and not _needs_wrapper(group, part)
        )
        if isinstance(part, str) or has_values:
            options[group] = part
        else:
            objects[group] = part
    if methods is None:
        return objects, options
    if isinstance(methods, (str, Method)) or not isinstance(methods, Iterable):
        raise RefusedError(f"methods={methods!r} is not a list. Write methods=[...].")
    options["method"] = [method for method in methods if isinstance(method, str)]
    for method in methods:
        if isinstance(method, str):
            continue
        if not isinstance(method, Method):
            raise _wrong_object("methods", method, "it is not a raysim.Method")
        check_name(method)
        place = f"method.{method.name}"
        if place in objects:
            raise RefusedError(f"methods holds {method.name} twice. Keep one of them.")
        objects[place] = method
    return objects, options


def separate_metrics(metrics: Sequence[object] | None) -> tuple[list[str], dict[str, Metric]]:
    """Return the names of all metrics, and a dictionary of the metrics that are Python objects.

    A function that another process can import has its full path as its name, such as
    "mine.metrics.brier".
    metrics: names, functions and objects `raysim.Metric`; None for none.
    Raise `RefusedError` for anything else.
    """
    if metrics is None:
        return [], {}
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise RefusedError(f"metrics={metrics!r} is not a list. Write metrics=[...].")
    names: list[str] = []
    own_metrics: dict[str, Metric] = {}
    for metric in metrics:
        if isinstance(metric, str):
            names.append(metric)
            continue
        if not isinstance(metric, Metric) and (isinstance(metric, type) or not callable(metric)):
            raise _wrong_object("metrics", metric, "give a function, a raysim.Metric, or a name")
        described = metric if isinstance(metric, Metric) else Metric(metric)
        function: Any = described.function
        name = described.title
        is_plain = described == Metric(function) and inspect.isfunction(function)
        if is_plain and _is_importable(function):
            name = f"{function.__module__}.{function.__qualname__}"
        names.append(name)
        own_metrics[name] = described
    return names, own_metrics


def describe_objects(
    objects: Mapping[str, object], settings: Mapping[str, Overrides], config: Node
) -> UserObjects:
    """Return the user's objects, and the entries of the configuration that describe them.

    Arrays, tables, lists of rows and networks are wrapped in objects of raysim. Overrides can
    change only the settings of these wrappers.
    objects: the objects by group or by "method.NAME".
    settings: the overrides of the wrappers, by the keys of `objects`.
    config: the configuration; for a resumed run, with the stored settings of the wrappers.
    Raise `RefusedError` for an object of a wrong type, and for an override without effect.
    """
    parts: dict[str, object] = {}
    for place, part in objects.items():
        overrides = settings.get(place, {})
        if _needs_wrapper(place, part):
            parts[place] = _wrap(place, part, overrides, config.get(place))
            continue
        if place in PARTS and not hasattr(part, PARTS[place]):
            advice = f"it has no method '{PARTS[place]}'"
            if place == "model":
                advice = (
                    "give a torch.nn.Module, its class or a function that makes one, "
                    "a raysim.ModelRecipe, or a name"
                )
            raise _wrong_object(place, part, advice)
        if place in PARTS and isinstance(part, type):
            raise _wrong_object(place, part, advice="")
        for key, override in overrides.items():
            raise _useless_override_error(place, part, key, override)
        parts[place] = part
    return UserObjects(parts, {place: object_node(part) for place, part in parts.items()})


def _wrong_object(argument: str, part: object, advice: str) -> RefusedError:
    if isinstance(part, type):
        name = part.__name__
        return RefusedError(f"{argument}={name} is a class. Give an object of it, {name}(...).")
    return RefusedError(f"{argument}={part!r} cannot be used: {advice}")


def _useless_override_error(place: str, part: object, key: str, override: SetValue) -> RefusedError:
    """Return the error for an override that has no effect, because the user passed an object.

    place: the key of the object, such as "model" or "method.fedprox".
    part: the object, function or class that the user passed.
    key: the key below `place`, such as "width".
    """
    maker: Any = part if inspect.isfunction(part) or isinstance(part, type) else type(part)
    name = maker.__name__
    argument = key.split(".")[0]
    advice = "Leave the override out."
    if argument in inspect.signature(maker).parameters:
        advice = f"Pass {name}({argument}=...) instead."
        if inspect.isfunction(part):
            advice = f"Pass functools.partial({name}, {argument}=...) instead."
    return RefusedError(
        f"{place}.{key}: the override '{override.text}' has no effect, because {name} was passed "
        f"to raysim.run as the argument {_argument(place)}. {advice}"
    )


def _needs_wrapper(place: str, part: object) -> bool:
    """Return True if raysim must wrap an object that the user gave.

    Data without a method `read`, lists of each client's rows, PyTorch modules and their classes,
    and functions that make modules need a wrapper.
    place: the group of the object, such as "data".
    """
    if place == "data":
        return not hasattr(part, PARTS["data"])
    if place == "partition":
        return is_lists_of_rows(part)
    return place == "model" and _makes_module(part)


def _makes_module(part: object) -> bool:
    """Return True if an object is a PyTorch module, a subclass of `nn.Module`, or any function.

    A `functools.partial` of such a class or function also counts, unless the partial stores
    positional arguments.
    """
    if isinstance(part, functools.partial) and not part.args:
        part = part.func
    is_module_class = isinstance(part, type) and issubclass(part, nn.Module)
    return isinstance(part, nn.Module) or inspect.isfunction(part) or is_module_class


def _wrap(place: str, part: Any, overrides: Overrides, stored: object) -> object:
    if place == "model":
        return _wrap_network(part, overrides, stored)
    if place == "data":
        if is_table(part):
            settings = _wrapper_settings(Parquet, place, overrides, stored, "root")
            return store_table(part, settings)
        return store_arrays(part, _wrapper_settings(Arrays, place, overrides, stored, "digest"))
    return store_lists(part, _wrapper_settings(Listed, place, overrides, stored, "file"))


def _wrapper_settings(
    cls: type, place: str, overrides: Overrides, stored: object, computed: str
) -> dict[str, Any]:
    """Return the checked arguments of a class that wraps the user's data or partition.

    The values come from the overrides, or else from the stored configuration.
    stored: the group's stored node in a resumed run, or None.
    computed: the argument that the user cannot set and that is left out, such as "digest".
    """
    names = [name for name in _argument_names(cls) if name != computed]
    for key in overrides:
        name = key.split(".")[0]
        if name not in names:
            valid = suggest(name, names, f"{place} from Python has")
            raise RefusedError(
                f"{place}.{key}: there is no such setting for the argument {place} of raysim.run: "
                f"{valid}"
            )
    target = f"{cls.__module__}.{cls.__qualname__}"
    values = _stored_values(stored, target, computed)
    return arguments(cls, _merge(values, overrides), place, later=[computed])


def _wrap_network(part: Any, overrides: Overrides, stored: object) -> CustomModel:
    """Return a description from which workers can make the user's network.

    part: a network, or a class, function or `functools.partial` that makes one.
    overrides: the values of `head`, `lora` and the arguments of the class or function.
    stored: in a resumed run, the entry of config.yaml that describes the network; else None.
    """
    source, fixed = part, {}
    if isinstance(part, functools.partial):
        source, fixed = part.func, part.keywords
    is_module = isinstance(source, nn.Module)
    parameters = [] if is_module else list(inspect.signature(source).parameters)
    for key, override in overrides.items():
        name = key.split(".")[0]
        if name in fixed:
            raise RefusedError(
                f"model.{key}: '{override.text}' has no effect, because functools.partial sets "
                f"{name}={fixed[name]!r}. Keep one of them."
            )
        if name not in (*parameters, *CUSTOM_MODEL_KEYS):
            raise _useless_override_error("model", source, key, override)
    target = _network_node(CustomModel(source))[TARGET]
    values = _merge(_stored_values(stored, target, *fixed), overrides)
    recipe_values = {key: values.pop(key) for key in CUSTOM_MODEL_KEYS if key in values}
    recipe = build_object(ExternalModel, recipe_values, "model")
    options = {}
    if values and not is_module:
        options = arguments(source, values, "model", later=parameters)
    return CustomModel(source, {**options, **fixed}, head=recipe.head, lora=recipe.lora)


def _stored_values(stored: object, target: str, *without: str) -> Node:
    """Return the values in an entry of a stored configuration; {} if its class is not `target`.

    stored: the entry, or None.
    target: the full name of a class or function.
    without: names of values that are left out.
    """
    if not isinstance(stored, Mapping) or stored.get(TARGET) != target:
        return {}
    return {key: value for key, value in stored.items() if key not in (TARGET, OBJECT, *without)}


def _merge(values: Mapping[str, Any], overrides: Overrides) -> Node:
    """Return the values after setting the overrides in them.

    The key "rotation.per" sets the entry "per" of the value "rotation".
    """
    merged = copy.deepcopy(dict(values))
    for key, override in overrides.items():
        *outer_names, name = key.split(".")
        node = merged
        for outer_name in outer_names:
            if not isinstance(node.get(outer_name), dict):
                node[outer_name] = {}
            node = node[outer_name]
        value = override.value
        node[name] = {**node.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def _title(part: object) -> str:
    """Return the name of a user's object for titles and tables.

    part: an object, or a `CustomModel` that holds the network's class or function.
    """
    source = part.source if isinstance(part, CustomModel) else part
    return str(getattr(source, "__name__", type(source).__name__)).strip("<>").lower()


# --- stored objects that are missing --------------------------------------------------------------
def has_objects(config: Mapping[str, Any]) -> bool:
    """Return True if the user must give Python objects again to continue or load a run.

    config: the run's configuration. If a file cannot store an object, the configuration only
    describes the object.
    """
    nested = [value for value in config.values() if isinstance(value, Mapping)]
    return OBJECT in config or any(has_objects(node) for node in nested)


def refuse_missing(node: Mapping[str, Any], place: str) -> None:
    """Raise `RefusedError` if a stored run needs a Python object that its config.yaml cannot store.

    The user has to give this object again.
    node: an entry of the stored configuration.
    place: the key of this entry, such as "model" or "method.fedprox", for the error.
    """
    if OBJECT in node:
        kind, name = node[OBJECT], node[TARGET]  # "an object from Python", "package.Class"
        raise RefusedError(
            f"{place}: this run was started with {kind} ({name}), which config.yaml cannot store; "
            f"{_give_again(place)}"
        )


def _give_again(place: str) -> str:
    argument = f"{_argument(place)}=..."
    run_call = f"raysim.run({argument}, out=DIR, resume='latest')"
    load_call = f"raysim.load(DIR, {argument})"
    return f"give it again to continue the run, {run_call}, or to load it, {load_call}"


def _argument(place: str) -> str:
    return "methods" if place.startswith("method.") else place


# --- an object as a file has it -------------------------------------------------------------------
def object_node(part: object) -> Node:
    """Return the configuration node of an object: its class and its constructor's arguments.

    If a file cannot store the class or the arguments, the node only describes the object.
    """
    if isinstance(part, CustomModel):
        return _network_node(part)
    if inspect.isfunction(part):
        function_node: Node = {TARGET: f"{part.__module__}.{part.__qualname__}"}
        if not _is_importable(part):
            function_node[OBJECT] = "a function from Python"
        return function_node
    cls = type(part)
    target = f"{cls.__module__}.{cls.__qualname__}"
    node: Node = {TARGET: target}
    try:
        node |= {name: _plain_value(getattr(part, name)) for name in _argument_names(cls)}
        if _is_importable(cls) and _are_equal(build_object(cls, node, target), part):
            return node
    except (AttributeError, TypeError, ValueError, NameError):
        pass
    return {TARGET: target, OBJECT: "an object from Python"}


def _network_node(part: CustomModel) -> Node:
    """Return the configuration node of a user's network.

    The node names the class or function that makes the network, with the arguments. If a file
    cannot store them, the node only describes the network.
    """
    source = part.source
    is_maker = inspect.isfunction(source) or isinstance(source, type)
    maker: Any = source if is_maker else type(source)
    node: Node = {TARGET: f"{maker.__module__}.{maker.__qualname__}"}
    usual = ExternalModel()
    recipe = {
        key: _plain_value(getattr(part, key))
        for key in CUSTOM_MODEL_KEYS
        if getattr(part, key) != getattr(usual, key)
    }
    try:
        if is_maker and _is_importable(maker):
            return {**node, **_plain_value(dict(part.options)), **recipe}
    except TypeError:
        pass
    return {**node, OBJECT: "an object from Python", **recipe}


def _argument_names(cls: type) -> list[str]:
    """Return the names of a constructor's arguments.

    Raise `TypeError` if the constructor has `*args`, `**kwargs` or positional-only arguments.
    """
    parameters = inspect.signature(cls).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{cls.__name__}: the constructor's argument {parameter} cannot be set by name. "
                "Replace *args, **kwargs and positional-only arguments by named ones."
            )
    return [parameter.name for parameter in parameters]


def _plain_value(value: Any) -> Any:
    """Convert a value to one that files can store. Raise `TypeError` if that is impossible."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain_value(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain_value(getattr(value, field.name))
            for field in fields(value)
            if field.init
        }
    raise TypeError(
        f"config.yaml cannot store a value of type {type(value).__name__}. Use numbers, texts, "
        "None, and lists, dictionaries and dataclasses of them."
    )


def _is_importable(cls: Any) -> bool:
    """Return True if another process can import the class or function by name.

    A class in `__main__` or inside a function or class cannot be imported.
    """
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        return False
    try:
        module = importlib.import_module(cls.__module__)
    except ImportError:  # a module that a program made has no file
        return False
    return getattr(module, cls.__name__, None) is cls


def _are_equal(first: object, second: object) -> bool:
    """Return True if two objects have equal attributes; a tuple counts as a list."""
    values, other_values = _attributes(first), _attributes(second)
    if values.keys() != other_values.keys():
        return False
    return all(_are_equal_values(values[name], other_values[name]) for name in values)


def _attributes(part: object) -> dict[str, Any]:
    if is_dataclass(part):
        return {field.name: getattr(part, field.name) for field in fields(part)}
    return vars(part)


def _are_equal_values(first: Any, second: Any) -> bool:
    try:
        return bool(_plain_value(first) == _plain_value(second))
    except TypeError:
        return pickle.dumps(first) == pickle.dumps(second)
