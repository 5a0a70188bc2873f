"""A study of many runs: what it plans and refuses, how it is continued, and what it says of its runs."""

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
from raysim.commands.study import report as campaign_report
from raysim.commands.study.plan import Campaign, Cell, plan
from raysim.commands.study.runner import carry_out, check, store
from raysim.experiment.execute import run as run_alone
from raysim.experiment.settings import Interrupted
from raysim.results.report import Run
from raysim.results.significance import Difference
from raysim.results.tracking import Tracker, default_uri
from raysim.simulation.checkpoint import list_complete

COMMON = (
    *(
        "runtime=inprocess",
        "tracking=none",
        "data=synthetic",
        "partition=iid",
        "partition.clients=10",
    ),
    *("schedule.cohort=3", "local.epochs=1"),
)
QUICK = (*COMMON, "rounds=2", "checkpoint.every=1")
KILLED = Path(__file__).parents[1] / "killed.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def study(*words: str, status: int = 0) -> None:
    assert cli.call(["study", *words]) == status


def bits(folder: str | Path) -> tuple[str, str]:
    content = json.loads(Path(folder, "summary.json").read_text())
    return content["model_sha256"], content["state_sha256"]


def names(campaign: Campaign) -> list[str]:
    return [cell.name for cell in campaign.cells]


# --- the plan -----------------------------------------------------------------------------------------------------
def test_commas_outside_brackets_separate_values_and_the_first_seed_comes_first() -> None:
    planned = plan(
        ["method=fedavg,fedprox+mixup", "seed=0..1", "partition.alpha=0.1,0.5", "rounds=3", "out=s"]
    )
    quoted = plan(
        [
            "method=[],[fedprox,mixup]",
            "seed=range(2)",
            "partition.alpha=0.1,0.5",
            "rounds=3",
            "out=s",
        ]
    )
    assert planned.cells == quoted.cells
    assert names(planned) == [
        f"{method}_alpha-{alpha}_seed-{seed}"
        for seed in (0, 1)
        for method in ("fedavg", "fedprox+mixup")
        for alpha in ("0.1", "0.5")
    ]
    last = planned.cells[-1].config
    assert (last["seed"], last["rounds"], last["partition"]["alpha"]) == (1, 3, 0.5)
    assert (last["choices"]["method"], last["out"]) == (
        ["fedprox", "mixup"],
        "s/runs/fedprox+mixup_alpha-0.5_seed-1",
    )


def test_a_key_that_only_some_runs_have_is_for_these_alone() -> None:
    planned = plan(
        [
            "method=[],[fedprox]",
            "method.fedprox.mu=0.1,1",
            "partition=iid,dirichlet",
            "partition.alpha=0.3",
        ]
    )
    assert names(planned) == [
        "fedavg_partition-iid_seed-0",
        "fedavg_partition-dirichlet_seed-0",
        "fedprox_mu-0.1_partition-iid_seed-0",
        "fedprox_mu-0.1_partition-dirichlet_seed-0",
        "fedprox_mu-1_partition-iid_seed-0",
        "fedprox_mu-1_partition-dirichlet_seed-0",
    ]
    assert [cell.config["method"].get("fedprox", {}).get("mu") for cell in planned.cells[1::2]] == [
        None,
        0.1,
        1,
    ]


def test_a_run_is_named_by_whole_keys_where_their_last_parts_are_alike() -> None:
    planned = plan(
        [
            "method=[fedprox,moon]",
            "method.fedprox.mu=0.1,1",
            "method.moon.mu=2,3",
            "local.lr=0.1,0.2",
        ]
    )
    assert names(planned)[0] == "fedprox+moon_method.fedprox.mu-0.1_method.moon.mu-2_lr-0.1_seed-0"


def test_the_database_lies_beside_the_runs() -> None:
    (cell,) = plan(["out=s", "rounds=1"]).cells
    assert cell.config["tracking"]["uri"] == f"sqlite:///{Path('s').resolve() / 'mlflow.db'}"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["method=[],[fedporx]"], "did you mean fedprox"),
        (["method=[],[scaffold]", "method.fedprox.mu=0.1"], "method.fedprox.mu has no effect"),
        (["partition.alhpa=0.1,0.5"], "did you mean alpha"),
        (["seed=0,1,0"], "fedavg_seed-0"),
        (["seed=0,x"], "seed=x"),
        (["local.lr=0.1,-1"], "(run fedavg_lr--1_seed-0)"),
        (["method=[fedavgm],[fedavgm,fedadam]"], "fedavgm"),
        (["rounds=glob(*)"], "rounds=VALUE,VALUE or rounds=0..4"),
        (["seed=0-2"], "write seed=0..2 for all"),
        (["seed=3..0"], "write the lower end first"),
        (["hydra/launcher=ray", "seed=0..1"], "raysim study --parallel N"),
        (["out=a,b"], "two folders"),
        (["out=s", "resume=latest"], "study.yaml"),
        (["resume=latest", "seed=0,1"], "out=DIR"),
        (["out=s", "resume=s/runs/a/checkpoints/round-000001", "seed=0,1"], "resume=latest"),
        (["seed=0,1", "--metric", "best5"], "did you mean best5_mean"),
        (["--parallel", "0"], "--parallel 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_value_is_refused_before_anything_starts(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = COMMON if any(word.startswith("local") for word in words) else ()
    study(*words, *data, status=2)
    printed = capsys.readouterr()
    assert printed.err.startswith("raysim: ")
    assert printed.err.count("\n") == 1
    assert part in printed.err
    assert list(Path().iterdir()) == []


# --- the runs -----------------------------------------------------------------------------------------------------
def test_a_study_runs_reports_and_takes_more_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    study("method=[],[fedprox]", "seed=0,1", "method.fedprox.mu=1", *QUICK, "out=s")
    printed = capsys.readouterr().out
    assert printed.startswith("4 runs (2 of method x 2 of seed) in s")
    assert "under way: fedavg_seed-0\n" in printed
    assert re.search(
        r"run 4/4 fedprox_seed-1: accuracy 0\.\d+ after 2 rounds in .* \(.* with its start and end\)",
        printed,
    )
    assert "n too small" in printed
    assert "last 10" in printed and "best 5" not in printed, "there were two"
    assert (
        "central accuracy" in printed
        and "\nscores: accuracy on the clients' own tests (mean); central: on" in printed
    )
    assert "Scores: accuracy on the clients&#39; own tests" in Path("s/report.html").read_text()
    assert "Scores: accuracy on the clients' own tests" in Path("s/study.tex").read_text()

    run_alone(
        [*QUICK, "method=[fedprox]", "method.fedprox.mu=1", "seed=1", "out=alone"], quiet=True
    )
    assert bits("s/runs/fedprox_seed-1") == bits("alone")
    assert "rounds    2" in Path("s/logs/fedprox_seed-1.txt").read_text()

    before = Path("s/runs/fedavg_seed-0/summary.json").stat()
    study("out=s", "resume=latest", "seed=range(3)", "--metric", "accuracy_global")
    printed = capsys.readouterr().out
    assert "4 of 6 runs are finished" in printed
    assert "run 5/6 fedavg_seed-2" in printed
    assert Path("s/runs/fedavg_seed-0/summary.json").stat() == before
    assert {"report.html", "study.png", "study.csv", "differences.csv", "study.yaml"} <= {
        *os.listdir("s")
    }

    content = json.loads(Path("s/study.json").read_text())
    (difference,) = content["differences"]
    assert (difference["compared"], difference["reference"], difference["pairs"]) == (
        "fedprox",
        "fedavg",
        3,
    )
    finals = [
        json.loads(path.read_text())["accuracy_global"]
        for path in Path("s/runs").glob("fedavg_*/summary.json")
    ]
    assert content["settings"][0]["accuracy_global"]["mean"] == pytest.approx(sum(finals) / 3)
    rows = list(csv.DictReader(Path("s/study.csv").read_text().splitlines()))
    assert [row["seed"] for row in rows] == ["0", "0", "1", "1", "2", "2"]

    study("out=s", "resume=latest", "seed=0..2")
    assert "all runs are finished already: nothing is trained\n" in capsys.readouterr().out
    study("out=s", "resume=latest", "partition.clients=10,20", status=2)
    assert "several values of partition.clients" in capsys.readouterr().err
    study("out=s", "resume=latest", "local.lr=0.5", status=2)
    assert "local.lr=0.5 differs" in capsys.readouterr().err
    assert cli.call(["report", *map(str, sorted(Path("s/runs").iterdir())), "--out", "page"]) == 0
    assert re.search(r"^fedprox +3 ", capsys.readouterr().out, re.MULTILINE), (
        "three seeds are a row"
    )


@pytest.mark.slow
@pytest.mark.pictures
def test_a_study_is_one_tracked_run_with_its_runs_below_and_report_and_tables_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setitem(Tracker.__init__.__kwdefaults__, "patience", 600.0)
    words = [word for word in QUICK if word != "tracking=none"]
    study("method=fedavg,fedprox", "seed=0", *words, "out=s")
    client = MlflowClient(tracking_uri=default_uri(Path("s")))
    runs = client.search_runs([client.get_experiment_by_name("raysim").experiment_id])
    (parent,) = [run for run in runs if run.data.tags["kind"] == "study"]
    children = [
        run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
    ]
    assert (len(runs), parent.info.status, parent.data.tags["study"]) == (3, "FINISHED", "s")
    told = {
        (run.data.tags["study"], run.data.tags["method"], run.data.tags["seed"]) for run in children
    }
    assert told == {("s", "fedavg", "0"), ("s", "fedprox", "0")}
    finals = {run.data.tags["method"]: run.data.metrics["accuracy"] for run in children}
    assert {name: parent.data.metrics[f"summary/final.{name}"] for name in finals} == finals
    files = {item.path for item in client.list_artifacts(parent.info.run_id)}
    assert {"report.html", "study.csv", "study.json", "study.tex", "study.yaml"} <= files

    study("out=s", "resume=latest", "seed=0..1")  # the same parent
    runs = client.search_runs([client.get_experiment_by_name("raysim").experiment_id])
    assert [run.info.run_id for run in runs if run.data.tags["kind"] == "study"] == [
        parent.info.run_id
    ]
    assert sum(run.data.tags.get("mlflow.parentRunId") == parent.info.run_id for run in runs) == 4


def test_a_failed_run_leaves_the_others_alone_and_is_named_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    study("local.lr=1e30,0.05", "local.batch=4", *QUICK, "out=s", status=1)
    printed = capsys.readouterr()
    assert "run 2/2 fedavg_lr-0.05_seed-0: accuracy" in printed.out
    assert "0 of 1" in printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("raysim: run fedavg_lr-1e+30_seed-0 failed: ")
    assert "not finite" in line
    assert "Traceback" in Path("s/logs/fedavg_lr-1e+30_seed-0.txt").read_text()
    assert list(json.loads(Path("s/study.json").read_text())["failed"]) == [
        "fedavg_lr-1e+30_seed-0"
    ]
    assert (Path("s/runs/fedavg_lr-1e+30_seed-0")).is_dir()


@pytest.mark.slow
def test_a_killed_study_goes_on_at_the_run_it_lost_to_the_same_bits() -> None:
    words = (*COMMON, "rounds=6", "checkpoint.every=2")
    command = [
        sys.executable,
        str(KILLED),
        "scaffold",
        "study",
        "method=[],[scaffold]",
        *words,
        "out=s",
    ]
    assert (
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        == -signal.SIGKILL
    )
    assert list_complete(Path("s/runs/scaffold_seed-0/checkpoints"))
    assert not Path("s/runs/scaffold_seed-0/summary.json").exists()

    campaign = check(plan(["out=s", "resume=latest"]))
    assert [cell.finished for cell in campaign.cells] == [True, False]
    said: list[str] = []
    assert carry_out(campaign, say=said.append) == {}
    assert said[0] == "1 of 2 runs are finished"
    assert "continuing from" in Path("s/logs/scaffold_seed-0.txt").read_text()
    run_alone([*words, "method=[scaffold]", "out=straight"], quiet=True)
    assert bits("s/runs/scaffold_seed-0") == bits("straight")


def test_what_a_run_is_warned_of_is_said_before_any_is_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for word in QUICK if word not in ("schedule.cohort=3", "rounds=2")]
    study(
        "method=fedavg,fedbn",
        "seed=0..1",
        "model=mlp",
        "schedule.cohort=3",
        "rounds=1",
        *words,
        "out=s",
    )
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("4 runs")
    assert second.startswith("method 'fedbn' finds no BatchNorm")
    assert second.endswith("(fedbn_seed-0 and 1 more)")
    assert third.endswith("under way: fedavg_seed-0")
    assert "finds no BatchNorm" in Path("s/report.html").read_text()
    assert cli.call(["run", *QUICK, "out=s"]) == 2
    assert (
        "out=s holds a study: choose another folder; raysim study out=s resume=latest goes on"
        in (capsys.readouterr().err)
    )


def test_a_warning_says_whose_it_is_unless_it_is_everyones() -> None:
    def warned(*texts: str) -> Sequence[str]:
        cells = [
            Cell(f"run-{number}", {}, number, {}, warnings=tuple(each))
            for number, each in enumerate(texts)
        ]
        return Campaign(Path("s"), (), {}, tuple(cells)).warnings

    assert warned("a", "a", "a") == ["a"] == warned("a")
    assert warned("ab", "a", "") == ["a (run-0 and 1 more)", "b (run-0)"]
    assert warned("", "") == []


@pytest.mark.parametrize(
    ("parallel", "left"), [(1, ["1 min 30 s", "4 s", "2 s"]), (2, ["45 s", "2 s", "1 s"])]
)
def test_the_time_that_is_left_forgets_the_first_run_which_starts_ray(
    parallel: int, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([30.0, 2.0, 2.0, 4.0])

    def runs(
        _: object, todo: Sequence[Cell], allow: object, begin: Any, *__: object
    ) -> Iterator[tuple[Any, ...]]:
        for cell in todo:
            begin(cell)
            yield cell, "", next(seconds)

    for name in ("_one_by_one", "_side_by_side"):
        monkeypatch.setattr(
            f"raysim.commands.study.runner.{name}", lambda *args: (each for each in runs(*args))
        )
    monkeypatch.setattr("raysim.commands.study.runner._outcome", lambda folder, seconds: "done")
    said: list[str] = []
    carry_out(plan(["seed=range(4)", "out=s"]), parallel=parallel, say=said.append)
    assert [line.partition("done")[2] for line in said] == [
        f" · at most {left[0]} left",
        f" · {left[1]} left",
        f" · {left[2]} left",
        "",
    ]


def test_all_runs_share_one_ray_which_a_failed_run_takes_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysim.runtime import ray
    from raysim.runtime.ray import cluster

    did: list[str] = []

    def connect(options: object) -> bool:
        started = did.count("start") == did.count("end")
        did.extend(["start"] * started)
        return started

    def attempt(config: dict[str, Any], log: Path, allow: object, on_round: Any) -> str:
        did.append(f"run {config['seed']}")
        on_round({"round": 3})
        return "it failed" if config["seed"] == 1 else ""

    monkeypatch.setattr(cluster, "connect", connect)
    monkeypatch.setattr(ray, "cluster_address", str)
    monkeypatch.setattr(cluster, "disconnect", lambda: did.append("end"))
    monkeypatch.setattr("raysim.commands.study.runner.attempt", attempt)
    took: list[float] = []
    outcome = "raysim.commands.study.runner._outcome"
    monkeypatch.setattr(outcome, lambda folder, seconds: took.append(seconds) or "accuracy 1")
    shown: list[str] = []
    campaign = plan(["seed=range(4)", "rounds=9", "out=s"])
    failed = carry_out(campaign, show=lambda text, far="": shown.append(text + far))
    assert failed == {"fedavg_seed-1": "it failed"}
    assert did == ["start", "run 0", "run 1", "end", "start", "run 2", "run 3", "end"]
    assert shown == [
        f"under way: fedavg_seed-{seed}{far}" for seed in range(4) for far in ("", " · round 3/9")
    ]
    assert len(took) == 3 and min(took) >= 0


DYING = """
import os
from raysim.api.method import Method

class Dying(Method):
    name = "dying"
    def absorb(self, aggregation, server):
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_runs_side_by_side_are_processes_of_which_one_may_die(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("dying.py").write_text(DYING)
    Path("own/method").mkdir(parents=True)
    Path("own/method/dying.yaml").write_text("dying:\n  _target_: dying.Dying\n")
    monkeypatch.syspath_prepend(".")
    campaign = check(plan(["method=[],[dying]", *QUICK, "out=s"], ["own"]), ["dying"], parallel=2)
    store(campaign)
    failed = carry_out(campaign, parallel=2, allow=["dying"])
    assert list(failed) == ["dying_seed-0"]
    assert failed["dying_seed-0"].startswith("its process was killed by signal 9")
    run_alone([*QUICK, "out=alone"], quiet=True)
    assert bits("s/runs/fedavg_seed-0") == bits("alone")


@pytest.mark.slow
def test_an_interrupted_study_ends_its_processes_and_says_how_to_go_on() -> None:
    campaign = check(plan([*COMMON, "rounds=1,20000", "out=s"]), parallel=2)
    store(campaign)

    def interrupt(text: str) -> None:
        assert "run 1/2 fedavg_rounds-1_seed-0: accuracy" in text
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="raysim study out=s resume=latest goes on"):
        carry_out(campaign, parallel=2, say=interrupt)
    assert [path.parent.name for path in Path("s/runs").glob("*/summary.json")] == [
        "fedavg_rounds-1_seed-0"
    ]


# --- what is said -------------------------------------------------------------------------------------------------
def planned() -> Campaign:
    values = {
        "method": ("fedavg", "fedprox", "scaffold"),
        "partition.alpha": ("0.1", "0.5"),
        "seed": ("0", "1", "2"),
    }
    cells = [
        Cell(
            f"{method}_alpha-{alpha}_seed-{seed}",
            {"method": method, "partition.alpha": alpha},
            int(seed),
            {},
        )
        for method, alpha, seed in itertools.product(*values.values())
    ]
    return Campaign(Path("s"), (), values, tuple(cells))


def scores(campaign: Campaign, missing: Sequence[str] = ()) -> list[campaign_report.Scores]:
    """Of made-up runs: fedprox is 0.01, 0.02, 0.03 above fedavg, scaffold is equal to it."""
    found = []
    for cell in campaign.cells:
        more = 0.01 * (cell.seed + 1) if cell.settings["method"] == "fedprox" else 0.0
        value = None if cell.name in missing else 0.5 + 0.1 * cell.seed + more
        found.append(campaign_report.Scores(cell, None, {"final": value}))
    return found


def test_every_method_is_compared_to_the_first_in_each_partition() -> None:
    found = campaign_report.differences(campaign := planned(), scores(campaign), "final")
    assert [(one.where, one.what, one.reference) for one in found] == [
        (f"alpha={alpha}", method, "fedavg")
        for alpha in ("0.1", "0.5")
        for method in ("fedprox", "scaffold")
    ]
    assert found[0].found.mean == pytest.approx(0.02)
    assert found[0].found.p == pytest.approx(0.0741799, rel=1e-5)
    assert found[0].found.holm == pytest.approx(
        2 * 0.0741799, rel=1e-5
    )  # of two that could be tested
    assert found[1].found.note == "equal in every pair"


def test_only_seeds_that_both_have_are_paired() -> None:
    campaign = planned()
    lost = scores(
        campaign,
        ["fedavg_alpha-0.1_seed-1", "scaffold_alpha-0.1_seed-0", "scaffold_alpha-0.1_seed-2"],
    )
    found = campaign_report.differences(campaign, lost, "final")
    assert [one.seeds for one in found] == [(0, 2), (), (0, 1, 2), (0, 1, 2)]
    assert found[1].found == Difference(0, None, note="n too small: a test needs 3 seeds")


def test_without_methods_the_first_key_that_varies_is_compared() -> None:
    campaign = plan(["local.lr=0.1,0.2", "partition.alpha=0.1,0.5", "out=s"])
    assert campaign_report.compared(campaign) == ["local.lr"]
    values = [campaign_report.Scores(cell, None, {"final": 0.5}) for cell in campaign.cells]
    assert [
        (one.where, one.what, one.reference)
        for one in campaign_report.differences(campaign, values, "final")
    ] == [
        ("alpha=0.1", "lr=0.2", "lr=0.1"),
        ("alpha=0.5", "lr=0.2", "lr=0.1"),
    ]


def test_a_method_is_called_by_the_values_of_it_that_vary() -> None:
    campaign = plan(["method=[],[fedprox]", "method.fedprox.mu=0.1,1", "out=s"])
    assert [
        campaign_report.label(campaign, cell, campaign_report.compared(campaign))
        for cell in campaign.cells
    ] == [
        "fedavg",
        "fedprox, mu=0.1",
        "fedprox, mu=1",
    ]


@pytest.mark.parametrize(
    "missing", [[], ["fedavg_alpha-0.1_seed-1"]], ids=["complete", "with a run missing"]
)
def test_differences_are_drawn_and_tabled_whatever_was_tested(missing: list[str]) -> None:
    found = campaign_report.differences(campaign := planned(), scores(campaign, missing), "final")
    nothing = [replace(one, each=(), found=Difference(0, None)) for one in found]
    for comparisons in (found, nothing):
        assert campaign_report.draw(comparisons).startswith(b"\x89PNG")
        assert len(campaign_report.differences_table(comparisons)[0].texts) == 4


def test_an_interval_is_only_spoken_of_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    labels: list[str] = []
    intervals: list[object] = []
    plot = Axes.plot

    def watched(self: Axes, *given: Any, **how: Any) -> Any:
        intervals.extend(given[0] for _ in range("solid_capstyle" in how))
        return plot(self, *given, **how)

    monkeypatch.setattr(
        Axes, "set_xlabel", lambda self, text: labels.extend([text] if text else [])
    )
    monkeypatch.setattr(Axes, "plot", watched)
    campaign = planned()
    for missing in ([], ["fedavg_alpha-0.1_seed-1", "fedavg_alpha-0.5_seed-1"]):
        campaign_report.draw(
            campaign_report.differences(campaign, scores(campaign, missing), "final")
        )
        assert len(intervals) == 2, "fedprox at two alphas, of all seeds"
    assert "95 % interval" in labels[0]
    assert "no interval: that needs 3 seeds" in labels[1] and "95 %" not in labels[1]


def test_the_best_is_marked_within_rows_that_can_be_compared() -> None:
    campaign = planned()
    better = {"fedavg": 0.5, "fedprox": 0.9, "scaffold": 0.52}
    found = [
        campaign_report.Scores(
            cell,
            None,
            {"final": better[cell.settings["method"]] + 0.01 * cell.seed, "rounds_to.0.80": 3.0},
        )
        for cell in campaign.cells
    ]
    *_, final, rounds = campaign_report.settings_table(campaign, found)
    assert final.best() == {2, 3}, "fedprox, at either alpha"
    assert rounds.best() == set()
    close = [
        campaign_report.Scores(cell, None, {"final": 0.5 + 0.1 * cell.seed})
        for cell in campaign.cells
    ]
    assert campaign_report.settings_table(campaign, close)[-1].best() == set()


def test_an_error_is_best_where_it_is_least_and_the_time_of_a_busy_machine_has_no_best() -> None:
    campaign = planned()
    rows: list[dict[str, int | float | None]] = [
        {"round": 1, "mae": 1.0, "mae_worst": 1.0, "mae_global": None}
    ]
    amount = {"fedavg": 3.0, "fedprox": 1.0, "scaffold": 2.0}
    found = []
    for cell in campaign.cells:
        values = dict.fromkeys(
            ("final", "virtual_seconds", "wall_seconds"), amount[cell.settings["method"]]
        )
        found.append(campaign_report.Scores(cell, Run("x", {}, rows, {}), values))
    *_, final, virtual, wall = campaign_report.settings_table(campaign, found)
    assert (final.best(), virtual.best(), wall.best()) == ({2, 3}, {2, 3}, set()), (
        "fedprox, at either alpha"
    )


def test_a_deviation_has_the_decimals_of_its_mean() -> None:
    campaign = planned()
    found = [
        campaign_report.Scores(
            cell, None, {"wall_seconds": 123.4 + 0.001 * cell.seed, "final": 0.5}
        )
        for cell in campaign.cells
    ]
    *_, seconds, final = campaign_report.settings_table(campaign, found)
    assert seconds.texts[0] == "123.4 ± 0.0" and final.texts[0] == "0.5000 ± 0.0000"
