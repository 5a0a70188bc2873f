"""Test the statistics of a study against scipy and against values calculated by hand."""

from __future__ import annotations

import numpy as np
import pytest

from raysim.results.significance import compare_pairs, holm_correction, mean_deviation


def test_standard_deviation_of_n_values_divides_by_n_minus_1() -> None:
    assert mean_deviation([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_deviation([1.0]) == (1.0, None)
    assert mean_deviation([]) == (None, None)


def test_three_pairs_get_interval_and_p_value_of_students_t_test() -> None:
    found = compare_pairs([1.1, 1.2, 1.3], [0.1, -0.8, -1.7])  # differences 1, 2, 3
    assert (found.pairs, found.note) == (3, "")
    assert found.mean == pytest.approx(2.0)
    assert found.deviation == pytest.approx(1.0)
    assert found.high == pytest.approx(2 + 4.302653 / np.sqrt(3), rel=1e-6)
    assert found.low == pytest.approx(2 - 4.302653 / np.sqrt(3), rel=1e-6)
    assert found.p == pytest.approx(
        0.0741799, rel=1e-5
    )  # t = 2 sqrt(3) with two degrees of freedom
    assert found.wilcoxon is None


def test_six_pairs_of_one_sign_give_the_smallest_p_value_of_wilcoxon() -> None:
    from scipy import stats  # seconds, for this test alone

    left, right = [0.5, 0.61, 0.73, 0.86, 0.7, 0.81], [0.4, 0.5, 0.6, 0.7, 0.5, 0.6]
    found = compare_pairs(left, right)
    assert found.wilcoxon == pytest.approx(2 / 2**6)
    assert found.p == pytest.approx(stats.ttest_rel(left, right).pvalue)
    low, high = stats.ttest_rel(left, right).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_significance_is_not_tested_for_fewer_than_three_pairs(count: int) -> None:
    found = compare_pairs([0.5, 0.7][:count], [0.4, 0.4][:count])
    assert found.note == "n too small: a test needs 3 seeds"
    assert (found.p, found.low, found.high, found.wilcoxon) == (None, None, None, None)
    assert found.mean == pytest.approx({0: None, 1: 0.1, 2: 0.2}[count])


@pytest.mark.parametrize(
    ("left", "note"),
    [
        ([0.7, 0.8, 0.9], "equal in every pair"),
        ([0.8, 0.9, 1.0], "no test: every pair differs equally"),
    ],
)
def test_pairs_are_not_tested_if_all_have_the_same_difference_up_to_rounding(
    left: list[float], note: str
) -> None:
    found = compare_pairs(left, [0.7, 0.8, 0.9])
    assert (found.note, found.p, found.low) == (note, None, None)


def test_wilcoxons_test_accepts_differences_of_zero() -> None:
    found = compare_pairs([0.5, 0.6, 0.7, 0.8, 0.9, 0.4, 0.3], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    assert found.wilcoxon is not None
    assert 0 < found.wilcoxon < 1


def test_holms_correction_is_monotonic() -> None:
    corrected = holm_correction([0.01, None, 0.04, 0.03])
    assert corrected[1] is None
    assert [corrected[i] for i in (0, 2, 3)] == pytest.approx([0.03, 0.06, 0.06])
    assert holm_correction([0.6, 0.9]) == [1.0, 1.0]
    assert holm_correction([]) == []
