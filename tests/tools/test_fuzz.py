"""Run a few fixed cases of the fuzz tool: each runs, or is refused with one sentence."""

from __future__ import annotations

import pytest
from fuzz import TARGETS, fuzz

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("target", TARGETS)
def test_random_input_is_accepted_or_refused_without_a_crash(target: str) -> None:
    fuzz(target, cases=10)
