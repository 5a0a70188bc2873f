"""Test sources of data without images, such as texts and tables.

The tests check inputs, labels and the assignment of samples to users.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from tiny import picture, write_picture

from raysim.data.corruption import Rotation
from raysim.data.federated import federate
from raysim.data.partition import IID, Dirichlet, Natural
from raysim.data.raw import Raw, Source
from raysim.data.sources import Digits, HuggingFace, Leaf, Markov, NumPy, Parquet, Tabular
from raysim.data.split_statistics import statistics
from raysim.data.text import LETTERS
from raysim.primitives.kinds import Kind


class InputsOfTest(Source):
    """A source with inputs that a test sets. The labels alternate between 0 and 1."""

    inputs: NDArray[Any]

    def read(self) -> Raw:
        return Raw(self.inputs, np.arange(len(self.inputs)) % 2, len(self.inputs) - 2, ["a", "b"])


def built(inputs: NDArray[Any], cache: Path) -> Any:
    source = InputsOfTest(cache=str(cache))
    object.__setattr__(source, "inputs", inputs)
    return source.build()


# ---- stored inputs -------------------------------------------------------------------------------
def test_source_stores_tokens_and_numbers_unchanged(tmp_path: Path) -> None:
    tokens = np.full((4, 3), 4253)
    data = built(tokens, tmp_path / "tokens")
    assert data.inputs.dtype == np.int64 and np.array_equal(data.inputs, tokens)
    assert data.tokens == (4254, 0) and not data.is_images
    numbers = np.full((4, 2, 2), 0.57)
    data = built(numbers, tmp_path / "numbers")
    assert data.inputs.dtype == np.float32 and np.array_equal(
        data.inputs, numbers.astype(np.float32)
    )
    assert data.shape == (2, 2) and data.tokens is None
    assert built(np.full((4, 1, 2, 2), 200, np.uint8), tmp_path / "images").is_images


@pytest.mark.parametrize(
    ("inputs", "value"),
    [
        (np.full((4, 2), np.nan), "nan or infinite"),
        (
            np.full((4, 2), -3),
            "token -3",
        ),
        (np.full((4, 2), 1j), "complex128"),
        (
            np.full((4, 2), "a"),
            "<U1.*data=csv",
        ),
    ],
)
def test_source_rejects_unreadable_inputs(inputs: NDArray[Any], value: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"InputsOfTest.*{value}"):
        built(inputs, tmp_path)


def test_image_settings_are_rejected_for_data_that_are_not_images() -> None:
    with pytest.raises(ValueError, match=r"data\.augment=\['flip'\]"):
        federate(Tabular("wine", augment=["flip"]), IID(clients=3), 0)
    with pytest.raises(ValueError, match=r"data\.rotation\.per=client"):
        federate(Markov(rotation=Rotation("client")), Natural(), 0)


# ---- tables --------------------------------------------------------------------------------------
def test_tabular_inputs_are_standardised_by_mean_and_std_of_training_rows() -> None:
    wine, diabetes = Tabular("wine").build(), Tabular("diabetes").build()
    assert wine.shape == (13,) and wine.class_names == ["class_0", "class_1", "class_2"]
    for values in (wine.inputs, diabetes.inputs, diabetes.labels):
        train = values[: wine.train_rows if values is wine.inputs else diabetes.train_rows].astype(
            np.float64
        )
        assert np.allclose(train.mean(axis=0), 0, atol=1e-5) and np.allclose(
            train.std(axis=0), 1, atol=1e-5
        )
    assert diabetes.kind == "regression" and diabetes.labels.shape == (442, 1)


def test_data_without_classes_cannot_be_split_by_class() -> None:
    source = Tabular("diabetes")
    split: Any = statistics(federate(source, IID(clients=4), 0))
    assert split["clients"] == 4 and split["pooled_entropy"] == 0
    alike = {
        "label_entropy": 0,
        "label_entropy_std": 0,
        "largest_share": 1,
        "effective_classes": 1,
        "divergence": 0,
    }
    assert (
        alike.items() <= split["heterogeneity"].items()
        and split["heterogeneity"]["size_variation"] < 0.02
    )
    with pytest.raises(ValueError, match=r"^partition: .*partition=iid"):
        federate(source, Dirichlet(clients=4, alpha=1.0), 0)
    with pytest.raises(ValueError) as error:  # its labels are no whole numbers
        federate(source, Dirichlet(clients=4, alpha=1.0), 0)
    assert "data.kind" not in str(error.value)
    with pytest.raises(ValueError, match=r"data\.label_noise=0\.1"):
        federate(Tabular("diabetes", label_noise=0.1), IID(clients=4), 0)


def saved(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "train.npz", **arrays)
    return str(folder)


@pytest.mark.parametrize(
    ("labels", "kind", "outputs"),
    [
        (np.arange(10) % 3, "classification", ["0", "1", "2"]),
        (np.array(["no", "yes"] * 5), "classification", ["no", "yes"]),
        (np.linspace(0, 1, 10), "regression", ["value"]),
        (np.eye(10, 4), "regression", ["0", "1", "2", "3"]),
        (np.eye(10, 4).astype(int), "multilabel", ["0", "1", "2", "3"]),
    ],
)
def test_numpy_source_infers_task_and_class_names_from_the_labels(
    labels: Any, kind: str, outputs: list[str], tmp_path: Path
) -> None:
    data = NumPy(saved(tmp_path, x=np.zeros((10, 2)), y=labels)).build()
    assert (data.kind, data.class_names, len(data)) == (kind, outputs, 10)
    if kind != "classification":
        assert sorted(map(tuple, data.labels)) == sorted(
            map(tuple, labels.reshape(10, -1).astype(np.float32))
        )


def test_numpy_rejects_missing_and_mismatched_arrays(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.npz .*x 3, y 2"):
        NumPy(saved(tmp_path, x=np.zeros((3, 2)), y=np.zeros(2, int))).build()
    with pytest.raises(ValueError, match=r"train\.npz .*array y"):
        NumPy(saved(tmp_path, x=np.zeros((3, 2)))).build()
    with pytest.raises(ValueError, match=r"shape \[3, 2, 2\].*data\.kind=positions"):
        y = np.full((3, 2, 2), 2)
        NumPy(saved(tmp_path, x=np.zeros((3, 2)), y=y), kind="multilabel").build()
    np.savez(tmp_path / "test.npz", x=np.zeros((3, 2)), y=np.zeros(3))
    with pytest.raises(
        ValueError,
        match=r"y of train\.npz .*int64.*test\.npz .*float64",
    ):
        NumPy(saved(tmp_path, x=np.zeros((3, 2)), y=np.arange(3))).build()
    with pytest.raises(ValueError, match=r"x of train\.npz .*uint8.*test\.npz .*float64"):
        NumPy(saved(tmp_path, x=np.zeros((3, 2), np.uint8), y=np.zeros(3))).build()
    with pytest.raises(ValueError, match=r"data\.root=.*none"):
        NumPy(str(tmp_path / "none")).build()


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to(path.name), os.mkfifo], ids=["link", "pipe"]
)
def test_numpy_rejects_unreadable_test_file(make: Any, tmp_path: Path) -> None:
    source = NumPy(saved(tmp_path, x=np.zeros((4, 2)), y=np.arange(4) % 2))
    make(tmp_path / "test.npz")
    with pytest.raises(ValueError, match=r"test\.npz"):
        source.build()


# ---- users as clients ----------------------------------------------------------------------------
def test_natural_partition_makes_a_client_of_each_user(tmp_path: Path) -> None:
    users = [7, 3, 7, 3, 3, 9]
    table = pa.table({"a": np.arange(6.0), "b": [1] * 6, "label": [0, 1] * 3, "user_id": users})
    pq.write_table(table, tmp_path / "train.parquet")
    source = Parquet(str(tmp_path), columns=["a", "b"], test_fraction=0.0)
    data = federate(source, Natural(column="user_id", test_fraction=0.0), 0)
    dataset = data.open()
    inputs = [
        sorted(dataset.inputs[data.partition.train.rows(client), 0].tolist()) for client in range(2)
    ]
    assert inputs == [[1.0, 3.0, 4.0], [0.0, 2.0]]  # users 3 and 7; 9 has too few
    assert len(data.partition) == 2 and dataset.domain_names == ["3", "7", "9"]
    with pytest.raises(
        ValueError, match=r"train\.parquet .*who.* a, b, label, user_id.*partition\.column"
    ):
        federate(source, Natural(column="who"), 0)
    with pytest.raises(
        ValueError,
        match=r"partition\.column=user_id .*Digits",
    ):
        federate(Digits(), Natural(column="user_id"), 0)
    with pytest.raises(ValueError, match=r"partition\.clients=3 .*partition\.minimum=2"):
        federate(source, Natural(column="user_id", clients=3), 0)


# ---- sequences -----------------------------------------------------------------------------------
def test_text_and_lists_in_parquet_columns_become_tokens(tmp_path: Path) -> None:
    ids = [[5, 6, 7, 8], [9], []]
    table = pa.table({"text": ["ab", "c", "é"], "ids": ids, "label": [0, 1, 0]})
    pq.write_table(table, tmp_path / "train.parquet")
    text = Parquet(str(tmp_path), columns=["text"], test_fraction=0.0).build()
    assert text.inputs.tolist() == [[98, 99], [100, 0], [0xC3 + 1, 0xA9 + 1]] and text.tokens == (
        257,
        0,
    )
    ids = Parquet(str(tmp_path), columns=["ids"], length=3, padding=1, test_fraction=0.0).build()
    assert ids.inputs.tolist() == [[5, 6, 7], [9, 1, 1], [1, 1, 1]] and ids.tokens == (10, 1)


@pytest.mark.parametrize("kind", [None, "causal"])
def test_user_column_is_found_if_only_input_columns_are_set(
    tmp_path: Path, kind: Kind | None
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["ab", "c", "d"], "user": ["x", "y", "x"], "label": [0, 1, 0]}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    root = str(tmp_path)
    sources = [
        Parquet(root, columns=["text"], kind=kind, test_fraction=0.0),
        HuggingFace(f"{root}/set", columns=["text"], kind=kind, test_fraction=0.0),
    ]
    assert [source.read().domain_names for source in sources] == [["x", "y"], ["x", "y"]]
    of_users = Parquet(root, columns=["user"], kind=kind, test_fraction=0.0).read()
    assert "x" not in of_users.domain_names


def test_error_of_text_without_labels_suggests_data_kind_causal(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["ab", "c"]}), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"data\.label .*data\.kind=causal"):
        Parquet(str(tmp_path), test_fraction=0.0).build()


@pytest.mark.parametrize("token", [10**15, 2**63 - 1, 2**64 - 1])
def test_parquet_rejects_a_token_number_that_is_too_large(token: int, tmp_path: Path) -> None:
    ids = pa.array([[1, 2], [token]], pa.list_(pa.uint64() if token >= 2**63 else pa.int64()))
    pq.write_table(pa.table({"ids": ids, "label": [0, 1]}), tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=rf"{tmp_path}: column ids .*{token}"):
        Parquet(str(tmp_path), columns=["ids"], test_fraction=0.0).build()


@pytest.mark.parametrize("row", [[None], [1, None], [0.5, None]])
def test_parquet_rejects_lists_with_empty_values(row: list, tmp_path: Path) -> None:
    pq.write_table(pa.table({"ids": [row, row], "label": [0, 1]}), tmp_path / "train.parquet")
    with pytest.raises(
        ValueError,
        match=rf"{tmp_path}: column ids ",
    ):
        Parquet(str(tmp_path), columns=["ids"], test_fraction=0.0).build()


def test_parquet_reads_lists_as_several_labels_of_a_sample(tmp_path: Path) -> None:
    table = pa.table({"x": [0.0, 1.0, 2.0], "label": [["b", "a"], [], ["c"]]})
    pq.write_table(table, tmp_path / "train.parquet")
    data = Parquet(str(tmp_path), columns=["x"], test_fraction=0.0).build()
    assert data.class_names == ["a", "b", "c"] and data.labels.tolist() == [
        [1, 1, 0],
        [0, 0, 0],
        [0, 0, 1],
    ]


def write_leaf(folder: Path) -> str:
    """Write a set with two users in the format of LEAF's Shakespeare data; return the folder."""
    roles = {"ROMEO": ("But, soft! ", "w"), "JULIET": ("O Romeo, Ro", "m")}
    for split, count in (("train", 5), ("test", 2)):
        (folder / split).mkdir(parents=True)
        data = {role: {"x": [x] * count, "y": [y] * count} for role, (x, y) in roles.items()}
        content = {"users": [*roles], "num_samples": [count] * 2, "user_data": data}
        (folder / split / f"all_data_{split}_9.json").write_text(json.dumps(content))
    return str(folder)


def test_leaf_source_reads_the_shakespeare_data_set(tmp_path: Path) -> None:
    data = federate(Leaf(write_leaf(tmp_path)), Natural(test_fraction=0.0), 0)
    dataset = data.open()
    assert (
        dataset.class_names == list(LETTERS)
        and len(LETTERS) == 80
        and dataset.domain_names == ["JULIET", "ROMEO"]
    )
    assert data.partition.train.counts.tolist() == [5, 5] and len(data.central) == 4
    row = data.partition.train.rows(1)[0]
    assert "".join(LETTERS[token - 1] for token in dataset.inputs[row]) == "But, soft! "
    assert LETTERS[dataset.labels[row]] == "w"
    (tmp_path / "train" / "b.json").write_text('{"user_data": {"A": {"x": ["a"], "y": []}}}')
    with pytest.raises(ValueError, match=r"b\.json .*A has 1 inputs and 0 labels"):
        Leaf(str(tmp_path)).build()


@pytest.mark.parametrize(
    "make", [lambda path: path.symlink_to(path.name), os.mkfifo], ids=["link", "pipe"]
)
def test_leaf_rejects_unreadable_file(make: Any, tmp_path: Path) -> None:
    path = Path(write_leaf(tmp_path), "train/all_data_train_9.json")
    path.unlink()
    make(path)
    with pytest.raises((ValueError, OSError), match=r"all_data_train_9\.json"):
        Leaf(str(tmp_path)).build()


def test_leaf_reads_numeric_inputs(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    data = {"f0": {"x": [[0.5] * 4] * 3, "y": [1, 0, 1]}}
    (tmp_path / "train" / "a.json").write_text(json.dumps({"user_data": data}))
    dataset = Leaf(str(tmp_path), shape=[1, 2, 2]).build()
    assert (
        dataset.shape == (1, 2, 2)
        and dataset.inputs.dtype == np.float32
        and dataset.labels.tolist() == [1, 0, 1]
    )


def write_users(folder: Path, x: Any, y: Any) -> Path:
    """Write training and test files in LEAF's format into a folder; return the folder.

    Each file has the users "a" and "b", with four samples each.

    x(user, index), y(index): input and label of a sample; the index is 0 to 3.
    """
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        users = {
            user: {"x": [x(user, row) for row in range(4)], "y": [y(row) for row in range(4)]}
            for user in ("a", "b")
        }
        content = {"users": [*users], "num_samples": [4, 4], "user_data": users}
        (folder / split / "all_data.json").write_text(json.dumps(content))
    return folder


def test_leaf_reads_pictures_from_the_folder_in_the_setting_data_images(tmp_path: Path) -> None:
    pictures = {f"{user}{row}.png": picture(4, 4, 3) for user in "ab" for row in range(4)}
    for name, pixels in pictures.items():
        write_picture(tmp_path / "celeba" / name, pixels)
    root = write_users(
        tmp_path / "leaf", lambda user, row: f"{user}{row}.png", lambda row: float(row % 2)
    )
    dataset = Leaf(str(root), images=str(tmp_path / "celeba")).build()
    assert dataset.is_images and dataset.shape == (3, 4, 4) and dataset.class_names == ["0", "1"]
    assert np.array_equal(dataset.inputs[0].transpose(1, 2, 0), pictures["a0.png"])
    assert Leaf(str(root), images=str(tmp_path / "celeba"), size=2).build().shape == (3, 2, 2)
    with pytest.raises(ValueError, match=r"data\.images"):
        Leaf(str(root)).build()
    with pytest.raises(ValueError, match=r"data\.images=.*a0\.png"):
        Leaf(str(root), images=str(tmp_path)).build()


def test_leaf_reads_text_at_the_list_index_given_by_the_setting_data_field(tmp_path: Path) -> None:
    root = write_users(
        tmp_path, lambda user, row: ["14", "Mon", user, "I am happy", row], lambda row: row % 2
    )
    dataset = Leaf(str(root), field=3).build()
    assert dataset.shape == (10,) and dataset.kind == "classification"
    assert "".join(LETTERS[token - 1] for token in dataset.inputs[0]) == "I am happy"
    with pytest.raises(ValueError, match=r"data\.field=3"):
        Leaf(str(root)).build()
    for field in (4, 5):  # a number, and none
        with pytest.raises(ValueError, match=rf"data\.field={field}"):
            Leaf(str(root), field=field).build()


@pytest.mark.parametrize(
    ("x", "y", "settings", "place"),
    [
        (lambda _, row: [["<BOS>", "a"], ["b", "<EOS>"]], lambda row: row % 2, {}, "inputs x"),
        (lambda _, row: [0.5], lambda row: {"tokens": [row]}, {}, "labels y"),
        (lambda _, row: [0.5], lambda row: None if row else 1, {}, "labels y"),
        (lambda _, row: [0.5], lambda row: "a" if row else 1, {}, "labels y"),
        (lambda _, row: "text" if row else [0.5], lambda row: row % 2, {}, "inputs x"),
        (lambda _, row: [0.5] * (row + 1), lambda row: row % 2, {}, "inputs x"),
        (lambda _, row: [0.5, None], lambda row: row % 2, {}, "inputs x"),
        (lambda _, row: [1e300], lambda row: row % 2, {}, "inputs x .*float32"),
        (
            lambda _, row: [0.5] * 4,
            lambda row: row % 2,
            {"shape": [1, 3, 3]},
            r"data\.shape=.* 4 numbers",
        ),
        (lambda _, row: [0.5] * 4, lambda row: row % 2, {"images": "somewhere"}, r"data\.images"),
        (lambda _, row: [0.5] * 4, lambda row: row % 2, {"field": 0}, r"data\.field=0"),
        (lambda _, row: [0.5] * 4, lambda row: row % 2, {"field": -1}, r"data\.field=-1"),
    ],
)
def test_leaf_rejects_inputs_and_labels_that_it_cannot_read(
    x: Any, y: Any, settings: dict[str, Any], place: str, tmp_path: Path
) -> None:
    root = write_users(tmp_path, x, y)
    with pytest.raises(ValueError, match=place):
        Leaf(str(root), **settings).build()


def test_markov_label_is_the_next_token_in_the_markov_chain_of_its_user() -> None:
    source = Markov(users=3, samples=400, test_samples=0, vocabulary=4, skew=1.0, shortest=16)
    data = federate(source, Natural(test_fraction=0.0), 0)
    dataset = data.open()
    assert len(data.partition) == 3 and dataset.inputs.min() == 1 and dataset.tokens == (5, 0)
    transitions = []
    for client in range(3):
        rows = data.partition.train.rows(client)
        counts = np.zeros((4, 4))
        np.add.at(counts, (dataset.inputs[rows, -1] - 1, dataset.labels[rows]), 1)
        inside = np.zeros((4, 4))
        np.add.at(
            inside, (dataset.inputs[rows, :-1].ravel() - 1, dataset.inputs[rows, 1:].ravel() - 1), 1
        )
        transitions.append(inside / inside.sum(1, keepdims=True).clip(1))
        seen = counts.sum(1) >= 50
        assert (
            np.abs(counts[seen] / counts[seen].sum(1, keepdims=True) - transitions[-1][seen]).max()
            < 0.15
        )
    assert np.abs(transitions[0] - transitions[1]).max() > 0.3  # every user has its own chain


def test_markov_source_uses_the_number_of_the_chain_as_label_if_requested() -> None:
    dataset = Markov(users=4, label="chain", chains=2, skew=1.0).build()
    users = dataset.domains
    assert np.array_equal(
        dataset.labels, users % 2
    )  # with skew=1 a user has its favourite chain alone
    lengths = (dataset.inputs != 0).sum(1)
    assert (lengths.min(), lengths.max()) == (8, 16)
    assert all(
        (row[:length] > 0).all() for row, length in zip(dataset.inputs, lengths, strict=True)
    )


# ---- Hugging Face --------------------------------------------------------------------------------
def test_hugging_face_source_reads_a_saved_data_set_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["bad", "good"]),
            "user": datasets.Value("string"),
        }
    )
    rows = {"text": ["a", "bb", "c", "d"], "label": [0, 1, 1, 0], "user": ["u", "v", "u", "v"]}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=made, test=made.select([0])).save_to_disk(str(tmp_path / "set"))
    source = HuggingFace(str(tmp_path / "set"), columns=["text"])
    data = federate(source, Natural(column="user", test_fraction=0.0), 0)
    dataset = data.open()
    assert dataset.class_names == ["bad", "good"] and dataset.domain_names == ["u", "v"]
    assert (
        dataset.inputs.tolist() == [[98, 0], [99, 99], [100, 0], [101, 0], [98, 0]]
        and len(data.central) == 1
    )
    with pytest.raises(ValueError, match=r"who.*partition\.column.* text, label, user"):
        federate(source, Natural(column="who"), 0)
    with pytest.raises(ValueError, match=r"has no column domain\. Set partition\.column"):
        federate(source, Natural(column="domain"), 0)
    with pytest.raises(ValueError, match=r"data\.root=.*nowhere"):
        HuggingFace(str(tmp_path / "nowhere")).build()


@pytest.mark.parametrize("columns", [None, ["title", "text"]])
def test_error_of_several_text_columns_suggests_the_setting_data_columns(
    columns: list[str] | None, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"title": ["a", "b"], "text": ["c", "d"], "stars": [1, 2], "label": [0, 1]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    source = HuggingFace(str(tmp_path / "set"), columns=columns)
    with pytest.raises(ValueError, match=r"title.*text.*data\.columns=title"):
        source.build()


def test_hugging_face_source_requires_data_root_or_data_name() -> None:
    with pytest.raises(ValueError, match=r"^data=huggingface needs data\.root.*data\.name"):
        HuggingFace().build()


def test_hugging_face_reads_images(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    pictures = [Image.fromarray(np.full((4, 4), level, np.uint8)) for level in (10, 20, 30, 40, 50)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    made = datasets.Dataset.from_dict(
        {"image": pictures, "label": [0, 0, 0, 0, 0]}, features=features
    )
    made.save_to_disk(str(tmp_path / "set"))
    dataset = HuggingFace(str(tmp_path / "set"), size=2).build()
    assert (
        dataset.is_images
        and dataset.inputs[:, 0, 0, 0].tolist() == [10, 20, 30, 40, 50]
        and dataset.train_rows == 4
    )


def test_hugging_face_error_mentions_the_missing_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError,
        match=r"data=huggingface .*\[huggingface\]",
    ):
        HuggingFace(str(tmp_path)).build()
