"""Test the benchmark of the planner on a small population."""

from __future__ import annotations

import pytest

from jobs.benchmarks import planner

pytestmark = pytest.mark.slow


def test_planner_benchmark_returns_jobs_per_second_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "CLIENTS", 3_000)
    jobs, start = planner.whole_run(3)
    assert jobs > 0 < start
