"""Test Parquet files and folders of pictures, also for data sets that raysim knows by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tiny import encoded, picture, write_parquet, write_picture, write_strips

from raysim.data.sources import ImageFolder, Parquet, Stored


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- Parquet -------------------------------------------------------------------------------------
@pytest.mark.parametrize("struct", [True, False])
def test_parquet_source_reads_every_pixel_unchanged(struct: bool, tmp_path: Path) -> None:
    pixels = [picture() for _ in range(5)]
    names = {"class_names": json.dumps(["cat", "dog", "cow"])}
    write_parquet(tmp_path / "train.parquet", pixels[:3], [0, 1, 0], struct, metadata=names)
    write_parquet(tmp_path / "test.parquet", pixels[3:], [1, 1], struct, metadata=names)
    built = Parquet(root=str(tmp_path)).build()
    assert np.array_equal(built.inputs[:, 0], np.stack(pixels)) and built.labels.tolist() == [
        0,
        1,
        0,
        1,
        1,
    ]
    assert built.train_rows == 3 and built.class_names == ["cat", "dog", "cow"]
    assert built.domain_names == [tmp_path.name]


def test_parquet_folders_become_domains_whose_images_are_resized_to_one_size(
    tmp_path: Path,
) -> None:
    for name, size, channels in (("usps", 4, 1), ("photo", 6, 3)):
        for split in ("train", "test"):
            pixels = [picture(size, size, channels) for _ in range(2)]
            write_parquet(tmp_path / name / f"{split}.parquet", pixels, [0, 1])
    with pytest.raises(
        ValueError,
        match=r"usps/train.parquet, row 0 .*\(1, 4, 4\).*\(3, 6, 6\).*data\.size",
    ):
        Parquet(root=str(tmp_path)).build()
    built = Parquet(root=str(tmp_path), size=5, channels=3).build()
    assert built.shape == (3, 5, 5) and built.domain_names == ["photo", "usps"]
    assert built.domains.tolist() == [0, 0, 1, 1, 0, 0, 1, 1] and built.train_rows == 4
    grey = built.inputs[built.domains == 1]
    assert (grey == grey[:, :1]).all()
    from_list = Parquet(
        root=[str(tmp_path / "usps"), str(tmp_path / "photo")], size=5, channels=3
    ).build()
    assert sorted(from_list.domain_names) == built.domain_names


def test_parquet_joins_files_and_reads_text_labels_and_text_domains(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", [picture()], ["dog"], domain=["b"])
    write_parquet(tmp_path / "train-1.parquet", [picture()], ["cat"], domain=["a"])
    write_parquet(tmp_path / "test-0.parquet", [picture()], ["cat"], domain=["b"])
    built = Parquet(root=str(tmp_path)).build()
    assert built.class_names == ["cat", "dog"] and built.labels.tolist() == [1, 0, 0]
    assert built.domain_names == ["a", "b"] and built.domains.tolist() == [1, 0, 1]


def test_parquet_uses_hugging_face_class_names(tmp_path: Path) -> None:
    info = {
        "info": {"features": {"kind": {"names": ["no", "yes", "maybe"], "_type": "ClassLabel"}}}
    }
    for split in ("train", "test"):
        write_parquet(
            tmp_path / f"{split}.parquet",
            [picture()],
            [0],
            kind=[1],
            metadata={"huggingface": json.dumps(info)},
        )
    built = Parquet(root=str(tmp_path), label_column="kind").build()
    assert built.class_names == ["no", "yes", "maybe"] and built.labels.tolist() == [1, 1]


def test_parquet_error_mentions_the_setting_or_the_file_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data=parquet needs data\.root"):
        Parquet().build()
    with pytest.raises(ValueError, match=rf"data.root={tmp_path / 'none'} .*train.parquet"):
        Parquet(root=str(tmp_path / "none")).build()
    write_parquet(tmp_path / "train.parquet", [picture()], [0])
    with pytest.raises(ValueError, match=rf"data.root={tmp_path} .*test.parquet"):
        Parquet(root=str(tmp_path)).build()
    write_parquet(tmp_path / "test.parquet", [picture()], [-1])
    with pytest.raises(ValueError, match=r"column y\b.*data\.label_column.* image, label"):
        Parquet(root=str(tmp_path), label_column="y").build()
    with pytest.raises(ValueError, match=r"label -1.* 0 to 0"):
        Parquet(root=str(tmp_path)).build()
    (tmp_path / "test.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'test.parquet'}"):
        Parquet(root=str(tmp_path)).build()


@pytest.mark.parametrize("label", [10**6, 10**12, 2**63 - 1])
def test_parquet_rejects_a_class_label_greater_than_the_number_of_rows(
    label: int, tmp_path: Path
) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [picture(), picture()], [0, label])
    with pytest.raises(
        ValueError,
        match=rf"label {label}, .* 4 .*data\.kind=regression",
    ):
        Parquet(root=str(tmp_path)).build()


def test_error_mentions_a_label_that_is_the_largest_unsigned_integer(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(
            tmp_path / f"{split}.parquet", [picture()], pa.array([2**64 - 1], pa.uint64())
        )
    with pytest.raises(ValueError, match=rf"label {2**64 - 1}"):
        Parquet(root=str(tmp_path)).build()


NOT_LABELS = [(date(2020, 1, 1), "date32"), (b"\xff", "binary")]
NOT_DOMAINS = [*NOT_LABELS, ({"a": 1}, "struct<"), ([1, 2], "list<"), (1.5, "double")]


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [("label", *case) for case in NOT_LABELS] + [("domain", *case) for case in NOT_DOMAINS],
)
def test_parquet_rejects_label_and_domain_columns_of_wrong_types(
    column: str, value: object, kind: str, tmp_path: Path
) -> None:
    for split in ("train", "test"):
        columns = {"label": [0], "domain": ["a"]} | {column: [value]}
        write_parquet(tmp_path / f"{split}.parquet", [picture()], columns.pop("label"), **columns)
    with pytest.raises(ValueError, match=rf"train.parquet: column {column} holds {kind}"):
        Parquet(root=str(tmp_path)).build()


def test_parquet_rejects_labels_of_different_types_in_two_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [picture(), picture()], ["0", "1"])
    write_parquet(tmp_path / "test.parquet", [picture()], [1])
    with pytest.raises(
        ValueError, match=r"test.parquet: column label .*int64.*train.parquet .*string"
    ):
        Parquet(root=str(tmp_path)).build()


@pytest.mark.parametrize(
    "metadata",
    [
        {"class_names": "[1"},
        {"class_names": "3"},
        {"class_names": "[1, 2]"},
        {"class_names": '["a", "a"]'},
        {"class_names": b"\xff"},
        {"class_names": "[" * 100_000},
        {"huggingface": "[]"},
        {"huggingface": '{"info": null}'},
        {"huggingface": '{"info": {"features": {"label": {"names": 7}}}}'},
    ],
)
def test_parquet_class_names_must_be_a_list_of_names(metadata: dict, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [picture()], [0], metadata=metadata)
    with pytest.raises(ValueError, match=r"train.parquet: its class names"):
        Parquet(root=str(tmp_path)).build()


@pytest.mark.parametrize(
    "column", [pa.array([3]), pa.array([[1]]), pa.array(["x"]), pa.array([{"path": "a.png"}])]
)
def test_error_mentions_the_parquet_column_that_has_no_pictures(
    column: pa.Array, tmp_path: Path
) -> None:
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": column, "label": [0]}), tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=r"train.parquet: column image .*data\.image_column"):
        Parquet(root=str(tmp_path)).build()


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train-0.parquet")
    with pytest.raises(ValueError, match=r"train-0.parquet "):
        Parquet(root=str(tmp_path)).build()
    write_picture(tmp_path / "folder/a/1.png", picture())
    for make in (
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
    ):
        make(fifo := tmp_path / "folder/a/2.png")
        with pytest.raises(ValueError, match=rf"{fifo} "):
            ImageFolder(root=str(tmp_path / "folder")).build()
        fifo.unlink()


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.mkdir()]
)
@pytest.mark.parametrize("name", ["split.csv", "test.parquet"])
def test_data_are_rejected_if_split_csv_or_test_parquet_is_no_regular_file(
    name: str, make: Any, tmp_path: Path
) -> None:
    for number in range(2):
        write_picture(tmp_path / f"a/{number}.png", picture())
    write_parquet(tmp_path / "train.parquet", [picture(), picture()], [0, 1])
    make(tmp_path / name)
    source = (
        ImageFolder(str(tmp_path))
        if name == "split.csv"
        else Parquet(str(tmp_path), test_fraction=0.5)
    )
    with pytest.raises(
        ValueError,
        match=rf"^{tmp_path / name} ",
    ):
        source.build()


def test_image_folder_ignores_links_that_form_a_loop(tmp_path: Path) -> None:
    write_picture(tmp_path / "a/1.png", picture())
    write_picture(tmp_path / "a/2.png", picture())
    (tmp_path / "a/b").symlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to(tmp_path / "c")
    assert len(ImageFolder(root=str(tmp_path), test_fraction=0.5).build()) == 2


def test_image_folder_rejects_malformed_split_file(tmp_path: Path) -> None:
    write_picture(tmp_path / "a/1.png", picture())
    for content in (
        b"path,domain,class,split\n\xff\xfe,a,x,test\n",
        b"path,domain,class,split\n\0,a,x,test\n",
    ):
        (tmp_path / "split.csv").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{tmp_path / 'split.csv'}"):
            ImageFolder(root=str(tmp_path)).build()
    (tmp_path / "split.csv").write_text("path,domain,class,split\na/1.png\n")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'split.csv'}"):
        ImageFolder(root=str(tmp_path)).build()


def test_error_of_broken_picture_in_parquet_mentions_its_row(tmp_path: Path) -> None:
    for split in ("train", "test"):
        table = pa.table({"image": [encoded(picture()), b"no picture"], "label": [0, 1]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'train.parquet'}, row 1 "):
        Parquet(root=str(tmp_path)).build()


def test_parquet_takes_the_test_fraction_from_each_class_and_domain(
    tmp_path: Path,
) -> None:
    pixels = [picture() for _ in range(16)]
    labels, domains = [0, 1] * 8, ["b"] * 8 + ["a"] * 8
    write_parquet(tmp_path / "train-0.parquet", pixels[:6], labels[:6], domain=domains[:6])
    write_parquet(tmp_path / "train-1.parquet", pixels[6:], labels[6:], domain=domains[6:])
    with pytest.raises(ValueError, match=r"test.parquet.*data\.test_fraction"):
        Parquet(root=str(tmp_path)).build()
    built = Parquet(root=str(tmp_path), test_fraction=0.25).build()
    assert built.train_rows == 12 and built.domain_names == ["a", "b"]
    assert np.bincount(built.domains[12:] * 2 + built.labels[12:]).tolist() == [1, 1, 1, 1]
    stored = {
        one.tobytes(): (label, domain)
        for one, label, domain in zip(pixels, labels, domains, strict=True)
    }
    for image, label, domain in zip(built.inputs, built.labels, built.domains, strict=True):
        assert stored.pop(image.tobytes()) == (label, built.domain_names[domain])
    assert not stored, "every image is there once"


def test_parquet_test_file_replaces_the_test_fraction(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [picture() for _ in range(4)], [0, 1, 0, 1])
    write_parquet(tmp_path / "test.parquet", [picture()], [1])
    built = Parquet(root=str(tmp_path), test_fraction=0.5).build()
    assert (built.train_rows, len(built)) == (4, 5)


def test_parquet_domain_that_has_only_test_samples_is_listed_last(tmp_path: Path) -> None:
    hospitals = tmp_path / "hospitals"
    write_parquet(hospitals / "train.parquet", [picture(), picture()], [0, 1], domain=["x", "y"])
    write_parquet(hospitals / "test.parquet", [picture()], [0])
    built = Parquet(root=str(hospitals)).build()
    assert built.domain_names == ["x", "y", "hospitals"] and built.domains.tolist() == [0, 1, 2]


# ---- labels in lists -----------------------------------------------------------------------------
def write_labels(
    folder: Path, train: object, test: object = None, names: list[str] | None = None
) -> Parquet:
    """Write two Parquet files with an input "x" and a label; return a source that reads them.

    train, test: the labels; None for `test` repeats the training labels.
    names: the class names in the files' metadata; None for no names.
    """
    for split, labels in (("train", train), ("test", train if test is None else test)):
        table = pa.table({"x": np.arange(float(len(labels))), "label": labels})
        metadata = {"class_names": json.dumps(names)} if names else None
        pq.write_table(table.replace_schema_metadata(metadata), folder / f"{split}.parquet")
    return Parquet(root=str(folder), columns=["x"])


SETS = [[0], [1]] * 3
INTS, FLOATS, TEXTS = [0, 1], [0.0, 1.0], ["a", "b"]


@pytest.mark.parametrize("label", [6, 10**6, 10**12, 2**63 - 1])
def test_label_number_in_a_list_is_rejected_if_classes_would_outnumber_samples(
    label: int, tmp_path: Path
) -> None:
    source = write_labels(tmp_path, SETS[:3], [*SETS[:2], [1, label]])
    with pytest.raises(
        ValueError,
        match=rf"label {label}, .* 6 .*data\.kind=regression",
    ):
        source.build()


@pytest.mark.parametrize(
    ("labels", "names", "value"),
    [
        ([[0], [1], [-1]], None, r"label -1.* 0 to 1"),
        ([[0], [1], [-100]], None, r"label -100.* 0 to 1"),
        ([[0], [7], [1]], ["a", "b"], r"label 7.* 0 to 1"),
        ([[0], [1], [-1]], ["a", "b"], r"label -1.* 0 to 1"),
        ([["a"], ["z"]], ["a", "b"], r"label z.* a, b"),
        (
            [[0], [None]],
            None,
            r"train.parquet: column label ",
        ),
        (
            [["a"], [None]],
            None,
            r"train.parquet: column label ",
        ),
        (
            [[[0]], [[1]]],
            None,
            r"train.parquet: column label holds list<.*list<",
        ),
        (
            [[{"a": 1}]],
            None,
            r"train.parquet: column label holds list<.*struct<",
        ),
        (
            [[b"a"], [b"b"]],
            None,
            r"train.parquet: column label holds list<.*binary>",
        ),
        (
            [[date(2020, 1, 1)]],
            None,
            r"train.parquet: column label holds list<.*date32.*>",
        ),
        (
            [[0.5], [1.0]],
            None,
            r"label 0.5 in a list.*data\.kind=regression",
        ),
        (
            [[True], [False]],
            None,
            r"label True in a list",
        ),
    ],
)
def test_error_of_a_list_of_labels_mentions_the_wrong_value(
    labels: list, names: list[str] | None, value: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=value):
        write_labels(tmp_path, labels, names=names).build()


@pytest.mark.parametrize(
    ("train", "test", "kinds"),
    [
        (SETS, [["a"], ["b"]], r"list<.*: string>, but .*train.parquet holds list<.*: int64>"),
        ([["a"], ["b"]], SETS, r"list<.*: int64>, but .*train.parquet holds list<.*: string>"),
        (SETS, INTS, r"int64, but .*train.parquet holds list<.*: int64>"),
        (INTS, SETS, r"list<.*: int64>, but .*train.parquet holds int64"),
        (TEXTS, [["a"]], r"list<.*: string>, but .*train.parquet holds string"),
        (
            INTS,
            FLOATS,
            r"double, but .*train.parquet holds int64.*data\.kind=regression",
        ),
        (
            FLOATS,
            INTS,
            r"int64, but .*train.parquet holds double.*data\.kind=regression",
        ),
        (SETS, [[0.5]], r"list<.*: double>, but .*train.parquet holds list<.*: int64>"),
    ],
)
def test_error_mentions_label_types_that_differ_between_files(
    train: list, test: list, kinds: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"test.parquet: column label holds {kinds}"):
        write_labels(tmp_path, train, test).build()


@pytest.mark.parametrize(
    "other", [pa.list_(pa.int64(), 1), pa.large_list(pa.uint64()), pa.list_(pa.int8())]
)
def test_several_labels_per_sample_can_be_stored_in_any_arrow_list_type(
    other: pa.DataType, tmp_path: Path
) -> None:
    built = write_labels(tmp_path, [[0], [0, 2], []], pa.array([[2], [1]], other)).build()
    assert built.kind == "multilabel" and built.class_names == ["0", "1", "2"]
    assert built.labels.tolist() == [[1, 0, 0], [1, 0, 1], [0, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_training_file_may_have_only_empty_lists_of_labels(tmp_path: Path) -> None:
    for labels, names in (([["b"], ["a"]], ["a", "b"]), ([[1], [0]], ["0", "1"])):
        built = write_labels(tmp_path, [[], []], labels).build()
        assert built.class_names == names and built.labels.tolist() == [
            [0, 0],
            [0, 0],
            [0, 1],
            [1, 0],
        ]


def test_label_lists_are_rejected_if_one_file_has_integers_and_another_texts(
    tmp_path: Path,
) -> None:
    source = write_labels(tmp_path, [[], []], SETS)
    (tmp_path / "test.parquet").rename(tmp_path / "test-0.parquet")
    pq.write_table(pa.table({"x": [0.0], "label": [["a"]]}), tmp_path / "test-1.parquet")
    with pytest.raises(
        ValueError,
        match=r"test-1.parquet: column label holds .*string>, but .*test-0.parquet holds li",
    ):
        source.build()


def test_label_lists_of_fixed_size_must_contain_a_zero_or_one_for_each_class(
    tmp_path: Path,
) -> None:
    train = pa.array([[0, 1, 1]], pa.list_(pa.int64(), 3))
    assert write_labels(tmp_path, train, [[1, 0, 0]]).build().labels.tolist() == [
        [0, 1, 1],
        [1, 0, 0],
    ]
    for test in ([[1, 0]], pa.array([[1, 0]], pa.list_(pa.int64(), 2)), [[1, 0, 0], [1]], [[]]):
        with pytest.raises(
            ValueError,
            match=r"test.parquet: column label .* \d labels.*train.* 3",
        ):
            write_labels(tmp_path, train, test).build()


def test_training_labels_can_be_signed_and_test_labels_unsigned(tmp_path: Path) -> None:
    built = write_labels(tmp_path, INTS, pa.array([1], pa.uint64())).build()
    assert built.kind == "classification" and built.labels.tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=rf"test.parquet: column label .*{2**63}"):
        write_labels(tmp_path, SETS, pa.array([[2**63]], pa.list_(pa.uint64()))).build()


def test_regression_accepts_integer_labels_in_one_file_and_floats_in_another(
    tmp_path: Path,
) -> None:
    source = replace(write_labels(tmp_path, INTS, FLOATS), kind="regression")
    assert source.build().labels.tolist() == [[0.0], [1.0], [0.0], [1.0]]
    with pytest.raises(ValueError, match=r"text .*data\.kind=regression"):
        replace(write_labels(tmp_path, [["a"], ["b"]]), kind="regression").build()
    with pytest.raises(ValueError, match=r" 1 to 2 numbers"):
        replace(write_labels(tmp_path, [[0.5], [1.5, 2.5]]), kind="regression").build()


# ---- folders of pictures -------------------------------------------------------------------------
def test_image_folder_takes_the_test_fraction_from_each_class(tmp_path: Path) -> None:
    for domain in ("photo", "sketch"):
        for name in ("dog", "cat"):
            for number in range(5):
                write_picture(tmp_path / domain / name / f"{number}.png", picture(6, 4, 3))
    built = ImageFolder(root=str(tmp_path)).build()
    assert (
        built.shape == (3, 6, 4)
        and built.class_names == ["cat", "dog"]
        and built.domain_names == ["photo", "sketch"]
    )
    assert built.train_rows == 16
    assert np.bincount(built.domains[16:] * 2 + built.labels[16:]).tolist() == [1, 1, 1, 1]


def test_image_folder_of_classes_is_one_domain(tmp_path: Path) -> None:
    pixels = [picture() for _ in range(4)]
    for number, one in enumerate(pixels):
        write_picture(tmp_path / f"class{number % 2}" / f"{number}.png", one)
    built = ImageFolder(root=str(tmp_path), test_fraction=0.5).build()
    assert built.domain_names == [tmp_path.name] and built.labels.tolist() == [0, 1, 0, 1]
    assert np.array_equal(
        built.inputs[:, 0], np.stack([pixels[0], pixels[1], pixels[2], pixels[3]])
    )


def test_split_file_of_an_image_folder_lists_the_test_images(tmp_path: Path) -> None:
    write_picture(tmp_path / "a/x/1.png", picture())
    write_picture(tmp_path / "a/x/2.png", picture())
    (tmp_path / "split.csv").write_text(
        "path,domain,class,split\na/x/1.png,a,x,test\na/x/2.png,a,x,train\n"
    )
    assert ImageFolder(root=str(tmp_path)).build().train_rows == 1
    (tmp_path / "split.csv").write_text("path,domain,class,split\na/x/3.png,a,x,test\n")
    with pytest.raises(ValueError, match=r"split.csv .*a/x/3.png"):
        ImageFolder(root=str(tmp_path)).build()
    (tmp_path / "split.csv").write_text("path,class,split\n")
    with pytest.raises(ValueError, match=r"split.csv .*domain"):
        ImageFolder(root=str(tmp_path)).build()


def test_image_folder_ignores_folders_other_than_train_and_test(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2), ("val", 5)):
        for name in ("normal", "ill"):
            for number in range(count):
                write_picture(tmp_path / "fundus" / split / name / f"{number}.png", picture())
    built = ImageFolder(root=str(tmp_path / "fundus")).build()
    assert (built.train_rows, len(built)) == (6, 10), "a third folder is not read"
    assert built.class_names == ["ill", "normal"] and built.domain_names == ["fundus"]


def test_domains_of_an_image_folder_may_have_a_common_test_set(
    tmp_path: Path,
) -> None:
    for hospital in ("zurich", "basel"):
        write_picture(tmp_path / "covid/train" / hospital / "ill/1.png", picture())
    write_picture(tmp_path / "covid/test/ill/1.png", picture())
    built = ImageFolder(root=str(tmp_path / "covid")).build()
    assert built.domain_names == ["basel", "zurich", "covid"] and built.domains.tolist() == [
        0,
        1,
        2,
    ]


def test_error_about_an_image_folder_mentions_the_wrong_setting_or_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data=image_folder needs data\.root"):
        ImageFolder().build()
    with pytest.raises(ValueError, match=rf"data.root={tmp_path} .*no pictures"):
        ImageFolder(root=str(tmp_path)).build()
    write_picture(tmp_path / "a/1.png", picture())
    (tmp_path / "a/2.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'a/2.png'} "):
        ImageFolder(root=str(tmp_path)).build()
    write_picture(tmp_path / "b/a/1.png", picture())
    with pytest.raises(ValueError, match=r"data\.root=.* class/ and others in domain/class/"):
        ImageFolder(root=str(tmp_path)).build()


def test_pictures_of_more_than_eight_bits_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16)).save(tmp_path / "a/1.png")
    with pytest.raises(ValueError, match=r"a/1.png .*8 bits"):
        ImageFolder(root=str(tmp_path)).build()


# ---- data sets by name ---------------------------------------------------------------------------
def write_formats(root: Path) -> list[np.ndarray]:
    """Write the same data set three times: as strips, as Parquet files and as pictures.

    It has two training images and two test images of two classes. Return the four images in this
    order.
    """
    images = list(write_strips(root / "strips/Office-Home", rows=(2, 2), classes=["a", "b"]))
    names = {"class_names": json.dumps(["a", "b"])}
    for split, part in (("train", images[:2]), ("test", images[2:])):
        write_parquet(root / f"parquet/office_home/{split}.parquet", part, [0, 1], metadata=names)
        for name, pixels in zip("ab", part, strict=True):
            write_picture(root / f"pictures/OfficeHome/{split}/{name}/1.png", pixels)
    return images


@pytest.mark.parametrize("form", ["strips", "parquet", "pictures"])
def test_stored_data_set_is_equal_in_every_file_format(form: str, tmp_path: Path) -> None:
    images = write_formats(tmp_path)
    around = Stored(root=str(tmp_path / form), name="OfficeHome").build()
    assert np.array_equal(around.inputs[:, 0], np.stack(images)) and around.labels.tolist() == [
        0,
        1,
        0,
        1,
    ]
    assert around.class_names == ["a", "b"] and around.train_rows == 2
    itself = Stored(root=str(next((tmp_path / form).iterdir())), name="OfficeHome").build()
    assert np.array_equal(itself.inputs, around.inputs)


def test_settings_choose_the_parquet_columns_of_labels_and_domains(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "train.parquet",
        [picture() for _ in range(4)],
        [0] * 4,
        kind=[0, 0, 1, 1],
        site=list("xyxy"),
    )
    settings = {"label_column": "kind", "domain_column": "site", "test_fraction": 0.0}
    built = Stored(root=str(tmp_path), **settings).build()
    assert (
        built.labels.tolist() == [0, 0, 1, 1]
        and built.domain_names == ["x", "y"]
        and built.train_rows == 4
    )


def test_error_of_missing_stored_data_set_mentions_the_data_set(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"PACS needs data\.root"):
        Stored(name="PACS").build()
    with pytest.raises(
        ValueError,
        match=rf"data.root={tmp_path} has no folder PACS.*no pictures",
    ):
        Stored(root=str(tmp_path), name="PACS").build()
    with pytest.raises(ValueError, match=r"data.test_fraction=1.0"):
        Stored(root=str(tmp_path), test_fraction=1.0)


# ---- real data -----------------------------------------------------------------------------------
def test_pacs_has_four_domains(shared: Path) -> None:
    built = Stored(root=str(shared / "data"), name="PACS", size=32).build()
    assert built.domain_names == ["art_painting", "cartoon", "photo", "sketch"]
    assert built.class_names == ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
    assert (built.train_rows, len(built)) == (2656, 3320)
