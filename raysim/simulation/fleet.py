"""Devices of clients on the virtual clock: how long a job takes, when a client can be asked, and who drops out.

All of it is a function of the run's seed: never of measured time, and never of a result of training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.streams import stream, stream_key, uniform
from raysim.simulation.availability import DAY, Availability, Diurnal, MarkovAvailability, floats

FLOAT_BYTES = 4


class Trip(NamedTuple):
    """The way of a job: when its client is back, or when it was lost."""

    finish: float  # virtual seconds
    arrives: bool  # False: the client dropped out, and the server learns of it at `finish`


class Devices(Protocol):
    """The devices of all clients, made once for a run."""

    @property
    def presence(self) -> Availability | None:
        """When clients that are idle can be sent off; None for always."""
        ...

    def trip(
        self, client: int, participation: int, start: float, samples: float, down: int, up: int
    ) -> Trip:
        """Receive `down` floats, train on `samples` samples, send `up` floats, beginning at `start`."""
        ...

    def seconds(self, samples: np.ndarray, down: int, up: int) -> np.ndarray:
        """[clients] float64: how long each client would need, were it never to drop out."""
        ...


@dataclass(frozen=True)
class Speeds:
    """What clients' devices can do: samples [clients] per second; down, up [clients] bytes per second."""

    samples: np.ndarray
    down: np.ndarray
    up: np.ndarray


class Labels(NamedTuple):
    """What kind of device each client has."""

    names: tuple[str, ...]
    kinds: np.ndarray  # [clients] int: an index into `names`


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A kind of devices; a class of your own overrides `speeds`, or `devices` altogether.

    availability: "always"; "diurnal", for `hours` a day, in time zones around the world; "markov", for `on` seconds in
    the mean and then away for `off`. A client that goes away loses the job that it has. dropout: the chance that a job
    is lost for another reason, at any moment of it. patience: most seconds that a run waits for its first client.
    """

    AVAILABILITIES: ClassVar[tuple[str, ...]] = ("always", "diurnal", "markov")

    availability: str = "always"
    hours: float = 8.0
    on: float = 3600.0
    off: float = 3600.0
    dropout: float = 0.0
    patience: float = DAY

    def __post_init__(self) -> None:
        one_of("fleet.availability", self.availability, self.AVAILABILITIES)
        in_range("fleet.hours", self.hours, above=0, most=24)
        above("fleet.on", self.on, 0)
        above("fleet.off", self.off, 0)
        in_range("fleet.dropout", self.dropout, least=0, below=1)
        at_least("fleet.patience", self.patience, 0)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """Of so many clients. sample_flops: floating-point operations of one sample's forward and backward pass."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither speeds nor devices")

    def presence(self, seed: int, clients: int) -> Availability | None:
        """When clients are available; None for always."""
        if self.availability == "diurnal" and self.hours < 24:
            return Diurnal(stream(seed, "fleet.zone").integers(24, size=clients), self.hours)
        if self.availability == "markov":
            self._check_wait(self.off / clients)
            return MarkovAvailability(seed, clients, self.on, self.off)
        return None

    def _check_wait(self, seconds: float) -> None:
        """Refuse a fleet that is empty for longer than `patience` in the mean."""
        if seconds > self.patience:
            raise ValueError(
                f"fleet.off={self.off:g} keeps each client away for so long that a run would wait {seconds:,.0f} s in "
                "the mean whenever nobody is there: lower fleet.off, or raise fleet.patience"
            )

    def labels(self, seed: int, clients: int) -> Labels:
        """What kind of device each client has, for reports."""
        return Labels((type(self).__name__.lower(),), np.zeros(clients, np.int16))

    def devices(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Devices:
        """The devices of a run's clients."""
        fate = Fate(self.presence(seed, clients), self.dropout, stream_key(seed, "fleet.dropout"))
        return Fixed(self.speeds(seed, clients, sample_flops), fate)


@dataclass(frozen=True)
class Fate:
    """When clients are there, and what becomes of their jobs. lost: the key of drop-outs."""

    presence: Availability | None = None
    dropout: float = 0.0
    lost: int = 0

    def trip(self, client: int, participation: int, start: float, seconds: float) -> Trip:
        """Of a job that takes so long if nothing happens to it."""
        finish, arrives = start + seconds, True
        if self.dropout and uniform(self.lost, client, participation, 0) < self.dropout:
            finish, arrives = start + seconds * uniform(self.lost, client, participation, 1), False
        if self.presence is not None:
            leaves = self.presence.next_change(client, start, finish)
            if leaves < finish:
                finish, arrives = leaves, False
        return Trip(finish, arrives)


class Fixed:
    """Devices whose speed stays what it is."""

    def __init__(self, speeds: Speeds, fate: Fate):
        self._fate, self.presence = fate, fate.presence
        self._speeds = Speeds(
            *(np.asarray(each, np.float64) for each in (speeds.samples, speeds.down, speeds.up))
        )
        self._samples, self._down, self._up = (floats(each) for each in vars(self._speeds).values())

    def trip(
        self, client: int, participation: int, start: float, samples: float, down: int, up: int
    ) -> Trip:
        """See `Devices`."""
        network = down * FLOAT_BYTES / self._down[client] + up * FLOAT_BYTES / self._up[client]
        return self._fate.trip(
            client, participation, start, network + samples / self._samples[client]
        )

    def seconds(self, samples: np.ndarray, down: int, up: int) -> np.ndarray:
        """See `Devices`."""
        own = self._speeds
        return np.asarray(
            samples / own.samples + down * FLOAT_BYTES / own.down + up * FLOAT_BYTES / own.up
        )


@dataclass(frozen=True)
class Ideal(Fleet):
    """Equal devices with a network that costs no time. speed: samples per virtual second."""

    speed: float = field(default=1000.0, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        above("fleet.speed", self.speed, 0)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """See `Fleet`."""
        network = np.full(clients, np.inf)
        return Speeds(np.full(clients, float(self.speed)), network, network)


@dataclass(frozen=True)
class Lognormal(Fleet):
    """Log-normally distributed speed and bandwidth, drawn once per client.

    speed: median samples per second; bandwidth_down, bandwidth_up: median bytes per second; sigma: of the logarithms.
    """

    speed: float = field(default=1000.0, kw_only=False)
    sigma: float = field(default=1.0, kw_only=False)
    bandwidth_down: float = field(default=2.5e6, kw_only=False)
    bandwidth_up: float = field(default=1.0e6, kw_only=False)
    bandwidth_sigma: float = field(default=0.5, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("speed", "bandwidth_down", "bandwidth_up"):
            above(f"fleet.{name}", getattr(self, name), 0)
        for name in ("sigma", "bandwidth_sigma"):  # beyond 10, e^(6 sigma) is no device any more
            in_range(f"fleet.{name}", getattr(self, name), least=0, most=10)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """See `Fleet`."""
        normal = stream(seed, "fleet").standard_normal((clients, 2))
        network = np.exp(self.bandwidth_sigma * normal[:, 1])
        speed = self.speed * np.exp(self.sigma * normal[:, 0])
        return Speeds(speed, self.bandwidth_down * network, self.bandwidth_up * network)
