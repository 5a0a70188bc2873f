"""FedAvg with attackers: sign flip, scaling, noise, and ALIE (Baruch et al. 2019).

ALIE's attackers send the mean of the honest updates plus z times their standard deviation, here
computed one coordinate at a time.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from scipy.stats import norm
from torch import Tensor

from raysim.primitives.streams import stream
from textbook.servers import Cohort, run_server_rule
from textbook.world import Book, World


def z_max(n: int, m: int) -> float:
    """Return ALIE's number z of standard deviations.

    z solves phi(z) = (n - m - s) / (n - m), where phi is the normal distribution function and s =
    floor(n/2 + 1) - m.
    n: the number of all updates.
    m: the number of attackers' updates.
    """
    s = int(n / 2 + 1) - m
    return float(norm.ppf((n - m - s) / (n - m)))


def attacked(
    world: World,
    kind: str,
    share: float,
    scale: float = 1.0,
    sigma: float = 1.0,
    z: float | None = None,
) -> Book:
    """Compute a run of FedAvg in which some clients, the attackers, send false updates.

    kind: "sign_flip", "scaled", "gaussian" or "alie".
    share: the fraction of attackers among the clients that have samples.
    scale: the factor on updates for "scaled"; "sign_flip" uses -scale.
    sigma: the standard deviation of the noise that "gaussian" sends.
    z: the number of standard deviations for "alie"; None means `z_max`.
    """
    some = [client for client in range(world.clients) if len(world.data[client][0])]
    evil = set(
        stream(world.seed, "attack.clients").permutation(some)[: round(share * len(some))].tolist()
    )
    counts: list[float] = []

    def rule(at: Cohort) -> Tensor:
        good = [g for g, job in zip(at.changes, at.jobs, strict=True) if job.client not in evil]
        sent = []
        for place, (g, job) in enumerate(zip(at.changes, at.jobs, strict=True)):
            if job.client not in evil:
                sent.append(g)
            elif kind == "alie":
                far_off = z_max(len(at.jobs), len(at.jobs) - len(good)) if z is None else z
                columns = torch.stack(good).T.tolist()
                far = [statistics.fmean(v) + far_off * statistics.pstdev(v) for v in columns]
                sent.append(torch.tensor(far, dtype=g.dtype))
            elif kind == "gaussian":
                noise = stream(world.seed, "attack.noise", at.version, place).standard_normal(
                    len(g)
                )
                sent.append(sigma * torch.from_numpy(noise))
            else:
                sent.append(scale * g * {"sign_flip": -1, "scaled": 1}[kind])
        counts.append(float(len(at.jobs) - len(good)))
        return at.x + at.weights @ torch.stack(sent) / at.weights.sum()

    return replace(run_server_rule(world, rule), columns={"attackers": counts})
