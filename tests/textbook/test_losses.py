"""Compare methods that change a client's loss, batches or logits with their textbooks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from tiny_runs import NORMED_MLP, tiny_data

from raysim.data.partition import CSR, Partition
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedlc import FedLC
from raysim.methods.fedld import DampedMargin, MarginControl
from raysim.methods.fedmix import FedMix
from raysim.methods.fedntd import FedNTD
from raysim.methods.fedrs import FedRS
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from textbook.check import LOCAL, Row, check
from textbook.feddecorr import feddecorr
from textbook.fedlc import fedlc
from textbook.fedld_client import damped_margin, margin_control
from textbook.fedmix import fedmix
from textbook.fedntd import fedntd
from textbook.fedrs import fedrs
from textbook.mixup import mixup
from textbook.moon import moon


def lacking(*classes: set[int]) -> Any:
    """Return federated data in which each client has exactly the training samples of its classes.

    As an exception, the last client also has a sample of class 0. There are no test samples.

    classes: one set for each client. Clients with the same class have the same samples of it.
    """
    data = tiny_data(clients=4, samples=70)
    rows, labels = np.sort(data.partition.train.indices), data.open().labels
    parts = [rows[np.isin(labels[rows], sorted(class_set))] for class_set in classes]
    parts[-1] = np.append(parts[-1], rows[labels[rows] == 0][:1])
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    tests = CSR(np.empty(0, np.int64), np.zeros_like(offsets))
    return replace(data, partition=Partition(CSR(np.concatenate(parts), offsets), tests))


NORMED = {"model": NORMED_MLP}
SINGLE = {"data": lacking({0}, {1, 2}, {3, 4}, {4})}  # the first client has one class alone
LONG = {"local": replace(LOCAL, batch=5, epochs=None, steps=7)}

ROWS = {
    "feddecorr": Row(partial(feddecorr, beta=0.3, variant="authors"), lambda: [FedDecorr(0.3)]),
    "feddecorr, paper": Row(
        partial(feddecorr, beta=2.0, variant="paper"), lambda: [FedDecorr(2.0, "paper")]
    ),
    "feddecorr, fedbr": Row(
        partial(feddecorr, beta=2.0, variant="fedbr"), lambda: [FedDecorr(2.0, "fedbr")]
    ),
    "feddecorr with BatchNorm": Row(
        partial(feddecorr, beta=0.1, variant="authors"), lambda: [FedDecorr()], NORMED
    ),
    "fedntd": Row(partial(fedntd, beta=0.7, tau=1.5), lambda: [FedNTD(0.7, 1.5)]),
    "fedntd with BatchNorm": Row(partial(fedntd, beta=1.0, tau=1.0), lambda: [FedNTD()], NORMED),
    "fedntd with mixup": Row(
        partial(fedntd, beta=0.7, tau=1.5, mixed=0.8), lambda: [Mixup(0.8), FedNTD(0.7, 1.5)]
    ),
    "moon": Row(partial(moon, mu=2.0, tau=0.5, projection=(6, 7)), lambda: [Moon(2.0, out=7)]),
    "moon, wide, two previous": Row(
        partial(moon, mu=2.0, tau=0.3, projection=(9, 7), pool=2),
        lambda: [Moon(2.0, 0.3, width=9, out=7, previous=2)],
        run={"rounds": 5},
    ),
    "moon without projection": Row(
        partial(moon, mu=2.0, tau=0.5), lambda: [Moon(2.0, head="none")]
    ),
    "moon with BatchNorm": Row(
        partial(moon, mu=1.0, tau=0.5, projection=(12, 256)), lambda: [Moon()], NORMED
    ),
    "mixup": Row(partial(mixup, alpha=0.2), lambda: [Mixup()]),
    "mixup with BatchNorm": Row(partial(mixup, alpha=0.9), lambda: [Mixup(0.9)], NORMED),
    "fedmix": Row(partial(fedmix, lam=0.3, count=5, samples=3), lambda: [FedMix(0.3, 5, 3)]),
    "fedmix with BatchNorm": Row(
        partial(fedmix, lam=0.1, count=64, samples=10), lambda: [FedMix()], NORMED
    ),
    "fedmix, one pair": Row(
        partial(fedmix, lam=0.3, count=5, samples=3, single=True),
        lambda: [FedMix(0.3, 5, 3, "one")],
    ),
    "fedmix, naive": Row(
        partial(fedmix, lam=0.3, count=5, samples=3, naive=True),
        lambda: [FedMix(0.3, 5, 3, naive=True)],
    ),
    "fedmix, naive, one pair": Row(
        partial(fedmix, lam=0.3, count=5, samples=3, naive=True, single=True),
        lambda: [FedMix(0.3, 5, 3, "one", naive=True)],
    ),
    "fedmix, public": Row(
        partial(fedmix, lam=0.3, count=5, samples=3, public=True),
        lambda: [FedMix(0.3, 5, 3, taylor_scale="public")],
    ),
    "fedmix, fresh": Row(
        partial(fedmix, lam=0.3, count=5, samples=3, fresh=True),
        lambda: [FedMix(0.3, 5, 3, fresh=True)],
    ),
    "fedmix, fresh, one pair": Row(
        partial(fedmix, lam=0.3, count=5, samples=3, fresh=True, single=True),
        lambda: [FedMix(0.3, 5, 3, "one", fresh=True)],
    ),
    "fedlc": Row(partial(fedlc, tau=1.0), lambda: [FedLC()]),
    "fedlc, half, a client with one class": Row(
        partial(fedlc, tau=0.5), lambda: [FedLC(0.5)], SINGLE
    ),
    "fedlc, others": Row(partial(fedlc, tau=1.5, others=True), lambda: [FedLC(1.5, "others")]),
    "fedlc, others, a client with one class": Row(
        partial(fedlc, tau=1.5, others=True), lambda: [FedLC(1.5, "others")], SINGLE
    ),
    "fedlc, floor": Row(partial(fedlc, tau=1.5, floor=2.0), lambda: [FedLC(1.5, count_floor=2.0)]),
    "fedlc, others, floor": Row(
        partial(fedlc, tau=1.5, others=True, floor=0.5), lambda: [FedLC(1.5, "others", 0.5)], SINGLE
    ),
    "fedlc with mixup": Row(
        partial(fedlc, tau=1.5, mixed=0.8), lambda: [FedLC(1.5), Mixup(0.8)], SINGLE
    ),
    "fedlc, others, with mixup": Row(
        partial(fedlc, tau=1.5, others=True, mixed=0.8),
        lambda: [FedLC(1.5, "others"), Mixup(0.8)],
        SINGLE,
    ),
    "fedrs": Row(partial(fedrs, alpha=0.5), lambda: [FedRS()]),
    "fedrs, relative": Row(
        partial(fedrs, alpha=0.2, relative=True), lambda: [FedRS(0.2, "relative")]
    ),
    "fedrs, zero": Row(partial(fedrs, alpha=0.0), lambda: [FedRS(0.0)], SINGLE),
    "fedld_margin": Row(
        partial(margin_control, lam=0.03, kind="marg_log"), lambda: [MarginControl()]
    ),
    **{
        f"fedld_margin, {kind}": Row(
            partial(margin_control, lam=0.3, kind=kind), lambda k=kind: [MarginControl(0.3, k)]
        )
        for kind in ("batch_softmax", "logit_l2")
    },
    "fedld_margin, threshold": Row(
        partial(margin_control, lam=0.3, kind="threshold", threshold=-0.4),
        lambda: [MarginControl(0.3, "threshold", -0.4)],
    ),
    "fedld_damped": Row(partial(damped_margin, temperature=0.7), lambda: [DampedMargin(0.7)]),
    "fedld_damped with mixup": Row(
        partial(damped_margin, temperature=0.7, mixed=0.8), lambda: [Mixup(0.8), DampedMargin(0.7)]
    ),
    "fedld_damped, many small steps": Row(
        partial(damped_margin, temperature=1.0), lambda: [DampedMargin()], LONG
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_method_with_a_local_loss_term_equals_its_textbook(name: str) -> None:
    check(ROWS[name])
