"""When clients are there: functions of (seed, client, virtual time), so that a run keeps and stores nothing of it.

Each kind answers for one client or for many, and lists who comes and goes after a moment: where hardly anybody is
there, a plan follows that list (see `idle_clients.py`) instead of looking at everybody.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from raysim.primitives.streams import stream

HOUR = 3600.0
DAY = 24 * HOUR
_MANY = (
    1 << 16
)  # clients that are looked at in one operation, so that what it needs on the way stays small
_TURNS = 32  # changes of one client that are put in order at once


class Change(NamedTuple):
    """What happens at one moment: which clients come, and which go."""

    at: float
    came: np.ndarray
    gone: np.ndarray


class Availability(ABC):
    """When each client can be sent off. One of your own says the first two; the others follow from them, slowly."""

    @abstractmethod
    def available(self, client: int, now: float) -> bool:
        """Whether it is there."""

    @abstractmethod
    def next_change(self, client: int, now: float, until: float) -> float:
        """When it next comes or goes after `now`; `until` if not before that, infinity for never."""

    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """bool [clients]: `available` of each, at a moment of its own."""
        return np.array(
            [self.available(*each) for each in zip(clients.tolist(), now.tolist(), strict=True)],
            bool,
        )

    def next_changes(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """float64 [clients]: `next_change` of each, after a moment of its own; infinity for never."""
        moments = zip(clients.tolist(), now.tolist(), strict=True)
        return np.array([self.next_change(*each, math.inf) for each in moments], np.float64)

    def available_clients(self, clients: np.ndarray, now: float) -> np.ndarray:
        """Those of these clients who are there."""
        parts = [clients[part] for part in _parts(len(clients))]
        found = [part[self.are_available(part, np.full(len(part), now))] for part in parts]
        return np.concatenate(found) if found else clients

    def changes(self, clients: np.ndarray, now: float) -> Iterator[Change]:
        """All that happens after `now` among these clients (ascending), in order; ends where nothing does any more.

        The time of every client's next change is kept, and those of the earliest sixteenth are put in order at once: so
        a change costs the same, however many clients there are.
        """
        coming = np.empty(len(clients))  # float64 [clients]
        for part in _parts(len(clients)):
            coming[part] = self.next_changes(clients[part], np.full(len(clients[part]), now))
        several = min(max(1 << 10, len(clients) >> 4), len(clients) - 1)
        while len(first := _finite(np.partition(coming, several)[: several + 1])):
            times, places = self._until(clients, coming, first.max())
            order = np.lexsort((places, times))
            times, who = times[order], clients[places[order]]
            there = self.are_available(who, times)
            starts = np.flatnonzero(np.diff(times, prepend=-math.inf))
            for own in map(slice, starts.tolist(), [*starts[1:].tolist(), len(times)]):
                yield Change(times.item(own.start), who[own][there[own]], who[own][~there[own]])

    def _until(
        self, clients: np.ndarray, coming: np.ndarray, horizon: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Times and places (in `clients`) of what happens up to a moment; `coming` is moved on to what comes after."""
        found: list[tuple[np.ndarray, np.ndarray]] = []
        due = np.flatnonzero(coming <= horizon)
        while len(due) and len(found) < _TURNS:
            found.append((coming[due], due))
            coming[due] = self.next_changes(clients[due], coming[due])
            due = due[coming[due] <= horizon]
        if len(due):  # who comes and goes so often ends it earlier for all
            horizon = np.nextafter(coming[due].min(), -math.inf)
            for times, places in reversed(found):
                late = times > horizon
                coming[places[late]] = times[late]
        times, places = (np.concatenate(each) for each in zip(*found, strict=True))
        return times[times <= horizon], places[times <= horizon]


def floats(values: np.ndarray) -> memoryview[float]:
    """The same memory, for who looks at one value at a time: it gives Python's numbers, at half the cost."""
    return memoryview(values)  # type: ignore[arg-type, call-overload, return-value, unused-ignore]


def ints(values: np.ndarray) -> memoryview[int]:
    """`floats`, of integers."""
    return memoryview(values)  # type: ignore[arg-type, unused-ignore]


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + _MANY) for start in range(0, count, _MANY))


def _finite(times: np.ndarray) -> np.ndarray:
    return times[times < math.inf]


def _place(now: float, length: float) -> int:
    """In which stretch of this length `now` lies; the quotient alone may be rounded to a neighbour."""
    place = math.floor(now / length)
    return (
        place + 1 if (place + 1) * length <= now else place - 1 if place * length > now else place
    )


def _places(now: np.ndarray, length: float | np.ndarray) -> np.ndarray:
    """`_place` of each."""
    place = np.floor(now / length)
    return place + ((place + 1) * length <= now) - (place * length > now)


class Diurnal(Availability):
    """There for so many hours of every day, from midnight of the client's own time zone.

    zones: int [clients], hours by which local midnight comes after the start of the virtual clock.
    """

    def __init__(self, zones: np.ndarray, hours: float):
        self._midnights = np.asarray(zones, np.float64) * HOUR
        self._midnight = floats(self._midnights)
        self._length = hours * HOUR

    def available(self, client: int, now: float) -> bool:
        """See `Availability`."""
        midnight = self._midnight[client]
        return now < midnight + (_place(now - midnight, DAY) * DAY + self._length)

    def next_change(self, client: int, now: float, until: float) -> float:
        """See `Availability`."""
        midnight = self._midnight[client]
        days = _place(now - midnight, DAY)
        ends = midnight + (days * DAY + self._length)
        return min(ends if ends > now else midnight + (days + 1) * DAY, until)

    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """See `Availability`."""
        midnight = self._midnights[clients]
        return np.asarray(now < midnight + (_places(now - midnight, DAY) * DAY + self._length))

    def next_changes(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """See `Availability`."""
        midnight = self._midnights[clients]
        days = _places(now - midnight, DAY)
        ends = midnight + (days * DAY + self._length)
        return np.asarray(np.where(ends > now, ends, midnight + (days + 1) * DAY))


class _Deal(NamedTuple):
    """How a step decides about clients, by the place (client - start) * turn modulo the prime."""

    start: int
    turn: int
    stride: int  # the inverse of `turn`: whose place is k is start + k * stride
    comes: int  # who has a lower place is there from now on
    goes: int  # who has this place or a higher one is away from now on


class MarkovAvailability(Availability):
    """Comes and goes at random: there for `on` seconds in the mean, and away for `off` seconds.

    A chain of two states in steps of half the shorter mean. At each step every client has a chance q to be there from
    then on, 1 - p - q to stay what it was, and p to be away. Where it is at any time follows from the last step that
    decided, a few steps back, so nothing has to be kept or run from the start.

    A step draws how many come and go, and deals the clients out on so many places: by an affine map modulo a prime. So
    who comes is known without looking at the others, and a client's fate without listing who comes. Of a client, all
    steps are independent; of a step, any two clients are.
    """

    def __init__(self, seed: int, clients: int, on: float, off: float):
        self._seed, self._clients, self._step = seed, clients, min(on, off) / 2
        self._leaves, self._comes = self._step / on, self._step / off  # p, q; each at most 1/2
        self._prime = _prime(max(clients, _MANY))
        self._deals: dict[int, _Deal] = {}

    def _deal(self, step: int) -> _Deal:
        if (found := self._deals.get(step)) is None:
            generator = stream(
                self._seed, "fleet.markov", step % (1 << 64)
            )  # there are steps below 0
            comes, goes, _ = generator.multinomial(
                self._prime, (self._comes, self._leaves, max(0.0, 1 - self._comes - self._leaves))
            ).tolist()
            start, turn = (
                int(generator.integers(self._prime)),
                int(generator.integers(1, self._prime)),
            )
            found = _Deal(start, turn, pow(turn, -1, self._prime), comes, self._prime - goes)
            if len(self._deals) >= 1 << 14:  # some MB
                self._deals.clear()
            self._deals[step] = found
        return found

    def _decides(self, client: int, step: int) -> bool | None:
        deal = self._deals.get(step) or self._deal(step)
        place = (client - deal.start) * deal.turn % self._prime
        return True if place < deal.comes else False if place >= deal.goes else None

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
        if (step + 1) * self._step >= until:
            return until
        state = self._at(client, step)
        while (at := (step := step + 1) * self._step) < until:
            if self._decides(client, step) not in (None, state):
                return at
        return until

    # --- many at once ----------------------------------------------------------------------------------------------
    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """See `Availability`."""
        steps = _places(now, self._step).astype(np.int64)
        found = np.zeros(len(clients), bool)
        for step in np.unique(steps).tolist():
            own = np.flatnonzero(steps == step)
            found[own] = self._all_at(clients[own], step)
        return found

    def _all_at(self, clients: np.ndarray, step: int) -> np.ndarray:
        found, open_ = np.zeros(len(clients), bool), np.arange(len(clients))
        while len(open_):
            deal, places = self._deal(step), self._placed(clients[open_], step)
            found[open_[places < deal.comes]] = True
            open_, step = open_[(places >= deal.comes) & (places < deal.goes)], step - 1
        return found

    def _placed(self, clients: np.ndarray, step: int) -> np.ndarray:
        deal = self._deal(step)
        return np.asarray((clients - deal.start) % self._prime * deal.turn % self._prime)

    def _comers(self, clients: np.ndarray, step: int) -> np.ndarray:
        """Those of these clients (ascending) who are there from this step on, ascending."""
        deal = self._deal(step)
        if deal.comes >= len(clients):
            return np.asarray(clients[self._placed(clients, step) < deal.comes])
        comers = np.sort((np.arange(deal.comes) * deal.stride + deal.start) % self._prime)
        return np.asarray(comers[_among(comers, clients)])

    def changes(self, clients: np.ndarray, now: float) -> Iterator[Change]:
        """See `Availability`."""
        step = _place(now, self._step)
        present = self.available_clients(clients, now)
        while len(clients):
            step += 1
            came = self._comers(clients, step)
            came = came[~_among(came, present)]
            away = self._placed(present, step) >= self._deal(step).goes
            if len(came) or away.any():
                change = Change(step * self._step, came, present[away])
                present = np.sort(np.concatenate([present[~away], came]))
                yield change


def _among(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """bool [some]: who is one of the others (ascending)."""
    if not len(others):
        return np.zeros(len(some), bool)
    return np.asarray(others[np.minimum(np.searchsorted(others, some), len(others) - 1)] == some)


def _prime(least: int) -> int:
    """The smallest prime that is not below `least`."""
    return next(
        n
        for n in range(least | 1, 2 * least + 2, 2)
        if all(n % d for d in range(3, math.isqrt(n) + 1, 2))
    )


class Intervals(Availability):
    """There in given intervals, which repeat after the client's period if they wrap.

    bounds: float64, starts and ends in turn, of one row after the other; first: int [rows + 1], where each row begins
    in `bounds`; periods: float64 [rows] seconds; row_of: int [clients]. At a start a client is there, at an end not.
    """

    def __init__(
        self,
        bounds: np.ndarray,
        first: np.ndarray,
        periods: np.ndarray,
        row_of: np.ndarray,
        wrap: bool,
    ):
        first = np.asarray(first, np.int32 if len(bounds) < 1 << 31 else np.int64)
        self._wrap, self._rows = wrap, np.asarray(row_of, np.int32)
        self._bounds, self._periods = (
            np.asarray(bounds, np.float64),
            np.asarray(periods, np.float64),
        )
        self._firsts, self._lasts = first[:-1], first[1:]
        if (
            wrap
        ):  # what lasts to the end of a period goes on if the next one begins with an interval
            ends = np.flatnonzero(self._lasts > self._firsts)
            ends = ends[self._bounds[self._lasts[ends] - 1] >= self._periods[ends]]
            self._lasts = self._lasts.copy()
            self._lasts[ends] -= 1
        self._bound, self._period, self._row = (
            floats(self._bounds),
            floats(self._periods),
            ints(self._rows),
        )
        self._first, self._last = ints(self._firsts), ints(self._lasts)

    def _look(self, client: int, now: float) -> tuple[int, float, float, int]:
        """Row, begin and end of the period in which `now` lies, and the row's first bound after `now`."""
        row, begin, end = self._row[client], 0.0, math.inf
        if self._wrap:
            cycle, period = _place(now, self._period[row]), self._period[row]
            begin, end = cycle * period, (cycle + 1) * period
        place = bisect_right(self._bound, now, self._first[row], self._last[row], key=begin.__add__)
        return row, begin, end, place

    def available(self, client: int, now: float) -> bool:
        """See `Availability`."""
        row, _, _, place = self._look(client, now)
        return (place - self._first[row]) % 2 == 1

    def next_change(self, client: int, now: float, until: float) -> float:
        """See `Availability`."""
        row, begin, end, place = self._look(client, now)
        first, last = self._first[row], self._last[row]
        if place < last:
            return min(begin + self._bound[place], until)
        if first == last or end == math.inf:
            return until
        starts = self._bound[first] == 0  # with the period
        if starts != (last - first) % 2:
            return min(end, until)
        return min(end + self._bound[first + starts], until) if first + starts < last else until

    def _looks(self, clients: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, ...]:
        """`_look` of each."""
        rows, begin, end = (
            self._rows[clients],
            np.zeros(len(clients)),
            np.full(len(clients), math.inf),
        )
        if self._wrap:
            period = self._periods[rows]
            cycle = _places(now, period)
            begin, end = cycle * period, (cycle + 1) * period
        low, high = self._firsts[rows], self._lasts[rows]
        while len(left := np.flatnonzero(low < high)):
            middle = (low[left] + high[left]) // 2
            passed = begin[left] + self._bounds[middle] <= now[left]
            low[left[passed]] = middle[passed] + 1
            high[left[~passed]] = middle[~passed]
        return rows, begin, end, low

    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """See `Availability`."""
        rows, _, _, places = self._looks(clients, now)
        return np.asarray((places - self._firsts[rows]) % 2 == 1)

    def next_changes(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """See `Availability`."""
        rows, begin, end, places = self._looks(clients, now)
        first, last = self._firsts[rows], self._lasts[rows]
        found = np.full(len(clients), math.inf)
        inside = places < last
        found[inside] = begin[inside] + self._bounds[places[inside]]
        left = np.flatnonzero(~inside & (first < last) & (end < math.inf))
        starts = self._bounds[first[left]] == 0
        turns = starts != (last[left] - first[left]) % 2
        found[left[turns]] = end[left[turns]]
        after = first[left] + starts
        again = ~turns & (after < last[left])
        found[left[again]] = end[left[again]] + self._bounds[after[again]]
        return found
