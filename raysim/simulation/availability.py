"""When clients are there: functions of (seed, client, virtual time), so that a run keeps and stores nothing of it."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from typing import Protocol

import numpy as np

from raysim.primitives.streams import uniform

HOUR = 3600.0
DAY = 24 * HOUR


class Availability(Protocol):
    """When each client can be sent off."""

    def available(self, client: int, now: float) -> bool:
        """Whether it is there."""
        ...

    def next_change(self, client: int, now: float, until: float) -> float:
        """When it next comes or goes after `now`; `until` if not before that, infinity for never."""
        ...


def _place(now: float, length: float) -> int:
    """In which stretch of this length `now` lies; the quotient alone may be rounded to below the start of one."""
    place = math.floor(now / length)
    return place + 1 if (place + 1) * length <= now else place


class Diurnal:
    """There for so many hours of every day, from midnight of the client's own time zone.

    zones: int [clients], hours by which local midnight comes after the start of the virtual clock.
    """

    def __init__(self, zones: np.ndarray, hours: float):
        self._midnight = array("d", (np.asarray(zones, np.float64) * HOUR).tobytes())
        self._length = hours * HOUR

    def available(self, client: int, now: float) -> bool:
        """See `Availability`."""
        midnight = self._midnight[client]
        return now < midnight + (_place(now - midnight, DAY) * DAY + self._length)

    def next_change(self, client: int, now: float, until: float) -> float:
        """See `Availability`."""
        midnight = self._midnight[client]
        days = _place(now - midnight, DAY)
        ends = (days * DAY + self._length, (days + 1) * DAY, (days + 1) * DAY + self._length)
        return min(next(midnight + end for end in ends if midnight + end > now), until)


class Markov:
    """Comes and goes at random: there for `on` seconds in the mean, and away for `off` seconds.

    A chain of two states in steps of half the shorter mean. Each step has a number of its own that is uniform in
    [0, 1): below q the client is there, from 1 - p on it is away, in between it stays what it was. Where it is at any
    time follows from the last step that decides, a few steps back, so nothing has to be kept or run from the start.
    """

    def __init__(self, seed: int, on: float, off: float):
        self._seed, self._step = seed, min(on, off) / 2
        self._leaves, self._comes = self._step / on, self._step / off  # p, q; each at most 1/2

    def _decides(self, client: int, step: int) -> bool | None:
        number = uniform(self._seed, client, step)
        return True if number < self._comes else False if number >= 1 - self._leaves else None

    def available(self, client: int, now: float) -> bool:
        """See `Availability`."""
        return self._at(client, _place(now, self._step))

    def _at(self, client: int, step: int) -> bool:
        # Steps below 0 are drawn as well: the chain is stationary from the start.
        while (state := self._decides(client, step)) is None:
            step -= 1
        return state

    def next_change(self, client: int, now: float, until: float) -> float:
        """See `Availability`."""
        step = _place(now, self._step)
        state = self._at(client, step)
        while (at := (step := step + 1) * self._step) < until:
            if self._decides(client, step) not in (None, state):
                return at
        return until


class Intervals:
    """There in given intervals, which repeat after the client's period if they wrap.

    bounds: starts and ends in turn, of one row after the other; first: int [rows + 1], where each row begins
    in `bounds`; periods: float64 [rows] seconds; row_of: int [clients]. At a start a client is there, at an end not.
    """

    def __init__(self, bounds: array[float], first: np.ndarray, periods: np.ndarray, row_of: np.ndarray, wrap: bool):
        self._bounds = bounds
        self._first = array("q", np.asarray(first, np.int64).tobytes())
        self._period = array("d", np.asarray(periods, np.float64).tobytes())
        self._row_of, self._wrap = array("i", np.asarray(row_of, np.int32).tobytes()), wrap

    def available(self, client: int, now: float) -> bool:
        """See `Availability`."""
        row = self._row_of[client]
        first, at = self._first[row], now % self._period[row] if self._wrap else now
        return (bisect_right(self._bounds, at, first, self._first[row + 1]) - first) % 2 == 1

    def next_change(self, client: int, now: float, until: float) -> float:
        """See `Availability`."""
        row = self._row_of[client]
        at, period = (now % self._period[row], self._period[row]) if self._wrap else (now, math.inf)
        change = self._after(row, at, period)
        # Rounding must not stop the clock just before a bound.
        return until if change == math.inf else min(max(now - at + change, math.nextafter(now, math.inf)), until)

    def _after(self, row: int, at: float, period: float) -> float:
        """The next change after `at`, which lies in the first period."""
        first, last = self._first[row], self._first[row + 1]
        place = bisect_right(self._bounds, at, first, last)
        if place < last and self._bounds[place] < period:
            return self._bounds[place]
        if period == math.inf or first == last:
            return math.inf
        if place < last and self._bounds[first] == 0:  # there to the period's end, and still there after it
            return period + self._bounds[first + 1] if last - first > 2 else math.inf
        return period + self._bounds[first] if place == last else period
