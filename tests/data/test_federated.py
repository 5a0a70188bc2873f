"""Test which pixels and labels a corruption changes, and the statistics of a partition."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raysim.data.corruption import Rotation, rotate_images
from raysim.data.federated import federate, pool_clients
from raysim.data.partition import IID, Dirichlet, Domain, DomainClass, Partitioner, Quantity
from raysim.data.sources import Synthetic
from raysim.data.split_picture import draw_partition
from raysim.data.split_statistics import class_counts, statistics

SOURCE = Synthetic(samples=300, test_samples=20, shape=[1, 8, 8])
ANGLES = [0.0, 90.0, 135.0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_uncorrupted_data_use_the_file_of_their_source_without_a_copy(cache: Path) -> None:
    data = federate(SOURCE, IID(5), 0)
    assert data.dataset_path == SOURCE.build().path and len(list(cache.glob("*.arrow"))) == 1
    assert data.central.tolist() == list(range(300, 320))
    assert data.open() is data.open()
    assert data.title == "Synthetic(samples=300, test_samples=20), IID(clients=5)"


def test_federated_data_is_equal_after_pickling() -> None:
    data = federate(replace(SOURCE, mean=[0.5], std=[0.25], augment=["flip"]), IID(5), 0)
    copy = pickle.loads(pickle.dumps(data))
    assert (
        copy.pipeline == data.pipeline
        and copy.pipeline.mean == (0.5,)
        and copy.pipeline.augment == ("flip",)
    )
    assert np.array_equal(copy.open().inputs, data.open().inputs)
    assert np.array_equal(copy.partition.train.rows(3), data.partition.train.rows(3))


def test_federated_data_has_the_image_pipeline_of_its_source() -> None:
    source = replace(
        SOURCE, augment=["resized_crop", "rotate"], crop_area=[0.6, 1.0], jitter=0.1, grey=0.5
    )
    data = federate(source, IID(5), 0)
    assert data.pipeline == source.pipeline() and data.pipeline.crop_area == (0.6, 1.0)
    assert "crop_area" not in data.title


def test_label_noise_changes_only_training_labels() -> None:
    source, partitioner = replace(SOURCE, label_noise=0.3), Quantity(6, 2.0, test_fraction=0.25)
    data, clean = federate(source, partitioner, 1), SOURCE.build()
    wrong = data.open().labels != clean.labels
    for client in range(6):
        rows = data.partition.train.rows(client)
        assert wrong[rows].sum() == int(len(rows) * 0.3 + 1e-9)
        assert not wrong[data.partition.test.rows(client)].any()
    assert not wrong[data.central].any()
    assert np.array_equal(data.open().inputs, clean.inputs)
    assert not np.array_equal(federate(source, partitioner, 2).open().labels, data.open().labels)


def test_rotation_per_client_turns_all_images_of_a_client_by_one_angle() -> None:
    source = replace(SOURCE, rotation=Rotation(per="client", angles=ANGLES))
    data, clean = federate(source, IID(4), 0), SOURCE.build()
    for client, angle in enumerate([0.0, 90.0, 135.0, 0.0]):
        for rows in (data.partition.train.rows(client), data.partition.test.rows(client)):
            turned = rotate_images(
                images=clean.inputs[rows], angles=np.full(len(rows), angle), interpolation="nearest"
            )
            assert np.array_equal(data.open().inputs[rows], turned)
            assert set(data.open().domains[rows].tolist()) == {client % 3}
    assert data.open().domain_names == ["0 degrees", "90 degrees", "135 degrees"]


def test_central_test_set_has_every_angle_if_rotation_test_has_the_value_all() -> None:
    clean = SOURCE.build()
    spread = federate(
        replace(SOURCE, rotation=Rotation(per="client", angles=[0.0, 90.0])), IID(4), 0
    )
    assert np.array_equal(spread.open().inputs[300::2], clean.inputs[300::2])
    assert np.array_equal(spread.open().inputs[301::2], np.rot90(clean.inputs[301::2], axes=(2, 3)))
    every = federate(
        replace(SOURCE, rotation=Rotation(per="client", angles=[0.0, 90.0], test="all")), IID(4), 0
    )
    assert every.central.tolist() == list(range(300, 340))
    assert np.array_equal(every.open().inputs[300:320], clean.inputs[300:])
    assert np.array_equal(every.open().inputs[320:], np.rot90(clean.inputs[300:], axes=(2, 3)))
    assert np.array_equal(every.open().labels[300:], np.tile(clean.labels[300:], 2))


def test_low_dirichlet_concentration_gives_a_client_mostly_one_rotation_angle() -> None:
    rotation = Rotation(per="image", angles=ANGLES, concentration=0.05)
    data = federate(replace(SOURCE, rotation=rotation), IID(10), 0)
    turns = data.open().domains
    most = []
    for client in range(10):
        rows = np.concatenate((data.partition.train.rows(client), data.partition.test.rows(client)))
        most.append(np.bincount(turns[rows], minlength=3).max() / len(rows))
    assert (
        np.median(most) > 0.8
    )  # a small concentration: nearly one angle per client, not one angle for all
    assert len(set(turns.tolist())) == 3


def test_rotation_does_not_change_the_domains_of_the_samples() -> None:
    source = replace(SOURCE, domains=3, rotation=Rotation(per="client", angles=ANGLES))
    data = federate(source, Domain(2), 0)
    assert np.array_equal(data.open().domains, replace(SOURCE, domains=3).build().domains)


def test_block_averages_are_computed_after_the_rotation() -> None:
    source = replace(SOURCE, pool=2, rotation=Rotation(per="client", angles=[135.0]))
    data, clean = federate(source, IID(1), 0), SOURCE.build()
    turned = rotate_images(images=clean.inputs, angles=np.full(320, 135.0), interpolation="nearest")
    sums = turned.reshape(320, 1, 4, 2, 4, 2).astype(int).sum(axis=(3, 5))
    assert np.array_equal(data.open().inputs, (sums + 2) // 4)


def test_samples_without_a_client_are_not_corrupted() -> None:
    source = replace(SOURCE, label_noise=1.0, rotation=Rotation(per="client", angles=[90.0]))
    data, clean = federate(source, IID(5, fraction=0.5), 0), SOURCE.build()
    used = np.concatenate((data.partition.train.indices, data.partition.test.indices, data.central))
    unused = np.setdiff1d(np.arange(320), used)
    assert len(unused) == 120
    assert np.array_equal(data.open().inputs[unused], clean.inputs[unused])
    assert np.array_equal(data.open().labels[unused], clean.labels[unused])


def test_corrupted_data_are_stored_once_for_each_partition_and_seed(cache: Path) -> None:
    noisy = replace(SOURCE, label_noise=0.1)
    paths = [
        federate(noisy, IID(clients), seed).dataset_path
        for clients, seed in ((5, 0), (5, 0), (4, 0), (5, 1))
    ]
    assert paths[0] == paths[1] and len(set(paths)) == 3
    paths = [federate(replace(SOURCE, pool=2), IID(5), seed).dataset_path for seed in (0, 1)]
    assert paths[0] == paths[1]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"mean": [0.5, 0.5], "std": [0.5, 0.5]}, r"data.mean=\[0.5, 0.5\]"),
        ({"pool": 3}, r"data.pool=3 .* 8 x 8"),
        ({"classes": 1, "label_noise": 0.5}, "data.label_noise=0.5"),
    ],
)
def test_data_settings_that_do_not_fit_images_or_classes_are_rejected(
    settings: dict, key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        federate(replace(SOURCE, **settings), IID(5), 0)


def test_validation_images_are_rotated_by_the_angle_of_their_client() -> None:
    source = replace(SOURCE, rotation=Rotation(per="client"), label_noise=1.0)
    without, having = (
        federate(source, IID(5, validation_fraction=share), 0) for share in (0.0, 0.1)
    )
    validation = having.partition.validation
    assert without.partition.validation is None and validation is not None
    assert np.array_equal(without.partition.test.indices, having.partition.test.indices)
    assert (
        validation.counts.tolist() == [6] * 5 and having.partition.train.counts.tolist() == [42] * 5
    )
    parts = (having.partition.train, having.partition.test, validation)
    assert sorted(np.concatenate([part.indices for part in parts]).tolist()) == list(range(300))
    data, clean = having.open(), federate(SOURCE, IID(5), 0).open()
    assert np.array_equal(
        data.domains[validation.indices], validation.owners
    )  # the k-th angle for client k
    assert np.array_equal(
        data.labels[validation.indices], clean.labels[validation.indices]
    )  # noise is for training
    assert statistics(having)["unused"] == 0
    assert pool_clients(having).partition.validation is validation


def test_clients_can_be_tested_on_central_test_samples_of_their_domain() -> None:
    source = Synthetic(samples=300, test_samples=60, domains=3)
    for partitioner in (
        Domain(2, test_fraction=None),
        DomainClass([[0, 1, 2], [3, 4, 5, 6, 7, 8, 9]], test_fraction=None),
    ):
        data = federate(source, partitioner, 0)
        images, train, test = data.open(), data.partition.train, data.partition.test
        assert sorted(train.indices.tolist()) == list(range(300)), "nothing is held out twice"
        assert sorted(test.indices.tolist()) == data.central.tolist() == list(range(300, 360))
        for client in range(6):
            rows = [part.rows(client) for part in (train, test)]
            assert [set(images.domains[part].tolist()) for part in rows] == [{client // 2}] * 2
            if isinstance(partitioner, DomainClass):
                assert set(images.labels[rows[1]].tolist()) <= set(partitioner.groups[client % 2])
        assert statistics(data)["unused"] == 0
    assert (
        federate(source, Domain(2, test_fraction=None), 0).partition.test.counts.tolist()
        == [10] * 6
    )


@pytest.mark.parametrize(
    ("source", "key"),
    [
        (Synthetic(samples=30, test_samples=0), "has none"),
        (Synthetic(rotation=Rotation(per="client")), "data.rotation.per=client"),
    ],
)
def test_null_as_test_fraction_is_refused_if_central_test_samples_are_missing_or_rotated(
    source: Synthetic, key: str
) -> None:
    with pytest.raises(ValueError, match=f"partition.test_fraction=null .*{key}"):
        federate(source, Domain(test_fraction=None), 0)


def test_split_statistics_have_sizes_and_label_entropies_of_the_clients() -> None:
    data = federate(SOURCE, Dirichlet(20, 0.05, minimum=0), 0)
    numbers = statistics(data)
    counts = class_counts(data)
    assert (
        numbers["clients"] == 20 and numbers["empty_clients"] == (counts.sum(axis=1) == 0).sum() > 0
    )
    assert numbers["samples"] + data.partition.test.counts.sum() + numbers["unused"] == 300
    assert numbers["sizes"]["max"] == data.partition.train.counts.max()
    assert (
        0
        < numbers["heterogeneity"]["label_entropy"]
        < numbers["pooled_entropy"]
        <= np.log(10) + 1e-12
    )
    one_class = federate(replace(SOURCE, classes=1), IID(3), 0)
    assert statistics(one_class)["heterogeneity"]["label_entropy"] == 0.0


@pytest.mark.pictures
@pytest.mark.parametrize(
    "partitioner", [IID(3), Dirichlet(30, 0.05, minimum=0), Dirichlet(1500, 0.5, minimum=0)]
)
def test_picture_of_a_partition_is_a_png_file(partitioner: Partitioner, tmp_path: Path) -> None:
    from PIL import Image

    draw_partition(federate(SOURCE, partitioner, 0), tmp_path / "partition.png")
    with Image.open(tmp_path / "partition.png") as image:
        assert image.format == "PNG" and min(image.size) > 500
