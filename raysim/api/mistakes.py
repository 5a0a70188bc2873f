"""What a user's hook does wrong, in one sentence, and the lines of a traceback that are the user's own."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from raysim.api.composition import failing_method

T = TypeVar("T")
_OURS = str(Path(__file__).parents[1])


class HookMistake(ValueError):
    """A hook returned or wrote what nobody can use: one sentence with the method, the hook and what to do."""


class Undeclared(HookMistake, KeyError):
    """Private state that no method has declared."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"ctx.state['{self.name}'] is not declared: return it from the method's `state`, or use ctx.kept for what "
            "lasts no longer than a job"
        )


class State(dict[str, Tensor]):
    """Private state by name, which says so of a name that was not declared."""

    def __missing__(self, name: str) -> Tensor:
        raise Undeclared(name)


def returned(value: T, kind: Any, method: str, hook: str, instead: str) -> T:
    """What a hook returned, if it is of this kind, a class. instead: what to return."""
    if not isinstance(value, kind):
        raise _wrong(value, method, hook, instead)
    return value


def scalar(value: Any, method: str, hook: str) -> Tensor:
    """What a hook returned, if it is one number; a shape is known without waiting for the device."""
    if value is None or (isinstance(value, Tensor) and value.numel() != 1):
        raise _wrong(value, method, hook, "a scalar, such as its mean()")
    return value  # type: ignore[no-any-return]


def vector(value: Any, method: str, hook: str, sizes: Mapping[str, int]) -> Tensor:
    """What a hook returned, if it is a vector of one of these sizes, by their names."""
    if not (isinstance(value, Tensor) and value.dim() == 1 and len(value) in sizes.values()):
        names = {size: name for name, size in reversed([*sizes.items()])}  # without buffers the sizes are the same
        allowed = " or ".join(f"[{name}], here [{size}]" for size, name in sorted(names.items()))
        raise _wrong(value, method, hook, f"a tensor of shape {allowed}")
    return value


def _wrong(value: Any, method: str, hook: str, instead: str) -> HookMistake:
    what = "nothing" if value is None else _kind(value)
    return HookMistake(f"method '{method}' returns {what} from {hook}: return {instead}")


def _kind(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def check_report(report: Mapping[str, Any], where: str) -> None:
    """Refuse what is no number in a column of the history."""
    for name, value in report.items():
        on_device = isinstance(value, Tensor) and value.numel() == 1  # wherever it is, it is a number
        if not (isinstance(value, (int, float)) or on_device) and np.asarray(value).dtype.kind not in "biuf":
            raise HookMistake(f"{where}.report['{name}'] is {_kind(value)}: give a number, or leave it out")


def check_state(kept: Mapping[str, Any], before: Collection[str], keepers: Collection[str]) -> None:
    """Refuse private state after a job that lacks an entry it had before, or has one of a method that keeps nothing.

    keepers: names of methods that do. Where there are none, clients keep nothing, and it would be lost without a word.
    """
    for name in kept:
        if name not in before and name.partition(".")[0] not in keepers:
            raise Undeclared(name)
        if not isinstance(kept[name], Tensor):
            raise HookMistake(f"ctx.state['{name}'] is {_kind(kept[name])}: keep a tensor")
    if left := next((name for name in before if name not in kept), ""):
        raise HookMistake(f"ctx.state['{left}'] was removed: put another tensor in its place")


def said(error: BaseException) -> str:
    """What an error says, after its type where that says more."""
    return str(error) if isinstance(error, HookMistake) else f"{type(error).__name__}: {error}"


def traced(error: BaseException) -> str:
    """An error's traceback; of a user's method without raysim's lines, and of a mistake the user's lines alone."""
    method = failing_method(error)
    theirs = method is not None and not type(method).__module__.startswith("raysim.")
    told = traceback.TracebackException.from_exception(error)
    if isinstance(error, HookMistake):  # which has said the rest
        own = _own(told)
        return "".join(["Traceback (most recent call last):\n", *own.format()]) if own else ""
    if theirs:
        link: traceback.TracebackException | None = told
        while link is not None:
            link.stack = _own(link)
            link = link.__cause__ or link.__context__
    return "".join(told.format())


def _own(told: traceback.TracebackException) -> traceback.StackSummary:
    return traceback.StackSummary.from_list([line for line in told.stack if not line.filename.startswith(_OURS)])
