"""Define search spaces: the values that keys may take, and the points that a sweep tries.

This module imports neither Ray nor Hydra.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from raysim.primitives.errors import RefusedError

Point: TypeAlias = dict[str, object]  # a value for each key, as plain data


@dataclass(frozen=True)
class Choice:
    """A list of the values that a sweep tries for one key, in the user's order.

    values: numbers, texts or other values that the key may have.
    """

    values: tuple[object, ...]

    def draw(self, generator: np.random.Generator) -> object:
        """Return a random value of the list; all are equally likely.

        generator: the generator of random numbers.
        """
        return self.values[int(generator.integers(len(self.values)))]

    def corners(self) -> list[object]:
        """Return the values to test before a sweep begins: all of them."""
        return list(self.values)

    def clip(self, value: object) -> object:
        """Return the value if it is in the list, else the first value of the list.

        value: a value that Tune or Optuna suggests.
        """
        return value if value in self.values else self.values[0]


@dataclass(frozen=True)
class Interval:
    """All numbers from low to high, both included, that a sweep may try for one key.

    log: True if each order of magnitude is equally likely.
    whole: True if only integers are drawn.
    """

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def draw(self, generator: np.random.Generator) -> int | float:
        """Return a random number, rounded as `clip` does so that a user can retype it.

        generator: the generator of random numbers.
        """
        low, high = self.low, self.high
        if self.whole:  # both ends must be as likely as the other integers
            low, high = low - 0.5, high + 0.5
        if self.log:
            low = max(low, self.low / 2)
            return self.clip(math.exp(generator.uniform(math.log(low), math.log(high))))
        return self.clip(generator.uniform(low, high))

    def corners(self) -> list[object]:
        """Return the values to test before a sweep begins: both ends."""
        return [self.clip(self.low), self.clip(self.high)]

    def clip(self, value: object) -> int | float:
        """Return the interval's number that is nearest to `value`, with four significant digits.

        In an interval of integers, return an integer. Rounding never leaves the interval.
        """
        number = min(max(float(str(value)), self.low), self.high)
        if self.whole:
            return round(number)
        return min(max(float(f"{number:.4g}"), self.low), self.high)


ValueRange: TypeAlias = Choice | Interval
Space: TypeAlias = Mapping[str, ValueRange]


def check_range(key: str, values: ValueRange) -> ValueRange:
    """Return `values` unchanged. Raise `RefusedError` if no value can be drawn from them.

    key: the searched key, for the error.
    values: the list or the interval for this key.
    """
    if isinstance(values, Choice):
        if not values.values:
            raise RefusedError(
                f"{key} has no values to choose from. Give values, such as {key}=a,b."
            )
        return values
    low, high = values.low, values.high
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise RefusedError(
            f"{key}=interval({low:g}, {high:g}): the ends must be finite and different numbers, "
            "the lower end first. Change them."
        )
    if values.log and low <= 0:
        raise RefusedError(
            f"{key}=tag(log, interval({low:g}, {high:g})): the lower end must be above 0 for a "
            "logarithm. Set it above 0, or leave tag(log, ...) out."
        )
    return values


def random_points(space: Space, count: int, generator: np.random.Generator) -> list[Point]:
    """Return `count` independent random points.

    A larger `count` with the same seed of the generator gives the same points, and then more.
    space: the list or the interval of each searched key.
    generator: the generator of random numbers.
    """
    points = []
    for _ in range(count):
        points.append({key: values.draw(generator) for key, values in space.items()})
    return points


def grid_points(space: Space) -> list[Point]:
    """Return all combinations of the values; the last key changes fastest.

    Raise `RefusedError` if a key has an interval instead of a list.
    """
    lists = []
    for key, values in space.items():
        if isinstance(values, Interval):
            ends = f"{values.low:g},{values.high:g}"
            raise RefusedError(
                f"{key}: sweep.search=grid needs a list of values, not an interval. "
                f"Write {key}={ends}, or set sweep.search=random."
            )
        lists.append(values.values)
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*lists)]


def corner_points(space: Space) -> list[Point]:
    """Return a few points that together have all listed values, and both ends of all intervals.

    The number of points is the length of the longest list. If a key has an interval, there are at
    least 2 points.
    """
    corners = {key: values.corners() for key, values in space.items()}
    count = max((len(values) for values in corners.values()), default=0)
    points = []
    for index in range(count):
        points.append({key: values[index % len(values)] for key, values in corners.items()})
    return points


def clip_point(space: Space, point: Mapping[str, object]) -> Point:
    """Return the point with each value moved into the list or the interval of its key.

    A number outside of an interval becomes the nearest end. Other numbers for an interval are
    rounded, see `Interval.clip`. A value that is not in a list becomes the first value of the list.
    Keys without an entry in `space` keep their values.
    """
    clipped = dict(point)
    for key in space.keys() & point.keys():
        clipped[key] = space[key].clip(point[key])
    return clipped


def distinct_points(points: Sequence[Point]) -> list[Point]:
    """Return each point once, in the order of first appearance.

    points: settings, each with the values of keys; two points are equal if all values are equal.
    """
    return list({json.dumps(point, sort_keys=True): point for point in points}.values())
