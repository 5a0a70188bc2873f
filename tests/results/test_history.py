"""Test that a history is read as it was written, and that summaries are computed as in papers."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysim.primitives import memory
from raysim.results import history as metrics


def row(
    index: int, accuracy: float | None = None, **more: float | None
) -> dict[str, int | float | None]:
    """Return one row of a history. Its columns of costs are multiples of the round `index`.

    more: columns that are added or replaced.
    """
    return {
        "round": index,
        "virtual_seconds": 2.0 * index,
        "wall_seconds": 0.5 * index,
        "floats_down": 10 * index,
        "floats_up": 20 * index,
        "train_loss": 1.0 / index,
        "accuracy": accuracy,
        "accuracy_worst": None,
        "accuracy_global": None,
        "loss_global": None,
        "clients": 3,
        "failures": 1,
        **more,
    }


def test_history_is_read_back_with_equal_values_and_types(tmp_path: Path) -> None:
    rows = [row(1), row(2, 0.1 + 0.2), row(3, None, floats_up=2**53 + 1)]
    metrics.write_history(rows, tmp_path / "history.parquet")
    back = metrics.read_history(tmp_path / "history.parquet")
    assert back == rows
    assert [type(value) for value in back[1].values()] == [
        type(value) for value in rows[1].values()
    ]


def test_history_columns_of_methods_follow_the_fixed_columns(tmp_path: Path) -> None:
    rows = [
        row(1),
        row(2, None, step_size=np.float32(0.5), cached=np.int64(4)),
        row(3, None, step_size=1),
    ]
    metrics.write_history(rows, tmp_path / "h.parquet")
    schema = pq.read_schema(tmp_path / "h.parquet")
    assert schema.names == [*metrics.COLUMNS, "step_size", "cached"]
    assert [str(schema.field(name).type) for name in ("step_size", "cached", "round")] == [
        "double",
        "int64",
        "int64",
    ]
    assert [r["step_size"] for r in metrics.read_history(tmp_path / "h.parquet")] == [
        None,
        0.5,
        1.0,
    ]


def test_history_distinguishes_nan_and_missing_values(tmp_path: Path) -> None:
    metrics.write_history(
        [row(1, None, train_loss=math.nan), row(2, None, train_loss=None)], tmp_path / "h.parquet"
    )
    losses = [r["train_loss"] for r in metrics.read_history(tmp_path / "h.parquet")]
    assert losses[0] is not None and math.isnan(losses[0])
    assert losses[1] is None


def test_history_file_without_rows_has_all_fixed_columns(tmp_path: Path) -> None:
    metrics.write_history([], tmp_path / "h.parquet")
    assert metrics.read_history(tmp_path / "h.parquet") == []
    assert pq.read_schema(tmp_path / "h.parquet").names == list(metrics.COLUMNS)


def test_failed_write_of_history_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "h.parquet"
    metrics.write_history([row(1)], path)

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        metrics.write_history([row(1), row(2)], path)
    assert len(metrics.read_history(path)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["h.parquet"]


def test_error_of_a_broken_history_file_contains_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "h.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"h\.parquet"):
        metrics.read_history(tmp_path / "h.parquet")


def test_mean_of_best_rounds_ignores_rounds_without_a_score() -> None:
    assert metrics.best_mean([0.5, None, 0.25, 1.0, math.nan], k=2) == 0.75
    assert metrics.best_mean([0.5, None], k=5) == 0.5
    assert metrics.best_mean([None]) is None


def test_mean_of_last_rounds_uses_evaluated_rounds_only() -> None:
    assert metrics.last_mean_std([9.0, 1.0, None, 3.0, None], k=2) == (2.0, 1.0)
    assert metrics.last_mean_std([0.5]) == (0.5, 0.0)
    assert metrics.last_mean_std([]) == (None, None)


def test_number_of_rounds_to_reach_a_score_includes_rounds_without_a_score() -> None:
    assert metrics.rounds_to([None, 0.4, None, 0.8, 0.5], [0.4, 0.5, 0.8, 0.925]) == {
        "0.40": 2,
        "0.50": 4,
        "0.80": 4,
        "0.925": None,
    }


def test_summary_has_last_values_best_scores_and_totals() -> None:
    rows = [
        row(1, 0.25, accuracy_global=0.5),
        row(2, 0.75, accuracy_global=0.625, worker_deaths=2),
        row(3, None, extra=7, worker_deaths=0),
    ]
    summary = metrics.summarise(rows, [0.5], model_sha256="ab", peak_memory_bytes=5)
    expected = {
        "rounds": 3,
        "accuracy": 0.75,
        "accuracy_global": 0.625,
        "extra": 7,
        "best5_mean": 0.5,
        "last10_std": 0.25,
        "rounds_to": {"0.50": 2},
        "best5_mean_global": 0.5625,
        "rounds_to_global": {"0.50": 1},
        "wall_seconds": 1.5,
        "virtual_seconds": 6.0,
        "floats_down": 30,
        "floats_up": 60,
        "failures": 1,
        "failures_total": 3,
        "worker_deaths": 0,
        "worker_deaths_total": 2,
        "model_sha256": "ab",
        "peak_memory_bytes": 5,
    }
    assert {key: summary[key] for key in expected} == expected


def test_summary_uses_central_scores_if_there_are_no_client_scores() -> None:
    summary = metrics.summarise([row(1, None, accuracy_global=0.5)], [0.5])
    assert (summary["best5_mean"], summary["rounds_to"]) == (0.5, {"0.50": 1})
    assert "best5_mean_global" not in summary


def test_summary_of_a_history_without_rows_has_no_scores() -> None:
    summary = metrics.summarise([])
    assert (summary["rounds"], summary["best5_mean"], summary["accuracy"]) == (0, None, None)


def test_json_files_are_strict_json_for_any_content(tmp_path: Path) -> None:
    odd = {
        "a": np.float32(0.5),
        "b": [np.int64(2), math.nan, math.inf],
        "c": Path("x"),
        "d": True,
        1: None,
    }
    metrics.write_json(odd, tmp_path / "s.json")
    text = (tmp_path / "s.json").read_text()
    assert json.loads(text) == {"a": 0.5, "b": [2, None, None], "c": "x", "d": True, "1": None}
    assert "NaN" not in text


def test_json_files_have_each_list_in_one_line(tmp_path: Path) -> None:
    content = {
        "numbers": [1, 2.5, None],
        "words": ["a,\n  b", "[", "{", "\\n"],
        "deep": [[1, 2], [{"a": [3, 4]}], []],
    }
    metrics.write_json(content, tmp_path / "s.json")
    text = (tmp_path / "s.json").read_text()
    assert json.loads(text) == content
    assert '  "numbers": [1, 2.5, null],\n' in text and '"a": [3, 4]' in text


def test_peak_memory_is_the_resident_memory_in_bytes() -> None:
    held = np.ones(20_000_000)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    del held
    # The kernel counts pages for each processor and adds them up now and then.
    assert 0.99 * resident <= memory.peak_memory_bytes() < 100 * resident


@pytest.mark.parametrize(
    "columns",
    [
        {"round": ["1"]},
        {"round": [1.5]},
        {"round": [None]},
        {"round": [[1]]},
        {"round": [1], "accuracy": ["a"]},
        {"round": [1], "accuracy": [{"a": 1}]},
        {"round": [1], "accuracy": [b"a"]},
        {"round": [1], "accuracy": [True]},
    ],
)
def test_history_with_a_wrong_type_in_a_column_is_refused(columns: dict, tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "history.parquet")
    with pytest.raises(ValueError, match=f"{tmp_path / 'history.parquet'} (is not|has)"):
        metrics.read_history(tmp_path / "history.parquet")
