"""Test the benchmark of the planner on a small population."""

from __future__ import annotations

import pytest

from jobs.benchmarks import planner

pytestmark = pytest.mark.slow


def test_planner_benchmark_measures_every_schedule_and_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "CLIENTS", 3_000)
    said: list[str] = []
    found = planner.rates(1e-9, said.append)
    assert [(rate.schedule, rate.fleet) for rate in found] == [
        (schedule, fleet)
        for schedule in planner.SCHEDULES
        for fleet in (*planner.FLEETS, planner.TRACE, planner.OORT)
    ]
    assert all(rate.events > 0 for rate in found)
    assert len(said) == len(found)


def test_planner_benchmark_returns_jobs_per_second_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "CLIENTS", 3_000)
    jobs, start = planner.whole_run(3)
    assert jobs > 0 < start
