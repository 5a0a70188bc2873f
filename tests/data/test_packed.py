"""Test that strips are cut into the right images, and that errors name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny import picture, write_picture, write_strips

from raysim.data.sources import Strips


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("channels", [1, 3])
def test_strips_are_cut_from_top_to_bottom(channels: int, tmp_path: Path) -> None:
    images = write_strips(tmp_path / "set", channels=channels, rows=(12, 4), classes=["no", "yes"])
    built = Strips(root=str(tmp_path / "set")).build()
    assert np.array_equal(
        built.inputs, images[:, None] if channels == 1 else images.transpose(0, 3, 1, 2)
    )
    assert built.labels.tolist() == [0, 1] * 6 + [0, 1] * 2 and built.train_rows == 12
    assert built.class_names == ["no", "yes"] and built.domain_names == ["set"]


def test_data_root_can_be_the_strips_folder_or_its_parent_folder(
    tmp_path: Path,
) -> None:
    write_strips(tmp_path / "set")
    write_picture(tmp_path / "set/val-000.png", picture())
    built = Strips(root=str(tmp_path), name="set").build()
    assert len(built) == 22
    assert (
        Strips(root=str(tmp_path / "set"), name="set").build().labels.tolist()
        == built.labels.tolist()
    )


def test_images_of_strips_are_square_if_the_description_file_is_missing(tmp_path: Path) -> None:
    write_strips(tmp_path, classes=["a", "b", "c"])
    (tmp_path / "meta.json").unlink()
    built = Strips(root=str(tmp_path)).build()
    assert built.shape == (1, 4, 4) and built.class_names == ["0", "1", "2"]


def test_description_file_of_strips_can_set_the_height_of_an_image(tmp_path: Path) -> None:
    images = write_strips(tmp_path, rows=(4, 2), classes=["a"], per_strip=2)
    for split, count in (("train", 8), ("test", 4)):
        np.save(tmp_path / f"{split}-labels.npy", np.zeros(count, dtype=np.uint8))
    (tmp_path / "meta.json").write_text(json.dumps({"height": 2}))
    built = Strips(root=str(tmp_path)).build()
    assert built.shape == (1, 2, 4) and np.array_equal(built.inputs[1, 0], images[0, 2:])


def test_strips_error_mentions_the_missing_or_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data=strips needs data\.root"):
        Strips().build()
    with pytest.raises(
        ValueError, match=rf"data.root={tmp_path} .*pneumoniamnist.*train-labels.npy"
    ):
        Strips(root=str(tmp_path), name="pneumoniamnist").build()
    write_strips(tmp_path)
    np.save(tmp_path / "test-labels.npy", np.zeros(7, dtype=np.uint8))
    with pytest.raises(
        ValueError,
        match=r"test-labels.npy .*\(7,\).* 10 images",
    ):
        Strips(root=str(tmp_path)).build()
    write_strips(tmp_path, classes=["a", "b"])
    (tmp_path / "meta.json").write_text('{"classes": ["a"]}')
    with pytest.raises(ValueError, match=r"label 1.* 0 to 0"):
        Strips(root=str(tmp_path)).build()
    (tmp_path / "meta.json").write_text("[1")
    with pytest.raises(ValueError, match=r"meta.json "):
        Strips(root=str(tmp_path)).build()


def test_error_of_a_faulty_strip_or_label_file_contains_the_file_name(tmp_path: Path) -> None:
    write_strips(tmp_path)
    (tmp_path / "meta.json").unlink()
    write_picture(tmp_path / "train-001.png", picture(9, 4))
    with pytest.raises(ValueError, match=r"train-001.png .*9 .* 4"):
        Strips(root=str(tmp_path)).build()
    write_picture(tmp_path / "train-001.png", picture(10, 5))
    with pytest.raises(
        ValueError,
        match=r"train-001.png .*\(1, 5, 5\).*\(1, 4, 4\)",
    ):
        Strips(root=str(tmp_path)).build()
    (tmp_path / "train-001.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"train-001.png "):
        Strips(root=str(tmp_path)).build()
    write_strips(tmp_path)
    (tmp_path / "train-labels.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"train-labels.npy "):
        Strips(root=str(tmp_path)).build()


@pytest.mark.parametrize(
    "meta",
    [
        {"height": "4"},
        {"height": 4.0},
        {"height": -4},
        {"height": 0},
        {"height": True},
        {"height": 10**400},
        {"classes": 3},
        {"classes": [1, 2]},
        {"classes": ["a", "a"]},
        {"classes": {"a": 1}},
        [],
        None,
        3,
    ],
)
def test_wrong_content_of_the_description_file_of_strips_is_refused(
    meta: object, tmp_path: Path
) -> None:
    write_strips(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'meta.json'}|not a multiple of 1000"):
        Strips(root=str(tmp_path)).build()


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.mkdir()]
)
def test_strips_source_refuses_a_description_that_is_not_a_regular_file(
    make: Any, tmp_path: Path
) -> None:
    write_strips(tmp_path)
    (tmp_path / "meta.json").unlink()
    make(tmp_path / "meta.json")
    with pytest.raises(
        ValueError,
        match=rf"^{tmp_path / 'meta.json'} ",
    ):
        Strips(root=str(tmp_path)).build()


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"height": 1' + b"0" * 5000 + b"}", b"\xff", b"\0"]
)
def test_strips_description_must_be_json(content: bytes, tmp_path: Path) -> None:
    write_strips(tmp_path)
    (tmp_path / "meta.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'meta.json'} "):
        Strips(root=str(tmp_path)).build()


def test_strips_need_an_integer_label_per_image(tmp_path: Path) -> None:
    for labels, value in (
        (np.zeros(10), "float64"),
        (np.zeros(10, dtype="M8[s]"), "datetime64"),
        (3, "shape"),
    ):
        write_strips(tmp_path)
        np.save(tmp_path / "test-labels.npy", labels)
        with pytest.raises(ValueError, match=rf"test-labels.npy .*{value}"):
            Strips(root=str(tmp_path)).build()
    write_strips(tmp_path)
    header = b"\x93NUMPY\x01\x00v\x00"
    header += b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000000,), }"
    (tmp_path / "test-labels.npy").write_bytes(header.ljust(127) + b"\n" + bytes(10))
    with pytest.raises(ValueError, match=r"test-labels.npy "):
        Strips(root=str(tmp_path)).build()


def test_named_pipe_as_strip_file_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    write_strips(tmp_path)
    (tmp_path / "train-000.png").unlink()
    os.mkfifo(tmp_path / "train-000.png")
    with pytest.raises(ValueError, match=r"train-000.png"):
        Strips(root=str(tmp_path)).build()


@pytest.mark.parametrize(
    ("name", "shape", "rows", "classes"),
    [
        ("pneumoniamnist", (1, 28, 28), (4708, 5332), 2),
        ("mnist_m", (3, 32, 32), (3000, 5000), 10),
        ("usps", (1, 16, 16), (7291, 9298), 10),
        pytest.param(
            "cifar10",
            (3, 32, 32),
            (50_000, 60_000),
            10,
            marks=pytest.mark.slow,  # 180 MB
        ),
    ],
)
def test_public_data_sets_in_strips_have_their_documented_shapes_and_sizes(
    name: str, shape: tuple[int, ...], rows: tuple[int, int], classes: int, shared: Path
) -> None:
    built = Strips(root=str(shared / "data"), name=name).build()
    assert (built.shape, built.train_rows, len(built), built.num_classes) == (shape, *rows, classes)
    first = Image.open(min((shared / "data" / name).glob("train-[0-9]*.*"))).crop(
        (0, 0, *shape[:0:-1])
    )
    assert np.array_equal(built.inputs[0].transpose(1, 2, 0).squeeze(), np.asarray(first))


def test_pneumonia_mnist_has_its_published_mean(shared: Path) -> None:
    built = Strips(root=str(shared / "data"), name="pneumoniamnist").build()
    assert built.class_names == ["normal", "pneumonia"]
    assert np.bincount(built.labels[:4708]).tolist() == [1214, 3494]
    assert abs(built.inputs[:4708].mean() / 255 - 0.5719) < 1e-4


def test_error_mentions_a_label_file_with_a_broken_header(tmp_path: Path) -> None:
    write_strips(tmp_path / "set")
    file = tmp_path / "set/train-labels.npy"
    file.write_bytes(
        file.read_bytes().replace(b"}", b" ")
    )  # Python's tokenizer gives up, which is no ValueError
    with pytest.raises(ValueError, match=r"train-labels.npy "):
        Strips(root=str(tmp_path / "set")).build()
