"""Make an object from a configuration node: check its keys and convert its values.

A node is a dictionary; the key `_target_` names a class of an allowed package. The constructor's
annotated signature decides which keys and values are valid.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from raysim.experiment.plugins import installed_packages
from raysim.primitives.errors import RefusedError, nearest, suggest
from raysim.primitives.version import __version__

T = TypeVar("T")

TARGET = "_target_"
# Marks a value in a file that the user must set.
MISSING = "???"
_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "null",
}


# --- classes and objects --------------------------------------------------------------------------
def resolve(target: object, path: str, allow: Sequence[str] = ()) -> type:
    """Return the class that a `_target_` names.

    target: the class with its module, such as "raysim.methods.fedprox.FedProx".
    path: the configuration key of the node, for errors.
    allow: further packages that may be used, besides raysim and the installed packages that extend
    it.
    Raise `RefusedError` if the target is no class or may not be imported.
    """
    cls = import_target(target, path, allow)
    if not isinstance(cls, type):
        raise RefusedError(
            f"{path}.{TARGET}={format_value(target)} is not a class. Give a class, such as "
            "raysim.methods.fedprox.FedProx."
        )
    return cls


def import_target(
    target: object, path: str, allow: Sequence[str] = (), key: str = f".{TARGET}"
) -> object:
    """Import an object by its full name; return None if the module has no object of this name.

    target: such as "raysim.methods.fedprox.FedProx".
    path, key: the two halves of the setting's name, such as "model" and "._target_", for errors.
    allow: further packages that may be used, besides raysim and the installed packages that extend
    it.
    Raise `RefusedError` if the package is not allowed, or if the import raises an `ImportError`.
    """
    setting = f"{path}{key}={format_value(target)}"
    packages = ("raysim", *allow, *installed_packages())
    prefixes = tuple(f"{package.rstrip('.')}." for package in packages)
    if not isinstance(target, str) or not target.startswith(prefixes):
        package = str(target).partition(".")[0]
        if package in sys.stdlib_module_names:
            raise RefusedError(
                f"{setting} is a name from Python's standard library, which this setting does not "
                "allow. Give a class of raysim or of your own package."
            )
        raise RefusedError(
            f"{setting} is not part of raysim. If you trust its code, allow it with --allow "
            f"{package}"
        )
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        if module.startswith("raysim."):
            raise RefusedError(
                f"{setting}: raysim {__version__} has no such class. Correct the name."
            ) from error
        raise RefusedError(
            f"{setting} cannot be imported ({error}). Correct the name, or install what is missing."
        ) from error


def build_object(cls: Callable[..., T], node: Mapping[str, Any], path: str) -> T:
    """Call a class with the values of a configuration node; return the object.

    node: the arguments by name. The entry `_target_` is ignored.
    path: the key of `node` in the configuration, for errors.
    Raise `RefusedError` for unknown, missing and wrong arguments.
    """
    values = arguments(cls, node, path)
    try:
        return cls(**values)
    except ValueError as error:
        raise RefusedError(_add_path(str(error), path)) from error


def arguments(
    cls: Callable[..., object], node: Mapping[str, Any], path: str, later: Collection[str] = ()
) -> dict[str, Any]:
    """Return the checked arguments that a configuration node gives to a class.

    node: the arguments by name; `_target_` is ignored.
    path: the key of `node`, for errors.
    later: arguments that may be missing.
    Raise `RefusedError` for unknown, missing and wrong arguments.
    """
    hints = _type_hints(cls)
    signature = inspect.signature(cls).parameters
    takes_any_key = any(param.kind is param.VAR_KEYWORD for param in signature.values())
    parameters = {
        name: param
        for name, param in signature.items()
        if param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
    }
    values = {key: value for key, value in node.items() if key != TARGET}
    for key in values:
        if key not in parameters and not takes_any_key:
            valid = suggest(str(key), parameters, f"{path or 'a run'} has")
            raise RefusedError(f"{_join(path, key)} does not exist: {valid}")
    for key, param in parameters.items():
        default = MISSING if param.default is param.empty else None
        if key not in later and values.get(key, default) == MISSING:
            kind = describe_type(hints.get(key, object))
            raise RefusedError(f"{_join(path, key)} has no default. Set it to {kind}.")
    return {
        key: convert(value, hints.get(key, object), _join(path, key))
        for key, value in values.items()
    }


def defaults(cls: Callable[..., object]) -> dict[str, Any]:
    """Return a constructor's arguments with their defaults, as plain data.

    Nested dataclasses are dictionaries; "???" marks an argument without a default.
    """
    return {name: _default(param, cls) for name, param in inspect.signature(cls).parameters.items()}


def _default(parameter: inspect.Parameter, cls: Callable[..., object]) -> Any:
    if parameter.default is parameter.empty:
        return MISSING
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name == parameter.name and field.default_factory is not dataclasses.MISSING:
            return _plain_data(field.default_factory())
    return _plain_data(parameter.default)


def _plain_data(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_data(inner) for key, inner in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


@functools.cache  # annotations are texts, and evaluating those of one class takes a millisecond
def _type_hints(cls: Callable[..., object]) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(cls):
        # Base classes have their annotations in their own modules.
        return get_type_hints(cls)
    return get_type_hints(getattr(cls, "__init__") if isinstance(cls, type) else cls)  # noqa: B009


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _add_path(message: str, path: str) -> str:
    """Put a key in front of an error message, unless the message already names it.

    path: the key of the configuration node whose values caused the error.
    """
    last_part = path.rpartition(".")[2]
    if not path or path in message or message.startswith(last_part):
        return message
    return f"{path}: {message}"


# --- values ---------------------------------------------------------------------------------------
def convert(value: Any, kind: Any, path: str) -> Any:
    """Convert a value of the configuration to a type, such as an integer to a float.

    A dictionary becomes an object if `kind` is a dataclass.
    kind: a type annotation, such as `list[int]`.
    path: the key of the value, for errors.
    Raise `RefusedError` for a wrong value.
    """
    origin = get_origin(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _build_dataclass(kind, value, path)
    if origin in (list, tuple) and isinstance(value, str):
        value = _split_list(value, get_args(kind)[0])
    if origin in (list, tuple, Sequence) and isinstance(value, (list, tuple)):
        item_kind = get_args(kind)[0]
        items = [convert(item, item_kind, f"{path}[{index}]") for index, item in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict and isinstance(value, Mapping):
        item_kind = get_args(kind)[1]
        return {str(key): convert(item, item_kind, f"{path}.{key}") for key, item in value.items()}
    if origin in (Union, types.UnionType):
        return _convert_to_union(value, kind, path)
    if not _fits(value, kind):
        raise RefusedError(_mismatch_text(value, kind, path))
    return float(value) if kind is float else value


def _build_dataclass(kind: type, value: Mapping[str, Any], path: str) -> Any:
    cls = resolve(value[TARGET], path) if TARGET in value else kind
    if not issubclass(cls, kind):
        raise RefusedError(
            f"{path}.{TARGET}={format_value(value[TARGET])} is not a {kind.__name__}. Give "
            f"{kind.__name__} or a subclass of it."
        )
    return build_object(cls, value, path)


def _split_list(text: str, item_kind: Any) -> list[Any]:
    """Return the items of a text such as "a+b" or "1+28+28" as a list.

    Lists with "+" need no brackets, which shells read as patterns.
    item_kind: the annotation of an item; with `int`, items that are numbers become integers.
    """
    items = text.split("+")
    if item_kind is int:
        return [int(item) if item.isdecimal() else item for item in items]
    return list(items)


def _convert_to_union(value: Any, union: Any, path: str) -> Any:
    """Convert a value to the first type of a union that fits; return the converted value.

    union: the annotation, such as `int | None`.
    path: the key of the value, for errors.
    Raise `RefusedError` if no type fits.
    """
    kinds = get_args(union)
    for kind in kinds:
        try:
            return convert(value, kind, path)
        except RefusedError:
            continue
    for kind in kinds:
        if get_origin(kind) in (list, tuple) and isinstance(value, (list, tuple)):
            return convert(value, kind, path)  # its error names the wrong item
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            return convert(value, kind, path)  # its error names the wrong key
    raise RefusedError(_mismatch_text(value, union, path))


def _fits(value: Any, kind: Any) -> bool:
    if kind in (Any, object, inspect.Parameter.empty):
        return True
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return any(type(value) is type(choice) and value == choice for choice in choices)
    if kind is float:
        is_finite_float = isinstance(value, float) and math.isfinite(value)
        return is_finite_float or _is_integer(value)
    if kind is int:
        return _is_integer(value)
    return isinstance(kind, type) and isinstance(value, kind)


def _is_integer(value: Any) -> bool:
    """Return True if a value is an integer that fits into 64 bits, as NumPy and torch need."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _mismatch_text(value: Any, kind: Any, path: str) -> str:
    """Return the error text for a value that does not fit the type annotation of its argument.

    kind: the annotation.
    path: the key of the value.
    """
    allowed = describe_type(kind)
    if isinstance(value, float) and not math.isfinite(value):
        allowed += ", not infinite or nan"
    elif isinstance(value, int) and not isinstance(value, bool) and not _is_integer(value):
        allowed += " of at most 64 bits"
    near = _nearest_choice(value, kind)
    hint = f"; did you mean {near}?" if near else ""
    return f"{path}={format_value(value)} must be {allowed}{hint}"


def _nearest_choice(value: Any, kind: Any) -> str:
    """Return the allowed text that is most similar to the value; "" if none is similar.

    kind: the `Literal` that lists the allowed texts, or a union that contains a `Literal`.
    """
    if not isinstance(value, str):
        return ""
    is_union = get_origin(kind) in (Union, types.UnionType)
    for member in get_args(kind) if is_union else (kind,):
        if get_origin(member) is not Literal:
            continue
        near = nearest(value, [choice for choice in get_args(member) if isinstance(choice, str)])
        if near:
            return near
    return ""


# --- texts ----------------------------------------------------------------------------------------
def describe_type(kind: Any) -> str:
    """Describe in words which values a type annotation allows.

    kind: the annotation.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(format_value(choice) for choice in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(member) for member in inner)
    if origin in (list, tuple, Sequence):
        return f"a list ({describe_type(inner[0])} each)"
    if origin is dict:
        return f"a mapping ({describe_type(inner[1])} each)"
    if dataclasses.is_dataclass(kind):
        keys = ", ".join(field.name for field in dataclasses.fields(kind))
        return f"a mapping with the keys {keys}"
    return _TYPE_NAMES.get(kind, "a value")


def format_value(value: object) -> str:
    """Return a value as text, as a user writes it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, Mapping):
        items = [f"{key}: {format_value(item)}" for key, item in value.items()]
        return f"{{{','.join(items)}}}"
    return str(value)
