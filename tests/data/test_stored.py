"""Sets of the user's own: the same images however they are stored, and a sentence for what does not fit."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path

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


# ---- Parquet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("struct", [True, False])
def test_parquet_images_come_back_pixel_for_pixel(struct: bool, tmp_path: Path) -> None:
    pixels = [picture() for _ in range(5)]
    names = {"class_names": json.dumps(["cat", "dog", "cow"])}
    write_parquet(tmp_path / "train.parquet", pixels[:3], [0, 1, 0], struct, metadata=names)
    write_parquet(tmp_path / "test.parquet", pixels[3:], [1, 1], struct, metadata=names)
    built = Parquet(root=str(tmp_path)).build()
    assert np.array_equal(built.inputs[:, 0], np.stack(pixels)) and built.labels.tolist() == [0, 1, 0, 1, 1]
    assert built.train_rows == 3 and built.class_names == ["cat", "dog", "cow"]
    assert built.domain_names == [tmp_path.name]


def test_folders_of_parquet_sets_are_domains_and_differing_shapes_need_a_size(tmp_path: Path) -> None:
    for name, size, channels in (("usps", 4, 1), ("photo", 6, 3)):
        for split in ("train", "test"):
            pixels = [picture(size, size, channels) for _ in range(2)]
            write_parquet(tmp_path / name / f"{split}.parquet", pixels, [0, 1])
    with pytest.raises(
        ValueError, match=r"usps/train.parquet, row 0 has the shape \(1, 4, 4\).*\(3, 6, 6\): set data.size"
    ):
        Parquet(root=str(tmp_path)).build()
    built = Parquet(root=str(tmp_path), size=5, channels=3).build()
    assert built.shape == (3, 5, 5) and built.domain_names == ["photo", "usps"]
    assert built.domains.tolist() == [0, 0, 1, 1, 0, 0, 1, 1] and built.train_rows == 4
    grey = built.inputs[built.domains == 1]
    assert (grey == grey[:, :1]).all()
    listed = Parquet(root=[str(tmp_path / "usps"), str(tmp_path / "photo")], size=5, channels=3).build()
    assert sorted(listed.domain_names) == built.domain_names


def test_parquet_domains_text_labels_and_parts_are_understood(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", [picture()], ["dog"], domain=["b"])
    write_parquet(tmp_path / "train-1.parquet", [picture()], ["cat"], domain=["a"])
    write_parquet(tmp_path / "test-0.parquet", [picture()], ["cat"], domain=["b"])
    built = Parquet(root=str(tmp_path)).build()
    assert built.class_names == ["cat", "dog"] and built.labels.tolist() == [1, 0, 0]
    assert built.domain_names == ["a", "b"] and built.domains.tolist() == [1, 0, 1]


def test_class_names_of_the_hugging_face_layout_are_used(tmp_path: Path) -> None:
    info = {"info": {"features": {"kind": {"names": ["no", "yes", "maybe"], "_type": "ClassLabel"}}}}
    for split in ("train", "test"):
        write_parquet(
            tmp_path / f"{split}.parquet", [picture()], [0], kind=[1], metadata={"huggingface": json.dumps(info)}
        )
    built = Parquet(root=str(tmp_path), label_column="kind").build()
    assert built.class_names == ["no", "yes", "maybe"] and built.labels.tolist() == [1, 1]


def test_parquet_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.root is empty"):
        Parquet().build()
    with pytest.raises(ValueError, match=rf"data.root={tmp_path / 'none'} holds no train.parquet"):
        Parquet(root=str(tmp_path / "none")).build()
    write_parquet(tmp_path / "train.parquet", [picture()], [0])
    with pytest.raises(ValueError, match=rf"data.root={tmp_path} holds no test.parquet"):
        Parquet(root=str(tmp_path)).build()
    write_parquet(tmp_path / "test.parquet", [picture()], [-1])
    with pytest.raises(ValueError, match=r"has no column y, it has image, label: set data.label_column"):
        Parquet(root=str(tmp_path), label_column="y").build()
    with pytest.raises(ValueError, match=r"has the label -1, its classes are 0 to 0"):
        Parquet(root=str(tmp_path)).build()
    (tmp_path / "test.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'test.parquet'} is no readable Parquet file"):
        Parquet(root=str(tmp_path)).build()


@pytest.mark.parametrize("label", [10**6, 10**12, 2**63 - 1])
def test_a_label_beyond_the_number_of_images_makes_no_classes(label: int, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [picture(), picture()], [0, label])
    with pytest.raises(
        ValueError, match=rf"has the label {label}, and 4 images: labels without names count the classe"
    ):
        Parquet(root=str(tmp_path)).build()


def test_an_unsigned_label_is_named_as_it_is_stored(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [picture()], pa.array([2**64 - 1], pa.uint64()))
    with pytest.raises(ValueError, match=rf"has the label {2**64 - 1}"):
        Parquet(root=str(tmp_path)).build()


NOT_LABELS = [(date(2020, 1, 1), "date32"), (b"\xff", "binary"), ({"a": 1}, "struct<")]
NOT_DOMAINS = [*NOT_LABELS, ([1, 2], "list<"), (1.5, "double")]


@pytest.mark.parametrize(
    ("column", "value", "kind", "must"),
    [("label", *each, "it must hold numbers, text, or lists") for each in NOT_LABELS]
    + [("domain", *each, "domains and users must be integers or text") for each in NOT_DOMAINS],
)
def test_labels_and_domains_of_other_types_are_refused(
    column: str, value: object, kind: str, must: str, tmp_path: Path
) -> None:
    for split in ("train", "test"):
        columns = {"label": [0], "domain": ["a"]} | {column: [value]}
        write_parquet(tmp_path / f"{split}.parquet", [picture()], columns.pop("label"), **columns)
    with pytest.raises(ValueError, match=rf"train.parquet: column {column} holds {kind}.*: {must}"):
        Parquet(root=str(tmp_path)).build()


def test_labels_are_text_in_all_files_or_numbers_in_all(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [picture(), picture()], ["0", "1"])
    write_parquet(tmp_path / "test.parquet", [picture()], [1])
    with pytest.raises(ValueError, match=r"test.parquet: column label holds int64, .*train.parquet holds string"):
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
def test_class_names_in_a_files_metadata_must_be_a_list_of_names(metadata: dict, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [picture()], [0], metadata=metadata)
    with pytest.raises(ValueError, match=r"train.parquet: its class names.* a list of different texts"):
        Parquet(root=str(tmp_path)).build()


@pytest.mark.parametrize("column", [pa.array([3]), pa.array([[1]]), pa.array(["x"]), pa.array([{"path": "a.png"}])])
def test_a_column_without_bytes_of_pictures_is_named(column: pa.Array, tmp_path: Path) -> None:
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": column, "label": [0]}), tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=r"train.parquet: column image holds .*: .* bytes"):
        Parquet(root=str(tmp_path)).build()


def test_a_file_that_never_ends_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train-0.parquet")
    with pytest.raises(ValueError, match=r"train-0.parquet is no regular file"):
        Parquet(root=str(tmp_path)).build()
    write_picture(tmp_path / "folder/a/1.png", picture())
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)):
        make(fifo := tmp_path / "folder/a/2.png")
        with pytest.raises(ValueError, match=rf"{fifo} is no regular file"):
            ImageFolder(root=str(tmp_path / "folder")).build()
        fifo.unlink()


def test_folders_that_contain_themselves_end(tmp_path: Path) -> None:
    write_picture(tmp_path / "a/1.png", picture())
    write_picture(tmp_path / "a/2.png", picture())
    (tmp_path / "a/b").symlink_to(tmp_path / "a")
    (tmp_path / "c").symlink_to(tmp_path / "c")
    assert len(ImageFolder(root=str(tmp_path), test_fraction=0.5).build()) == 2


def test_a_split_file_is_text_of_regular_rows(tmp_path: Path) -> None:
    write_picture(tmp_path / "a/1.png", picture())
    for content in (b"path,domain,class,split\n\xff\xfe,a,x,test\n", b"path,domain,class,split\n\0,a,x,test\n"):
        (tmp_path / "split.csv").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{tmp_path / 'split.csv'}"):
            ImageFolder(root=str(tmp_path)).build()
    (tmp_path / "split.csv").write_text("path,domain,class,split\na/1.png\n")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'split.csv'}"):
        ImageFolder(root=str(tmp_path)).build()


def test_a_broken_picture_in_parquet_is_named_by_its_row(tmp_path: Path) -> None:
    for split in ("train", "test"):
        table = pa.table({"image": [encoded(picture()), b"no picture"], "label": [0, 1]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'train.parquet'}, row 1 is not a readable picture"):
        Parquet(root=str(tmp_path)).build()


def test_parquet_without_a_test_file_holds_out_a_share_of_every_class_of_every_domain(tmp_path: Path) -> None:
    pixels = [picture() for _ in range(16)]
    labels, domains = [0, 1] * 8, ["b"] * 8 + ["a"] * 8
    write_parquet(tmp_path / "train-0.parquet", pixels[:6], labels[:6], domain=domains[:6])
    write_parquet(tmp_path / "train-1.parquet", pixels[6:], labels[6:], domain=domains[6:])
    with pytest.raises(ValueError, match=r"holds no test.parquet: .* set data.test_fraction"):
        Parquet(root=str(tmp_path)).build()
    built = Parquet(root=str(tmp_path), test_fraction=0.25).build()
    assert built.train_rows == 12 and built.domain_names == ["a", "b"]
    assert np.bincount(built.domains[12:] * 2 + built.labels[12:]).tolist() == [1, 1, 1, 1]
    stored = {one.tobytes(): (label, domain) for one, label, domain in zip(pixels, labels, domains, strict=True)}
    for image, label, domain in zip(built.inputs, built.labels, built.domains, strict=True):
        assert stored.pop(image.tobytes()) == (label, built.domain_names[domain])
    assert not stored, "every image is there once"


def test_a_test_file_wins_over_the_fraction(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [picture() for _ in range(4)], [0, 1, 0, 1])
    write_parquet(tmp_path / "test.parquet", [picture()], [1])
    built = Parquet(root=str(tmp_path), test_fraction=0.5).build()
    assert (built.train_rows, len(built)) == (4, 5)


def test_a_domain_without_training_rows_comes_last(tmp_path: Path) -> None:
    hospitals = tmp_path / "hospitals"
    write_parquet(hospitals / "train.parquet", [picture(), picture()], [0, 1], domain=["x", "y"])
    write_parquet(hospitals / "test.parquet", [picture()], [0])
    built = Parquet(root=str(hospitals)).build()
    assert built.domain_names == ["x", "y", "hospitals"] and built.domains.tolist() == [0, 1, 2]


# ---- folders of pictures -------------------------------------------------------------------------------------------


def test_an_image_folder_of_domains_splits_every_class_of_every_domain(tmp_path: Path) -> None:
    for domain in ("photo", "sketch"):
        for name in ("dog", "cat"):
            for number in range(5):
                write_picture(tmp_path / domain / name / f"{number}.png", picture(6, 4, 3))
    built = ImageFolder(root=str(tmp_path)).build()
    assert (
        built.shape == (3, 6, 4) and built.class_names == ["cat", "dog"] and built.domain_names == ["photo", "sketch"]
    )
    assert built.train_rows == 16
    assert np.bincount(built.domains[16:] * 2 + built.labels[16:]).tolist() == [1, 1, 1, 1]


def test_an_image_folder_of_classes_is_one_domain(tmp_path: Path) -> None:
    pixels = [picture() for _ in range(4)]
    for number, one in enumerate(pixels):
        write_picture(tmp_path / f"class{number % 2}" / f"{number}.png", one)
    built = ImageFolder(root=str(tmp_path), test_fraction=0.5).build()
    assert built.domain_names == [tmp_path.name] and built.labels.tolist() == [0, 1, 0, 1]
    assert np.array_equal(built.inputs[:, 0], np.stack([pixels[0], pixels[1], pixels[2], pixels[3]]))


def test_a_split_file_decides_what_is_test(tmp_path: Path) -> None:
    write_picture(tmp_path / "a/x/1.png", picture())
    write_picture(tmp_path / "a/x/2.png", picture())
    (tmp_path / "split.csv").write_text("path,domain,class,split\na/x/1.png,a,x,test\na/x/2.png,a,x,train\n")
    assert ImageFolder(root=str(tmp_path)).build().train_rows == 1
    (tmp_path / "split.csv").write_text("path,domain,class,split\na/x/3.png,a,x,test\n")
    with pytest.raises(ValueError, match=r"split.csv names a/x/3.png, which is not there"):
        ImageFolder(root=str(tmp_path)).build()
    (tmp_path / "split.csv").write_text("path,class,split\n")
    with pytest.raises(ValueError, match=r"split.csv .* lacks the column domain"):
        ImageFolder(root=str(tmp_path)).build()


def test_folders_train_and_test_say_what_is_for_testing(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2), ("val", 5)):
        for name in ("normal", "ill"):
            for number in range(count):
                write_picture(tmp_path / "fundus" / split / name / f"{number}.png", picture())
    built = ImageFolder(root=str(tmp_path / "fundus")).build()
    assert (built.train_rows, len(built)) == (6, 10), "a third folder is not read"
    assert built.class_names == ["ill", "normal"] and built.domain_names == ["fundus"]


def test_folders_train_and_test_may_hold_domains_and_the_test_set_may_be_common(tmp_path: Path) -> None:
    for hospital in ("zurich", "basel"):
        write_picture(tmp_path / "covid/train" / hospital / "ill/1.png", picture())
    write_picture(tmp_path / "covid/test/ill/1.png", picture())
    built = ImageFolder(root=str(tmp_path / "covid")).build()
    assert built.domain_names == ["basel", "zurich", "covid"] and built.domains.tolist() == [0, 1, 2]


def test_image_folder_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.root=None is no folder"):
        ImageFolder().build()
    with pytest.raises(ValueError, match=rf"data.root={tmp_path} holds no pictures"):
        ImageFolder(root=str(tmp_path)).build()
    write_picture(tmp_path / "a/1.png", picture())
    (tmp_path / "a/2.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'a/2.png'} is not a readable picture"):
        ImageFolder(root=str(tmp_path)).build()
    write_picture(tmp_path / "b/a/1.png", picture())
    with pytest.raises(ValueError, match=r"mixes class/ and domain/class/"):
        ImageFolder(root=str(tmp_path)).build()


def test_pictures_of_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16)).save(tmp_path / "a/1.png")
    with pytest.raises(ValueError, match=r"a/1.png has more than 8 bits per pixel"):
        ImageFolder(root=str(tmp_path)).build()


# ---- whichever form lies there ---------------------------------------------------------------------------------------


def forms(root: Path) -> list[np.ndarray]:
    """One set of two classes and four images as strips, Parquet and pictures, each in a folder of its form's name."""
    images = list(write_strips(root / "strips/Office-Home", rows=(2, 2), classes=["a", "b"]))
    names = {"class_names": json.dumps(["a", "b"])}
    for split, part in (("train", images[:2]), ("test", images[2:])):
        write_parquet(root / f"parquet/office_home/{split}.parquet", part, [0, 1], metadata=names)
        for name, pixels in zip("ab", part, strict=True):
            write_picture(root / f"pictures/OfficeHome/{split}/{name}/1.png", pixels)
    return images


@pytest.mark.parametrize("form", ["strips", "parquet", "pictures"])
def test_a_named_set_is_the_same_in_every_form_and_found_under_any_spelling(form: str, tmp_path: Path) -> None:
    images = forms(tmp_path)
    around = Stored(root=str(tmp_path / form), name="OfficeHome").build()
    assert np.array_equal(around.inputs[:, 0], np.stack(images)) and around.labels.tolist() == [0, 1, 0, 1]
    assert around.class_names == ["a", "b"] and around.train_rows == 2
    itself = Stored(root=str(next((tmp_path / form).iterdir())), name="OfficeHome").build()
    assert np.array_equal(itself.inputs, around.inputs)


def test_columns_and_fraction_reach_the_parquet_reader(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "train.parquet", [picture() for _ in range(4)], [0] * 4, kind=[0, 0, 1, 1], site=list("xyxy")
    )
    settings = {"label_column": "kind", "domain_column": "site", "test_fraction": 0.0}
    built = Stored(root=str(tmp_path), **settings).build()
    assert built.labels.tolist() == [0, 0, 1, 1] and built.domain_names == ["x", "y"] and built.train_rows == 4


def test_a_named_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.root=None is no folder: name the one with PACS as strips, Parquet"):
        Stored(name="PACS").build()
    with pytest.raises(
        ValueError, match=rf"data.root={tmp_path} has no folder PACS and is none itself: .* no pictures"
    ):
        Stored(root=str(tmp_path), name="PACS").build()
    with pytest.raises(ValueError, match=r"data.test_fraction=1.0 must be at least 0 and below 1"):
        Stored(root=str(tmp_path), test_fraction=1.0)


# ---- real data -------------------------------------------------------------------------------------------------------


def test_pacs_has_four_domains_and_the_stated_split(shared: Path) -> None:
    built = Stored(root=str(shared / "data"), name="PACS", size=32).build()
    assert built.domain_names == ["art_painting", "cartoon", "photo", "sketch"]
    assert built.class_names == ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
    assert (built.train_rows, len(built)) == (2656, 3320)
