"""Numbers that say how unlike clients are, checked with a pencil."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.data.heterogeneity import SCALES, format_heterogeneity, heterogeneity


def test_clients_of_one_class_each_share_nothing() -> None:
    found = heterogeneity(np.diag([6, 6, 6, 6]))
    assert found.keys() == SCALES.keys()
    assert (found["label_entropy"], found["effective_classes"], found["largest_share"]) == (
        0.0,
        1.0,
        1.0,
    )
    # Half of log2 of 1 / (1/2 + 1/8), and of all clients' labels together: 3/4 of 1 and 1/4 of log2 of (1/4) / (5/8).
    assert found["divergence"] == pytest.approx(
        0.5 * np.log2(1 / 0.625) + 0.5 * (0.75 + 0.25 * np.log2(0.25 / 0.625))
    )
    assert found["size_variation"] == 0.0


def test_clients_that_are_all_alike_have_the_entropy_of_all_and_no_divergence() -> None:
    found = heterogeneity(np.array([[4, 4], [1, 1], [0, 0]]))  # one client without samples
    assert found["label_entropy"] == pytest.approx(np.log(2)) and found[
        "effective_classes"
    ] == pytest.approx(2)
    assert found["divergence"] == pytest.approx(0.0, abs=1e-12) and found["largest_share"] == 0.5
    assert found["size_variation"] == pytest.approx(np.std([8, 2, 0]) / np.mean([8, 2, 0]))


def test_means_are_over_clients_whatever_their_size() -> None:
    found = heterogeneity(np.array([[100, 0], [1, 1]]))
    assert found["label_entropy"] == pytest.approx(np.log(2) / 2) == found["label_entropy_std"]
    assert found["largest_share"] == 0.75
    text = format_heterogeneity(found)
    assert "label entropy 0.347 ± 0.347 nats, commonest class 75%, 1.50 effective classes" in text
