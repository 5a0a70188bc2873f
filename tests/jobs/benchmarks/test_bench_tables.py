"""Test that every benchmark in jobs/benchmarks prints a table and writes its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.benchmarks import planner, rules, scale
from jobs.benchmarks.arguments import parser, read
from raysim.commands.bench import steps
from raysim.methods.fedopt import FedAvgM
from raysim.models import SmallCnn

pytestmark = pytest.mark.slow


def test_planner_benchmark_measures_every_schedule_with_every_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "CLIENTS", 3_000)
    monkeypatch.setattr(planner, "FLEETS", {"night": planner.FLEETS["night"]})
    steps_said: list[str] = []
    rates = planner.rates(1e-9, steps_said.append)
    assert [(rate.schedule, rate.fleet) for rate in rates] == [
        (schedule, fleet)
        for schedule in planner.SCHEDULES
        for fleet in (*planner.FLEETS, planner.TRACE, planner.OORT)
    ]
    assert all(rate.events > 0 for rate in rates) and len(steps_said) == len(rates)
    monkeypatch.setattr(planner, "rates", lambda seconds, say: rates)
    monkeypatch.setattr(planner, "whole_run", lambda rounds: (1000.0, 0.5))
    said: list[str] = []
    found = planner.bench(said.append)
    head, _, *rows = said[1].split("\n\n")[0].splitlines()
    assert head.split()[0] == "schedule"
    assert [row.split()[0] for row in rows] == [*planner.SCHEDULES, "memory,"]
    assert found["jobs_per_second"] == 1000.0


def test_benchmark_named_scale_measures_time_and_memory_of_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # so that the table has one block
    monkeypatch.setattr(scale, "cases", lambda: [scale.Case(1_000)])
    monkeypatch.setattr(planner, "bench", lambda say: {"planner": []})
    said: list[str] = []
    (cost,) = scale.bench(tmp_path / "out.json", 1, said.append)
    assert cost.cpu > 0 and 64 <= cost.arrays <= 128
    assert said[-1].splitlines()[-1].split()[:4] == ["1,000", "1,000", "in-process", "ideal"]
    stored = json.loads((tmp_path / "out.json").read_text())
    assert [each["case"]["clients"] for each in stored["results"]] == [1_000]


def test_benchmark_of_server_rules_compares_times_with_fedavg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rules, "COHORT", 2)
    monkeypatch.setattr(rules, "MODEL", SmallCnn(norm="batch"))
    monkeypatch.setattr(rules, "RULES", {"fedavgm": FedAvgM})
    monkeypatch.setattr(rules, "principal_and_loop", lambda: (3.0, 1.0))
    found = rules.bench_rules(1, lambda text: None)
    assert [(each.method, each.limit) for each in found] == [
        ("fedavg", 1.0),
        ("fedavgm", 1.3),
        ("fedld_principal", 3.0),
    ]
    assert found[-1].ratio == 3.0 and all(each.seconds > 0 for each in found)
    steps.report("rules", found, 1, tmp_path / "out.json")
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "fedld_principal",
        *["3000.0", "3.000", "3.000", "3.000", "3.00"],
    ]
    assert len(json.loads((tmp_path / "out.json").read_text())["results"]) == 3


def test_benchmark_is_refused_if_the_number_of_blocks_is_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rules", "--blocks", "0"])
    with pytest.raises(SystemExit) as ended:
        read(parser("a benchmark"))
    assert ended.value.code == 2 and "--blocks 0" in capsys.readouterr().err
