"""Keep the arrays of replicas within a memory budget: move idle replicas to disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from raysim.primitives.memory import release_free_memory
from raysim.simulation.server import Server
from raysim.simulation.spill import MappedFile

# After this many bytes of replicas on disk were read, their pages are removed from memory. After
# this many bytes were moved, their memory is returned to the system. If the budget is larger, it is
# used instead.
MIN_STEP_BYTES = 2**26


class ReplicaMemory:
    """The object that moves replicas to disk if they need too much memory.

    The replica that changed longest ago is moved first.
    budget: the number of bytes of memory that replicas may use.
    folder: the folder for the file with the moved replicas; "" is the system's folder for temporary
    files.
    moves_state: False keeps the server state in memory, because all replicas share it.
    """

    def __init__(self, servers: Sequence[Server], budget: float, folder: str, moves_state: bool):
        self._servers, self._budget, self._folder = servers, budget, folder
        self._moves_state = moves_state
        # By replica: bytes of its arrays in memory; the replica that changed last comes last.
        self._in_memory: dict[int, int] = {}
        self._total = 0  # sum of them
        self._file: MappedFile | None = None
        self._step = max(budget, MIN_STEP_BYTES)
        self._freed = 0  # bytes that were moved since memory was returned to the system

    @property
    def bytes_on_disk(self) -> int:
        """The bytes of all arrays on disk."""
        return 0 if self._file is None else self._file.used

    def note_read(self, replica: int) -> None:
        """Make room in memory for the tensors of a replica, before the caller reads these tensors.

        If necessary, replicas that were loaded from disk are removed from memory.
        """
        if self._file is not None and replica not in self._in_memory:
            self._file.note_read(sum(tensor.nbytes for tensor in self._tensors(replica)))

    def keep_within_budget(
        self, changed: Iterable[int], is_busy: Callable[[int], bool]
    ) -> set[int]:
        """Move idle replicas to disk until the replicas in memory fit the budget.

        Return the numbers of the moved replicas. If too few replicas are idle, the budget stays
        exceeded.
        changed: the replicas that have changed since the last call.
        is_busy: returns True for a replica from which a job in flight started.
        """
        if self._budget == math.inf:
            return set()
        for replica in changed:
            self._total -= self._in_memory.pop(replica, 0)
            size = sum(tensor.nbytes for tensor in self._tensors_in_memory(replica))
            self._in_memory[replica] = size
            self._total += size
        if self._total <= self._budget:
            return set()
        return self._move_idle(is_busy)

    def _move_idle(self, is_busy: Callable[[int], bool]) -> set[int]:
        # Replicas may share a vector, for example after an exchange. Such replicas move together,
        # and the vector counts once.
        groups: dict[int, list[int]] = {}
        for replica in self._in_memory:
            groups.setdefault(id(self._servers[replica].vector), []).append(replica)
        total = self._total
        for group in groups.values():
            total -= (len(group) - 1) * self._servers[group[0]].vector.nbytes
        moved: set[int] = set()
        for group in groups.values():
            if total <= self._budget:
                break
            if any(map(is_busy, group)):
                continue
            total -= sum(self._in_memory[replica] for replica in group)
            total += (len(group) - 1) * self._servers[group[0]].vector.nbytes
            self._move(group)
            moved.update(group)
        if self._freed > self._step:
            release_free_memory()
            self._freed = 0
        return moved

    def _move(self, group: Sequence[int]) -> None:
        """Move replicas from memory to disk.

        group: replicas whose vector is the same tensor, for example after an exchange. The vector
        is written once.
        """
        if self._file is None:
            self._file = MappedFile(self._folder, "replicas", self._step)
        vector = self._to_disk(self._servers[group[0]].vector)
        for replica in group:
            server = self._servers[replica]
            server.vector = vector
            if self._moves_state:
                server.state = {
                    name: self._to_disk(tensor) if _is_movable(tensor) else tensor
                    for name, tensor in server.state.items()
                }
            self._total -= self._in_memory.pop(replica)

    def _to_disk(self, tensor: Tensor) -> Tensor:
        assert self._file is not None
        array = tensor.numpy()
        if self._file.contains(array):
            return tensor
        self._freed += array.nbytes
        return torch.from_numpy(self._file.move(array))

    def _tensors(self, replica: int) -> list[Tensor]:
        """Return the tensors that are moved to disk with a replica: its vector and server state.

        Server state is left out if `moves_state` is False. Tensors that cannot be moved are left
        out, too.
        """
        server = self._servers[replica]
        if not self._moves_state:
            return [server.vector]
        return [server.vector, *filter(_is_movable, server.state.values())]

    def _tensors_in_memory(self, replica: int) -> list[Tensor]:
        tensors = self._tensors(replica)
        if self._file is None:
            return tensors
        return [tensor for tensor in tensors if not self._file.contains(tensor.numpy())]


def _is_movable(tensor: Tensor) -> bool:
    """Return True if a tensor can be moved to disk.

    The tensor must not be empty, and must use all of its allocated memory. A method's cache that
    has space for further rows cannot be moved.
    """
    return 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
