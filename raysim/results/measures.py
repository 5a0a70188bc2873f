"""Name the numbers of a summary: their titles in tables, and which direction is better."""

from __future__ import annotations

from raysim.primitives.kinds import LOWER_IS_BETTER

# Scores of a run that a study compares.
METRICS = ("final", "best5_mean", "last10_mean")
TITLES = {"final": "final", "best5_mean": "best 5", "last10_mean": "last 10"}
LOWER_PREFIXES = ("rounds_to.", "floats_", "virtual_seconds", "failures", *LOWER_IS_BETTER)


def better_direction(metric: str, is_error: bool) -> int:
    """Return +1 if more is better, -1 if less is better, 0 if it is unknown.

    is_error: True if the runs are scored by errors of values.
    """
    if "loss" in metric or metric.startswith(LOWER_PREFIXES):
        return -1
    if metric in METRICS or metric.startswith(("best5", "last10_mean")):
        return -1 if is_error else 1
    return int(metric.startswith("accuracy"))


def measure_title(metric: str) -> str:
    """Return the title of a column: "rounds to 0.80" for "rounds_to.0.80"."""
    if metric.endswith("_global"):
        return f"central {measure_title(metric.removesuffix('_global'))}"
    return TITLES.get(metric, metric.replace("rounds_to.", "rounds to "))
