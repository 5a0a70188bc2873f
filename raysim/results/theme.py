"""What all of our figures look like: colours, fonts, units."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Eight colours that differ for colour-blind eyes too; the second set keeps its contrast on a dark page.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b8559a", "#c98a00", "#4a9bd1", "#8c564b", "#5f6368")
DARK = ("#5ab4f0", "#ff9558", "#3ddbab", "#eda3d3", "#f6c453", "#a3dcff", "#d2a797", "#c4c8cc")


INK = "#22262a"


def theme(ink: str) -> dict[Any, object]:
    """What all of our figures look like, for `matplotlib.rc_context`."""
    return {
        "font.size": 11, "axes.labelsize": 11, "lines.linewidth": 1.8, "grid.alpha": 0.15,
        "axes.spines.top": False, "axes.spines.right": False, "text.color": ink, "axes.labelcolor": ink,
        "axes.edgecolor": ink, "xtick.color": ink, "ytick.color": ink, "grid.color": ink, "text.parse_math": False,
        "legend.frameon": False,
    }  # fmt: skip


def page_theme(dark: bool) -> dict[Any, object]:
    """The same, on the paper of a light or a dark page."""
    ink, paper = ("#e6e8ea", "#16191d") if dark else (INK, "#ffffff")
    return theme(ink) | dict.fromkeys(
        ("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper
    )


def set_log_scale(ax: Axes, which: Literal["x", "y"] = "y") -> None:
    """A logarithmic axis with plain numbers: for powers text would be read as mathematics, which names are not."""
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(lambda _, place: "")


def draw_svg(
    draw: Callable[[Axes], object], about: str, size: tuple[float, float] = (4.4, 3.0)
) -> str:
    """A drawing to stand in a page: text stays text, and the colours of `LIGHT` and `INK` are the page's variables.

    about: what it shows, for those who cannot see it. Sizes are inches; the page may scale it.
    """
    import html

    import matplotlib
    from matplotlib.figure import Figure

    looks = {
        "svg.fonttype": "none",
        "svg.hashsalt": "raysim",
        "font.size": 10,
        "axes.labelsize": 10,
    }
    with matplotlib.rc_context(theme(INK) | looks):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    inside = re.sub(
        r"<metadata>.*?</metadata>",
        "",
        text[text.index(">", text.index("<svg")) + 1 :],
        flags=re.DOTALL,
    )
    inside = re.sub(r' id="[\w.]*_\d+"', "", inside).replace("xlink:href", "href")
    for name, colour in {
        "ink": INK,
        **{f"c{index}": each for index, each in enumerate(LIGHT)},
    }.items():
        inside = re.sub(rf"(fill|stroke): {colour}\b", rf"\1: var(--{name})", inside)
    width, height = (round(72 * each) for each in size)
    head = f'<svg class="plot" role="img" aria-label="{html.escape(about)}" viewBox="0 0 {width} {height}">'
    return re.sub(r"\s*\n\s*", "\n", head + inside).strip()


def time_unit(seconds: float) -> tuple[float, str]:
    """Divisor and name of the unit in which a time is a number of few digits."""
    return next(
        (
            (size, unit)
            for size, unit in ((86400, "d"), (3600, "h"), (60, "min"))
            if seconds >= 2 * size
        ),
        (1, "s"),
    )
