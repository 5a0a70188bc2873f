"""Draw metrics against rounds, traffic, times, energy, money or CO2."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raysim.primitives.checks import finite_values
from raysim.primitives.files import replace_file
from raysim.primitives.kinds import FLOAT_BYTES, LOWER_IS_BETTER, SHARES
from raysim.results.history import Row, column, metric_of, metrics_of
from raysim.results.significance import MIN_PAIRS, mean_deviation
from raysim.results.theme import (
    DASHES,
    LIGHT,
    draw_svg,
    fix_label_places,
    page_theme,
    set_log_scale,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

PERCENT = " (%)"  # at the end of a label
VISIBLE_SHARE = 0.01  # of an axis: smaller differences cannot be seen
OVERLAP_SHARE = 1 / 3  # a line that covers so much of another line gets gaps
MAX_POINTS = 400  # of a mean curve; more would make the page large, and cannot be seen
PNG_COMPRESSION = 1  # the usual 6 makes files a fifth smaller and takes a fifth of the drawing
MAX_INTERVALS = 5  # between the numbers of an axis; drawing a number takes as long as a line
MAX_MARKED_POINTS = 12  # a curve with no more points gets a marker at each point


class Axis(NamedTuple):
    """A quantity on the horizontal axis of a panel.

    name: the quantity in the names of figures, such as "round" in "accuracy-round".
    read: returns the quantity for a row of the history.
    unit: "bytes", "seconds", "Wh", "g" (grams), or "".
    if_unused: the text in place of curves if all values are 0.
    """

    name: str
    title: str
    read: Callable[[Row], float]
    unit: str
    if_unused: str


@dataclass(frozen=True)
class Curve:
    """One line of a plot.

    label: the name of the curve in the legend.
    points: pairs (row, y) of rounds in which y was measured. The horizontal axis reads x from
    `row`. It is the round's row of the history or, over several runs, the mean of their rows.
    colour, dash: positions in the lists of colours and dashes.
    deviations: the deviation over seeds at each point; empty with too few seeds.
    """

    label: str
    points: list[tuple[Row, float]]
    colour: int
    dash: int = 0
    deviations: list[float] = field(default_factory=list)


def curve(label: str, rows: Sequence[Row], key: str, index: int) -> Curve:
    """Return the curve of the finite values in the column `key` of a run's history.

    label: the name of the curve in the legend.
    index: the position of the curve in the plot, which selects the colour and the dashes.
    """
    points = []
    for row, y in zip(rows, column(rows, key), strict=True):
        if y is not None and math.isfinite(y):
            points.append((row, float(y)))
    return Curve(label, points, index % len(LIGHT), index // len(LIGHT) % len(DASHES))


def mean_curve(label: str, histories: Sequence[Sequence[Row]], key: str, index: int) -> Curve:
    """Return the mean of a column over runs that differ only in their seeds.

    The curve has at most `MAX_POINTS` of the rounds that all runs measured. Traffic and times are
    means, too. With at least `MIN_PAIRS` seeds, it has sample standard deviations.
    index: position of the curve in the plot, which selects colour and dashes.
    """
    curves = [curve(label, rows, key, index) for rows in histories]
    by_round = [{row["round"]: (row, y) for row, y in one.points} for one in curves]
    points: list[tuple[Row, float]] = []
    deviations: list[float] = []
    for number in _shared_rounds(by_round):
        rows = [measured[number][0] for measured in by_round]
        mean, deviation = mean_deviation([measured[number][1] for measured in by_round])
        mean_row: Row = {
            name: float(np.mean([_value(name)(row) for row in rows])) for name in AXIS_COLUMNS
        }
        points.append((mean_row, mean if mean is not None else math.nan))
        deviations.append(deviation or 0.0)
    has_band = len(histories) >= MIN_PAIRS
    first = curves[0]
    return Curve(label, points, first.colour, first.dash, deviations if has_band else [])


def _shared_rounds(
    by_round: Sequence[dict[int | float | None, tuple[Row, float]]],
) -> list[int | float]:
    rounds = []
    for number in by_round[0]:
        if number is not None and all(number in measured for measured in by_round):
            rounds.append(number)
    rounds.sort()
    if len(rounds) <= MAX_POINTS:
        return rounds
    places = np.linspace(0, len(rounds) - 1, MAX_POINTS).astype(int)
    return [rounds[place] for place in places.tolist()]


def _bytes(row: Row) -> float:
    return FLOAT_BYTES * sum(finite_values([row.get("floats_down"), row.get("floats_up")]))


def _value(key: str) -> Callable[[Row], float]:
    """Return a function that reads the column `key` of a row of a history.

    Missing values, nan and infinities become 0.
    """

    def read(row: Row) -> float:
        values = finite_values([row.get(key)])
        return values[0] if values else 0.0

    return read


# Columns of a history that the axes show.
AXIS_COLUMNS = (
    "round", "floats_down", "floats_up", "virtual_seconds", "wall_seconds", "energy_wh", "money",
    "co2_g",
)  # fmt: skip
AXES = (
    Axis("round", "round", _value("round"), "", "no round was made"),
    Axis("traffic", "traffic, down and up", _bytes, "bytes", "nothing was sent"),
    Axis(
        "virtual_time",
        "virtual time",
        _value("virtual_seconds"),
        "seconds",
        "these devices take no virtual time",
    ),
    Axis("wall_time", "wall time", _value("wall_seconds"), "seconds", "wall time was not recorded"),
    Axis("energy", "energy of the jobs", _value("energy_wh"), "Wh", "the fleet has no watts"),
    Axis("money", "money", _value("money"), "", "the fleet has no prices"),
    Axis("co2", "CO2", _value("co2_g"), "g", "the fleet has no carbon intensity"),
)
USUAL_AXES = 4  # the first ones; a picture shows the others only if runs have their columns


def _bounds(ylabel: str) -> tuple[float, float]:
    """Return the lowest and the highest possible value of a metric; infinite if not known.

    ylabel: the label of the vertical axis, which contains the metric's name.
    """
    words = set(ylabel.split())
    lowest = 0.0 if words & (SHARES | LOWER_IS_BETTER) else -math.inf
    highest = math.inf
    if words & SHARES:
        highest = 100.0 if ylabel.endswith(PERCENT) else 1.0
    return lowest, highest


def in_percent(curve: Curve) -> Curve:
    """Return a curve of shares as a curve of percentages: 0.8 becomes 80."""
    points = [(row, 100 * y) for row, y in curve.points]
    return replace(curve, points=points, deviations=[100 * value for value in curve.deviations])


def draw_panel(ax: Axes, curves: Sequence[Curve], axis: Axis, ylabel: str) -> None:
    """Draw curves against one quantity, such as rounds or traffic.

    If this quantity is 0 at all points, draw a note instead.
    axis: the quantity on the horizontal axis.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    # Without any value on the axis (ideal devices take no virtual time) a curve would be vertical.
    moving = [curve for curve in curves if any(axis.read(row) for row, _ in curve.points)]
    values = [axis.read(row) for curve in moving for row, _ in curve.points]
    ax.set_xlabel(axis.title)
    if not values:
        is_measured = any(curve.points for curve in curves)
        _draw_note(ax, axis.if_unused if is_measured else "not measured")
        return

    unit_size = 1.0
    if axis.unit == "seconds":
        unit_size, unit = time_unit(max(values))
        ax.set_xlabel(f"{axis.title} ({unit})")
    _draw_lines(ax, moving, axis, unit_size, _bounds(ylabel))
    if axis.unit in ("bytes", "Wh", "g"):
        ax.xaxis.set_major_formatter(EngFormatter("B" if axis.unit == "bytes" else axis.unit))
    ax.xaxis.set_major_locator(
        MaxNLocator(MAX_INTERVALS, steps=[1, 2, 5, 10], integer=axis.title == "round")
    )
    ax.yaxis.set_major_locator(MaxNLocator(MAX_INTERVALS, steps=[1, 2, 2.5, 5, 10]))

    lowest, highest = _bounds(ylabel)
    bottom, top = ax.get_ylim()
    if bottom < lowest:
        ax.set_ylim(bottom=lowest)
    if top > highest:
        ax.set_ylim(top=highest)


def _draw_note(ax: Axes, text: str) -> None:
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", alpha=0.7)
    ax.tick_params(labelbottom=False, bottom=False)
    ax.grid(False)


def show_dashes(legend: Legend, curves: Sequence[Curve]) -> None:
    """Draw each line of the legend with the dashes of its curve.

    In the plot, a line that covers other lines has larger gaps (`gap_dashes`).
    curves: the curves in the order of the legend's lines.
    """
    for line, curve in zip(legend.get_lines(), curves, strict=True):
        line.set(linestyle=DASHES[curve.dash])


def is_used(axis: Axis, curves: Sequence[Curve]) -> bool:
    """Return True if some curve has a value on the axis that is not 0."""
    return any(axis.read(row) for curve in curves for row, _ in curve.points)


def _draw_lines(
    ax: Axes, curves: Sequence[Curve], axis: Axis, unit_size: float, bounds: tuple[float, float]
) -> None:
    heights = [y for curve in curves for _, y in curve.points]
    tolerance = VISIBLE_SHARE * (max(heights) - min(heights))
    drawn: list[dict[float, float]] = []
    for curve in curves:
        x = [axis.read(row) / unit_size for row, _ in curve.points]
        y = [value for _, value in curve.points]
        colour = LIGHT[curve.colour]
        points = dict(zip(x, y, strict=True))
        gaps = gap_dashes(points, drawn, tolerance)
        drawn.append(points)
        ax.plot(
            x,
            y,
            color=colour,
            linestyle=gaps or DASHES[curve.dash],
            marker="o" if len(x) <= MAX_MARKED_POINTS else None,
            label=curve.label,
            clip_on=False,  # or a line at the end of an axis would be half as thick
        )
        if curve.deviations:
            deviations = np.array(curve.deviations)
            low = (np.array(y) - deviations).clip(*bounds)
            high = (np.array(y) + deviations).clip(*bounds)
            ax.fill_between(x, low, high, facecolor=(colour, 0.1), linewidth=0)


def gap_dashes(
    points: dict[float, float], drawn: Sequence[dict[float, float]], tolerance: float
) -> tuple[float, tuple[float, float]] | None:
    """Return dashes for a line that covers earlier lines; None if it covers no line.

    The result is matplotlib's (offset, (length of a dash, length of a gap)), in line widths.
    points: the new line, a dict from x to y.
    drawn: the earlier lines, dicts of the same kind.
    tolerance: y values that differ by at most this number look the same.
    """
    below = sum(_overlap(points, other, tolerance) for other in drawn)
    return (0.0, (6 / below, 6.0)) if below else None


def _overlap(one: dict[float, float], other: dict[float, float], tolerance: float) -> bool:
    """Return True if a large part of the shorter line lies on the longer line.

    one, other: the lines, each a dict from x to y.
    tolerance: y values that differ by at most this number look the same.
    """
    shorter, longer = sorted((one, other), key=len)
    same = [x in longer and abs(y - longer[x]) <= tolerance for x, y in shorter.items()]
    if len(same) == 1:
        return same[0]
    hidden_pieces = sum(start and end for start, end in itertools.pairwise(same))
    return hidden_pieces >= OVERLAP_SHARE * (len(same) - 1)


def needs_log_scale(curves: Sequence[Curve], ylabel: str) -> bool:
    """Return True for curves of losses whose largest value is over 50 times the smallest.

    ylabel: the label of the vertical axis; curves of losses have the word "loss" in it.
    """
    values = [y for curve in curves for _, y in curve.points]
    if "loss" not in ylabel or not values:
        return False
    return min(values) > 0 and max(values) > 50 * min(values)


def is_informative(axis: Axis, curves: Sequence[Curve]) -> bool:
    """Return True if a plot against this axis would tell more than the plot against rounds.

    Return False if all curves have almost the same x in the same round, because both plots then
    look alike. Return False for wall time, which depends on the machine, and True for rounds.
    """
    if axis.title in ("round", "wall time"):
        return axis.title == "round"
    by_round = [{row["round"]: axis.read(row) for row, _ in curve.points} for curve in curves]
    rounds = [number for number in by_round[0] if all(number in one for one in by_round)]
    if not rounds:
        return True
    values = np.array([[one[number] for number in rounds] for one in by_round])
    largest_difference = np.ptp(values, axis=0).max(initial=0.0)
    return bool(largest_difference > VISIBLE_SHARE * values.max(initial=0.0))


def panels(curves: Sequence[Curve], ylabel: str) -> list[tuple[str, str, bool]]:
    """Draw the curves against rounds, and again against each quantity such as time or traffic.

    Return for each plot the label of the horizontal axis, the plot as SVG, and True if the HTML
    page shows the plot at once. The page first hides the plot against wall time, and plots that
    look like the plot against rounds. A quantity that is always 0 has no plot. The plots have no
    legend.
    """
    drawn = []
    for axis in AXES:
        if not is_used(axis, curves):
            continue

        def draw(ax: Axes, axis: Axis = axis) -> None:
            draw_panel(ax, curves, axis, ylabel)
            ax.grid(True)
            if needs_log_scale(curves, ylabel):
                set_log_scale(ax)

        about = f"{ylabel} against {axis.title}"
        picture = draw_svg(draw, about, has_plain_labels=True)
        drawn.append((axis.title, picture, is_informative(axis, curves)))
    return drawn


def draw_comparison(curves: Sequence[Curve], path: Path, title: str, ylabel: str) -> None:
    """Write a PNG whose panels show the same curves against several quantities.

    The quantities are rounds, traffic, virtual time and wall time, and also each of energy, money
    and CO2 that is above 0 at some point.
    """
    replace_file(path, _draw_png(curves, title, ylabel))


def _draw_png(
    curves: Sequence[Curve], title: str, ylabel: str, axes_shown: Sequence[Axis] = ()
) -> bytes:
    """Return a PNG with one panel for each horizontal axis; every panel shows all curves.

    axes_shown: the axes. () takes rounds, traffic, virtual time and wall time, and also each of
    energy, money and CO2 that is above 0 at some point.
    """
    import matplotlib
    from matplotlib.figure import Figure

    names = [textwrap.shorten(curve.label, 100, placeholder=" …") for curve in curves]
    longest_name = max(map(len, names), default=0)
    legend_columns = max(1, min(len(curves), 110 // (longest_name + 8)))
    legend_rows = math.ceil(len(curves) / legend_columns)
    used = [axis for axis in AXES[USUAL_AXES:] if is_used(axis, curves)]
    shown = list(axes_shown) or [*AXES[:USUAL_AXES], *used]
    rows = math.ceil(len(shown) / 2)
    columns = min(2, len(shown))
    with matplotlib.rc_context(page_theme(False) | {"axes.grid": True}):
        size = (10.0, 3.6 * rows + 0.24 * legend_rows)
        lines = textwrap.wrap(title, 90)
        figure = Figure(figsize=size, dpi=130)
        _leave_margins(figure, rows, len(lines), legend_rows)
        axes = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
        for ax, axis in zip(axes, shown, strict=False):
            fix_label_places(ax, size)
            draw_panel(ax, curves, axis, ylabel)
        for ax in axes[len(shown) :]:
            ax.set_visible(False)
        if needs_log_scale(curves, ylabel):
            set_log_scale(axes[0])
        for ax in axes[::columns]:
            ax.set_ylabel(ylabel)
        figure.suptitle("\n".join(lines), fontsize=13, y=0.99, va="top")
        handles = axes[0].get_legend_handles_labels()[0]
        if handles:
            legend = figure.legend(handles, names, loc="lower center", ncols=legend_columns)
            show_dashes(legend, curves)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", pil_kwargs={"compress_level": PNG_COMPRESSION})
    return buffer.getvalue()


def _leave_margins(figure: Figure, rows: int, title_lines: int, legend_rows: int) -> None:
    """Leave space in a figure for a title, a legend, and the labels of the axes.

    rows: the number of rows of panels.
    title_lines, legend_rows: the number of lines of the title, and of the legend.
    """
    # Matplotlib's own layout measures every text first, which takes as long as the drawing.
    width, height = figure.get_size_inches()
    label = 0.6  # below each row of panels
    top = height - 0.2 - 0.22 * title_lines
    bottom = 0.15 + 0.24 * legend_rows + label
    panel = (top - bottom - (rows - 1) * label) / rows
    figure.subplots_adjust(
        left=0.85 / width,
        right=1 - 0.25 / width,
        bottom=bottom / height,
        top=top / height,
        wspace=0.08,
        hspace=label / panel,
    )


def draw_run(
    rows: Sequence[Row], folder: Path, title: str, only_rounds: bool = False
) -> list[Path]:
    """Draw one run: write METRIC.png for each metric, and loss.png; return their paths.

    only_rounds: True draws the curves only against the rounds, in a quarter of the time. False also
    draws them against other quantities, such as traffic.
    """
    labels_by_picture: dict[str, dict[str, str]] = {}
    for metric in metrics_of(rows) or [metric_of(rows)]:
        labels_by_picture[metric] = {
            metric: "mean of the clients",
            f"{metric}_worst": "worst client",
            f"{metric}_global": "central test set",
            f"{metric}_shared": "shared model, mean of the clients",
            f"{metric}_finetuned": "after fine-tuning, mean of the clients",
            f"{metric}_common": "clients' models, central test set",
            f"{metric}_unseen": "clients that are never trained",
        }
    labels_by_picture["loss"] = {"train_loss": "training", "loss_global": "central test set"}
    paths = []
    for name, labels in labels_by_picture.items():
        curves = [curve(text, rows, key, index) for index, (key, text) in enumerate(labels.items())]
        path = Path(folder) / f"{name}.png"
        measured = [one for one in curves if one.points]
        axes = AXES[:1] if only_rounds else ()
        replace_file(path, _draw_png(measured, title, name, axes))
        paths.append(path)
    return paths
