"""Draw a score, such as the accuracy, against a cost, such as virtual time.

A line shows the mean over the seeds of a study, a band the range from the lowest to the highest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

POINTS = 60  # of a drawn curve


@contextmanager
def curves_figure(
    path: Path,
    panels: int,
    height: float,
    lowest: float | None,
    label: str = "accuracy on the central test set",
) -> Iterator[Any]:
    """Yield the axes of panels in one row; at the end add a legend and save the picture.

    height: the picture's height in inches.
    lowest: the lowest score on the vertical axis; None fits the axis to the curves.
    label: the label of the vertical axis.
    """
    import matplotlib
    from matplotlib.figure import Figure

    from raysim.results.theme import page_theme

    with matplotlib.rc_context(page_theme(dark=False)):
        figure = Figure(figsize=(13, height), dpi=110, layout="constrained")
        axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
        yield axes
        axes[0].set_ylabel(label)
        if lowest is not None:
            axes[0].set_ylim(lowest, None)
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
        figure.savefig(path)


def draw_panel(
    ax: Any, curves_of: dict[str, Sequence[np.ndarray]], cost_label: str, tick_format: str
) -> None:
    """Draw, for each name, a line with the mean over the seeds and a band with their range.

    Line and band contain only costs at which all seeds have a value. There are eight colours, so
    only the first eight names are drawn.
    curves_of: for each name, the curves of its seeds. A curve [points, 2] has ascending costs in
    the first column, and the scores at these costs in the second column.
    cost_label: the label of the horizontal, logarithmic axis of costs.
    tick_format: the format of the costs on this axis, such as "{x:g}".
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    from raysim.results.theme import LIGHT

    for colour, (name, curves) in zip(LIGHT, curves_of.items(), strict=False):
        start = max(curve[0, 0] for curve in curves)
        end = min(curve[-1, 0] for curve in curves)
        costs = np.geomspace(start, end, POINTS)
        heights = np.stack([np.interp(costs, curve[:, 0], curve[:, 1]) for curve in curves])
        ax.plot(costs, heights.mean(0), color=colour, label=name)
        ax.fill_between(
            costs, heights.min(0), heights.max(0), color=colour, alpha=0.12, linewidth=0
        )
    ax.set(xscale="log", xlabel=cost_label)
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(StrMethodFormatter(tick_format))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.grid(True)
