"""Keep the states of a worker's clients: on its device up to a budget, else in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raysim.api.client_state import ClientState, StoredState, num_bytes
from raysim.training.transfer import MemoryCopies, to_device


@dataclass(eq=False)
class StateHandle:
    """A handle to the final client state of a job, which is on the device or in CPU memory.

    state: the state on the device; None if it was moved to CPU memory.
    stored: the copy in CPU memory; None before it is made.
    """

    job: int
    state: ClientState[Tensor] | None  # None: it is not on the device any more
    stored: StoredState | None = None  # None: it was not copied to CPU memory yet

    @property
    def size(self) -> int:
        """Return the size of the state in bytes."""
        current = self.stored if self.state is None else self.state
        assert current is not None, "a state is on the device or in ordinary memory"
        return num_bytes(current)

    def copy_to_memory(self, copies: MemoryCopies) -> StoredState:
        """Return the state in CPU memory. Call `copies.wait` before reading it."""
        if self.stored is None:
            assert self.state is not None, "a state is on the device or in ordinary memory"
            self.stored = self.state.each(copies.copy)
        return self.stored

    def read(self) -> StoredState:
        """Return the state in CPU memory; copy it from the device if it has no copy in CPU memory.

        The copy is complete when the method returns.
        """
        device = torch.device("cpu") if self.state is None else self.state.personal.device
        copies = MemoryCopies(device)
        stored = self.copy_to_memory(copies)
        copies.wait()
        return stored

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the `StoredState` behind the handle; it replaces the handle after unpickling."""
        return _unpickle, (self.read(),)


def _unpickle(state: StoredState) -> StoredState:
    return state


class ResidentStates:
    """The final client state of each client's last job on a worker, aggregated or not.

    budget: the largest number of bytes of states on the device; inf means no limit. Above it, the
    least recently used states are moved to CPU memory.
    """

    def __init__(self, device: torch.device, budget: float = math.inf):
        self.device, self.budget = device, budget
        self.copies = MemoryCopies(device)
        self._handles: dict[int, StateHandle] = {}  # by client
        # Bytes on the device, by client; the client that was used last is the last one.
        self._device_bytes: dict[int, int] = {}

    def __iter__(self) -> Iterator[int]:
        """Iterate over the clients that have a state here."""
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def get(self, client: int, job: int) -> ClientState[Tensor] | None:
        """Return the final client state of a job, on the device.

        Return None if this state is not on the worker.
        """
        handle = self._handles.get(client)
        if handle is None or handle.job != job:
            return None
        if handle.state is None:
            assert handle.stored is not None, "a state is on the device or in ordinary memory"
            handle.state = handle.stored.each(lambda array: to_device(array, self.device))
        state = handle.state
        self._mark_used(client, handle)
        return state

    def put(self, client: int, job: int, state: ClientState[Tensor]) -> StateHandle:
        """Keep the final client state of a job; return a handle to it."""
        handle = self._handles[client] = StateHandle(job, state)
        self._mark_used(client, handle)
        return handle

    def drop(self, client: int) -> None:
        """Forget the state of a client."""
        self._handles.pop(client, None)
        self._device_bytes.pop(client, None)

    def _mark_used(self, client: int, handle: StateHandle) -> None:
        """Mark a client's state as used most recently.

        If the states on the device exceed `self.budget` bytes, move states to CPU memory. The least
        recently used states are moved first.
        """
        if self.budget == math.inf:
            return
        assert handle.state is not None, "a state in use is on the device"
        self._device_bytes.pop(client, None)
        self._device_bytes[client] = num_bytes(handle.state)
        total = sum(self._device_bytes.values())
        for idle in list(self._device_bytes)[:-1]:
            if total <= self.budget:
                break
            total -= self._device_bytes.pop(idle)
            self._handles[idle].copy_to_memory(self.copies)
            self._handles[idle].state = None
        self.copies.wait()
