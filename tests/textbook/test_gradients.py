"""Test that methods which change the local loss or its gradient agree with their textbooks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from tiny_runs import NORMED_MLP

from raysim.methods.fedcm import FedCM
from raysim.methods.fedprox import FedProx
from raysim.methods.scaffold import Scaffold
from raysim.simulation.schedule import Buffered
from textbook.check import LOCAL, Row, check
from textbook.fedavg import fedavg
from textbook.fedcm import fedcm
from textbook.fedprox import fedprox
from textbook.scaffold import scaffold

NORMED = {"model": NORMED_MLP}
STEPS = {"local": replace(LOCAL, epochs=None, steps=5, momentum=0.0)}
CLIPPED = {"local": replace(LOCAL, weight_decay=0.0, clip=0.05)}
SAMPLES, UNIFORM = {"weighting": "samples"}, {"weighting": "uniform"}
LONG = {"rounds": 6}
LATE: dict[str, Any] = {"schedule": Buffered(concurrency=4, size=2), "run": LONG}

ROWS = {
    "fedavg": Row(fedavg, list),
    "fedavg with BatchNorm": Row(fedavg, list, NORMED),
    "fedavg, uniform": Row(fedavg, list, run=UNIFORM),
    "fedavg, fixed steps": Row(fedavg, list, STEPS),
    "fedavg, clipped": Row(fedavg, list, CLIPPED),
    "fedprox": Row(partial(fedprox, mu=0.3), lambda: [FedProx(0.3)]),
    "fedprox with BatchNorm": Row(partial(fedprox, mu=0.01), lambda: [FedProx()], NORMED),
    "scaffold": Row(scaffold, lambda: [Scaffold()]),
    "scaffold by samples, with BatchNorm": Row(scaffold, lambda: [Scaffold()], NORMED, SAMPLES),
    "scaffold, fixed steps": Row(scaffold, lambda: [Scaffold()], STEPS),
    "scaffold, late": Row(scaffold, lambda: [Scaffold()], **LATE),
    "scaffold by samples, one by one": Row(
        scaffold, lambda: [Scaffold()], {}, SAMPLES | LONG, Buffered(3, 1)
    ),
    "fedcm, late": Row(partial(fedcm, alpha=0.3), lambda: [FedCM(0.3)], **LATE),
    "scaffold, clipped": Row(scaffold, lambda: [Scaffold()], CLIPPED),
    "fedcm": Row(partial(fedcm, alpha=0.3), lambda: [FedCM(0.3)]),
    "fedcm by samples, with BatchNorm": Row(
        partial(fedcm, alpha=0.3), lambda: [FedCM(0.3)], NORMED, SAMPLES
    ),
    "fedcm, warm start": Row(
        partial(fedcm, alpha=0.1, warm_start=True), lambda: [FedCM(warm_start=True)]
    ),
    "fedcm, fixed steps": Row(partial(fedcm, alpha=0.3), lambda: [FedCM(0.3)], STEPS),
    "fedcm, clipped": Row(partial(fedcm, alpha=0.3), lambda: [FedCM(0.3)], CLIPPED),
    "fedcm, everything fresh": Row(partial(fedcm, alpha=1.0), lambda: [FedCM(1.0)]),
}


@pytest.mark.parametrize("name", ROWS)
def test_fedprox_scaffold_and_fedcm_equal_textbook_computations(name: str) -> None:
    check(ROWS[name])
