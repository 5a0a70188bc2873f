"""Test what a study plans and refuses, how it makes and continues runs, and what it reports."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysim import cli
from raysim.commands.study import report as study_report
from raysim.commands.study.plan import StudyPlan, StudyRun, plan
from raysim.commands.study.report import RunScores, compare_settings
from raysim.commands.study.runner import RunEnd, check, make_runs, store
from raysim.commands.ui.database import RunDatabase
from raysim.experiment.execute import run as run_single
from raysim.experiment.settings import Interrupted
from raysim.results.mlflow_server import default_uri
from raysim.results.significance import Difference
from raysim.results.stored_runs import Run
from raysim.simulation.checkpoint import list_complete

COMMON = (
    "runtime=inprocess",
    "tracking=none",
    "data=synthetic",
    "partition=iid",
    "partition.clients=10",
    "schedule.cohort=3",
    "local.epochs=1",
)
QUICK = (*COMMON, "rounds=2", "checkpoint.every=1")
KILLED = Path(__file__).parents[1] / "killed.py"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def study(*overrides: str, status: int = 0) -> None:
    assert cli.call(["study", *overrides]) == status


def bits(folder: str | Path) -> tuple[str, str]:
    summary = json.loads(Path(folder, "summary.json").read_text())
    return summary["model_sha256"], summary["state_sha256"]


def names(planned: StudyPlan) -> list[str]:
    return [run.name for run in planned.runs]


# --- the plan -----------------------------------------------------------------------------------
class TestPlan:
    def test_study_plans_every_combination_of_values_for_one_seed_after_another(self) -> None:
        values = ["partition.alpha=0.1,0.5", "rounds=3", "out=s"]
        planned = plan(["method=fedavg,fedprox+mixup", "seed=0..1", *values])
        quoted = plan(["method=[],[fedprox,mixup]", "seed=range(2)", *values])
        assert planned.runs == quoted.runs
        assert names(planned) == [
            f"{method}_alpha-{alpha}_seed-{seed}"
            for seed in (0, 1)
            for method in ("fedavg", "fedprox+mixup")
            for alpha in ("0.1", "0.5")
        ]
        last = planned.runs[-1].config
        assert (last["seed"], last["rounds"], last["partition"]["alpha"]) == (1, 3, 0.5)
        assert last["choices"]["method"] == ["fedprox", "mixup"]
        assert last["out"] == "s/runs/fedprox+mixup_alpha-0.5_seed-1"

    def test_study_varies_a_setting_of_a_method_only_in_runs_with_that_method(self) -> None:
        methods = ["method=[],[fedprox]", "method.fedprox.mu=0.1,1"]
        planned = plan([*methods, "partition=iid,dirichlet", "partition.alpha=0.3"])
        assert names(planned) == [
            "fedavg_partition-iid_seed-0",
            "fedavg_partition-dirichlet_seed-0",
            "fedprox_mu-0.1_partition-iid_seed-0",
            "fedprox_mu-0.1_partition-dirichlet_seed-0",
            "fedprox_mu-1_partition-iid_seed-0",
            "fedprox_mu-1_partition-dirichlet_seed-0",
        ]
        weights = [run.config["method"].get("fedprox", {}).get("mu") for run in planned.runs[1::2]]
        assert weights == [None, 0.1, 1]

    def test_run_names_contain_the_full_key_if_its_last_part_is_ambiguous(self) -> None:
        methods = ["method=[fedprox,moon]", "method.fedprox.mu=0.1,1", "method.moon.mu=2,3"]
        first = names(plan([*methods, "local.lr=0.1,0.2"]))[0]
        assert first == "fedprox+moon_method.fedprox.mu-0.1_method.moon.mu-2_lr-0.1_seed-0"

    @pytest.mark.parametrize(
        ("overrides", "part"),
        [
            (["method=[],[fedporx]"], "did you mean fedprox"),
            (["method=[],[scaffold]", "method.fedprox.mu=0.1"], "method.fedprox.mu"),
            (["partition.alhpa=0.1,0.5"], "did you mean alpha"),
            (["seed=0,1,0"], "fedavg_seed-0"),
            (["seed=0,x"], "seed=x"),
            (["local.lr=0.1,-1"], "(run fedavg_lr--1_seed-0)"),
            (["method=[fedavgm],[fedavgm,fedadam]"], "fedavgm"),
            (["rounds=glob(*)"], "rounds=VALUE,VALUE"),
            (["seed=0-2"], "seed=0..2"),
            (["seed=3..0"], "seed=3..0"),
            (["hydra/launcher=ray", "seed=0..1"], "raysim study --parallel N"),
            (["out=a,b"], "out=a and out=b"),
            (["out=s", "resume=latest"], "study.yaml"),
            (["resume=latest", "seed=0,1"], "out=DIR"),
            (["out=s", "resume=s/runs/a/checkpoints/round-000001", "seed=0,1"], "resume=latest"),
            (["seed=0,1", "--metric", "best5"], "did you mean best5_mean"),
            (["--parallel", "0"], "--parallel 0"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_study_refuses_wrong_override_and_writes_nothing(
        self, overrides: list[str], part: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        needs_data = any(override.startswith("local") for override in overrides)
        study(*overrides, *(COMMON if needs_data else ()), status=2)
        error = capsys.readouterr().err
        assert error.startswith("raysim: ")
        assert error.count("\n") == 1
        assert part in error
        assert list(Path().iterdir()) == []


# --- the runs -----------------------------------------------------------------------------------
def test_continued_study_refuses_overrides_that_change_the_names_of_its_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    study("local.lr=0.1,0.2", *QUICK, "out=s")
    for override, part in (
        ("local.lr=0.1", "local.lr: .* with one value"),
        ("rounds=1,2", "rounds: .* with several values"),
    ):
        capsys.readouterr()
        study("out=s", "resume=latest", override, status=2)
        assert re.match(f"raysim: {part} for this key", capsys.readouterr().err)
    assert sorted(os.listdir("s/runs")) == ["fedavg_lr-0.1_seed-0", "fedavg_lr-0.2_seed-0"]


def test_study_trains_then_reports_then_accepts_more_seeds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    study("method=[],[fedprox]", "seed=0,1", "method.fedprox.mu=1", *QUICK, "out=s")
    printed = capsys.readouterr().out
    assert printed.startswith("4 runs (2 of method x 2 of seed) in s")
    assert "running: fedavg_seed-0\n" in printed
    outcome = r"accuracy 0\.\d+ after 2 rounds in .* \(.* with its start and end\)"
    assert re.search(f"run 4/4 fedprox_seed-1: {outcome}", printed)
    assert "n too small" in printed
    assert "last 10" in printed and "best 5" not in printed, "there were two rounds"
    assert "central accuracy" in printed
    assert "\nscores: accuracy on the clients' own tests (mean); central: on" in printed
    own_tests = "Scores: accuracy on the clients{}39; own tests"
    assert own_tests.format("&#") in Path("s/report.html").read_text()
    assert "Scores: accuracy on the clients' own tests" in Path("s/study.tex").read_text()

    values = ["method=[fedprox]", "method.fedprox.mu=1", "seed=1", "out=single"]
    run_single([*QUICK, *values], quiet=True)
    assert bits("s/runs/fedprox_seed-1") == bits("single")
    assert "rounds    2" in Path("s/logs/fedprox_seed-1.txt").read_text()

    before = Path("s/runs/fedavg_seed-0/summary.json").stat()
    study("out=s", "resume=latest", "seed=range(3)", "--metric", "accuracy_global")
    printed = capsys.readouterr().out
    assert "4 of 6 runs are finished" in printed
    assert "run 5/6 fedavg_seed-2" in printed
    assert Path("s/runs/fedavg_seed-0/summary.json").stat() == before
    files = {"report.html", "study.png", "study.csv", "differences.csv", "study.yaml"}
    assert files <= {*os.listdir("s")}

    content = json.loads(Path("s/study.json").read_text())
    (difference,) = content["differences"]
    compared = [difference[name] for name in ("compared", "reference", "pairs")]
    assert compared == ["fedprox", "fedavg", 3]
    summaries = [
        json.loads(path.read_text()) for path in Path("s/runs").glob("fedavg_*/summary.json")
    ]
    finals = [summary["accuracy_global"] for summary in summaries]
    mean = content["settings"][0]["accuracy_global"]["mean"]
    assert mean == pytest.approx(sum(finals) / 3)
    rows = list(csv.DictReader(Path("s/study.csv").read_text().splitlines()))
    assert [row["seed"] for row in rows] == ["0", "0", "1", "1", "2", "2"]

    study("out=s", "resume=latest", "seed=0..2")
    assert "all runs are finished already: nothing is trained\n" in capsys.readouterr().out
    study("out=s", "resume=latest", "partition.clients=10,20", status=2)
    assert "partition.clients: " in capsys.readouterr().err
    study("out=s", "resume=latest", "local.lr=0.5", status=2)
    assert "local.lr=0.5" in capsys.readouterr().err
    folders = map(str, sorted(Path("s/runs").iterdir()))
    assert cli.call(["report", *folders, "--out", "page"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^fedprox +3 ", printed, re.MULTILINE), "three seeds are a row"


@pytest.mark.slow
def test_mlflow_run_of_a_study_is_parent_of_its_runs() -> None:
    from mlflow.tracking import MlflowClient

    overrides = [override for override in QUICK if override != "tracking=none"]
    study("method=fedavg,fedprox", "seed=0", *overrides, "out=s")
    database = RunDatabase(Path("s"))
    assert database.update() == 3
    client = MlflowClient(tracking_uri=default_uri(Path("s")))
    experiment_id = client.get_experiment_by_name("raysim").experiment_id
    runs = client.search_runs([experiment_id])
    (parent,) = [run for run in runs if run.data.tags["kind"] == "study"]
    parent_id = parent.info.run_id
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent_id]
    assert (len(runs), parent.info.status, parent.data.tags["study"]) == (3, "FINISHED", "s")
    tags = {tuple(run.data.tags[name] for name in ("study", "method", "seed")) for run in children}
    assert tags == {("s", "fedavg", "0"), ("s", "fedprox", "0")}
    finals = {run.data.tags["method"]: run.data.metrics["accuracy"] for run in children}
    means = {name: float(parent.data.tags[f"final.{name}"]) for name in finals}
    assert means == pytest.approx(finals, rel=1e-5)
    files = {item.path for item in client.list_artifacts(parent_id)}
    assert {"report.html", "study.csv", "study.json", "study.tex", "study.yaml"} <= files

    study("out=s", "resume=latest", "seed=0..1")  # continues the same parent
    assert database.update() == 3
    runs = client.search_runs([experiment_id])
    assert [run.info.run_id for run in runs if run.data.tags["kind"] == "study"] == [parent_id]
    assert sum(run.data.tags.get("mlflow.parentRunId") == parent_id for run in runs) == 4


def test_failed_run_does_not_affect_other_runs(capsys: pytest.CaptureFixture[str]) -> None:
    study("local.lr=1e30,0.05", "local.batch=4", *QUICK, "out=s", status=1)
    printed = capsys.readouterr()
    assert "run 2/2 fedavg_lr-0.05_seed-0: accuracy" in printed.out
    assert "0 of 1" in printed.out
    (line,) = printed.err.splitlines()
    failed = "fedavg_lr-1e+30_seed-0"
    assert line.startswith(f"raysim: run {failed} failed: ")
    assert "not finite" in line
    assert "not finite" in Path(f"s/logs/{failed}.txt").read_text()
    assert list(json.loads(Path("s/study.json").read_text())["failed"]) == [failed]
    assert Path(f"s/runs/{failed}").is_dir()


@pytest.mark.slow
def test_killed_study_resumes_to_the_same_bits_as_an_uninterrupted_run() -> None:
    overrides = (*COMMON, "rounds=6", "checkpoint.every=2")
    words = ["scaffold", "study", "method=[],[scaffold]", *overrides, "out=s"]
    command = [sys.executable, str(KILLED), *words]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list_complete(Path("s/runs/scaffold_seed-0/checkpoints"))
    assert not Path("s/runs/scaffold_seed-0/summary.json").exists()

    planned = check(plan(["out=s", "resume=latest"]))
    assert [run.is_finished for run in planned.runs] == [True, False]
    lines: list[str] = []
    assert make_runs(planned, say=lines.append) == {}
    assert lines[0] == "1 of 2 runs are finished"
    assert "continuing from" in Path("s/logs/scaffold_seed-0.txt").read_text()
    run_single([*overrides, "method=[scaffold]", "out=straight"], quiet=True)
    assert bits("s/runs/scaffold_seed-0") == bits("straight")


def test_study_prints_warnings_before_the_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [override for override in QUICK if override != "rounds=2"]
    study("method=fedavg,fedbn", "seed=0..1", "model=mlp", "rounds=1", *overrides, "out=s")
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("4 runs")
    assert second.startswith("method 'fedbn' finds no BatchNorm")
    assert second.endswith("(fedbn_seed-0 and 1 more)")
    assert third.endswith("running: fedavg_seed-0")
    assert "finds no BatchNorm" in Path("s/report.html").read_text()
    assert cli.call(["run", *QUICK, "out=s"]) == 2
    error = capsys.readouterr().err
    assert "out=s: " in error and "raysim study out=s resume=latest" in error


def test_study_warning_lists_affected_runs_unless_all_runs_are_affected() -> None:
    def warnings(*texts: str) -> Sequence[str]:
        runs = []
        for number, text in enumerate(texts):
            runs.append(StudyRun(f"run-{number}", {}, number, {}, warnings=tuple(text)))
        return StudyPlan(Path("s"), (), {}, tuple(runs)).warnings

    assert warnings("a", "a", "a") == ["a"] == warnings("a")
    assert warnings("ab", "a", "") == ["a (run-0 and 1 more)", "b (run-0)"]
    assert warnings("", "") == []


@pytest.mark.parametrize(
    ("parallel", "left"), [(1, ["1 min 30 s", "4 s", "2 s"]), (2, ["45 s", "2 s", "1 s"])]
)
def test_estimate_of_remaining_study_time_ignores_the_first_run(
    parallel: int, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([30.0, 2.0, 2.0, 4.0])

    def make(
        _: object, runs: Sequence[StudyRun], allow: object, begin: Any, *__: object
    ) -> Iterator[RunEnd]:
        for run in runs:
            begin(run)
            yield RunEnd(run, "", next(seconds))

    for name in ("_run_one_by_one", "_run_in_parallel"):
        monkeypatch.setattr(f"raysim.commands.study.runner.{name}", make)
    monkeypatch.setattr("raysim.commands.study.runner._outcome", lambda folder, seconds: "done")
    lines: list[str] = []
    make_runs(plan(["seed=range(4)", "out=s"]), parallel=parallel, say=lines.append)
    assert [line.partition("done")[2] for line in lines] == [
        f" · at most {left[0]} left",
        f" · {left[1]} left",
        f" · {left[2]} left",
        "",
    ]


def test_runs_of_a_study_use_the_same_ray_session_until_a_run_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysim.runtime import ray
    from raysim.runtime.ray import cluster

    steps: list[str] = []

    def connect(options: object) -> bool:
        starts = steps.count("start") == steps.count("end")
        if starts:
            steps.append("start")
        return starts

    def attempt(config: dict[str, Any], log: Path, allow: object, on_round: Any) -> str:
        steps.append(f"run {config['seed']}")
        on_round({"round": 3})
        return "it failed" if config["seed"] == 1 else ""

    seconds: list[float] = []

    def outcome(folder: Path, run_seconds: float) -> str:
        seconds.append(run_seconds)
        return "accuracy 1"

    monkeypatch.setattr(cluster, "connect", connect)
    monkeypatch.setattr(ray, "cluster_address", str)
    monkeypatch.setattr(cluster, "disconnect", lambda: steps.append("end"))
    monkeypatch.setattr("raysim.commands.study.runner.attempt", attempt)
    monkeypatch.setattr("raysim.commands.study.runner._outcome", outcome)
    shown: list[str] = []
    planned = plan(["seed=range(4)", "rounds=9", "out=s"])
    failures = make_runs(planned, show=lambda text, progress="": shown.append(text + progress))
    assert failures == {"fedavg_seed-1": "it failed"}
    assert steps == ["start", "run 0", "run 1", "end", "start", "run 2", "run 3", "end"]
    texts = [f"running: fedavg_seed-{seed}" for seed in range(4)]
    assert shown == [text + end for text in texts for end in ("", " · round 3/9")]
    assert len(seconds) == 3 and min(seconds) >= 0


# By method: what its server does at the end of the first round.
ABSORB = {"dying": "os.kill(os.getpid(), 9)", "waiting": "time.sleep(600)"}
OWN_METHOD = """
import os
import time
from raysim.api.method import Method

class Own(Method):
    name = "{name}"
    def absorb(self, aggregation, server):
        {absorb}
"""


@pytest.mark.slow
def test_parallel_study_survives_a_crash_and_ends_its_processes_if_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("own/method").mkdir(parents=True)
    for name, absorb in ABSORB.items():
        Path(f"{name}.py").write_text(OWN_METHOD.format(name=name, absorb=absorb))
        Path(f"own/method/{name}.yaml").write_text(f"{name}: {{_target_: {name}.Own}}\n")
    monkeypatch.syspath_prepend(".")
    # The last run starts in place of the one that crashes, while the first run waits.
    overrides = ["method=[waiting],[dying],[]", *QUICK, "out=s"]
    planned = check(plan(overrides, ["own"]), [*ABSORB], parallel=2)
    store(planned)
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="raysim study out=s resume=latest"):
        make_runs(planned, parallel=2, allow=[*ABSORB], say=interrupt)
    crash, end = lines
    killed = "run 1/3 dying_seed-0: the process of this run was killed by signal 9"
    assert crash.startswith(killed)
    assert "run 2/3 fedavg_seed-0: accuracy" in end
    finished = [path.parent.name for path in Path("s/runs").glob("*/summary.json")]
    assert finished == ["fedavg_seed-0"]
    run_single([*QUICK, "out=single"], quiet=True)
    assert bits("s/runs/fedavg_seed-0") == bits("single")


# --- the report ---------------------------------------------------------------------------------
def example_study() -> StudyPlan:
    values = {
        "method": ("fedavg", "fedprox", "scaffold"),
        "partition.alpha": ("0.1", "0.5"),
        "seed": ("0", "1", "2"),
    }
    runs = []
    for method, alpha, seed in itertools.product(*values.values()):
        name = f"{method}_alpha-{alpha}_seed-{seed}"
        runs.append(StudyRun(name, {"method": method, "partition.alpha": alpha}, int(seed), {}))
    return StudyPlan(Path("s"), (), values, tuple(runs))


def example_scores(planned: StudyPlan, missing: Sequence[str] = ()) -> list[RunScores]:
    """Return artificial scores of the runs of a study.

    With the seeds 0, 1 and 2, fedprox scores 0.01, 0.02 and 0.03 more than fedavg. scaffold scores
    the same as fedavg.
    missing: the names of runs without a score.
    """
    scores = []
    for run in planned.runs:
        gain = 0.01 * (run.seed + 1) if run.settings["method"] == "fedprox" else 0.0
        value = None if run.name in missing else 0.5 + 0.1 * run.seed + gain
        scores.append(RunScores(run, None, {"final": value}))
    return scores


class TestComparisons:
    def test_study_compares_methods_within_each_partition(self) -> None:
        planned = example_study()
        comparisons = compare_settings(planned, example_scores(planned), "final")
        assert [(one.where, one.what, one.reference) for one in comparisons] == [
            (f"alpha={alpha}", method, "fedavg")
            for alpha in ("0.1", "0.5")
            for method in ("fedprox", "scaffold")
        ]
        test = comparisons[0].test
        assert test.mean == pytest.approx(0.02)
        assert test.p == pytest.approx(0.0741799, rel=1e-5)
        assert test.holm == pytest.approx(2 * 0.0741799, rel=1e-5), "two could be tested"
        assert comparisons[1].test.note == "equal in every pair"

    def test_comparison_uses_only_seeds_that_both_settings_have(self) -> None:
        planned = example_study()
        missing = [
            "fedavg_alpha-0.1_seed-1",
            "scaffold_alpha-0.1_seed-0",
            "scaffold_alpha-0.1_seed-2",
        ]
        comparisons = compare_settings(planned, example_scores(planned, missing), "final")
        assert [one.seeds for one in comparisons] == [(0, 2), (), (0, 1, 2), (0, 1, 2)]
        note = "n too small: a test needs 3 seeds"
        assert comparisons[1].test == Difference(0, None, note=note)

    def test_study_without_methods_compares_values_of_its_first_key(self) -> None:
        planned = plan(["local.lr=0.1,0.2", "partition.alpha=0.1,0.5", "out=s"])
        assert study_report.compared_keys(planned) == ["local.lr"]
        scores = [RunScores(run, None, {"final": 0.5}) for run in planned.runs]
        comparisons = compare_settings(planned, scores, "final")
        assert [(one.where, one.what, one.reference) for one in comparisons] == [
            ("alpha=0.1", "lr=0.2", "lr=0.1"),
            ("alpha=0.5", "lr=0.2", "lr=0.1"),
        ]

    def test_label_of_a_setting_has_method_and_varied_values(self) -> None:
        planned = plan(["method=[],[fedprox]", "method.fedprox.mu=0.1,1", "out=s"])
        keys = study_report.compared_keys(planned)
        labels = [study_report.label(planned, run, keys) for run in planned.runs]
        assert labels == ["fedavg", "fedprox, mu=0.1", "fedprox, mu=1"]

    @pytest.mark.parametrize(
        "missing", [[], ["fedavg_alpha-0.1_seed-1"]], ids=["complete", "with a run missing"]
    )
    def test_study_picture_is_drawn_with_or_without_a_statistical_test(
        self, missing: list[str]
    ) -> None:
        planned = example_study()
        tested = compare_settings(planned, example_scores(planned, missing), "final")
        untested = [replace(one, differences=(), test=Difference(0, None)) for one in tested]
        for comparisons in (tested, untested):
            assert study_report.draw(comparisons).startswith(b"\x89PNG")
            assert len(study_report.differences_table(comparisons)[0].texts) == 4

    def test_study_picture_explains_intervals_only_if_it_draws_some(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from matplotlib.axes import Axes

        labels: list[str] = []
        intervals: list[object] = []
        plot = Axes.plot

        def record_plot(self: Axes, *values: Any, **options: Any) -> Any:
            if "solid_capstyle" in options:
                intervals.append(values[0])
            return plot(self, *values, **options)

        def record_label(self: Axes, text: str) -> None:
            if text:
                labels.append(text)

        monkeypatch.setattr(Axes, "set_xlabel", record_label)
        monkeypatch.setattr(Axes, "plot", record_plot)
        planned = example_study()
        for missing in ([], ["fedavg_alpha-0.1_seed-1", "fedavg_alpha-0.5_seed-1"]):
            scores = example_scores(planned, missing)
            study_report.draw(compare_settings(planned, scores, "final"))
            assert len(intervals) == 2, "fedprox with two alphas, of all seeds"
        assert "95 % interval" in labels[0]
        assert "no interval: that needs 3 seeds" in labels[1] and "95 %" not in labels[1]


class TestTable:
    def test_table_marks_best_mean_only_if_it_leads_by_a_standard_deviation(self) -> None:
        planned = example_study()
        means = {"fedavg": 0.5, "fedprox": 0.9, "scaffold": 0.52}
        scores = []
        close = []
        for run in planned.runs:
            final = means[run.settings["method"]] + 0.01 * run.seed
            scores.append(RunScores(run, None, {"final": final, "rounds_to.0.80": 3.0}))
            close.append(RunScores(run, None, {"final": 0.5 + 0.1 * run.seed}))
        *_, final_column, rounds_column = study_report.settings_table(planned, scores)
        assert final_column.best() == {2, 3}, "fedprox, with either alpha"
        assert rounds_column.best() == set()
        assert study_report.settings_table(planned, close)[-1].best() == set()

    def test_table_marks_the_lowest_error_but_never_a_wall_time_as_best(self) -> None:
        planned = example_study()
        rows: list[dict[str, int | float | None]] = [
            {"round": 1, "mae": 1.0, "mae_worst": 1.0, "mae_global": None}
        ]
        amount = {"fedavg": 3.0, "fedprox": 1.0, "scaffold": 2.0}
        scores = []
        for run in planned.runs:
            metrics = ("final", "virtual_seconds", "wall_seconds")
            values = dict.fromkeys(metrics, amount[run.settings["method"]])
            scores.append(RunScores(run, Run("x", {}, rows, {}), values))
        *_, final, virtual, wall = study_report.settings_table(planned, scores)
        assert (final.best(), virtual.best(), wall.best()) == ({2, 3}, {2, 3}, set())

    def test_deviation_has_as_many_decimals_as_its_mean(self) -> None:
        planned = example_study()
        scores = []
        for run in planned.runs:
            values = {"wall_seconds": 123.4 + 0.001 * run.seed, "final": 0.5}
            scores.append(RunScores(run, None, values))
        *_, seconds, final = study_report.settings_table(planned, scores)
        assert seconds.texts[0] == "123.4 ± 0.0" and final.texts[0] == "0.5000 ± 0.0000"
