"""Compare measures of heterogeneity with values that are computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.data.heterogeneity import SCALES, format_heterogeneity, heterogeneity


def test_clients_of_one_class_have_zero_label_entropy() -> None:
    measures = heterogeneity(np.diag([6, 6, 6, 6]))
    assert measures.keys() == SCALES.keys()
    assert (
        measures["label_entropy"],
        measures["effective_classes"],
        measures["largest_share"],
    ) == (
        0.0,
        1.0,
        1.0,
    )
    # half of log2 of 1 / (1/2 + 1/8), and of all clients' labels together: 3/4 of 1, and 1/4 of
    # log2 of (1/4) / (5/8)
    assert measures["divergence"] == pytest.approx(
        0.5 * np.log2(1 / 0.625) + 0.5 * (0.75 + 0.25 * np.log2(0.25 / 0.625))
    )
    assert measures["size_variation"] == 0.0


def test_clients_with_equal_class_shares_have_zero_divergence() -> None:
    measures = heterogeneity(np.array([[4, 4], [1, 1], [0, 0]]))  # one client without samples
    assert measures["label_entropy"] == pytest.approx(np.log(2)) and measures[
        "effective_classes"
    ] == pytest.approx(2)
    assert (
        measures["divergence"] == pytest.approx(0.0, abs=1e-12) and measures["largest_share"] == 0.5
    )
    assert measures["size_variation"] == pytest.approx(np.std([8, 2, 0]) / np.mean([8, 2, 0]))


def test_heterogeneity_weighs_all_clients_equally() -> None:
    measures = heterogeneity(np.array([[100, 0], [1, 1]]))
    assert (
        measures["label_entropy"] == pytest.approx(np.log(2) / 2) == measures["label_entropy_std"]
    )
    assert measures["largest_share"] == 0.75
    text = format_heterogeneity(measures)
    assert (
        "label entropy 0.347 ± 0.347 nats, most frequent class 75%, 1.50 effective classes" in text
    )
