"""A run on virtual time: which clients were at work when, how stale their results were, how busy fleet and workers."""

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

_THIRD = 12  # clients of each kind in a timeline: the fastest, random ones, the slowest
_WIDEST = 160  # jobs of the median duration that fit beside each other: a bar is then some six pixels wide
_BINS = 120  # points of a curve over virtual time
_SCALE = (
    "#3b8fc4",
    "#8f7fd0",
    "#d9669a",
    "#f08a24",
)  # fresh to stale; seen on light and dark pages
_GREY, _RED = "#8a9299", "#e0483e"
_UNUSED = {
    "discarded": (">", _GREY),
    "lost": ("x", _RED),
    "failed": ("D", _RED),
    "in flight": ("", _GREY),
}


def draw_timeline(jobs: Jobs, rows: Sequence[Row], path: Path, title: str) -> bool:
    """Write timeline.png; False, and no file, where it would say nothing: see `eventful`."""
    if worth := has_events(jobs):
        replace_file(path, timeline_png(jobs, rows, title))
    return worth


def timeline_png(jobs: Jobs, rows: Sequence[Row], title: str, *, dark: bool = False) -> bytes:
    """The timeline of some clients; below it clients at work, busy workers and staleness."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(page_theme(dark) | {"axes.titlesize": 11, "axes.axisbelow": True}):
        figure = Figure(
            figsize=(13, 9.6), dpi=130, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
        )
        figure.suptitle(f"{textwrap.shorten(title, 110)}\n{_counted(jobs)}", fontsize=13)
        fill_figure(figure, jobs, rows, DARK if dark else LIGHT)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def has_events(jobs: Jobs) -> bool:
    """Whether jobs were stale, lost, discarded or failed, or clients waited for others most of the time."""
    if not len(jobs) or jobs.finish.max() <= 0:
        return False
    if jobs.staleness.any() or jobs.has_fate("failed", "discarded", "lost").any():
        return True
    rounds, members = np.unique(jobs.round, return_inverse=True)
    longest = np.zeros(len(rounds))
    np.maximum.at(longest, members, jobs.finish - jobs.start)
    return float((jobs.finish - jobs.start).sum()) < 0.5 * float(longest[members].sum())


def _counted(jobs: Jobs) -> str:
    """Such as 1,204 jobs: 1,000 aggregated, 204 lost."""
    counts = {fate: int(jobs.has_fate(fate).sum()) for fate in FATES}
    return f"{len(jobs):,} jobs: {', '.join(f'{count:,} {fate}' for fate, count in counts.items() if count)}"


def fill_figure(
    figure: FigureBase, jobs: Jobs, rows: Sequence[Row], colours: Sequence[str]
) -> None:
    """Put all panels into a figure."""
    ends = np.array([row.get("virtual_seconds") or 0.0 for row in rows], np.float64)
    end = float(ends.max(initial=0.0)) or float(jobs.finish.max())
    size, unit = time_unit(end)
    panels = [_fleet, _workers, *([_staleness] if jobs.staleness.any() else [])]
    above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(2.3, 1.0)))
    _timeline(above.subplots(), jobs, ends, end)
    for ax, panel in zip(below.subplots(1, len(panels)), panels, strict=True):
        ax.grid(True)
        panel(ax, jobs, rows, end, size, colours)
        if panel is not _staleness:
            ax.set(xlim=(0, end / size), xlabel=f"virtual time ({unit})")


# --- clients --------------------------------------------------------------------------------------------------------
def shown_window(jobs: Jobs, end: float) -> tuple[float, float]:
    """The virtual seconds in which single jobs can be seen: the whole run, or a part from its middle."""
    wide = _WIDEST * float(np.median(jobs.finish - jobs.start))
    if wide <= 0 or wide >= end:
        return 0.0, end
    return (end - wide) / 2, (end + wide) / 2


def sample_clients(jobs: Jobs) -> list[tuple[str, np.ndarray]]:
    """Clients by kind, the fastest first; all of them where they are few. Always the same ones for the same jobs."""
    clients, members = np.unique(jobs.client, return_inverse=True)
    whole = (~jobs.has_fate("lost")).astype(
        float
    )  # a lost job is shorter than its client would have needed
    whole[np.bincount(members, whole)[members] == 0] = 1.0
    seconds = np.bincount(members, whole * (jobs.finish - jobs.start)) / np.bincount(members, whole)
    order = clients[np.argsort(seconds, kind="stable")]
    if len(order) <= 3 * _THIRD:
        return [("", order)]
    between = np.arange(_THIRD, len(order) - _THIRD)
    drawn = np.sort(np.random.Generator(np.random.PCG64(0)).choice(between, _THIRD, replace=False))
    return [("fastest", order[:_THIRD]), ("random", order[drawn]), ("slowest", order[-_THIRD:])]


def _timeline(ax: Axes, jobs: Jobs, ends: np.ndarray, end: float) -> None:
    low, high = shown_window(jobs, end)
    part = jobs[(jobs.finish > low) & (jobs.start < high)]
    kinds = sample_clients(part)
    shown = np.concatenate([clients for _, clients in kinds])
    rank = {client: place for place, client in enumerate(shown.tolist())}
    part = part[np.isin(part.client, shown)]
    y = np.array([rank[client] for client in part.client.tolist()], np.float64)
    size, unit = time_unit(high)
    _bars(ax, part, y, size, low, high)
    inside = ends[(ends > low) & (ends <= high)]
    if len(inside) <= 80:
        lines = ax.vlines(inside / size, -0.5, len(shown) - 0.5, linewidth=0.7, alpha=0.3, zorder=0)
        lines.set(color=_ink(), label="aggregation")
    _name_versions(ax, ends, low, high, size)
    _name_clients(ax, kinds)
    count = len(np.unique(jobs.client))
    what = f"{len(shown)} of {count:,} clients" if len(shown) < count else "Clients"
    when = ", a part of the run" if low else ""
    ax.set(
        xlim=(low / size, high / size), ylim=(len(shown) - 0.4, -0.6), xlabel=f"virtual time ({unit})",
        title=f"{what}{when}: a bar is a job, from its dispatch to its end",
    )  # fmt: skip
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6, handlelength=1.6)


def _name_versions(ax: Axes, ends: np.ndarray, low: float, high: float, size: float) -> None:
    """Above: which version some aggregations made; a job that starts right of one trains on it, or on a later one."""
    step = (high - low) / 12
    found = np.unique(np.searchsorted(ends, np.arange(low + step, high, step)))
    chosen: list[int] = []
    for place in found[found < len(ends)].tolist():
        if ends[place] <= high and (not chosen or ends[place] - ends[chosen[-1]] > 0.6 * step):
            chosen.append(place)
    above = ax.secondary_xaxis("top")
    above.set_xticks(ends[chosen] / size, [f"{place + 1:,}" for place in chosen], fontsize=8)
    above.set_xlabel("version of the model", fontsize=9)
    above.spines["top"].set_visible(False)


def _ink() -> str:
    import matplotlib

    return str(matplotlib.rcParams["text.color"])


def _name_clients(ax: Axes, kinds: Sequence[tuple[str, np.ndarray]]) -> None:
    """Ids left; what the thirds are is said right of them, between lines."""
    shown = np.concatenate([clients for _, clients in kinds]).tolist()
    ax.set_yticks(range(len(shown)), [str(client) for client in shown], fontsize=8)
    ax.set_ylabel("" if kinds[0][0] else "client, the fastest first")
    ax.tick_params(axis="y", length=0)
    place = 0
    for kind, clients in kinds:
        if kind:
            ax.text(
                -0.04, place + (len(clients) - 1) / 2, f"{kind} clients", transform=ax.get_yaxis_transform(),
                rotation=90, ha="right", va="center", fontsize=10,
            )  # fmt: skip
        if place:
            ax.axhline(place - 0.5, color=_ink(), linewidth=0.8, alpha=0.6)
        place += len(clients)


def _bars(ax: Axes, jobs: Jobs, y: np.ndarray, size: float, low: float, high: float) -> None:
    """Filled with the colour of their staleness if they were taken, else empty with a sign at their end."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    def boxes(chosen: np.ndarray) -> list[np.ndarray]:
        left, right = jobs.start[chosen], np.minimum(jobs.finish[chosen], high)
        right = np.maximum(right, left + (high - low) / 600)  # the shortest ones are seen, too
        top, bottom = y[chosen] - 0.38, y[chosen] + 0.38
        corners = ((left, top), (right, top), (right, bottom), (left, bottom))
        return list(np.stack([np.stack([x / size, height], -1) for x, height in corners], 1))

    taken = jobs.has_fate("aggregated")
    if taken.any():
        stale = jobs.staleness[taken]
        most = max(1.0, float(np.ceil(np.quantile(stale, 0.98))))
        scale = LinearSegmentedColormap.from_list("staleness", _SCALE)
        bars = PolyCollection(
            boxes(taken), array=stale.astype(float), cmap=scale, norm=Normalize(0, most), label="aggregated",
            facecolor=_SCALE[0], edgecolor=ax.get_facecolor(), linewidth=0.3,
        )  # fmt: skip
        ax.add_collection(bars)
        if stale.any():
            extend = "max" if stale.max() > most else "neither"
            bar = ax.figure.colorbar(
                bars, ax=ax, pad=0.01, fraction=0.025, aspect=40, extend=extend
            )
            bar.set_label("staleness (aggregations since its version)")
            bar.locator = _whole_numbers(6)
            bar.outline.set_visible(False)
    for fate, (marker, colour) in _UNUSED.items():
        chosen = jobs.has_fate(fate)
        if not chosen.any():
            continue
        label, line = (fate, "-") if marker else (f"{fate} at the end", ":")
        empty = PolyCollection(
            boxes(chosen), facecolor=(0.55, 0.57, 0.6, 0.18), edgecolor=colour, linewidth=0.7
        )
        empty.set(linestyle=line, label="_" if marker else label)
        ax.add_collection(empty)
        if marker:
            ends = chosen & (jobs.finish <= high)
            ax.plot(
                jobs.finish[ends] / size,
                y[ends],
                marker,
                color=colour,
                markersize=5,
                markeredgewidth=1.6,
                label=label,
            )


def _whole_numbers(count: int) -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count, integer=True)


# --- fleet, workers, staleness ----------------------------------------------------------------------------------------
def active_clients(jobs: Jobs, edges: np.ndarray) -> np.ndarray:
    """Clients at work between one edge (virtual seconds) and the next, in the mean: exact, however many jobs."""
    seconds = _waited(jobs.start, edges) - _waited(jobs.finish, edges)
    return np.asarray(np.diff(seconds) / np.diff(edges))


def _waited(since: np.ndarray, until: np.ndarray) -> np.ndarray:
    """The sum over all `since` of the seconds from there to each `until`; 0 for those that come later."""
    ordered = np.sort(since)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    before = np.searchsorted(ordered, until)
    return np.asarray(before * until - sums[before])


def _fleet(
    ax: Axes, jobs: Jobs, rows: Sequence[Row], end: float, size: float, colours: Sequence[str]
) -> None:
    edges = np.linspace(0, end, _BINS + 1)
    everyone = active_clients(jobs, edges)
    ax.stairs(everyone, edges / size, color=colours[0], linewidth=1.4, baseline=None, label="all")
    vain = jobs.has_fate("lost", "discarded", "failed")
    if vain.any():
        part = active_clients(jobs[vain], edges)
        ax.stairs(
            part, edges / size, color=colours[1], linewidth=1.4, baseline=None, label="in vain"
        )
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.26), ncols=2)
    ax.set(
        title=f"Fleet: {everyone.mean():.3g} clients at work in the mean",
        ylabel="clients",
        ylim=(0, None),
    )


def _workers(
    ax: Axes, jobs: Jobs, rows: Sequence[Row], end: float, size: float, colours: Sequence[str]
) -> None:
    busy, least = (
        np.array(column(rows, key), np.float64) for key in ("worker_busy", "worker_busy_least")
    )
    known = np.isfinite(busy)
    if not known.any():
        ax.set(title="Workers: not measured", yticks=[])
        return
    now, wall = (
        np.array(column(rows, key), np.float64) for key in ("virtual_seconds", "wall_seconds")
    )
    spans = np.maximum(np.diff(wall, prepend=0.0), 0.0)
    share = (
        float(np.average(busy[known], weights=spans[known]))
        if spans[known].any()
        else float(busy[known].mean())
    )
    curves = [(busy, "mean of all", colours[0]), (least, "least busy", colours[1])]
    for values, name, colour in curves if (least != busy)[known].any() else curves[:1]:
        x, y = thin_curve(now[known], values[known], end)
        ax.plot(
            x / size,
            y,
            color=colour,
            linewidth=1.4,
            marker="o" if len(x) <= 12 else None,
            markersize=4,
            label=name,
        )
    ax.set(
        title=f"Workers: {share:.0%} of the wall time at work",
        ylabel="share of wall time",
        ylim=(0, 1.05),
    )
    if len(ax.lines) > 1:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.26), ncols=2)


def thin_curve(x: np.ndarray, y: np.ndarray, end: float) -> tuple[np.ndarray, np.ndarray]:
    """At most `_BINS` points of a curve from 0 to `end`: means of those that lie close together."""
    if len(x) <= _BINS:
        return x, y
    _, members = np.unique(np.minimum(x * _BINS // end, _BINS - 1), return_inverse=True)
    count = np.bincount(members)
    return np.bincount(members, x) / count, np.bincount(members, y) / count


def _staleness(
    ax: Axes, jobs: Jobs, rows: Sequence[Row], end: float, size: float, colours: Sequence[str]
) -> None:
    stale = jobs.staleness[jobs.has_fate("aggregated")]
    width = int(stale.max()) // 40 + 1
    edges = np.arange(0, stale.max() + width + 1, width)
    counts, _ = np.histogram(stale, edges)
    ax.bar(edges[:-1] + (width - 1) / 2, counts / len(stale), 0.85 * width, color=colours[0])
    ax.xaxis.set_major_locator(_whole_numbers(6))
    ax.set(
        title=f"Staleness: mean {stale.mean():.3g}, at most {stale.max():,}", ylabel="share of results",
        xlabel="aggregations since its version",
    )  # fmt: skip
