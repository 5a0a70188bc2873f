"""One way to check a value that a user gave: the value itself comes back, or ValueError says what is allowed.

A number must be finite; nan is in no range, and neither is what is no number. name: the key of the configuration, such
as "local.lr". why: the end of the sentence, such as "it keeps the divisor away from 0".
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
    """A finite number in a range whose ends are allowed (least, most) or not (above, below)."""
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    allowed = [f"{words} {bound:g}" for words, bound in bounds.items() if math.isfinite(bound)]
    if math.isfinite(least) and math.isfinite(most):
        allowed = [f"from {least:g} to {most:g}"]
    elif not allowed or value == math.inf:
        allowed.append("finite")
    words = " and ".join(allowed)
    if not is_number(value):
        return require(name, value, False, f"a number, {words}", why)
    return require(
        name,
        value,
        is_finite(value) and least <= value <= most and above < value < below,
        words,
        why,
    )


def is_number(value: object) -> bool:
    """Whether it is a number, whatever an annotation says: Python and NumPy have several kinds."""
    return isinstance(value, Real)


def is_finite(value: float) -> bool:
    """Whether a number is neither nan nor infinite; an integer never is, even one that no float can hold."""
    return isinstance(value, int) or math.isfinite(value)


def at_least(name: str, value: N, least: float) -> N:
    """A finite number >= least."""
    return in_range(name, value, least=least)


def above(name: str, value: N, bound: float, why: str = "") -> N:
    """A finite number > bound."""
    return in_range(name, value, above=bound, why=why)


def between(name: str, value: N, low: float, high: float) -> N:
    """A number from low to high, both allowed."""
    return in_range(name, value, least=low, most=high)


def one_of(name: str, value: V, allowed: Collection[object]) -> V:
    """One of the allowed values; the sentence names all of them, and the nearest one to a misspelt name."""
    if value in list(allowed):  # a mapping or a set would want to hash it
        return value
    near = (
        nearest(value, [each for each in allowed if isinstance(each, str)])
        if isinstance(value, str)
        else ""
    )
    meant = f"; did you mean {near!r}?" if near else ""
    raise ValueError(
        f"{name}={value!r} does not exist: use one of {', '.join(map(repr, allowed))}{meant}"
    )


def require(name: str, value: V, holds: object, allowed: str, why: str = "") -> V:
    """Any value for which `holds` is true; allowed: such values in words."""
    if not holds:
        raise ValueError(f"{name}={value!r} must be {allowed}{f': {why}' if why else ''}")
    return value


def finite_values(values: Iterable[int | float | None]) -> list[float]:
    """The values that are numbers: None, nan and infinities are left out."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]
