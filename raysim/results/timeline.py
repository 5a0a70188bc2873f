"""Draw a run on virtual time: jobs of clients, staleness, active clients and busy workers."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.primitives.files import replace_file
from raysim.results.history import Row, column
from raysim.results.jobs import FATES, Jobs
from raysim.results.theme import DARK, LIGHT, page_theme, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase
    from matplotlib.ticker import Locator

_CLIENTS_OF_A_KIND = 12  # so many of the fastest, of random, and of the slowest clients are drawn
_MAX_JOBS_IN_A_ROW = 160  # with so many median jobs in a row, a bar is about six pixels wide
_BINS = 120  # points of a curve over virtual time
_MAX_AGGREGATION_LINES = 80
_MAX_MARKED_POINTS = 12  # a curve of so few points shows each of them
_STALENESS_COLOURS = ("#3b8fc4", "#8f7fd0", "#d9669a", "#f08a24")  # visible on light and dark
_GREY, _RED = "#8a9299", "#e0483e"
# Marker and colour of jobs that were not aggregated, by their fate.
_UNUSED = {
    "discarded": (">", _GREY),
    "lost": ("x", _RED),
    "failed": ("D", _RED),
    "in flight": ("", _GREY),
}


def draw_timeline(jobs: Jobs, rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write the picture of a run's timeline; return True if it was written.

    Write nothing if `has_events` is False, because all rounds then look alike.
    """
    is_drawn = has_events(jobs)
    if is_drawn:
        replace_file(path, timeline_png(jobs, rows, title))
    return is_drawn


def timeline_png(jobs: Jobs, rows: Sequence[Row], title: str, *, dark: bool = False) -> bytes:
    """Return a PNG with jobs of some clients, active clients, busy workers and staleness.

    rows: the history.
    dark: True uses colours for a dark page.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(page_theme(dark) | {"axes.titlesize": 11, "axes.axisbelow": True}):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
        figure = Figure(figsize=(13, 9.6), dpi=130, layout=layout)
        figure.suptitle(f"{textwrap.shorten(title, 110)}\n{_count_fates(jobs)}", fontsize=13)
        fill_figure(figure, jobs, rows, DARK if dark else LIGHT)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def has_events(jobs: Jobs) -> bool:
    """Return True if a timeline is worth drawing, because the rounds do not all look alike.

    This is so if jobs were stale, lost, discarded or failed, or if clients mostly waited for other
    clients. Without virtual time, the result is False.
    """
    if not len(jobs) or jobs.finish.max() <= 0:
        return False
    if jobs.staleness.any() or jobs.has_fate("failed", "discarded", "lost").any():
        return True
    rounds, members = np.unique(jobs.round, return_inverse=True)
    longest = np.zeros(len(rounds))
    np.maximum.at(longest, members, jobs.finish - jobs.start)
    worked_s = float((jobs.finish - jobs.start).sum())
    return worked_s < 0.5 * float(longest[members].sum())


def _count_fates(jobs: Jobs) -> str:
    """Describe how the jobs ended ("1,204 jobs: 1,000 aggregated, 204 lost")."""
    texts = []
    for fate in FATES:
        count = int(jobs.has_fate(fate).sum())
        if count:
            texts.append(f"{count:,} {fate}")
    return f"{len(jobs):,} jobs: {', '.join(texts)}"


def fill_figure(
    figure: FigureBase, jobs: Jobs, rows: Sequence[Row], colours: Sequence[str]
) -> None:
    """Draw all panels into a figure.

    jobs: the jobs of the run.
    rows: the history.
    colours: the colours of the curves; the curves of a panel take them in this order.
    """
    ends = np.array([row.get("virtual_seconds") or 0.0 for row in rows], np.float64)
    end = float(ends.max(initial=0.0)) or float(jobs.finish.max())
    size, unit = time_unit(end)
    panels = [_draw_fleet, _draw_workers]
    if jobs.staleness.any():
        panels.append(_draw_staleness)
    above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(2.3, 1.0)))
    _draw_jobs(above.subplots(), jobs, ends, end)
    for ax, panel in zip(below.subplots(1, len(panels)), panels, strict=True):
        ax.grid(True)
        panel(ax, jobs, rows, end, size, colours)
        if panel is not _draw_staleness:
            ax.set(xlim=(0, end / size), xlabel=f"virtual time ({unit})")


# --- clients --------------------------------------------------------------------------------------
def shown_window(jobs: Jobs, end: float) -> tuple[float, float]:
    """Return start and end, in virtual seconds, of a period in which single jobs can be seen.

    The period is the whole run, or a part in the middle of a long run.
    end: the end of the run.
    """
    width = _MAX_JOBS_IN_A_ROW * float(np.median(jobs.finish - jobs.start))
    if width <= 0 or width >= end:
        return 0.0, end
    return (end - width) / 2, (end + width) / 2


def sample_clients(jobs: Jobs) -> list[tuple[str, np.ndarray]]:
    """Choose the clients that the timeline's picture shows: the fastest, random and slowest ones.

    Return three pairs of a name, such as "fastest", and an array of clients, faster ones first. If
    there are few clients, return one pair of "" and all clients. The choice is reproducible.
    """
    clients, members = np.unique(jobs.client, return_inverse=True)
    # A lost job ends early, so it does not show how fast the client is. It counts only if the
    # client has no other job.
    weights = (~jobs.has_fate("lost")).astype(float)
    weights[np.bincount(members, weights)[members] == 0] = 1.0
    worked_s = np.bincount(members, weights * (jobs.finish - jobs.start))
    seconds = worked_s / np.bincount(members, weights)
    order = clients[np.argsort(seconds, kind="stable")]
    count = _CLIENTS_OF_A_KIND
    if len(order) <= 3 * count:
        return [("", order)]
    between = np.arange(count, len(order) - count)
    generator = np.random.Generator(np.random.PCG64(0))
    drawn = np.sort(generator.choice(between, count, replace=False))
    return [("fastest", order[:count]), ("random", order[drawn]), ("slowest", order[-count:])]


def _draw_jobs(ax: Axes, jobs: Jobs, ends: np.ndarray, end: float) -> None:
    low, high = shown_window(jobs, end)
    part = jobs[(jobs.finish > low) & (jobs.start < high)]
    kinds = sample_clients(part)
    shown = np.concatenate([clients for _, clients in kinds])
    rank = {client: place for place, client in enumerate(shown.tolist())}
    part = part[np.isin(part.client, shown)]
    y = np.array([rank[client] for client in part.client.tolist()], np.float64)
    size, unit = time_unit(high)
    _draw_bars(ax, part, y, size, low, high)
    inside = ends[(ends > low) & (ends <= high)]
    if len(inside) <= _MAX_AGGREGATION_LINES:
        lines = ax.vlines(inside / size, -0.5, len(shown) - 0.5, linewidth=0.7, alpha=0.3, zorder=0)
        lines.set(color=_text_colour(), label="aggregation")
    _name_versions(ax, ends, low, high, size)
    _name_clients(ax, kinds)
    count = len(np.unique(jobs.client))
    subject = f"{len(shown)} of {count:,} clients" if len(shown) < count else "Clients"
    part_of_run = ", a part of the run" if low else ""
    ax.set(
        xlim=(low / size, high / size),
        ylim=(len(shown) - 0.4, -0.6),
        xlabel=f"virtual time ({unit})",
        title=f"{subject}{part_of_run}: a bar is a job, from its dispatch to its end",
    )
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6, handlelength=1.6)


def _name_versions(ax: Axes, ends: np.ndarray, low: float, high: float, size: float) -> None:
    """Write the numbers of versions above the panel, at the times of the aggregations.

    ends: the times of all aggregations in virtual seconds.
    low, high: the shown period in virtual seconds.
    size: the unit of the horizontal axis in virtual seconds, such as 60 for minutes.
    """
    step = (high - low) / 12
    places = np.unique(np.searchsorted(ends, np.arange(low + step, high, step)))
    chosen: list[int] = []
    for place in places[places < len(ends)].tolist():
        is_apart = not chosen or ends[place] - ends[chosen[-1]] > 0.6 * step
        if ends[place] <= high and is_apart:
            chosen.append(place)
    above = ax.secondary_xaxis("top")
    above.set_xticks(ends[chosen] / size, [f"{place + 1:,}" for place in chosen], fontsize=8)
    above.set_xlabel("version of the model", fontsize=9)
    above.spines["top"].set_visible(False)


def _text_colour() -> str:
    import matplotlib

    return str(matplotlib.rcParams["text.color"])


def _name_clients(ax: Axes, groups: Sequence[tuple[str, np.ndarray]]) -> None:
    """Write the clients' numbers and the names of their groups, with lines between groups.

    groups: pairs of a name, such as "fastest", and the clients of this group. The name "" is not
    written.
    """
    shown = np.concatenate([clients for _, clients in groups]).tolist()
    ax.set_yticks(range(len(shown)), [str(client) for client in shown], fontsize=8)
    ax.set_ylabel("" if groups[0][0] else "client, the fastest first")
    ax.tick_params(axis="y", length=0)
    place = 0
    for name, clients in groups:
        if name:
            ax.text(
                -0.04,
                place + (len(clients) - 1) / 2,
                f"{name} clients",
                transform=ax.get_yaxis_transform(),
                rotation=90,
                ha="right",
                va="center",
                fontsize=10,
            )
        if place:
            ax.axhline(place - 0.5, color=_text_colour(), linewidth=0.8, alpha=0.6)
        place += len(clients)


def _draw_bars(ax: Axes, jobs: Jobs, y: np.ndarray, size: float, low: float, high: float) -> None:
    """Draw a bar for each job; its colour shows the staleness of an aggregated job.

    Other bars are pale, and a marker shows how the job ended. A job in flight has no marker, but a
    dotted edge.
    y: for each job, the position of its client on the vertical axis.
    size: the virtual seconds of one unit of the horizontal axis.
    low, high: the shown period in virtual seconds.
    """
    from matplotlib.collections import PolyCollection

    def boxes(chosen: np.ndarray) -> list[np.ndarray]:
        left = jobs.start[chosen]
        right = np.minimum(jobs.finish[chosen], high)
        # so that the shortest jobs are visible, too
        right = np.maximum(right, left + (high - low) / 600)
        top, bottom = y[chosen] - 0.38, y[chosen] + 0.38
        corners = ((left, top), (right, top), (right, bottom), (left, bottom))
        return list(np.stack([np.stack([x / size, height], -1) for x, height in corners], 1))

    is_aggregated = jobs.has_fate("aggregated")
    if is_aggregated.any():
        _draw_aggregated(ax, boxes(is_aggregated), jobs.staleness[is_aggregated])
    for fate, (marker, colour) in _UNUSED.items():
        chosen = jobs.has_fate(fate)
        if not chosen.any():
            continue
        bars = PolyCollection(
            boxes(chosen), facecolor=(0.55, 0.57, 0.6, 0.18), edgecolor=colour, linewidth=0.7
        )
        ax.add_collection(bars)
        if not marker:
            bars.set(linestyle=":", label=f"{fate} at the end")
            continue
        bars.set(linestyle="-", label="_")  # the legend shows the marker
        is_visible = chosen & (jobs.finish <= high)
        ax.plot(
            jobs.finish[is_visible] / size,
            y[is_visible],
            marker,
            color=colour,
            markersize=5,
            markeredgewidth=1.6,
            label=fate,
        )


def _draw_aggregated(ax: Axes, boxes: list[np.ndarray], staleness: np.ndarray) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    highest = max(1.0, float(np.ceil(np.quantile(staleness, 0.98))))
    bars = PolyCollection(
        boxes,
        array=staleness.astype(float),
        cmap=LinearSegmentedColormap.from_list("staleness", _STALENESS_COLOURS),
        norm=Normalize(0, highest),
        label="aggregated",
        facecolor=_STALENESS_COLOURS[0],
        edgecolor=ax.get_facecolor(),
        linewidth=0.3,
    )
    ax.add_collection(bars)
    if staleness.any():
        extend = "max" if staleness.max() > highest else "neither"
        scale = ax.figure.colorbar(bars, ax=ax, pad=0.01, fraction=0.025, aspect=40, extend=extend)
        scale.set_label("staleness (aggregations since its version)")
        scale.locator = _whole_numbers(6)
        scale.outline.set_visible(False)


def _whole_numbers(count: int) -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=True)


# --- fleet, workers, staleness --------------------------------------------------------------------
def active_clients(jobs: Jobs, edges: np.ndarray) -> np.ndarray:
    """Return the mean number of active clients between neighbouring times in `edges`.

    A client is active while it has a job in flight.
    edges: ascending times in virtual seconds. The result has len(edges) - 1 values.
    """
    seconds = _summed_time_since(jobs.start, edges) - _summed_time_since(jobs.finish, edges)
    return np.asarray(np.diff(seconds) / np.diff(edges))


def _summed_time_since(since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Return the sums of the differences t - s, one sum for each time t in `until`.

    A sum runs over the times s in `since` that are earlier than t.
    """
    ordered = np.sort(since)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    earlier = np.searchsorted(ordered, until)
    return np.asarray(earlier * until - sums[earlier])


def _draw_fleet(
    ax: Axes, jobs: Jobs, rows: Sequence[Row], end: float, size: float, colours: Sequence[str]
) -> None:
    edges = np.linspace(0, end, _BINS + 1)
    active = active_clients(jobs, edges)
    ax.stairs(active, edges / size, color=colours[0], linewidth=1.4, baseline=None, label="all")
    is_unused = jobs.has_fate("lost", "discarded", "failed")
    if is_unused.any():
        ax.stairs(
            active_clients(jobs[is_unused], edges),
            edges / size,
            color=colours[1],
            linewidth=1.4,
            baseline=None,
            label="lost, discarded or failed",
        )
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.26), ncols=2)
    title = f"Fleet: {active.mean():.3g} active clients on average"
    ax.set(title=title, ylabel="clients", ylim=(0, None))


def _draw_workers(
    ax: Axes, jobs: Jobs, rows: Sequence[Row], end: float, size: float, colours: Sequence[str]
) -> None:
    def floats(key: str) -> np.ndarray:
        return np.array(column(rows, key), np.float64)

    busy, least_busy = floats("worker_busy"), floats("worker_busy_least")
    is_measured = np.isfinite(busy)
    if not is_measured.any():
        ax.set(title="Workers: not measured", yticks=[])
        return
    virtual_s = floats("virtual_seconds")
    round_wall_s = np.maximum(np.diff(floats("wall_seconds"), prepend=0.0), 0.0)
    weights = round_wall_s[is_measured]
    share = float(np.average(busy[is_measured], weights=weights if weights.any() else None))
    curves = [(busy, "mean of all", colours[0])]
    if (least_busy != busy)[is_measured].any():
        curves.append((least_busy, "least busy", colours[1]))
    for values, name, colour in curves:
        x, y = thin_curve(virtual_s[is_measured], values[is_measured], end)
        ax.plot(
            x / size,
            y,
            color=colour,
            linewidth=1.4,
            marker="o" if len(x) <= _MAX_MARKED_POINTS else None,
            markersize=4,
            label=name,
        )
    ax.set(
        title=f"Workers: busy for {share:.0%} of the wall time",
        ylabel="share of wall time",
        ylim=(0, 1.05),
    )
    if len(ax.lines) > 1:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.26), ncols=2)


def thin_curve(x: np.ndarray, y: np.ndarray, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the coordinates x and y of a curve with at most `_BINS` points.

    A point is the mean of neighbouring points.
    end: the largest x of the axis.
    """
    if len(x) <= _BINS:
        return x, y
    _, members = np.unique(np.minimum(x * _BINS // end, _BINS - 1), return_inverse=True)
    count = np.bincount(members)
    return np.bincount(members, x) / count, np.bincount(members, y) / count


def _draw_staleness(
    ax: Axes, jobs: Jobs, rows: Sequence[Row], end: float, size: float, colours: Sequence[str]
) -> None:
    staleness = jobs.staleness[jobs.has_fate("aggregated")]
    highest = int(staleness.max())
    bin_width = highest // 40 + 1
    edges = np.arange(0, highest + bin_width + 1, bin_width)
    counts, _ = np.histogram(staleness, edges)
    middles = edges[:-1] + (bin_width - 1) / 2
    ax.bar(middles, counts / len(staleness), 0.85 * bin_width, color=colours[0])
    ax.xaxis.set_major_locator(_whole_numbers(6))
    ax.set(
        title=f"Staleness: mean {staleness.mean():.3g}, at most {highest:,}",
        ylabel="share of updates",
        xlabel="staleness, aggregations",
    )
