"""What a study may claim: means with deviations, paired differences with intervals and tests, Holm's correction.

Pure functions of numbers. The pairs are runs of one seed: they share data, split, starting model and cohorts, so a
paired test sees the difference of two methods without the seeds' own scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

MIN_PAIRS, MIN_RANKED_PAIRS = (
    3,
    6,
)  # pairs for the t-test; for Wilcoxon, whose smallest p at 5 pairs is 0.0625
LEVEL = 0.95
ROUNDING = 1e-9  # a deviation below this share of the values is that of rounding


@dataclass(frozen=True)
class Difference:
    """Of paired values, mean(left - right): `low` and `high` bound its 95 % interval; None where nothing is tested."""

    pairs: int
    mean: float | None
    deviation: float | None = None  # of the differences, divisor n-1
    low: float | None = None
    high: float | None = None
    p: float | None = None  # paired t-test, two-sided
    holm: float | None = None  # p, corrected for all comparisons
    wilcoxon: float | None = None  # signed-rank test, two-sided
    note: str = ""  # why there is no test


def mean_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (divisor n-1) of some runs; None where there are too few."""
    mean = float(np.mean(values)) if values else None
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else None


def compare_pairs(left: Sequence[float], right: Sequence[float]) -> Difference:
    """Compare values of the same seeds: Student's paired t-test and interval, and Wilcoxon's signed-rank test."""
    from scipy import stats

    differences = np.asarray(left, float) - np.asarray(right, float)
    mean, deviation = mean_deviation([float(value) for value in differences])
    difference = Difference(len(differences), mean, deviation)
    if len(differences) < MIN_PAIRS:
        return replace(difference, note=f"n too small: a test needs {MIN_PAIRS} seeds")
    assert deviation is not None and mean is not None
    if deviation <= (nothing := ROUNDING * max(np.abs(left).max(), np.abs(right).max())):
        return replace(
            difference,
            note="equal in every pair"
            if abs(mean) <= nothing
            else "no test: every pair differs alike",
        )
    half = (
        stats.t.ppf((1 + LEVEL) / 2, len(differences) - 1) * deviation / np.sqrt(len(differences))
    )
    ranked = len(differences) >= MIN_RANKED_PAIRS
    return replace(
        difference,
        low=mean - float(half),
        high=mean + float(half),
        p=float(stats.ttest_rel(left, right).pvalue),
        wilcoxon=float(stats.wilcoxon(differences).pvalue) if ranked else None,
    )


def holm_correction(values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction of the p-values that there are (Holm 1979); None stays None.

    The k-th lowest of m becomes the largest of (m - i + 1) p_i over i <= k, at most 1.
    """
    order = sorted(
        (index for index, value in enumerate(values) if value is not None),
        key=lambda i: values[i] or 0.0,
    )
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * (values[index] or 0.0)))
        corrected[index] = highest
    return corrected
