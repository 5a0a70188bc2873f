"""Search spaces: what values a key may take, and the points that a search looks at; neither Ray nor Hydra."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from raysim.primitives.errors import Refused

Point: TypeAlias = dict[str, object]  # a value of each key; plain data


@dataclass(frozen=True)
class Choice:
    """A list of values, in the order in which they were given."""

    values: tuple[object, ...]

    def draw(self, generator: np.random.Generator) -> object:
        """Any of them."""
        return self.values[int(generator.integers(len(self.values)))]

    def corners(self) -> list[object]:
        """Values that should be tried before a search begins: all."""
        return list(self.values)

    def nearest(self, value: object) -> object:
        """The value itself, if it is one of them."""
        return value if value in self.values else self.values[0]


@dataclass(frozen=True)
class Interval:
    """All numbers from low to high, or all whole ones; with `log`, each order of magnitude is as likely."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def draw(self, generator: np.random.Generator) -> int | float:
        """A number in between, of four digits, which is as much as a person wants to read or repeat."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        if self.log:
            low = max(low, self.low / 2)
            drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
        else:
            drawn = generator.uniform(low, high)
        return self.nearest(drawn)

    def corners(self) -> list[object]:
        """Values that should be tried before a search begins: both ends."""
        return [self.nearest(self.low), self.nearest(self.high)]

    def nearest(self, value: object) -> int | float:
        """A number put back into the interval, whole or rounded to four digits."""
        number = min(max(float(str(value)), self.low), self.high)
        if self.whole:
            return round(number)
        return min(max(float(f"{number:.4g}"), self.low), self.high)


Range: TypeAlias = Choice | Interval
Space: TypeAlias = Mapping[str, Range]


def checked(key: str, found: Range) -> Range:
    """Refuses a range that no search can draw from."""
    if isinstance(found, Choice):
        if not found.values:
            raise Refused(f"{key} has no values to choose from: name some, such as {key}=a,b")
        return found
    if not (math.isfinite(found.low) and math.isfinite(found.high) and found.low < found.high):
        raise Refused(
            f"{key}=interval({found.low:g}, {found.high:g}) is empty: write the lower end first"
        )
    if found.log and found.low <= 0:
        raise Refused(
            f"{key}=tag(log, interval({found.low:g}, {found.high:g})) has no logarithm at its lower end: "
            "set that above 0, or leave tag(log, ...) out"
        )
    return found


def random_points(space: Space, number: int, generator: np.random.Generator) -> list[Point]:
    """Independent draws; the first ones of a longer list are those of a shorter one."""
    return [{key: found.draw(generator) for key, found in space.items()} for _ in range(number)]


def grid(space: Space) -> list[Point]:
    """All combinations, the last key fastest. Raises Refused where a key has a range instead of a list."""
    lists = []
    for key, found in space.items():
        if isinstance(found, Interval):
            raise Refused(
                f"sweep.search=grid needs a list of values of {key}, which has a range: "
                f"write {key}={found.low:g},{found.high:g}, or set sweep.search=random"
            )
        lists.append(found.values)
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def covering(space: Space) -> list[Point]:
    """A few points in which each value of each list, and both ends of each range, occur."""
    corners = {key: found.corners() for key, found in space.items()}
    longest = max((len(each) for each in corners.values()), default=0)
    return [
        {key: each[index % len(each)] for key, each in corners.items()} for index in range(longest)
    ]


def nearest(space: Space, point: Mapping[str, object]) -> Point:
    """A point put back into the space."""
    return {
        key: space[key].nearest(value) if key in space else value for key, value in point.items()
    }


def distinct(points: Sequence[Point]) -> list[Point]:
    """Each point once, in order of first appearance."""
    return list({json.dumps(point, sort_keys=True): point for point in points}.values())
