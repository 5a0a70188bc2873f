"""Job times that are drawn, whatever a job has to do: the delay model of FADAS.

Wang, Wang, Lu, Chen, "FADAS: Towards Federated Adaptive Asynchronous Optimization" (ICML 2024), and the released code:
each client is of a kind, and each of its jobs takes a time that is uniform between the kind's bounds. The kind is the
largest part of a draw from a Dirichlet distribution. "Large" delays: fleet.kinds.slow={least: 50, most: 80}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from raysim.primitives.checks import above, at_least, require
from raysim.primitives.streams import stream, stream_key, uniform
from raysim.simulation.availability import floats
from raysim.simulation.fleet import Devices, Fate, Fleet, Labels, Trip


@dataclass(frozen=True)
class Kind:
    """Clients whose jobs take from `least` to `most` seconds. weight: of the Dirichlet distribution."""

    weight: float
    least: float
    most: float


def _kinds() -> dict[str, Kind]:
    return {"fast": Kind(3.0, 1.0, 2.0), "medium": Kind(2.0, 3.0, 5.0), "slow": Kind(1.0, 5.0, 8.0)}


@dataclass(frozen=True)
class Delays(Fleet):
    """Kinds of clients by the time that their jobs take.

    scale: of the weights; the larger it is, the fewer clients are of kinds of small weight.
    """

    kinds: dict[str, Kind] = field(default_factory=_kinds, kw_only=False)
    scale: float = field(default=1.0, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        above("fleet.scale", self.scale, 0)
        require("fleet.kinds", self.kinds, self.kinds, "at least one kind of client")
        for name, kind in self.kinds.items():
            above(f"fleet.kinds.{name}.weight", kind.weight, 0)
            above(f"fleet.kinds.{name}.least", kind.least, 0)
            at_least(f"fleet.kinds.{name}.most", kind.most, kind.least)

    def labels(self, seed: int, clients: int) -> Labels:
        """See `Fleet`."""
        weights = [self.scale * kind.weight for kind in self.kinds.values()]
        parts = stream(seed, "fleet.kinds").dirichlet(weights, size=clients)
        return Labels(tuple(self.kinds), parts.argmax(axis=1).astype(np.int16))

    def devices(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Devices:
        """See `Fleet`."""
        fate = Fate(self.presence(seed, clients), self.dropout, stream_key(seed, "fleet.dropout"))
        kinds = self.labels(seed, clients).kinds
        least, most = (
            np.array([getattr(kind, name) for kind in self.kinds.values()])
            for name in ("least", "most")
        )
        return Drawn(least[kinds], most[kinds], stream_key(seed, "fleet.delay"), fate)


class Drawn:
    """Devices whose jobs take a time that is uniform between two bounds [clients], drawn for each job."""

    def __init__(self, least: np.ndarray, most: np.ndarray, drawn: int, fate: Fate):
        self._fate, self.presence, self._drawn = fate, fate.presence, drawn
        self._bounds = np.asarray(least, np.float64), np.asarray(most, np.float64)
        self._least, self._most = floats(self._bounds[0]), floats(self._bounds[1])

    def trip(
        self, client: int, participation: int, start: float, samples: float, down: int, up: int
    ) -> Trip:
        """See `Devices`."""
        least = self._least[client]
        seconds = least + (self._most[client] - least) * uniform(self._drawn, client, participation)
        return self._fate.trip(client, participation, start, seconds)

    def seconds(self, samples: np.ndarray, down: int, up: int) -> np.ndarray:
        """In the mean; see `Devices`."""
        return np.asarray((self._bounds[0] + self._bounds[1]) / 2)
