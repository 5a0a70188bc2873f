"""Devices of clients on the virtual clock: job durations, availability and drop-outs.

All of these are functions of the run's seed. They never depend on measured time or on training
results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from raysim.api.declarations import Labels as Labels
from raysim.primitives.checks import above, at_least, in_range, one_of
from raysim.primitives.kinds import FLOAT_BYTES
from raysim.primitives.streams import stream, stream_key, uniform
from raysim.simulation.availability import DAY, Availability, Diurnal, MarkovAvailability, floats
from raysim.simulation.costs import Cost, FleetCosts


class Trip(NamedTuple):
    """The end of a job on the virtual clock.

    finish: the virtual time, in seconds, at which the update arrives or the client drops out.
    arrives: False if the client drops out.
    """

    finish: float
    arrives: bool


class Devices(Protocol):
    """The devices of all clients of a run."""

    @property
    def presence(self) -> Availability | None:
        """When each client is available; None means that all clients always are."""
        ...

    def trip(
        self, client: int, participation: int, start: float, samples: float, down: int, up: int
    ) -> Trip:
        """Return when a job ends, and whether its update arrives.

        participation: the number of earlier jobs of the client.
        start: the virtual time in seconds at which the job begins.
        samples: the training work (`Job.work`).
        down, up: the floats received and sent.
        """
        ...

    def seconds(
        self, samples: np.ndarray, down: int | np.ndarray, up: int | np.ndarray
    ) -> np.ndarray:
        """Return the duration of one job of each client in virtual seconds, float64 [clients].

        The jobs are assumed not to be lost.
        samples: [clients], the training work (`Job.work`).
        down, up: the floats received and sent, [clients], or one number for all clients.
        """
        ...


@runtime_checkable
class DevicesWithPhases(Protocol):
    """Devices that know how long each phase of a job takes."""

    def phases(self, client: int, samples: float, down: int, up: int) -> tuple[float, float, float]:
        """Return how long a client receives, trains and sends in a job, in virtual seconds.

        The job is assumed not to be lost.
        samples: the training work (`Job.work`).
        down, up: the floats received and sent.
        """
        ...


def expected_seconds(
    devices: Devices,
    load: Callable[[int, int, int, int], tuple[float, int, int]],
    eligible: np.ndarray,
    clients: int,
) -> np.ndarray:
    """Return the expected virtual seconds of each client's first job, float64 [clients].

    No drop-outs are assumed. The values have no meaning for clients that are not in `eligible`.
    load: returns what a client's next job costs: the samples to process, the floats to receive and
    the floats to send. Its arguments are those of the planner's `load`.
    eligible: int64 [n], the clients with training samples.
    clients: the number of clients of the run.
    """
    loads = np.zeros((clients, 3))
    first_loads = (load(client, 0, 0, 0) for client in eligible.tolist())
    loads[eligible] = np.fromiter(first_loads, np.dtype((float, 3)))
    work, down, up = loads.T
    return np.asarray(devices.seconds(work, down, up), np.float64)


@dataclass(frozen=True)
class Speeds:
    """The speeds of the devices of all clients.

    samples: float [clients], samples per second in training.
    down, up: float [clients], bytes received and sent per second.
    """

    samples: np.ndarray
    down: np.ndarray
    up: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A fleet: a rule that draws the simulated devices of all clients.

    A subclass overrides `speeds`. If it has rules of its own for the duration or loss of jobs, it
    overrides `devices` instead.

    availability: when clients are available: "always", "diurnal" or "markov". The job of a client
    that becomes unavailable is lost.
    hours: for "diurnal": the hours of each day in which a client is available. Clients live in time
    zones around the world.
    on, off: for "markov": the mean seconds for which a client is available, and unavailable.
    dropout: the probability that a job is lost for another reason, at a random moment of the job.
    patience: a number of virtual seconds. A run ends with an error if no client is available in its
    first `patience` seconds. With "markov", a longer average wait for a client is also an error.
    cost: the power of a device in watts, and the price and the CO2 of a gigabyte. If all these
    values are 0, no costs are computed.
    kwh_price: the price of a kilowatt-hour, in any currency.
    kwh_co2: the CO2 of a kilowatt-hour, in grams.
    """

    AVAILABILITIES: ClassVar[tuple[str, ...]] = ("always", "diurnal", "markov")

    availability: str = "always"
    hours: float = 8.0
    on: float = 3600.0
    off: float = 3600.0
    dropout: float = 0.0
    patience: float = DAY
    cost: Cost = field(default_factory=Cost)
    kwh_price: float = 0.0
    kwh_co2: float = 0.0

    def __post_init__(self) -> None:
        one_of("fleet.availability", self.availability, self.AVAILABILITIES)
        in_range("fleet.hours", self.hours, above=0, most=24)
        above("fleet.on", self.on, 0)
        above("fleet.off", self.off, 0)
        in_range("fleet.dropout", self.dropout, least=0, below=1)
        at_least("fleet.patience", self.patience, 0)
        self.cost.check("fleet.cost")
        at_least("fleet.kwh_price", self.kwh_price, 0)
        at_least("fleet.kwh_co2", self.kwh_co2, 0)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """Return the speeds of the devices of `clients` clients.

        seed: the seed of the run, which decides all random numbers.
        sample_flops: function that returns the floating-point operations of the forward and
        backward pass of one sample.
        """
        raise NotImplementedError(
            f"the fleet {type(self).__name__} has neither a function 'speeds' nor a function "
            "'devices'. Define one of them in this class."
        )

    def presence(self, seed: int, clients: int) -> Availability | None:
        """Return the times at which each of `clients` clients is available; None means always.

        seed: the seed of the run.
        """
        if self.availability == "diurnal" and self.hours < 24:
            zones = self.regions(seed, clients)
            assert zones is not None, "a diurnal fleet has time zones"
            return Diurnal(zones, self.hours)
        if self.availability == "markov":
            self._check_wait(self.off / clients)
            return MarkovAvailability(seed, clients, self.on, self.off)
        return None

    def _check_wait(self, seconds: float) -> None:
        """Raise ValueError if the average wait for a client is longer than `patience`.

        seconds: the average wait, in virtual seconds.
        """
        if seconds > self.patience:
            raise ValueError(
                f"fleet.off={self.off:g} makes a run wait {seconds:,.0f} s of virtual time on "
                f"average for an available client, more than fleet.patience={self.patience:g} s. "
                "Decrease fleet.off, or increase fleet.patience."
            )

    def regions(self, seed: int, clients: int) -> np.ndarray | None:
        """Return the region (time zone) of each client, int [clients].

        Clients have regions only if `availability` is "diurnal"; otherwise return None.
        seed: the seed of the run.
        """
        if self.availability == "diurnal":
            return stream(seed, "fleet.zone").integers(24, size=clients)
        return None

    def costs(self, seed: int, clients: int) -> FleetCosts | None:
        """Return the power of all clients' devices, and the prices and CO2 of energy and traffic.

        Return None if all values of `self.cost` are 0.
        seed: the seed of the run.
        clients: the number of clients.
        """
        if self.cost.is_zero:
            return None
        kinds = np.zeros(clients, np.int16)
        return FleetCosts([self.cost], kinds, self.kwh_price, self.kwh_co2)

    def labels(self, seed: int, clients: int) -> Labels:
        """Return the kind of each client's device, such as "phone"; reports show it.

        A fleet whose devices are of one kind returns its own name as the kind of all clients.
        seed: the seed of the run.
        """
        return Labels((type(self).__name__.lower(),), np.zeros(clients, np.int16))

    def devices(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Devices:
        """Return the devices of `clients` clients.

        seed: the seed of the run, which decides all random numbers.
        sample_flops: function that returns the floating-point operations of the forward and
        backward pass of one sample.
        """
        fate = Fate(self.presence(seed, clients), self.dropout, stream_key(seed, "fleet.dropout"))
        return Fixed(self.speeds(seed, clients, sample_flops), fate)


@dataclass(frozen=True)
class Fate:
    """The rule that decides which jobs are lost, and when.

    presence: when each client is available; None means always.
    dropout: the probability that a job is lost although its client stays available.
    lost: the key of the random numbers for drop-outs (`stream_key`).
    """

    presence: Availability | None = None
    dropout: float = 0.0
    lost: int = 0

    def trip(self, client: int, participation: int, start: float, seconds: float) -> Trip:
        """Return when a job ends, and whether its update arrives.

        participation: the number of earlier jobs of the client.
        start: the virtual time at which the job begins.
        seconds: the duration of the job if it is not lost.
        """
        finish, arrives = start + seconds, True
        if self.dropout and uniform(self.lost, client, participation, 0) < self.dropout:
            finish, arrives = start + seconds * uniform(self.lost, client, participation, 1), False
        if self.presence is not None:
            leaves = self.presence.next_change(client, start, finish)
            if leaves < finish:
                finish, arrives = leaves, False
        return Trip(finish, arrives)


class Fixed:
    """Devices whose speeds are the same for all jobs of a client.

    speeds: the speeds of all clients.
    fate: the rule that decides which jobs are lost.
    """

    def __init__(self, speeds: Speeds, fate: Fate):
        self._fate, self.presence = fate, fate.presence
        samples = np.asarray(speeds.samples, np.float64)
        down = np.asarray(speeds.down, np.float64)
        up = np.asarray(speeds.up, np.float64)
        self._speeds = Speeds(samples, down, up)
        # The same memory for single clients.
        self._samples, self._down, self._up = floats(samples), floats(down), floats(up)

    def trip(
        self, client: int, participation: int, start: float, samples: float, down: int, up: int
    ) -> Trip:
        """Return when a job ends, and whether its update arrives.

        participation: the number of earlier jobs of the client.
        start: the virtual time in seconds at which the job begins.
        samples: the training work (`Job.work`).
        down, up: the floats received and sent.
        """
        network = down * FLOAT_BYTES / self._down[client] + up * FLOAT_BYTES / self._up[client]
        return self._fate.trip(
            client, participation, start, network + samples / self._samples[client]
        )

    def phases(self, client: int, samples: float, down: int, up: int) -> tuple[float, float, float]:
        """Return how long a client receives, trains and sends in a job, in virtual seconds.

        The job is assumed not to be lost.
        samples: the training work (`Job.work`).
        down, up: the floats received and sent.
        """
        return (
            down * FLOAT_BYTES / self._down[client],
            samples / self._samples[client],
            up * FLOAT_BYTES / self._up[client],
        )

    def seconds(
        self, samples: np.ndarray, down: int | np.ndarray, up: int | np.ndarray
    ) -> np.ndarray:
        """Return the duration of one job of each client in virtual seconds, float64 [clients].

        The jobs are assumed not to be lost.
        samples: [clients], the training work (`Job.work`).
        down, up: the floats received and sent, [clients], or one number for all clients.
        """
        speeds = self._speeds
        training = samples / speeds.samples
        receiving = down * FLOAT_BYTES / speeds.down
        return np.asarray(training + receiving + up * FLOAT_BYTES / speeds.up)


@dataclass(frozen=True)
class Ideal(Fleet):
    """A fleet of equal devices with an infinitely fast network.

    speed: samples per virtual second.
    """

    speed: float = field(default=1000.0, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        above("fleet.speed", self.speed, 0)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """Return equal speeds and an infinitely fast network.

        seed, sample_flops: have no effect here.
        """
        network = np.full(clients, np.inf)
        return Speeds(np.full(clients, float(self.speed)), network, network)


@dataclass(frozen=True)
class Lognormal(Fleet):
    """A fleet with log-normally distributed speed and bandwidth, drawn once for each client.

    speed: median samples per second.
    sigma: standard deviation of the logarithm of the speed.
    bandwidth_down, bandwidth_up: median bytes received and sent per second.
    bandwidth_sigma: standard deviation of the logarithm of the bandwidth.
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
        for name in ("sigma", "bandwidth_sigma"):  # beyond 10, e^(6 sigma) is no real device
            in_range(f"fleet.{name}", getattr(self, name), least=0, most=10)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """Draw speed and bandwidth of each client.

        seed: the seed of the run.
        sample_flops: has no effect here, because the speed is in samples per second.
        """
        normal = stream(seed, "fleet").standard_normal((clients, 2))
        network = np.exp(self.bandwidth_sigma * normal[:, 1])
        speed = self.speed * np.exp(self.sigma * normal[:, 0])
        return Speeds(speed, self.bandwidth_down * network, self.bandwidth_up * network)
