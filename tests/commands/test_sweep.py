"""Searches as a user starts them: their results, what they refuse, and how they go on after their driver is killed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import raysim
from raysim import cli
from raysim.commands.sweep.records import Record, Records
from raysim.commands.sweep.report import draw_parallel
from raysim.commands.sweep.search import load, plan
from raysim.commands.sweep.trial import Trial, prepared
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.primitives.errors import Refused
from raysim.results.history import read_history
from raysim.results.tracking import Tracker
from raysim.runtime import inprocess
from raysim.simulation.events import RunStoppedError
from raysim.training.identity import Identity, identify

STUDY = (
    *("runtime=local", "tracking=none", "data=synthetic", "partition=iid", "partition.clients=6"),
    *("schedule.cohort=2", "local.epochs=1", "rounds=4", "checkpoint.every=2", "model=mlp"),
)
LRS = "local.lr=0.01,0.1"
ALONE = ("runtime=inprocess", "tracking=none")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(*words: str, status: int = 0) -> Path:
    assert cli.call(["sweep", *STUDY, "out=s", *words]) == status
    return Path("s")


def trials(folder: Path) -> list[dict[str, Any]]:
    """The table, in order of numbers."""
    rows: list[dict[str, Any]] = pq.read_table(folder / "trials.parquet").to_pylist()
    return sorted(rows, key=lambda row: int(row["trial"]))


def alone(config: Path) -> float:
    """The final accuracy of a run of its own."""
    out = config.parent.name
    assert cli.call(["run", "--config", str(config), *ALONE, f"out={out}", "--quiet"]) == 0
    accuracy = read_history(Path(out, "history.parquet"))[-1]["accuracy_global"]
    shutil.rmtree(out)
    return float(str(accuracy))


def refusal(words: Sequence[str]) -> str:
    with pytest.raises(Refused) as caught:
        plan([*STUDY, *words])
    return str(caught.value)


# --- before it starts ---------------------------------------------------------------------------------------------
def test_where_nothing_can_be_written_is_refused_before_ray_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("letter").write_text("")
    assert cli.call(["sweep", *STUDY, "out=letter/a", LRS]) == 2
    assert (
        "out=letter/a cannot be made because" in (said := capsys.readouterr().err)
        and "letter is a file" in said
    )


def test_a_wrong_key_is_answered_with_the_nearest_one() -> None:
    assert "did you mean lr?" in refusal(["local.lrr=0.1,0.2"])
    assert "did you mean mu?" in refusal(["method=[fedprox]", "method.fedprox.muu=0.1,0.2"])
    assert "did you mean fedprox?" in refusal(["sweep=fedprx"])
    assert "did you mean search?" in refusal(["sweep.serch=grid", LRS])


def test_the_space_of_a_method_that_was_not_chosen_is_refused() -> None:
    assert "write method=fedbr" in refusal(["sweep=fedbr"])


def test_a_search_without_a_space_is_refused() -> None:
    assert "no space" in refusal(["local.lr=0.1"])


@pytest.mark.parametrize("key", ["seed=0,1", "runtime.threads=1,2", "out=a,b"])
def test_what_no_search_is_over_is_refused(key: str) -> None:
    assert "is not searched over" in refusal([key])


def test_values_that_cannot_be_changed_in_a_run_are_refused_for_pbt() -> None:
    assert "which model.width cannot" in refusal(
        ["model=small_cnn", "model.width=8,16", "sweep.scheduler=pbt"]
    )


def test_a_value_given_on_the_command_line_is_not_searched() -> None:
    search = plan(
        ["sweep=fedbr", "method=[fedbr]", "method.fedbr.lam=0.25", "method.fedbr.tau1=1,2"]
    )
    assert list(search.space) == ["method.fedbr.mu", "method.fedbr.tau1", "method.fedbr.tau2"]
    assert search.node(search.points()[0])["method"]["fedbr"]["lam"] == 0.25


def test_trials_that_are_as_good_as_the_best_are_counted(tmp_path: Path) -> None:
    records = Records(plan([LRS]), tmp_path, "accuracy", 6, print, tracked=False, uri="")
    outcomes = [(0.5, "done"), (0.75, "done"), (0.75, "stopped"), (0.75, "done"), (None, "failed")]
    records.all = {
        n: Record(n, {}, status=status, score=score) for n, (score, status) in enumerate(outcomes)
    }
    assert (best := records.best()) is not None and best.number == 1
    assert records.as_good(best) == 1, "one that was given up is no match"


@pytest.mark.parametrize(
    ("scores", "ticks"),
    [
        ((0.123, 0.165), ["0.13", "0.14", "0.15", "0.16"]),
        ((0.1, 0.3), ["0.1", "0.15", "0.2", "0.25", "0.3"]),
        ((0.5, 0.5), ["0.5"]),
    ],
)
def test_axes_of_all_keys_together_have_round_numbers(
    scores: tuple[float, float], ticks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    written: list[str] = []
    text = Axes.text

    def watched(self: Axes, x: float, y: float, said: str, **how: Any) -> Any:
        written.append(said)
        return text(self, x, y, said, **how)

    monkeypatch.setattr(Axes, "text", watched)
    records = Records(
        plan(["local.momentum=interval(0, 0.9)"]),
        tmp_path,
        "accuracy",
        2,
        print,
        tracked=False,
        uri="",
    )
    records.all = {
        n: Record(n, {"local.momentum": 0.5}, status="done", score=score)
        for n, score in enumerate(scores)
    }
    draw_parallel(records, tmp_path / "x.png")
    assert written == ["0", "0.2", "0.4", "0.6", "0.8", *ticks]


def test_values_of_a_method_hold_for_the_trials_that_have_it() -> None:
    search = plan(
        [
            "method=fedavg,fedprox,fedprox+feddecorr",
            "method.fedprox.mu=0.1,0.2",
            "sweep.search=grid",
        ]
    )
    quoted = plan(
        [
            "method=[],[fedprox],[fedprox,feddecorr]",
            "method.fedprox.mu=0.1,0.2",
            "sweep.search=grid",
        ]
    )
    assert (search.points(), search.drafts) == (quoted.points(), quoted.drafts)
    points = search.points()
    assert len(points) == 5  # FedAvg once, the others at both values
    assert points[0] == {"method": []}
    node = search.node(points[-1])
    assert list(node["method"]) == ["fedprox", "feddecorr"]
    assert node["method"]["fedprox"]["mu"] == 0.2


def test_a_trial_is_what_a_run_with_the_same_words_would_be() -> None:
    words = ["method=[fraug]", "model=small_cnn"]
    search = plan([*words, "rounds=7,9", "local.steps=3,5", "method.fraug.weight=0.2,0.4"])
    point = {"rounds": 9, "local.steps": 5, "method.fraug.weight": 0.4}
    run = compose([*words, "rounds=9", "local.steps=5", "method.fraug.weight=0.4"])
    assert search.node(point) == to_dict(run)


def test_counting_gives_a_list_of_values() -> None:
    assert plan(["local.epochs=1..3", "sweep.search=grid"]).points() == [
        {"local.epochs": n} for n in (1, 2, 3)
    ]


def test_files_that_change_later_change_nothing(tmp_path: Path) -> None:
    option = tmp_path / "conf" / "method" / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("mine:\n  _target_: raysim.methods.fedprox.FedProx\n  mu: 0.5\n")
    search = plan(["method=[mine]", LRS], [str(tmp_path / "conf")])
    option.unlink()
    assert search.node({"local.lr": 0.1})["method"]["mine"]["mu"] == 0.5


def test_a_run_knows_no_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["run", "sweep=fedbr"]) == 2
    assert "raysim sweep sweep=fedbr" in capsys.readouterr().err


def test_every_space_that_is_shipped_names_keys_that_exist() -> None:
    for name, methods in {
        "fedbr": "fedbr",
        "fedbss": "fedbss",
        "fedprox": "fedprox",
        "fraug": "fraug",
        "fedld": "fedld",
    }.items():
        assert plan([f"sweep={name}", f"method=[{methods}]"]).samples()
    assert len(plan(["sweep=methods"]).points()) == 10


# --- searching ----------------------------------------------------------------------------------------------------
GRID = (
    *("method=[],[fedprox]", "local.lr=0.01,0.1,1e30", "sweep.search=grid", "sweep.concurrent=1"),
    *("faults.tolerate=0", "tracking=mlflow"),
)


@pytest.fixture(scope="module")
def grid(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a search of six trials, two of which fail, and what it printed; several tests look at it."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(tmp_path_factory.mktemp("grid"))
        patch.setattr(
            "raysim.commands.sweep.records.PATIENCE", 600.0
        )  # that of each trial's tracker
        patch.setitem(Tracker.__init__.__kwdefaults__, "patience", 600.0)
        folder = sweep(*GRID).absolute()
    return folder, printed.getvalue()


def test_a_grid_leaves_a_table_pictures_and_a_configuration_that_a_run_takes(
    grid: tuple[Path, str],
) -> None:
    folder, shown = grid
    rows = trials(folder)
    assert [(row["method"], row["local.lr"]) for row in rows] == [
        ("fedavg", 0.01), ("fedavg", 0.1), ("fedavg", 1e30), ("fedprox", 0.01), ("fedprox", 0.1), ("fedprox", 1e30),
    ]  # fmt: skip
    assert len(re.findall(r"^trial \d", shown, re.MULTILINE)) == 6
    files = {"parallel.png", "slices.png", "trials.csv", "best.yaml", "summary.json", "report.html"}
    assert files <= set(os.listdir(folder))
    page = (folder / "report.html").read_text()
    assert "Trials" in page
    pictures = re.findall(r'"data:image/png;base64,([^"]+)"', page)
    assert len(pictures) == len({*pictures}), "a dark page has pictures of its own"
    assert not (folder / ".tune").exists()
    done = [row for row in rows if row["status"] == "done"]
    assert len(done) == 4 and all(row["rounds"] == 4 for row in done)
    best = max(done, key=lambda row: float(row["accuracy_global"]))
    assert alone(folder / "best.yaml") == best["accuracy_global"]
    assert (
        cli.call(["report", *(str(folder / row["folder"]) for row in done), "--out", "page"]) == 0
    )


def test_a_trial_that_fails_says_why_and_the_others_go_on(grid: tuple[Path, str]) -> None:
    folder, shown = grid
    rows = trials(folder)
    assert [row["status"] for row in rows] == 2 * ["done", "done", "failed"]
    assert "clients failed in round" in rows[2]["error"]
    assert "failed: " in shown


def test_a_search_is_one_tracked_run_with_a_child_for_each_trial(grid: tuple[Path, str]) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{grid[0].parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("raysim")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags.get("kind") == "sweep"]
    children = [
        run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    ]
    assert len(children) == 6
    told = {(run.data.tags["method"], run.data.tags["data"]) for run in children}
    assert told == {("fedavg", "synthetic"), ("fedprox", "synthetic")}
    files = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {"report.html", "trials.csv", "best.yaml", "summary.json"} <= files
    whole = [run for run in children if run.info.status == "FINISHED"]
    assert [run.data.params["local.lr"] for run in children if run not in whole] == 2 * ["1e+30"]
    assert {run.data.params["local.lr"] for run in whole} == {"0.01", "0.1"}
    assert all(run.data.metrics["round"] == 4 for run in whole)
    assert parent.data.metrics["best"] == max(run.data.metrics["accuracy_global"] for run in whole)


def test_a_search_that_goes_on_keeps_its_settings(
    grid: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["sweep", f"out={grid[0]}", "resume=latest", "rounds=9"]) == 2
    assert "rounds=9 cannot change a search that has begun" in capsys.readouterr().err
    assert cli.call(["sweep", "out=elsewhere", "resume=latest"]) == 2
    assert "is not the folder of a search" in capsys.readouterr().err


def test_several_seeds_are_one_number_with_its_deviation_and_more_trials_leave_it(
    ray_session: None,
) -> None:
    words = (
        "local.lr=tag(log,interval(0.01,0.5))",
        "sweep.trials=2",
        "sweep.seeds=2",
        "seed=5",
        "rounds=2",
    )
    folder = sweep(*words, "sweep.concurrent=1")
    first = trials(folder)
    for row in first:
        runs = [alone(folder / row["folder"] / f"seed-{seed}" / "config.yaml") for seed in (5, 6)]
        assert math.isclose(row["accuracy_global"], sum(runs) / 2)
        assert math.isclose(row["accuracy_global_std"], abs(runs[0] - runs[1]) / math.sqrt(2))
    assert cli.call(["sweep", "out=s", "resume=latest", "sweep.trials=3"]) == 0
    rows = trials(folder)
    assert rows[:2] == first
    assert len(rows) == 3


def test_python_gets_settings_scores_histories_and_folders(ray_session: None) -> None:
    grid = raysim.sweep([*STUDY, LRS, "sweep.search=grid", "rounds=2", "out=s"], quiet=True)
    rows = trials(Path("s"))
    best, winner = grid.get_best_result(), max(rows, key=lambda row: float(row["accuracy_global"]))
    assert (len(grid), grid.num_errors) == (2, 0)
    assert best.config == {"local.lr": winner["local.lr"]}
    assert best.metrics is not None and best.metrics["accuracy_global"] == winner["accuracy_global"]
    assert Path(best.path) == Path("s", winner["folder"]).resolve()
    assert {"config.yaml", "history.parquet"} <= {*os.listdir(best.path)}
    assert best.metrics_dataframe is not None and [*best.metrics_dataframe["round"]] == [1, 2]
    assert sorted(grid.get_dataframe()["config/local.lr"]) == [0.01, 0.1]
    worst = grid.get_best_result("accuracy_global", "min")
    assert {best.number, worst.number} == {trial.number for trial in grid} == {0, 1}
    with pytest.raises(ValueError, match=r"^metric=speed: "):
        grid.get_best_result("speed")


def test_trial_on_an_unequal_node_fails_with_the_reason(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_driver(name: str, packages: Sequence[str]) -> Identity:
        facts = identify(name, packages).facts
        return Identity(name, "node-a", {**facts, "torch": "0.1"})

    monkeypatch.setattr("raysim.commands.sweep.tune.cluster.identify_process", other_driver)
    words = [*STUDY, "local.lr=0.1,0.2", "sweep.search=grid", "rounds=1"]
    refused = raysim.sweep([*words, "out=s"], quiet=True)
    assert refused.num_errors == 2
    assert all("runtime.mixed=false" in error and "torch" in error for error in refused.errors)
    assert raysim.sweep([*words, "runtime.mixed=true", "out=t"], quiet=True).num_errors == 0


def test_pbt_takes_over_states_and_changes_values(ray_session: None) -> None:
    words = (
        "local.lr=tag(log,interval(0.0001,0.5))",
        "sweep.trials=4",
        "sweep.scheduler=pbt",
        "sweep.interval=2",
    )
    folder = sweep(*words, "rounds=12", "sweep.concurrent=2")
    rows = trials(folder)
    assert all(row["status"] == "done" and row["rounds"] == 12 for row in rows)
    before = [point["local.lr"] for point in load(folder).points()]
    assert [row["local.lr"] for row in rows] != before
    assert all(0.0001 <= row["local.lr"] <= 0.5 for row in rows)


def test_a_trial_with_workers_of_its_own_has_the_same_bits(ray_session: None) -> None:
    folder = sweep("local.lr=tag(log,interval(0.01,0.5))", "sweep.trials=1", "sweep.workers=2")
    (row,) = trials(folder)
    assert row["accuracy_global"] == alone(folder / row["folder"] / "config.yaml")


def test_a_trial_that_does_not_fit_is_refused_with_numbers(
    ray_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(LRS, "sweep.workers=3", status=2)
    assert (
        "3 workers of 1 CPU each, the cluster has 2 CPU: set sweep.workers=2"
        in capsys.readouterr().err
    )
    sweep(LRS, "runtime.threads=3", status=2)
    assert "a trial needs 3 CPU, the cluster has 2 CPU" in capsys.readouterr().err
    assert not Path("s").exists()


def test_a_metric_that_is_not_measured_is_named(tmp_path: Path) -> None:
    found = prepared([to_dict(compose([*STUDY, "rounds=1"]))], tmp_path, (), None)
    (experiment, folder, _), *_ = found
    events = inprocess.run(experiment.spec, experiment.schedule, experiment.fleet)
    with pytest.raises(
        RunStoppedError, match=r"set sweep\.metric to one of accuracy, accuracy_global"
    ):
        Trial([experiment], [folder], [events], "accuracy_globe").advance()


# --- going on -----------------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys
from raysim import cli
from raysim.commands.sweep.records import Records

ended = Records.ended

def last(self, number):
    ended(self, number)
    if sum(record.status != "running" for record in self.all.values()) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Records.ended = last
cli.call(sys.argv[1:])
"""
ASHA = (
    "sweep.scheduler=asha",
    "sweep.grace=2",
    "sweep.reduction=2",
    "sweep.concurrent=1",
    "rounds=8",
)
SEARCHES = {
    "grid": ("local.lr=0.3,0.2,0.1,0.00001,0.000001,0.0000001", "sweep.search=grid"),
    "optuna": (
        *(
            "method=[],[fedprox]",
            "local.epochs=int(interval(1,3))",
            "local.lr=tag(log,interval(0.01,0.5))",
        ),
        *("sweep.search=optuna", "sweep.trials=6"),
    ),
}


def killed_and_continued(search: str) -> list[dict[str, Any]]:
    """The trials of a search that goes on after its driver, a process of its own, was killed at the second of six."""
    import ray

    joins = ("runtime=cluster", f"runtime.address={ray.get_runtime_context().gcs_address}")
    words = ["sweep", *STUDY, *ASHA, *SEARCHES[search], *joins, "out=s"]
    command = [sys.executable, "-c", KILLED, *words]
    assert (
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        == -signal.SIGKILL
    )
    kept = {
        path: path.read_bytes()
        for path in Path("s/trials").glob("*/*")
        if path.name == "trial.json"
    }
    over = {
        path: text
        for path, text in kept.items()
        if json.loads(text)["status"] in ("done", "stopped")
    }
    assert len(over) == 2
    assert cli.call(["sweep", "out=s", "resume=latest"]) == 0
    for path, text in over.items():
        assert path.read_bytes() == text  # what had ended stays as it was
    for path, text in kept.items():
        assert json.loads(path.read_text())["point"] == json.loads(text)["point"]
    rows = trials(Path("s"))
    assert len(rows) == 6
    assert all(row["status"] in ("done", "stopped") for row in rows)
    return rows


def test_asha_stops_the_worse_trials_early_on_both_sides_of_a_kill(ray_session: None) -> None:
    rows = killed_and_continued("grid")
    assert [row["rounds"] == 8 for row in rows] == [row["status"] == "done" for row in rows]
    assert rows[0]["status"] == "done"
    assert any(row["status"] == "stopped" for row in rows[3:]), "worse than what ended before"


def test_optuna_searches_lists_whole_numbers_and_ranges_and_goes_on_after_a_kill(
    ray_session: None,
) -> None:
    pytest.importorskip("optuna")
    rows = killed_and_continued("optuna")
    assert all(row["local.epochs"] in (1, 2, 3) and 0.01 <= row["local.lr"] <= 0.5 for row in rows)
    assert {row["method"] for row in rows} <= {"fedavg", "fedprox"}


def test_a_stored_configuration_can_be_changed_in_a_run() -> None:
    Path("c.yaml").write_text(
        json.dumps(to_dict(compose(["method=[fedprox]", "method.fedprox.mu=0.7", "rounds=3"])))
    )
    config = compose(["method.fedprox.mu=0.8"], (), "c.yaml")
    assert (config["rounds"], config["method"]["fedprox"]["mu"]) == (3, 0.8)
    assert compose([], (), "c.yaml")["method"]["fedprox"]["mu"] == 0.7
    assert list(compose(["method=[moon]"], (), "c.yaml")["method"]) == ["moon"]
    with pytest.raises(Refused, match="is no file"):
        compose([], (), "missing.yaml")
