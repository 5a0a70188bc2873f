"""Test measures of bias in clients' features and classifiers against computations by hand.

Also test the file and the pictures of these measures.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from probing import make
from tiny_runs import clients_of_sizes, coordinate, run_spec

from raysim.api.declarations import Evaluation
from raysim.api.messages import Probe
from raysim.results.probes import load_probes, save_probes
from raysim.training import probe as diagnostics

LABELS = np.array([0, 1, 2, 2])
SEEN = np.array([True, True, False])
PROBABILITIES = np.array(
    [[0.5, 0.25, 0.25], [0, 1, 0], [0.5, 0.25, 0.25], [0.25, 0.75, 0]], np.float32
)


# ---------------------------------------------------------------- rows


def test_probe_samples_have_each_class_equally_often() -> None:
    labels = np.array([5, 0, 5, 0, 5, 5, 0, 2])
    rows = diagnostics.balanced_rows(labels, 2, np.random.default_rng(0))
    assert rows.dtype == np.int64
    assert np.all(np.diff(rows) > 0)
    assert sorted(labels[rows]) == [0, 0, 2, 5, 5]


def test_probe_samples_include_all_samples_of_a_small_class() -> None:
    labels = np.array([1, 0, 0, 1, 1])
    assert diagnostics.balanced_rows(labels, 9, np.random.default_rng(0)).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_probe_samples_depend_on_the_random_generator_only() -> None:
    labels = np.repeat(np.arange(4), 50)
    drawn = [
        diagnostics.balanced_rows(labels, 3, np.random.default_rng(seed)).tolist()
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


# ---------------------------------------------------------------- features


def test_feature_distance_is_relative_to_received_features() -> None:
    local, received = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[0.0, 0.0], [0.0, 4.0]])
    # |differences| are 5 and 2, |received| 0 and 4.
    assert diagnostics.feature_distance(local, received) == 7 / 4


def test_feature_similarity_is_the_mean_cosine_of_rows() -> None:
    local = np.array([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0], [3.0, 4.0]])
    received = np.array([[5.0, 0.0], [1.0, 0.0], [4.0, 0.0], [1.0, 0.0]])
    assert diagnostics.feature_similarity(local, received) == pytest.approx(
        (1 + 0 - 1 + 0.6) / 4, abs=1e-15
    )


def test_equal_features_have_distance_0_and_similarity_1() -> None:
    features = make(rows=50, features=33).features
    features[7] = 0
    assert diagnostics.feature_distance(features, features) == 0.0
    assert diagnostics.feature_similarity(features, features) == 1.0


def test_scaled_features_change_distance_but_not_similarity() -> None:
    received = make().received
    assert diagnostics.feature_distance(4 * received, received) == pytest.approx(3)
    assert diagnostics.feature_similarity(4 * received, received) == 1.0
    assert diagnostics.feature_similarity(-received, received) == -1.0


def test_feature_distance_is_nan_if_only_the_received_features_are_all_zero() -> None:
    nothing, something = np.zeros((2, 3)), np.ones((2, 3))
    assert diagnostics.feature_distance(nothing, nothing) == 0.0
    assert math.isnan(diagnostics.feature_distance(something, nothing))
    assert diagnostics.feature_similarity(something, nothing) == 0.0
    assert diagnostics.feature_similarity(nothing, nothing) == 1.0


# ---------------------------------------------------------------- classifier


def test_bias_towards_seen_classes_is_computed_from_samples_of_other_classes() -> None:
    assert diagnostics.unseen_probability(PROBABILITIES, LABELS, SEEN) == 0.125
    assert diagnostics.seen_share(PROBABILITIES, LABELS, SEEN) == 0.875
    output = diagnostics.output_distribution(PROBABILITIES, LABELS, SEEN)
    assert output is not None
    assert output.tolist() == [0.375, 0.5, 0.125]


def test_bias_towards_seen_classes_is_computed_for_a_client_with_one_class() -> None:
    seen = np.array([True, False, False])
    assert diagnostics.unseen_probability(PROBABILITIES, LABELS, seen) == (1 + 0.25 + 0) / 3
    assert diagnostics.seen_share(PROBABILITIES, LABELS, seen) == 0.25


@pytest.mark.parametrize("measure", ["unseen_probability", "seen_share", "output_distribution"])
def test_bias_towards_seen_classes_is_none_if_no_sample_has_an_unseen_class(measure: str) -> None:
    assert getattr(diagnostics, measure)(PROBABILITIES, LABELS, np.ones(3, bool)) is None
    # The one class which this client lacks has no test sample either.
    assert getattr(diagnostics, measure)(PROBABILITIES[:2], LABELS[:2], SEEN) is None


def test_feature_likeness_is_mean_cosine_between_seen_and_unseen_classes() -> None:
    labels, seen = np.array([0, 0, 1, 2]), np.array([True, False, True])
    features = np.array(
        [[2, 0], [0, 3], [1, 0], [-5, 0]], np.float32
    )  # rows 0, 1 and 3 are of seen classes
    assert diagnostics.feature_likeness(features, labels, seen) == pytest.approx((1 + 0 - 1) / 3)
    assert diagnostics.feature_likeness(features, labels, np.ones(3, bool)) is None


# ---------------------------------------------------------------- summary


def test_probe_summary_averages_only_clients_that_have_a_value() -> None:
    same = np.ones((4, 2), np.float32)
    one = Probe(0, 1, LABELS, SEEN, 0.25, same, same, PROBABILITIES)
    two = Probe(1, 1, LABELS, np.ones(3, bool), 0.75, -same, same, PROBABILITIES)
    assert diagnostics.summarise_probes([one, two]) == {
        "local_accuracy": 0.5,
        "local_accuracy_worst": 0.25,
        "feature_distance": pytest.approx(1),
        "feature_similarity": 0.0,
        "feature_likeness": pytest.approx(1),
        "unseen_probability": 0.125,
        "seen_share": 0.875,
    }


def test_weight_of_a_client_equals_its_number_of_probe_samples_of_unseen_classes() -> None:
    """Check the weight of each client in a mean over the classes that it has not seen.

    Class 1 has one probe sample, and class 2 has two. One client has not seen class 1, so its
    weight is 1. The weight of a client that has seen neither class is 3.
    """
    features = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    few = Probe(0, 1, LABELS, np.array([True, False, True]), 0.5, features, features, PROBABILITIES)
    most = Probe(
        1, 1, LABELS, np.array([True, False, False]), 0.5, features, features, PROBABILITIES
    )
    found = diagnostics.summarise_probes([few, most])
    assert found["unseen_probability"] == pytest.approx((1 + 1 + 0.25 + 0) / 4)
    assert found["seen_share"] == pytest.approx((0 + 3 * 0.25) / 4)


def test_weight_of_feature_likeness_equals_pairs_of_seen_and_unseen_samples() -> None:
    features = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.float32)
    one = Probe(0, 1, LABELS, np.array([True, False, True]), 0.5, features, features, PROBABILITIES)
    two = Probe(1, 1, LABELS, SEEN, 0.5, features, features, PROBABILITIES)
    found = diagnostics.summarise_probes([one, two])
    # The first client has 1 unseen sample and 3 seen ones, the second 2 and 2.
    assert found["feature_likeness"] == pytest.approx((1 + 0 + 0 + 4 * 0) / (3 + 4))


def test_probe_summary_without_probes_has_empty_columns() -> None:
    nothing = diagnostics.summarise_probes([])
    assert list(nothing) == list(diagnostics.summarise_probes([make()]))
    assert set(nothing.values()) == {None}


# ---------------------------------------------------------------- file


def assert_same(one: Probe, other: Probe) -> None:
    assert (one.client, one.version, one.accuracy) == (other.client, other.version, other.accuracy)
    for name in ("labels", "seen", "features", "received", "probabilities"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine.dtype, mine.shape, mine.tobytes()) == (
            theirs.dtype,
            theirs.shape,
            theirs.tobytes(),
        )


def test_probes_have_the_same_bits_after_writing_and_reading(tmp_path: Path) -> None:
    probes = [make(7, version=2), make(3, version=1, features=4), make(5, version=2)]
    probes[1].features[0, 0] = np.nan
    probes[2].features.T[:] = 1.5  # through a view
    save_probes(probes, tmp_path / "probes.safetensors")
    back = load_probes(tmp_path / "probes.safetensors")
    for one, other in zip(probes, back, strict=True):
        assert_same(one, other)
    assert [path.name for path in tmp_path.iterdir()] == ["probes.safetensors"]


def test_probe_file_stores_transposed_and_reversed_arrays_unchanged(tmp_path: Path) -> None:
    probe = make()
    across = Probe(
        0,
        3,
        probe.labels[::-1],
        probe.seen,
        0.5,
        probe.features.T,
        probe.received.T,
        probe.probabilities.T,
    )
    save_probes([across], tmp_path / "probes.safetensors")
    assert_same(across, load_probes(tmp_path / "probes.safetensors")[0])


def test_probe_file_stores_features_of_a_received_version_once(tmp_path: Path) -> None:
    def length(versions: tuple[int, int]) -> int:
        probes = [make(client, version, features=500) for client, version in enumerate(versions)]
        save_probes(probes, tmp_path / "probes.safetensors")
        return (tmp_path / "probes.safetensors").stat().st_size

    assert length((3, 4)) - length((3, 3)) >= make(features=500).received.nbytes


def test_probe_file_keeps_separate_features_if_clients_received_different_models(
    tmp_path: Path,
) -> None:
    probes = [make(0), make(1)]
    probes[1].received[0, 0] += 1
    save_probes(probes, tmp_path / "probes.safetensors")
    for one, other in zip(probes, load_probes(tmp_path / "probes.safetensors"), strict=True):
        assert_same(one, other)


def test_probe_file_can_be_empty(tmp_path: Path) -> None:
    save_probes([], tmp_path / "probes.safetensors")
    assert load_probes(tmp_path / "probes.safetensors") == []


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\x02\0\0\0\0\0\0\0{}"])
def test_file_that_is_no_probe_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "probes.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"probes\.safetensors"):
        load_probes(tmp_path / "probes.safetensors")


def test_probes_need_a_central_test_set() -> None:
    with pytest.raises(ValueError, match=r"^evaluate\.probe=1"):
        coordinate(run_spec(data=clients_of_sizes([5] * 4)), evaluate=Evaluation(probe=1))
