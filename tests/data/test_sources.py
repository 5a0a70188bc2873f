"""Test that a source is stored as one memory-mapped file, and that errors name missing files."""

from __future__ import annotations

import bz2
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import DIGITS, picture, write_mnist, write_picture, write_strips

from raysim.data.batches import Pipeline
from raysim.data.dataset import Dataset, Samples, open_or_build
from raysim.data.sources import (
    Cifar10,
    Cifar100,
    Digits,
    FashionMnist,
    ImageFolder,
    Mnist,
    Source,
    Svhn,
    Synthetic,
    Usps,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- the cached file -----------------------------------------------------------------------------
def test_data_set_has_read_only_arrays_and_is_pickled_without_them() -> None:
    built = Synthetic(samples=20_000).build()
    assert not built.inputs.flags.writeable and not built.labels.flags.writeable
    assert (
        built.inputs.shape == (20_200, 1, 8, 8)
        and built.labels.dtype == built.domains.dtype == np.int64
    )
    content = pickle.dumps(built)
    assert len(content) < 1000
    assert np.array_equal(pickle.loads(content).inputs, built.inputs)


def test_second_build_of_equal_data_reuses_the_stored_file(cache: Path) -> None:
    first = Synthetic().build()
    written = first.path.stat().st_mtime_ns
    assert (
        Synthetic(label_noise=0.5, pool=2).build().path == first.path
    )  # corruptions do not change the clean file
    assert first.path.stat().st_mtime_ns == written
    assert Synthetic(seed=1).build().path != first.path
    assert first.path.parent == cache and len(list(cache.glob("*.arrow"))) == 2


def test_cache_folder_in_the_settings_takes_precedence_over_the_environment(tmp_path: Path) -> None:
    assert Synthetic(cache=str(tmp_path / "other")).build().path.parent == tmp_path / "other"


def test_only_one_of_several_simultaneous_builds_writes_the_data_file(cache: Path) -> None:
    built = []

    def make() -> Samples:
        built.append(threading.get_ident())
        time.sleep(
            0.05
        )  # long enough for the other to find no file; the result does not depend on it
        zeros = np.zeros(2, dtype=np.int64)
        return Samples(np.ones((2, 1, 2, 2), dtype=np.uint8), zeros, zeros, 1, ["a"], ["b"])

    threads = [
        threading.Thread(target=open_or_build, args=(None, "one", {}, make)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (made,) = cache.glob("one-*.arrow")
    assert len(built) == 1 and {path.name for path in cache.iterdir()} == {
        ".lock",
        ".verified",
        made.name,
    }


def test_failed_write_leaves_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        Synthetic().build()
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_error_mentions_the_damaged_data_file(cache: Path) -> None:
    path = Synthetic().build().path
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=rf"^{path} "):
        Dataset(path)


def flip(path: Path, position: int) -> None:
    """Invert the bits of one byte of a file.

    position: the position of the byte in the file.
    """
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("array", ["inputs", "labels", "domains"])
def test_flipped_byte_of_any_array_is_detected(array: str) -> None:
    built = Synthetic(samples=50, test_samples=0).build()
    flip(built.path, built.path.read_bytes().find(getattr(built, array)[20:40].tobytes()))
    with pytest.raises(ValueError, match=rf"^{built.path} .*checksum"):
        Synthetic(samples=50, test_samples=0).build()


def test_data_file_with_a_damaged_byte_is_refused_or_read_correctly() -> None:
    path = Synthetic(shape=[1, 2, 2], classes=2, samples=4, test_samples=0).build().path
    content = path.read_bytes()
    good = Dataset(path)
    names, images = [good.class_names, good.domain_names], good.inputs.copy()
    for place in range(0, len(content), 3):
        flip(path, place)
        try:
            dataset = Dataset(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:  # padding, or what the reader has twice
            assert (
                np.array_equal(dataset.inputs, images)
                and [dataset.class_names, dataset.domain_names] == names
            )
        path.write_bytes(content)


def test_checksum_of_a_data_file_is_verified_only_once_on_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from raysim.data import dataset

    verified: list[object] = []
    original = dataset._checksum
    monkeypatch.setattr(
        dataset, "_checksum", lambda *parts: (verified.append(1), original(*parts))[1]
    )
    path = Synthetic().build().path
    Synthetic().build()
    Dataset(path)
    assert len(verified) == 2, "written, and opened for the first time"
    monkeypatch.setattr(dataset.socket, "gethostname", lambda: "another")
    Dataset(path)
    assert len(verified) == 3


# ---- data sets by name ---------------------------------------------------------------------------
def test_digits_source_has_images_of_ten_classes_with_pixel_values_up_to_255() -> None:
    digits = Digits().build()
    assert digits.inputs.shape == (1797, 1, 8, 8)
    assert digits.inputs.max() == 255
    assert digits.num_classes == 10


def test_digits_source_uses_a_fifth_of_each_class_as_test_samples() -> None:
    digits = Digits().build()
    test = np.bincount(digits.labels[digits.train_rows :])
    assert (test == np.bincount(digits.labels) // 5).all()


def test_mnist_is_read_from_its_folder(tmp_path: Path) -> None:
    images = write_mnist(tmp_path)
    built = Mnist(root=str(tmp_path), download=False).build()
    assert np.array_equal(built.inputs[:, 0], images) and built.train_rows == 6
    assert built.labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8] and built.num_classes == 10


def test_data_set_is_built_again_if_the_time_of_an_mnist_file_changes(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    first = Mnist(root=str(tmp_path)).build()
    file = tmp_path / "MNIST/raw/train-labels-idx1-ubyte"
    os.utime(file, ns=(1, 1))
    assert Mnist(root=str(tmp_path)).build().path != first.path


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        (Mnist, "train-images"),
        (FashionMnist, "train-images"),
        (Cifar10, "data_batch_1"),
        (Cifar100, "train"),
        (Svhn, "train_32x32.mat"),
        (Usps, "usps.bz2"),
    ],
)
def test_error_of_missing_data_set_mentions_its_file_and_setting_data_download(
    kind: type[Source], file: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"data.root={tmp_path} .*{file}.*data.download=true"):
        kind(root=str(tmp_path), download=False).build()


@pytest.mark.parametrize(
    "message",
    [
        "no route to host",
        "Error downloading a.gz: Tried http://HOST/a.gz, "
        "got: <urlopen error [Errno -2] no route to host> ",
        "<urlopen error no route to host>",
    ],
)
def test_error_of_failed_download_mentions_the_reason_and_setting_data_root(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    def fail(*_: object, **__: object) -> None:
        raise OSError(message)

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fail)
    with pytest.raises(
        ValueError,
        match=r"\(no route to host\).*data\.root",
    ):
        Cifar10(root=str(tmp_path)).build()


def test_error_mentions_mnist_if_its_files_are_damaged(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST/raw/t10k-images-idx3-ubyte").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match=rf"data.root={tmp_path}: MNIST "):
        Mnist(root=str(tmp_path)).build()


def test_mnist_needs_a_label_for_every_image(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=6, test=5)
    file = tmp_path / "MNIST/raw/train-labels-idx1-ubyte"
    content = file.read_bytes()
    file.write_bytes(np.array([2049, 5], ">i4").tobytes() + content[8:13])
    with pytest.raises(ValueError, match=rf"data.root={tmp_path}: MNIST .*6 images and 5 labels"):
        Mnist(root=str(tmp_path)).build()
    file.write_bytes(content[:-1] + b"\xc8")
    with pytest.raises(ValueError, match=rf"{tmp_path}.*MNIST.* 200"):
        Mnist(root=str(tmp_path)).build()


def test_mnist_images_must_have_one_size(tmp_path: Path) -> None:
    images = write_mnist(tmp_path, train=6, test=3)
    header = np.array([2051, 3, 14, 56], ">i4").tobytes()
    (tmp_path / "MNIST/raw/t10k-images-idx3-ubyte").write_bytes(header + images[6:].tobytes())
    with pytest.raises(
        ValueError,
        match=r"MNIST .*28 x 28 .*14 x 56",
    ):
        Mnist(root=str(tmp_path)).build()


def test_mnist_ignores_processed_files_written_by_old_torchvision(tmp_path: Path) -> None:
    images = write_mnist(tmp_path)
    other = (torch.zeros(2, 28, 28, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    (tmp_path / "MNIST/processed").mkdir()
    for name in ("training.pt", "test.pt"):
        torch.save(other, tmp_path / "MNIST/processed" / name)
    built = Mnist(root=str(tmp_path)).build()
    assert np.array_equal(built.inputs[:, 0], images) and built.train_rows == 6
    for file in (tmp_path / "MNIST/raw").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"MNIST/processed\."):
        Mnist(root=str(tmp_path)).build()


def write_usps(folder: Path) -> None:
    """Write USPS with three training images and one test image.

    In the files, labels are from 1 to 10 and pixels from -1 to 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, labels in (("usps.bz2", (1, 10, 3)), ("usps.t.bz2", (2,))):
        values = " ".join(f"{place}:{1.0 if place == 1 else -1.0}" for place in range(1, 257))
        (folder / name).write_bytes(
            bz2.compress("".join(f"{label} {values}\n" for label in labels).encode())
        )


@pytest.mark.parametrize("inner", ["", "USPS"])
def test_usps_is_found_in_data_root_or_in_its_subfolder_usps(inner: str, tmp_path: Path) -> None:
    write_usps(tmp_path / inner)
    built = Usps(root=str(tmp_path), download=False).build()
    assert (
        built.labels.tolist() == [0, 9, 2, 1]
        and built.train_rows == 3
        and built.class_names == DIGITS
    )
    assert built.shape == (1, 16, 16) and built.inputs[0].sum() == built.inputs[0, 0, 0, 0] == 255


def test_svhn_source_reads_label_10_as_0_and_keeps_the_order_of_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision
    from scipy.io import savemat

    monkeypatch.setattr(torchvision.datasets.SVHN, "_check_integrity", lambda self: True)
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    for split in ("train", "test"):
        savemat(
            tmp_path / f"{split}_32x32.mat",
            {"X": images, "y": np.array([[10], [1], [9], [2]], dtype=np.uint8)},
        )
    built = Svhn(root=str(tmp_path), download=False).build()
    assert (
        built.labels.tolist() == [0, 1, 9, 2] * 2
        and built.train_rows == 4
        and built.class_names == DIGITS
    )
    assert np.array_equal(built.inputs[1], images[..., 1].transpose(2, 0, 1))


def test_usps_prefers_torchvision_files_to_a_folder_of_strips(
    tmp_path: Path,
) -> None:
    strips = write_strips(tmp_path / "usps", size=16)
    assert np.array_equal(Usps(root=str(tmp_path)).build().inputs[:, 0], strips)
    write_usps(tmp_path)
    assert len(Usps(root=str(tmp_path)).build()) == 4


def test_synthetic_data_have_balanced_classes_in_each_domain() -> None:
    built = Synthetic(shape=[3, 5, 7], classes=4, domains=2, samples=80, test_samples=8).build()
    assert built.shape == (3, 5, 7) and built.domain_names == ["domain 0", "domain 1"]
    cells = np.bincount(built.domains[:80] * 4 + built.labels[:80])
    assert set(cells.tolist()) == {10}


def test_synthetic_images_of_one_class_differ_between_domains() -> None:
    built = Synthetic(classes=2, domains=2, samples=8, test_samples=0, noise=0.0).build()
    assert len({image.tobytes() for image in built.inputs}) == 4


# ---- settings of all sources ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"size": 0}, "data.size=0"),
        ({"channels": 2}, "data.channels=2"),
        ({"label_noise": 1.5}, "data.label_noise=1.5"),
        ({"pool": 0}, r"data.pool=0"),
        ({"augment": ["shear"]}, r"data.augment=\['shear'\]"),
        ({"crop_area": [0.9, 0.5]}, r"data.crop_area=\[0.9, 0.5\]"),
        ({"crop_area": [0.0, 0.5]}, r"data.crop_area=\[0.0, 0.5\]"),
        ({"crop_area": [0.5]}, r"data.crop_area=\[0.5\]"),
        ({"jitter": 0.6}, "data.jitter=0.6"),
        ({"grey": -0.1}, "data.grey=-0.1"),
        ({"mean": [0.5]}, r"data.mean=\[0.5\] and data.std=None"),
        ({"mean": [0.5], "std": [0.0]}, r"data.std=\[0.0\]"),
        ({"shape": [2, 4, 4]}, r"data.shape=\[2, 4, 4\]"),
    ],
)
def test_error_of_impossible_setting_of_synthetic_data_mentions_its_key(
    settings: dict, key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        Synthetic(**settings)


def test_resized_synthetic_images_equal_those_resized_by_pillow() -> None:
    plain, large = (
        Synthetic(samples=5, test_samples=0).build(),
        Synthetic(samples=5, test_samples=0, size=12, channels=3).build(),
    )
    resized = Image.fromarray(plain.inputs[2, 0]).resize((12, 12), Image.Resampling.BILINEAR)
    assert large.shape == (3, 12, 12)
    assert np.abs(large.inputs[2].astype(int) - np.asarray(resized)).max() <= 1


def test_image_pipeline_settings_do_not_change_the_stored_data_file() -> None:
    source = Synthetic(
        mean=[0.5],
        std=[0.25],
        augment=["resized_crop", "rotate"],
        rotate_degrees=10.0,
        crop_area=[0.6, 1.0],
        jitter=0.2,
        grey=0.5,
    )
    expected = Pipeline((0.5,), (0.25,), ("resized_crop", "rotate"), 4, 10.0, (0.6, 1.0), 0.2, 0.5)
    assert source.pipeline() == expected and Synthetic().pipeline() == Pipeline()
    assert source.build().path == Synthetic().build().path


# ---- real data -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "mean"), [(Mnist, 0.1307), (FashionMnist, 0.2860)])
def test_mnist_and_fashion_mnist_have_their_published_sizes_and_means(
    kind: type[Source], mean: float, shared: Path
) -> None:
    built = kind(root=str(shared / "data"), download=False).build()
    assert built.inputs.shape == (70_000, 1, 28, 28) and built.train_rows == 60_000
    assert abs(built.inputs[:60_000].mean() / 255 - mean) < 1e-4


def test_sources_read_only_the_listed_classes_in_the_order_of_the_list(tmp_path: Path) -> None:
    for domain in ("clipart", "sketch"):
        for index, name in enumerate(("axe", "bat", "cat")):
            for number in range(5):
                write_picture(
                    tmp_path / domain / name / f"{number}.png", picture() * 0 + 10 * index + number
                )
    built = ImageFolder(root=str(tmp_path), only=["cat", "axe"], channels=1).build()
    assert built.class_names == ["cat", "axe"]
    assert sorted(built.inputs[built.labels == 0].max(axis=(1, 2, 3)).tolist()) == sorted(
        [20, 21, 22, 23, 24] * 2
    )
    assert np.bincount(built.labels[: built.train_rows]).tolist() == [8, 8]
    assert np.bincount(built.domains).tolist() == [10, 10]
    assert Synthetic(classes=4, samples=8, only=["2", "0"]).build().num_classes == 2
    with pytest.raises(ValueError, match=r"data.only .*'bta'.* bat"):
        ImageFolder(root=str(tmp_path), only=["bta"]).build()


@pytest.mark.parametrize(("kind", "rows"), [(Usps, (7291, 9298)), (Cifar100, (2000, 2500))])
def test_torchvision_data_sets_can_be_stored_as_strips(
    kind: type[Source], rows: tuple[int, int], shared: Path
) -> None:
    built = kind(root=str(shared / "data"), download=False).build()
    assert (built.train_rows, len(built)) == rows
