"""Run a few cases of the fault tool: a disturbed run ends at the undisturbed results."""

from __future__ import annotations

import pytest
from faults import Case, carry_out, cases

CASES = [*cases(10, seed=3, runtime="inprocess"), *cases(1, seed=5, runtime="local")]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), enumerate(CASES), ids=str)
def test_disturbed_run_ends_at_undisturbed_results(number: int, case: Case) -> None:
    assert carry_out(case, number).startswith("same")
