"""Test the splits of partitioners, their properties, and the settings that are rejected."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from raysim.data import partition as partition_module
from raysim.data.federated import federate
from raysim.data.listed import Listed
from raysim.data.partition import (
    CSR,
    IID,
    Dirichlet,
    DirichletClient,
    Domain,
    DomainClass,
    Natural,
    Partition,
    Partitioner,
    Quantity,
    Shards,
)
from raysim.data.splits import (
    dirichlet_client_split,
    dirichlet_label_split,
    domain_class_split,
    draw_classes,
    fraction_count,
    hold_out,
    iid_split,
    quantity_split,
    shard_split,
    share_counts,
    subsample,
)
from raysim.data.tabular import Tabular

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 200))
DOMAINS = np.random.default_rng(1).integers(0, 4, len(LABELS))

WHOLE = [
    IID(7),
    Dirichlet(20, 0.5),
    Dirichlet(20, 0.3, balance=True),
    Dirichlet(25, 0.3, balance=True, grouping=10),
    Dirichlet(20, 0.5, per="client"),
    DirichletClient(20, 0.1),
    DirichletClient(20, 0.1, concentration="prior_scaled"),
    DirichletClient(20, 0.1, concentration="prior_scaled", remaining=True, turns="sequential"),
    Shards(20, 3),
    Quantity(20, 0.5),
    Domain(3),
    DomainClass([[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]),
]


def split(partitioner: Partitioner, seed: int = 3) -> Partition:
    return partitioner.split(LABELS, DOMAINS, 10, seed)


def histograms(csr: CSR) -> np.ndarray:
    return np.stack(
        [np.bincount(LABELS[csr.rows(client)], minlength=10) for client in range(len(csr))]
    )


def all_rows(partition: Partition) -> list[int]:
    return sorted([*partition.train.indices.tolist(), *partition.test.indices.tolist()])


@pytest.mark.parametrize("partitioner", WHOLE, ids=repr)
def test_split_gives_every_sample_to_one_client(partitioner: Partitioner) -> None:
    partition = split(partitioner)
    assert all_rows(partition) == list(range(len(LABELS)))
    for csr in (partition.train, partition.test):
        assert csr.indices.dtype == csr.offsets.dtype == np.int64
        assert (
            csr.offsets[0] == 0 and csr.offsets[-1] == len(csr.indices) and (csr.counts >= 0).all()
        )


@pytest.mark.parametrize("partitioner", WHOLE, ids=repr)
def test_split_depends_on_the_seed_only(
    partitioner: Partitioner,
) -> None:
    first, again, other = split(partitioner), split(partitioner), split(partitioner, seed=4)
    assert np.array_equal(first.train.indices, again.train.indices)
    assert np.array_equal(first.test.offsets, again.test.offsets)
    assert not np.array_equal(first.train.indices, other.train.indices)


def test_hold_out_leaves_each_client_a_training_sample() -> None:
    csr = CSR(np.arange(12), np.array([0, 0, 1, 2, 12]))
    parts = hold_out(csr, 0.25, np.random.default_rng(0).permutation(12))
    assert parts.test.counts.tolist() == [0, 0, 0, 2]
    assert parts.train.counts.tolist() == [0, 1, 1, 8]
    assert hold_out(csr, 0.0, np.arange(12)).test.counts.tolist() == [0, 0, 0, 0]


def test_larger_fraction_contains_all_samples_of_a_smaller_fraction() -> None:
    small, large, whole = (split(Domain(2, fraction=f, test_fraction=0.1)) for f in (0.1, 0.5, 1.0))
    for client in range(8):
        rows = [set(part.train.rows(client).tolist()) for part in (small, large, whole)]
        assert rows[0] < rows[1] < rows[2]
        total = len(rows[2]) + len(whole.test.rows(client))
        assert len(rows[0]) == fraction_count(total=total - total // 10, fraction=0.1)
    assert np.array_equal(small.test.indices, whole.test.indices)


def test_hold_out_takes_test_samples_first_and_validation_samples_next() -> None:
    csr, order = CSR(np.arange(12), np.array([0, 0, 1, 3, 12])), np.arange(12)
    parts = hold_out(csr, 0.34, order, 0.5)
    assert parts.validation is not None
    assert [parts.test.counts.tolist(), parts.validation.counts.tolist()] == [
        [0, 0, 0, 3],
        [0, 0, 1, 4],
    ]
    assert parts.train.counts.tolist() == [0, 1, 1, 2]
    assert (parts.test.rows(3).tolist(), parts.validation.rows(3).tolist()) == (
        [3, 4, 5],
        [6, 7, 8, 9],
    )
    small = split(Domain(2, fraction=0.1, test_fraction=0.0, validation_fraction=0.1))
    assert small.validation is not None and small.spare is not None
    for client in range(8):
        left = len(small.train.rows(client)) + len(small.spare.rows(client))
        total = left + len(small.validation.rows(client))
        assert left == total - total // 10 and len(small.train.rows(client)) == fraction_count(
            total=left, fraction=0.1
        )


def test_number_of_samples_in_a_fraction_has_no_rounding_error() -> None:
    assert fraction_count(total=100, fraction=0.29) == 29


def test_split_functions_accept_tensors() -> None:
    labels, order = torch.tensor([0, 1, 0, 1]), torch.tensor([3, 2, 1, 0])
    rows = dirichlet_label_split(
        labels=labels, proportions=torch.tensor([[0.5, 0.5], [0.0, 1.0]]), order=order
    )
    assert rows.indices.tolist() == [2, 0, 3, 1] and rows.offsets.tolist() == [0, 1, 4]


def test_dirichlet_with_large_alpha_gives_clients_the_global_class_shares() -> None:
    for partitioner in (
        Dirichlet(10, 1e6, test_fraction=0),
        DirichletClient(10, 1e6, test_fraction=0),
    ):
        shares = histograms(split(partitioner).train) / 200
        assert np.abs(shares - 0.1).max() < 0.06, partitioner


def test_small_alpha_scaled_by_class_size_gives_most_clients_mainly_one_class() -> None:
    settings = {
        "concentration": "prior_scaled",
        "remaining": True,
        "turns": "sequential",
        "test_fraction": 0,
    }
    counts = histograms(split(DirichletClient(10, 0.01, **settings)).train)
    assert np.median(counts.max(axis=1)) > 180


def test_all_clients_have_equally_many_samples_if_partition_is_dirichlet_client() -> None:
    partition = split(DirichletClient(30, 0.5, test_fraction=0))
    assert set(partition.train.counts.tolist()) == {len(LABELS) // 30}
    assert len(set(partition.train.indices.tolist())) == 30 * (len(LABELS) // 30)


def test_dirichlet_client_draws_other_classes_if_its_classes_are_used_up() -> None:
    rows = dirichlet_client_split(
        labels=[0, 1, 1, 1],
        proportions=[[1.0, 0.0]],
        turns=[0, 0, 0, 0],
        uniforms=[0.0, 0.999, 0.0, 1 - 2**-53],
        order=[0, 3, 2, 1],
    )
    assert rows.indices.tolist() == [0, 3, 2, 1]


@pytest.mark.parametrize(("shares", "label"), [([0.5, 0.5, 0.0], 1), ([0.0, 0.25, 0.75], 2)])
def test_random_value_equal_to_1_selects_last_class_with_a_positive_share(
    shares: list[float], label: int
) -> None:
    arguments = {"labels": [0, 1, 2], "turns": [0], "order": [0, 1, 2]}
    rows = dirichlet_client_split(**arguments, proportions=[shares], uniforms=[1.0])
    assert rows.indices.tolist() == [label]


def test_balanced_dirichlet_adds_samples_to_client_below_its_equal_share() -> None:
    # After class 0 the first client holds one of four samples, half of its equal share.
    rows = dirichlet_label_split(
        labels=[0, 1, 1, 1],
        proportions=[[1.0, 0.0], [1.0, 0.0]],
        order=[0, 1, 2, 3],
        balance=True,
    )
    assert rows.offsets.tolist() == [0, 4, 4]


def test_balanced_dirichlet_makes_client_sizes_nearly_equal() -> None:
    sizes = split(Dirichlet(10, 0.1, balance=True, minimum=0, test_fraction=0)).train.counts
    assert sizes.max() <= len(LABELS) // 10 + 200
    assert sizes.max() < split(Dirichlet(10, 0.1, minimum=0, test_fraction=0)).train.counts.max()


def test_dirichlet_split_is_redrawn_until_clients_have_enough_samples() -> None:
    # at this setting about one draw in ten satisfies the minimum
    assert split(Dirichlet(20, 0.3, minimum=20, test_fraction=0)).train.counts.min() >= 20
    assert split(Dirichlet(20, 0.3, minimum=0, test_fraction=0), seed=0).train.counts.min() < 20


def test_minimum_size_of_a_client_may_equal_the_number_of_all_samples() -> None:
    partition = split(Quantity(1, 1.0, minimum=len(LABELS), test_fraction=0))
    assert partition.train.counts.tolist() == [len(LABELS)]


def test_group_of_clients_gets_samples_in_proportion_to_its_size() -> None:
    partition = split(Dirichlet(25, 0.3, balance=True, grouping=10, test_fraction=0))
    groups = np.add.reduceat(partition.train.counts, [0, 10, 20])
    assert groups.tolist() == [800, 800, 400]
    assert partition.train.counts.min() >= len(LABELS) // 50


def test_client_has_at_most_four_classes_if_it_gets_two_shards() -> None:
    counts = histograms(split(Shards(20, 2, test_fraction=0)).train)
    assert (counts > 0).sum(axis=1).max() <= 4 and set(counts.sum(axis=1).tolist()) == {100}


def test_shards_of_uneven_sizes_lose_no_samples() -> None:
    rows = shard_split(
        labels=np.zeros(7, int),
        num_clients=2,
        shards_per_client=2,
        order=np.arange(7),
        assignment=[3, 0, 2, 1],
    )
    assert rows.indices.tolist() == [6, 0, 1, 4, 5, 2, 3] and rows.offsets.tolist() == [
        0,
        3,
        7,
    ]


def test_partition_domain_gives_each_client_samples_of_one_domain() -> None:
    counts = split(Domain(2, test_fraction=0)).train
    assert [set(DOMAINS[counts.rows(client)].tolist()) for client in range(8)] == [
        {d} for d in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    assert len(split(Domain(2))) == 4 * 2


def test_partition_domain_class_gives_each_client_some_classes_of_one_domain() -> None:
    rows = domain_class_split(
        domains=[0, 1, 0, 1], labels=[0, 1, 2, 0], num_domains=2, class_groups=[[0], [1]]
    )
    assert rows.indices.tolist() == [0, 3, 1] and rows.offsets.tolist() == [0, 1, 1, 2, 3]
    assert len(split(DomainClass([[0], [1, 2], [7]]))) == 4 * 3


def test_subsample_of_fraction_one_keeps_every_row() -> None:
    rows = subsample(indices=[4, 1, 0, 3], offsets=[0, 3, 4], fraction=1.0, order=[0, 1, 2, 3, 4])
    assert rows.indices.tolist() == [0, 1, 4, 3] and rows.offsets.tolist() == [0, 3, 4]


def test_splits_accept_fewer_samples_than_clients() -> None:
    assert iid_split(order=np.arange(3), num_clients=5).offsets.tolist() == [0, 1, 2, 3, 3, 3]
    shares = np.full(1000, 1 / 1000)
    rows = quantity_split(order=np.arange(1000), proportions=shares)
    assert rows.offsets.tolist() == list(range(1001))


@pytest.mark.parametrize(
    "kind", [IID(100_000), Dirichlet(100_000, 0.5, minimum=0), Quantity(100_000, 0.5, minimum=0)]
)
def test_split_into_a_hundred_thousand_clients_assigns_every_sample(kind: Partitioner) -> None:
    labels = np.arange(60_000) % 10
    partition = kind.split(labels, np.zeros_like(labels), 10, 0)
    assert len(partition) == 100_000 and all_rows(partition) == list(range(60_000))


def test_pickled_partition_is_equal_and_rows_of_a_client_are_not_copied() -> None:
    partition = split(IID(4))
    copy = pickle.loads(pickle.dumps(partition))
    assert np.array_equal(copy.train.rows(2), partition.train.rows(2))
    assert partition.train.rows(2).base is partition.train.indices
    assert np.array_equal(partition.train.owners[partition.train.offsets[2] :][:3], [2, 2, 2])


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: IID(0), "partition.clients=0"),
        (lambda: Dirichlet(0, 0.1), "partition.clients=0"),
        (lambda: DirichletClient(0, 0.1), "partition.clients=0"),
        (lambda: Shards(0, 2), "partition.clients=0"),
        (lambda: Quantity(0, 0.1), "partition.clients=0"),
        (lambda: Natural(clients=0), "partition.clients=0"),
        (lambda: Domain(0), "partition.clients_per_domain=0"),
        (lambda: IID(3, fraction=0.0), "partition.fraction=0.0"),
        (lambda: IID(3, fraction=1.01), "partition.fraction=1.01"),
        (lambda: Dirichlet(3, 0.1, per="row"), "partition.per='row'"),
        (
            lambda: DirichletClient(3, 0.1, concentration="row"),
            "partition.concentration='row'",
        ),
        (lambda: IID(3, test_fraction=1.0), "partition.test_fraction=1.0"),
        (lambda: IID(3, test_fraction=-0.1), "partition.test_fraction=-0.1"),
        (lambda: IID(3, validation_fraction=1.0), "^partition.validation_fraction=1.0"),
        (
            lambda: IID(3, test_fraction=0.6, validation_fraction=0.4),
            r"test_fraction=0\.6 .*validation_fraction=0\.4",
        ),
        (
            lambda: IID(3, test_fraction=None),
            r"partition\.test_fraction=null .*partition=domain",
        ),
        (lambda: Dirichlet(3, 0.0), "partition.alpha=0.0"),
        (lambda: Dirichlet(3, 0.1, minimum=-1), r"partition.minimum=-1"),
        (lambda: Quantity(3, 0.0), "partition.alpha=0.0"),
        (lambda: Quantity(3, 1.0, minimum=-1), r"partition.minimum=-1"),
        (
            lambda: DirichletClient(3, 0.1, remaining=True),
            r"partition\.remaining=true .*prior_scaled",
        ),
        (
            lambda: DirichletClient(3, 0.1, turns="random"),
            r"partition\.turns='random'",
        ),
        (lambda: DomainClass([[0, 1], [1]]), r"partition.groups=\[\[0, 1\], \[1\]\]"),
        (lambda: DomainClass([[-1, 1]]), r"partition.groups=\[\[-1, 1\]\]"),
        (lambda: split(DomainClass([[0], [10]])), r"partition\.groups .*class 10"),
        (lambda: split(DomainClass([[0, 10], [1]])), r"partition\.groups .*class 10"),
        (
            lambda: split(Shards(1001, 2)),
            r"2002 .* 2000.*partition\.clients=1000",
        ),
        (lambda: split(Shards(2, 2000)), r"partition\.clients=1 or"),
        (lambda: split(Shards(2, 2001)), r"partition\.shards_per_client=1000"),
        (lambda: split(DirichletClient(2001, 0.1)), r"partition\.clients=2000"),
        (
            lambda: split(Dirichlet(300, 0.5, minimum=10)),
            r"3000 samples.*partition\.clients=200",
        ),
        (
            lambda: split(Quantity(100, 0.05, minimum=2)),
            r"partition\.alpha=0\.05.* 10000 .*partition\.minimum=0",
        ),
        (
            lambda: split(Quantity(300, 1.0, minimum=10)),
            r"3000 samples.*partition\.clients=200",
        ),
    ],
)
def test_error_of_impossible_split_mentions_key_and_value(make, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        make()


@pytest.mark.parametrize(("proportions", "attempts"), [(5_000, 50), (1_000, 20)])
def test_impossible_split_is_redrawn_only_a_limited_number_of_times(
    proportions: int, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "MAX_PROPORTIONS", proportions)
    with pytest.raises(ValueError, match=f" {attempts} "):
        split(Quantity(100, 0.05, minimum=2))


# ---- lists of the user's own ---------------------------------------------------------------------
def listed_rows(content: object, tmp_path: Path, test_fraction: float = 0.2) -> Partition:
    (tmp_path / "split.json").write_text(json.dumps(content))
    labels = np.zeros(10, dtype=np.int64)
    return Listed(file=str(tmp_path / "split.json"), test_fraction=test_fraction).split(
        labels, labels, 1, 0
    )


@pytest.mark.parametrize("content", [[[3, 1], [], [9]], {"alice": [3, 1], "bob": [], "carol": [9]}])
def test_listed_partition_gives_clients_the_samples_listed_in_its_file(
    content: object, tmp_path: Path
) -> None:
    partition = listed_rows(content, tmp_path, test_fraction=0.0)
    assert [partition.train.rows(client).tolist() for client in range(3)] == [[3, 1], [], [9]]
    partition = listed_rows([[*range(10)]], tmp_path, test_fraction=0.3)
    assert (len(partition.test.indices), len(partition.train.indices)) == (3, 7)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ([[0, 1], [1]], "row 1 .*client 0 .*client 1"),
        ([[0, 0]], "row 0 .*client 0 .*client 0"),
        ([[0], [10]], "row 10 .*client 1.* 0 to 9"),
        ([[0], [-1]], "row -1 .*client 1"),
        ([[0.5]], "client 0"),
        ([0, 1], "client 0"),
        ([], "clients"),
        (3, "clients"),
    ],
)
def test_listed_partition_rejects_wrong_lists(content: object, value: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"partition\.file=.*split\.json.*{value}"):
        listed_rows(content, tmp_path)


def test_listed_partition_rejects_missing_file() -> None:
    labels = np.zeros(3, dtype=np.int64)
    for partition, key in (
        (Listed(), r"partition=listed needs partition\.file"),
        (Listed(file="none.json"), r"partition\.file=none\.json"),
    ):
        with pytest.raises(ValueError, match=key):
            partition.split(labels, labels, 1, 0)


def test_function_draw_classes_selects_only_classes_with_remaining_samples() -> None:
    shares, turns, uniforms = (
        np.array([[0.5, 0.5]]),
        np.zeros(3, np.int64),
        np.array([0.0, 0.3, 0.6]),
    )
    assert draw_classes(shares, turns, uniforms, np.array([0, 3])).tolist() == [1, 1, 1]


def test_domain_partition_ignores_test_samples_of_domains_without_clients() -> None:
    domains = np.array([0, 2, 1, 0, 2])
    tests = Domain(1).tests(np.zeros(5, np.int64), domains, 2)
    assert [tests.rows(client).tolist() for client in range(2)] == [[0, 3], [2]]


def test_central_test_samples_of_a_domain_are_divided_among_its_clients() -> None:
    domains = np.array([0] * 4 + [1] * 5)
    tests = Domain(3).tests(np.zeros(9, np.int64), domains, 2)
    rows = [tests.rows(client).tolist() for client in range(6)]
    assert rows == [[0, 3], [1], [2], [4, 7], [5, 8], [6]]


def test_client_is_tested_on_its_domain_and_classes_if_partition_is_domain_class() -> None:
    labels, domains = np.array([0, 0, 1, 1, 0]), np.array([0, 2, 1, 0, 2])
    tests = DomainClass([[0], [1]]).tests(labels, domains, 2)
    assert [tests.rows(client).tolist() for client in range(len(tests))] == [[0], [3], [], [2]]


@pytest.mark.parametrize(
    "partitioner", [Dirichlet(3, 0.1), DirichletClient(3, 0.1), Shards(3, 2), DomainClass([[0]])]
)
def test_partition_by_class_refuses_data_without_classes(partitioner: Partitioner) -> None:
    with pytest.raises(ValueError, match=type(partitioner).__name__):
        federate(Tabular("diabetes"), partitioner, 0)


def test_last_client_gets_the_remaining_samples_if_shares_sum_below_one() -> None:
    assert share_counts(10, np.array([0.5, 0.4])).tolist() == [5, 5]


# The first bytes of SHA-256 over the training rows and offsets of each of `WHOLE`.
DIGESTS = [
    "9df6f83a5965",
    "d3d4564519fa",
    "04addb6782eb",
    "576ca2537d0d",
    "e4d3b91f0379",
    "32520a50f886",
    "9e654f698f39",
    "d186ecd1f629",
    "7c37c1185dd5",
    "f39e92429989",
    "610fae404ace",
    "4b78dc51c531",
]


@pytest.mark.parametrize(
    ("partitioner", "expected"), zip(WHOLE, DIGESTS, strict=True), ids=[*map(repr, WHOLE)]
)
def test_split_of_a_fixed_seed_has_the_stored_checksum(
    partitioner: Partitioner, expected: str
) -> None:
    train = split(partitioner).train
    digest = hashlib.sha256(
        train.indices.astype("<i8").tobytes() + train.offsets.astype("<i8").tobytes()
    ).hexdigest()
    assert digest[:12] == expected
