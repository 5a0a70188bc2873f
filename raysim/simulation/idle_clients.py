"""Keep a sorted array of the clients that are available and idle.

The planner draws from this array if very few clients are available.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator

import numpy as np

from raysim.simulation.availability import Availability, Change

_FEW = 64  # up to this many clients are added or removed one by one


class IdleClients:
    """The clients of `members` that are available and idle, as a sorted array.

    members: the clients to consider, ascending.
    busy: the busy clients; the caller updates this collection.
    now: the virtual time in seconds.
    """

    def __init__(
        self, presence: Availability, members: np.ndarray, busy: Collection[int], now: float
    ):
        self._presence, self._busy = presence, busy
        self._clients = array("q")  # ascending
        self._changes = presence.changes(members, now)
        # Changes that are read and not applied yet; only in the last one do clients become
        # available.
        self._ahead: deque[Change] = deque()
        self._finished: list[int] = []  # clients whose jobs ended since `advance` was last called
        self._add(presence.available_clients(members, now))

    def __len__(self) -> int:
        return len(self._clients)

    def add_finished(self, client: int) -> None:
        """Record that a client's job ended.

        The next `advance` adds the client to the idle clients, if the client is available then.
        """
        self._finished.append(client)

    def remove(self, client: int) -> None:
        """Remove a client from the array, if it is there."""
        place = bisect_left(self._clients, client)
        if place < len(self._clients) and self._clients[place] == client:
            del self._clients[place]

    def advance(self, now: float) -> None:
        """Apply all changes of availability up to the virtual time `now`.

        Also add the clients of `add_finished` that are idle and available.
        """
        while self._read_change() and self._ahead[0].at <= now:
            change = self._ahead.popleft()
            self._remove_all(change.gone)
            self._add(change.came)
        finished, self._finished = self._finished, []
        for client in finished:
            if client not in self._busy and self._presence.available(client, now):
                self._insert(client)

    def draw(self, count: int, numbers: Iterator[float]) -> list[int]:
        """Draw `count` clients uniformly without replacement; return them ascending.

        If there are not more than `count` clients, return all.
        numbers: iterator of uniform random numbers in [0, 1).
        """
        size = len(self._clients)
        if count >= size:
            return self._clients.tolist()
        places: set[int] = set()
        while len(places) < count:
            places.add(int(next(numbers) * size))
        return [self._clients[place] for place in sorted(places)]

    def next_arrival(self) -> float:
        """Return the virtual time at which a client next becomes available; infinity for never."""
        while not self._ahead or not len(self._ahead[-1].came):
            change = next(self._changes, None)
            if change is None:
                return math.inf
            self._ahead.append(change)
        return self._ahead[-1].at

    def _read_change(self) -> bool:
        """Read the next change of availability into `_ahead` if `_ahead` is empty.

        Return False if `_ahead` is still empty, because there are no further changes.
        """
        if not self._ahead:
            change = next(self._changes, None)
            if change is not None:
                self._ahead.append(change)
        return bool(self._ahead)

    def _add(self, clients: np.ndarray) -> None:
        idle = [client for client in clients.tolist() if client not in self._busy]
        if len(idle) > _FEW:
            self._clients = array("q", np.union1d(self._as_numpy(), idle).tobytes())
            return
        for client in idle:
            self._insert(client)

    def _remove_all(self, clients: np.ndarray) -> None:
        if len(clients) > _FEW:
            left = np.setdiff1d(self._as_numpy(), clients, assume_unique=True)
            self._clients = array("q", left.tobytes())
            return
        for client in clients.tolist():
            self.remove(client)

    def _insert(self, client: int) -> None:
        place = bisect_left(self._clients, client)
        if place == len(self._clients) or self._clients[place] != client:
            self._clients.insert(place, client)

    def _as_numpy(self) -> np.ndarray:
        return np.array(self._clients, np.int64)
