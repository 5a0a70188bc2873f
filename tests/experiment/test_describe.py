"""The overview that a run prints before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysim.experiment.describe import overview
from raysim.experiment.execute import build, run

SMALL = ["data=synthetic", "model=mlp", "runtime=inprocess", "tracking=none", "rounds=1", "schedule.cohort=3"]


def lines(*words: str) -> dict[str, str]:
    """The overview of a run, by the first word of each line."""
    text = overview(build([*SMALL, *words]), Path("somewhere"))
    return {line[:10].strip(): line[10:] for line in text.splitlines()}


@pytest.mark.parametrize("budget", ["local.epochs=5", "local.steps=7"])
def test_the_overview_of_centralized_training_says_what_runs(
    budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["method=[centralized]", budget, "partition.clients=7", "local.batch=10", "local.sampling=replacement"]
    experiment = build([*SMALL, *words])
    text = overview(experiment, Path("somewhere"))
    trained = run(experiment, quiet=True).rows[0]["samples"]
    steps = int(trained or 0) // 10
    assert f"{steps} steps of batch 10" in text and "epoch" not in text
    assert "1 round of Synchronous(cohort=1)" in text and "clients   1 with" in text


def test_the_overview_of_a_federated_run_says_its_clients_budget() -> None:
    found = lines("local.epochs=5", "local.batch=10", "local.lr=0.3")
    assert found["rounds"].endswith("5 epochs of batch 10, sgd lr 0.3") and found["folder"] == "somewhere"
