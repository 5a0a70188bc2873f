"""Parts of a run that a user gives as objects from Python, and how the stored configuration tells of them.

An object whose class can be imported and whose constructor's arguments are plain values is written like any option: by
its class and these arguments. So its run is repeated and continued like any other. Of everything else (a lambda, a
module built by hand, a class of a notebook) the configuration says what it was, and that it has to be given again.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from raysim.api.composition import check_name
from raysim.api.method import Method
from raysim.data.arrays import Arrays, store_arrays
from raysim.data.listed import Listed, is_lists_of_rows, store_lists
from raysim.experiment.config_files import Node
from raysim.experiment.instantiate import TARGET, arguments, build_object
from raysim.models.split import CustomModel, ExternalModel
from raysim.primitives.errors import Refused, suggest

Overrides: TypeAlias = Mapping[
    str, tuple[Any, str]
]  # values and what the user wrote, by keys below a place

OBJECT = "_object_"  # in place of the arguments that no file can hold
RECIPE = ("head", "lora")  # settings of every network of the user's own
PARTS = {  # what an object of each group must have
    "schedule": "decide",
    "fleet": "devices",
    "data": "read",
    "partition": "split",
    "model": "build",
    "loss": "__call__",
}


@dataclass(frozen=True)
class UserObjects:
    """Objects by their place in the configuration ("model", "method.fedprox"), and its nodes of them."""

    parts: Mapping[str, object] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)

    def into(self, config: Node) -> Node:
        """The configuration with these parts in it; methods come after those that it has. Raises Refused."""
        config = config | {"choices": dict(config["choices"]), "method": dict(config["method"])}
        for place, node in self.nodes.items():
            group, _, name = place.partition(".")
            if not name:
                config[group], config["choices"][group] = node, _title(self.parts[place])
            elif name in config[group]:
                raise Refused(
                    f"methods holds {name} twice, by its name and as an object: keep one of them"
                )
            else:
                config[group][name] = node
                config["choices"][group] = [*config["choices"][group], name]
        return config

    def warnings(self) -> list[str]:
        """A sentence for each part that the run cannot be continued without."""
        kept = [place for place, node in self.nodes.items() if OBJECT in node]
        return [
            f"{_argument(place)}: config.yaml cannot hold this object; {_again(place)}"
            for place in kept
        ]


def separate_objects(
    parts: Mapping[str, object], methods: Sequence[object] | None = None
) -> tuple[dict[str, object], dict[str, object]]:
    """Separate objects, by their place, from names of options, by their group. Raise `Refused` for what is neither.

    parts: for each group an object, a name or (of all but data) values by key; None where nothing was given. Data,
    lists of rows and networks stay as they are: `describe_objects` makes parts of them. methods: objects and names.
    """
    chosen: dict[str, object] = {}
    found: dict[str, object] = {}
    for group, part in parts.items():
        if part is None:
            continue
        is_name = isinstance(part, str)
        has_values = isinstance(part, Mapping) and group != "data" and not _is_wrapped(group, part)
        (chosen if is_name or has_values else found)[group] = part
    if isinstance(methods, (str, Method)) or not isinstance(methods, (Iterable, NoneType)):
        raise Refused(f"methods={methods!r} is no list: write methods=[...]")
    if methods is not None:
        chosen["method"] = [each for each in methods if isinstance(each, str)]
    for method in methods or ():
        if not isinstance(method, str):
            _check("methods", method, isinstance(method, Method), "it is no raysim.Method")
            check_name(method)  # type: ignore[arg-type]
            if (place := f"method.{method.name}") in found:  # type: ignore[attr-defined]
                raise Refused(f"methods holds {place.partition('.')[2]} twice: keep one of them")
            found[place] = method
    return found, chosen


def describe_objects(
    found: Mapping[str, object], settings: Mapping[str, Overrides], config: Node
) -> UserObjects:
    """Return the objects as parts of a run, with the settings that stand next to them. Raise `Refused`.

    settings: for each place, the overrides of its keys. config: the configuration without the objects; what it stores
    of the same arrays, lists or network holds where no setting says otherwise.
    """
    parts: dict[str, object] = {}
    for place, part in found.items():
        overrides = settings.get(place, {})
        if _is_wrapped(place, part):
            parts[place] = _wrapped(place, part, overrides, config.get(place))
            continue
        why = f"it has no method '{PARTS.get(place)}'"
        if place == "model":
            why = "give a torch.nn.Module, its class or a function that makes one, a raysim.ModelRecipe, or a name"
        if place in PARTS:
            _check(place, part, hasattr(part, PARTS[place]), why)
        for key, override in overrides.items():
            _refuse_setting(place, part, key, override)
        parts[place] = part
    return UserObjects(parts, {place: object_node(part) for place, part in parts.items()})


def _is_wrapped(place: str, part: object) -> bool:
    """Whether raysim makes its own part of what was given: of arrays, of lists of rows, of a network."""
    if place == "data":
        return not hasattr(part, PARTS["data"])
    if place == "partition":
        return is_lists_of_rows(part)
    return place == "model" and _makes_module(part)


def _wrapped(place: str, part: Any, overrides: Overrides, stored: object) -> object:
    if place == "model":
        return _network(part, overrides, stored)
    if place == "data":
        return store_arrays(part, _settings_of(Arrays, place, overrides, stored, "digest"))
    return store_lists(part, _settings_of(Listed, place, overrides, stored, "file"))


def _settings_of(
    cls: type, place: str, overrides: Overrides, stored: object, identity: str
) -> dict[str, Any]:
    """Return the checked arguments that overrides and a stored node give to a class; `identity` is no setting."""
    names = [name for name in _arguments(cls) if name != identity]
    for key in overrides:
        if (name := key.split(".")[0]) not in names:
            what = f"{place} from Python has"
            raise Refused(
                f"{place}.{key}: does not exist for an object from Python. {suggest(name, names, what)}"
            )
    before = _stored_values(stored, f"{cls.__module__}.{cls.__qualname__}", identity)
    return arguments(cls, _merged(before, overrides), place, later=[identity])


def _stored_values(stored: object, target: str, *without: str) -> Node:
    """Return the values of a node that a run stored of the same class, or none."""
    if not isinstance(stored, Mapping) or stored.get(TARGET) != target:
        return {}
    return {key: value for key, value in stored.items() if key not in (TARGET, OBJECT, *without)}


def _merged(before: Mapping[str, Any], overrides: Overrides) -> Node:
    """Return values by their keys, with "rotation.per" as an entry of "rotation"."""
    values = copy.deepcopy(dict(before))
    for key, (value, _) in overrides.items():
        *outer, last = key.split(".")
        node = values
        for name in outer:
            if not isinstance(node.get(name), dict):
                node[name] = {}
            node = node[name]
        node[last] = {**node.get(last, {}), **value} if isinstance(value, dict) else value
    return values


def _refuse_setting(place: str, part: object, key: str, override: tuple[object, str]) -> None:
    """Refuse a setting next to an object that was made without it."""
    made: Any = part if inspect.isfunction(part) or isinstance(part, type) else type(part)
    name = made.__name__
    argument = key.split(".")[0]
    text = override[1]
    do = "Leave it out"
    if argument in inspect.signature(made).parameters:
        do = f"Set it in the object, {name}({argument}=...)"
        if inspect.isfunction(part):
            do = f"Set it in the object, functools.partial({name}, {argument}=...)"
    raise Refused(
        f"{place}.{key}: '{text}' has no effect next to {_argument(place)}={name} from Python. {do}"
    )


def _makes_module(part: object) -> bool:
    """Whether it is a module, its class, or a function that makes one, perhaps with some arguments given by name."""
    if isinstance(part, functools.partial) and not part.args:
        part = part.func
    return (
        isinstance(part, nn.Module)
        or inspect.isfunction(part)
        or (isinstance(part, type) and issubclass(part, nn.Module))
    )


def _network(part: Any, overrides: Overrides, stored: object) -> CustomModel:
    """Return the recipe of a user's own network.

    Settings are its head, its adapters, and arguments of what makes it.
    """
    source = part.func if isinstance(part, functools.partial) else part
    fixed: dict[str, Any] = part.keywords if isinstance(part, functools.partial) else {}
    is_module = isinstance(source, nn.Module)
    parameters = [] if is_module else list(inspect.signature(source).parameters)
    for key, override in overrides.items():
        name = key.split(".")[0]
        if name in fixed:
            raise Refused(
                f"model.{key}: '{override[1]}' has no effect next to {name}={fixed[name]!r}. Keep one of them"
            )
        if name not in (*parameters, *RECIPE):
            _refuse_setting("model", source, key, override)
    before = _stored_values(stored, _written_network(CustomModel(source))[TARGET], *fixed)
    values = _merged(before, overrides)
    recipe = build_object(
        ExternalModel, {key: values.pop(key) for key in RECIPE if key in values}, "model"
    )
    options = (
        arguments(source, values, "model", later=parameters) if values and not is_module else {}
    )
    return CustomModel(source, {**options, **fixed}, head=recipe.head, lora=recipe.lora)


def _title(part: object) -> str:
    """What a part is called in titles and tables."""
    source = part.source if isinstance(part, CustomModel) else part
    return str(getattr(source, "__name__", type(source).__name__)).strip("<>").lower()


def _check(argument: str, part: object, fits: bool, why: str) -> None:
    if isinstance(part, type):
        raise Refused(
            f"{argument}={part.__name__} is a class: give an object of it, {part.__name__}(...)"
        )
    if not fits:
        raise Refused(f"{argument}={part!r} does not fit there: {why}")


def refuse_missing(node: Mapping[str, Any], place: str) -> None:
    """Refuse a stored node that stands for an object which is not there."""
    if OBJECT in node:
        raise Refused(f"{place}: {node[TARGET]} was {node[OBJECT]}: {_again(place)}")


def _again(place: str) -> str:
    return f"give it again to go on, raysim.run({_argument(place)}=..., out=DIR, resume='latest')"


def _argument(place: str) -> str:
    return "methods" if place.startswith("method.") else place


# --- an object as a file has it -------------------------------------------------------------------------------------
def object_node(part: object) -> Node:
    """The node of an object: its class, and the arguments that make an equal one, or what it is."""
    if isinstance(part, CustomModel):
        return _written_network(part)
    if inspect.isfunction(part):
        named: Node = {TARGET: f"{part.__module__}.{part.__qualname__}"}
        return named if _importable(part) else named | {OBJECT: "a function from Python"}
    cls = type(part)
    target = f"{cls.__module__}.{cls.__qualname__}"
    node: Node = {TARGET: target}
    try:
        node |= {key: _plain(getattr(part, key)) for key in _arguments(cls)}
        if _importable(cls) and _equal(build_object(cls, node, target), part):
            return node
    except (AttributeError, TypeError, ValueError, NameError):
        pass
    return {TARGET: target, OBJECT: "an object from Python"}


def _written_network(part: CustomModel) -> Node:
    """The node of a network of the user's own, by the function or class that makes it."""
    made = (
        part.source
        if inspect.isfunction(part.source) or isinstance(part.source, type)
        else type(part.source)
    )
    node: Node = {TARGET: f"{made.__module__}.{made.__qualname__}"}
    usual = ExternalModel()
    ours = {
        key: _plain(getattr(part, key))
        for key in RECIPE
        if getattr(part, key) != getattr(usual, key)
    }
    try:
        if made is part.source and _importable(made):
            return {**node, **_plain(dict(part.options)), **ours}
    except TypeError:
        pass
    return {**node, OBJECT: "an object from Python", **ours}


def _arguments(cls: type) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    if any(
        each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY)
        for each in parameters
    ):
        raise TypeError("its arguments have no names")
    return [each.name for each in parameters]


def _plain(value: Any) -> Any:
    """A value as a file has it. Raises TypeError for what none can hold."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(each) for key, each in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value) if each.init}
    raise TypeError(f"{type(value).__name__} is no plain value")


def _importable(cls: Any) -> bool:
    """Whether another process finds the class or function by its name."""
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        return False
    try:
        return getattr(importlib.import_module(cls.__module__), cls.__name__, None) is cls
    except ImportError:  # a module that was made, not found
        return False


def _equal(one: object, other: object) -> bool:
    """Whether two objects of a class have the same attributes, lists and tuples being the same."""
    mine, others = _attributes(one), _attributes(other)
    return mine.keys() == others.keys() and all(_same(mine[key], others[key]) for key in mine)


def _attributes(part: object) -> dict[str, Any]:
    if is_dataclass(part):
        return {each.name: getattr(part, each.name) for each in fields(part)}
    return vars(part)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(_plain(one) == _plain(other))
    except TypeError:
        return pickle.dumps(one) == pickle.dumps(other)
