"""Copy the tensors that clients receive to the device of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.api.messages import Arrays, PublishedVersion
from raysim.training.transfer import to_device


@dataclass(frozen=True)
class Broadcast:
    """A published version as tensors on a device; on a CPU, views of the received arrays.

    base: [layout.shared], the parameters and float buffers.
    counters: int64 [layout.shared_counters], the integer buffers.
    download: further tensors that methods send to clients, by "method.name".
    """

    base: Tensor
    counters: Tensor
    download: Mapping[str, Tensor]


class Receiver:
    """The part of a worker that receives versions and keeps the last one on the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._constants: dict[str, Tensor] = {}
        self._last_key: tuple[int, int, str] | None = None
        self._last: Broadcast | None = None

    def store_constants(self, constants: Arrays) -> None:
        """Store the tensors that methods send to each client only once in a run.

        constants: the arrays, by "method.name".
        """
        self._constants = self.tensors(constants)

    def receive(self, published: PublishedVersion) -> Broadcast:
        """Return a published version on the device; copy it unless it was the last one received."""
        key = published.version, published.number, published.mark
        if self._last is None or self._last_key != key or self.device.type == "cpu":
            self._last_key = key
            self._last = Broadcast(
                to_device(published.vector, self.device),
                to_device(published.counters, self.device),
                self.tensors(published.extras) | self._constants,
            )
        return self._last

    def tensors(self, arrays: Arrays) -> dict[str, Tensor]:
        """Return arrays as tensors on the device."""
        return {name: to_device(array, self.device) for name, array in arrays.items()}
