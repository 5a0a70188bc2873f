"""Count the bytes that a run sends between the nodes of a cluster."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from raysim.api.messages import PublishedVersion, TrainingResult
from raysim.simulation.events import Row
from raysim.simulation.runtime import Ref, Runtime

MAX_KNOWN_VALUES = 100_000  # stored values whose places are remembered
# Types of arguments that are no references.
_PLAIN_TYPES = (int, str, list, tuple, dict, np.ndarray, type(None))


class CountingRuntime:
    """A runtime that counts the bytes of arrays that each node receives and sends.

    A stored value counts once for each node that receives it.
    vector_bytes: the bytes of a sum of updates.
    """

    def __init__(self, runtime: Runtime, vector_bytes: int):
        self.runtime, self._vector_bytes = runtime, vector_bytes
        self._received: Counter[int] = Counter()  # bytes since the last row, by node
        self._sent: Counter[int] = Counter()
        # The keys are hashes of references, because a reference would keep its value in memory.
        # Homes: the node of a result that nobody has read. Stored: the size of a stored value, and
        # the nodes that have it.
        self._homes: dict[int, int] = {}
        self._stored: OrderedDict[int, tuple[int, set[int]]] = OrderedDict()
        # By result: the client states that are returned with it.
        self._states: dict[int, list[int]] = {}

        # Functions that are called for each aggregation, which `__getattr__` would make slower.
        self.ready, self.find_lost_workers = runtime.ready, runtime.find_lost_workers
        self.take_new_workers, self.take_notices = runtime.take_new_workers, runtime.take_notices

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    @property
    def nodes(self) -> Sequence[int]:
        """The number of each worker's node; the coordinator's node is 0."""
        return self.runtime.nodes

    def columns(self) -> Row:
        """Return history columns: the bytes that each node received and sent since the last call.

        Return no columns for a run on one node.
        """
        nodes = self.runtime.nodes
        row: Row = {}
        if any(nodes):
            for node in range(max(nodes) + 1):
                row[f"node_{node}_in_bytes"] = self._received[node]
                row[f"node_{node}_out_bytes"] = self._sent[node]
        self._received.clear()
        self._sent.clear()
        return row

    def _move(self, size: int, source: int, target: int) -> None:
        if source != target:
            self._sent[source] += size
            self._received[target] += size

    def _store(self, ref: Ref, size: int, node: int) -> None:
        self._stored[hash(ref)] = size, {node}
        while len(self._stored) > MAX_KNOWN_VALUES:
            self._stored.popitem(last=False)

    # --- Runtime ----------------------------------------------------------------------------------
    def put(self, value: object) -> Ref:
        """Store a value once for all workers, and remember its size; return a reference to it."""
        ref = self.runtime.put(value)
        if ref is not value:
            self._store(ref, array_bytes(value), 0)
        return ref

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Ref]:
        """Call a method of a worker, and count the bytes of the arguments.

        Return references to what the method returns, without waiting.
        method: the name of a method of `Worker`.
        args: the arguments, or references to them.
        returns: the number of returned values.
        """
        nodes = self.runtime.nodes
        node, has_several = nodes[worker], any(nodes)
        if has_several:
            for arg in args:
                self._count_argument(arg, node)
        refs = self.runtime.call(worker, method, *args, returns=returns)
        result, *state_refs = refs
        if method == "train_apart":
            self._homes.update({hash(ref): node for ref in refs})
        elif has_several:
            self._homes[hash(result)] = node
            self._states[hash(result)] = [hash(ref) for ref in state_refs]
        return refs

    def _count_argument(self, value: object, node: int) -> None:
        stored = None
        if not _is_plain(value):
            stored = self._stored.get(hash(value))
        if stored is None:
            self._move(array_bytes(value), 0, node)
            return
        size, holders = stored
        if node not in holders:
            self._move(size, min(holders), node)
            holders.add(node)

    def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Ref]) -> Ref:
        """Let a node add up sums of updates; return a reference to the total.

        Count the bytes of sums from other nodes.
        parts: for each sum in `refs`, the positions of its updates in the order of aggregation.
        """
        for ref in refs:
            self._move(self._vector_bytes, self._homes.pop(hash(ref), node), node)
        total = self.runtime.add_up(node, parts, refs)
        self._homes[hash(total)] = node
        return total

    def get(self, ref: Ref) -> Any:
        """Wait for a value and return it; count its bytes if it comes from another node.

        ref: the reference to the value.
        """
        value = self.runtime.get(ref)
        # A small value is its own handle.
        if not self._homes or _is_plain(ref):
            return value
        key = hash(ref)
        node = self._homes.pop(key, 0)
        states = self._states.pop(key, [])
        if isinstance(value, TrainingResult):
            for state, size in zip(states, value.states, strict=False):
                self._stored[state] = size, {node}
        if node:
            self._move(array_bytes(value), node, 0)
        return value


def _is_plain(value: object) -> bool:
    """Return True for a value, False for a reference to a stored value."""
    return isinstance(value, _PLAIN_TYPES) or is_dataclass(value)


def array_bytes(value: object) -> int:
    """Return the total size in bytes of all arrays in a value."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, PublishedVersion):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(array_bytes(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(array_bytes(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return sum(array_bytes(getattr(value, entry.name)) for entry in fields(value))
    return 0
