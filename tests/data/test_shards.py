"""Test tar files of samples, and files with several inputs or structured targets."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from quick_runs import FAST

import raysim
from raysim.data.sources import Csv, JsonLines, Npz, NumPy, Parquet, Source, WebDataset
from raysim.primitives.kinds import PackedShape

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 8, 8)).astype(np.uint8)
MASKS = (PIXELS > 128).astype(np.uint8)
AGES = RNG.normal(size=(12, 3)).astype(np.float32)
BOXES = [[[float(row), 1.0, 2.0, 3.0]] * (row % 3) for row in range(12)]
COUNTS = [row % 3 for row in range(12)]


def as_png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def as_npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def sample(row: int) -> dict[str, bytes]:
    return {
        "image.png": as_png(PIXELS[row]),
        "mask.png": as_png(MASKS[row]),
        "age.npy": as_npy(AGES[row]),
        "box.json": json.dumps({"boxes": BOXES[row], "count": COUNTS[row]}).encode(),
        "words.txt": b"ab" if row % 2 else b"abc",
        "cls": str(row % 2).encode(),
        "client.txt": f"hospital {row % 4}".encode(),
    }


def write_shard(path: Path, rows: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for row in rows:
            for ending, content in sample(row).items():
                info = tarfile.TarInfo(f"part/{row:04d}.{ending}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def shards(tmp_path: Path) -> str:
    write_shard(tmp_path / "shards/a-0.tar", range(6))
    write_shard(tmp_path / "shards/a-1.tar", range(6, 9))
    write_shard(tmp_path / "shards/test-0.tar", range(9, 12))
    return str(tmp_path / "shards")


# --- tar files ----------------------------------------------------------------------------------
def test_shards_are_read_with_images_classes_and_users(shards: str) -> None:
    built = WebDataset(root=shards, columns=["image.png"]).build()
    np.testing.assert_array_equal(built.inputs[:, 0], PIXELS)
    assert (built.train_rows, built.labels.tolist()) == (9, [row % 2 for row in range(12)])
    assert built.domain_names == [f"hospital {user}" for user in range(4)]


def test_shards_read_the_pixel_values_of_a_mask_picture_as_class_labels(shards: str) -> None:
    built = WebDataset(root=shards, columns=["image.png"], label="mask.png").build()
    assert built.kind == "positions"
    np.testing.assert_array_equal(built.labels, MASKS)
    small = WebDataset(root=shards, columns=["image.png"], label="mask.png", size=4).build()
    assert (small.inputs.shape[1:], small.labels.shape[1:]) == ((1, 4, 4), (4, 4))
    assert set(np.unique(small.labels)) <= {0, 1}


def test_shard_files_with_different_suffixes_become_inputs_of_one_sample(shards: str) -> None:
    columns = ["image.png", "age.npy", "words.txt"]
    built = WebDataset(root=shards, columns=columns).build()
    assert isinstance(built.shape, PackedShape)
    assert built.shape.arguments == {"image": (1, 8, 8), "age": (3,), "words": (3,)}
    np.testing.assert_array_equal(built.inputs[:, 64:67], AGES)
    np.testing.assert_array_equal(built.inputs[:, :64] * 255, PIXELS.reshape(12, 64))


def test_shards_read_json_objects_as_structured_targets(shards: str) -> None:
    built = WebDataset(root=shards, columns=["age.npy"], label="box.json").build()
    assert [part.name for part in built.targets] == ["boxes", "count"]
    assert built.labels[5].tolist() == [2, 5, 1, 2, 3, 5, 1, 2, 3, 1, 2]


def test_shards_are_read_from_folders_train_and_test(tmp_path: Path) -> None:
    write_shard(tmp_path / "train/0.tar", range(4))
    write_shard(tmp_path / "test/0.tar", range(4, 6))
    assert WebDataset(root=str(tmp_path), columns=["cls"], label="age.npy").build().train_rows == 4


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"label": "png"}, "no file that ends in .png"),
        ({"columns": ["image.png", "age.npy"], "label": "client.txt", "user": "x"}, "data.user"),
        ({"columns": ["age.npy"], "label": "image.png", "kind": "classification"}, "shape"),
    ],
)
def test_error_in_shards_mentions_the_file(
    shards: str, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        WebDataset(root=shards, **settings).build()


def test_shards_refuse_missing_and_broken_tar_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.root"):
        WebDataset(root=str(tmp_path)).build()
    (tmp_path / "a.tar").write_bytes(b"no tar file")
    with pytest.raises(ValueError, match=r"a\.tar"):
        WebDataset(root=str(tmp_path)).build()


def test_run_trains_a_unet_on_shards_with_masks_as_labels(shards: str, tmp_path: Path) -> None:
    settings = {**FAST, "partition": "natural", "partition.clients": None, "rounds": 1}
    result = raysim.run(
        data="webdataset",
        model="unet",
        out=str(tmp_path / "run"),
        **settings,
        **{"data.root": shards, "data.columns": ["image.png"], "data.label": "mask.png"},
        **{"model.width": 4, "evaluate.metrics": ["iou"]},
    )
    assert 0 <= result.summary["iou_global"] <= 1


# --- tables and archives --------------------------------------------------------------------------
def table_rows() -> list[dict[str, Any]]:
    rows = []
    for row in range(12):
        target = {"boxes": BOXES[row], "count": COUNTS[row]}
        rows.append({"age": AGES[row].tolist(), "height": float(row), "label": target, **target})
    return rows


def json_lines(folder: Path) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, table_rows())))
    return {"root": str(folder / "rows.jsonl")}


def parquet(folder: Path) -> dict[str, Any]:
    pq.write_table(pa.Table.from_pylist(table_rows()), folder / "train.parquet")
    return {"root": str(folder), "test_fraction": 0.0}


@pytest.mark.parametrize(("source", "write"), [(JsonLines, json_lines), (Parquet, parquet)])
def test_columns_become_inputs_and_a_dictionary_column_becomes_two_targets(
    source: type[Source], write: Any, tmp_path: Path
) -> None:
    built = source(**write(tmp_path), columns=["age", "height"], separate=True).build()  # type: ignore[call-arg]
    assert isinstance(built.shape, PackedShape)
    assert built.shape.arguments == {"age": (3,), "height": (1,)}
    assert [(part.name, part.shape) for part in built.targets] == [
        ("boxes", (2, 4)),
        ("count", (1,)),
    ]


def test_setting_data_targets_combines_columns_into_one_structured_target(tmp_path: Path) -> None:
    lines = ["a,b,width,height", *(f"{row},{2 * row},{row}.5,{row}" for row in range(10))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    source = Csv(root=str(tmp_path / "rows.csv"), targets=["width", "height"], test_fraction=0)
    built = source.build()
    assert [part.name for part in built.targets] == ["width", "height"]
    assert built.labels[3].tolist() == [1, 3.5, 1, 3]
    assert built.inputs[3].tolist() == [3, 6]
    with pytest.raises(ValueError, match=r"data\.targets"):
        Csv(root=str(tmp_path / "rows.csv"), targets=["width"], label="height").build()


def archive() -> dict[str, Any]:
    boxes = np.concatenate([np.reshape(rows, (-1, 4)) for rows in BOXES])
    return {
        "x.image": PIXELS[:, None],
        "x.age": AGES,
        "y.boxes": boxes,
        "y.boxes.rows": np.array(COUNTS),
        "y.count": np.array(COUNTS),
    }


def test_numpy_archive_with_several_inputs_and_targets_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", **archive())
    built = NumPy(root=str(tmp_path), test_fraction=0).build()
    assert isinstance(built.shape, PackedShape)
    assert built.shape.arguments == {"image": (1, 8, 8), "age": (3,)}
    assert built.labels[5].tolist() == [2, 5, 1, 2, 3, 5, 1, 2, 3, 1, 2]
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train/0.npz", **archive())
    np.savez(tmp_path / "train/1.npz", **archive())
    clients = Npz(root=str(tmp_path), test_fraction=0).build()
    assert len(clients) == 24
    np.testing.assert_array_equal(clients.labels[12:], built.labels)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"y.boxes.rows": np.array([1] * 12)[:, None]}, r"y\.boxes\.rows"),
        ({"y.boxes.rows": np.array([2] * 12)}, r"y\.boxes\.rows"),
        ({"x": PIXELS}, r"an array x and an array x\.image"),
        ({"x.age": AGES[:5]}, r"x\.age 5"),
    ],
)
def test_numpy_archive_with_wrong_arrays_is_refused(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "train.npz", **{**archive(), **changes})
    with pytest.raises(ValueError, match=text):
        NumPy(root=str(tmp_path)).build()
