"""Sources end as one memory-mapped file, the same however they are stored, and say in a sentence what they miss."""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raysim.data.dataset import Dataset, Samples, cached
from raysim.data.sources import Cifar10, Cifar100, Digits, FashionMnist, ImageFolder, Mnist, Parquet, Source, Synthetic

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def picture(height: int = 4, width: int = 4, channels: int = 1) -> np.ndarray:
    pixels = RNG.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return pixels[:, :, 0] if channels == 1 else pixels


def encoded(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_parquet(path: Path, pixels: list[np.ndarray], labels: list, struct: bool = True, **columns: list) -> None:
    content = [encoded(one) for one in pixels]
    images = pa.array([{"bytes": one, "path": None} for one in content]) if struct else pa.array(content)
    metadata = columns.pop("metadata", None)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": images, "label": labels, **columns}).replace_schema_metadata(metadata), path)


def write_picture(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def fake_mnist(folder: Path, train: int = 6, test: int = 3) -> np.ndarray:
    images = RNG.integers(0, 256, (train + test, 28, 28), dtype=np.uint8)
    labels = (np.arange(train + test) % 10).astype(np.uint8)
    (folder / "MNIST/raw").mkdir(parents=True)
    for name, rows in (("train", slice(0, train)), ("t10k", slice(train, None))):
        header = np.array([2051, len(images[rows]), 28, 28], ">i4").tobytes()
        (folder / f"MNIST/raw/{name}-images-idx3-ubyte").write_bytes(header + images[rows].tobytes())
        header = np.array([2049, len(images[rows])], ">i4").tobytes()
        (folder / f"MNIST/raw/{name}-labels-idx1-ubyte").write_bytes(header + labels[rows].tobytes())
    return images


# ---- the file ------------------------------------------------------------------------------------------------------


def test_a_data_set_is_read_only_mapped_and_pickles_as_its_path() -> None:
    built = Synthetic(samples=20_000).build()
    assert not built.images.flags.writeable and not built.labels.flags.writeable
    assert built.images.shape == (20_200, 1, 8, 8) and built.labels.dtype == built.domains.dtype == np.int64
    content = pickle.dumps(built)
    assert len(content) < 1000
    assert np.array_equal(pickle.loads(content).images, built.images)


def test_the_second_build_opens_the_file_of_the_first(cache: Path) -> None:
    first = Synthetic().build()
    written = first.path.stat().st_mtime_ns
    assert Synthetic(label_noise=0.5, pool=2).build().path == first.path  # corruptions do not change the clean file
    assert first.path.stat().st_mtime_ns == written
    assert Synthetic(seed=1).build().path != first.path
    assert first.path.parent == cache and len(list(cache.glob("*.arrow"))) == 2


def test_the_cache_setting_comes_before_the_environment(tmp_path: Path) -> None:
    assert Synthetic(cache=str(tmp_path / "own")).build().path.parent == tmp_path / "own"


def test_processes_that_ask_at_once_get_one_file_and_one_of_them_builds_it(cache: Path) -> None:
    built = []

    def make() -> Samples:
        built.append(threading.get_ident())
        time.sleep(0.05)  # long enough for the other to find no file; the result does not depend on it
        zeros = np.zeros(2, dtype=np.int64)
        return Samples(np.ones((2, 1, 2, 2), dtype=np.uint8), zeros, zeros, 1, ["a"], ["b"])

    threads = [threading.Thread(target=cached, args=(None, "one", {}, make)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and [path.suffix for path in cache.iterdir() if path.name != ".lock"] == [".arrow"]


def test_a_write_that_fails_leaves_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        Synthetic().build()
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_damaged_file_is_named(cache: Path) -> None:
    path = Synthetic().build().path
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=rf"{path} is not a readable data set .* delete it"):
        Dataset(path)


# ---- named data sets -----------------------------------------------------------------------------------------------


def test_digits_are_scaled_to_full_range_with_a_test_share_of_every_class() -> None:
    digits = Digits().build()
    assert digits.images.shape == (1797, 1, 8, 8) and digits.images.max() == 255 and digits.num_classes == 10
    test = np.bincount(digits.labels[digits.train_rows :])
    assert (test == np.bincount(digits.labels) // 5).all()


def test_mnist_is_read_from_a_folder_that_holds_it(tmp_path: Path) -> None:
    images = fake_mnist(tmp_path)
    built = Mnist(root=str(tmp_path), download=False).build()
    assert np.array_equal(built.images[:, 0], images) and built.train_rows == 6
    assert built.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8] and built.num_classes == 10


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    fake_mnist(tmp_path)
    first = Mnist(root=str(tmp_path)).build()
    file = tmp_path / "MNIST/raw/train-labels-idx1-ubyte"
    os.utime(file, ns=(1, 1))
    assert Mnist(root=str(tmp_path)).build().path != first.path


@pytest.mark.parametrize(
    ("kind", "file"),
    [(Mnist, "train-images"), (FashionMnist, "train-images"), (Cifar10, "data_batch_1"), (Cifar100, "train")],
)
def test_a_root_without_the_set_is_named_with_what_was_looked_for(
    kind: type[Source], file: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"data.root={tmp_path} holds no .*{file}.*data.download=true"):
        kind(root=str(tmp_path), download=False).build()


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fail)
    with pytest.raises(
        ValueError, match=r"download failed \(no route to host\): name a folder that holds it in data.root"
    ):
        Cifar10(root=str(tmp_path)).build()


def test_a_damaged_mnist_file_is_named(tmp_path: Path) -> None:
    fake_mnist(tmp_path)
    (tmp_path / "MNIST/raw/t10k-images-idx3-ubyte").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=rf"data.root={tmp_path}: MNIST cannot be read there"):
        Mnist(root=str(tmp_path)).build()


def test_synthetic_data_have_the_stated_shape_and_balanced_classes_in_every_domain() -> None:
    built = Synthetic(shape=[3, 5, 7], classes=4, domains=2, samples=80, test_samples=8).build()
    assert built.shape == (3, 5, 7) and built.domain_names == ["domain 0", "domain 1"]
    cells = np.bincount(built.domains[:80] * 4 + built.labels[:80])
    assert set(cells.tolist()) == {10}


def test_noise_free_synthetic_classes_differ_and_domains_shift_them() -> None:
    built = Synthetic(classes=2, domains=2, samples=8, test_samples=0, noise=0.0).build()
    assert len({image.tobytes() for image in built.images}) == 4


# ---- Parquet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("struct", [True, False])
def test_parquet_images_come_back_pixel_for_pixel(struct: bool, tmp_path: Path) -> None:
    pixels = [picture() for _ in range(5)]
    names = {"class_names": json.dumps(["cat", "dog", "cow"])}
    write_parquet(tmp_path / "train.parquet", pixels[:3], [0, 1, 0], struct, metadata=names)
    write_parquet(tmp_path / "test.parquet", pixels[3:], [1, 1], struct, metadata=names)
    built = Parquet(root=str(tmp_path)).build()
    assert np.array_equal(built.images[:, 0], np.stack(pixels)) and built.labels.tolist() == [0, 1, 0, 1, 1]
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
    grey = built.images[built.domains == 1]
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


def test_a_broken_picture_in_parquet_is_named_by_its_row(tmp_path: Path) -> None:
    for split in ("train", "test"):
        table = pa.table({"image": [encoded(picture()), b"no picture"], "label": [0, 1]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'train.parquet'}, row 1 is not a readable picture"):
        Parquet(root=str(tmp_path)).build()


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
    assert np.array_equal(built.images[:, 0], np.stack([pixels[0], pixels[1], pixels[2], pixels[3]]))


def test_a_split_file_decides_what_is_test(tmp_path: Path) -> None:
    write_picture(tmp_path / "a/x/1.png", picture())
    write_picture(tmp_path / "a/x/2.png", picture())
    (tmp_path / "split.csv").write_text("path,domain,class,split\na/x/1.png,a,x,test\na/x/2.png,a,x,train\n")
    assert ImageFolder(root=str(tmp_path)).build().train_rows == 1
    (tmp_path / "split.csv").write_text("path,domain,class,split\na/x/3.png,a,x,test\n")
    with pytest.raises(ValueError, match=r"split.csv names a/x/3.png, which is not there"):
        ImageFolder(root=str(tmp_path)).build()
    (tmp_path / "split.csv").write_text("path,class,split\n")
    with pytest.raises(ValueError, match=r"split.csv lacks the column domain"):
        ImageFolder(root=str(tmp_path)).build()


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


# ---- settings of all sources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"size": 0}, r"data.size=0 .* at least 1"),
        ({"channels": 2}, r"data.channels=2 .* 1, 3 or null"),
        ({"label_noise": 1.5}, r"data.label_noise=1.5 .* from 0 to 1"),
        ({"pool": 0}, r"data.pool=0"),
        ({"augment": ["shear"]}, r"data.augment=\['shear'\] .* crop, flip and rotate"),
        ({"mean": [0.5]}, r"data.mean=\[0.5\] and data.std=None belong together"),
        ({"mean": [0.5], "std": [0.0]}, r"data.std=\[0.0\] .* above 0"),
        ({"shape": [2, 4, 4]}, r"data.shape=\[2, 4, 4\]"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Synthetic(**settings)


def test_arrays_are_resized_as_pictures_are() -> None:
    plain, large = (
        Synthetic(samples=5, test_samples=0).build(),
        Synthetic(samples=5, test_samples=0, size=12, channels=3).build(),
    )
    resized = Image.fromarray(plain.images[2, 0]).resize((12, 12), Image.Resampling.BILINEAR)
    assert large.shape == (3, 12, 12)
    assert np.abs(large.images[2].astype(int) - np.asarray(resized)).max() <= 1


# ---- real data -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "mean"), [(Mnist, 0.1307), (FashionMnist, 0.2860)])
def test_the_real_sets_have_their_published_means(kind: type[Source], mean: float, shared: Path) -> None:
    built = kind(root=str(shared / "data"), download=False).build()
    assert built.images.shape == (70_000, 1, 28, 28) and built.train_rows == 60_000
    assert abs(built.images[:60_000].mean() / 255 - mean) < 1e-4


def test_pacs_has_four_domains_and_the_stated_split(shared: Path) -> None:
    built = ImageFolder(root=str(shared / "data/PACS"), size=32).build()
    assert built.domain_names == ["art_painting", "cartoon", "photo", "sketch"]
    assert built.class_names == ["dog", "elephant", "giraffe", "guitar", "horse", "house", "person"]
    assert (built.train_rows, len(built)) == (2656, 3320)


def test_a_source_may_keep_some_classes_in_an_order_of_its_own(tmp_path: Path) -> None:
    for domain in ("clipart", "sketch"):
        for index, name in enumerate(("axe", "bat", "cat")):
            for number in range(5):
                write_picture(tmp_path / domain / name / f"{number}.png", picture() * 0 + 10 * index + number)
    built = ImageFolder(root=str(tmp_path), only=["cat", "axe"], channels=1).build()
    assert built.class_names == ["cat", "axe"]
    assert sorted(built.images[built.labels == 0].max(axis=(1, 2, 3)).tolist()) == sorted([20, 21, 22, 23, 24] * 2)
    assert np.bincount(built.labels[: built.train_rows]).tolist() == [8, 8]
    assert np.bincount(built.domains).tolist() == [10, 10]
    assert Synthetic(classes=4, samples=8, only=["2", "0"]).build().num_classes == 2
    with pytest.raises(ValueError, match=r"data.only names 'bta': did you mean bat\?"):
        ImageFolder(root=str(tmp_path), only=["bta"]).build()
