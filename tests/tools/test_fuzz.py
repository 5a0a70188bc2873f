"""Some of the fuzzer's cases, the same ones each time: a run, or one sentence and status 2."""

from __future__ import annotations

import pytest
from fuzz import TARGETS, fuzz

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("target", TARGETS)
def test_random_input_gives_a_run_or_one_sentence(target: str) -> None:
    fuzz(target, cases=10)
