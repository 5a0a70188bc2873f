"""What all of our figures look like: colours, fonts, units."""

from __future__ import annotations

from typing import Any

# Eight colours that differ for colour-blind eyes too; the second set keeps its contrast on a dark page.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b8559a", "#c98a00", "#4a9bd1", "#8c564b", "#5f6368")
DARK = ("#5ab4f0", "#ff9558", "#3ddbab", "#eda3d3", "#f6c453", "#a3dcff", "#d2a797", "#c4c8cc")


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
    ink, paper = ("#e6e8ea", "#16191d") if dark else ("#22262a", "#ffffff")
    return theme(ink) | dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper)


def time_unit(seconds: float) -> tuple[float, str]:
    """Divisor and name of the unit in which a time is a number of few digits."""
    return next(
        ((size, unit) for size, unit in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= 2 * size), (1, "s")
    )
