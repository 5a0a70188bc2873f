"""Test FedDyn, FedSAM, FedSpeed, Ditto, FedRep and FedPer against their textbooks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tiny_runs import NORMED_MLP

from raysim.methods.ditto import Ditto
from raysim.methods.fedbn import FedBN
from raysim.methods.fedcm import FedCM
from raysim.methods.feddyn import FedDyn
from raysim.methods.fedprox import FedProx
from raysim.methods.fedrep import FedRep
from raysim.methods.fedsam import FedSAM
from raysim.methods.fedspeed import FedSpeed
from raysim.simulation.schedule import Synchronous
from textbook.check import LOCAL, Row, check
from textbook.ditto import ditto
from textbook.feddyn import feddyn
from textbook.fedrep import fedper, fedrep
from textbook.fedsam import fedsam, mofedsam
from textbook.fedspeed import fedspeed

NORMED: dict[str, Any] = {"model": NORMED_MLP}
STEPS: dict[str, Any] = {"local": replace(LOCAL, epochs=None, steps=5, momentum=0.0)}
CLIPPED: dict[str, Any] = {"local": replace(LOCAL, clip=0.05)}
PLAIN: dict[str, Any] = {"local": replace(LOCAL, momentum=0.0, weight_decay=0.0)}
SAMPLES, UNIFORM = {"weighting": "samples"}, {"weighting": "uniform"}
FEW: dict[str, Any] = {
    "schedule": Synchronous(1),
    "run": {"rounds": 2},
}  # so some client never takes part
ALL: dict[str, Any] = {"schedule": Synchronous(4)}


def phases(head: int, body: int, **study: Any) -> Row:
    local = replace(LOCAL, epochs=head + body)
    return Row(
        partial(fedrep, head=head, body=body),
        lambda: [FedRep("alternate", head, body)],
        {"local": local} | study,
    )


ROWS = {
    "feddyn": Row(partial(feddyn, alpha=0.1), lambda: [FedDyn(0.1)]),
    "feddyn with BatchNorm": Row(partial(feddyn, alpha=0.01), lambda: [FedDyn()], NORMED),
    "feddyn, fixed steps": Row(partial(feddyn, alpha=0.3), lambda: [FedDyn(0.3)], STEPS),
    "feddyn, clipped": Row(partial(feddyn, alpha=0.3), lambda: [FedDyn(0.3)], CLIPPED),
    "feddyn, plain SGD": Row(partial(feddyn, alpha=0.001), lambda: [FedDyn(0.001)], PLAIN),
    "feddyn, everybody": Row(partial(feddyn, alpha=0.1), lambda: [FedDyn(0.1)], NORMED, **ALL),
    "feddyn, some never train": Row(
        partial(feddyn, alpha=0.1), lambda: [FedDyn(0.1)], NORMED, **FEW
    ),
    "fedsam": Row(partial(fedsam, rho=0.05), lambda: [FedSAM()]),
    "fedsam with BatchNorm": Row(partial(fedsam, rho=0.3), lambda: [FedSAM(0.3)], NORMED),
    "fedsam, uniform, plain SGD": Row(
        partial(fedsam, rho=0.3), lambda: [FedSAM(0.3)], PLAIN, UNIFORM
    ),
    "fedsam, clipped": Row(partial(fedsam, rho=0.3), lambda: [FedSAM(0.3)], CLIPPED),
    "fedsam and fedbn": Row(partial(fedsam, rho=0.3), lambda: [FedSAM(0.3), FedBN()], NORMED),
    "fedsam and fedprox": Row(
        partial(fedsam, rho=0.3, mu=0.5), lambda: [FedProx(0.5), FedSAM(0.3)], NORMED
    ),
    "fedasam": Row(partial(fedsam, rho=0.5, eta=0.2), lambda: [FedSAM(0.5, adaptive=True)]),
    "fedasam with BatchNorm": Row(
        partial(fedsam, rho=0.5, eta=0.01), lambda: [FedSAM(0.5, adaptive=True, eta=0.01)], NORMED
    ),
    "fedasam and fedbn": Row(
        partial(fedsam, rho=0.5, eta=0.2),
        lambda: [FedBN(), FedSAM(0.5, adaptive=True)],
        NORMED,
        **FEW,
    ),
    "mofedsam": Row(partial(mofedsam, rho=0.05, beta=0.1), lambda: [FedSAM(), FedCM(0.1)]),
    "mofedsam by samples, with BatchNorm": Row(
        partial(mofedsam, rho=0.3, beta=0.3), lambda: [FedCM(0.3), FedSAM(0.3)], NORMED, SAMPLES
    ),
    "fedspeed": Row(partial(fedspeed, lam=0.5, rho=0.1, share=1.0), lambda: [FedSpeed(0.5)]),
    "fedspeed with BatchNorm": Row(
        partial(fedspeed, lam=1.0, rho=0.5, share=0.7), lambda: [FedSpeed(1.0, 0.5, 0.7)], NORMED
    ),
    "fedspeed, one gradient": Row(
        partial(fedspeed, lam=0.5, rho=0.1, share=0.0), lambda: [FedSpeed(0.5, 0.1, 0.0)], NORMED
    ),
    "fedspeed, no step uphill": Row(
        partial(fedspeed, lam=0.5, rho=0.0, share=1.0), lambda: [FedSpeed(0.5, 0.0)]
    ),
    "fedspeed, plain SGD": Row(
        partial(fedspeed, lam=0.2, rho=0.1, share=1.0), lambda: [FedSpeed(0.2)], PLAIN
    ),
    "fedspeed by samples, some never train": Row(
        partial(fedspeed, lam=0.5, rho=0.1, share=0.5),
        lambda: [FedSpeed(0.5, 0.1, 0.5)],
        NORMED,
        SAMPLES | FEW["run"],
        FEW["schedule"],
    ),
    "ditto": Row(partial(ditto, lam=1.0), lambda: [Ditto()]),
    "ditto with BatchNorm": Row(partial(ditto, lam=0.1), lambda: [Ditto(0.1)], NORMED),
    "ditto, another rate": Row(
        partial(ditto, lam=1.0, factor=0.3), lambda: [Ditto(1.0, 0.3)], NORMED
    ),
    "ditto, no pull": Row(partial(ditto, lam=0.0), lambda: [Ditto(0.0)], NORMED),
    "ditto, fixed steps": Row(partial(ditto, lam=1.0), lambda: [Ditto()], STEPS),
    "ditto, clipped": Row(partial(ditto, lam=1.0), lambda: [Ditto()], CLIPPED),
    "ditto, clipped now and then": Row(
        partial(ditto, lam=1.0), lambda: [Ditto()], {"local": replace(LOCAL, clip=1.6)}
    ),
    "ditto, some never train": Row(partial(ditto, lam=1.0), lambda: [Ditto()], NORMED, **FEW),
    "fedrep": phases(2, 1),
    "fedrep with BatchNorm": phases(1, 2, **NORMED),
    "fedrep of the paper": phases(10, 1, local=replace(LOCAL, epochs=11, lr=0.02), **NORMED),
    "fedrep, fixed steps": phases(2, 1, **STEPS),
    "fedrep, clipped": phases(1, 1, local=replace(LOCAL, clip=0.05)),
    "fedrep, some never train": replace(phases(1, 1, **NORMED), **FEW),
    "fedper": Row(fedper, lambda: [FedRep("joint")]),
    "fedper with BatchNorm": Row(fedper, lambda: [FedRep("joint")], NORMED, UNIFORM),
    "fedper, some never train": Row(fedper, lambda: [FedRep("joint")], NORMED, **FEW),
}


@pytest.mark.parametrize("name", ROWS)
def test_feddyn_fedsam_ditto_fedrep_equal_textbook_computations(name: str) -> None:
    check(ROWS[name])
