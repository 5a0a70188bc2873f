"""Devices of clients on the virtual clock: how long a participation takes, from its size alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from raysim.primitives.checks import above, at_least
from raysim.primitives.streams import stream

FLOAT_BYTES = 4


class Fleet(Protocol):
    """Durations of participations; a function of the run's seed, never of measured time."""

    def duration(self, seed: int, client: int, samples: float, down: int, up: int) -> float:
        """Virtual seconds to receive `down` floats, train on `samples` samples and send `up` floats."""
        ...


@dataclass(frozen=True)
class Ideal:
    """Equal devices with a network that costs no time. speed: samples per virtual second."""

    speed: float = 1000.0

    def __post_init__(self) -> None:
        above("fleet.speed", self.speed, 0)

    def duration(self, seed: int, client: int, samples: float, down: int, up: int) -> float:
        """See `Fleet`."""
        return samples / self.speed


@dataclass(frozen=True)
class Lognormal:
    """Log-normally distributed speed and bandwidth, drawn once per client.

    speed: median samples per second; bandwidth_down, bandwidth_up: median bytes per second; sigma: of the logarithms.
    """

    speed: float = 1000.0
    sigma: float = 1.0
    bandwidth_down: float = 2.5e6
    bandwidth_up: float = 1.0e6
    bandwidth_sigma: float = 0.5

    def __post_init__(self) -> None:
        for key in ("speed", "bandwidth_down", "bandwidth_up"):
            above(f"fleet.{key}", getattr(self, key), 0)
        for key in ("sigma", "bandwidth_sigma"):
            at_least(f"fleet.{key}", getattr(self, key), 0)

    def duration(self, seed: int, client: int, samples: float, down: int, up: int) -> float:
        """See `Fleet`."""
        normal = stream(seed, "fleet", client).standard_normal(2)
        speed = self.speed * float(np.exp(self.sigma * normal[0]))
        network = float(np.exp(self.bandwidth_sigma * normal[1]))
        seconds = down * FLOAT_BYTES / (self.bandwidth_down * network) + up * FLOAT_BYTES / (
            self.bandwidth_up * network
        )
        return seconds + samples / speed
