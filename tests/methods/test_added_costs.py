"""Test the cost that each method adds to a job, as a number of trained samples."""

from __future__ import annotations

import pytest
from tiny_runs import participation_facts

from raysim.api.method import Method
from raysim.methods.afl import AFL
from raysim.methods.apfl import APFL
from raysim.methods.ditto import Ditto
from raysim.methods.fedproto import FedProto
from raysim.methods.pfedme import PFedMe


@pytest.mark.parametrize(
    ("method", "cost"),
    [
        (AFL(), 10.0),  # a forward pass of the client's samples
        (APFL(), 90.0),  # the personal model trains, too
        (Ditto(), 90.0),  # the personal model trains, too
        (FedProto(), 10.0),  # a forward pass of the client's samples
        (PFedMe(steps=1), 0.0),
        (PFedMe(steps=5), 360.0),  # four more passes over each batch
    ],
    ids=lambda value: value.name if isinstance(value, Method) else f"{value:g}",
)
def test_method_adds_the_cost_of_its_computation(method: Method, cost: float) -> None:
    assert method.cost(participation_facts(None, 30, 90.0)) == pytest.approx(cost)
