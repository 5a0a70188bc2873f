"""Name the numbers of a summary, and tell whether a higher or a lower value is better."""

from __future__ import annotations

from collections.abc import Collection

from raysim.primitives.kinds import LOWER_IS_BETTER

# Scores of a run that a study compares.
METRICS = ("final", "best5_mean", "last10_mean")
TITLES = {"final": "final", "best5_mean": "best 5", "last10_mean": "last 10"}
LOWER_PREFIXES = (
    "rounds_to.", "floats_", "virtual_seconds", "failures", "energy_wh", "idle_wh", "money",
    "co2_g",
)  # fmt: skip


def better_direction(
    metric: str,
    is_error: bool,
    lower: Collection[str] = LOWER_IS_BETTER,
    higher: Collection[str] = (),
) -> int:
    """Return +1 if a higher value is better, -1 if a lower one is better, 0 if it is unknown.

    metric: a key of the summary.
    is_error: True if a lower value of the main metric is better. Keys such as "final" then have
    the direction of the main metric.
    """
    if "loss" in metric or metric.startswith(LOWER_PREFIXES):
        return -1
    if metric in METRICS or metric.startswith(("best5", "last10_mean")):
        return -1 if is_error else 1
    if any(is_column_of(name, metric) for name in lower):
        return -1
    has_score = any(is_column_of(name, metric) for name in higher)
    return int(has_score or metric.startswith("accuracy"))


def is_column_of(name: str, column: str) -> bool:
    """Return True if a column has scores of a metric.

    The columns "auroc", "auroc_worst" and "auroc.mnist" belong to the metric "auroc".
    """
    return column == name or column.startswith((f"{name}_", f"{name}."))


def measure_title(metric: str) -> str:
    """Return a readable title for a key of the summary: "rounds to 0.80" for "rounds_to.0.80"."""
    if metric.endswith("_global"):
        return f"central {measure_title(metric.removesuffix('_global'))}"
    return TITLES.get(metric, metric.replace("rounds_to.", "rounds to "))
