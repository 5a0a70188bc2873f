"""Test that several data sets can be joined, and that each of them becomes one domain.

Also test the errors for data sets with different classes or image shapes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import DIGITS, picture, write_mnist, write_parquet, write_picture, write_strips

from raysim.data.domains import Domains
from raysim.data.federated import federate
from raysim.data.partition import Domain
from raysim.data.sources import Digits


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write four data sets in four formats; return their folder."""
    write_mnist(tmp_path, train=20, test=10)
    for split, count in (("train", 20), ("test", 10)):
        pixels = [picture(32, 32, 3) for _ in range(count)]
        write_parquet(
            tmp_path / f"mnist_m/{split}.parquet", pixels, list(range(10)) * (count // 10)
        )
        for digit in DIGITS:
            write_picture(tmp_path / f"street/{split}/{digit}/1.png", picture(8, 8, 3))
    write_strips(tmp_path / "usps", size=16)
    return tmp_path


def test_joined_domains_store_all_training_rows_before_all_test_rows(
    root: Path,
) -> None:
    names = ["usps", "mnist", "street", "mnist_m", "digits"]
    built = Domains(root=str(root), download=False, domains=names, size=16, channels=3).build()
    counts = [(12, 10), (20, 10), (10, 10), (20, 10), (1442, 355)]
    assert (
        built.domain_names == names and built.class_names == DIGITS and built.shape == (3, 16, 16)
    )
    train, test = np.split(built.domains, [built.train_rows])
    assert train.tolist() == [k for k, (count, _) in enumerate(counts) for _ in range(count)]
    assert test.tolist() == [k for k, (_, count) in enumerate(counts) for _ in range(count)]


def test_each_domain_has_the_images_and_labels_of_its_data_set(root: Path) -> None:
    built = Domains(
        root=str(root), download=False, domains=["usps", "digits"], size=8, channels=3
    ).build()
    alone = Digits(size=8, channels=3).build()
    rows = built.domains == 1
    assert np.array_equal(built.inputs[rows], alone.inputs) and np.array_equal(
        built.labels[rows], alone.labels
    )
    grey = built.inputs[built.domains == 0]
    assert (grey == grey[:, :1]).all(), "one channel is repeated"
    assert built.labels[built.domains == 0].tolist() == [*range(10), 0, 1, *range(10)]


def test_digit_data_sets_all_have_the_same_ten_class_names(root: Path) -> None:
    for name in ("mnist", "mnist_m", "usps", "street", "digits"):
        built = Domains(root=str(root), download=False, domains=[name]).build()
        assert built.class_names == DIGITS and sorted(set(built.labels.tolist())) == list(range(10))


def test_partition_fraction_reduces_training_samples_only(root: Path) -> None:
    source = Domains(
        root=str(root), download=False, domains=["digits", "mnist", "usps"], size=8, channels=3
    )
    share, whole = (federate(source, Domain(fraction=f, test_fraction=0.1), 0) for f in (0.1, 1.0))
    rows = source.build().domains
    for client, count in enumerate((1442, 20, 12)):
        train_count = count - int(0.1 * count)
        assert len(whole.partition.train.rows(client)) == train_count
        assert len(share.partition.train.rows(client)) == int(0.1 * train_count)
        assert set(rows[share.partition.train.rows(client)].tolist()) == {client}
    assert np.array_equal(share.partition.test.indices, whole.partition.test.indices)
    assert np.array_equal(share.central, whole.central) and len(share.central) == 355 + 10 + 10


def test_error_mentions_two_domains_with_different_classes_or_shapes(root: Path) -> None:
    write_strips(root / "letters", classes=["a", "b"])
    settings = {"root": str(root), "download": False}
    with pytest.raises(
        ValueError,
        match=r"data\.domains: letters .* a, b.*usps .* 0, 1, .*, 9",
    ):
        Domains(domains=["usps", "letters"], **settings).build()
    with pytest.raises(
        ValueError,
        match=r"mnist .*\(1, 28, 28\).*usps .*\(1, 16, 16\).*data\.size",
    ):
        Domains(domains=["usps", "mnist"], **settings).build()


def test_error_of_an_unknown_domain_suggests_a_similar_domain_name(root: Path) -> None:
    with pytest.raises(ValueError, match=r"SVHN: train_32x32.mat .*data\.domains"):
        Domains(root=str(root), download=False).build()
    with pytest.raises(
        ValueError,
        match=rf"data.domains .*data.root={root} .*minst .*mean mnist",
    ):
        Domains(root=str(root), download=False, domains=["minst"]).build()
    for domains in ([], ["usps", "usps"]):
        with pytest.raises(ValueError, match=r"data.domains="):
            Domains(domains=domains)


def test_domains_reject_regression_data(root: Path) -> None:
    for split in ("train", "test"):
        write_parquet(
            root / f"ages/{split}.parquet", [picture() for _ in range(4)], [0.5, 1.5, 2.5, 3.5]
        )
    with pytest.raises(ValueError, match=r"data\.domains: ages .*regression"):
        Domains(
            root=str(root), download=False, domains=["digits", "ages"], size=8, channels=1
        ).build()


def test_changed_file_of_a_domain_is_read_again(root: Path) -> None:
    settings = {"root": str(root), "download": False, "domains": ["usps", "digits"], "size": 8}
    before = Domains(**settings).build()
    assert Domains(**settings).build().path == before.path
    write_strips(root / "usps", size=16)
    assert Domains(**settings).build().path != before.path


def test_digit_domains_have_their_published_sizes(shared: Path) -> None:
    names = ["usps", "mnist_m", "digits"]
    built = Domains(
        root=str(shared / "data"), download=False, domains=names, size=32, channels=3
    ).build()
    assert np.bincount(built.domains[: built.train_rows]).tolist() == [7291, 3000, 1442]
    assert np.bincount(built.domains[built.train_rows :]).tolist() == [2007, 2000, 355]
    # zeros are rings: dark in the middle, in every domain whose background is dark
    for domain in (0, 2):
        zeros, ones = (
            built.inputs[(built.domains == domain) & (built.labels == digit)] for digit in (0, 1)
        )
        assert zeros[:, :, 14:18, 14:18].mean() < ones[:, :, 14:18, 14:18].mean() / 2
