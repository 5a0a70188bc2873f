"""Test each class of this package with raysim's checks, and test runs that use all classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypackage.compressor import MyCompressor
from mypackage.data import MyData
from mypackage.fleet import MyFleet
from mypackage.learner import MyLearner
from mypackage.method import MyMethod
from mypackage.model import MyModel
from mypackage.observer import MyObserver
from mypackage.partition import MyPartition
from mypackage.schedule import MySchedule
from mypackage.selection import MySelection
from mypackage.topology import MyTopology

import raysim
from raysim.conformance import Check, checks

PARTS = [
    MyMethod(), MyModel(), MyLearner(), MyData(), MyPartition(), MySchedule(), MySelection(),
    MyTopology(), MyFleet(), MyCompressor(), MyObserver(),
]  # fmt: skip
GROUPS = ["data", "partition", "schedule", "selection", "topology", "fleet", "observer"]


@pytest.mark.parametrize("check", [check for part in PARTS for check in checks(part)], ids=str)
def test_each_option_of_this_package_passes_the_public_checks_of_raysim(check: Check) -> None:
    check()


# The learner has its own model and training, so that it takes the place of model and method.
@pytest.mark.parametrize("trained", [["method", "model", "compression"], ["learner"]], ids="+".join)
def test_a_run_with_all_options_of_this_package_learns(trained: list[str], tmp_path: Path) -> None:
    overrides = [f"{group}=mypackage" for group in [*trained, *GROUPS]]
    result = raysim.run(
        [*overrides, f"out={tmp_path / 'run'}"],
        rounds=8,
        runtime="inprocess",
        tracking="none",
        quiet=True,
        allow=["mypackage"],
    )
    assert result.summary["accuracy_global"] > 0.5
    assert (tmp_path / "run" / "best.txt").read_text().startswith("round ")
