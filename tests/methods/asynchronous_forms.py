"""What CA2FL, ACE and FADAS make of random updates, beside what their functions say: a part of `FORMS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from server_forms import CLIENTS, WIDTH, normal, server, step

from raysim.methods.ace import ACE, all_client_step
from raysim.methods.ca2fl import CA2FL, calibrated_step
from raysim.methods.fadas import FADAS, amsgrad_step, delay_adaptive_lr

Pair = tuple[Any, Any]


def calibrated(random: np.random.Generator) -> Pair:
    """Four flushes of three; the cache has a row for each client that came, in the order of their first arrivals."""
    at = server(random, CA2FL(0.7))
    want = {"params": at.vector.clone(), "cache": torch.zeros(CLIENTS, WIDTH).double()}
    for _ in range(4):
        deltas, clients = normal(random, 3, WIDTH), random.integers(CLIENTS, size=3)
        step(at, deltas, clients.tolist())
        want = calibrated_step(
            params=want["params"], cache=want["cache"], deltas=deltas, clients=torch.from_numpy(clients), server_lr=0.7
        )
    came = at.state["ca2fl.clients"]
    return [at.vector, at.state["ca2fl.cache"]], [want["params"], want["cache"][came]]


def engaged(random: np.random.Generator) -> Pair:
    """Twenty arrivals, with ACED's limit and without."""
    got, want = [], []
    for limit in (None, 3):
        at = server(random, ACE(0.4, limit))
        known = {
            "params": at.vector.clone(),
            "cache": torch.zeros(CLIENTS, WIDTH).double(),
            "dispatch_versions": torch.full((CLIENTS,), -1),
        }
        for version in range(20):
            delta, client = normal(random, WIDTH), int(random.integers(CLIENTS))
            late = int(random.integers(min(version, 5) + 1))
            step(at, delta[None], [client], [late])
            known = all_client_step(
                **known,
                client=client,
                delta=delta,
                dispatch_version=version - late,
                version=version,
                server_lr=0.4,
                max_staleness=limit,
            )
        came = at.state["ace.clients"]
        got += [at.vector, at.state["ace.cache"], at.state["ace.versions"]]
        want += [known["params"], known["cache"][came], known["dispatch_versions"][came]]
    return got, want


def adapted(random: np.random.Generator) -> Pair:
    """Four flushes, with bias correction and without, at either rule."""
    got, want = [], []
    names = ("first_moment", "second_moment", "max_second_moment")
    for correction, rule in ((False, "cap"), (True, "scale")):
        at = server(random, FADAS(0.6, 1, rule, 0.7, 0.8, 1e-3, correction))  # type: ignore[arg-type]
        known = {"params": at.vector.clone()} | {name: at.state[f"fadas.{name}"].clone() for name in names}
        for number in range(1, 5):
            deltas, late = normal(random, CLIENTS, WIDTH), random.integers(number, size=CLIENTS).tolist()
            step(at, deltas, staleness=late)
            rate = delay_adaptive_lr(server_lr=0.6, max_staleness=max(late), threshold=1, rule=rule)
            known = amsgrad_step(
                **known,
                delta=deltas.mean(0),
                server_lr=rate,
                beta1=0.7,
                beta2=0.8,
                eps=1e-3,
                step=number if correction else None,
            )
        got += [at.vector, *(at.state[f"fadas.{name}"] for name in names)]
        want += [known["params"], *(known[name] for name in names)]
    return got, want


ASYNCHRONOUS_FORMS: dict[str, Callable[[np.random.Generator], Pair]] = {
    "raysim.methods.ace:all_client_step": engaged,
    "raysim.methods.ca2fl:calibrated_step": calibrated,
    "raysim.methods.fadas:amsgrad_step": adapted,
}
