"""Compute the energy, the money and the CO2 that a run's jobs and idle devices cost.

A job has three phases: it receives, trains and sends. The energy of a phase is its duration times
the device's power in this phase. The energy of a job is the sum over its phases. Money and CO2
follow from the energy and the client's traffic. The energy of idle devices is counted separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raysim.api.messages import Job
from raysim.primitives.checks import at_least
from raysim.primitives.kinds import FLOAT_BYTES

GIGABYTE = 1e9
WATT_HOUR = 3600.0  # joules
# Columns of the history; all are sums since the start of the run.
COLUMNS = ("energy_wh", "idle_wh", "money", "co2_g")


@dataclass(frozen=True)
class Cost:
    """The power of a device in watts, and the costs of its link for a gigabyte (10^9 bytes).

    computing_w, receiving_w, sending_w: the power in these phases of a job.
    idle_w: the power between jobs.
    gb_price: money, in any currency.
    gb_co2: grams of CO2 from the electricity of the network.
    """

    computing_w: float = 0.0
    receiving_w: float = 0.0
    sending_w: float = 0.0
    idle_w: float = 0.0
    gb_price: float = 0.0
    gb_co2: float = 0.0

    def check(self, path: str) -> None:
        """Raise ValueError if a value is below 0.

        path: the configuration key of this object, which the error names.
        """
        for name, value in vars(self).items():
            at_least(f"{path}.{name}", value, 0)

    @property
    def is_zero(self) -> bool:
        """True if all values are 0."""
        return not any(vars(self).values())


@dataclass(frozen=True)
class FleetCosts:
    """The costs of all clients of a run.

    kinds: int [clients], the index of each client's costs in `costs`.
    kwh_price: the price of a kilowatt-hour that a device uses, in any currency.
    kwh_co2: the grams of CO2 that this kilowatt-hour causes.
    """

    costs: Sequence[Cost]
    kinds: np.ndarray
    kwh_price: float = 0.0
    kwh_co2: float = 0.0


class JobCost(NamedTuple):
    """The cost of a job: watt-hours of its device, money, and grams of CO2."""

    energy_wh: float = 0.0
    money: float = 0.0
    co2_g: float = 0.0


class Costs:
    """The total costs of a run's jobs and idle devices.

    devices: if they have no method `phases`, the whole duration of a job counts as training.
    eligible: the clients with samples; idle energy is counted for these clients only.
    """

    def __init__(self, fleet: FleetCosts, devices: Any, eligible: np.ndarray):
        self._costs, self._fleet, self._devices = tuple(fleet.costs), fleet, devices
        self._kinds = fleet.kinds.tolist() if len(fleet.costs) > 1 else None
        self._phases = getattr(devices, "phases", None)
        idle_w = np.array([cost.idle_w for cost in fleet.costs])
        # Power of all clients that are idle now.
        self._idle_w = float(idle_w[fleet.kinds[eligible]].sum())
        self._idle_since = 0.0
        self._totals = [0.0, 0.0, 0.0, 0.0]  # in the order of `COLUMNS`

    def _cost(self, client: int) -> Cost:
        return self._costs[self._kinds[client] if self._kinds is not None else 0]

    def of(self, job: Job) -> JobCost:
        """Return the cost of a job.

        A lost job costs only the energy that its client used before it was lost. All bytes that it
        should receive are counted. The bytes of its update are not counted.
        """
        cost = self._cost(job.client)
        seconds = job.finish - job.start
        receiving, computing, sending = 0.0, seconds, 0.0
        if self._phases is not None:
            receiving, computing, sending = self._phases(job.client, job.work, job.down, job.up)
        if not job.arrives:
            receiving = min(receiving, seconds)
            computing = min(computing, seconds - receiving)
            sending = min(sending, seconds - receiving - computing)
        joules = (
            receiving * cost.receiving_w + computing * cost.computing_w + sending * cost.sending_w
        )
        sent = job.up if job.arrives else 0
        return self._price(cost, joules, job.down + sent)

    def _price(self, cost: Cost, joules: float, sent_floats: int) -> JobCost:
        energy = joules / WATT_HOUR
        gigabytes = sent_floats * FLOAT_BYTES / GIGABYTE
        kwh = energy / 1000
        money = kwh * self._fleet.kwh_price + gigabytes * cost.gb_price
        co2 = kwh * self._fleet.kwh_co2 + gigabytes * cost.gb_co2
        return JobCost(energy, money, co2)

    # --- events -----------------------------------------------------------------------------------
    def start(self, job: Job, now: float) -> None:
        """Record that the job's client stops being idle at the virtual time `now`."""
        self._pass_time(now)
        self._idle_w -= self._cost(job.client).idle_w

    def end(self, job: Job, now: float) -> None:
        """Add the cost of a job that ended; its client is idle from the virtual time `now` on."""
        self._pass_time(now)
        self._idle_w += self._cost(job.client).idle_w
        self._add(self.of(job))

    def add_pass(self, client: int, work: float, down: int, up: int) -> None:
        """Add the cost of a forward pass, with which a client computes its loss for the selection.

        If the devices have no method `phases`, the pass costs no energy.
        work: a third of the number of samples in the pass.
        down, up: the floats received and sent.
        """
        job = Job(-1, client, 0, 0, work=work, down=down, up=up)
        self._add(self.of(job))

    def _add(self, cost: JobCost) -> None:
        self._totals[0] += cost.energy_wh
        self._totals[2] += cost.money
        self._totals[3] += cost.co2_g

    def _pass_time(self, now: float) -> None:
        self._totals[1] += self._idle_w * (now - self._idle_since) / WATT_HOUR
        self._idle_since = now

    def totals(self, now: float) -> dict[str, float]:
        """Return the sums from the start of the run to the virtual time `now`, by column.

        The columns of the history are energy_wh (of jobs), idle_wh (of idle devices), money and
        co2_g.
        """
        self._pass_time(now)
        return dict(zip(COLUMNS, self._totals, strict=True))

    # --- checkpoints ------------------------------------------------------------------------------
    def state(self) -> list[float]:
        """Return the values that change during a run, for a checkpoint."""
        return [*self._totals, self._idle_w, self._idle_since]

    def restore(self, state: Sequence[float]) -> None:
        """Continue from the costs in a checkpoint.

        state: what the method `state` returned for the checkpoint.
        """
        *self._totals, self._idle_w, self._idle_since = state
