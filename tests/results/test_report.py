"""Runs are read, told apart, put in a table and drawn."""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from raysim.results import report
from raysim.results.history import summarise, write_history, write_json
from raysim.results.jobs import JobWriter
from raysim.simulation.events import JobEnd

Rows = list[dict[str, int | float | None]]
PNG = b"\x89PNG\r\n\x1a\n"


def history(scores: list[float | None], virtual: float = 1.0) -> Rows:
    """One row per score."""
    return [
        {
            "round": n, "virtual_seconds": virtual * n, "wall_seconds": 0.5 * n, "floats_down": 1000 * n,
            "floats_up": 500 * n, "train_loss": 1.0 / n, "accuracy": score, "accuracy_worst": score,
            "accuracy_global": score, "loss_global": None, "clients": 2, "failures": 0,
        }
        for n, score in enumerate(scores, 1)
    ]  # fmt: skip


def make(folder: Path, scores: list[float | None], config: str = "seed: 0", finished: bool = True) -> report.Run:
    """A run's folder, and the run as it is read from there."""
    folder.mkdir(parents=True)
    write_history(history(scores), folder / "history.parquet")
    (folder / "config.yaml").write_text(config)
    if finished:
        write_json(summarise(history(scores)), folder / "summary.json")
    return report.load_run(folder)


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run = make(tmp_path / "one", [0.5, None, 0.75], "method: {fedprox: {mu: 0.1}}")
    assert (run.name, len(run.rows), run.finished) == ("one", 3, True)
    assert run.config == {"method": {"fedprox": {"mu": 0.1}}}
    assert run.summary["best5_mean"] == 0.625


def test_a_run_that_was_stopped_is_summed_up_from_its_history(tmp_path: Path) -> None:
    run = make(tmp_path / "one", [0.5, 0.75], finished=False)
    assert not run.finished
    assert run.summary["best5_mean"] == 0.625
    assert report.labels([run]) == ["one (unfinished)"]


def test_a_folder_that_is_no_run_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "one", [0.5])
    with pytest.raises(ValueError, match=r"nowhere is no folder"):
        report.load_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"runs is no folder of a run, it has no config\.yaml .* mean .*one\?"):
        report.load_run(tmp_path / "runs")
    (tmp_path / "runs" / "one" / "history.parquet").unlink()
    with pytest.raises(ValueError, match=r"one is no folder of a run, it has no history\.parquet;"):
        report.load_run(tmp_path / "runs" / "one")


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.yaml", "a: [1"), ("config.yaml", "- 1"), ("summary.json", "{"), ("summary.json", "[]")],
)
def test_a_broken_file_of_a_run_is_named(tmp_path: Path, name: str, content: str) -> None:
    make(tmp_path / "one", [0.5])
    (tmp_path / "one" / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        report.load_run(tmp_path / "one")


def test_runs_of_one_name_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    config = "{{local: {{lr: {lr}, batch: 10}}, out: {out}, method: {{fedprox: {{_target_: x, mu: {mu}}}}}}}"
    first = make(tmp_path / "a" / "run", [0.5], config.format(lr=0.1, mu=1.0, out="a"))
    second = make(tmp_path / "b" / "run", [0.5], config.format(lr=0.2, mu=1.0, out="b"))
    third = make(tmp_path / "c" / "other", [0.5], config.format(lr=0.3, mu=2.0, out="c"))
    assert report.labels([first, second, third]) == ["local.lr=0.1", "local.lr=0.2", "other"]


def test_methods_are_named_before_their_parameters(tmp_path: Path) -> None:
    plain = make(tmp_path / "a" / "run", [0.5], "{method: {}}")
    prox = make(tmp_path / "b" / "run", [0.5], "{method: {fedprox: {mu: 0.1}}}")
    assert report.labels([plain, prox]) == ["method=fedavg", "method=fedprox"]


def test_twins_in_name_and_config_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [make(tmp_path / place / "run", [0.5]) for place in "ab"]
    assert report.labels(runs) == [f"run ({tmp_path / place / 'run'})" for place in "ab"]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("digits", "digits"),
        ({"name": "digits", "_target_": "x.Y"}, "digits"),
        ({"_target_": "x.Y"}, "Y"),
        ({"a": 1, "b": 2}, "a + b"),
        (["a", "b"], "a + b"),
        (None, "–"),
    ],
)
def test_the_chosen_option_is_found_however_the_config_says_it(value: object, name: str) -> None:
    assert report.choice({"data": value}, "data") == name
    assert report.choice({"data": value, "choices": {"data": "mnist"}}, "data") == "mnist"


def test_the_table_puts_the_best_run_first_and_marks_the_best_values(tmp_path: Path) -> None:
    runs = [make(tmp_path / "low", [0.25, 0.5]), make(tmp_path / "high", [0.75, 0.5, 0.75])]
    lines = report.table(runs).splitlines()
    assert lines[0] == "method fedavg · data – · partition –"
    assert [line.split()[0] for line in lines[3:5]] == ["high", "low"]
    assert lines[5].startswith("* best of its column; of accuracies, where it is ahead of the next")
    assert "0.6667*" in lines[3]  # the best five
    assert "0.3750 " in lines[4]
    assert "4.5 k " in lines[3] + " "
    assert "3 k*" in lines[4]  # fewer floats are better


def test_nobody_wins_a_column_where_all_are_equal_or_alone(tmp_path: Path) -> None:
    twin = [make(tmp_path / name, [0.5]) for name in ("a", "b")]
    assert "*" not in report.table(twin)
    assert "*" not in report.table(twin[:1])


def test_a_missing_score_sorts_last_and_shows_a_dash(tmp_path: Path) -> None:
    runs = [make(tmp_path / "unmeasured", [None, None]), make(tmp_path / "measured", [0.5])]
    last = report.table(runs).splitlines()[-2]  # above what the star means
    assert last.startswith("unmeasured")
    assert "–" in last


@pytest.mark.parametrize("virtual", [0.0, 1.0])
@pytest.mark.parametrize("scores", [[0.5], [None, None], [0.1, None, 0.5], [0.5, math.nan, math.inf]])
def test_a_run_is_drawn_whatever_its_history_lacks(tmp_path: Path, scores: list[float | None], virtual: float) -> None:
    paths = report.draw_run(history(scores, virtual), tmp_path, "a $title_ with <odd> signs")
    assert [path.name for path in paths] == ["accuracy.png", "loss.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_the_page_is_one_file_without_links_and_with_escaped_text(tmp_path: Path) -> None:
    config = "{method: {'<b>evil</b>': {mu: 1}}, data: '<img src=x>'}"
    runs = [make(tmp_path / "<i>x", [0.5, 0.6], config), make(tmp_path / "{y}", [0.4, 0.5])]
    page = report.compare(runs, tmp_path / "out").read_text()
    assert "On virtual time" not in page
    assert page.count("data:image/png;base64,") == 6  # three metrics, each for light and for dark
    assert not re.search(r"(?:src|href|srcset)=\"(?!data:)", page)
    assert "http" not in page
    assert "<i>x" not in page and "<b>evil" not in page and "<img src=x>" not in page
    assert "&lt;i&gt;x" in page and "{y}" in page
    assert page.index("&lt;i&gt;x") < page.index("{y}")


def test_the_page_shows_curves_beside_itself_only_for_what_was_measured(tmp_path: Path) -> None:
    report.compare([make(tmp_path / "a", [None])], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["comparison_train_loss.png", "report.html"]


def test_a_report_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name at least one folder"):
        report.compare([], tmp_path)


def test_a_page_shows_runs_on_virtual_time_where_that_says_something(tmp_path: Path) -> None:
    run, other = make(tmp_path / "late", [0.5, 0.75]), make(tmp_path / "even", [0.5, 0.75])
    for folder, stale in ((run.folder, 1), (other.folder, 0)):
        writer = JobWriter.of(folder, 0)
        assert writer is not None
        writer.add([JobEnd(0, 0, 0, 0.0, 1.0, "aggregated", 1, 0), JobEnd(1, 0, 0, 0.0, 1.0, "aggregated", 1, stale)])
        writer.write()
    page = report.compare([run, other], tmp_path / "out").read_text()
    assert (
        page.count("On virtual time") == 1 and "late: clients, fleet and hosts" in page and "even: clients" not in page
    )
    assert report._timeline("mean", replace(run, folder=Path())) == ""  # a mean of runs is in no folder


def test_curves_are_drawn_against_bytes() -> None:
    read = next(read for name, read, unit, _ in report.AXES if unit == "bytes")
    assert read({"floats_down": 100, "floats_up": 25}) == 500
    assert read({"floats_down": None, "floats_up": None}) == 0


ODD = ["text", [1], {"a": 1}, True, None, 1e300, -1, "1" * 5000]


@pytest.mark.parametrize("odd", range(len(ODD)))
def test_a_summary_with_odd_values_is_reported_or_refused(odd: int, tmp_path: Path) -> None:
    make(tmp_path / "one", [0.5, 0.75])
    good = json.loads((tmp_path / "one/summary.json").read_text())
    for key in good:
        (tmp_path / "one/summary.json").write_text(json.dumps(good | {key: ODD[odd]}))
        with contextlib.suppress(ValueError):
            report.table([report.load_run(tmp_path / "one")])
