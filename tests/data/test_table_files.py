"""Test columns and settings of CSV, JSON lines and Parquet files, and of a .npz file per client."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysim.data.federated import federate
from raysim.data.partition import Domain, Natural
from raysim.data.sources import (
    Csv,
    ImageFolder,
    JsonLines,
    Leaf,
    Npz,
    NumPy,
    Parquet,
    Source,
    Stored,
    Strips,
)

ROWS = 12
COLUMNS: dict[str, list] = {
    "age": list(range(ROWS)),
    "score": [row / 4 for row in range(ROWS)],
    "member": [row % 2 == 0 for row in range(ROWS)],
    "user": [f"u{row % 3}" for row in range(ROWS)],
    "label": ["no", "yes"] * 6,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))


def csv_text(columns: dict[str, list], delimiter: str = ",") -> str:
    rows = zip(*columns.values(), strict=True)
    return "\n".join(delimiter.join(map(str, row)) for row in [list(columns), *rows])


def write_csv(folder: Path, columns: dict[str, list], split: str = "train") -> Source:
    (folder / f"{split}.csv").write_text(csv_text(columns))
    return Csv(str(folder), test_fraction=0.0)


def write_json_lines(folder: Path, columns: dict[str, list], split: str = "train") -> Source:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return JsonLines(str(folder), test_fraction=0.0)


def write_parquet(folder: Path, columns: dict[str, list], split: str = "train") -> Source:
    pq.write_table(pa.table(columns), folder / f"{split}.parquet")
    return Parquet(str(folder), test_fraction=0.0)


WRITERS = [write_csv, write_json_lines, write_parquet]
Writer = Callable[..., Any]


# ---- which column is which -----------------------------------------------------------------------
@pytest.mark.parametrize("write", WRITERS)
def test_table_source_infers_the_columns_of_inputs_and_labels_and_users(
    write: Writer, tmp_path: Path
) -> None:
    dataset = write(tmp_path, COLUMNS).build()
    expected = np.stack([COLUMNS["age"], COLUMNS["score"], COLUMNS["member"]], axis=1).astype(
        np.float32
    )
    assert np.array_equal(dataset.inputs, expected) and dataset.tokens is None
    assert dataset.class_names == ["no", "yes"] and dataset.domain_names == ["u0", "u1", "u2"]
    for name in COLUMNS:
        assert name in dataset.columns
    assert "data.kind=classification" in dataset.columns


@pytest.mark.parametrize("write", WRITERS)
def test_settings_choose_the_table_columns_of_inputs_and_labels_and_users(
    write: Writer, tmp_path: Path
) -> None:
    source = replace(
        write(tmp_path, COLUMNS), columns=["score"], label="age", user="label", kind="regression"
    )
    dataset = source.build()
    assert (
        dataset.inputs[:, 0].tolist() == COLUMNS["score"]
        and dataset.labels[:, 0].tolist() == COLUMNS["age"]
    )
    assert dataset.domain_names == ["no", "yes"]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("label", "user"), [("y", "client_id"), ("Target", "User_ID"), ("CLASS", "client")]
)
def test_label_and_user_columns_are_found_by_names_of_any_letter_case(
    write: Writer, label: str, user: str, tmp_path: Path
) -> None:
    columns = {"a": COLUMNS["score"], user: COLUMNS["user"], label: COLUMNS["label"]}
    dataset = write(tmp_path, columns).build()
    assert (
        dataset.shape == (1,)
        and dataset.class_names == ["no", "yes"]
        and len(dataset.domain_names) == 3
    )


@pytest.mark.parametrize("write", WRITERS)
def test_table_source_does_not_use_columns_of_row_numbers_as_inputs(
    write: Writer, tmp_path: Path
) -> None:
    columns = {
        "Unnamed: 0": COLUMNS["age"],
        "id": COLUMNS["age"],
        "a": COLUMNS["score"],
        "label": COLUMNS["label"],
    }
    dataset = write(tmp_path, columns).build()
    assert dataset.shape == (1,) and "left out: Unnamed: 0, id" in dataset.columns


@pytest.mark.parametrize("write", WRITERS)
def test_table_with_thirty_input_columns_is_read(write: Writer, tmp_path: Path) -> None:
    columns = {f"f{number}": COLUMNS["score"] for number in range(30)} | {"label": COLUMNS["label"]}
    dataset = write(tmp_path, columns).build()
    assert (
        dataset.shape == (30,) and "30 columns: f0 " in dataset.columns and "f29" in dataset.columns
    )


@pytest.mark.parametrize("write", WRITERS)
def test_table_with_only_text_becomes_tokens(write: Writer, tmp_path: Path) -> None:
    dataset = write(tmp_path, {"review": ["ab", "c"] * 6, "label": COLUMNS["label"]}).build()
    assert dataset.tokens == (257, 0) and dataset.inputs[:2].tolist() == [[98, 99], [100, 0]]


@pytest.mark.parametrize("write", WRITERS)
def test_error_of_mixed_columns_suggests_number_columns_or_text_column(
    write: Writer, tmp_path: Path
) -> None:
    columns = {
        "age": COLUMNS["age"],
        "city": ["x", "y"] * 6,
        "score": COLUMNS["score"],
        "label": COLUMNS["label"],
    }
    with pytest.raises(ValueError, match=r"city.*data\.columns=age\+score.*data\.columns=city"):
        write(tmp_path, columns).build()


def test_table_error_does_not_suggest_a_column_of_dates_as_input(tmp_path: Path) -> None:
    columns = {"age": COLUMNS["age"], "day": ["2020-01-01"] * ROWS, "label": COLUMNS["label"]}
    with pytest.raises(ValueError, match=r"day.*data\.columns=age") as error:
        write_csv(tmp_path, columns).build()
    assert "data.columns=day" not in str(error.value)


def test_error_of_large_integer_labels_suggests_data_kind_regression(tmp_path: Path) -> None:
    columns = {"age": COLUMNS["age"], "target": [1000 * row for row in range(ROWS)]}
    source = write_csv(tmp_path, columns)
    with pytest.raises(ValueError, match=r"11000.*data\.kind=regression"):
        source.build()
    assert replace(source, kind="regression").build().kind == "regression"  # type: ignore[type-var]


@pytest.mark.parametrize(
    "column", [[b"png"] * ROWS, [{"bytes": b"png", "path": None}] * ROWS], ids=["bytes", "struct"]
)
def test_error_about_several_picture_columns_mentions_key_data_image_column(
    column: list, tmp_path: Path
) -> None:
    columns = {"img": column, "age": COLUMNS["age"], "label": COLUMNS["label"]}
    with pytest.raises(ValueError, match=r"data\.image_column=img"):
        write_parquet(tmp_path, columns).build()


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("columns", "key"),
    [
        ({"a": COLUMNS["age"], "b": COLUMNS["score"]}, r"data\.label"),
        ({"label": COLUMNS["label"], "user": COLUMNS["user"]}, r"data\.columns"),
    ],
    ids=["no label", "no input"],
)
def test_error_of_missing_column_mentions_its_key(
    write: Writer, columns: dict[str, list], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=key):
        write(tmp_path, columns).build()


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("key", "value"), [("label", "nope"), ("user", "nope"), ("columns", ["nope"])]
)
def test_error_of_unknown_table_column_mentions_the_column_and_its_key(
    write: Writer, key: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"nope.*data\.{key}"):
        replace(write(tmp_path, COLUMNS), **{key: value}).build()


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", ["age", "label", "user"])
def test_error_of_empty_values_mentions_the_column(
    write: Writer, name: str, tmp_path: Path
) -> None:
    columns = COLUMNS | {
        name: [COLUMNS[name][0], "" if write is write_csv else None, *COLUMNS[name][2:]]
    }
    with pytest.raises(ValueError, match=f"column {name} "):
        write(tmp_path, columns).build()


@pytest.mark.parametrize("write", WRITERS)
def test_error_of_a_value_too_large_for_float32_mentions_the_column(
    write: Writer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"column score .*float32"):
        write(tmp_path, COLUMNS | {"score": [1e300] * ROWS}).build()


@pytest.mark.parametrize("write", WRITERS)
def test_each_user_of_a_table_becomes_a_client(write: Writer, tmp_path: Path) -> None:
    source = write(tmp_path, COLUMNS)
    assert len(federate(source, Natural(test_fraction=0.0), 0).partition) == 3
    assert len(federate(source, Natural(column="label", test_fraction=0.0), 0).partition) == 2


@pytest.mark.parametrize("write", [write_csv, write_json_lines])
def test_table_source_reads_test_samples_from_its_test_file(write: Writer, tmp_path: Path) -> None:
    write(tmp_path, {name: values[:4] for name, values in COLUMNS.items()}, "test")
    source = write(tmp_path, COLUMNS)
    assert (source.build().train_rows, len(source.build())) == (ROWS, ROWS + 4)
    write(tmp_path, {"age": [1], "label": ["no"]}, "test")
    with pytest.raises(ValueError, match="test"):
        source.build()


def test_table_takes_the_same_test_fraction_of_each_class_and_user(
    tmp_path: Path,
) -> None:
    source = replace(write_csv(tmp_path, COLUMNS), test_fraction=0.5)  # type: ignore[type-var]
    dataset = source.build()
    assert dataset.train_rows == 6
    assert np.bincount(dataset.domains[6:]).tolist() == [2, 2, 2] and np.bincount(
        dataset.labels[6:]
    ).tolist() == [3, 3]


# ---- CSV -----------------------------------------------------------------------------------------
def test_csv_source_accepts_a_single_file_as_data_root(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(csv_text(COLUMNS, ";"))
    assert Csv(str(path), delimiter=";").build().shape == (3,)
    with pytest.raises(ValueError, match=r"data\.delimiter=';'"):
        Csv(str(path)).build()


def test_csv_file_can_be_compressed(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "train.csv.gz", "wt") as file:
        file.write(csv_text(COLUMNS))
    assert Csv(str(tmp_path)).build().shape == (3,)


def test_csv_types_are_inferred_from_whole_file(tmp_path: Path) -> None:
    values = [1] * 300_000 + [0.5]  # the first megabyte holds integers alone
    (tmp_path / "train.csv").write_text(
        "\n".join(["a,label", *(f"{value},{row % 2}" for row, value in enumerate(values))])
    )
    dataset = Csv(str(tmp_path), test_fraction=0.0).build()
    assert dataset.inputs[-1, 0] == 0.5


def test_csv_source_reads_quoted_na_as_text_not_as_missing_value(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('a,label\n1,"NA"\n2,b\n3,"NA"\n4,b\n')
    assert Csv(str(tmp_path)).build().class_names == ["NA", "b"]
    (tmp_path / "train.csv").write_text("a,label\n1,NA\n2,b\n3,c\n4,b\n")
    with pytest.raises(ValueError, match="column label "):
        Csv(str(tmp_path)).build()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a,label\n",
        b"a,label\n1,2,3\n",
        b"a,a,label\n1,2,0\n",
        b"\xff\xfe\x00a",
        b'a,label\n"1,0\n',
    ],
    ids=["empty", "no rows", "long row", "name twice", "no text", "open quote"],
)
def test_error_mentions_the_unreadable_csv_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.csv"):
        Csv(str(tmp_path)).build()


@pytest.mark.parametrize("source", [Csv, JsonLines])
def test_table_needs_a_file_in_its_root(source: Any, tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=rf"data\.root={root} .*{source.endings[0]}"):
            source(str(root)).build()


@pytest.mark.parametrize(
    ("source", "option"),
    [
        (Csv, "data=csv"),
        (JsonLines, "data=jsonl"),
        (NumPy, "data=numpy"),
        (Npz, "data=npz"),
        (Parquet, "data=parquet"),
        (Leaf, "LEAF's data"),
        (Strips, "data=strips"),
        (ImageFolder, "data=image_folder"),
        (Stored, "This data set"),
    ],
)
def test_error_about_a_missing_root_mentions_the_source_and_key_data_root(
    source: Any, option: str
) -> None:
    for root in (None, ""):
        with pytest.raises(ValueError, match=rf"^{option} needs data\.root"):
            source(root=root).build()


def test_csv_rejects_two_training_files(tmp_path: Path) -> None:
    write_csv(tmp_path, COLUMNS)
    (tmp_path / "train.csv.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"data\.root"):
        Csv(str(tmp_path)).build()


@pytest.mark.parametrize(
    ("key", "value"), [("delimiter", ";;"), ("length", 0), ("test_fraction", 1.0), ("columns", [])]
)
def test_error_of_wrong_csv_setting_mentions_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"data\.{key}"):
        Csv("somewhere", **{key: value})


# ---- JSON lines ----------------------------------------------------------------------------------
def test_json_lists_become_input_vectors_or_tokens_or_several_labels(tmp_path: Path) -> None:
    vectors = write_json_lines(
        tmp_path, {"x": [[0.5, 1.0]] * 4, "y": [["a"], ["b", "a"], [], ["b"]]}
    ).build()
    assert vectors.inputs.tolist() == [[0.5, 1.0]] * 4 and vectors.kind == "multilabel"
    tokens = write_json_lines(tmp_path, {"x": [[3, 1], [2], [1], [1]], "y": [0, 1, 0, 1]}).build()
    assert tokens.tokens == (4, 0) and tokens.inputs[:2].tolist() == [[3, 1], [2, 0]]


@pytest.mark.parametrize(
    "content", ["", "[1, 2]", '{"a": 1', '{"a": 1, "label": 0}\n{"a": "b", "label": 0}']
)
def test_error_mentions_the_unreadable_json_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"train\.jsonl"):
        JsonLines(str(tmp_path)).build()


# ---- an archive for each client ------------------------------------------------------------------
def write_clients(folder: Path, split: str, sizes: list[int]) -> None:
    """Write a .npz file for each client. All inputs of a client are the client's number.

    split: the subfolder for the files, such as "train".
    sizes: the number of samples of each client.
    """
    (folder / split).mkdir(parents=True, exist_ok=True)
    for client, size in enumerate(sizes):
        x, y = np.full((size, 1, 2, 2), client, np.float32), np.arange(size) % 2
        np.savez_compressed(folder / split / f"{client}.npz", x=x, y=y)


def test_each_npz_archive_becomes_one_client(tmp_path: Path) -> None:
    write_clients(tmp_path, "train", [4] * 12)
    write_clients(tmp_path, "test", [2] * 12)
    data = federate(Npz(str(tmp_path)), Natural(test_fraction=0.0), 0)
    dataset = data.open()
    assert sorted(dataset.domain_names, key=int) == [str(client) for client in range(12)]
    assert (
        dataset.shape == (1, 2, 2)
        and len(data.central) == 24
        and data.partition.train.counts.tolist() == [4] * 12
    )
    for client in range(12):
        rows = data.partition.train.rows(client)
        assert (dataset.inputs[rows] == int(dataset.domain_names[dataset.domains[rows[0]]])).all()


def test_client_is_tested_on_its_npz_archive_in_the_folder_test(tmp_path: Path) -> None:
    write_clients(tmp_path, "train", [4, 4])
    write_clients(tmp_path, "test", [2, 2])
    data = federate(Npz(str(tmp_path)), Domain(test_fraction=None), 0)
    dataset = data.open()
    for client in range(2):
        assert (dataset.inputs[data.partition.test.rows(client)] == client).all()
        assert len(data.partition.test.rows(client)) == 2


def test_npz_source_takes_the_test_fraction_from_each_client(tmp_path: Path) -> None:
    write_clients(tmp_path, "train", [4, 0, 8])
    dataset = Npz(str(tmp_path), test_fraction=0.5).build()
    assert dataset.train_rows == 6 and np.bincount(dataset.domains[6:]).tolist() == [2, 4]


class Bomb:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("key", ["data", "x"])
def test_npz_archive_with_pickles_is_never_unpickled(key: str, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    arrays: dict[str, Any] = {"y": np.arange(2)} if key == "x" else {}
    arrays[key] = np.array([Bomb(tmp_path / "bomb")], dtype=object)
    np.savez(tmp_path / "train/0.npz", **arrays)
    with pytest.raises(ValueError, match=r"train/0\.npz .*numpy\.savez"):
        Npz(str(tmp_path)).build()
    assert not (tmp_path / "bomb").exists()


def test_errors_of_numpy_and_npz_sources_suggest_each_other(tmp_path: Path) -> None:
    write_clients(tmp_path, "train", [4])
    with pytest.raises(ValueError, match=r"data\.root=.*data=npz"):
        NumPy(str(tmp_path)).build()
    (tmp_path / "train/0.npz").unlink()
    np.savez(tmp_path / "train.npz", x=np.zeros((2, 1)), y=np.arange(2))
    with pytest.raises(ValueError, match=r"data\.root=.*data=numpy"):
        Npz(str(tmp_path)).build()
