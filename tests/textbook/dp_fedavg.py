"""DP-FedAvg, one client at a time, with adaptive clipping.

McMahan et al. 2018 (flat clipping, fixed denominator) and Andrew et al. 2021 (Algorithm 1).
"""

from __future__ import annotations

from dataclasses import replace
from math import comb, exp, log, sqrt

import torch
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.servers import Cohort, run_server_rule
from textbook.world import Book, World


def dp_fedavg(
    world: World,
    m: int,
    z: float,
    c: float,
    gamma: float | None = 0.5,
    eta: float = 0.2,
    s: float | None = None,
) -> Book:
    """Compute a run of DP-FedAvg: clip each update, add Gaussian noise to the sum, and divide by m.

    m: the number of clients in a round.
    z: the noise multiplier. With a constant bound, the noise has the standard deviation z c.
    c: the clipping bound in the first round.
    gamma: the fraction of unclipped updates to which the bound adapts; None keeps the bound c.
    eta: the rate at which the bound adapts.
    s: the standard deviation of the noise on the number of unclipped updates; None: max(m / 20, z).
    """
    bounds, shares, state = [], [], {"c": c}
    s = max(m / 20, z) if s is None else s

    def rule(at: Cohort) -> Tensor:
        c = state["c"]
        random = stream(world.seed, "dp_fedavg.noise", at.version)
        z_delta = z if gamma is None or z == 0 else 1 / sqrt(1 / z**2 - 1 / (2 * s) ** 2)
        total, bits = torch.zeros_like(at.x), 0.0
        for change in at.changes:
            norm = float(change.norm())
            total = total + change * min(1.0, c / norm)
            bits += norm <= c
        if z > 0:
            total = total + torch.from_numpy(random.normal(0.0, z_delta * c, len(total)))
        if z > 0 and gamma is not None:
            bits += random.normal(0.0, s)
        bounds.append(c)
        shares.append(bits / m)
        if gamma is not None:
            state["c"] = c * exp(-eta * (bits / m - gamma))
        return at.x + total / m

    book = run_server_rule(world, rule)
    end = torch.tensor(state["c"], dtype=torch.float64)
    server = {"dp_fedavg.bound": end, "dp_fedavg.releases": torch.tensor(len(bounds))}
    return replace(
        book, server=server, columns={"dp_fedavg.bound": bounds, "dp_fedavg.within": shares}
    )


def epsilon_poisson(z: float, q: float, rounds: int, delta: float) -> float:
    """Return the epsilon of (epsilon, delta)-privacy after some rounds with Poisson sampling.

    Renyi divergences: Mironov, Talwar and Zhang 2019, eq. 3. Conversion to epsilon: Canonne, Kamath
    and Steinke 2020, Proposition 12.
    z: the noise multiplier.
    q: the probability that a client is in a round.
    """
    best = float("inf")
    for a in range(2, 65):
        chances = [comb(a, k) * (1 - q) ** (a - k) * q**k for k in range(a + 1)]
        logs = [
            log(chance) + (k * k - k) / (2 * z * z)
            for k, chance in enumerate(chances)
            if chance > 0
        ]
        moment = max(logs) + log(sum(exp(each - max(logs)) for each in logs))
        divergence = rounds * moment / (a - 1)
        best = min(best, divergence + log(1 - 1 / a) - log(delta * a) / (a - 1))
    return best
