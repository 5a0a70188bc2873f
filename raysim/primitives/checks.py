"""One way to check a number that a user gave: the value itself, or ValueError with a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable


def at_least(name: str, value: float, least: float) -> float:
    """The value, if it is a number >= least; else ValueError."""
    if not value >= least:
        raise ValueError(f"{name}={value!r} must be at least {least}")
    return value


def between(name: str, value: float, low: float, high: float) -> float:
    """The value, if low <= value <= high; else ValueError."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r} must lie between {low} and {high}")
    return value


def known(values: Iterable[int | float | None]) -> list[float]:
    """The values that are numbers: None, nan and infinities are left out."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]
