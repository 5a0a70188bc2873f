"""Test the functions that both studies and sweeps use for runs' names, folders and scores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raysim.experiment.many_runs import (
    check_free,
    dated_folder,
    is_resume_requested,
    last_score,
    mean_row,
    value_label,
)
from raysim.primitives.errors import RefusedError, first_line
from raysim.results.history import Row, score, summarise


def test_value_in_the_label_of_a_setting_is_shortened() -> None:
    values: list[object] = [[], ["fedprox", "moon"], 0.123456, 3]
    assert [value_label(value) for value in values] == ["fedavg", "fedprox+moon", "0.1235", "3"]


def test_dated_folders_of_the_same_second_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda text: "now")
    names = []
    for _ in range(2):
        names.append(dated_folder(tmp_path, "title").name)
        (tmp_path / names[-1]).mkdir()
    assert names == ["now-title", "now-title-2"]
    assert dated_folder(tmp_path).name == "now"


def test_existing_folder_of_a_study_is_refused(tmp_path: Path) -> None:
    check_free(tmp_path / "new")
    with pytest.raises(
        RefusedError,
        match=r"exists already\. Choose another folder, or continue it with resume=latest",
    ):
        check_free(tmp_path)


def test_study_or_sweep_resumes_only_if_resume_is_latest_and_output_folder_is_set() -> None:
    assert is_resume_requested(["out=s", "resume=latest"], "study")
    assert not is_resume_requested(["out=s"], "study")
    for words in (
        ["resume=latest"],
        ["out=s", "resume=s/round-1"],
        ["out=s", "resume=latest", "resume=latest"],
    ):
        with pytest.raises(RefusedError, match=r"a search\. Write out=DIR resume=latest"):
            is_resume_requested(words, "search")


@pytest.mark.parametrize(
    ("summary", "metric", "value"),
    [
        ({"accuracy": 0.5, "accuracy_global": 0.6}, "final", 0.5),
        ({"accuracy": None, "accuracy_global": 0.6}, "final", 0.6),
        ({"rounds_to": {"0.80": 7}}, "rounds_to.0.80", 7.0),
        ({"rounds_to": {"0.80": None}}, "rounds_to.0.80", None),
        ({"fedbss.biased_share": 0.2}, "fedbss.biased_share", 0.2),
        ({}, "best5_mean", None),
        ({"best5_mean": float("nan")}, "best5_mean", None),
    ],
)
def test_score_of_a_metric_is_found_in_the_run_summary(
    summary: dict[str, Any], metric: str, value: float | None
) -> None:
    assert score(summary, metric) == value


@pytest.mark.parametrize("column", ["accuracy_global", "loss_global", "mine"])
def test_last_score_in_the_history_equals_the_score_in_the_summary(column: str) -> None:
    rows: list[Row] = [
        {"round": 1, "accuracy_global": 0.5, "mine": 2.0},
        {"round": 2, "accuracy_global": 0.6, "mine": None},
    ]
    assert last_score(rows, column) == (score(summarise(rows), column), None)


def test_row_averaged_over_seeds_has_means_and_the_deviation_of_the_score() -> None:
    rows = [mean_row([{"round": 1, "x": 1.0, "y": 4}, {"round": 1, "x": 2.0, "y": None}], "x")]
    assert rows == [{"round": 1, "x": 1.5, "y": 4.0, "x_std": pytest.approx(0.5**0.5)}]
    assert last_score([*rows, {"round": 2, "x": None}], "x") == (1.5, rows[0]["x_std"])


def test_first_line_of_an_error_comes_from_its_original_cause() -> None:
    error, other = ValueError("\nas it arrived"), RuntimeError("as it was raised\nthere")
    error.cause = other  # type: ignore[attr-defined]
    assert first_line(error) == "as it was raised"
    assert first_line(ValueError("\nfirst\nsecond")) == "first"
    assert first_line(ValueError()) == "ValueError"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "raysim.experiment.many_runs",
        "raysim.commands.sweep.plan",
        "raysim.commands.submit.job_server",
    ],
)
def test_modules_that_read_overrides_do_not_import_torch(module: str) -> None:
    program = f"import {module}, sys; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True
        ).stdout.strip()
        == "False"
    )
