"""Test which points are drawn from search spaces, and which values of settings are refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from raysim.commands.sweep.plan import SweepOptions
from raysim.commands.sweep.space import (
    Choice,
    Interval,
    check_range,
    clip_point,
    corner_points,
    distinct_points,
    grid_points,
    random_points,
)
from raysim.primitives.errors import RefusedError

SPACE = {"a": Choice((1, 2, 3)), "b": Interval(0.5, 2.0), "c": Interval(1, 9, whole=True)}


def draw_points(
    space: dict[str, Choice | Interval], count: int = 200, seed: int = 0
) -> list[dict[str, object]]:
    return random_points(space, count, np.random.default_rng(seed))


def test_random_points_stay_in_the_search_space_and_use_all_its_values() -> None:
    points = draw_points(SPACE)
    assert {point["a"] for point in points} == {1, 2, 3}
    assert {point["c"] for point in points} == set(range(1, 10))
    assert all(0.5 <= float(str(point["b"])) <= 2.0 for point in points)
    assert all(isinstance(point["c"], int) for point in points)


def test_the_first_random_points_do_not_depend_on_the_number_of_points() -> None:
    assert draw_points(SPACE, 20)[:5] == draw_points(SPACE, 5)


def test_logarithmic_draws_reach_each_magnitude_equally_often() -> None:
    points = draw_points({"x": Interval(1e-4, 1.0, log=True)}, 2000)
    small = sum(float(str(point["x"])) < 1e-2 for point in points)
    assert 900 < small < 1100


def test_grid_has_every_combination_and_varies_last_key_first() -> None:
    points = grid_points({"a": Choice((1, 2)), "b": Choice(("x", "y"))})
    pairs = [(1, "x"), (1, "y"), (2, "x"), (2, "y")]
    assert points == [{"a": a, "b": b} for a, b in pairs]


def test_grid_search_refuses_a_key_with_an_interval() -> None:
    with pytest.raises(RefusedError, match=r"^b: sweep\.search=grid"):
        grid_points(SPACE)


def test_corner_points_together_contain_every_choice_and_both_ends_of_each_range() -> None:
    points = corner_points(SPACE)
    assert [point["a"] for point in points] == [1, 2, 3]
    assert {point["b"] for point in points} == {0.5, 2.0}
    assert {point["c"] for point in points} == {1, 9}


def test_value_outside_its_range_is_clipped_to_the_nearest_end() -> None:
    clipped = clip_point(SPACE, {"a": 2, "b": 7.7, "c": 3.4, "d": 0})
    assert clipped == {"a": 2, "b": 2.0, "c": 3, "d": 0}


def test_repeated_points_of_a_search_are_removed() -> None:
    assert distinct_points([{"a": [1]}, {"a": [2]}, {"a": [1]}]) == [{"a": [1]}, {"a": [2]}]


@pytest.mark.parametrize(
    "values", [Interval(2.0, 1.0), Interval(0.0, 1.0, log=True), Choice(())], ids=str
)
def test_range_without_values_is_refused(values: Choice | Interval) -> None:
    with pytest.raises(RefusedError, match=r"^local\.lr"):
        check_range("local.lr", values)


@pytest.mark.parametrize(
    "options",
    [
        {"trials": 0},
        {"workers": -1},
        {"reduction": 1.0},
        {"reduction": math.nan},
        {"minutes": 0.0},
        {"search": "optuna", "scheduler": "pbt"},
    ],
    ids=str,
)
def test_impossible_values_of_sweep_settings_are_refused(options: dict[str, Any]) -> None:
    key = next(iter(options))
    with pytest.raises(ValueError, match=rf"^sweep\.{key}={options[key]}"):
        SweepOptions(**options)


def test_smallest_values_of_sweep_settings_are_accepted() -> None:
    SweepOptions(trials=1, workers=0, reduction=1.5, minutes=0.1)
