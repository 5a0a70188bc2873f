"""Test curves with missing values, and mean curves over the rounds that all seeds have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from test_report import history

from raysim.results import curves

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.pictures
@pytest.mark.parametrize(
    ("scores", "virtual"),
    [
        ([0.5], 0.0),
        ([None, None], 1.0),
        ([0.1, None, 0.5], 0.0),
        ([0.5, math.nan, math.inf], 1.0),
    ],
)
def test_figures_of_a_run_with_missing_values_are_drawn(
    tmp_path: Path, scores: list[float | None], virtual: float
) -> None:
    paths = curves.draw_run(history(scores, virtual), tmp_path, "a $title_ with <odd> signs")
    assert [path.name for path in paths] == ["accuracy.png", "loss.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_traffic_axis_of_curves_converts_floats_to_bytes() -> None:
    read = next(read for _, _, read, unit, _ in curves.AXES if unit == "bytes")
    assert read({"floats_down": 100, "floats_up": 25}) == 500
    assert read({"floats_down": None, "floats_up": None}) == 0


def test_mean_curve_has_only_rounds_in_which_every_seed_has_a_score() -> None:
    each = [history([0.5, None, 0.5]), history([0.25, 0.5, 1.0]), history([0.75, 0.5, 0.75, 0.75])]
    found = curves.mean_curve("x", each, "accuracy", 9)
    assert [(row["round"], y) for row, y in found.points] == [(1, 0.5), (3, 0.75)]
    assert found.deviations == pytest.approx([0.25, 0.25])  # sample standard deviations
    assert [row["floats_down"] for row, _ in found.points] == [1000, 3000]
    assert (found.colour, found.dash) == (1, 1)


@pytest.mark.parametrize("seeds", [1, 2])
def test_curve_has_a_deviation_band_only_for_three_or_more_seeds(seeds: int) -> None:
    assert curves.mean_curve("x", [history([0.5, 0.75])] * seeds, "accuracy", 0).deviations == []


def test_curve_of_a_long_history_has_fewer_points_but_both_ends() -> None:
    found = curves.mean_curve("x", [history([0.5] * 5000)], "accuracy", 0)
    assert len(found.points) == curves.MAX_POINTS
    assert [found.points[place][0]["round"] for place in (0, -1)] == [1, 5000]


@pytest.mark.pictures
def test_curves_have_no_axis_for_a_cost_that_is_0_and_use_colours_of_the_page() -> None:
    drawn = curves.panels(
        [curves.mean_curve("x", [history([0.5, 0.75], virtual=0.0)], "accuracy", 0)], "accuracy"
    )
    assert [axis for axis, *_ in drawn] == ["round", "traffic, down and up", "wall time"], (
        "no virtual time passed"
    )
    assert all(text.startswith("<svg") and text.endswith("</svg>") for _, text, _ in drawn)
    assert all(
        "var(--c0)" in text and "var(--ink)" in text and "http" not in text for _, text, _ in drawn
    )
    assert all("#0072b2" not in text and axis in text for axis, text, _ in drawn)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ([{}, {}], []),
        ([{}], []),
        ([{}, {"wall_seconds": 9.0}], []),
        ([{}, {"floats_up": 900}], ["traffic, down and up"]),
        ([{}, {"floats_up": 501}], []),
        ([{}, {"virtual_seconds": 2.0}], ["virtual time"]),
        ([{}, {"virtual_seconds": 0.0}], ["virtual time"]),
        (
            [{}, {}, {"floats_up": 0, "virtual_seconds": 1.5}],
            ["traffic, down and up", "virtual time"],
        ),
    ],
)
def test_curves_have_an_axis_for_a_cost_that_differs_between_runs(
    changes: list[dict[str, float]], more: list[str]
) -> None:
    """The page shows a plot against traffic or virtual time at once if two runs differ in it.

    A difference of 0.1% after the same round is too small. The plot against wall time is always
    hidden at first, because wall time depends on the machine.
    """
    each = [
        [
            row | {key: value * (row["round"] or 0) for key, value in change.items()}
            for row in history([0.5, 0.6, 0.7])
        ]
        for change in changes
    ]
    drawn = curves.panels(
        [curves.mean_curve("x", [h], "accuracy", n) for n, h in enumerate(each)], "accuracy"
    )
    assert [axis for axis, _, says in drawn if says] == ["round", *more]


def test_curves_against_costs_are_shown_if_runs_have_no_scored_round_in_common() -> None:
    each = [history([0.5, None]), history([None, 0.5])]
    drawn = curves.panels(
        [curves.mean_curve("x", [h], "accuracy", n) for n, h in enumerate(each)], "accuracy"
    )
    assert [says for _, _, says in drawn] == [True, True, True, False]


def limits(
    name: str, scores: Sequence[Sequence[float]], monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Draw a mean curve in a panel; return the limits of its band and of the vertical axis.

    The result has four numbers. With fewer than three seeds there is no band, and the result has
    only the two limits of the axis.
    name: the label of the vertical axis.
    scores: the scores of each seed.
    """
    from matplotlib.axes import Axes

    seen: list[float] = []
    fill = Axes.fill_between

    def watched(self: Axes, x: Any, low: Any, high: Any, **how: Any) -> Any:
        seen.extend([min(low), max(high)])
        return fill(self, x, low, high, **how)

    def looked_at(draw: Callable[[Axes], object], about: str, **_: object) -> str:
        draw(ax := Figure().subplots())
        seen.extend(ax.get_ylim())
        return ""

    monkeypatch.setattr(Axes, "fill_between", watched)
    monkeypatch.setattr(curves, "draw_svg", looked_at)
    curves.panels(
        [curves.mean_curve("x", [history(list(each)) for each in scores], "accuracy", 0)], name
    )
    return seen[: 4 if len(scores) > 2 else 2]


def test_y_axis_of_an_accuracy_stays_between_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    far = [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    for name in ("accuracy", "accuracy worst", "f1 global"):
        assert limits(name, far, monkeypatch) == [0.0, 1.0, 0.0, 1.0]
    assert (
        limits("mae", far, monkeypatch)[::2] == [0.0, 0.0]
        and limits("mae", far, monkeypatch)[3] > 1.0
    )
    assert limits("own metric", far, monkeypatch)[0] < 0.0
    assert limits("accuracy worst", [[0.0, 0.0]], monkeypatch)[0] == 0.0, "all are zero"
    low, high = limits("accuracy", [[0.5, 0.6]], monkeypatch)
    assert 0.4 < low < 0.5 and 0.6 < high < 0.7


def test_curve_has_cost_0_if_the_cost_of_a_round_is_missing() -> None:
    rows = [
        row | {"virtual_seconds": value}
        for row, value in zip(history([0.5] * 3), (math.nan, None, 2), strict=True)
    ]
    found = curves.mean_curve("x", [rows], "accuracy", 0)
    assert [row["virtual_seconds"] for row, _ in found.points] == [0, 0, 2]


@pytest.mark.pictures
def test_log_axis_of_loss_has_plain_numbers() -> None:
    # Text is not read as mathematics, so powers of ten would be shown as they are written.
    falling = [history([1.0, 0.1, 0.01, 0.001])]
    drawn = curves.panels([curves.mean_curve("x", falling, "accuracy", 0)], "train loss")
    assert drawn and all(">0.01<" in text and "mathdefault" not in text for _, text, _ in drawn)


@pytest.mark.pictures
def test_curve_that_coincides_with_an_earlier_curve_is_dashed() -> None:
    """A curve is dashed if at least a third of it lies exactly on an earlier curve."""
    for second, dashed in (
        ([0.5, 0.75, 0.7], True),
        ([0.5, 0.751, 0.7], True),
        ([0.5, 0.75], True),
        ([0.5, 0.75, 0.6], True),  # half of it
        ([0.5, 0.7, 0.7], False),
    ):
        each = [history([0.5, 0.75, 0.7]), history(list(second))]
        drawn = curves.panels(
            [curves.mean_curve("x", [h], "accuracy", n) for n, h in enumerate(each)], "accuracy"
        )
        assert all(("stroke-dasharray: 10.8,10.8" in text) == dashed for _, text, _ in drawn)
