"""Define the common look of all figures: colours, dashes, fonts, units."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Eight colours that colour-blind readers can tell apart; DARK has more contrast on a dark page.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b8559a", "#c98a00", "#4a9bd1", "#8c564b", "#5f6368")
DARK = ("#5ab4f0", "#ff9558", "#3ddbab", "#eda3d3", "#f6c453", "#a3dcff", "#d2a797", "#c4c8cc")
INK = "#22262a"
MANY_COLOURS = (*LIGHT, "#a9b800", INK)  # for pictures without a dark version
DASHES = ("-", "--", ":", "-.")
# From the axes to their labels; between them are the numbers, of up to six digits.
LABEL_BELOW_IN, LABEL_LEFT_IN = 0.33, 0.66


def line_style(index: int) -> dict[str, Any]:
    """Return the colour and dashes of a line.

    index: position of the line. The first lines are solid; after 40 lines the styles repeat.
    """
    dash = DASHES[index // len(MANY_COLOURS) % len(DASHES)]
    return {"color": MANY_COLOURS[index % len(MANY_COLOURS)], "linestyle": dash}


def theme(ink: str) -> dict[Any, object]:
    """Return the settings of all figures for `matplotlib.rc_context`.

    ink: colour of the text.
    """
    return {
        "font.size": 11,
        "axes.labelsize": 11,
        "lines.linewidth": 1.8,
        "lines.markersize": 4,
        "grid.alpha": 0.15,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "grid.color": ink,
        "text.parse_math": False,
        "legend.frameon": False,
    }


def print_theme() -> dict[Any, object]:
    """Return the settings of a figure that a two-column paper includes in its original size.

    The font looks like Times and has the size of a caption. PDFs have TrueType fonts, because
    publishers refuse Type 3 fonts.
    """
    return theme("#000000") | {
        "font.family": "serif",
        "font.serif": ["Times New Roman", "Nimbus Roman", "STIXGeneral"],
        "font.size": 8,
        "axes.labelsize": 8,
        "axes.titlesize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "legend.handlelength": 1.8,
        "legend.columnspacing": 1.2,
        "axes.linewidth": 0.6,
        "axes.labelpad": 2.0,
        "grid.linewidth": 0.5,
        "lines.linewidth": 1.2,
        "lines.markersize": 2.5,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "pdf.fonttype": 42,
        "ps.fonttype": 42,
        "svg.hashsalt": "raysim",
    }


def page_theme(dark: bool) -> dict[Any, object]:
    """Return the settings of a figure for a light or a dark page, for `matplotlib.rc_context`.

    dark: True for a dark page.
    """
    ink, paper = ("#e6e8ea", "#16191d") if dark else (INK, "#ffffff")
    backgrounds = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    return theme(ink) | dict.fromkeys(backgrounds, paper)


def set_log_scale(ax: Axes, which: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic, with plain numbers at its ticks.

    which: the axis, "x" or "y".
    """
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    # Matplotlib would write powers as formulas, which are switched off: names may contain `$`.
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(lambda _, place: "")


def fix_label_places(ax: Axes, size: tuple[float, float]) -> None:
    """Put the labels of both axes at fixed distances from the axes.

    matplotlib then need not measure the texts at the ticks, which saves time.

    size: width and height of the figure in inches.
    """
    share_of_width, share_of_height = ax.get_position().size
    width, height = share_of_width * size[0], share_of_height * size[1]
    ax.xaxis.set_label_coords(0.5, -LABEL_BELOW_IN / height)
    ax.yaxis.set_label_coords(-LABEL_LEFT_IN / width, 0.5)


def draw_svg(
    draw: Callable[[Axes], object],
    about: str,
    size: tuple[float, float] = (4.4, 3.0),
    has_plain_labels: bool = False,
) -> str:
    """Return a drawing as an SVG for a page.

    The colours `LIGHT` and `INK` become CSS variables, for the page's dark mode.

    about: a description for readers who cannot see the drawing.
    size: the size in inches; the page may scale the drawing.
    has_plain_labels: True uses margins of a fixed width, for numbers at the ticks and one label
    below. False measures all texts, which takes longer.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "raysim",
        "font.size": 10,
        "axes.labelsize": 10,
    }
    with matplotlib.rc_context(theme(INK) | settings):
        figure = Figure(figsize=size, layout=None if has_plain_labels else "constrained")
        if has_plain_labels:
            width, height = size
            figure.subplots_adjust(
                left=0.7 / width,
                right=1 - 0.25 / width,
                bottom=0.52 / height,
                top=1 - 0.12 / height,
            )
        ax = figure.subplots()
        if has_plain_labels:
            fix_label_places(ax, size)
        draw(ax)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})

    text = buffer.getvalue()
    inside = text[text.index(">", text.index("<svg")) + 1 :]
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r' id="[\w.]*_\d+"', "", inside).replace("xlink:href", "href")
    variables = {"ink": INK} | {f"c{index}": colour for index, colour in enumerate(LIGHT)}
    for name, colour in variables.items():
        inside = re.sub(rf"(fill|stroke): {colour}\b", rf"\1: var(--{name})", inside)
    width, height = (round(72 * inches) for inches in size)
    head = (
        f'<svg class="plot" role="img" aria-label="{html.escape(about)}"'
        f' viewBox="0 0 {width} {height}">'
    )
    return re.sub(r"\s*\n\s*", "\n", head + inside).strip()


def time_unit(seconds: float) -> tuple[float, str]:
    """Choose a unit for a time, and return its size in seconds and its name.

    The unit is the largest one in which the time is at least 2; seconds for shorter times.
    """
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return size, unit
    return 1, "s"
