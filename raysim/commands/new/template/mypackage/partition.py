"""A partition: the second client has twice as many samples as the first, the third three times as many, and so on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raysim import CSR, Partitioner
from raysim.data.partition import Draws
from raysim.primitives.checks import at_least


@dataclass(frozen=True)
class MyPartition(Partitioner):
    """Clients of growing size. What each holds out for its own tests is taken from it afterwards."""

    clients: int = 10

    def check(self) -> None:
        """Refuse what no data could satisfy."""
        at_least("partition.clients", self.clients, 1)

    def assign(self, draws: Draws) -> CSR:
        """Client k has the rows indices[offsets[k] : offsets[k + 1]]."""
        order = draws.order()
        shares = np.cumsum(np.arange(1, self.clients + 1)) / (self.clients * (self.clients + 1) / 2)
        offsets = np.concatenate(([0], np.floor(shares * len(order) + 1e-9))).astype(np.int64)
        return CSR(order, offsets)
