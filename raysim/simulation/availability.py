"""Availability of clients: at which virtual times each client can be dispatched.

The availability depends only on the seed of the run, the client and the virtual time.
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
# The number of clients in one NumPy operation, so that its temporary arrays stay small.
_MANY = 1 << 16
_MAX_CHANGES = 32  # changes of one client that are sorted at once
_MAX_STEPS = 1 << 14  # stored steps of a `MarkovAvailability`; they need some MB


class Change(NamedTuple):
    """The clients whose availability changes at one moment.

    at: the moment in virtual seconds.
    came: the clients that become available.
    gone: the clients that stop being available.
    """

    at: float
    came: np.ndarray
    gone: np.ndarray


class Availability(ABC):
    """The moments at which each client can be dispatched.

    A subclass must define `available` and `next_change`. The other methods of this class call these
    two for one client after another, which is slow. A subclass may define faster ones.
    """

    @abstractmethod
    def available(self, client: int, now: float) -> bool:
        """Return True if the client is available at the virtual time `now`, in seconds."""

    @abstractmethod
    def next_change(self, client: int, now: float, until: float) -> float:
        """Return the first time after `now` at which the client becomes available or unavailable.

        Return `until` if the client does not change before `until`. All times are virtual seconds.
        """

    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Return a bool array [clients]: True if the client is available at its time in `now`.

        now: float64 [clients], a virtual time in seconds for each client.
        """
        moments = zip(clients.tolist(), now.tolist(), strict=True)
        return np.array([self.available(client, moment) for client, moment in moments], bool)

    def next_changes(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Return the time of each client's next change of availability, float64 [clients].

        Infinity means that the client's availability never changes.
        now: float64 [clients], a virtual time in seconds for each client. Only changes after this
        time are considered.
        """
        moments = zip(clients.tolist(), now.tolist(), strict=True)
        times = [self.next_change(client, moment, math.inf) for client, moment in moments]
        return np.array(times, np.float64)

    def available_clients(self, clients: np.ndarray, now: float) -> np.ndarray:
        """Return the entries of `clients` that are available at the virtual time `now`."""
        available = [clients[:0]]
        for place in _blocks(len(clients)):
            block = clients[place]
            available.append(block[self.are_available(block, np.full(len(block), now))])
        return np.concatenate(available)

    def changes(self, clients: np.ndarray, now: float) -> Iterator[Change]:
        """Yield all changes of these clients after the virtual time `now`, the earliest first.

        clients: the numbers of the clients, ascending.
        """
        times = np.empty(len(clients))  # float64 [clients], the time of each client's next change
        for place in _blocks(len(clients)):
            block = clients[place]
            times[place] = self.next_changes(block, np.full(len(block), now))
        # Only the earliest times are sorted, a sixteenth of them but at least 1,024, and then the
        # next ones. So one change costs about the same for any number of clients.
        several = min(max(1 << 10, len(clients) >> 4), len(clients) - 1)
        while True:
            earliest = np.partition(times, several)[: several + 1]
            earliest = earliest[earliest < math.inf]
            if not len(earliest):
                return
            moments, places = self._take_changes(clients, times, earliest.max())
            order = np.lexsort((places, moments))
            moments, changing = moments[order], clients[places[order]]
            came = self.are_available(changing, moments)
            starts = np.flatnonzero(np.diff(moments, prepend=-math.inf)).tolist()
            for start, end in zip(starts, [*starts[1:], len(moments)], strict=True):
                members, has_come = changing[start:end], came[start:end]
                yield Change(moments.item(start), members[has_come], members[~has_come])

    def _take_changes(
        self, clients: np.ndarray, times: np.ndarray, horizon: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return changes of availability up to the virtual time `horizon`, in seconds.

        There are two results: the times of the changes, and the positions in `clients` of the
        clients that change. At most `_MAX_CHANGES` changes of each client are looked up. If a
        client has more changes up to `horizon`, the results of all clients end before the first
        change that was not looked up.

        times: float64 [clients], the time of each client's next change. This function sets it to
        the client's first change that is not returned.
        """
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        due = np.flatnonzero(times <= horizon)
        while len(due) and len(parts) < _MAX_CHANGES:
            parts.append((times[due], due))
            times[due] = self.next_changes(clients[due], times[due])
            due = due[times[due] <= horizon]
        if len(due):
            horizon = np.nextafter(times[due].min(), -math.inf)
            for moments, places in reversed(parts):
                is_late = moments > horizon
                times[places[is_late]] = moments[is_late]
        all_moments = np.concatenate([moments for moments, _ in parts])
        all_places = np.concatenate([places for _, places in parts])
        is_due = all_moments <= horizon
        return all_moments[is_due], all_places[is_due]


def floats(values: np.ndarray) -> memoryview[float]:
    """Return a view of an array of floats.

    Reading one value from the view takes half as long as reading it from the array.
    """
    return memoryview(values)  # type: ignore[arg-type, call-overload, return-value, unused-ignore]


def ints(values: np.ndarray) -> memoryview[int]:
    """Return a view of an array of integers.

    Reading one value from the view takes half as long as reading it from the array.
    """
    return memoryview(values)  # type: ignore[arg-type, unused-ignore]


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + _MANY) for start in range(0, count, _MANY))


def _interval(now: float, length: float) -> int:
    """Return the number k of the interval [k * length, (k + 1) * length) that contains `now`.

    floor(now / length) may be wrong by one, because the quotient is rounded; this is corrected.
    """
    interval = math.floor(now / length)
    if (interval + 1) * length <= now:
        return interval + 1
    if interval * length > now:
        return interval - 1
    return interval


def _intervals(now: np.ndarray, length: float | np.ndarray) -> np.ndarray:
    """Return for each time t the number k with k * length <= t < (k + 1) * length.

    now: float64, the times.
    length: the length of the intervals, or the length for each time.
    """
    interval = np.floor(now / length)
    return interval + ((interval + 1) * length <= now) - (interval * length > now)


class Diurnal(Availability):
    """Clients that are available each day for some hours after the midnight of their time zone.

    midnights: [clients], the virtual time in hours of each client's first midnight.
    hours: the available hours of a day, at most 24.
    """

    def __init__(self, midnights: np.ndarray, hours: float):
        self._midnights = np.asarray(midnights, np.float64) * HOUR
        self._midnight = floats(self._midnights)
        self._length = hours * HOUR

    def available(self, client: int, now: float) -> bool:
        """Return True if the virtual time `now` is in the client's daily available hours."""
        midnight = self._midnight[client]
        return now < midnight + (_interval(now - midnight, DAY) * DAY + self._length)

    def next_change(self, client: int, now: float, until: float) -> float:
        """Return the first time after `now` at which the client's available hours start or end.

        Return `until` if this does not happen before `until`. All times are virtual seconds.
        """
        midnight = self._midnight[client]
        days = _interval(now - midnight, DAY)
        end = midnight + (days * DAY + self._length)
        if end <= now:
            end = midnight + (days + 1) * DAY
        return min(end, until)

    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Return a bool array [clients]: True if the client is available at its time in `now`.

        now: float64 [clients], a virtual time in seconds for each client.
        """
        midnight = self._midnights[clients]
        return np.asarray(now < midnight + (_intervals(now - midnight, DAY) * DAY + self._length))

    def next_changes(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Return the time of each client's next change of availability, float64 [clients].

        now: float64 [clients], a virtual time in seconds for each client. Only changes after this
        time are considered.
        """
        midnight = self._midnights[clients]
        days = _intervals(now - midnight, DAY)
        end = midnight + (days * DAY + self._length)
        return np.asarray(np.where(end > now, end, midnight + (days + 1) * DAY))


class _StepDraw(NamedTuple):
    """The random numbers of one step of `MarkovAvailability`.

    A step puts the clients in a random order, with positions from 0. All numbers are modulo a
    prime:

        position of client c    (c - start) * factor
        client at position k    start + k * inverse

    comes: clients at positions below this number become available.
    goes: clients at this position and at higher ones become unavailable.
    """

    start: int
    factor: int
    inverse: int
    comes: int
    goes: int


class MarkovAvailability(Availability):
    """Clients that switch between available and unavailable after random times.

    This is a Markov chain in steps of s seconds; s is half of the shorter mean. In a step, a client
    becomes available with probability s / `off`, or unavailable with probability s / `on`.
    on, off: the mean seconds for which a client is available, and not available.
    """

    def __init__(self, seed: int, clients: int, on: float, off: float):
        self._seed, self._clients, self._step_s = seed, clients, min(on, off) / 2
        # probabilities of a step, each at most 1/2
        self._leaves, self._comes = self._step_s / on, self._step_s / off
        # Each step makes a random set of clients available, and another one unavailable. So the
        # changes can be listed without looking at all clients. No states are stored: a client's
        # state follows from the last step whose sets contain the client.
        self._prime = _next_prime(max(clients, _MANY))
        self._draws: dict[int, _StepDraw] = {}  # by step

    def _draw(self, step: int) -> _StepDraw:
        draw = self._draws.get(step)
        if draw is None:
            # Steps below 0 are drawn as well.
            generator = stream(self._seed, "fleet.markov", step % (1 << 64))
            chances = (self._comes, self._leaves, 1 - self._comes - self._leaves)
            comes, goes, _ = generator.multinomial(self._prime, chances).tolist()
            start = int(generator.integers(self._prime))
            factor = int(generator.integers(1, self._prime))
            inverse = pow(factor, -1, self._prime)
            draw = _StepDraw(start, factor, inverse, comes, self._prime - goes)
            if len(self._draws) >= _MAX_STEPS:
                self._draws.clear()
            self._draws[step] = draw
        return draw

    def _decision(self, client: int, step: int) -> bool | None:
        """Return what a time step of the Markov chain does to a client's availability.

        At the start of the step, True makes the client available, False makes the client
        unavailable, and None changes nothing.
        step: the number of the time step.
        """
        draw = self._draws.get(step) or self._draw(step)
        place = (client - draw.start) * draw.factor % self._prime
        if place < draw.comes:
            return True
        return False if place >= draw.goes else None

    def available(self, client: int, now: float) -> bool:
        """Return True if the client is available at the virtual time `now`, in seconds."""
        return self._state(client, _interval(now, self._step_s))

    def _state(self, client: int, step: int) -> bool:
        # Steps below 0 count as well: the chain is stationary from the start.
        state = self._decision(client, step)
        while state is None:
            step -= 1
            state = self._decision(client, step)
        return state

    def next_change(self, client: int, now: float, until: float) -> float:
        """Return the first time after `now` at which the client's availability changes.

        Return `until` if it does not change before `until`. All times are virtual seconds.
        """
        step = _interval(now, self._step_s)
        if (step + 1) * self._step_s >= until:
            return until
        state = self._state(client, step)
        while True:
            step += 1
            moment = step * self._step_s
            if moment >= until:
                return until
            if self._decision(client, step) not in (None, state):
                return moment

    # --- many clients at once ---------------------------------------------------------------------
    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Return a bool array [clients]: True if the client is available at its time in `now`.

        now: float64 [clients], a virtual time in seconds for each client.
        """
        steps = _intervals(now, self._step_s).astype(np.int64)
        states = np.zeros(len(clients), bool)
        for step in np.unique(steps).tolist():
            members = np.flatnonzero(steps == step)
            states[members] = self._states(clients[members], step)
        return states

    def _states(self, clients: np.ndarray, step: int) -> np.ndarray:
        states = np.zeros(len(clients), bool)
        undecided = np.arange(len(clients))
        while len(undecided):
            draw, places = self._draw(step), self._places(clients[undecided], step)
            states[undecided[places < draw.comes]] = True
            undecided = undecided[(places >= draw.comes) & (places < draw.goes)]
            step -= 1
        return states

    def _places(self, clients: np.ndarray, step: int) -> np.ndarray:
        draw = self._draw(step)
        return np.asarray((clients - draw.start) % self._prime * draw.factor % self._prime)

    def _coming_clients(self, clients: np.ndarray, step: int) -> np.ndarray:
        """Return the clients that the random draw of a time step makes available, ascending.

        Some of these clients may have been available before this time step.
        clients: the clients to consider, ascending.
        step: the number of the time step.
        """
        draw = self._draw(step)
        if draw.comes >= len(clients):
            return np.asarray(clients[self._places(clients, step) < draw.comes])
        coming = np.sort((np.arange(draw.comes) * draw.inverse + draw.start) % self._prime)
        return np.asarray(coming[_are_members(coming, clients)])

    def changes(self, clients: np.ndarray, now: float) -> Iterator[Change]:
        """Yield all changes of these clients after the virtual time `now`, the earliest first.

        A `Change` has all clients that change at the same moment, the start of a time step of the
        Markov chain.
        clients: the numbers of the clients, ascending.
        """
        step = _interval(now, self._step_s)
        present = self.available_clients(clients, now)
        while len(clients):
            step += 1
            came = self._coming_clients(clients, step)
            came = came[~_are_members(came, present)]
            goes = self._places(present, step) >= self._draw(step).goes
            if len(came) or goes.any():
                change = Change(step * self._step_s, came, present[goes])
                present = np.sort(np.concatenate([present[~goes], came]))
                yield change


def _are_members(values: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Return a bool array with an entry for each value: True if it is one of `members`.

    values: integers in any order.
    members: integers, ascending.
    """
    if not len(members):
        return np.zeros(len(values), bool)
    places = np.minimum(np.searchsorted(members, values), len(members) - 1)
    return np.asarray(members[places] == values)


def _next_prime(least: int) -> int:
    """Return the smallest prime number that is not below `least`."""
    number = least | 1
    while any(number % divisor == 0 for divisor in range(3, math.isqrt(number) + 1, 2)):
        number += 2
    return number


class Intervals(Availability):
    """Clients that are available in recorded intervals.

    An interval includes its start and excludes its end. A row is the recording of a device, which
    several clients may use.

    bounds: float64, the start and end of each interval in seconds, row after row.
    first: int [rows + 1], the index in `bounds` where each row begins, and the length of `bounds`.
    periods: float64 [rows], the length of each recording in seconds.
    row_of: int [clients], the row of each client.
    wrap: True repeats a recording after its period; False makes its clients unavailable from then
    on.
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
        self._wrap = wrap
        self._rows = np.asarray(row_of, np.int32)
        self._bounds = np.asarray(bounds, np.float64)
        self._periods = np.asarray(periods, np.float64)
        self._firsts, self._lasts = first[:-1], first[1:]
        if wrap:
            # An interval up to the end of a period continues in the next one, unless that begins
            # with a gap; `next_change` looks at that. So its end is no bound.
            ends = np.flatnonzero(self._lasts > self._firsts)
            ends = ends[self._bounds[self._lasts[ends] - 1] >= self._periods[ends]]
            self._lasts = self._lasts.copy()
            self._lasts[ends] -= 1
        # The same memory for single clients.
        self._bound, self._period = floats(self._bounds), floats(self._periods)
        self._row, self._first, self._last = (
            ints(self._rows),
            ints(self._firsts),
            ints(self._lasts),
        )

    def _find(self, client: int, now: float) -> tuple[int, float, float, int]:
        """Return where the virtual time `now`, in seconds, lies in a client's recording.

        Returns (row, begin, end, position):
        row: the number of the recording.
        begin, end: the virtual times of the repetition that contains `now`; 0 and infinity without
        `wrap`.
        position: the index in `bounds` of the row's first entry after `now`. If there is none, it
        is the index after the row's last entry.
        """
        row, begin, end = self._row[client], 0.0, math.inf
        if self._wrap:
            period = self._period[row]
            cycle = _interval(now, period)
            begin, end = cycle * period, (cycle + 1) * period
        place = bisect_right(self._bound, now, self._first[row], self._last[row], key=begin.__add__)
        return row, begin, end, place

    def available(self, client: int, now: float) -> bool:
        """Return True if `now` is in an interval of the client."""
        row, _, _, place = self._find(client, now)
        return (place - self._first[row]) % 2 == 1

    def next_change(self, client: int, now: float, until: float) -> float:
        """Return the first time after `now` at which the client becomes available or unavailable.

        Return `until` if the client does not change before `until`. All times are virtual seconds.
        """
        row, begin, end, place = self._find(client, now)
        first, last = self._first[row], self._last[row]
        if place < last:
            return min(begin + self._bound[place], until)
        if first == last or end == math.inf:
            return until
        starts_available = self._bound[first] == 0
        if starts_available != (last - first) % 2:
            return min(end, until)
        if first + starts_available < last:
            return min(end + self._bound[first + starts_available], until)
        return until

    def _find_all(self, clients: np.ndarray, now: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return what `_find` returns, for many clients: four arrays [clients].

        now: float64 [clients], the virtual time to look up for each client, in seconds.
        """
        rows = self._rows[clients]
        begin, end = np.zeros(len(clients)), np.full(len(clients), math.inf)
        if self._wrap:
            period = self._periods[rows]
            cycle = _intervals(now, period)
            begin, end = cycle * period, (cycle + 1) * period
        low, high = self._firsts[rows], self._lasts[rows]
        searching = np.flatnonzero(low < high)
        while len(searching):
            middle = (low[searching] + high[searching]) // 2
            is_past = begin[searching] + self._bounds[middle] <= now[searching]
            low[searching[is_past]] = middle[is_past] + 1
            high[searching[~is_past]] = middle[~is_past]
            searching = np.flatnonzero(low < high)
        return rows, begin, end, low

    def are_available(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Return a bool array [clients]: True if the client is available at its time in `now`.

        now: float64 [clients], a virtual time in seconds for each client.
        """
        rows, _, _, places = self._find_all(clients, now)
        return np.asarray((places - self._firsts[rows]) % 2 == 1)

    def next_changes(self, clients: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Return the time of each client's next change of availability, float64 [clients].

        now: float64 [clients], a virtual time in seconds for each client. Only changes after this
        time are considered.
        """
        rows, begin, end, places = self._find_all(clients, now)
        first, last = self._firsts[rows], self._lasts[rows]
        times = np.full(len(clients), math.inf)
        is_inside = places < last
        times[is_inside] = begin[is_inside] + self._bounds[places[is_inside]]
        # All other clients change at the end of their period or in the next period.
        later = np.flatnonzero(~is_inside & (first < last) & (end < math.inf))
        starts_available = self._bounds[first[later]] == 0
        changes_at_end = starts_available != (last[later] - first[later]) % 2
        times[later[changes_at_end]] = end[later[changes_at_end]]
        place = first[later] + starts_available
        changes_after = ~changes_at_end & (place < last[later])
        times[later[changes_after]] = end[later[changes_after]] + self._bounds[place[changes_after]]
        return times
