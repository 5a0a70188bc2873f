"""Test a few cases of the fault tool: disturbed runs have the results of undisturbed ones."""

from __future__ import annotations

import pytest
from faults import DATABASE, SIGNALS, Case, carry_out

# Every fault once, on two runs: the undisturbed results of each are made once. At these moments,
# the runs train and write checkpoints.
SIGNALLED = ("scaffold", "buffer", "inprocess")
TRACKED = ("fedavg", "rounds", "inprocess")
MOMENTS = {
    "KILL": 0.6,
    "TERM": 0.5,
    "INT": 0.7,
    "INT twice": 0.55,
    "disk": 0.65,
    "lock": 0.6,
    "delete": 0.7,
    "overwrite": 0.8,
}
CASES = [
    Case(
        *(TRACKED if fault in DATABASE else SIGNALLED), fault, "driver", moment, has_pictures=False
    )
    for fault, moment in MOMENTS.items()
]
# On Ray, where the coordinator finds the disk full.
ON_RAY = Case(
    "scaffold", "buffer", "one worker", "disk", "driver", 0.0, "inprocess", has_pictures=False
)
CASES.append(ON_RAY)


def test_tests_cover_every_signal_and_every_disk_or_database_fault() -> None:
    # A driver that is stopped is killed later, as with "KILL".
    assert {*MOMENTS, "STOP"} == {*SIGNALS, "disk", *DATABASE}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), enumerate(CASES), ids=[case.fault for case in CASES])
def test_run_disturbed_by_a_fault_has_the_results_of_an_undisturbed_run(
    number: int, case: Case
) -> None:
    assert carry_out(case, number).startswith("same")
