"""Compare methods over seeds: means, paired differences, intervals and tests.

A pair is two runs with the same seed. Runs that differ only in their methods usually share data,
split, initial model and cohorts. Then a paired test excludes the variation between seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

MIN_PAIRS = 3  # for the t-test
MIN_RANKED_PAIRS = 6  # for Wilcoxon's test, whose smallest p at 5 pairs is 0.0625
LEVEL = 0.95
ROUNDING = 1e-9  # a deviation below this share of the values comes from rounding


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, left - right, with an interval and two-sided tests.

    A number is None if there were too few pairs for it. Without a test, the interval and the
    p-values are None.

    deviation: the sample standard deviation of the differences.
    low, high: the mean's 95 % confidence interval.
    p: the p-value of the paired t-test.
    holm: p after Holm's correction for the number of comparisons.
    wilcoxon: the p-value of Wilcoxon's signed-rank test.
    note: the reason if there is no test; otherwise "".
    """

    pairs: int
    mean: float | None
    deviation: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    holm: float | None = None
    wilcoxon: float | None = None
    note: str = ""


def mean_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and the sample standard deviation of values.

    The mean is None without values; the deviation is None for fewer than two values.
    """
    mean = float(np.mean(values)) if values else None
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return mean, deviation


def compare_pairs(left: Sequence[float], right: Sequence[float]) -> Difference:
    """Compare values of the same seeds by Student's paired t-test and Wilcoxon's test.

    left, right: one value for each seed, in the same order.
    """
    differences = np.asarray(left, float) - np.asarray(right, float)
    pairs = len(differences)
    mean, deviation = mean_deviation([float(value) for value in differences])
    difference = Difference(pairs, mean, deviation)
    if pairs < MIN_PAIRS:
        return replace(difference, note=f"n too small: a test needs {MIN_PAIRS} seeds")

    assert deviation is not None and mean is not None
    negligible = ROUNDING * max(np.abs(left).max(), np.abs(right).max())
    if deviation <= negligible:
        is_equal = abs(mean) <= negligible
        note = "equal in every pair" if is_equal else "no test: every pair differs equally"
        return replace(difference, note=note)

    from scipy import special  # `scipy.stats` takes twenty times as long to import

    freedom = pairs - 1
    quantile = special.stdtrit(freedom, (1 + LEVEL) / 2)
    half_width = float(quantile * deviation / np.sqrt(pairs))
    standard_error = np.sqrt(np.var(differences, ddof=1) / pairs)
    tail = special.stdtr(freedom, -abs(mean / standard_error))
    return replace(
        difference,
        low=mean - half_width,
        high=mean + half_width,
        p=float(2 * tail),
        wilcoxon=_signed_rank_p(differences) if pairs >= MIN_RANKED_PAIRS else None,
    )


def _signed_rank_p(differences: np.ndarray) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test."""
    from scipy import stats

    return float(stats.wilcoxon(differences).pvalue)


def holm_correction(values: Sequence[float | None]) -> list[float | None]:
    """Return p-values after Holm's step-down correction (Holm 1979); None stays None.

    For m values p_1 <= ... <= p_m, the corrected k-th value is the largest of (m - i + 1) p_i over
    i <= k, but at most 1.
    """
    p_values = {index: value for index, value in enumerate(values) if value is not None}
    order = sorted(p_values, key=lambda index: p_values[index])
    corrected: list[float | None] = [None] * len(values)
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * p_values[index]))
        corrected[index] = highest
    return corrected
