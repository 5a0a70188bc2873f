"""Test that data and scores of each client are stored with a run, and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysim.data.heterogeneity import heterogeneity
from raysim.data.split_statistics import class_counts
from raysim.experiment.build import build
from raysim.experiment.execute import run
from raysim.results.clients import (
    CLIENTS_FILE,
    SPLIT_FILE,
    ScoreWriter,
    client_labels,
    read_client_scores,
    read_clients,
    read_split,
    write_split,
)
from raysim.results.observers import Observer
from raysim.simulation.events import ClientScores

TINY = [
    "runtime=inprocess",
    "tracking=none",
    "data=synthetic",
    "rounds=2",
    "model=mlp",
    "partition.clients=8",
    "schedule.cohort=4",
]


def test_run_folder_has_the_split_and_the_last_score_of_each_client(tmp_path: Path) -> None:
    class Last(Observer):
        def on_round(self, run: object, event: object) -> None:
            self.scores = event.scores  # type: ignore[attr-defined]

    experiment, last = build([*TINY, f"out={tmp_path / 'a'}"]), Last()
    result = run(experiment, quiet=True, observers=[last])
    split, clients = read_split(result.folder), read_clients(result.folder)
    assert split is not None and clients is not None
    dense = np.zeros((split.clients, len(split.classes)), np.int64)
    dense[split.client, split.label] = split.samples
    assert (dense == class_counts(experiment.spec.data)).all()
    assert result.summary["split"]["label_entropy"] == heterogeneity(dense)["label_entropy"]
    assert clients["samples"].tolist() == split.sizes.tolist()
    assert clients["tests"].tolist() == experiment.spec.data.partition.test.counts.tolist()
    assert (
        clients["accuracy"][last.scores.clients].tolist()
        == last.scores.columns["accuracy"].tolist()
    )
    assert np.nanmean(clients["accuracy"]) == pytest.approx(result.summary["accuracy"], abs=1e-12)
    assert np.nanmin(clients["accuracy"]) == result.summary["accuracy_worst"]


def test_table_of_clients_has_no_accuracy_for_clients_without_a_score(
    tmp_path: Path,
) -> None:
    words = [
        *TINY,
        "method=[fedbn]",
        "model.norm=batch",
        "evaluate.clients=3",
        f"out={tmp_path / 'a'}",
    ]
    run([*words, "model=small_cnn"], quiet=True)
    clients = read_clients(tmp_path / "a")
    assert clients is not None
    assert int(np.isfinite(clients["accuracy"]).sum()) == 3 and len(clients["accuracy"]) == 8


def test_centralized_run_stores_scores_of_all_clients(tmp_path: Path) -> None:
    run([*TINY, "method=[centralized]", f"out={tmp_path / 'a'}"], quiet=True)
    clients, split = read_clients(tmp_path / "a"), read_split(tmp_path / "a")
    assert clients is not None and split is not None
    assert split.clients == 1 and len(clients["accuracy"]) == 8
    assert clients["samples"][1:].tolist() == [0.0] * 7


def test_written_split_is_read_back_unchanged(tmp_path: Path) -> None:
    experiment = build([*TINY])
    split = client_labels(experiment.spec.data)
    write_split(split, tmp_path)
    again = read_split(tmp_path)
    assert again is not None and again.classes == split.classes and again.clients == split.clients
    assert all(
        (getattr(again, n) == getattr(split, n)).all() for n in ("client", "label", "samples")
    )


def test_reading_a_split_or_a_client_table_returns_none_if_its_file_is_missing(
    tmp_path: Path,
) -> None:
    assert read_split(tmp_path) is None and read_clients(tmp_path) is None


GOOD = {"client": [0, 1], "label": [0, 1], "samples": [3, 4]}


@pytest.mark.parametrize(
    ("columns", "content"),
    [
        ({**GOOD, "client": [0, 9]}, '{"clients": 2, "classes": ["a", "b"]}'),
        ({**GOOD, "label": [0, -1]}, '{"clients": 2, "classes": ["a", "b"]}'),
        ({**GOOD, "samples": [3, 0]}, '{"clients": 2, "classes": ["a", "b"]}'),
        ({**GOOD, "samples": [3, None]}, '{"clients": 2, "classes": ["a", "b"]}'),
        ({**GOOD, "samples": ["3", "x"]}, '{"clients": 2, "classes": ["a", "b"]}'),
        ({"client": [0]}, '{"clients": 2, "classes": ["a", "b"]}'),
        (GOOD, "[]"),
        (GOOD, "{}"),
        (GOOD, "no json"),
    ],
)
def test_error_of_a_damaged_split_contains_its_file_name(
    tmp_path: Path, columns: dict[str, list[object]], content: str
) -> None:
    pq.write_table(
        pa.table(columns).replace_schema_metadata({"raysim": content}), tmp_path / SPLIT_FILE
    )
    with pytest.raises(ValueError, match=r"split\.parquet"):
        read_split(tmp_path)


def test_error_of_a_damaged_client_table_contains_its_file_name(tmp_path: Path) -> None:
    for name, read in ((SPLIT_FILE, read_split), (CLIENTS_FILE, read_clients)):
        (tmp_path / name).write_bytes(b"PAR1 no")
        with pytest.raises(ValueError, match=name):
            read(tmp_path)
    pq.write_table(
        pa.table({"client": [0], "samples": [1], "tests": ["x"]}), tmp_path / CLIENTS_FILE
    )
    with pytest.raises(ValueError, match=CLIENTS_FILE):
        read_clients(tmp_path)


def scores(*values: float) -> ClientScores:
    return ClientScores(np.arange(len(values)), {"accuracy": np.array(values)})


def test_resumed_run_keeps_client_scores_of_all_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raysim.results.clients.SCORES_FILE_ROWS", 4)
    assert read_client_scores(tmp_path) is None
    writer = ScoreWriter(tmp_path, 0)
    for number in (1, 2, 3, 4):
        writer.add(number, scores(number / 10, np.nan))
    writer.write()
    resumed = ScoreWriter(tmp_path, 3)  # from a checkpoint after round 3
    resumed.add(4, scores(0.4, 0.5))
    resumed.write()
    table = read_client_scores(tmp_path)
    assert table is not None
    assert table["round"].to_pylist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert table["client"].to_pylist() == 4 * [0, 1]
    assert table["accuracy"].to_pylist() == [0.1, None, 0.2, None, 0.3, None, 0.4, 0.5]


def test_result_has_the_scores_of_each_client_and_round(tmp_path: Path) -> None:
    result = run(build([*TINY, f"out={tmp_path / 'a'}"]), quiet=True)
    table = result.client_scores
    assert sorted(set(table["round"])) == [1, 2]
    means = table.groupby("round")["accuracy"].mean()
    assert means.tolist() == pytest.approx(result.history["accuracy"].tolist())
    last = result.clients["accuracy"].dropna()
    assert table[table["round"] == 2]["accuracy"].tolist() == last.tolist()
