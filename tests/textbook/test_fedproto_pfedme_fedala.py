"""Test FedProto, pFedMe and FedALA against their textbooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tiny_runs import NORMED_MLP, SEED

from raysim.data.federated import federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.methods.fedala import FedALA
from raysim.methods.fedproto import FedProto
from raysim.methods.pfedme import PFedMe
from raysim.simulation.schedule import Synchronous
from textbook.check import Row, check
from textbook.fedala import fedala
from textbook.fedproto import fedproto
from textbook.pfedme import pfedme

NORMED: dict[str, Any] = {"model": NORMED_MLP}
FEW: dict[str, Any] = {"schedule": Synchronous(1), "run": {"rounds": 2}}  # some client never trains
SKEWED = federate(
    Synthetic(samples=70, test_samples=20, classes=5),
    Dirichlet(clients=4, alpha=0.15, minimum=6),
    SEED,
)


def prototypes(lam: float, predict: Any, **study: Any) -> Row:
    book = partial(fedproto, lam=lam, by_prototype=predict == "prototype")
    return Row(book, lambda: [FedProto(lam, predict)], study)


def envelopes(
    steps: int = 5, lam: float = 15.0, rate: float = 0.01, beta: float = 1.0, **others: Any
) -> Row:
    book = partial(pfedme, steps=steps, lam=lam, rate=rate, beta=beta)
    return Row(book, lambda: [PFedMe(steps, lam, rate, beta)], **others)


def local_aggregation(
    layers: int = 1, top: str = "model.head", rate: float = 1.0, share: float = 0.8, **others: Any
) -> Row:
    book = partial(fedala, rate=rate, share=share, top=top)
    return Row(book, lambda: [FedALA(layers, share, rate)], **others)


ROWS = {
    "fedproto": prototypes(1.0, "head"),
    "fedproto with BatchNorm": prototypes(0.7, "head", **NORMED),
    "fedproto, nearest prototype": prototypes(1.0, "prototype"),
    "fedproto, classes that few hold": prototypes(2.0, "prototype", data=SKEWED),
    "fedproto, some never train": Row(
        partial(fedproto, by_prototype=True), lambda: [FedProto(predict="prototype")], NORMED, **FEW
    ),
    "fedala": local_aggregation(),
    "fedala, all layers": local_aggregation(9, "model"),
    "fedala with BatchNorm": local_aggregation(rate=5.0, share=1.0, study=NORMED),
    "fedala, some never train": local_aggregation(study=NORMED, **FEW),
    "fedala, more rounds": local_aggregation(rate=2.0, share=0.5, run={"rounds": 5}),
    "pfedme": envelopes(),
    "pfedme with BatchNorm": envelopes(3, 5.0, 0.1, study=NORMED),
    "pfedme, part of the mean": envelopes(2, 8.0, 0.05, 0.6, study=NORMED),
    "pfedme, one inner step": envelopes(1, run={"weighting": "samples"}),
    "pfedme, some never train": envelopes(beta=1.5, study=NORMED, **FEW),
}


@pytest.mark.parametrize("name", ROWS)
def test_fedproto_pfedme_fedala_equal_textbook_computations(name: str) -> None:
    check(ROWS[name])
