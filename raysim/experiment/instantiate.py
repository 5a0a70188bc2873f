"""A configuration node to an object: keys against the constructor's signature, values against its type annotations.

Only what lies under an allowed prefix is imported. A node is a mapping; `_target_` in it names the class.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from raysim.experiment.plugins import installed_packages
from raysim.primitives.errors import Refused, nearest, suggest
from raysim.primitives.version import __version__

T = TypeVar("T")

TARGET = "_target_"
MISSING = "???"  # how a file says that a value must be given
_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "null",
}


def resolve(target: object, path: str, allow: Sequence[str] = ()) -> type:
    """The class that a `_target_` names. Raises Refused as `import_target` does, and where it is no class."""
    found = import_target(target, path, allow)
    if not isinstance(found, type):
        raise Refused(
            f"{path}.{TARGET}={format_value(target)} is no class: name one, such as raysim.methods.fedprox.FedProx"
        )
    return found


def import_target(target: object, path: str, allow: Sequence[str] = ()) -> object:
    """What a `_target_` names, of whatever type; None where its module has no such name.

    Raises Refused for names outside `raysim`, the allowed prefixes, and the installed packages that bring parts.
    """
    place = f"{path}.{TARGET}={format_value(target)}"
    prefixes = tuple(
        f"{prefix.rstrip('.')}." for prefix in ("raysim", *allow, *installed_packages())
    )
    if not isinstance(target, str) or not target.startswith(prefixes):
        package = str(target).partition(".")[0]
        if package in sys.stdlib_module_names:
            raise Refused(
                f"{place} lies outside raysim, in Python itself: name a class of raysim, or of a package of your own"
            )
        raise Refused(
            f"{place} lies outside raysim: allow its code to run with --allow {package}, if you trust it"
        )
    module, _, name = target.rpartition(".")
    try:
        found: object = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        if module.startswith("raysim."):
            raise Refused(
                f"{place}: raysim {__version__} has no such class. Correct the name"
            ) from error
        raise Refused(
            f"{place} cannot be imported ({error}): correct the name, or install what is missing"
        ) from error
    return found


def build_object(cls: Callable[..., T], node: Mapping[str, Any], path: str) -> T:
    """Call a class with the values of a node. Raises Refused with the key's path for whatever does not fit."""
    values = arguments(cls, node, path)
    try:
        return cls(**values)
    except ValueError as error:
        raise Refused(_placed(str(error), path)) from error


def arguments(
    cls: Callable[..., object], node: Mapping[str, Any], path: str, later: Collection[str] = ()
) -> dict[str, Any]:
    """The checked arguments of a constructor; later: those that it is given when it is called."""
    hints = _hints(cls)
    named = inspect.signature(cls).parameters
    any_key = any(each.kind is each.VAR_KEYWORD for each in named.values())
    parameters = {
        k: each
        for k, each in named.items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    given = {key: value for key, value in node.items() if key != TARGET}
    for key in given:
        if key not in parameters and not any_key:
            has = suggest(str(key), parameters, f"{path or 'a run'} has")
            raise Refused(f"{_join(path, key)} does not exist: {has}")
    for key, parameter in parameters.items():
        if (
            key not in later
            and given.get(key, MISSING if parameter.default is parameter.empty else None) == MISSING
        ):
            raise Refused(
                f"{_join(path, key)} has no default: set it to {describe_type(hints.get(key, object))}"
            )
    return {
        key: convert(value, hints.get(key, object), _join(path, key))
        for key, value in given.items()
    }


def convert(value: Any, kind: Any, path: str) -> Any:
    """The value as the annotation wants it (an integer becomes a float, a mapping a dataclass), or Refused."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        cls = resolve(value[TARGET], path) if TARGET in value else kind
        if not issubclass(cls, kind):
            raise Refused(
                f"{path}.{TARGET}={format_value(value[TARGET])} does not fit there: name a {kind.__name__}"
            )
        return build_object(cls, value, path)
    if get_origin(kind) in (list, tuple) and isinstance(value, str):
        value = _spelt(value, get_args(kind)[0])
    if get_origin(kind) in (list, tuple, Sequence) and isinstance(value, (list, tuple)):
        inner = get_args(kind)[0]
        items = [convert(item, inner, f"{path}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if get_origin(kind) is tuple else items
    if get_origin(kind) is dict and isinstance(value, Mapping):
        inner = get_args(kind)[1]
        return {str(key): convert(item, inner, f"{path}.{key}") for key, item in value.items()}
    if get_origin(kind) in (Union, types.UnionType):
        return _first_fit(value, get_args(kind), path, kind)
    if not _fits(value, kind):
        near = _near(value, kind)
        hint = f"; did you mean {near}?" if near else ""
        raise Refused(f"{path}={format_value(value)} must be {_allowed(kind, value)}{hint}")
    return float(value) if kind is float else value


def _spelt(text: str, inner: Any) -> list[Any]:
    """The items of "a+b" or "1+28+28": a list without brackets, which shells read as patterns."""
    return [int(each) if inner is int and each.isdecimal() else each for each in text.split("+")]


def _first_fit(value: Any, kinds: Sequence[Any], path: str, union: Any) -> Any:
    for kind in kinds:
        try:
            return convert(value, kind, path)
        except Refused:
            continue
    containers = [
        kind
        for kind in kinds
        if get_origin(kind) in (list, tuple) and isinstance(value, (list, tuple))
    ]
    containers += [
        kind for kind in kinds if dataclasses.is_dataclass(kind) and isinstance(value, Mapping)
    ]
    if containers:
        return convert(value, containers[0], path)  # its own sentence says which item is wrong
    near = next((near for kind in kinds if (near := _near(value, kind))), "")
    raise Refused(
        f"{path}={format_value(value)} must be {_allowed(union, value)}{f'; did you mean {near}?' if near else ''}"
    )


def _fits(value: Any, kind: Any) -> bool:
    if kind in (Any, object, inspect.Parameter.empty):
        return True
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if kind is float:
        return (isinstance(value, float) and math.isfinite(value)) or _is_integer(value)
    if kind is int:
        return _is_integer(value)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_integer(value: Any) -> bool:
    """Of 64 bits: what NumPy and torch can count with."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _near(value: Any, kind: Any) -> str:
    """The nearest choice to a misspelt one."""
    choices = (
        [choice for choice in get_args(kind) if isinstance(choice, str)]
        if get_origin(kind) is Literal
        else []
    )
    return nearest(value, choices) if isinstance(value, str) else ""


def _allowed(kind: Any, value: Any) -> str:
    """What an annotation allows, as the answer to a value that it does not."""
    endless = isinstance(value, float) and not math.isfinite(value)
    long = isinstance(value, int) and not isinstance(value, bool) and not _is_integer(value)
    return f"{describe_type(kind)}{', not infinite or nan' if endless else ' of at most 64 bits' if long else ''}"


def describe_type(kind: Any) -> str:
    """What an annotation allows, in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(format_value(choice) for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(part) for part in inner)
    if origin in (list, tuple, Sequence):
        return f"a list ({describe_type(inner[0])} each)"
    if origin is dict:
        return f"a mapping ({describe_type(inner[1])} each)"
    if dataclasses.is_dataclass(kind):
        return (
            f"a mapping with the keys {', '.join(field.name for field in dataclasses.fields(kind))}"
        )
    return _NAMES.get(kind, "a value")


def format_value(value: object) -> str:
    """A value as a user writes it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {format_value(item)}' for key, item in value.items())}}}"
    return str(value)


def _hints(cls: Callable[..., object]) -> dict[str, Any]:
    if dataclasses.is_dataclass(cls):
        return get_type_hints(cls)  # along the classes that it extends, each in its own module
    return get_type_hints(getattr(cls, "__init__") if isinstance(cls, type) else cls)  # noqa: B009


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _placed(message: str, path: str) -> str:
    """A constructor's message with the place in the configuration, unless it names it already."""
    return (
        message
        if not path or path in message or message.startswith(path.rpartition(".")[2])
        else f"{path}: {message}"
    )


def defaults(cls: Callable[..., object]) -> dict[str, Any]:
    """A constructor's arguments with their defaults; nested dataclasses as mappings, "???" where there is none."""
    return {
        key: _default(parameter, cls)
        for key, parameter in inspect.signature(cls).parameters.items()
    }


def _default(parameter: inspect.Parameter, cls: Callable[..., object]) -> Any:
    value = parameter.default
    if value is parameter.empty:
        return MISSING
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name == parameter.name and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
    return _plain(value)


def _plain(value: Any) -> Any:
    """A value as a file has it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value
