"""Test that robust rules give the results of their textbooks, and withstand arbitrary updates."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny_runs import NORMED_MLP, run_spec, tiny_data
from torch import Tensor

from raysim.methods.coordinate_median import CoordinateMedian, coordinate_median
from raysim.methods.geometric_median import GeometricMedian, weiszfeld_weights
from raysim.methods.krum import Krum, least_scores, squared_distances
from raysim.methods.norm_clipping import NormClipping, clip_factor
from raysim.methods.trimmed_mean import TrimmedMean, num_trimmed, trimmed_mean
from raysim.simulation.schedule import Buffered, Synchronous
from raysim.training.run_spec import declare_run
from textbook import robust
from textbook.check import Row, check

NORMED: dict[str, Any] = {"model": NORMED_MLP}
SEVEN: dict[str, Any] = {
    "study": {"data": tiny_data(clients=7, samples=120)},
    "schedule": Synchronous(7),
}
SAMPLES, UNIFORM = {"weighting": "samples"}, {"weighting": "uniform"}
STALE: dict[str, Any] = {"schedule": Buffered(concurrency=4, size=3), "run": {"rounds": 4}}

ROWS = {
    "coordinate_median": Row(robust.coordinate_median, lambda: [CoordinateMedian()]),
    "coordinate_median of four, with BatchNorm": Row(
        robust.coordinate_median, lambda: [CoordinateMedian()], NORMED, schedule=Synchronous(4)
    ),
    "coordinate_median of stale updates": Row(
        robust.coordinate_median, lambda: [CoordinateMedian()], **STALE
    ),
    "trimmed_mean of three": Row(
        partial(robust.trimmed_mean, share=0.4), lambda: [TrimmedMean(0.4)]
    ),
    "trimmed_mean of seven": Row(
        partial(robust.trimmed_mean, share=0.3), lambda: [TrimmedMean(0.3)], **SEVEN
    ),
    "trimmed_mean, too few": Row(
        partial(robust.trimmed_mean, share=0.2), lambda: [TrimmedMean()], NORMED
    ),
    "krum": Row(partial(robust.krum, f=1), lambda: [Krum()], **SEVEN),
    "krum of three": Row(partial(robust.krum, f=1), lambda: [Krum()], NORMED),
    "multi-krum": Row(partial(robust.krum, f=2, selected=3), lambda: [Krum(2, 3)], **SEVEN),
    "multi-krum of n - f": Row(
        partial(robust.krum, f=2, selected=None), lambda: [Krum(2, None)], **SEVEN
    ),
    "multi-krum of one of two": Row(
        partial(robust.krum, f=1, selected=None), lambda: [Krum(1, None)], schedule=Synchronous(2)
    ),
    "krum of stale updates": Row(partial(robust.krum, f=0), lambda: [Krum(0)], **STALE),
    "geometric_median": Row(robust.geometric_median, lambda: [GeometricMedian()], NORMED),
    "geometric_median, uniform, many steps": Row(
        partial(robust.geometric_median, steps=20), lambda: [GeometricMedian(20)], {}, UNIFORM
    ),
    "geometric_median, a large nu": Row(
        partial(robust.geometric_median, nu=0.5), lambda: [GeometricMedian(nu=0.5)], **SEVEN
    ),
    "geometric_median of stale updates": Row(
        robust.geometric_median, lambda: [GeometricMedian()], **STALE
    ),
    "norm_clipping": Row(partial(robust.norm_clipping, bound=0.5), lambda: [NormClipping(0.5)]),
    "norm_clipping, uniform": Row(
        partial(robust.norm_clipping, bound=0.2), lambda: [NormClipping(0.2)], NORMED, UNIFORM
    ),
    "norm_clipping, nothing to clip": Row(
        partial(robust.norm_clipping, bound=1e6), lambda: [NormClipping(1e6)]
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_robust_rule_equals_its_textbook_computation(name: str) -> None:
    check(ROWS[name])


def krum(updates: Tensor, byzantine: int, selected: int = 1) -> Tensor:
    distances = squared_distances(updates @ updates.T)
    return updates[least_scores(distances, byzantine, selected)].mean(dim=0)


def geometric_median(updates: Tensor, steps: int) -> Tensor:
    ones = torch.ones(len(updates), dtype=torch.float64)
    weights = weiszfeld_weights(updates @ updates.T, ones, steps, nu=1e-5)
    return weights @ updates / weights.sum()


@pytest.mark.parametrize("attack", [1e6, -1e6, 1e30])
def test_robust_rules_stay_within_range_of_honest_updates(attack: float) -> None:
    honest = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    updates = torch.cat([honest[:3], torch.full((2, 40), attack, dtype=torch.float64), honest[3:]])
    low, high = honest.min(0).values, honest.max(0).values
    directions = [
        coordinate_median(updates),
        trimmed_mean(updates, 0.3),
        krum(updates, 2),
        krum(updates, 2, 3),
    ]
    for direction in directions:
        assert ((low <= direction) & (direction <= high)).all()
    assert not ((low <= updates.mean(0)) & (updates.mean(0) <= high)).all()


@pytest.mark.parametrize("attack", [1e6, -1e6])
def test_geometric_median_is_near_honest_updates(attack: float) -> None:
    honest = torch.randn(5, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    updates = torch.cat([honest, torch.full((2, 40), attack, dtype=torch.float64)])
    assert geometric_median(updates, 50).norm() < 2 * honest.norm()


def test_robust_rules_return_the_results_that_were_computed_by_hand() -> None:
    values = torch.tensor([[1.0], [2.0], [4.0], [8.0], [100.0]], dtype=torch.float64)
    assert coordinate_median(values).item() == 4.0
    assert coordinate_median(values[:4]).item() == 3.0
    assert trimmed_mean(values, 0.2).item() == pytest.approx(14 / 3)
    assert trimmed_mean(values, 0.4).item() == 4.0
    # n = 5, f = 1, two nearest others: scores 1+9, 1+4, 4+9, 16+36, ...
    assert krum(values, 1).item() == 2.0
    assert krum(values, 1, 2).item() == 1.5
    assert geometric_median(values, 200).item() == pytest.approx(4.0, abs=1e-3)
    assert clip_factor(torch.tensor([3.0, 4.0]), 2.5) == 0.5
    assert clip_factor(torch.tensor([3.0, 4.0]), 5.0) == 1.0


def test_number_of_trimmed_updates_is_rounded_down_exactly() -> None:
    assert [num_trimmed(10, share) for share in (0.29999995, 0.3, 0.29)] == [2, 3, 2]
    assert num_trimmed(100, 0.29) == 29


@pytest.mark.parametrize(("max_updates", "count"), [(1, 1), (2, 1), (3, 0)])
def test_coordinate_median_warns_if_there_are_at_most_two_updates(
    max_updates: int, count: int
) -> None:
    declarations = declare_run(run_spec(CoordinateMedian(), size=max_updates))
    assert len([*declarations.warnings]) == count
