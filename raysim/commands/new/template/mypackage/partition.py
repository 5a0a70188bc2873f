"""A partition: client 2 gets twice as many samples as client 1, client 3 three times, ..."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raysim import CSR, Partitioner
from raysim.data.partition import Draws
from raysim.primitives.checks import at_least


@dataclass(frozen=True)
class MyPartition(Partitioner):
    """A partition into clients of growing size.

    The partition assigns rows of the data to clients. raysim then divides the rows of each client
    into training and test samples.
    """

    clients: int = 10

    def check(self) -> None:
        """Raise `ValueError` for a setting that is impossible, whatever the data are."""
        at_least("partition.clients", self.clients, 1)

    def assign(self, draws: Draws) -> CSR:
        """Return the rows of all clients: client k gets indices[offsets[k] : offsets[k + 1]].

        draws: the rows' labels and domains, each [n]. `draws.order()` returns all row numbers in a
        random order.
        """
        order = draws.order()
        weights = np.arange(1, self.clients + 1)
        shares = np.cumsum(weights) / (self.clients * (self.clients + 1) / 2)
        ends = np.floor(shares * len(order) + 1e-9)
        offsets = np.concatenate(([0], ends)).astype(np.int64)
        return CSR(order, offsets)
