"""Named classes of devices, with their speeds and shares from published figures.

"Measured" and "published" figures are in the cited sources, "derived" ones follow from them, and
"assumed" ones are our choice.

Training speed, in floating-point operations per second:
- Phones. Measured: a fast, a medium and a slow phone need 179, 588 and 1,642 ms for 10 samples of
  FEMNIST (Yang et al., "Characterizing Impacts of Heterogeneity in Federated Learning upon
  Large-Scale Smartphone Data", WWW 2021; github.com/PKU-Chengxu/FLASH, `femnist_mean` in
  models/utils/device_util/device_util.py). Derived: 5.8, 1.8 and 0.63 GFLOP/s. A sample needs 6 x
  17.2 M operations, because LEAF's CNN makes 17.2 M multiplications in a forward pass. Tuned
  libraries reach 15 to 30 GFLOP/s on a fast phone's CPU (Das et al., "Enabling On-Device Smartphone
  GPU based Training", 2022).
- Tablets. Assumed: the speed of medium phones.
- Edge boxes. Published: NVIDIA's Jetson Nano has at most 236 GFLOP/s (32 bit). Assumed: a quarter
  of that.

Bandwidth in Mbit/s, down and up. Measured by Ookla's Speedtest users around the world:
- slow phones: 20.28 and 8.65, the mean of mobile networks in November 2017;
- medium phones: 35.96 and 11.22, the mean of mobile networks in September 2020;
- fast phones: 166.13 and 21.08, the median over 5G in the third quarter of 2021;
- tablets and edge boxes: 85.73 and 45.74, the mean of fixed networks in September 2020.
Assumed: the network that each class uses.

Shares of the classes:
- Edge boxes. Assumed: 2 % of all devices.
- Phones and tablets. Measured: a ratio of 52.3 to 4.3 in web traffic (StatCounter, December 2017).
- Fast phones. Measured: 24 % of the phones sold in 2023 were of the most expensive class
  (Counterpoint).
- Slow and medium phones. Measured: 18,820 slow and 16,428 medium phones (Yang et al.).

Assumed: the spread of the values within a class (sigma, bandwidth_sigma).

Power, in watts:
- Computing. Published: slow, medium and fast phones need 2.98, 5.44 and 6.33 in the benchmark
  GFXBench Manhattan 3.1. Arouj and Abdelmoniem, "Towards Energy-Aware Federated Learning on
  Battery-Powered Clients" (FedEdge 2022) use these values for training
  (github.com/SAYED-Sys-Lab/EAFL: `getEnergy` in core/helper/client.py). NVIDIA's Jetson Nano has a
  budget of 10. Assumed: tablets need as much as medium phones.
- Receiving and sending. Measured: an LTE phone needs 1.288, plus 0.05197 for each Mbit/s received
  or 0.43839 for each Mbit/s sent (Table 4 of Huang et al., "A Close Examination of Performance and
  Power Characteristics of 4G LTE Networks", MobiSys 2012). Derived: slow and medium phones at the
  bandwidths above. Assumed: fast phones need as much as medium ones; tablets and edge boxes need 2.
- Idle. Measured: a suspended phone needs 0.0686 (Carroll and Heiser, "An Analysis of Power
  Consumption in a Smartphone", USENIX ATC 2010). Assumed: tablets need the same; edge boxes need 2.

Money, in US dollars. Published: a gigabyte costs 5.09 in mobile networks, the mean of the world
(Cable.co.uk, 2020). Assumed: nothing in fixed networks; 0.15 for a kilowatt-hour.

CO2. Published: a kilowatt-hour causes 436 g, the mean of the world in 2022 (Ember, "Global
Electricity Review 2023"). A gigabyte needs 0.12 kWh in mobile and 0.05 kWh in fixed networks
(Finland in 2021; Traficom, 2022). Derived: a gigabyte causes 52.3 g and 21.8 g.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from raysim.primitives.checks import above, in_range, require
from raysim.primitives.streams import stream
from raysim.simulation.costs import Cost, FleetCosts
from raysim.simulation.fleet import Fleet, Labels, Speeds


@dataclass(frozen=True)
class DeviceClass:
    """One class of devices, with the medians of its speeds.

    share: the share of the clients that have such a device, 0 to 1.
    flops: floating-point operations per second in training.
    bandwidth_down, bandwidth_up: bytes received and sent per second.
    """

    share: float
    flops: float
    bandwidth_down: float
    bandwidth_up: float
    cost: Cost = field(default_factory=Cost)


def _default_classes() -> dict[str, DeviceClass]:
    return {
        "phone_low": DeviceClass(
            0.37, 0.63e9, 2.535e6, 1.081e6, Cost(2.98, 2.34, 5.08, 0.0686, 5.09, 52.3)
        ),
        "phone_mid": DeviceClass(
            0.32, 1.8e9, 4.495e6, 1.402e6, Cost(5.44, 3.16, 6.21, 0.0686, 5.09, 52.3)
        ),
        "phone_high": DeviceClass(
            0.22, 5.8e9, 20.77e6, 2.635e6, Cost(6.33, 3.16, 6.21, 0.0686, 5.09, 52.3)
        ),
        "tablet": DeviceClass(
            0.07, 1.8e9, 10.72e6, 5.717e6, Cost(5.44, 2.0, 2.0, 0.0686, 0.0, 21.8)
        ),
        "edge_box": DeviceClass(
            0.02, 59.0e9, 10.72e6, 5.717e6, Cost(10.0, 2.0, 2.0, 2.0, 0.0, 21.8)
        ),
    }


@dataclass(frozen=True)
class DeviceClasses(Fleet):
    """A fleet in which each client has a device of one class.

    The duration of a job follows from the client's speeds and the FLOPs of the model.
    classes: the classes by name; their shares add up to 1.
    sigma: standard deviation of the logarithm of the speed within a class.
    bandwidth_sigma: standard deviation of the logarithm of the bandwidth within a class.
    kwh_price, kwh_co2: US dollars and grams of CO2 for a kilowatt-hour.
    """

    classes: dict[str, DeviceClass] = field(default_factory=_default_classes, kw_only=False)
    sigma: float = field(default=0.25, kw_only=False)
    bandwidth_sigma: float = field(default=0.5, kw_only=False)
    kwh_price: float = field(default=0.15, kw_only=True)
    kwh_co2: float = field(default=436.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cost.is_zero:
            raise ValueError(
                "fleet.cost has no effect, because each class of fleet=devices has its own costs. "
                "Set fleet.classes.NAME.cost."
            )
        for name, device_class in self.classes.items():
            in_range(f"fleet.classes.{name}.share", device_class.share, least=0, most=1)
            for rate in ("flops", "bandwidth_down", "bandwidth_up"):
                above(f"fleet.classes.{name}.{rate}", getattr(device_class, rate), 0)
            device_class.cost.check(f"fleet.classes.{name}.cost")
        shares = {name: device_class.share for name, device_class in self.classes.items()}
        total = sum(shares.values())
        require(
            "fleet.classes",
            shares,
            abs(total - 1) < 1e-6,
            f"shares that add up to 1 (they add up to {total:g})",
        )
        for name in ("sigma", "bandwidth_sigma"):
            in_range(f"fleet.{name}", getattr(self, name), least=0, most=10)

    def costs(self, seed: int, clients: int) -> FleetCosts | None:
        """Return the costs of each client's class; None if all costs are 0."""
        costs = [device_class.cost for device_class in self.classes.values()]
        if all(cost.is_zero for cost in costs):
            return None
        kinds = self.labels(seed, clients).kinds
        return FleetCosts(costs, kinds, self.kwh_price, self.kwh_co2)

    def labels(self, seed: int, clients: int) -> Labels:
        """Draw the device class of each client at random.

        The number of clients in a class is not random: it is the class's `share` of all clients,
        rounded up or down.
        seed: the seed of the run.
        """
        ends = np.cumsum([device_class.share for device_class in self.classes.values()])
        places = (stream(seed, "fleet.class").permutation(clients) + 0.5) / clients
        kinds = np.searchsorted(ends[:-1], places, side="right").astype(np.int16)
        return Labels(tuple(self.classes), kinds)

    def speeds(self, seed: int, clients: int, sample_flops: Callable[[], float]) -> Speeds:
        """Draw the speeds of each client's device around the medians of its class.

        seed: the seed of the run.
        sample_flops: returns the floating-point operations of the forward and backward pass of one
        sample.
        """
        needed = above(
            "fleet=devices: FLOPs of the model",
            sample_flops(),
            0,
            "choose fleet=lognormal for this model",
        )
        kinds = self.labels(seed, clients).kinds
        classes = self.classes.values()
        flops = np.array([device_class.flops for device_class in classes])[kinds]
        down = np.array([device_class.bandwidth_down for device_class in classes])[kinds]
        up = np.array([device_class.bandwidth_up for device_class in classes])[kinds]
        normal = stream(seed, "fleet").standard_normal((clients, 2))
        network = np.exp(self.bandwidth_sigma * normal[:, 1])
        samples = flops * np.exp(self.sigma * normal[:, 0]) / needed
        return Speeds(samples, down * network, up * network)
