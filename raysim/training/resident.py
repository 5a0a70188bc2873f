"""The client states of a worker's clients: on its device within a budget, beyond it in ordinary memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raysim.api.client_state import ClientState, StoredState, size
from raysim.training.transfer import Copies, up


@dataclass(eq=False)
class StateHandle:
    """What a job left of its client's state, where it lies: whoever holds this sees it move."""

    job: int
    state: ClientState[Tensor] | None  # None: it has left the device
    stored: StoredState | None = None  # once it was copied down

    @property
    def size(self) -> int:
        """Bytes of all its tensors."""
        held = self.stored if self.state is None else self.state
        assert held is not None, "a state is on the device or in ordinary memory"
        return size(held)

    def arrays(self, copies: Copies) -> StoredState:
        """In ordinary memory; copied at most once. Call `copies.wait` before reading it."""
        if self.stored is None:
            assert self.state is not None, "a state is on the device or in ordinary memory"
            self.stored = self.state.each(copies.take)
        return self.stored

    def read(self) -> StoredState:
        """In ordinary memory; waits."""
        copies = Copies(torch.device("cpu") if self.state is None else self.state.personal.device)
        stored = self.arrays(copies)
        copies.wait()
        return stored

    def __reduce__(self) -> tuple[Any, ...]:
        """To other processes the arrays travel."""
        return _arrived, (self.read(),)


def _arrived(state: StoredState) -> StoredState:
    return state


class ResidentStates:
    """The last state of each client, those that were used last on the device. budget: bytes there."""

    def __init__(self, device: torch.device, budget: float = math.inf):
        self.device, self.budget = device, budget
        self.copies = Copies(device)
        self._last: dict[int, StateHandle] = {}
        self._near: dict[
            int, int
        ] = {}  # by client: bytes on the device; who was used last comes last

    def __iter__(self) -> Iterator[int]:
        """The clients whose states are here."""
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def get(self, client: int, job: int) -> ClientState[Tensor] | None:
        """The state that a job left, on the device; None if it is not here."""
        left = self._last.get(client)
        if left is None or left.job != job:
            return None
        if left.state is None:
            assert left.stored is not None, "a state is on the device or in ordinary memory"
            left.state = left.stored.each(lambda array: up(array, self.device))
        state = left.state
        self._use(client, left)
        return state

    def put(self, client: int, job: int, state: ClientState[Tensor]) -> StateHandle:
        """Keep what a job left."""
        left = self._last[client] = StateHandle(job, state)
        self._use(client, left)
        return left

    def drop(self, client: int) -> None:
        """Forget a client."""
        self._last.pop(client, None)
        self._near.pop(client, None)

    def _use(self, client: int, left: StateHandle) -> None:
        """Count a client's state as used; those idle for longest leave the device."""
        if self.budget == math.inf:
            return
        assert left.state is not None, "what is used is on the device"
        self._near.pop(client, None)
        self._near[client] = size(left.state)
        total = sum(self._near.values())
        for idle in list(self._near)[:-1]:
            if total <= self.budget:
                break
            total -= self._near.pop(idle)
            self._last[idle].arrays(self.copies)
            self._last[idle].state = None
        self.copies.wait()
