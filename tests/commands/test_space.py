"""Search spaces: what is drawn from them, and what they refuse."""

from __future__ import annotations

import math
import re
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
from raysim.primitives.errors import Refused

SPACE = {"a": Choice((1, 2, 3)), "b": Interval(0.5, 2.0), "c": Interval(1, 9, whole=True)}


def draws(
    space: dict[str, Choice | Interval], number: int = 200, seed: int = 0
) -> list[dict[str, object]]:
    return random_points(space, number, np.random.default_rng(seed))


def test_draws_lie_in_their_ranges_and_reach_all_of_them() -> None:
    points = draws(SPACE)
    assert {point["a"] for point in points} == {1, 2, 3}
    assert {point["c"] for point in points} == set(range(1, 10))
    assert all(0.5 <= float(str(point["b"])) <= 2.0 for point in points)
    assert all(isinstance(point["c"], int) for point in points)


def test_a_longer_list_of_draws_begins_with_the_shorter_one() -> None:
    assert draws(SPACE, 20)[:5] == draws(SPACE, 5)


def test_on_a_logarithmic_range_each_order_of_magnitude_is_as_likely() -> None:
    points = draws({"x": Interval(1e-4, 1.0, log=True)}, 2000)
    below = sum(float(str(point["x"])) < 1e-2 for point in points)
    assert 900 < below < 1100


def test_a_grid_is_every_combination_with_the_last_key_fastest() -> None:
    points = grid_points({"a": Choice((1, 2)), "b": Choice(("x", "y"))})
    assert points == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_a_grid_needs_lists() -> None:
    with pytest.raises(Refused, match=r"^b: sweep.search=grid"):
        grid_points(SPACE)


def test_covering_points_hold_every_choice_and_both_ends() -> None:
    points = corner_points(SPACE)
    assert [point["a"] for point in points] == [1, 2, 3]
    assert {point["b"] for point in points} == {0.5, 2.0}
    assert {point["c"] for point in points} == {1, 9}


def test_points_that_left_the_space_are_put_back() -> None:
    assert clip_point(SPACE, {"a": 2, "b": 7.7, "c": 3.4, "d": 0}) == {
        "a": 2,
        "b": 2.0,
        "c": 3,
        "d": 0,
    }


def test_equal_points_are_kept_once() -> None:
    assert distinct_points([{"a": [1]}, {"a": [2]}, {"a": [1]}]) == [{"a": [1]}, {"a": [2]}]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (Interval(2.0, 1.0), "is empty"),
        (Interval(0.0, 1.0, log=True), "no logarithm"),
        (Choice(()), "no values"),
    ],
)
def test_a_range_that_holds_nothing_is_refused(wrong: Choice | Interval, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        check_range("local.lr", wrong)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"trials": 0}, "sweep.trials=0 must be at least 1"),
        ({"workers": -1}, "sweep.workers=-1 must be at least 0"),
        (
            {"reduction": 1.0},
            "sweep.reduction=1.0 must be above 1: 3 lets a third of the trials through",
        ),
        (
            {"reduction": math.nan},
            "sweep.reduction=nan must be above 1: 3 lets a third of the trials through",
        ),
        ({"minutes": 0.0}, "sweep.minutes=0.0 must be above 0"),
    ],
)
def test_a_search_without_room_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        SweepOptions(**settings)
    assert SweepOptions(trials=1, workers=0, reduction=1.5, minutes=0.1).reduction == 1.5
