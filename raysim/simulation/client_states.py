"""Private states of clients: in the object store, the accepted ones beyond a budget on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from raysim.api.messages import Arrays
from raysim.simulation.spill import Spill

if TYPE_CHECKING:
    from raysim.simulation.runtime import Ref, Runtime


class States:
    """A state is known by the job that left it. Of each client one is accepted; only `accept` changes which.

    Where accepted states outgrow `budget` [bytes], those of clients that were idle for longest go to disk (`folder`).
    """

    def __init__(self, runtime: Runtime, budget: float = math.inf, folder: str = ""):
        self.runtime, self.budget, self.folder = runtime, budget, folder
        self.accepted: dict[int, int] = {}  # by client: the job that left its accepted state
        self.stored: dict[int, Ref] = {}  # by job: the state it left, unless it is on disk
        self._sizes: dict[int, int] = {}  # by job: bytes of the state it left, once that is known
        self._known = 0  # sum of the sizes
        # By client: bytes of its accepted state, unless that is on disk; who was accepted last comes last.
        self._settled: dict[int, int] = {}
        self._kept = 0  # sum of them
        self._disk: Spill | None = None
        self._spilled: dict[int, int] = {}  # by client: bytes of its accepted state, which is on disk
        self._typical = 0  # bytes of the state that was written last

    def sized(self, number: int, size: int) -> None:
        """Note the bytes of the state that a job left."""
        self._sizes[number] = size
        self._known += size

    def ref(self, client: int, number: int) -> Ref:
        """The state that job `number` left, for a call."""
        return self.runtime.put(self.state(client, number)) if client in self._spilled else self.stored[number]

    def state(self, client: int, number: int) -> Arrays:
        """The accepted state of a client, which job `number` left; waits."""
        if client in self._spilled:
            assert self._disk is not None and self.accepted[client] == number
            return self._disk.read(client)
        state: Arrays = self.runtime.get(self.stored[number])
        return state

    def on_disk(self, client: int) -> int:
        """Bytes of a client's accepted state, if that is on disk."""
        return self._spilled.get(client, 0)

    def parts(self, clients: Sequence[int]) -> Iterator[slice]:
        """Cut a list of clients so that of each part no more than a host's share of the budget is read from disk."""
        start = size = 0
        for index, client in enumerate(clients):
            own = self.on_disk(client)
            if size and size + own > self.budget / self.runtime.hosts:
                yield slice(start, index)
                start, size = index, 0
            size += own
        yield slice(start, len(clients))

    def accept(self, client: int, number: int) -> None:
        """The state that job `number` left is the client's from now on."""
        self._drop(client, self.accepted.get(client, -1))
        self._spilled.pop(client, None)
        self._settle(client, number)

    def restore(self, client: int, state: Arrays) -> None:
        """The accepted state of a client, as a checkpoint holds it."""
        number = self.accepted[client]
        self.stored[number] = self.runtime.put(state)
        self.sized(number, sum(array.nbytes for array in state.values()))
        self._settle(client, number)
        self.spill(lambda _: True)

    def spill(self, idle: Callable[[int], bool]) -> list[int]:
        """Write accepted states to disk until the others are within the budget; whose. idle: says of whom one may."""
        written = []
        for client in list(self._settled) if self._kept > self.budget else ():
            if not idle(client):
                continue
            if self._disk is None:
                self._disk = Spill(self.folder)
            number = self.accepted[client]
            self._disk.write(client, self.runtime.get(self.stored[number]))
            self._typical = self._spilled[client] = self._settled[client]
            self._drop(client, number)
            written.append(client)
            if self._kept <= self.budget:
                break
        return written

    @property
    def bytes(self) -> int:
        """Of all states in the store; those of jobs under way count as the mean of the others."""
        mean = self._known / len(self._sizes) if self._sizes else self._typical
        return self._known + round(mean * (len(self.stored) - len(self._sizes)))

    @property
    def spilled_bytes(self) -> int:
        """Of the accepted states on disk."""
        return sum(self._spilled.values())

    def _settle(self, client: int, number: int) -> None:
        self.accepted[client] = number
        self._settled[client] = self._sizes.get(number, 0)
        self._kept += self._settled[client]

    def _drop(self, client: int, number: int) -> None:
        """The object of an accepted state."""
        self.stored.pop(number, None)
        self._known -= self._sizes.pop(number, 0)
        self._kept -= self._settled.pop(client, 0)
