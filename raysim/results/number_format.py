"""Format the numbers of reports: scores, bytes, times, counts, and means with deviations.

A standard deviation gets the unit and the decimals of its mean. For both, functions get the mean as
the argument `like`, which is None for other numbers. A missing number becomes a dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from raysim.primitives.checks import finite_values
from raysim.results.tables import (
    MISSING,
    FormatNumber,
)
from raysim.results.theme import time_unit

MAX_UNIT_RATIO = 1000  # of the numbers of a column that share a unit


def format_score(value: float | None, *, like: float | None = None) -> str:
    """Return a score as text with four decimals.

    like: has no effect here; other formatting functions use it.
    """
    return MISSING if value is None else f"{value:.4f}"


def format_percent(value: float | None, *, like: float | None = None) -> str:
    """Return a score in percent with two decimals: 81.234 becomes "81.23".

    value: the score in percent, from 0 to 100.
    like: has no effect here; other formatting functions use it.
    """
    return MISSING if value is None else f"{value:.2f}"


def format_number(value: float | None, *, like: float | None = None) -> str:
    """Return a number of any size with at least four digits: 12.3456 becomes "12.35".

    Numbers below 10 get four decimals.
    like: if `value` is a standard deviation, its mean; otherwise None. A standard deviation gets as
    many decimals as its mean.
    """
    if value is None:
        return MISSING
    size = abs(value if like is None else like)
    decimals = 4 if size < 10 else max(0, 3 - int(math.log10(size)))
    return f"{value:.{decimals}f}"


@dataclass(frozen=True)
class UnitFormat:
    """A function that writes numbers with a unit and a prefix: 1234567 B become "1.23 MB".

    unit: the unit without a prefix, such as "B" for bytes.
    """

    unit: str

    def __call__(
        self, value: float | None, *, like: float | None = None, unit_of: float | None = None
    ) -> str:
        """Return a number as text with this unit, and a prefix k, M, G or T for thousands or more.

        value, like, unit_of: the arguments of `format_count`. None as `value` becomes "–".
        """
        text = format_count(value, like=like, unit_of=unit_of)
        if text == MISSING:
            return text
        return f"{text}{self.unit}" if text[-1].isalpha() else f"{text} {self.unit}"


format_bytes = UnitFormat("B")
format_watt_hours = UnitFormat("Wh")
format_grams = UnitFormat("g")  # a mass, such as that of emitted CO2


def format_count(
    value: float | None, *, like: float | None = None, unit_of: float | None = None
) -> str:
    """Return a number as text with the prefix k, M, G or T: 1234567 becomes "1.23 M".

    value: None, for a missing number, becomes "–".
    like: the mean, if `value` is a mean or its standard deviation; otherwise None. The text then
    has the decimals that show three significant digits of the mean. With None, it has at most three
    significant digits below 1000, and no decimals from 1000 on.
    unit_of: a number that decides the prefix in place of `like` or `value`.
    """
    if value is None:
        return MISSING
    size = abs(_first(unit_of, like, value))
    step = min(4, int(math.log10(size) // 3)) if size >= 1000 else 0
    prefix = ("", "k", "M", "G", "T")[step]
    return f"{_format_digits(value, like, 1000**step)} {prefix}".strip()


def format_rounds(value: float | None, *, like: float | None = None) -> str:
    """Return a number of rounds as text: 12.0 becomes "12", and 12.5 becomes "12.5".

    value: None, for a missing number, becomes "–".
    like: if `value` is a standard deviation, its mean; otherwise None. A standard deviation always
    gets one decimal.
    """
    if value is None:
        return MISSING
    return f"{value:.0f}" if like is None and value == int(value) else f"{value:.1f}"


def format_seconds(
    value: float | None, *, like: float | None = None, unit_of: float | None = None
) -> str:
    """Return a time as text in seconds, minutes, hours or days: 7200 becomes "2 h".

    value: the time in seconds; None, for a missing time, becomes "–".
    like, unit_of: as in `format_count`, in seconds. `unit_of` decides the unit.
    """
    if value is None:
        return MISSING
    size, unit = time_unit(_first(unit_of, like, value))
    return f"{_format_digits(value, like, size)} {unit}"


def format_amount(number: int, thing: str) -> str:
    """Return a number with a noun, such as "1 round" or "20 rounds".

    thing: the noun in its singular; it gets an "s" unless `number` is 1.
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _first(*numbers: float | None) -> float:
    """Return the first number that is not None; at least one must not be None."""
    return next(number for number in numbers if number is not None)


def in_common_unit(show: FormatNumber, values: Sequence[float | None]) -> FormatNumber:
    """Return a function that formats all numbers of a column with the same unit.

    It is the unit that fits the smallest number. Return `show` unchanged if the largest is more
    than `MAX_UNIT_RATIO` times the smallest, if `show` writes no units, or if there are no numbers.
    values: None, nan and 0 are ignored.
    """
    sizes = [abs(value) for value in finite_values(values) if value]
    if show not in FORMATS_WITH_UNIT or not sizes or max(sizes) > MAX_UNIT_RATIO * min(sizes):
        return show
    return partial(show, unit_of=min(sizes))


FORMATS_WITH_UNIT = (format_bytes, format_watt_hours, format_grams, format_count, format_seconds)


def _format_digits(value: float, like: float | None, size: float) -> str:
    """Return value / size as text.

    like: if `value` is a mean or its standard deviation, the mean; otherwise None. Both get the
    decimals that show three significant digits of the mean. Another number gets at most three
    significant digits below 1000, and no decimals from 1000 on.
    size: the size of the unit, such as 1000 for k.
    """
    if like is None:
        number = value / size
        return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
    decimals = 0
    if like:
        decimals = max(0, 2 - math.floor(math.log10(abs(like / size))))
    return f"{value / size:.{decimals}f}"


def format_mean(mean: float | None, deviation: float | None, show: FormatNumber) -> str:
    """Return "mean ± deviation" as text, or only the mean if `deviation` is None.

    The unit is only at the end: "7.68 ± 1.55 MB".
    mean: None if it is missing.
    show: function that returns one number as text with its unit. It also takes None.
    """
    if deviation is None:
        return show(mean)
    deviation_text = show(deviation, like=mean)
    _, space, unit = deviation_text.partition(" ")
    mean_text = show(mean, like=mean).removesuffix(f"{space}{unit}")
    return f"{mean_text} ± {deviation_text}"
