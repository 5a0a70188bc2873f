"""Test the overview that a run prints before it starts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

import raysim
from raysim import cli
from raysim.experiment import describe
from raysim.experiment.build import build
from raysim.experiment.describe import identity, overview
from raysim.experiment.execute import run
from raysim.primitives.errors import RefusedError
from raysim.simulation.availability import Intervals

SMALL = [
    "data=synthetic",
    "model=mlp",
    "runtime=inprocess",
    "tracking=none",
    "rounds=1",
    "schedule.cohort=3",
]


def lines(*words: str) -> dict[str, str]:
    """Return the overview of a run: map the first word of each line to the text after it.

    words: overrides of the run.
    """
    text = overview(build([*SMALL, *words]), Path("somewhere"))
    return {line[:10].strip(): line[10:] for line in text.splitlines()}


@pytest.mark.parametrize("budget", ["local.epochs=5", "local.steps=7"])
def test_printed_plan_of_centralized_run_shows_its_steps_and_a_single_client(
    budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "method=[centralized]",
        budget,
        "partition.clients=7",
        "local.batch=10",
        "local.sampling=replacement",
    ]
    experiment = build([*SMALL, *words])
    text = overview(experiment, Path("somewhere"))
    trained = run(experiment, quiet=True).rows[0]["samples"]
    steps = int(trained or 0) // 10
    assert f"{steps} steps of batch 10" in text and "epoch" not in text
    assert "1 round of Synchronous(cohort=1)" in text and "clients   1 with" in text


def test_printed_plan_shows_local_epochs_and_the_run_folder() -> None:
    found = lines("local.epochs=5", "local.batch=10", "local.lr=0.3")
    assert (
        found["rounds"].endswith("5 epochs of batch 10, sgd lr 0.3")
        and found["folder"] == "somewhere"
    )


def test_printed_plan_shows_the_number_of_evaluations_per_aggregation() -> None:
    buffered = ["schedule=buffered", "schedule.concurrency=6", "schedule.size=2"]
    text = overview(build([*SMALL[:-1], *buffered, "evaluate.decompose=1"]), Path("somewhere"))
    assert "2 x 2 + 2 evaluations" in text


def test_printed_plan_says_that_a_learner_without_a_loss_has_no_best_model() -> None:
    assert "reports no loss" not in lines()["best"]
    assert lines("learner=sklearn_linear")["best"].endswith("if 'sklearn_linear' reports no loss")
    text = lines("learner=sklearn_linear", "partition.validation_fraction=0.1")["best"]
    assert text.endswith("the best accuracy_validation")


def test_printed_plan_counts_floats_that_methods_send_besides_the_model() -> None:
    plain = lines("model=mlp")["model"]
    assert plain.endswith("floats travel in each direction")
    floats = plain.split()[1]
    model = lines("model=mlp", "method=scaffold", "compression=topk")["model"]
    assert model.endswith(
        f"of {floats} floats; 'scaffold' adds {floats} floats to clients and {floats} to the server"
    )


def test_printed_plan_shows_the_heterogeneity_of_the_split() -> None:
    text = lines("partition=shards", "partition.clients=10", "partition.shards_per_client=1")[
        "split"
    ]
    assert text.startswith(
        "label entropy 0.000 ± 0.000 nats, most frequent class 100%, "
        "1.00 effective classes, Jensen-Shan"
    )


def test_printed_plan_shows_the_shape_of_the_inputs() -> None:
    assert lines("data=synthetic")["data"].endswith("; inputs of shape [1, 8, 8]")
    assert lines("data=markov", "model=gru", "partition=natural")["data"].endswith(
        "; inputs of shape [16], token numbers"
    )


def test_printed_plan_shows_the_kinds_of_inputs_and_labels() -> None:
    assert (
        lines("data=synthetic")["columns"]
        == "inputs: images; labels: 10 classes (data.kind=classification)"
    )
    words = ["data=diabetes", "partition=iid", "partition.clients=5"]
    assert lines(*words)["columns"] == "inputs: numbers; labels: 1 value (data.kind=regression)"


def test_printed_plan_of_data_without_classes_has_no_line_about_the_split(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["data=diabetes", "partition=iid", "partition.clients=5"]
    assert "split" not in lines(*words)
    assert cli.call(["partition", *words, "--out", os.devnull]) == 0
    assert "classes" not in capsys.readouterr().out


def test_printed_plan_shows_the_forecast_of_the_schedule() -> None:
    stale = [
        "schedule=buffered",
        "schedule.concurrency=20",
        "schedule.size=5",
        "fleet=lognormal",
        "rounds=30",
    ]
    words = [word for word in SMALL if not word.startswith("schedule.")]
    text = overview(
        build([*words, *stale, "method=[fedbuff]", "schedule.max_staleness=3"]), Path("somewhere")
    )
    line = next(line for line in text.splitlines() if line.startswith("schedule"))
    assert re.fullmatch(
        r"schedule  about 20\.0 of 20 clients train at a time, an aggregation every \S+ s of "
        r"virtual time; mean staleness [12]\.\d aggregations; \d+% of the jobs discarded",
        line,
    )
    assert lines()["schedule"].startswith("about ") and "stale" not in lines()["schedule"]
    assert "schedule" not in lines("schedule.cohort=1")  # one client at a time


@pytest.mark.parametrize(
    ("workers", "cohort", "said"),
    [
        ("null", 20, "enough to keep 2 workers busy"),
        ("null", 7, "enough to keep 1 worker busy"),
        ("2", 4, "2 workers busy for 100% of the time"),
        (
            "2",
            3,
            "2 workers busy for 75% of the time",
        ),  # each round two of three equal jobs, and then one
    ],
)
def test_printed_plan_shows_how_many_workers_are_busy(workers: str, cohort: int, said: str) -> None:
    found = lines("runtime=local", f"runtime.workers={workers}", f"schedule.cohort={cohort}")
    assert found["schedule"].endswith(said)


def test_run_refuses_fleet_without_available_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nobody = Intervals(np.empty(0), np.zeros(2), np.ones(1), np.zeros(1000), wrap=True)
    monkeypatch.setattr("raysim.simulation.fleet.Fleet.presence", lambda *_: nobody)
    with pytest.raises(RefusedError, match=r"^fleet: no client is"):
        run([*SMALL, "out=a"], quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_raysim_version_is_recorded_if_the_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test the case of `raysim submit`, which sends the package to nodes without installing it."""
    monkeypatch.setattr(describe, "LIBRARIES", ("raysim-that-nobody-installed",))
    assert identity(build(SMALL))["libraries"] == {"raysim": raysim.__version__}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["method=krum"], "krum"),
        (["method=fedbuff"], "fedbuff"),
        (["attack.kind=sign_flip", "attack.share=0.3"], "attack"),
        (["method=fedprox"], ""),
    ],
)
def test_printed_plan_says_why_workers_do_not_add_up_updates(words: list[str], reason: str) -> None:
    lines = [
        overview(build([*SMALL, *words, runtime]), Path("somewhere")).splitlines()
        for runtime in ("runtime=local", "runtime=inprocess")
    ]
    on_ray, here = ([line for line in text if line.startswith("sums ")] for text in lines)
    assert here == [], "nothing travels"
    assert [reason in line for line in on_ray] == ([True] if reason else [])
