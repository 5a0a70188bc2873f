"""What one client keeps from one participation to the next, and the name of every tensor in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from raysim.primitives.version import __version__
from raysim.vectors.layout import Entry, Layout

T = TypeVar("T")
S = TypeVar("S")

# What the two flat buffers are called where they are not taken apart: in checksums, on disk.
_PERSONAL, _COUNTERS = "personal", "personal.counters"


@dataclass(frozen=True, eq=False)
class ClientState(Generic[T]):
    """The client state of one client: torch tensors on its worker's device, NumPy arrays everywhere else.

    Tensors of the networks that do not travel (FedBN's normalisation, FRAug's RTNet) lie side by side in two flat
    buffers, so that a job loads and returns them at once; the layout knows their names (`named`).
    """

    personal: T  # [layout.personal] floating: parameters, then buffers
    counters: T  # [layout.total_counters - layout.shared_counters] integer buffers
    methods: Mapping[str, T]  # what methods keep, by "method.name"

    def each(self, change: Callable[[T], S]) -> ClientState[S]:
        """The state with every tensor changed, for example moved to a device."""
        methods = {key: change(value) for key, value in self.methods.items()}
        return ClientState(change(self.personal), change(self.counters), methods)


StoredState: TypeAlias = ClientState[np.ndarray]


def num_bytes(state: ClientState[Any]) -> int:
    """Bytes of all its arrays or tensors."""
    return int(
        state.personal.nbytes
        + state.counters.nbytes
        + sum(array.nbytes for array in state.methods.values())
    )


def to_named_arrays(state: StoredState, layout: Layout) -> dict[str, np.ndarray]:
    """Every tensor under its own name: "model.bn1.weight", "fedbss.losses". The personal ones are views."""
    floating, integer = layout.personal_entries
    personal = {e.name: _part(state.personal, e, layout.shared).reshape(e.shape) for e in floating}
    personal |= {
        e.name: _part(state.counters, e, layout.shared_counters).reshape(e.shape) for e in integer
    }
    if (
        both := personal.keys() & state.methods.keys()
    ):  # what a method declares has been checked before the start
        raise ValueError(
            f"a method keeps client state under the names of personal tensors: {sorted(both)}"
        )
    return personal | dict(state.methods)


def reserved_names(layout: Layout) -> set[str]:
    """Names that no method may give to what it keeps: those of the personal tensors, and of the buffers they lie in."""
    floating, integer = layout.personal_entries
    return {_PERSONAL, _COUNTERS, *(entry.name for entry in (*floating, *integer))}


def from_named_arrays(arrays: Mapping[str, np.ndarray], layout: Layout) -> StoredState:
    """Return the state whose tensors have these names. Raises `ValueError` if one is missing."""
    floating, integer = layout.personal_entries
    names = {entry.name for entry in (*floating, *integer)}
    if missing := sorted(names - arrays.keys()):
        reason = f"an earlier version of raysim than {__version__} wrote it, or another model"
        raise ValueError(
            f"{missing[0]} is missing in a stored client state: {reason}. Start the run again"
        )
    return ClientState(
        np.concatenate([np.empty(0, np.float32), *(arrays[e.name].ravel() for e in floating)]),
        np.concatenate([np.empty(0, np.int64), *(arrays[e.name].ravel() for e in integer)]),
        {key: array for key, array in arrays.items() if key not in names},
    )


def to_flat_arrays(state: StoredState) -> dict[str, np.ndarray]:
    """The buffers as they lie, and what methods keep."""
    stays = len(state.personal) or len(state.counters)
    buffers = {_PERSONAL: state.personal, _COUNTERS: state.counters} if stays else {}
    return buffers | dict(state.methods)


def from_flat_arrays(arrays: Mapping[str, np.ndarray]) -> StoredState:
    """The state of which `flat` made these arrays."""
    methods = {key: array for key, array in arrays.items() if key not in (_PERSONAL, _COUNTERS)}
    none = np.empty(0, np.float32), np.empty(0, np.int64)
    return ClientState(arrays.get(_PERSONAL, none[0]), arrays.get(_COUNTERS, none[1]), methods)


def _part(buffer: np.ndarray, entry: Entry, first: int) -> np.ndarray:
    """The stretch of one entry in a buffer that begins at position `first` of the layout."""
    return buffer[entry.start - first : entry.stop - first]
