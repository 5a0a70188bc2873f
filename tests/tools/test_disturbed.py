"""Some of the harness's cases: whatever is done to a run, it goes on to the undisturbed one's results."""

from __future__ import annotations

import pytest
from faults import Case, carry_out, cases

CASES = [*cases(10, seed=3, runtime="inprocess"), *cases(1, seed=5, runtime="local")]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "case"), enumerate(CASES), ids=str)
def test_a_disturbed_run_goes_on_to_the_undisturbed_ones_results(number: int, case: Case) -> None:
    assert carry_out(case, number).startswith("same")
