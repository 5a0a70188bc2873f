"""What a user's hook does wrong, in one sentence, and the lines of a traceback that are the user's own."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from raysim.api.composition import failing_method
from raysim.api.declare import Declarations
from raysim.api.setup import number_of_floats

T = TypeVar("T")
_OURS = str(Path(__file__).parents[1])


class HookError(ValueError):
    """A hook returned or wrote what nobody can use: one sentence with the method, the hook and what to do."""


class UndeclaredStateError(HookError, KeyError):
    """Client state that no method has declared."""

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        method, _, name = self.name.partition(".")
        return (
            f"job.state['{name}'] of method '{method}' is not declared. Declare it in the method's "
            f'setup with run.client_state("{name}", ...), or use job.scratch for what is needed '
            "in this job only."
        )


class DeclaredState(dict[str, Tensor]):
    """Client state by name, which says so of a name that was not declared."""

    def __missing__(self, name: str) -> Tensor:
        raise UndeclaredStateError(name)


def check_type(value: T, kind: Any, method: str, hook: str, instead: str) -> T:
    """What a hook returned, if it is of this kind, a class. instead: what to return."""
    if not isinstance(value, kind):
        raise _wrong(value, method, hook, instead)
    return value


def check_draws(values: Any, method: str, name: str, steps: int) -> Sequence[Tensor]:
    """Return what the function of `run.draw` returned, if it has one tensor for each step."""
    hook, instead = f"the function of run.draw({name!r}, ...)", "one tensor for each step"
    tensors: Sequence[Tensor] = check_type(values, (Sequence, Tensor), method, hook, instead)
    if len(tensors) != steps:
        raise HookError(
            f"method '{method}' returns {len(tensors)} tensors from {hook}, and the job has "
            f"{steps} steps. Return {instead}."
        )
    return tensors


def check_scalar(value: Any, method: str, hook: str) -> Tensor:
    """What a hook returned, if it is one number; a shape is known without waiting for the device."""
    if value is None or (isinstance(value, Tensor) and value.numel() != 1):
        raise _wrong(value, method, hook, "a scalar, such as its mean()")
    return value  # type: ignore[no-any-return]


def check_vector(value: Any, method: str, hook: str, sizes: Mapping[str, int]) -> Tensor:
    """What a hook returned, if it is a vector of one of these sizes, by their names."""
    if not (isinstance(value, Tensor) and value.dim() == 1 and len(value) in sizes.values()):
        names = {
            size: name for name, size in reversed([*sizes.items()])
        }  # without buffers the sizes are the same
        allowed = " or ".join(f"[{name}], here [{size}]" for size, name in sorted(names.items()))
        raise _wrong(value, method, hook, f"a tensor of shape {allowed}")
    return value


def _wrong(value: Any, method: str, hook: str, instead: str) -> HookError:
    what = "nothing" if value is None else _kind(value)
    return HookError(f"method '{method}' returns {what} from {hook}: return {instead}")


def _kind(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def check_report(report: Mapping[str, Any], where: str) -> None:
    """Refuse what is no number in a column of the history."""
    for name, value in report.items():
        on_device = (
            isinstance(value, Tensor) and value.numel() == 1
        )  # wherever it is, it is a number
        if (
            not (isinstance(value, (int, float)) or on_device)
            and np.asarray(value).dtype.kind not in "biuf"
        ):
            method, _, column = name.partition(".")
            raise HookError(
                f"{where}.report['{column}'] of method '{method}' is {_kind(value)}. Give a number, "
                "or leave it out."
            )


class StateNames:
    """The names under which the methods of a run may keep client state."""

    def __init__(self, declarations: Declarations):
        self.names = {
            f"{each.method}.{name}" for each in declarations.methods for name in each.client_state
        }

    def __contains__(self, name: str) -> bool:
        return name in self.names


def check_state(state: Mapping[str, Any], before: Collection[str], names: StateNames) -> None:
    """Raise HookError if client state lacks an entry after a job, or has one of another name.

    before: the entries when the job began, which include those of the run's own optimizers.
    """
    for name in state:
        if name not in before and name not in names:
            raise UndeclaredStateError(name)
    missing = next((name for name in before if name not in state), "")
    if missing:
        method, _, name = missing.partition(".")
        raise HookError(
            f"job.state['{name}'] of method '{method}' was removed. Put another value in its place."
        )


def check_upload(upload: Mapping[str, Tensor], declarations: Declarations) -> None:
    """Raise HookError for an upload that is not as a method declared it."""
    for each in declarations.methods:
        prefix = f"{each.method}."
        for key in upload:
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name not in each.uploads:
                raise HookError(
                    f"job.upload['{name}'] is not declared. Declare it in the method's setup: "
                    f'run.upload("{name}", floats).'
                )
        for name, floats in each.uploads.items():
            expected = number_of_floats(floats, declarations.layout)
            tensor = upload.get(prefix + name)
            if tensor is None:
                raise HookError(
                    f"job.upload['{name}'] is missing, and method '{each.method}' declares it. "
                    "Fill it in `end`."
                )
            if tensor.numel() != expected:
                raise HookError(
                    f"job.upload['{name}'] has {tensor.numel()} floats, and {expected} are "
                    f'declared. Correct run.upload("{name}", ...).'
                )


def format_error(error: BaseException) -> str:
    """What an error says, after its type where that says more."""
    return str(error) if isinstance(error, HookError) else f"{type(error).__name__}: {error}"


def format_traceback(error: BaseException) -> str:
    """An error's traceback; of a user's method without raysim's lines, and of a mistake the user's lines alone."""
    method = failing_method(error)
    theirs = method is not None and not type(method).__module__.startswith("raysim.")
    told = traceback.TracebackException.from_exception(error)
    if isinstance(error, HookError):  # which has said the rest
        own = _own(told)
        return "".join(["Traceback (most recent call last):\n", *own.format()]) if own else ""
    if theirs:
        link: traceback.TracebackException | None = told
        while link is not None:
            link.stack = _own(link)
            link = link.__cause__ or link.__context__
    return "".join(told.format())


def _own(told: traceback.TracebackException) -> traceback.StackSummary:
    return traceback.StackSummary.from_list(
        [line for line in told.stack if not line.filename.startswith(_OURS)]
    )
