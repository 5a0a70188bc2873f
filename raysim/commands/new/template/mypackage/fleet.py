"""A fleet: every second device is slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from raysim import Fleet
from raysim.primitives.checks import above
from raysim.simulation.fleet import Speeds


@dataclass(frozen=True)
class MyFleet(Fleet):
    """Devices of two speeds, on a network that takes no time.

    fast: samples per virtual second of clients with an even number.
    slow: samples per virtual second of clients with an odd number.
    """

    fast: float = field(default=1000.0, kw_only=False)
    slow: float = field(default=100.0, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        above("fleet.fast", self.fast, 0)
        above("fleet.slow", self.slow, 0)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """Return the speeds of all devices.

        `Speeds` has three arrays [clients]: samples trained per virtual second, bytes received per
        second, and bytes sent per second.
        seed: the seed of the run, for fleets that draw devices at random.
        sample_flops: returns the floating-point operations to train one sample.
        """
        network = np.full(clients, np.inf)
        samples_per_s = np.where(np.arange(clients) % 2, self.slow, self.fast)
        return Speeds(samples_per_s, network, network)
