"""FedProto, pFedMe, FedALA and IFCA end where their textbooks do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tiny_runs import NORMED_MLP, SEED

from raysim.data.federated import federate
from raysim.data.partition import Dirichlet
from raysim.data.sources import Synthetic
from raysim.methods.fedproto import FedProto
from raysim.simulation.schedule import Synchronous
from textbook.check import Row, check
from textbook.fedproto import fedproto

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


ROWS = {
    "fedproto": prototypes(1.0, "head"),
    "fedproto with BatchNorm": prototypes(0.7, "head", **NORMED),
    "fedproto, nearest prototype": prototypes(1.0, "prototype"),
    "fedproto, classes that few hold": prototypes(2.0, "prototype", data=SKEWED),
    "fedproto, some never train": Row(
        partial(fedproto, by_prototype=True), lambda: [FedProto(predict="prototype")], NORMED, **FEW
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_method_ends_where_its_textbook_does(name: str) -> None:
    check(ROWS[name])
