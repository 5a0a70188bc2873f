"""Random durations of jobs, independent of work and traffic: the delay model of FADAS.

Source: Wang, Wang, Lu, Chen, "FADAS: Towards Federated Adaptive Asynchronous Optimization" (ICML
2024), and the released code. The duration of a job is drawn uniformly between the bounds of its
client's kind, such as "slow". For the paper's "large" delays set fleet.kinds.slow={least: 50, most:
80}.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from raysim.primitives.checks import above, in_range, require
from raysim.primitives.streams import stream, stream_key, uniform
from raysim.simulation.availability import floats
from raysim.simulation.fleet import Devices, Fate, Fleet, Labels, Trip


@dataclass(frozen=True)
class DelayKind:
    """A kind of client, such as "slow", and the limits of the random time of each job.

    weight: a larger weight means more clients of this kind (see `Delays`).
    least, most: the shortest and the longest time of a job, in virtual seconds.
    """

    weight: float
    least: float
    most: float


def _default_kinds() -> dict[str, DelayKind]:
    return {
        "fast": DelayKind(3.0, 1.0, 2.0),
        "medium": DelayKind(2.0, 3.0, 5.0),
        "slow": DelayKind(1.0, 5.0, 8.0),
    }


@dataclass(frozen=True)
class Delays(Fleet):
    """A fleet in which each client belongs to a kind that decides the time of its jobs.

    A client draws p ~ Dirichlet(scale * w_1, ..., scale * w_k), where w_i is the weight of kind i.
    It gets the kind with the largest p_i.
    kinds: the kinds of clients, by name.
    scale: a larger number gives more clients the kind of the largest weight.
    """

    kinds: dict[str, DelayKind] = field(default_factory=_default_kinds, kw_only=False)
    scale: float = field(default=1.0, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        above("fleet.scale", self.scale, 0)
        require("fleet.kinds", self.kinds, self.kinds, "at least one kind of client")
        for name, kind in self.kinds.items():
            above(f"fleet.kinds.{name}.weight", kind.weight, 0)
            above(f"fleet.kinds.{name}.least", kind.least, 0)
            least, why = kind.least, f"this is fleet.kinds.{name}.least"
            in_range(f"fleet.kinds.{name}.most", kind.most, least=least, why=why)

    def labels(self, seed: int, clients: int) -> Labels:
        """Draw the kind of each client, such as "slow"; the kind decides the client's delays.

        seed: the seed of the run.
        clients: the number of clients.
        """
        weights = [self.scale * kind.weight for kind in self.kinds.values()]
        parts = stream(seed, "fleet.kinds").dirichlet(weights, size=clients)
        return Labels(tuple(self.kinds), parts.argmax(axis=1).astype(np.int16))

    def devices(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Devices:
        """Return devices for which every job takes a random time.

        The time is between `least` and `most` of the client's `DelayKind`.
        sample_flops: has no effect, because durations do not depend on the model.
        """
        fate = Fate(self.presence(seed, clients), self.dropout, stream_key(seed, "fleet.dropout"))
        kinds = self.labels(seed, clients).kinds
        least = np.array([kind.least for kind in self.kinds.values()])
        most = np.array([kind.most for kind in self.kinds.values()])
        return RandomDelays(least[kinds], most[kinds], stream_key(seed, "fleet.delay"), fate)


class RandomDelays:
    """Devices for which each job takes a random time between two bounds.

    least, most: float64 [clients], the bounds for each client, in virtual seconds.
    key: the key of the random numbers (`stream_key`).
    fate: decides which jobs are lost.
    """

    def __init__(self, least: np.ndarray, most: np.ndarray, key: int, fate: Fate):
        self._fate, self.presence, self._key = fate, fate.presence, key
        self._bounds = np.asarray(least, np.float64), np.asarray(most, np.float64)
        self._least, self._most = floats(self._bounds[0]), floats(self._bounds[1])

    def trip(
        self, client: int, participation: int, start: float, samples: float, down: int, up: int
    ) -> Trip:
        """Return when a job ends, and whether its update arrives.

        The random duration depends only on `client` and `participation`.
        participation: the number of earlier jobs of the client.
        start: the virtual time in seconds at which the job begins.
        """
        least = self._least[client]
        seconds = least + (self._most[client] - least) * uniform(self._key, client, participation)
        return self._fate.trip(client, participation, start, seconds)

    def seconds(
        self, samples: np.ndarray, down: int | np.ndarray, up: int | np.ndarray
    ) -> np.ndarray:
        """Return the mean duration of a job for each client in seconds, float64 [clients].

        samples, down, up: have no effect here.
        """
        return np.asarray((self._bounds[0] + self._bounds[1]) / 2)
