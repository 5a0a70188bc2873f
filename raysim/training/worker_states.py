"""Find the client state that a worker needs before it trains or scores a client."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raysim.api.client_state import ClientState, StoredState
from raysim.api.declare import Declarations
from raysim.api.state_values import pack
from raysim.data.partition import CSR
from raysim.training.client_vector import copy_client_state
from raysim.training.resident import ResidentStates, StateHandle
from raysim.training.transfer import to_device
from raysim.vectors.layout import Vector


class WorkerStates:
    """The client states on a worker: initial states, and final states of jobs.

    vector: the initial parameters and buffers.
    partition: each client's rows of training samples.
    device_bytes: the largest number of bytes of states on the device.
    """

    def __init__(
        self, vector: Vector, declarations: Declarations, partition: CSR, device_bytes: float
    ):
        self.device = vector.data.device
        self.resident = ResidentStates(self.device, device_bytes)
        # The state of a client that never trained, without the state of methods.
        self.initial = copy_client_state(vector, {})
        self._dtype = vector.data.dtype
        self._partition = partition
        self._stateful = [
            declared for declared in declarations.methods if declared.keeps_client_state
        ]

    def get(self, client: int, job: int, sent: StoredState | None) -> ClientState[Tensor]:
        """Return a client's state after the job number `job`, on this worker's torch device.

        job: -1 returns the client's initial state.
        sent: the state, if the caller sends it; None means that `job` is -1 or this worker has it.
        """
        if job < 0:
            return self._initial_of(client)
        resident = self.resident.get(client, job)
        if resident is not None:
            return resident
        assert sent is not None, f"client {client}: the state of job {job} is not here"
        return sent.each(lambda array: to_device(array, self.device))

    def put(self, client: int, job: int, state: ClientState[Tensor]) -> StateHandle:
        """Keep the final client state of a job; return a handle to it."""
        return self.resident.put(client, job, state)

    def release(self, clients: Sequence[int]) -> None:
        """Forget the states of clients whose newest state is on another worker."""
        for client in clients:
            self.resident.drop(client)

    def _initial_of(self, client: int) -> ClientState[Tensor]:
        if not self._stateful:
            return self.initial
        samples = len(self._partition.rows(client))
        methods: dict[str, Tensor] = {}
        for declared in self._stateful:
            for name, tensor in pack(declared.client_states(samples)).items():
                methods[name] = tensor.to(self.device, self._stored_dtype(name, tensor))
        return ClientState(self.initial.personal, self.initial.counters, methods)

    def _stored_dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which a tensor of a client state is stored.

        Tensors of floats have the run's dtype, all other tensors their own. A name that ends in
        "#float" marks a Python float, which stays float64.
        """
        is_number = name.endswith("#float")
        return self._dtype if tensor.is_floating_point() and not is_number else tensor.dtype
