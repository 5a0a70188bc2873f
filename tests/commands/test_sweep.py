"""Test what sweeps refuse, which results they write, and how they continue."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

import raysim
from raysim import cli
from raysim.commands.sweep.plan import SweepPlan, plan, read_request
from raysim.commands.sweep.records import TrialRecord, TrialRecords
from raysim.commands.sweep.report import KeyAxis, draw_parallel
from raysim.commands.sweep.space import Choice, Interval
from raysim.commands.sweep.trial import Trial, open_trial
from raysim.commands.ui.database import RunDatabase
from raysim.experiment.build import build
from raysim.experiment.compose import compose
from raysim.experiment.config_files import to_dict
from raysim.experiment.runner import RunFailedError
from raysim.experiment.settings import Experiment
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import conf_folder
from raysim.results.history import read_history
from raysim.runtime import inprocess
from raysim.simulation.events import Event, ProcessLostError, RunStoppedError
from raysim.training.identity import Identity, identify

if TYPE_CHECKING:
    from raysim.commands.sweep.tune import SweepTrial, TrialTask

STUDY = (
    "runtime=local",
    "tracking=none",
    "data=synthetic",
    "partition=iid",
    "partition.clients=6",
    "schedule.cohort=2",
    "local.epochs=1",
    "rounds=4",
    "checkpoint.every=2",
    "model=mlp",
)
LRS = "local.lr=0.01,0.1"
INPROCESS = ("runtime=inprocess", "tracking=none")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sweep(*overrides: str, status: int = 0) -> Path:
    assert cli.call(["sweep", *STUDY, "out=s", *overrides]) == status
    return Path("s")


def trials(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a sweep's table, in the order of the trials' numbers.

    folder: the folder of the sweep.
    """
    rows: list[dict[str, Any]] = pq.read_table(folder / "trials.parquet").to_pylist()
    return sorted(rows, key=lambda row: int(row["trial"]))


def run_accuracy(config: Path, *words: str) -> float:
    """Execute a run with a stored configuration; return its final accuracy.

    config: the file of the configuration.
    words: further arguments of `raysim run`.
    """
    overrides = [*INPROCESS, "out=single", *words]
    assert cli.call(["run", "--config", str(config), *overrides, "--quiet"]) == 0
    accuracy = read_history(Path("single", "history.parquet"))[-1]["accuracy_global"]
    shutil.rmtree("single")
    return float(str(accuracy))


def records_of(folder: Path, overrides: Sequence[str], metric: str = "accuracy") -> TrialRecords:
    sweep_plan = plan(overrides)
    return TrialRecords(sweep_plan, folder, metric, 6, print, tracked=False, uri="")


# --- the plan -----------------------------------------------------------------------------------
@functools.cache
def shipped(name: str) -> SweepPlan:
    """Return the plan of a sweep over a search space in `conf/sweep`.

    name: the name of the search space. It begins with the name of a method.
    """
    method = name.partition("_")[0]
    extra = ["partition.validation_fraction=0.1"] if method == "fraug" else []
    return plan([f"sweep={name}", f"method=[{method}]", *extra])


class TestPlan:
    def test_sweep_refuses_an_output_folder_whose_parent_is_a_file(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Path("letter").write_text("")
        assert cli.call(["sweep", *STUDY, "out=letter/a", LRS]) == 2
        assert "out=letter/a" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("overrides", "key"),
        [
            (["local.lrr=0.1,0.2"], r"local\.lrr.*did you mean lr\?"),
            (["method=[fedprox]", "method.fedprox.muu=0.1,0.2"], r"muu.*did you mean mu\?"),
            (["sweep=fedprx"], r"sweep=fedprx.*did you mean fedprox\?"),
            (["sweep.serch=grid", LRS], r"sweep\.serch.*did you mean search\?"),
            (["sweep.hosts=2", LRS], r"sweep\.hosts .*sweep\.workers"),
            (["sweep=fedbr"], "method=fedbr"),
            (["local.lr=0.1"], "^sweep: "),
            (["seed=0,1"], "^seed "),
            (["runtime.threads=1,2"], r"^runtime\.threads "),
            (["out=a,b"], "^out "),
            (
                ["model=small_cnn", "model.width=8,16", "sweep.scheduler=pbt"],
                r"^model\.width: sweep\.scheduler=pbt",
            ),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_sweep_refuses_wrong_override(self, overrides: list[str], key: str) -> None:
        with pytest.raises(RefusedError, match=key):
            plan([*STUDY, *overrides])

    def test_sweep_does_not_search_a_key_that_has_a_single_value(self) -> None:
        overrides = ["sweep=fedbr", "method=[fedbr]", "method.fedbr.lam=0.25"]
        sweep_plan = plan([*overrides, "method.fedbr.tau1=1,2"])
        expected = ["method.fedbr.mu", "method.fedbr.tau1", "method.fedbr.tau2"]
        assert list(sweep_plan.space) == expected
        assert sweep_plan.node(sweep_plan.points()[0])["method"]["fedbr"]["lam"] == 0.25

    def test_sweep_varies_a_setting_of_a_method_only_in_trials_with_the_method(self) -> None:
        values = ["method.fedprox.mu=0.1,0.2", "sweep.search=grid"]
        sweep_plan = plan(["method=fedavg,fedprox,fedprox+feddecorr", *values])
        quoted = plan(["method=[],[fedprox],[fedprox,feddecorr]", *values])
        assert (sweep_plan.points(), sweep_plan.drafts) == (quoted.points(), quoted.drafts)
        points = sweep_plan.points()
        assert len(points) == 5, "FedAvg once, the others with both values"
        assert points[0] == {"method": []}
        methods = sweep_plan.node(points[-1])["method"]
        assert list(methods) == ["fedprox", "feddecorr"]
        assert methods["fedprox"]["mu"] == 0.2

    def test_points_that_a_sweep_checks_first_include_every_searched_value(self) -> None:
        sweep_plan = plan(["method=fedavg,fedprox", "method.fedprox.mu=0.1,0.2"])
        tried = {point.get("method.fedprox.mu") for point in sweep_plan.samples()}
        assert tried == {None, 0.1, 0.2}

    def test_trial_has_the_configuration_of_a_run_with_the_same_overrides(self) -> None:
        overrides = ["method=[fraug]", "model=small_cnn"]
        searched = ["rounds=7,9", "local.steps=3,5", "method.fraug.weight=0.2,0.4"]
        point = {"rounds": 9, "local.steps": 5, "method.fraug.weight": 0.4}
        values = ["rounds=9", "local.steps=5", "method.fraug.weight=0.4"]
        assert plan([*overrides, *searched]).node(point) == to_dict(compose([*overrides, *values]))

    def test_sweep_expands_range_of_integers_to_values(self) -> None:
        points = plan(["local.epochs=1..3", "sweep.search=grid"]).points()
        assert points == [{"local.epochs": epochs} for epochs in (1, 2, 3)]

    def test_planned_sweep_ignores_later_changes_of_files(self, tmp_path: Path) -> None:
        option = tmp_path / "conf" / "method" / "mine.yaml"
        option.parent.mkdir(parents=True)
        option.write_text("mine:\n  _target_: raysim.methods.fedprox.FedProx\n  mu: 0.5\n")
        sweep_plan = plan(["method=[mine]", LRS], [str(tmp_path / "conf")])
        option.unlink()
        assert sweep_plan.node({"local.lr": 0.1})["method"]["mine"]["mu"] == 0.5

    def test_error_suggests_raysim_sweep_if_raysim_run_has_a_sweep_option(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.call(["run", "sweep=fedbr"]) == 2
        assert "raysim sweep sweep=fedbr" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "name",
        sorted(
            path.stem
            for path in (conf_folder() / "sweep").glob("*.yaml")
            if path.stem not in ("default", "methods")
        ),
    )
    def test_every_shipped_sweep_option_can_be_planned(self, name: str) -> None:
        assert shipped(name).samples()

    @pytest.mark.parametrize(
        ("name", "key", "values"),
        [
            ("fedbss", "method.fedbss.warmup_rounds", {0, 25, 50, 100}),
            ("moon", "method.moon.mu", {0.01, 0.1, 1, 10}),
            ("dann", "method.dann.lam", {0.01, 0.1, 1}),
            ("fedmix", "method.fedmix.lam", {0.01, 0.1, 0.2}),
            ("fedntd", "method.fedntd.beta", {0.1, 1}),
            ("fraug_office_home", "method.fraug.noise_dim", {64, 128, 256, 512}),
            ("fraug_pacs", "method.fraug.noise_dim", {64, 128, 256, 512}),
        ],
    )
    def test_sweep_grid_of_a_method_has_the_values_of_its_paper(
        self, name: str, key: str, values: set[float]
    ) -> None:
        points = shipped(name).points()
        assert values <= {point[key] for point in points}

    def test_sweep_option_fedbr_includes_zero_as_a_value_of_tau2(self) -> None:
        tau2 = shipped("fedbr").space["method.fedbr.tau2"]
        assert 0.0 in tau2.corners()

    def test_shipped_sweep_option_named_methods_compares_ten_methods(self) -> None:
        assert len(plan(["sweep=methods"]).points()) == 10

    @pytest.mark.parametrize(
        ("overrides", "metric", "is_test_score"),
        [
            (["partition.validation_fraction=0.2"], "accuracy_validation", False),
            (["partition.validation_fraction=0.0,0.2"], "accuracy_global", True),
            (["partition.validation_fraction=0.2", "sweep.metric=accuracy"], "accuracy", False),
        ],
    )
    def test_sweep_prints_advice_if_it_has_no_validation_score_to_maximise(
        self, overrides: list[str], metric: str, is_test_score: bool
    ) -> None:
        from raysim.commands.sweep import session

        sweep_plan = plan([*STUDY, LRS, *overrides, "sweep.search=grid"])
        experiments = [build(sweep_plan.node(point)) for point in sweep_plan.samples()]
        printed = io.StringIO()
        chosen = session._choose_metric(sweep_plan, experiments, Console(file=printed))
        assert (chosen.options.metric, chosen.options.mode) == (metric, "max")
        assert ("partition.validation_fraction" in printed.getvalue()) == is_test_score


# --- trials without Ray -------------------------------------------------------------------------
def start_events(experiment: Experiment, folder: Path, resume: str) -> Iterator[Event]:
    parts = (experiment.spec, experiment.schedule, experiment.fleet)
    return inprocess.run(*parts, str(folder), resume)


def make_trial(folder: Path, *overrides: str, metric: str = "accuracy_global") -> Trial:
    config = to_dict(compose([*STUDY, *overrides]))
    return open_trial(0, [config], metric, start_events, folder=folder)


IDENTIFY = "raysim.commands.sweep.tune.cluster.identify_process"


def trial_process(task: TrialTask, monkeypatch: pytest.MonkeyPatch) -> SweepTrial:
    """Return a `SweepTrial` that is ready for its first step, without starting Ray Tune."""
    from raysim.commands.sweep.tune import SweepTrial

    monkeypatch.setattr("raysim.commands.sweep.tune._START_FOLDER", os.getcwd())
    process = SweepTrial.__new__(SweepTrial)
    process.setup({"trial": {"point": {}, "replay": []}}, plan([*STUDY, LRS]), task)
    return process


class TestTrial:
    def test_interrupted_trial_resumes_with_the_bits_of_an_uninterrupted_run(
        self, tmp_path: Path
    ) -> None:
        folder = tmp_path / "runs" / "0000_seed-0"
        first = make_trial(tmp_path)
        for _ in range(3):
            first.advance()
        first.close()
        second = make_trial(tmp_path)
        rows = [row for _ in range(4) for row in second.advance()]
        assert [row["round"] for row in rows] == [1, 2, 3, 4]
        assert "round-000002" in (tmp_path / "logs" / "0000_seed-0.txt").read_text()
        raysim.run([*STUDY, *INPROCESS, "out=single"], quiet=True)
        summaries = [
            json.loads((path / "summary.json").read_text()) for path in (folder, Path("single"))
        ]
        assert summaries[0]["model_sha256"] == summaries[1]["model_sha256"]

    def test_finished_run_of_a_trial_is_not_repeated(self, tmp_path: Path) -> None:
        trial = make_trial(tmp_path, "rounds=1")
        rows = trial.advance()
        trial.close()
        written = (tmp_path / "runs" / "0000_seed-0" / "summary.json").stat().st_mtime_ns
        again = make_trial(tmp_path, "rounds=1")
        assert [dict(row) for row in again.advance()] == [dict(row) for row in rows]
        assert (tmp_path / "runs" / "0000_seed-0" / "summary.json").stat().st_mtime_ns == written

    def test_error_of_unknown_metric_lists_the_available_metrics(self, tmp_path: Path) -> None:
        trial = make_trial(tmp_path, "rounds=1", metric="accuracy_globe")
        with pytest.raises(RunStoppedError, match=r"sweep\.metric.* accuracy, accuracy_global"):
            trial.advance()

    @pytest.mark.parametrize("mixed", [False, True])
    def test_trial_fails_on_another_torch_version_unless_runtime_mixed_is_true(
        self, mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from raysim.commands.sweep.tune import trial_task

        own = identify("driver")
        other = Identity("driver", "node-a", {**own.facts, "torch": "0.1"})
        experiment = build([*STUDY, f"runtime.mixed={str(mixed).lower()}"])
        with monkeypatch.context() as patch:
            patch.setattr(IDENTIFY, lambda *_: other)
            task = trial_task(records_of(tmp_path, [LRS]), experiment, {"CPU": 1.0}, ())
        monkeypatch.setattr(IDENTIFY, lambda *_: own)
        process = trial_process(task, monkeypatch)
        process._logdir = str(tmp_path / "0000")
        report = process.step()
        if mixed:
            assert report["rows"][0]["round"] == 1
        else:
            assert "runtime.mixed=false" in report["error"] and "torch" in report["error"]
        process.cleanup()

    @pytest.mark.parametrize("is_lost", [True, False])
    def test_trial_starts_again_only_if_a_worker_is_lost(
        self, is_lost: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from raysim.commands.sweep.tune import SweepTrial, TrialTask

        def fail(self: SweepTrial) -> Trial:
            cause = ProcessLostError("a node is lost") if is_lost else RunStoppedError("a nan")
            raise RunFailedError(str(cause)) from cause

        monkeypatch.setattr(SweepTrial, "_open_trial", fail)
        driver = identify("driver")
        task = TrialTask("s", "accuracy", "cpu", {}, (), (), driver, mixed=False)
        process = trial_process(task, monkeypatch)
        if is_lost:
            with pytest.raises(RunFailedError):  # so that Ray Tune starts the trial again
                process.step()
        else:
            assert process.step()["error"] == "a nan"


# --- reports ------------------------------------------------------------------------------------
class TestReport:
    def test_status_counts_trials_that_wait_to_start_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        records = records_of(tmp_path, [LRS])
        for number in range(2):
            records.start(number, {"local.lr": 0.1})
        records.report_restart(1, "")
        assert "trial 1" in capsys.readouterr().out
        assert records.status() == "0/6 trials have ended · 1 running · 1 waiting to start again"
        records.start(1, {"local.lr": 0.1})
        assert records.status() == "0/6 trials have ended · 2 running"
        assert records.most_running == 2

    def test_unfinished_trials_of_an_earlier_session_do_not_count_as_running(
        self, tmp_path: Path
    ) -> None:
        earlier = records_of(tmp_path, [LRS])
        for number in range(3):
            earlier.start(number, {"local.lr": 0.1})
        records = records_of(tmp_path, [LRS])
        records.start(0, {"local.lr": 0.1})
        assert records.most_running == 1
        assert records.status() == "0/6 trials have ended · 1 running · 2 waiting to start again"

    def test_trial_with_a_score_that_is_no_number_is_never_the_best(self, tmp_path: Path) -> None:
        records = records_of(tmp_path, [LRS])
        records.all[0] = TrialRecord(0, {}, status="done", score=math.nan)
        assert records.best() is None
        records.all[1] = TrialRecord(1, {}, status="done", score=0.5)
        assert [record.number for record in records.ordered()] == [1, 0]
        best = records.best()
        assert best is not None and best.number == 1

    def test_only_finished_trials_with_the_best_score_count_as_ties(self, tmp_path: Path) -> None:
        records = records_of(tmp_path, [LRS])
        outcomes = [
            (0.5, "done"),
            (0.75, "done"),
            (0.75, "stopped"),
            (0.75, "done"),
            (None, "failed"),
        ]
        for number, (score, status) in enumerate(outcomes):
            records.all[number] = TrialRecord(number, {}, status=status, score=score)
        best = records.best()
        assert best is not None and best.number == 1
        assert records.count_equal(best) == 1

    @pytest.mark.parametrize(
        ("key", "values", "is_logarithmic"),
        [
            ("local.lr", Choice((0.01, 0.03)), True),
            ("method.fedadam.server_lr", Interval(0.01, 0.1), True),
            ("local.lr", Choice((0.0, 0.1)), False),
            ("method.fedprox.mu", Choice((0.01, 0.03)), False),
            ("method.fedprox.mu", Choice((0.01, 1.0)), True),
        ],
    )
    def test_axis_of_a_learning_rate_is_logarithmic(
        self, key: str, values: Choice | Interval, is_logarithmic: bool
    ) -> None:
        assert KeyAxis(key, "x", values, []).is_logarithmic is is_logarithmic

    @pytest.mark.parametrize(
        ("scores", "ticks"),
        [
            ((0.123, 0.165), ["0.13", "0.14", "0.15", "0.16"]),
            ((0.1, 0.3), ["0.1", "0.15", "0.2", "0.25", "0.3"]),
            ((0.5, 0.5), ["0.5"]),
        ],
    )
    def test_axes_of_the_sweep_picture_have_ticks_at_short_decimal_numbers(
        self,
        scores: tuple[float, float],
        ticks: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from matplotlib.axes import Axes

        texts: list[str] = []
        draw_text = Axes.text

        def record_text(self: Axes, x: float, y: float, text: str, **options: Any) -> Any:
            texts.append(text)
            return draw_text(self, x, y, text, **options)

        monkeypatch.setattr(Axes, "text", record_text)
        records = records_of(tmp_path, ["local.momentum=interval(0, 0.9)"])
        for number, score in enumerate(scores):
            point: dict[str, object] = {"local.momentum": 0.5}
            records.all[number] = TrialRecord(number, point, status="done", score=score)
        draw_parallel(records, tmp_path / "x.png")
        assert texts == ["0", "0.2", "0.4", "0.6", "0.8", *ticks]


# --- searches on Ray Tune -----------------------------------------------------------------------
GRID = (
    "method=[],[fedavgm]",
    "local.lr=0.1,1e30",
    "sweep.search=grid",
    "sweep.concurrent=1",
    "faults.tolerate=0",
    "tracking=mlflow",
)


@pytest.fixture(scope="module")
def grid(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run a sweep of four trials, of which two fail; return its folder and the printed text."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(tmp_path_factory.mktemp("grid"))
        folder = sweep(*GRID).absolute()
    return folder, printed.getvalue()


class TestGrid:
    def test_grid_writes_a_table_and_pictures_and_the_best_configuration(
        self, grid: tuple[Path, str]
    ) -> None:
        folder, printed = grid
        rows = trials(folder)
        assert [(row["method"], row["local.lr"]) for row in rows] == [
            ("fedavg", 0.1),
            ("fedavg", 1e30),
            ("fedavgm", 0.1),
            ("fedavgm", 1e30),
        ]
        assert len(re.findall(r"^trial \d", printed, re.MULTILINE)) == 4
        tables = {"trials.csv", "best.yaml", "summary.json", "report.html", "sweep.yaml"}
        assert tables | {"parallel.png", "slices.png"} <= set(os.listdir(folder))
        page = (folder / "report.html").read_text()
        assert "Trials" in page
        pictures = re.findall(r'"data:image/png;base64,([^"]+)"', page)
        assert len(pictures) == len({*pictures}), "a dark page has pictures of its own"
        assert not (folder / ".tune").exists()
        done = [row for row in rows if row["status"] == "done"]
        assert len(done) == 2 and all(row["rounds"] == 4 for row in done)
        assert done[0]["accuracy_global"] != done[1]["accuracy_global"], "one of them is the best"
        best = max(done, key=lambda row: float(row["accuracy_global"]))
        assert run_accuracy(folder / "best.yaml") == best["accuracy_global"]

    def test_every_run_of_a_grid_writes_the_result_files_of_a_single_run(
        self, grid: tuple[Path, str]
    ) -> None:
        folder, _ = grid
        done = [row for row in trials(folder) if row["status"] == "done"]
        for row in done:
            files = {"config.yaml", "history.parquet", "jobs.parquet", "summary.json"}
            assert files <= set(os.listdir(folder / row["folder"]))
        assert len(os.listdir(folder / "logs")) == 4
        folders = [str(folder / row["folder"]) for row in done]
        assert cli.call(["report", *folders, "--out", "page"]) == 0

    def test_failed_trial_has_its_error_in_the_table_and_in_its_log(
        self, grid: tuple[Path, str]
    ) -> None:
        folder, printed = grid
        rows = trials(folder)
        assert [row["status"] for row in rows] == 2 * ["done", "failed"]
        assert "clients failed in round" in rows[1]["error"]
        assert "failed: " in printed
        assert "clients failed in round" in (folder / "logs" / "0001_seed-0.txt").read_text()

    def test_mlflow_run_of_a_grid_is_parent_of_its_trials(self, grid: tuple[Path, str]) -> None:
        from mlflow.tracking import MlflowClient

        assert RunDatabase(grid[0].parent).update() == 5
        client = MlflowClient(tracking_uri=f"sqlite:///{grid[0].parent / 'mlflow.db'}")
        experiment = client.get_experiment_by_name("raysim")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
        (parent,) = [run for run in runs if run.data.tags.get("kind") == "sweep"]
        parent_id = parent.info.run_id
        children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent_id]
        assert len(children) == 4
        tags = {(run.data.tags["method"], run.data.tags["data"]) for run in children}
        assert tags == {("fedavg", "synthetic"), ("fedavgm", "synthetic")}
        files = {item.path for item in client.list_artifacts(parent_id)}
        assert {"report.html", "trials.csv", "best.yaml", "summary.json"} <= files
        finished = [run for run in children if run.info.status == "FINISHED"]
        failed = [run for run in children if run not in finished]
        assert [run.data.params["local.lr"] for run in failed] == 2 * ["1e+30"]
        assert {run.data.params["local.lr"] for run in finished} == {"0.1"}
        assert all(run.data.metrics["round"] == 4 for run in finished)
        best = max(run.data.metrics["accuracy_global"] for run in finished)
        assert parent.data.metrics["best"] == best


class TestSearch:
    def test_optuna_sweep_scores_trials_by_mean_over_seeds_and_can_add_trials(
        self, ray_session: None
    ) -> None:
        pytest.importorskip("optuna")
        overrides = [
            "sweep.search=optuna",
            "method=[],[fedprox]",
            "local.epochs=int(interval(1,3))",
            "local.lr=tag(log,interval(0.01,0.5))",
            "sweep.trials=1",
            "sweep.seeds=2",
            "seed=5",
            "rounds=2",
        ]
        folder = sweep(*overrides, "sweep.concurrent=1")
        (first,) = trials(folder)
        names = [f"0000_seed-{seed}" for seed in (5, 6)]
        runs = [run_accuracy(folder / "runs" / name / "config.yaml") for name in names]
        assert math.isclose(first["accuracy_global"], sum(runs) / 2)
        deviation = abs(runs[0] - runs[1]) / math.sqrt(2)
        assert math.isclose(first["accuracy_global_std"], deviation)
        assert cli.call(["sweep", "out=s", "resume=latest", "sweep.trials=2"]) == 0
        rows = trials(folder)
        assert rows[0] == first
        assert len(rows) == 2 and rows[1]["status"] == "done"
        for row in rows:
            assert row["local.epochs"] in (1, 2, 3)
            assert 0.01 <= row["local.lr"] <= 0.5
            assert row["method"] in ("fedavg", "fedprox")

    def test_sweep_in_python_returns_scores_and_histories(self, ray_session: None) -> None:
        overrides = [*STUDY, LRS, "partition.validation_fraction=0.2", "rounds=2", "out=s"]
        options = ["sweep.search=grid", "sweep.concurrent=1"]
        result = raysim.sweep([*overrides, *options], quiet=True)
        rows = trials(Path("s"))
        best = result.get_best_result()
        metric = "accuracy_validation"
        best_row = max(rows, key=lambda row: float(row[metric]))
        assert (len(result), result.num_errors, result.metric) == (2, 0, metric)
        assert best.config == {"local.lr": best_row["local.lr"]}
        assert best.metrics[metric] == best_row[metric]
        assert Path(best.path) == Path("s", best_row["folder"]).resolve()
        assert {"config.yaml", "history.parquet"} <= {*os.listdir(best.path)}
        assert [*best.metrics_dataframe["round"]] == [1, 2]
        assert sorted(result.get_dataframe()["config/local.lr"]) == [0.01, 0.1]
        worst = result.get_best_result(metric, "min")
        assert {best.number, worst.number} == {trial.number for trial in result} == {0, 1}
        with pytest.raises(ValueError, match=r"^metric=speed: "):
            result.get_best_result("speed")

    def test_trial_continues_after_its_process_was_killed(
        self, ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        option = tmp_path / "own" / "method" / "dying_once.yaml"
        option.parent.mkdir(parents=True)
        settings = f"{{_target_: dying_once.DyingOnce, marker: {tmp_path}/died}}"
        option.write_text(f"dying_once: {settings}\n")
        searched = ("local.lr=tag(log,interval(0.01,0.5))", "sweep.trials=1")
        folder = sweep(*searched, "method=[dying_once]", "--conf", "own", "--allow", "dying_once")
        lines = capsys.readouterr().out.splitlines()
        restarts = [line for line in lines if "has lost a process" in line]
        assert len(restarts) == 1
        (row,) = trials(folder)
        assert row["status"] == "done"
        config = folder / row["folder"] / "config.yaml"
        assert row["accuracy_global"] == run_accuracy(config, "--allow", "dying_once")

    def test_population_based_training_changes_learning_rates_of_trials(
        self, ray_session: None, tmp_path: Path
    ) -> None:
        # A trial that ends before another one begins has nothing to learn from.
        option = tmp_path / "own" / "method" / "in_step.yaml"
        option.parent.mkdir(parents=True)
        (tmp_path / "rounds").mkdir()
        option.write_text(f"in_step: {{_target_: in_step.InStep, folder: {tmp_path}/rounds}}\n")
        folder = sweep(
            "method=[in_step]",
            "--conf",
            "own",
            "--allow",
            "in_step",
            "local.lr=tag(log,interval(0.0001,0.5))",
            "sweep.trials=2",
            "sweep.scheduler=pbt",
            "sweep.interval=2",
            "rounds=8",
            "sweep.concurrent=2",
        )
        rows = trials(folder)
        assert all(row["status"] == "done" and row["rounds"] == 8 for row in rows)
        sweep_plan = read_request([f"out={folder}", "resume=latest"]).plan
        values = [point["local.lr"] for point in sweep_plan.points()]
        assert [row["local.lr"] for row in rows] != values
        assert all(0.0001 <= row["local.lr"] <= 0.5 for row in rows)
        for row in rows:
            config = (folder / row["folder"] / "config.yaml").read_text()
            assert f"lr: {row['local.lr']}" in config

    def test_trial_on_two_workers_uses_its_placement_group_and_changes_no_bit(
        self, ray_session: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        import ray

        groups = {*ray.util.placement_group_table()}
        folder = sweep("local.lr=tag(log,interval(0.01,0.5))", "sweep.trials=1", "sweep.workers=2")
        new_groups = {*ray.util.placement_group_table()} - groups
        assert len(new_groups) == 1, "that of the trial; the run in the trial makes no other one"
        assert "has lost a process" not in capsys.readouterr().out, "the run keeps the group"
        (row,) = trials(folder)
        there = folder / row["folder"]
        config = ("--config", str(there / "config.yaml"))
        assert cli.call(["run", *config, *INPROCESS, "out=single", "--quiet"]) == 0
        here, in_trial = (
            json.loads((out / "summary.json").read_text()) for out in (Path("single"), there)
        )
        for checksum in ("model_sha256", "state_sha256"):
            assert in_trial[checksum] == here[checksum]
        assert row["accuracy_global"] == here["accuracy_global"]
        names = {name for group in in_trial["processes"] for name in group["names"]}
        assert {"worker-0", "worker-1"} <= names

    @pytest.mark.parametrize(
        ("override", "advice"),
        [("sweep.workers=3", "sweep.workers=2"), ("runtime.threads=3", "runtime.threads")],
    )
    def test_sweep_refuses_trial_that_does_not_fit_the_cluster(
        self,
        override: str,
        advice: str,
        ray_session: None,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        sweep(LRS, override, status=2)
        error = capsys.readouterr().err
        assert "2 CPU" in error and advice in error
        assert not Path("s").exists()


# --- continuing ---------------------------------------------------------------------------------
KILL_AT_FIRST_END = """
import os, signal, sys
from raysim import cli
from raysim.commands.sweep.records import TrialRecords

end = TrialRecords.end

def kill_at_first_end(self, number):
    end(self, number)
    if self.ended == 1:
        os.kill(os.getpid(), signal.SIGKILL)

TrialRecords.end = kill_at_first_end
cli.call(sys.argv[1:])
"""
ASHA = (
    "sweep.scheduler=asha",
    "sweep.grace=2",
    "sweep.reduction=2",
    "sweep.concurrent=1",
    "rounds=4",
)


class TestContinue:
    def test_resumed_sweep_refuses_changed_settings(
        self, grid: tuple[Path, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.call(["sweep", f"out={grid[0]}", "resume=latest", "rounds=9"]) == 2
        assert "rounds=9" in capsys.readouterr().err

    def test_resumed_sweep_refuses_missing_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.call(["sweep", "out=elsewhere", "resume=latest"]) == 2
        assert "out=elsewhere" in capsys.readouterr().err

    def test_sweep_with_resume_latest_accepts_a_missing_folder(self) -> None:
        request = read_request(["out=s", "resume=latest", LRS])
        assert request.folder == Path("s") and not request.is_new

    def test_resumed_sweep_refuses_folder_of_earlier_version(self) -> None:
        Path("s").mkdir()
        Path("s/sweep.json").write_text("{}")
        with pytest.raises(RefusedError, match=r"^out=s: .*sweep\.json"):
            read_request(["out=s", "resume=latest", LRS])

    def test_resumed_sweep_refuses_changed_configuration_files(self, tmp_path: Path) -> None:
        from raysim.commands.sweep.plan import store

        option = tmp_path / "conf" / "method" / "mine.yaml"
        option.parent.mkdir(parents=True)
        text = "mine:\n  _target_: raysim.methods.fedprox.FedProx\n  mu: 0.5\n"
        option.write_text(text)
        overrides = ["method=mine", LRS, "out=s"]
        request = read_request(overrides, [str(tmp_path / "conf")])
        store(request, Path("s"))
        again = read_request(["out=s", "resume=latest", "sweep.minutes=9"])
        assert again.plan.points() == request.plan.points()
        assert again.plan.options.minutes == 9
        option.write_text(text.replace("0.5", "0.6"))
        with pytest.raises(RefusedError, match=r"^out=s: "):
            read_request(["out=s", "resume=latest"])

    def test_asha_sweep_stops_worse_trials_and_continues_after_a_kill(
        self, ray_session: None
    ) -> None:
        import ray

        address = ray.get_runtime_context().gcs_address
        overrides = ("local.lr=0.3,0.000001", "sweep.search=grid", "out=s")
        cluster = ("runtime=cluster", f"runtime.address={address}")
        command = [sys.executable, "-c", KILL_AT_FIRST_END, "sweep", *STUDY, *ASHA, *cluster]
        ended = subprocess.run([*command, *overrides], stdout=subprocess.DEVNULL, check=False)
        assert ended.returncode == -signal.SIGKILL
        before = {path: path.read_bytes() for path in Path("s/trials").glob("*/trial.json")}
        statuses = {path: json.loads(content)["status"] for path, content in before.items()}
        (complete,) = [path for path, status in statuses.items() if status in ("done", "stopped")]
        assert cli.call(["sweep", "out=s", "resume=latest"]) == 0
        assert complete.read_bytes() == before[complete], "a trial that has ended does not change"
        for path, content in before.items():
            assert json.loads(path.read_text())["point"] == json.loads(content)["point"]
        rows = trials(Path("s"))
        assert [row["status"] for row in rows] == ["done", "stopped"], "worse than the earlier one"
        assert rows[0]["rounds"] == 4 and rows[1]["rounds"] < 4


def test_overrides_replace_values_of_a_stored_configuration() -> None:
    overrides = ["method=[fedprox]", "method.fedprox.mu=0.7", "rounds=3"]
    Path("c.yaml").write_text(json.dumps(to_dict(compose(overrides))))
    config = compose(["method.fedprox.mu=0.8"], (), "c.yaml")
    assert (config["rounds"], config["method"]["fedprox"]["mu"]) == (3, 0.8)
    assert compose([], (), "c.yaml")["method"]["fedprox"]["mu"] == 0.7
    assert list(compose(["method=[moon]"], (), "c.yaml")["method"]) == ["moon"]
    with pytest.raises(RefusedError, match=r"missing\.yaml"):
        compose([], (), "missing.yaml")
