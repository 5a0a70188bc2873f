"""Load a client's model into a worker's vector, and copy its personal part from the vector."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from raysim.api.client_state import ClientState
from raysim.vectors.layout import Vector


def load_vector(vector: Vector, base: Tensor, counters: Tensor, state: ClientState[Tensor]) -> None:
    """Put a received vector and a client's personal part into a vector.

    base: [layout.shared], the received vector.
    counters: int64 [layout.shared_counters], the received integer buffers.
    state: the client's state, with its personal part.
    """
    vector.shared.copy_(base)
    if len(counters):
        vector.counters[: len(counters)].copy_(counters)
    if vector.layout.has_personal:
        vector.personal.copy_(state.personal)
        vector.counters[len(counters) :].copy_(state.counters)


def copy_client_state(vector: Vector, methods: Mapping[str, Tensor]) -> ClientState[Tensor]:
    """Return a client's state: a copy of the vector's personal part, and the state of methods.

    methods: the tensors that methods keep for the client, by "method.name"; they are not copied.
    """
    counters = vector.counters[vector.layout.shared_counters :]
    return ClientState(vector.personal.clone(), counters.clone(), methods)
