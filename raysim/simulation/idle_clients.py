"""The clients that are there and idle, in order: what a plan draws from where hardly anybody is there."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator

import numpy as np

from raysim.simulation.availability import Availability, Change

_FEW = 64  # changes of one moment that are made one by one


class IdleClients:
    """Those of some clients (ascending) who are there and not at work, as a sorted array that follows what happens.

    It depends on who is at work at `now` alone, and not on when it was made: so a checkpoint holds nothing of it.
    """

    def __init__(
        self, presence: Availability, members: np.ndarray, busy: Collection[int], now: float
    ):
        self._presence, self._busy = presence, busy
        self._clients = array("q")  # ascending
        self._changes = presence.changes(members, now)
        self._ahead: deque[Change] = (
            deque()
        )  # known, and not yet come; nobody comes before the last of them
        self._back: list[int] = []  # whose jobs ended since `at` was last called
        self._add(presence.available_clients(members, now))

    def __len__(self) -> int:
        return len(self._clients)

    def back(self, client: int) -> None:
        """A client's job ended."""
        self._back.append(client)

    def sent(self, client: int) -> None:
        """A client was sent off."""
        place = bisect_left(self._clients, client)
        if place < len(self._clients) and self._clients[place] == client:
            del self._clients[place]

    def at(self, now: float) -> None:
        """Follow all that happened up to `now`."""
        while self._known() and self._ahead[0].at <= now:
            change = self._ahead.popleft()
            self._remove(change.gone)
            self._add(change.came)
        back, self._back = self._back, []
        for client in back:
            if client not in self._busy and self._presence.available(client, now):
                self._insert(client)

    def draw(self, count: int, numbers: Iterator[float]) -> list[int]:
        """So many of them, uniformly without replacement, or all if there are fewer; ascending.

        numbers: uniform in [0, 1), as many as are asked for.
        """
        waiting = len(self._clients)
        if count >= waiting:
            return self._clients.tolist()
        places: set[int] = set()
        while len(places) < count:
            places.add(int(next(numbers) * waiting))
        return [self._clients[place] for place in sorted(places)]

    def next_arrival(self) -> float:
        """When the next client comes; infinity for never."""
        while not self._ahead or not len(self._ahead[-1].came):
            if (change := next(self._changes, None)) is None:
                return math.inf
            self._ahead.append(change)
        return self._ahead[-1].at

    def _known(self) -> bool:
        """Whether anything happens any more; the next that does is then in `_ahead`."""
        if not self._ahead and (change := next(self._changes, None)) is not None:
            self._ahead.append(change)
        return bool(self._ahead)

    def _add(self, clients: np.ndarray) -> None:
        idle = [client for client in clients.tolist() if client not in self._busy]
        if len(idle) > _FEW:
            self._clients = array("q", np.union1d(self._view(), idle).tobytes())
        else:
            for client in idle:
                self._insert(client)

    def _remove(self, clients: np.ndarray) -> None:
        if len(clients) > _FEW:
            self._clients = array(
                "q", np.setdiff1d(self._view(), clients, assume_unique=True).tobytes()
            )
        else:
            for client in clients.tolist():
                self.sent(client)

    def _insert(self, client: int) -> None:
        place = bisect_left(self._clients, client)
        if place == len(self._clients) or self._clients[place] != client:
            self._clients.insert(place, client)

    def _view(self) -> np.ndarray:
        return np.array(self._clients, np.int64)
