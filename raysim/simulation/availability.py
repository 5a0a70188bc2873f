"""When clients are there: functions of (seed, client, virtual time), so that nothing has to be kept or stored."""

from __future__ import annotations

import math
from array import array
from typing import Protocol

import numpy as np

from raysim.primitives.streams import uniform

AVAILABILITIES = ("always", "diurnal", "markov")
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
