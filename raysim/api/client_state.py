"""The client state of one client, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from raysim.primitives.version import __version__
from raysim.vectors.layout import Entry, Layout

T = TypeVar("T")
S = TypeVar("S")

# Names of the two flat buffers in checksums and on disk, where each is stored as one array.
_PERSONAL = "personal"
_COUNTERS = "personal.counters"


@dataclass(frozen=True, eq=False)
class ClientState(Generic[T]):
    """Everything that raysim stores for a client between its jobs.

    T is a tensor on a worker, a NumPy array elsewhere.

    personal: [layout.personal], the floats that stay on the client: parameters, then buffers such
    as running means.
    counters: int64, all integer buffers that stay on the client, such as counts of batches.
    methods: the methods' client state by "method.name". The state of an optimizer that is kept
    between jobs is here, too, under names that begin with "local.kept.".
    """

    personal: T
    counters: T
    methods: Mapping[str, T]

    def each(self, change: Callable[[T], S]) -> ClientState[S]:
        """Return a new state in which `change(tensor)` replaces each tensor.

        change: a function of a tensor, such as one that copies it to a device.
        """
        methods = {key: change(value) for key, value in self.methods.items()}
        return ClientState(change(self.personal), change(self.counters), methods)


StoredState: TypeAlias = ClientState[np.ndarray]


def num_bytes(state: ClientState[Any]) -> int:
    """Return the bytes of all arrays or tensors of the state."""
    methods = sum(array.nbytes for array in state.methods.values())
    return int(state.personal.nbytes + state.counters.nbytes + methods)


def to_named_arrays(state: StoredState, layout: Layout) -> dict[str, np.ndarray]:
    """Return all tensors of the state by their full names.

    Examples are "model.bn1.weight" of a network and "fedbss.losses" of a method. Tensors of
    networks are views of the two flat arrays of the state.
    """
    floating, integer = layout.personal_entries
    personal: dict[str, np.ndarray] = {}
    for entry in floating:
        personal[entry.name] = _values_of(state.personal, entry, layout.shared)
    for entry in integer:
        personal[entry.name] = _values_of(state.counters, entry, layout.shared_counters)
    # Names of client state were checked before the run, but a hook may have added other names.
    twice = personal.keys() & state.methods.keys()
    if twice:
        raise ValueError(
            f"client state {sorted(twice)}: a hook has stored values under these names, but they "
            "are the names of network tensors that stay on the client. Search the code of your "
            "methods for these names, and choose others."
        )
    return personal | dict(state.methods)


def reserved_names(layout: Layout) -> set[str]:
    """Return the names that a method cannot give to client state, because they are in use.

    These are "personal", "personal.counters" and the full names of network tensors that stay on the
    client, such as "model.bn1.weight".
    """
    floating, integer = layout.personal_entries
    return {_PERSONAL, _COUNTERS, *(entry.name for entry in (*floating, *integer))}


def from_named_arrays(arrays: Mapping[str, np.ndarray], layout: Layout) -> StoredState:
    """Return the client state from its named arrays: the inverse of `to_named_arrays`.

    arrays: the networks' personal tensors, such as "model.bn1.weight", and the methods' client
    state.
    layout: has the names, shapes and order of the personal tensors.
    Raise ValueError if a personal tensor is missing.
    """
    floating, integer = layout.personal_entries
    names = {entry.name for entry in (*floating, *integer)}
    missing = sorted(names - arrays.keys())
    if missing:
        raise ValueError(
            f"client state: the stored state of a client lacks the tensor '{missing[0]}'. It was "
            "written with another model, with other methods, or with a version of raysim before "
            f"{__version__}. Start the run again in a new folder."
        )
    personal = [np.empty(0, np.float32), *(arrays[entry.name].ravel() for entry in floating)]
    counters = [np.empty(0, np.int64), *(arrays[entry.name].ravel() for entry in integer)]
    methods = {key: array for key, array in arrays.items() if key not in names}
    return ClientState(np.concatenate(personal), np.concatenate(counters), methods)


def to_flat_arrays(state: StoredState) -> dict[str, np.ndarray]:
    """Return the arrays of the state by name, for checksums and for files.

    `state.personal` has the name "personal", and `state.counters` has "personal.counters". If both
    arrays are empty, they are left out. A tensor of a method has the name "method.name".
    """
    buffers: dict[str, np.ndarray] = {}
    if len(state.personal) or len(state.counters):
        buffers = {_PERSONAL: state.personal, _COUNTERS: state.counters}
    return buffers | dict(state.methods)


def from_flat_arrays(arrays: Mapping[str, np.ndarray]) -> StoredState:
    """Return the state from its flat arrays: the inverse of `to_flat_arrays`."""
    methods = {key: array for key, array in arrays.items() if key not in (_PERSONAL, _COUNTERS)}
    personal = arrays.get(_PERSONAL, np.empty(0, np.float32))
    counters = arrays.get(_COUNTERS, np.empty(0, np.int64))
    return ClientState(personal, counters, methods)


def _values_of(buffer: np.ndarray, entry: Entry, start: int) -> np.ndarray:
    """Return one tensor of a neural network as a view of the flat array that contains it.

    buffer: `ClientState.personal` or `ClientState.counters`.
    entry: the tensor's shape and position in the layout.
    start: the layout position of the first element of `buffer`.
    """
    return buffer[entry.start - start : entry.stop - start].reshape(entry.shape)
