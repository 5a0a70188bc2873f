"""Check the values that hooks return and write, and format errors that occur in hooks."""

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
from raysim.primitives.users_lines import is_foreign

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])


class HookError(ValueError):
    """The error of a hook or a learner that returned or wrote a wrong value.

    Its text says which value is wrong, and in most cases which method and which hook.
    """


class UndeclaredStateError(HookError, KeyError):
    """The error of a hook that used client state that its method did not declare."""

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
    """A dictionary of client state; an undeclared name raises UndeclaredStateError."""

    def __missing__(self, name: str) -> Tensor:
        raise UndeclaredStateError(name)


def check_type(value: T, kind: Any, method: str, hook: str, instead: str) -> T:
    """Return `value`, the result of a hook. Raise HookError if its type is not `kind`.

    kind: a type, or a tuple of types, as for `isinstance`.
    method, hook: names for the error.
    instead: the words of the error that say what to return.
    """
    if not isinstance(value, kind):
        raise _wrong(value, method, hook, instead)
    return value


def check_draws(values: Any, method: str, name: str, steps: int) -> Sequence[Tensor]:
    """Return the random tensors of a job. Raise HookError unless there is one for each step.

    values: the result of a method's function for `Setup.draw`.
    method, name: the names of the method and of the tensors, for the error.
    steps: the number of the job's steps.
    """
    hook, instead = f"the function of run.draw({name!r}, ...)", "one tensor for each step"
    tensors: Sequence[Tensor] = check_type(values, (Sequence, Tensor), method, hook, instead)
    if len(tensors) != steps:
        raise HookError(
            f"method '{method}' returns {len(tensors)} tensors from {hook}, but the job has "
            f"{steps} steps. Return {instead}."
        )
    return tensors


def check_scalar(value: Any, method: str, hook: str) -> Tensor:
    """Return `value`, which a hook returned. Raises HookError for None.

    Also raises it for a tensor that does not have exactly one entry.
    method, hook: the names of the method and of the hook, for the error.
    """
    # Reading the value would wait for the device, so only the number of entries is checked.
    if value is None or (isinstance(value, Tensor) and value.numel() != 1):
        raise _wrong(value, method, hook, "a single number, such as the mean over the batch")
    return value  # type: ignore[no-any-return]


def check_vector(value: Any, method: str, hook: str, sizes: Mapping[str, int]) -> Tensor:
    """Return the vector that a hook returned. Raise HookError if its size is not allowed.

    method, hook: names for the error.
    sizes: the allowed numbers of entries, by name, such as {"layout.trained": 80}.
    """
    if not (isinstance(value, Tensor) and value.dim() == 1 and len(value) in sizes.values()):
        # In a model without buffers the sizes are equal; the error then has the first name.
        names = {size: name for name, size in reversed([*sizes.items()])}
        allowed = " or ".join(f"[{name}], here [{size}]" for size, name in sorted(names.items()))
        raise _wrong(value, method, hook, f"a tensor of shape {allowed}")
    return value


def _wrong(value: Any, method: str, hook: str, instead: str) -> HookError:
    what = "nothing" if value is None else _describe(value)
    return HookError(f"method '{method}' returns {what} from {hook}. Return {instead}.")


def _describe(value: Any) -> str:
    """Describe a value by its shape or its type ("a tensor of shape [3]")."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def check_report(report: Mapping[str, Any], where: str) -> None:
    """Raise HookError if a method reports a value for the history whose type is not numeric.

    report: the values by "method.column".
    where: "job" if the values are from `job.report`, "server" if they are from `server.report`.
    """
    for name, value in report.items():
        is_scalar_tensor = isinstance(value, Tensor) and value.numel() == 1
        if isinstance(value, (int, float)) or is_scalar_tensor:
            continue
        if np.asarray(value).dtype.kind in "biuf":
            continue
        method, _, column = name.partition(".")
        raise HookError(
            f"{where}.report['{column}'] of method '{method}' is {_describe(value)}. Give a "
            "number, or leave it out."
        )


def check_metrics(metrics: Any, method: str) -> dict[str, float]:
    """Return the metrics of a set of samples as a dictionary from names to floats.

    Raise HookError if `metrics` is not a mapping, or if a value is not a number.
    metrics: the result of a method's function for `Setup.evaluate`.
    method: the method's name, for the error.
    """
    if not isinstance(metrics, Mapping):
        raise _wrong(metrics, method, "evaluate", "a dictionary of numbers")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            raise HookError(
                f"method '{method}' returns {_describe(value)} as metric '{name}' from evaluate. "
                "Return a number, or leave it out."
            ) from None
    return numbers


class StateNames:
    """The full names of client state, "method.name", that the methods of a run have declared.

    `name in names` is True if a method has declared the name with `Setup.client_state`.
    """

    def __init__(self, declarations: Declarations):
        self.names: set[str] = set()
        for declared in declarations.methods:
            self.names |= {f"{declared.method}.{name}" for name in declared.client_state}

    def __contains__(self, name: str) -> bool:
        return name in self.names


def check_state(state: Mapping[str, Any], before: Collection[str], names: StateNames) -> None:
    """Raise HookError if a job has removed a client state, or added an undeclared one.

    state: the client state at the end of the job, by "method.name".
    before: the names of the entries at the job's start, none of which may be missing.
    names: the names that methods have declared. Only these may be added.
    """
    for name in state:
        if name not in before and name not in names:
            raise UndeclaredStateError(name)
    missing = next((name for name in before if name not in state), "")
    if missing:
        method, _, name = missing.partition(".")
        raise HookError(
            f"job.state['{name}'] of method '{method}' was removed. Assign a new value instead."
        )


def check_upload(upload: Mapping[str, Tensor], declarations: Declarations) -> None:
    """Raise HookError if a job's uploads differ from those that methods have declared.

    upload: tensors by "method.name". No declared name may be missing, and no other name present.
    Sizes must be as declared, unless the method passed `planned` to `Setup.upload`.
    """
    known: set[str] = set()
    for declared in declarations.methods:
        known |= {f"{declared.method}.{name}" for name in declared.uploads}
    for key in upload:
        if key not in known:
            method, _, name = key.partition(".") if "." in key else ("", "", key)
            owner = f" of method '{method}'" if method else ""
            raise HookError(
                f"job.upload['{name}']{owner} is not declared, so the traffic of the run would be "
                "counted without it. "
                f'Declare it in the method\'s setup: run.upload("{name}", floats).'
            )
    for declared in declarations.methods:
        prefix = f"{declared.method}."
        for name, floats in declared.uploads.items():
            expected = number_of_floats(floats, declarations.layout)
            tensor = upload.get(prefix + name)
            if tensor is None:
                raise HookError(
                    f"job.upload['{name}'] is missing, but method '{declared.method}' declares it. "
                    "Assign it in `end`."
                )
            varies = name in declared.planned_uploads
            if tensor.numel() != expected and not varies:
                raise HookError(
                    f"job.upload['{name}'] of method '{declared.method}' has {tensor.numel()} "
                    f"floats, but run.upload('{name}', ...) in `setup` declares {expected}. "
                    "Correct the declaration or the tensor."
                )


def format_error(error: BaseException) -> str:
    """Return the text of an error, with its type unless it is a HookError."""
    if isinstance(error, HookError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an error as text, shortened for the user.

    Lines of raysim's code are left out for an error of a user's method and for every HookError. For
    a HookError, the text lacks the message, because `format_error` returns it; the text is "" if no
    lines remain.
    """
    method = failing_method(error)
    is_users_method = method is not None and not type(method).__module__.startswith("raysim.")
    trace = traceback.TracebackException.from_exception(error)
    if isinstance(error, HookError):
        lines = _users_lines(trace)
        if trace.__cause__ is not None:  # an error of the user's code, which other packages called
            stack = trace.__cause__.stack
            own = [line for line in stack if not is_foreign(Path(line.filename))]
            lines = traceback.StackSummary.from_list(own)
        if not lines:
            return ""
        return "".join(["Traceback (most recent call last):\n", *lines.format()])
    if is_users_method:
        link: traceback.TracebackException | None = trace
        while link is not None:
            link.stack = _users_lines(link)
            link = link.__cause__ or link.__context__
    return "".join(trace.format())


def _users_lines(trace: traceback.TracebackException) -> traceback.StackSummary:
    lines = [line for line in trace.stack if not line.filename.startswith(_PACKAGE)]
    return traceback.StackSummary.from_list(lines)
