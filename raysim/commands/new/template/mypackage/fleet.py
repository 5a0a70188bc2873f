"""A fleet: every other device is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from raysim import Fleet
from raysim.primitives.checks import above
from raysim.simulation.fleet import Speeds


@dataclass(frozen=True)
class MyFleet(Fleet):
    """Samples per virtual second of even clients and of odd ones, on a network that costs no time."""

    fast: float = field(default=1000.0, kw_only=False)
    slow: float = field(default=100.0, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        above("fleet.fast", self.fast, 0)
        above("fleet.slow", self.slow, 0)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """One number per client: samples per second, and bytes per second down and up."""
        network = np.full(clients, np.inf)
        return Speeds(np.where(np.arange(clients) % 2, self.slow, self.fast), network, network)
