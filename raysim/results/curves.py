"""Curves of one or several runs against rounds, bytes, virtual time and wall time, with bands over seeds."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from raysim.primitives.checks import finite_values
from raysim.primitives.files import replace_file
from raysim.primitives.kinds import LOWER_IS_BETTER
from raysim.results.history import Row, column, metric_of
from raysim.results.significance import MIN_PAIRS, mean_deviation
from raysim.results.theme import LIGHT, draw_svg, page_theme, set_log_scale, time_unit
from raysim.simulation.fleet import FLOAT_BYTES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHES = ("-", "--", ":", "-.")
Axis: TypeAlias = tuple[str, Callable[[Row], float], str, str]
SHARES = frozenset(("accuracy", "f1", "f1_samples"))  # metrics between 0 and 1
EYE = 0.01  # a share of an axis that nobody sees
POINTS = 400  # of a mean curve: more cannot be told apart, and a page would have to carry them


@dataclass(frozen=True)
class Curve:
    """One line of a plot; `points` are (row, y) with y known. deviations: over seeds, as many as points, or none."""

    label: str
    points: list[tuple[Row, float]]
    colour: int
    dash: int = 0
    deviations: list[float] = field(default_factory=list)


def curve(label: str, rows: Sequence[Row], key: str, index: int) -> Curve:
    """A column of one history; index: the place of the curve among all, which gives its colour and its dashes."""
    points = [
        (row, float(y)) for row, y in zip(rows, column(rows, key), strict=True) if y is not None
    ]
    finite = [(row, y) for row, y in points if math.isfinite(y)]
    return Curve(label, finite, index % len(LIGHT), index // len(LIGHT) % len(DASHES))


def mean_curve(label: str, histories: Sequence[Sequence[Row]], key: str, index: int) -> Curve:
    """The mean of a column over runs that differ in their seeds, at the rounds that all of them have measured.

    Also its sample deviation where there are seeds enough to say something; bytes and times are means, too.
    """
    each = [
        {row["round"]: (row, y) for row, y in curve(label, rows, key, index).points}
        for rows in histories
    ]
    common = sorted(
        number for number in each[0] if number is not None and all(number in one for one in each)
    )
    if len(common) > POINTS:
        common = [
            common[place] for place in np.linspace(0, len(common) - 1, POINTS).astype(int).tolist()
        ]
    points: list[tuple[Row, float]] = []
    deviations: list[float] = []
    for number in common:
        rows = [one[number][0] for one in each]
        mean, deviation = mean_deviation([one[number][1] for one in each])
        row: Row = {name: float(np.mean([_value(name)(row) for row in rows])) for name in COLUMNS}
        points.append((row, mean if mean is not None else math.nan))
        deviations.append(deviation or 0.0)
    enough = len(histories) >= MIN_PAIRS
    return Curve(
        label,
        points,
        index % len(LIGHT),
        index // len(LIGHT) % len(DASHES),
        deviations if enough else [],
    )


def _bytes(row: Row) -> float:
    return FLOAT_BYTES * sum(finite_values([row.get("floats_down"), row.get("floats_up")]))


def _value(key: str) -> Callable[[Row], float]:
    return lambda row: next(iter(finite_values([row.get(key)])), 0.0)


COLUMNS = (
    "round",
    "floats_down",
    "floats_up",
    "virtual_seconds",
    "wall_seconds",
)  # that the axes are made of
# Name of the axis, what of a row it shows, its unit, and what is said where nothing of it was used.
AXES: tuple[Axis, ...] = (
    ("round", _value("round"), "", "no round was made"),
    ("sent, both ways", _bytes, "bytes", "nothing was sent"),
    (
        "virtual time",
        _value("virtual_seconds"),
        "seconds",
        "no virtual time passed on these devices",
    ),
    ("wall time", _value("wall_seconds"), "seconds", "wall time was not recorded"),
)


def _bounds(ylabel: str) -> tuple[float, float]:
    """What a metric cannot be below or above, as far as is known."""
    metric = ylabel.partition(" ")[0]
    return (
        0.0 if metric in SHARES | LOWER_IS_BETTER else -math.inf,
        1.0 if metric in SHARES else math.inf,
    )


def _panel(ax: Axes, curves: Sequence[Curve], axis: Axis, ylabel: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    title, read, unit, excuse = axis
    bounds = _bounds(ylabel)
    # A run that used nothing of what the axis shows (no virtual time on ideal devices) would be a wall at zero.
    moving = [curve for curve in curves if any(read(row) for row, _ in curve.points)]
    xs = [read(row) for curve in moving for row, _ in curve.points]
    ax.set_xlabel(title)
    if not xs:
        measured = any(curve.points for curve in curves)
        ax.text(
            0.5,
            0.5,
            excuse if measured else "not measured",
            transform=ax.transAxes,
            ha="center",
            alpha=0.7,
        )
        ax.tick_params(labelbottom=False, bottom=False)
        ax.grid(False)
        return
    size = 1.0
    if unit == "seconds":
        size, name = time_unit(max(xs))
        ax.set_xlabel(f"{title} ({name})")
    drawn: list[set[tuple[float, float]]] = []
    for curve in moving:
        x, y = [read(row) / size for row, _ in curve.points], [value for _, value in curve.points]
        # Few points are seen as points; a line alone would show nothing for one, and hide where two were measured.
        marker = "o" if len(x) <= 12 else None
        colour = LIGHT[curve.colour]
        # One that lies on another has gaps in which the other is seen.
        points = set(zip(x, y, strict=True))
        above = sum(points <= other or other <= points for other in drawn)
        drawn.append(points)
        style = (0.0, (6 / above, 6.0)) if above else DASHES[curve.dash]
        # Not clipped: a line at the end of an axis is as thick as others.
        ax.plot(
            x,
            y,
            color=colour,
            linestyle=style,
            marker=marker,
            markersize=4,
            label=curve.label,
            clip_on=False,
        )
        if curve.deviations:
            low, high = np.array(y) - curve.deviations, np.array(y) + curve.deviations
            low, high = low.clip(*bounds), high.clip(*bounds)
            # Faint, with an edge: those that lie on each other would mix to a grey that is nobody's.
            ax.fill_between(x, low, high, facecolor=(colour, 0.05), edgecolor=colour, linewidth=0.5)
    if unit == "bytes":
        ax.xaxis.set_major_formatter(EngFormatter("B"))
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=title == "round"))
    bottom, top = ax.get_ylim()
    if bottom < bounds[0]:
        ax.set_ylim(bottom=bounds[0])
    if top > bounds[1]:
        ax.set_ylim(top=bounds[1])


def _falls_far(curves: Sequence[Curve], ylabel: str) -> bool:
    """Whether a loss is better seen by orders of magnitude."""
    values = [y for curve in curves for _, y in curve.points]
    return bool("loss" in ylabel and values and min(values) > 0 and max(values) > 50 * min(values))


def _says_more(axis: Axis, curves: Sequence[Curve]) -> bool:
    """Whether an axis tells more of some curves than the rounds do: they need more or less of it for a round.

    Wall time does not: it is that of a machine and of what else it did.
    """
    read = axis[1]
    if axis[0] in ("round", "wall time"):
        return axis[0] == "round"
    each = [{row["round"]: read(row) for row, _ in curve.points} for curve in curves]
    rounds = [number for number in each[0] if all(number in one for one in each)]
    found = np.array([[one[number] for number in rounds] for one in each])
    return bool(np.ptp(found, axis=0).max(initial=0.0) > EYE * found.max(initial=0.0)) or not rounds


def panels(curves: Sequence[Curve], ylabel: str) -> list[tuple[str, str, bool]]:
    """The same curves against rounds, bytes, virtual time and wall time; only those of which something was used.

    Of each the name of its axis, an SVG, and whether it tells more than that of the rounds. Names of curves are not in
    them: the page has them once, beside the colours.
    """
    drawn = []
    for axis in AXES:
        if not any(axis[1](row) for curve in curves for row, _ in curve.points):
            continue

        def draw(ax: Axes, axis: Axis = axis) -> None:
            _panel(ax, curves, axis, ylabel)
            ax.grid(True)
            if _falls_far(curves, ylabel):
                set_log_scale(ax)

        drawn.append(
            (axis[0], draw_svg(draw, f"{ylabel} against {axis[0]}"), _says_more(axis, curves))
        )
    return drawn


def draw_comparison(curves: Sequence[Curve], path: Path, title: str, ylabel: str) -> None:
    """Write a PNG of 1300 x 1000 pixels or taller."""
    replace_file(path, _draw(curves, title, ylabel))


def _draw(curves: Sequence[Curve], title: str, ylabel: str) -> bytes:
    """A PNG of 1300 x 1000 pixels or taller: the same curves against rounds, bytes, virtual time and wall time."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [textwrap.shorten(curve.label, 100, placeholder=" …") for curve in curves]
    across = max(1, min(len(curves), 110 // (max(map(len, names), default=0) + 8)))
    with matplotlib.rc_context(page_theme(False) | {"axes.grid": True}):
        figure = Figure(
            figsize=(10, 7.2 + 0.24 * math.ceil(len(curves) / across)),
            dpi=130,
            layout="constrained",
        )
        axes = list(figure.subplots(2, 2, sharey=True).flat)
        for ax, axis in zip(axes, AXES, strict=True):
            _panel(ax, curves, axis, ylabel)
        if _falls_far(curves, ylabel):
            set_log_scale(axes[0])
        axes[0].set_ylabel(ylabel)
        axes[2].set_ylabel(ylabel)
        figure.suptitle(textwrap.fill(title, 90), fontsize=13)
        handles = axes[0].get_legend_handles_labels()[0]
        if handles:
            figure.legend(handles, names, loc="outside lower center", ncols=across)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def draw_run(rows: Sequence[Row], folder: Path, title: str) -> list[Path]:
    """Write accuracy.png (or the metric's) and loss.png: a run against rounds, bytes, virtual time and wall time."""
    metric = metric_of(rows)
    kinds = {
        metric: {
            metric: "mean of the clients",
            f"{metric}_worst": "worst client",
            f"{metric}_global": "central test set",
            f"{metric}_shared": "shared model, mean of the clients",
            f"{metric}_finetuned": "after fine-tuning, mean of the clients",
            f"{metric}_common": "clients' models, central test set",
            f"{metric}_unseen": "clients that are never trained",
        },
        "loss": {"train_loss": "training", "loss_global": "central test set"},
    }
    paths = []
    for kind, keys in kinds.items():
        curves = [curve(label, rows, key, index) for index, (key, label) in enumerate(keys.items())]
        paths.append(Path(folder) / f"{kind}.png")
        replace_file(paths[-1], _draw([one for one in curves if one.points], title, kind))
    return paths
