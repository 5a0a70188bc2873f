"""Check a user's value; return it, or raise `ValueError` with the allowed values.

Numbers must be finite. The argument `name` is the key of the configuration, such as "local.lr", and
`why` is the end of the error, such as "it keeps the divisor away from 0".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from numbers import Real
from typing import TypeVar

from raysim.primitives.errors import nearest

N = TypeVar("N", bound=float)
V = TypeVar("V")


def in_range(
    name: str,
    value: N,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    why: str = "",
) -> N:
    """Return the number. Raise ValueError unless it is finite and inside the range.

    name: the key of the setting, for the error.
    least, most: inclusive limits.
    above, below: exclusive limits.
    why: the reason, for the end of the error; "" gives no reason.
    """
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    allowed = [f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound)]
    if math.isfinite(least) and math.isfinite(most):
        allowed = [f"from {least:g} to {most:g}"]
    elif not allowed or value == math.inf:
        allowed.append("finite")
    words = " and ".join(allowed)
    if not is_number(value):
        return require(name, value, False, f"a number, {words}", why)
    is_inside = least <= value <= most and above < value < below
    return require(name, value, is_finite(value) and is_inside, words, why)


def is_number(value: object) -> bool:
    """Return True if a value is a real number of Python or NumPy; Python's bools are numbers."""
    return isinstance(value, Real)


def is_finite(value: float) -> bool:
    """Return True if a number is neither nan nor infinite; an integer of any size is finite."""
    return isinstance(value, int) or math.isfinite(value)


def at_least(name: str, value: N, least: float) -> N:
    """Return the number. Raise ValueError unless it is finite and >= least.

    name: the key of the setting, for the error.
    """
    return in_range(name, value, least=least)


def above(name: str, value: N, bound: float, why: str = "") -> N:
    """Return the number. Raise ValueError unless it is finite and > bound.

    name: the key of the setting, for the error.
    why: the reason for the bound, for the end of the error; "" gives no reason.
    """
    return in_range(name, value, above=bound, why=why)


def between(name: str, value: N, low: float, high: float) -> N:
    """Return the number. Raise ValueError unless it is from low to high, both included.

    name: the key of the setting, for the error.
    """
    return in_range(name, value, least=low, most=high)


def one_of(name: str, value: V, allowed: Collection[object]) -> V:
    """Return the value. Raise ValueError if it is not one of the allowed values.

    The error lists these, and suggests the most similar one if the value is text.
    name: the key of the setting, for the error.
    """
    if value in list(allowed):  # a mapping or a set would hash it
        return value
    near = ""
    if isinstance(value, str):
        near = nearest(value, [choice for choice in allowed if isinstance(choice, str)])
    hint = f"; did you mean {near!r}?" if near else ""
    choices = ", ".join(map(repr, allowed))
    raise ValueError(f"{name}={value!r} does not exist: use one of {choices}{hint}")


def require(name: str, value: V, holds: object, allowed: str, why: str = "") -> V:
    """Return the value. Raise ValueError unless `holds` is true.

    name: the key of the setting, for the error.
    allowed: words for the allowed values, such as "an integer of 1 or more".
    why: the reason, for the end of the error; "" gives no reason.
    """
    if not holds:
        raise ValueError(f"{name}={value!r} must be {allowed}{f': {why}' if why else ''}")
    return value


def finite_values(values: Iterable[int | float | None]) -> list[float]:
    """Return the finite numbers among the values; leave out None, nan and infinities."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]
