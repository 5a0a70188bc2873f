"""Test that every source reads labels by the same rule, and that `data.kind` changes the rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysim.data.arrays import store_arrays
from raysim.data.labels import infer_kind, read_labels
from raysim.data.raw import Source
from raysim.data.sources import (
    Csv,
    Digits,
    HuggingFace,
    ImageFolder,
    JsonLines,
    Leaf,
    Npz,
    NumPy,
    Parquet,
    Tabular,
)
from raysim.primitives.kinds import IGNORED

INPUTS = np.linspace(-1, 1, 24).reshape(12, 2)
ROWS = np.array_split(np.arange(12), 3)  # of three users


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))


# ---- the same labels in every form ---------------------------------------------------------------
def write_leaf(folder: Path, inputs: list, labels: list) -> Path:
    """Write a training file in LEAF's format; return `folder`.

    The first of three users has the first four samples, the next user the next four, and so on.
    """
    users = {}
    for user, part in enumerate(ROWS):
        users[f"f{user}"] = {"x": [inputs[row] for row in part], "y": [labels[row] for row in part]}
    (folder / "train").mkdir(parents=True, exist_ok=True)
    content = {"users": [*users], "num_samples": [len(part) for part in ROWS], "user_data": users}
    (folder / "train/all_data.json").write_text(json.dumps(content))
    return folder


def as_leaf(folder: Path, labels: np.ndarray) -> Source:
    return Leaf(str(write_leaf(folder, INPUTS.tolist(), labels.tolist())))


def as_numpy(folder: Path, labels: np.ndarray) -> Source:
    np.savez(folder / "train.npz", x=INPUTS, y=labels)
    return NumPy(str(folder), test_fraction=0.0)


def as_npz(folder: Path, labels: np.ndarray) -> Source:
    (folder / "train").mkdir()
    for user, rows in enumerate(ROWS):
        np.savez(folder / f"train/{user}.npz", x=INPUTS[rows], y=labels[rows])
    return Npz(str(folder), test_fraction=0.0)


def as_parquet(folder: Path, labels: np.ndarray) -> Source:
    column = (
        pa.array(labels)
        if labels.ndim == 1
        else pa.FixedSizeListArray.from_arrays(labels.ravel(), 1)
    )
    pq.write_table(pa.table({"x": INPUTS[:, 0], "label": column}), folder / "train.parquet")
    return Parquet(str(folder), test_fraction=0.0)


def as_hugging_face(folder: Path, labels: np.ndarray) -> Source:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"x": INPUTS[:, 0], "label": labels}).save_to_disk(
        str(folder / "set")
    )
    return HuggingFace(str(folder / "set"), test_fraction=0.0)


def as_csv(folder: Path, labels: np.ndarray) -> Source:
    rows = [f"{x},{label}" for x, label in zip(INPUTS[:, 0], labels, strict=True)]
    (folder / "train.csv").write_text("\n".join(["x,label", *rows]))
    return Csv(str(folder), test_fraction=0.0)


def as_json_lines(folder: Path, labels: np.ndarray) -> Source:
    rows = [
        json.dumps({"x": x, "label": label})
        for x, label in zip(INPUTS.tolist(), labels.tolist(), strict=True)
    ]
    (folder / "train.jsonl").write_text("\n".join(rows))
    return JsonLines(str(folder), test_fraction=0.0)


def as_arrays(folder: Path, labels: np.ndarray) -> Source:
    return store_arrays((INPUTS, labels))


FORMS = [as_leaf, as_numpy, as_npz, as_parquet, as_hugging_face, as_csv, as_json_lines, as_arrays]
LABELS = {
    "integers": (np.arange(12) % 3, "classification", ["0", "1", "2"]),
    "text": (np.array(["no", "yes"] * 6), "classification", ["no", "yes"]),
    "whole floats": (np.array([5.0, 4.0] * 6), "classification", ["0", "1", "2", "3", "4", "5"]),
    "floats": (np.linspace(0, 1, 12), "regression", ["value"]),
    "many whole floats": (np.arange(12.0), "regression", ["value"]),
    "large whole floats": (np.array([100.0, 200.0] * 6), "regression", ["value"]),
    "negative whole floats": (np.array([-1.0, 1.0] * 6), "regression", ["value"]),
}


@pytest.mark.parametrize("write", FORMS)
@pytest.mark.parametrize("name", LABELS)
def test_every_source_reads_labels_in_the_same_way(
    write: Callable[[Path, np.ndarray], Source], name: str, tmp_path: Path
) -> None:
    labels, kind, outputs = LABELS[name]
    dataset = write(tmp_path, labels).build()
    assert (dataset.kind, dataset.class_names) == (kind, outputs)
    assert f"(data.kind={kind})" in dataset.columns and f"{len(outputs)} " in dataset.columns
    if kind == "regression":
        assert np.array_equal(dataset.labels, labels[:, None].astype(np.float32))
    elif name != "text":
        assert dataset.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("write", [write for write in FORMS if write is not as_arrays])
def test_data_kind_decides_how_every_source_reads_labels(
    write: Callable[[Path, np.ndarray], Source], tmp_path: Path
) -> None:
    source: Any = write(tmp_path, np.array([5.0, 4.0] * 6))
    dataset = replace(source, kind="regression").build()
    assert dataset.kind == "regression" and dataset.labels.ravel().tolist() == [5.0, 4.0] * 6


def test_data_kind_decides_how_labels_of_arrays_are_read() -> None:
    labels = np.arange(12) % 3
    dataset = store_arrays((INPUTS, labels), {"kind": "regression"}).build()
    assert dataset.kind == "regression" and dataset.labels.ravel().tolist() == labels.tolist()


@pytest.mark.parametrize("write", [as_leaf, as_numpy, as_npz, as_parquet, as_arrays])
@pytest.mark.parametrize("name", ["integers", "whole floats", "floats"])
def test_labels_with_one_column_are_read_as_flat_labels(
    write: Callable[[Path, np.ndarray], Source], name: str, tmp_path: Path
) -> None:
    labels, kind, outputs = LABELS[name]
    dataset = write(tmp_path, labels[:, None]).build()
    assert (dataset.kind, dataset.class_names) == (kind, outputs)
    assert np.allclose(dataset.labels.ravel(), labels)


# ---- the kind in sources that know their labels --------------------------------------------------
def test_numeric_class_names_can_be_regression_values() -> None:
    digits, values = Digits().build(), Digits(kind="regression").build()
    assert values.kind == "regression" and np.array_equal(values.labels[:, 0], digits.labels)


@pytest.mark.parametrize(
    "source",
    [
        Digits(kind="multilabel"),
        Tabular("wine", kind="regression"),
        Tabular("diabetes", kind="classification"),
    ],
    ids=["digits", "wine", "diabetes"],
)
def test_data_kind_that_does_not_fit_labels_is_rejected(source: Source) -> None:
    with pytest.raises(ValueError, match=r"data\.kind="):
        source.build()


def test_folders_named_by_numbers_can_be_regression_values(tmp_path: Path) -> None:
    from tiny import picture, write_picture

    for name in ("20", "35"):
        write_picture(tmp_path / name / "1.png", picture())
    dataset = ImageFolder(str(tmp_path), test_fraction=0.0, kind="regression").build()
    assert dataset.labels.tolist() == [[20.0], [35.0]]


def test_unknown_data_kind_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"data\.kind='classes'"):
        Digits(kind="classes")  # type: ignore[arg-type]


# ---- the rule ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.zeros(1), "regression"),
        (np.zeros(2), "classification"),
        (np.repeat(np.arange(100.0), 2), "classification"),
        (np.repeat(np.arange(101.0), 2), "regression"),
        (np.array([0.0, np.inf] * 3), "regression"),
        (np.eye(3), "regression"),
        (np.eye(3, dtype=np.int64), "multilabel"),
        ([[1], [2, 3]], "multilabel"),
    ],
)
def test_kind_of_task_is_inferred_from_values_of_labels(values: Any, kind: str) -> None:
    assert infer_kind(values) == kind


@pytest.mark.parametrize("labels", [[0.5, 1.0], [np.inf, 1.0], [2.0**60, 1.0]])
def test_floats_that_cannot_be_classes_are_rejected(labels: list[float]) -> None:
    with pytest.raises(ValueError, match=r"place .*data\.kind=regression"):
        read_labels(np.array(labels), "classification", None, "place")


@pytest.mark.parametrize(
    "labels",
    [np.zeros((4, 2, 2)), np.array([["a", "b"]] * 4), np.zeros((4, 3), int), [[1, 2], [0]]],
    ids=["three axes", "text", "integers", "lists"],
)
def test_classification_rejects_several_labels_of_a_sample(labels: Any) -> None:
    with pytest.raises(ValueError, match="place"):
        read_labels(labels, "classification", None, "place")


def test_list_with_a_single_integer_is_read_as_the_class_of_the_sample() -> None:
    labels = read_labels([[1], [0], [1]], "classification", None, "place")
    assert labels.values.tolist() == [1, 0, 1]
    assert (labels.names, labels.kind) == (["0", "1"], "classification")


def test_list_with_only_the_ignored_label_is_a_sample_without_a_label() -> None:
    labels = read_labels([[1], [255], [0]], "classification", None, "place", 255)
    assert labels.values.tolist() == [1, IGNORED, 0] and labels.names == ["0", "1"]


# ---- several labels, and labels per position -----------------------------------------------------
def test_label_lists_of_equal_length_mean_several_labels_if_kind_is_multilabel() -> None:
    lists = [[0, 3], [1, 2], [3, 1]] * 4
    dataset = store_arrays((INPUTS, lists), {"kind": "multilabel"}).build()
    assert dataset.kind == "multilabel" and dataset.labels[0].tolist() == [1, 0, 0, 1]
    assert store_arrays((INPUTS, lists)).build().kind == "positions"


def test_lists_with_a_label_per_token_are_padded_to_equal_length() -> None:
    labels = read_labels([[0, 2], [1], [2, 2]], "positions", None, "place")
    assert labels.values.tolist() == [[0, 2], [1, -100], [2, 2]]
    tags = read_labels([["noun", "verb"], ["verb"]], "positions", None, "place")
    assert tags.values.tolist() == [[0, 1], [1, -100]] and tags.names == ["noun", "verb"]


def test_labels_per_position_are_stored_with_their_shape() -> None:
    labels = np.arange(36).reshape(12, 3) % 4
    dataset = store_arrays((INPUTS, labels)).build()
    assert (dataset.kind, dataset.label_shape) == ("positions", (3,))
    assert dataset.labels.tolist() == labels.tolist()


def test_integers_per_position_can_be_regression_values() -> None:
    labels = np.arange(36).reshape(12, 3) % 4
    dataset = store_arrays((INPUTS, labels), {"kind": "regression"}).build()
    assert dataset.class_names == ["0", "1", "2"] and dataset.labels.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([["a"], ["b", "a"], []] * 4, ["a", "b"]),
        ([("a", "b"), ("b", "c"), ("a", "c")] * 4, ["a", "b", "c"]),
        ([[0], [2, 1], []] * 4, ["0", "1", "2"]),
    ],
    ids=["text", "equally long text", "integers"],
)
def test_lists_of_labels_in_python_make_a_multilabel_task(rows: list, names: list[str]) -> None:
    halves = ((INPUTS, rows), (INPUTS[:3], rows[:3]))
    dataset = store_arrays(halves).build()
    assert (dataset.kind, dataset.class_names, dataset.train_rows) == ("multilabel", names, 12)
    for labels, indicators in zip([*rows, *rows[:3]], dataset.labels, strict=True):
        expected = {str(label) for label in labels}
        assert {names[column] for column in np.flatnonzero(indicators)} == expected


def test_lists_of_training_labels_are_rejected_if_test_labels_are_an_array() -> None:
    with pytest.raises(ValueError, match="data: labels"):
        store_arrays(((INPUTS, [["a"], ["b", "a"]] * 6), (INPUTS, np.zeros(12, int))))


def test_list_of_one_class_name_is_read_as_the_class_of_the_sample() -> None:
    dataset = store_arrays((INPUTS, [["a"], ["b"]] * 6)).build()
    assert (dataset.kind, dataset.class_names) == ("classification", ["a", "b"])
