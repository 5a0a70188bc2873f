"""Draw curves for print: one column wide, with small fonts, and labels at the lines' ends."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.primitives.checks import one_of
from raysim.primitives.files import replace_file
from raysim.results.curves import Axis, Curve, draw_panel, is_used, needs_log_scale, show_dashes
from raysim.results.theme import print_theme, set_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

COLUMN_WIDTH_IN = 3.25  # fits a column of IEEE (3.5 in), ACM (3.33 in) and ICML (3.25 in)
ASPECT = 0.66  # height / width
MAX_DIRECT_LABELS = 4  # lines with a label at their end; more lines have a legend
END_TOLERANCE = 0.03  # of the axes' width: labels are written if all lines end this close together
MIN_ENTRY_IN = 1.0  # width of an entry of a legend: limits the columns that are tried
CHARACTERS_PER_IN = 15  # of a label; longer labels have several lines
USUAL_LEGEND_IN = 0.35  # height of two rows; a higher legend makes the figure higher
LINE_SPACING = 1.2  # of labels, in sizes of their font
PNG_DPI = 300
FORMATS = ("pdf", "svg", "png")
# Leave out the time of writing, so that equal runs give equal files.
UNDATED: dict[str, Mapping[str, None]] = {
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
    "png": {},
}


def draw_figure(
    curves: Sequence[Curve], axis: Axis, ylabel: str, width: float = COLUMN_WIDTH_IN
) -> Figure:
    """Return a figure of curves.

    curves: the curves, which are labelled if there are several.
    axis: the quantity on the x axis.
    ylabel: the label of the y axis.
    width: the width of the figure in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(print_theme()):
        figure = Figure(figsize=(width, ASPECT * min(width, 1.25 * COLUMN_WIDTH_IN)))
        figure.set_layout_engine("constrained", w_pad=0.02, h_pad=0.02)
        ax = figure.subplots()
        draw_panel(ax, curves, axis, ylabel)
        ax.set_ylabel(f"{ylabel[0].upper()}{ylabel[1:]}")
        label = ax.get_xlabel()
        ax.set_xlabel(f"{label[0].upper()}{label[1:]}")
        ax.grid(True)
        if needs_log_scale(curves, ylabel):
            set_log_scale(ax)
        if len(curves) > 1 and not _label_ends(figure, ax):
            legend = _add_legend(figure, ax)
            drawn = [curve for curve in curves if is_used(axis, [curve])]
            show_dashes(legend, drawn)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # or the places would move a little with each drawing
    return figure


def _label_ends(figure: Figure, ax: Axes) -> bool:
    """Write the label of each line next to its end, in the line's colour.

    Return False, and write nothing, unless all lines end at about the same x coordinate and there
    are 2 to `MAX_DIRECT_LABELS` lines.
    """
    import matplotlib

    lines = ax.get_lines()
    if not 1 < len(lines) <= MAX_DIRECT_LABELS:
        return False
    figure.draw_without_rendering()  # sets the limits of the axes and their size
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = np.array([to_axes.transform(np.asarray(line.get_xydata())[-1]) for line in lines])
    if np.ptp(ends[:, 0]) > END_TOLERANCE:
        return False

    size = float(matplotlib.rcParams["legend.fontsize"])
    height = ax.get_window_extent().height / figure.dpi
    gap = LINE_SPACING * size / 72 / height
    order = np.argsort(ends[:, 1], kind="stable").tolist()
    heights = spread([float(ends[number, 1]) for number in order], gap)
    for place, number in zip(heights, order, strict=True):
        line = lines[number]
        ax.annotate(
            str(line.get_label()),
            (float(ends[number, 0]), place),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            fontsize=size,
            annotation_clip=False,
        )
    return True


def _add_legend(figure: Figure, ax: Axes) -> Legend:
    """Add a legend above the axes, with as many columns as fit.

    If the legend is higher than usual, the figure becomes higher, and the axes keep their size.
    """
    handles, labels = ax.get_legend_handles_labels()
    width = figure.get_figwidth()
    texts = [textwrap.fill(label, int(CHARACTERS_PER_IN * width)) for label in labels]
    for columns in range(min(len(labels), int(width / MIN_ENTRY_IN)), 1, -1):
        legend = figure.legend(handles, texts, loc="outside upper center", ncols=columns)
        if legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    else:
        legend = figure.legend(handles, texts, loc="outside upper center")
    legend_height = legend.get_window_extent().height / figure.dpi
    figure.set_figheight(figure.get_figheight() + max(0.0, legend_height - USUAL_LEGEND_IN))
    return legend


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions apart until neighbours differ by at least `gap`; return the result.

    Positions that are too close get the distance `gap`, and the mean of such a group does not
    change.
    positions: the original positions, ascending.
    """
    blocks: list[list[float]] = []
    for position in positions:
        blocks.append([position])
        while len(blocks) > 1 and _top(blocks[-2], gap) + gap > _bottom(blocks[-1], gap):
            blocks[-2:] = [[*blocks[-2], *blocks[-1]]]
    moved = []
    for block in blocks:
        start = _bottom(block, gap)
        moved.append([start + gap * number for number in range(len(block))])
    return list(itertools.chain.from_iterable(moved))


def _bottom(block: Sequence[float], gap: float) -> float:
    return sum(block) / len(block) - gap * (len(block) - 1) / 2


def _top(block: Sequence[float], gap: float) -> float:
    return sum(block) / len(block) + gap * (len(block) - 1) / 2


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, with fonts that publishers accept.

    The ending of the path decides the file type.
    """
    import matplotlib

    kind = one_of("--format", path.suffix.removeprefix("."), FORMATS)
    buffer = io.BytesIO()
    with matplotlib.rc_context(print_theme()):
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=UNDATED[kind])
    replace_file(path, buffer.getvalue())
