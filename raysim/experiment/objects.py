"""Parts of a run that a user gives as objects from Python, and how the stored configuration tells of them.

An object whose class can be imported and whose constructor's arguments are plain values is written like any option: by
its class and these arguments. So its run is repeated and continued like any other. Of everything else (a lambda, a
module built by hand, a class of a notebook) the configuration says what it was, and that it has to be given again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType
from typing import Any

import numpy as np
from torch import nn

from raysim.api.composition import check_name
from raysim.api.method import Method
from raysim.data.arrays import arrays
from raysim.data.listed import is_listed, listed
from raysim.experiment.compose import Node
from raysim.experiment.instantiate import TARGET, build
from raysim.models.split import Foreign, Own
from raysim.primitives.errors import Refused

OBJECT = "_object_"  # in place of the arguments that no file can hold
PARTS = {  # what an object of each group must have
    "schedule": "decide",
    "fleet": "devices",
    "data": "read",
    "partition": "split",
    "model": "build",
    "loss": "__call__",
}


@dataclass(frozen=True)
class Given:
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
                raise Refused(f"methods holds {name} twice, by its name and as an object: keep one of them")
            else:
                config[group][name] = node
                config["choices"][group] = [*config["choices"][group], name]
        return config

    def warnings(self) -> list[str]:
        """A sentence for each part that the run cannot be continued without."""
        kept = [place for place, node in self.nodes.items() if OBJECT in node]
        return [f"{_argument(place)}: config.yaml cannot hold this object; {_again(place)}" for place in kept]


def given(parts: Mapping[str, object], methods: Sequence[object] | None = None) -> tuple[Given, dict[str, object]]:
    """Objects, and names of options by their group, apart. Raises Refused.

    parts: for each group an object, a name or (of all but data) values by key; None where nothing was given; partition
    may be lists of rows. methods: objects and names.
    """
    if is_listed(rows := parts.get("partition")):
        parts = {**parts, "partition": listed(rows)}  # type: ignore[arg-type]
    named = {group: (str,) if group == "data" else (str, Mapping) for group in parts}
    chosen: dict[str, object] = {group: part for group, part in parts.items() if isinstance(part, named[group])}
    found = {group: part for group, part in parts.items() if part is not None and group not in chosen}
    if "data" in found and not hasattr(found["data"], PARTS["data"]):
        found["data"] = arrays(found["data"])
    if "model" in found and _makes_module(found["model"]):
        found["model"] = _own(found["model"])
    for group, part in found.items():
        why = "give a torch.nn.Module, its class or a function that makes one, a raysim.ModelRecipe, or a name"
        why = why if group == "model" else f"it has no method '{PARTS[group]}'"
        _check(group, part, hasattr(part, PARTS[group]), why)
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
    return Given(found, {place: written(part) for place, part in found.items()}), chosen


def _makes_module(part: object) -> bool:
    """Whether it is a module, its class, or a function that makes one, perhaps with some arguments given by name."""
    if isinstance(part, functools.partial) and not part.args:
        part = part.func
    return (
        isinstance(part, nn.Module)
        or inspect.isfunction(part)
        or (isinstance(part, type) and issubclass(part, nn.Module))
    )


def _own(part: Any) -> Own:
    return Own(part.func, part.keywords) if isinstance(part, functools.partial) else Own(part)


def _title(part: object) -> str:
    """What a part is called in titles and tables."""
    source = part.source if isinstance(part, Own) else part
    return str(getattr(source, "__name__", type(source).__name__)).strip("<>").lower()


def _check(argument: str, part: object, fits: bool, why: str) -> None:
    if isinstance(part, type):
        raise Refused(f"{argument}={part.__name__} is a class: give an object of it, {part.__name__}(...)")
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
def written(part: object) -> Node:
    """The node of an object: its class, and the arguments that make an equal one, or what it is."""
    if isinstance(part, Own):
        return _written_network(part)
    if inspect.isfunction(part):
        named: Node = {TARGET: f"{part.__module__}.{part.__qualname__}"}
        return named if _importable(part) else named | {OBJECT: "a function from Python"}
    cls = type(part)
    target = f"{cls.__module__}.{cls.__qualname__}"
    node: Node = {TARGET: target}
    try:
        node |= {key: _plain(getattr(part, key)) for key in _arguments(cls)}
        if _importable(cls) and _equal(build(cls, node, target), part):
            return node
    except (AttributeError, TypeError, ValueError, NameError):
        pass
    return {TARGET: target, OBJECT: "an object from Python"}


def _written_network(part: Own) -> Node:
    """The node of a network of the user's own, by the function or class that makes it."""
    made = part.source if inspect.isfunction(part.source) or isinstance(part.source, type) else type(part.source)
    node: Node = {TARGET: f"{made.__module__}.{made.__qualname__}"}
    usual = Foreign()
    try:
        ours = {
            key: _plain(getattr(part, key)) for key in ("head", "lora") if getattr(part, key) != getattr(usual, key)
        }
        if made is part.source and _importable(made):
            return {**node, **_plain(dict(part.options)), **ours}
    except TypeError:
        pass
    return node | {OBJECT: "an object from Python"}


def _arguments(cls: type) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY) for each in parameters):
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
