"""Methods that change local losses and gradients end where their textbooks do."""

from __future__ import annotations

from functools import partial

import pytest
from studies import NORMED_MLP

from raysim.methods.fedprox import FedProx
from raysim.methods.scaffold import Scaffold
from textbook.check import Row, check
from textbook.fedavg import fedavg
from textbook.fedprox import fedprox
from textbook.scaffold import scaffold

ROWS = {
    "fedavg": Row(fedavg, list),
    "fedavg with BatchNorm": Row(fedavg, list, {"model": NORMED_MLP}),
    "fedprox": Row(partial(fedprox, mu=0.3), lambda: [FedProx(0.3)]),
    "scaffold": Row(scaffold, lambda: [Scaffold()]),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_method_ends_where_its_textbook_does(name: str) -> None:
    check(ROWS[name])
