"""The virtual clock of a Flower app: it computes at which time the reply to a message arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raysim.primitives.kinds import FLOAT_BYTES
from raysim.simulation.fleet import Devices, Fleet


@dataclass(frozen=True)
class Arrival:
    """The arrival of a reply, or of an error that takes the place of a lost reply.

    time: the virtual time of the arrival, in seconds.
    lost: why the reply was lost; "" if it arrives.
    """

    time: float
    lost: str = ""


class VirtualClock:
    """The virtual clock of a Grid, which decides when the replies to messages arrive.

    seed: the seed of the run, which decides the devices of the fleet.
    samples: the samples that a client processes for a training message. Any other message costs no
    samples.
    """

    def __init__(self, fleet: Fleet, seed: int, clients: int, samples: int):
        self.now = 0.0
        self.clients, self.samples = clients, samples
        self._devices: Devices = fleet.devices(seed, clients, _no_flops)
        self._messages: Counter[int] = Counter()  # by client: the messages to it so far

    def next_number(self, client: int) -> int:
        """Count a message to a client; return the number of earlier messages to this client."""
        number = self._messages[client]
        self._messages[client] += 1
        return number

    def arrival(
        self, client: int, number: int, is_training: bool, array_bytes: int, ttl: float
    ) -> Arrival:
        """Return when the reply to a message arrives, if the message is sent now.

        If the client drops out or the message expires, an error arrives in place of the reply.
        number: the number of earlier messages to the client.
        is_training: True if the client trains and replies with arrays of the message's size.
        Otherwise it processes no samples and replies without arrays.
        array_bytes: the size of the message's arrays.
        ttl: the virtual seconds after which the message expires.
        """
        floats = array_bytes // FLOAT_BYTES
        samples = float(self.samples) if is_training else 0.0
        up = floats if is_training else 0
        trip = self._devices.trip(client, number, self.now, samples, floats, up)
        if trip.finish > self.now + ttl:
            return Arrival(self.now + ttl, f"the message expired after {ttl:g} virtual seconds")
        if not trip.arrives:
            return Arrival(trip.finish, "the client dropped out")
        return Arrival(trip.finish)

    def available_clients(self) -> Sequence[int]:
        """Return the clients that are available now, ascending."""
        presence = self._devices.presence
        everyone = np.arange(self.clients)
        if presence is not None:
            everyone = presence.available_clients(everyone, self.now)
        available: list[int] = everyone.tolist()
        return available

    def wait_for_change(self) -> None:
        """Advance the clock to the next change of a client's availability, if there is one."""
        presence = self._devices.presence
        if presence is None:
            return
        change = next(iter(presence.changes(np.arange(self.clients), self.now)), None)
        if change is not None:
            self.now = max(self.now, change.at)


def _no_flops() -> float:
    raise ValueError(
        "fleet: these devices need the number of operations of the model, which raysim does not "
        "know for a Flower app. Choose fleet=ideal, fleet=lognormal or fleet=trace."
    )
