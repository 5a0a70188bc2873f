"""Test reading, distinguishing and grouping runs, and the table that compares them.

A group has the runs whose settings differ only in the seed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from raysim.results import report, stored_runs, tables
from raysim.results.history import summarise, write_history, write_json
from raysim.results.number_format import format_bytes

Rows = list[dict[str, int | float | None]]


def history(scores: list[float | None], virtual: float = 1.0) -> Rows:
    """Return a history with one row for each round.

    scores: the score of each round; None for a round that was not scored.
    virtual: the virtual time of one round, in seconds.
    """
    return [
        {
            "round": n,
            "virtual_seconds": virtual * n,
            "wall_seconds": 0.5 * n,
            "floats_down": 1000 * n,
            "floats_up": 500 * n,
            "train_loss": 1.0 / n,
            "accuracy": score,
            "accuracy_worst": score,
            "accuracy_global": score,
            "loss_global": None,
            "clients": 2,
            "failures": 0,
        }
        for n, score in enumerate(scores, 1)
    ]


def make(
    folder: Path, scores: list[float | None], config: str = "seed: 0", finished: bool = True
) -> stored_runs.Run:
    """Write the folder of a run, and return the run as raysim loads it.

    scores: the score of each round.
    config: the text of the run's config.yaml.
    finished: True also writes summary.json.
    """
    folder.mkdir(parents=True)
    write_history(history(scores), folder / "history.parquet")
    (folder / "config.yaml").write_text(config)
    if finished:
        write_json(summarise(history(scores)), folder / "summary.json")
    return stored_runs.load_run(folder)


def table(runs: list[stored_runs.Run]) -> str:
    """Return the comparison of runs, as it is printed."""
    return report.comparison_table(report.group_by_setting(runs))


def test_load_run_reads_history_configuration_and_summary(tmp_path: Path) -> None:
    run = make(tmp_path / "one", [0.5, None, 0.75], "method: {fedprox: {mu: 0.1}}")
    assert (run.name, len(run.rows), run.finished) == ("one", 3, True)
    assert run.config == {"method": {"fedprox": {"mu": 0.1}}}
    assert run.summary["best5_mean"] == 0.625


def test_report_table_has_a_column_for_scores_of_unseen_clients(tmp_path: Path) -> None:
    run = make(tmp_path / "one", [0.5, 0.75])
    assert "unseen" not in table([run])
    rows: Rows = [row | {"accuracy_unseen": 0.4321} for row in history([0.5, 0.75])]
    write_json(summarise(rows), tmp_path / "one" / "summary.json")
    text = table([stored_runs.load_run(tmp_path / "one")])
    assert "unseen" in text and "0.4321" in text


def test_unfinished_run_is_summarised_from_history(tmp_path: Path) -> None:
    run = make(tmp_path / "one", [0.5, 0.75], finished=False)
    assert not run.finished
    assert run.summary["best5_mean"] == 0.625
    assert stored_runs.run_labels([run]) == ["one (unfinished)"]


def test_folder_without_run_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "runs" / "one", [0.5])
    with pytest.raises(ValueError, match="nowhere"):
        stored_runs.load_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config\.yaml.*one"):
        stored_runs.load_run(tmp_path / "runs")
    (tmp_path / "runs" / "one" / "history.parquet").unlink()
    with pytest.raises(ValueError, match=r"history\.parquet"):
        stored_runs.load_run(tmp_path / "runs" / "one")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "a: [1"),
        ("config.yaml", "- 1"),
        ("summary.json", "{"),
        ("summary.json", "[]"),
    ],
)
def test_report_error_contains_the_name_of_a_broken_file(
    tmp_path: Path, name: str, content: str
) -> None:
    make(tmp_path / "one", [0.5])
    (tmp_path / "one" / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        stored_runs.load_run(tmp_path / "one")


def test_labels_of_runs_contain_their_differences_if_folder_names_are_equal(tmp_path: Path) -> None:
    config = (
        "{{local: {{lr: {lr}, batch: 10}}, out: {out}, "
        "method: {{fedprox: {{_target_: x, mu: {mu}}}}}}}"
    )
    first = make(tmp_path / "a" / "run", [0.5], config.format(lr=0.1, mu=1.0, out="a"))
    second = make(tmp_path / "b" / "run", [0.5], config.format(lr=0.2, mu=1.0, out="b"))
    third = make(tmp_path / "c" / "other", [0.5], config.format(lr=0.3, mu=2.0, out="c"))
    labels = stored_runs.run_labels([first, second, third])
    assert labels == ["lr=0.1", "lr=0.2", "other"]


def test_run_labels_leave_out_settings_that_follow_from_the_method(tmp_path: Path) -> None:
    runs = []
    for method, weighting in {"fedprox": "samples", "scaffold": "uniform"}.items():
        for alpha in (0.1, 0.5):
            config = (
                f"{{method: {{{method}: {{}}}}, weighting: {weighting}, "
                f"partition: {{alpha: {alpha}}}}}"
            )
            runs.append(make(tmp_path / method / str(alpha) / "run", [0.5], config))
    assert stored_runs.run_labels(runs) == [
        "fedprox, alpha=0.1",
        "fedprox, alpha=0.5",
        "scaffold, alpha=0.1",
        "scaffold, alpha=0.5",
    ]


def test_short_names_of_configuration_keys_are_unique() -> None:
    keys = ["method.fedbr.lam", "method.fedprox.mu", "method.fedbr.mu", "method"]
    assert stored_runs.short_names(keys) == ["lam", "fedprox.mu", "fedbr.mu", "method"]


def test_labels_of_settings_list_methods_before_parameters(tmp_path: Path) -> None:
    plain = make(tmp_path / "a" / "run", [0.5], "{method: {}}")
    prox = make(tmp_path / "b" / "run", [0.5], "{method: {fedprox: {mu: 0.1}}}")
    assert stored_runs.run_labels([plain, prox]) == ["fedavg", "fedprox"]


def test_labels_of_runs_with_equal_settings_contain_their_folders(tmp_path: Path) -> None:
    runs = [make(tmp_path / place / "run", [0.5]) for place in "ab"]
    assert stored_runs.run_labels(runs) == [f"run ({tmp_path / place / 'run'})" for place in "ab"]


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
def test_option_name_is_read_from_old_and_new_configuration_files(value: object, name: str) -> None:
    assert stored_runs.chosen_option({"data": value}, "data") == name
    config = {"data": value, "choices": {"data": "mnist"}}
    assert stored_runs.chosen_option(config, "data") == "mnist"


def test_table_starts_with_best_run_and_marks_best_values(tmp_path: Path) -> None:
    runs = [make(tmp_path / "low", [0.25, 0.5]), make(tmp_path / "high", [0.75, 0.5, 0.75])]
    lines = table(runs).splitlines()
    assert lines[0] == "method fedavg · data – · partition –"
    assert [line.split()[0] for line in lines[3:5]] == ["high", "low"]
    assert lines[5].startswith("* best of its column; of accuracies, where it is ahead of the next")
    assert "0.6667*" in lines[3]  # the best five
    assert "0.3750 " in lines[4]
    assert "4.5 k " in lines[3] + " "
    assert "3 k*" not in lines[4]  # of fewer rounds


def test_table_note_says_that_deviations_are_over_the_last_rounds(tmp_path: Path) -> None:
    note = "last 10: mean ± deviation over these rounds"
    assert table([make(tmp_path / "one", [0.25, 0.5])]).splitlines()[-1] == note
    assert note not in table([make(tmp_path / "none", [None])])


def test_settings_that_distinguish_runs_do_not_include_runtime_defaults(tmp_path: Path) -> None:
    def runtime(name: str, more: str = "") -> stored_runs.Run:
        config = f"{{choices: {{runtime: {name}}}, runtime: {{name: {name}, threads: 1{more}}}}}"
        return make(tmp_path / f"{name}{len(list(tmp_path.iterdir()))}", [0.5], config)

    alone, usual = (
        runtime("inprocess"),
        runtime("local", ", workers: null, strategy: PACK, wait: null"),
    )
    assert stored_runs.distinguishing_settings([alone, usual]) == (
        {"runtime.name": ["inprocess", "local"]},
        3,
    )
    chosen = runtime("local", ", workers: 4, strategy: PACK")
    found, left = stored_runs.distinguishing_settings([alone, chosen])
    assert (found.get("runtime.workers"), left) == (["–", "4"], 1), "what was set is told"
    settings = stored_runs.distinguishing_settings([usual, chosen])[0]
    assert settings["runtime.workers"] == ["None", "4"], "what both have is told"
    own = runtime("mine", ", workers: null")
    assert "runtime.workers" in stored_runs.distinguishing_settings([alone, own])[0], (
        "nobody knows the defaults of another's option"
    )


def test_table_marks_no_best_value_of_incomparable_runs(tmp_path: Path) -> None:
    """Runs on different data have no best value. Runs on different workers have one."""
    scores: list[float | None] = [0.2, 0.5]
    alike = [
        make(tmp_path / name, scores[: len(scores)], config)
        for name, config in (("a", "workers: 0"), ("b", "workers: 1"))
    ]
    write_json(
        summarise(history(scores)) | {"virtual_seconds": 9.0}, tmp_path / "b" / "summary.json"
    )
    assert "2 s*" in table([alike[0], stored_runs.load_run(tmp_path / "b")])
    other = [
        make(tmp_path / name, [score], f"partition: {{alpha: {score}}}")
        for name, score in (("c", 0.9), ("d", 0.1))
    ]
    assert "*" not in table(other)


def test_table_has_one_row_per_setting(tmp_path: Path) -> None:
    def study(method: str, scores: list[float]) -> list[stored_runs.Run]:
        config = f"{{method: {{{method}: {{mu: 1}}}}, seed: "
        runs = enumerate(scores)
        return [
            make(tmp_path / f"{method}-{seed}", [score], f"{config}{seed}}}")
            for seed, score in runs
        ]

    runs = [
        *study("fedprox", [0.8, 0.9]),
        *study("moon", [0.2, 0.3, 0.4]),
        *study("fedbr", [0.6, 0.6]),
    ]
    above, head, _, *rows, star, scored, note = table(runs).splitlines()
    assert above == "data – · partition –" and head.split()[:3] == ["seeds", "rounds", "best"]
    cells = [re.split(r"  +", row) for row in rows]
    assert [(each[0], each[1]) for each in cells] == [
        ("fedprox", "2"),
        ("fedbr", "2"),
        ("moon", "3"),
    ]
    assert [each[3] for each in cells] == ["0.8500 ± 0.0707*", "0.6000 ± 0.0000", "0.3000 ± 0.1000"]
    assert star.endswith("deviation of either over the seeds")
    assert scored == report.describe_scores(runs)
    assert note == "mean ± sample standard deviation over the seeds; --csv prints every run"
    going = [
        *runs,
        replace(make(tmp_path / "on", [0.7], "{method: {moon: {mu: 1}}, seed: 3}"), finished=False),
    ]
    assert [group.label for group in report.group_by_setting(going)] == [
        "fedprox",
        "moon (unfinished)",
        "fedbr",
        "moon",
    ]


def test_table_marks_no_best_value_of_equal_runs_or_of_a_single_run(tmp_path: Path) -> None:
    twin = [make(tmp_path / name, [0.5]) for name in ("a", "b")]
    assert "*" not in table(twin)
    assert "*" not in table(twin[:1])


def test_run_without_score_is_last_and_has_a_dash(tmp_path: Path) -> None:
    runs = [make(tmp_path / "unmeasured", [None, None]), make(tmp_path / "measured", [0.5])]
    last = table(runs).splitlines()[-3]
    assert last.startswith("unmeasured")
    assert "–" in last


ODD = ["text", [1], {"a": 1}, True, None, 1e300, -1, "1" * 5000]


@pytest.mark.parametrize("odd", range(len(ODD)))
def test_summary_with_a_wrong_value_raises_value_error_or_nothing(odd: int, tmp_path: Path) -> None:
    make(tmp_path / "one", [0.5, 0.75])
    good = json.loads((tmp_path / "one/summary.json").read_text())
    for key in good:
        (tmp_path / "one/summary.json").write_text(json.dumps(good | {key: ODD[odd]}))
        with contextlib.suppress(ValueError):
            table([stored_runs.load_run(tmp_path / "one")])


# --- seeds ----------------------------------------------------------------------------------------
def seeded(tmp_path: Path, method: str, finals: list[float]) -> list[stored_runs.Run]:
    """Return runs of one method with the seeds 0, 1, ..., each with one final accuracy.

    finals: the final accuracy of each run.
    """
    return [
        make(
            tmp_path / f"{method}-{seed}",
            [0.25, final],
            f"{{method: {{{method}: {{}}}}, seed: {seed}, out: {seed}}}",
        )
        for seed, final in enumerate(finals)
    ]


def test_runs_of_one_setting_share_a_row_with_mean_and_deviation(
    tmp_path: Path,
) -> None:
    runs = seeded(tmp_path, "fedprox", [0.5, 0.75, 1.0]) + seeded(tmp_path, "fedavgm", [0.5])
    groups = report.group_by_setting(runs[::-1])
    assert [(group.label, [run.config["seed"] for run in group.runs]) for group in groups] == [
        ("fedprox", [0, 1, 2]),
        ("fedavgm", [0]),
    ]
    columns = {column.title: column for column in report.result_columns(groups)}
    assert columns["seeds"].texts == ["3", "1"]
    assert columns["final"].texts == ["0.7500 ± 0.2500", "0.5000"]  # sqrt((0.25² + 0 + 0.25²) / 2)
    assert columns["final"].scores == [0.75, 0.5]
    assert columns["rounds"].texts == ["2", "2"]


def test_report_does_not_group_runs_with_different_loss_functions(tmp_path: Path) -> None:
    own = "seed: 1\nloss: {_target_: mine.loss}\nchoices: {loss: mine}"
    runs = [make(tmp_path / name, [0.5], config) for name, config in (("a", "seed: 0"), ("b", own))]
    assert len(report.group_by_setting(runs)) == 2
    assert stored_runs.differing_settings(runs)["loss"] == ["–", "mine"]


def test_threshold_column_counts_seeds_that_reach_the_threshold(tmp_path: Path) -> None:
    columns = {
        c.title: c
        for c in report.result_columns(
            report.group_by_setting(seeded(tmp_path, "fedprox", [0.5, 0.75, 0.75]))
        )
    }
    assert columns["to 0.70"].texts == ["2.0 ± 0.0 (2 of 3)"]


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [([100.0, 200.0], ["100 s", "200 s"]), ([100.0, 360_000.0], ["100 s", "4.17 d"])],
)
def test_numbers_of_a_column_have_one_unit_unless_they_differ_widely(
    seconds: list[float], texts: list[str], tmp_path: Path
) -> None:
    groups = []
    for number, value in enumerate(seconds):
        run = make(tmp_path / str(number), [0.5])
        run = replace(run, summary=run.summary | {"virtual_seconds": value})
        groups.append(report.RunGroup(str(number), [run]))
    columns = {column.title: column.texts for column in report.result_columns(groups)}
    assert columns["virtual"] == texts


@pytest.mark.parametrize(
    ("key", "title", "values", "text"),
    [
        ("virtual_seconds", "virtual", [2.351, 2.349], "2.35 ± 0.00 s"),
        ("virtual_seconds", "virtual", [7100.0, 7300.0], "2.00 ± 0.04 h"),
        ("virtual_seconds", "virtual", [0.0, 0.0], "0 ± 0 s"),
        ("floats_up", "floats", [2_740_000, 2_741_000], "2.74 ± 0.00 M"),
    ],
)
def test_deviation_has_the_unit_and_the_number_of_decimals_of_its_mean(
    key: str, title: str, values: list[float], text: str, tmp_path: Path
) -> None:
    runs = seeded(tmp_path, "fedprox", [0.5, 0.5])
    runs = [
        replace(run, summary=run.summary | {"floats_down": 0, key: v})
        for run, v in zip(runs, values, strict=True)
    ]
    assert {c.title: c.texts for c in report.result_columns(report.group_by_setting(runs))}[
        title
    ] == [text]


@pytest.mark.parametrize(
    ("size", "text"), [(999.4, "999 B"), (999_700.0, "1000 kB"), (1_000_000.0, "1 MB")]
)
def test_size_just_below_one_megabyte_is_written_without_exponent(size: float, text: str) -> None:
    assert format_bytes(size) == text


def test_table_marks_the_best_virtual_time_but_no_best_wall_time(tmp_path: Path) -> None:
    runs = [make(tmp_path / name, [0.5, score]) for name, score in (("a", 0.5), ("b", 0.75))]
    runs[0].summary.update(virtual_seconds=1.0, wall_seconds=1.0)
    best = {
        column.title: column.best()
        for column in report.result_columns(report.group_by_setting(runs))
    }
    assert best["virtual"] and not best["wall"]


def test_table_says_which_metric_and_test_set_its_scores_have(tmp_path: Path) -> None:
    both = make(tmp_path / "both", [0.5])
    central = replace(both, rows=[row | {"accuracy": None} for row in both.rows])
    own = replace(both, rows=[row | {"accuracy_global": None} for row in both.rows])
    errors = replace(both, rows=[{"round": 1, "mae": 2.0, "mae_worst": 3.0, "mae_global": None}])
    nothing = replace(both, rows=[{"round": 1}])
    tests = "on the clients' own tests (mean)"
    assert report.describe_scores([own]) == f"scores: accuracy {tests}"
    assert (
        report.describe_scores([both])
        == f"scores: accuracy {tests}; central: on the central test set"
    )
    assert report.describe_scores([central]) == "scores: accuracy on the central test set"
    assert (
        report.describe_scores([own, central])
        == f"scores: accuracy {tests} or accuracy on the central test set"
    )
    assert report.describe_scores([errors]) == f"scores: mae {tests}"
    assert report.describe_scores([nothing]) == ""
    assert report.describe_scores([both]) in table([both]).splitlines()


def test_second_run_with_the_same_seed_gets_a_separate_row(tmp_path: Path) -> None:
    runs = [make(tmp_path / place / "run", [0.5], "{method: {}, seed: 3}") for place in "ab"]
    groups = report.group_by_setting(runs)
    assert [len(group.runs) for group in groups] == [1, 1]
    assert len({group.label for group in groups}) == 2


def test_labels_of_settings_contain_their_differences_if_methods_are_equal(
    tmp_path: Path,
) -> None:
    runs = [
        make(
            tmp_path / f"{lr}-{seed}", [0.5], f"{{method: {{}}, local: {{lr: {lr}}}, seed: {seed}}}"
        )
        for lr in (0.1, 0.2)
        for seed in (4, 5)
    ]
    assert sorted(group.label for group in report.group_by_setting(runs)) == [
        "lr=0.1",
        "lr=0.2",
    ]


# --- LaTeX and CSV --------------------------------------------------------------------------------
def test_latex_table_is_valid(tmp_path: Path) -> None:
    runs = [make(tmp_path / r"a_b & 50% of {x}\y", [0.75]), make(tmp_path / "low", [0.5])]
    text = tables.to_latex(report.result_columns(report.group_by_setting(runs)))
    body = text.splitlines()
    assert body[0] == r"% needs \usepackage{booktabs}"
    assert [body.index(rf"\{rule}") for rule in ("toprule", "midrule", "bottomrule")] == [2, 4, 7]
    assert body[5].startswith(r"a\_b \& 50\% of \{x\}\textbackslash{}y & ")
    assert r"\textbf{0.7500}" in body[5] and "textbf" not in body[6].split("floats")[0]
    columns = len(body[1].partition("{tabular}{")[2]) - 1
    assert all(
        len(re.findall(r"(?<!\\)&", line)) == columns - 1 for line in body[3:7:1] if "&" in line
    )
    assert all(line.endswith(r" \\") for line in (body[3], body[5], body[6]))


def test_csv_has_a_row_per_run_with_all_digits(tmp_path: Path) -> None:
    rows = list(
        csv.DictReader(
            io.StringIO(
                report.as_csv(report.group_by_setting(seeded(tmp_path, "fedprox", [0.5, 2 / 3])))
            )
        )
    )
    assert [(row["setting"], row["run"], row["seed"]) for row in rows] == [
        ("fedprox", "fedprox-0", "0"),
        ("fedprox", "fedprox-1", "1"),
    ]
    assert float(rows[1]["accuracy"]) == 2 / 3
    assert rows[0]["rounds_to.0.60"] == "" and float(rows[1]["rounds_to.0.60"]) == 2
