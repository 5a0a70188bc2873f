"""Draw a picture of a split: the classes and the sizes of its clients."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raysim.data.csr import Ints
from raysim.data.federated import FederatedData
from raysim.data.split_statistics import class_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS = 50  # at most so many clients are drawn as bars, more as a heat map
MAX_LEGEND = 20  # classes in a legend
MAX_COLUMNS = 1000  # clients in a heat map
MAX_CLASS_NAMES = 30  # next to a heat map
MAX_BINS = 30  # of the histogram of sizes


def draw_partition(data: FederatedData, path: str | Path) -> None:
    """Write a PNG with two diagrams: each client's samples by class, and the clients' sizes.

    The first diagram has a bar for each client. With many clients or classes, it is a heat map.
    Only training samples count.
    """
    from matplotlib.figure import Figure

    counts = class_counts(data)
    names = data.open().groups()[1]
    has_bars = len(counts) <= MAX_BARS and len(names) <= MAX_LEGEND
    height = max(4.8, 2 + 0.17 * len(counts)) if has_bars else 6.0
    figure = Figure(figsize=(13, height), layout="constrained")
    class_axes, size_axes = figure.subplots(1, 2, width_ratios=(2.4, 1))
    if has_bars:
        _draw_bars(class_axes, counts, names)
        columns = min(len(names), 10 if max(map(len, names)) < 10 else 7)
        figure.legend(
            *class_axes.get_legend_handles_labels(),
            loc="outside lower left",
            ncols=columns,
            frameon=False,
        )
    else:
        _draw_heat_map(class_axes, counts, names)
    _draw_sizes(size_axes, counts.sum(axis=1))
    figure.suptitle("\n".join(textwrap.wrap(data.title, 110)), fontsize=13)
    figure.savefig(path, dpi=130, format="png")


def size_edges(sizes: Ints) -> list[float]:
    """Return the edges of the bars in a histogram of clients' sizes.

    sizes: the number of samples of each client, [N].
    """
    low, high = (int(sizes.min()), int(sizes.max())) if len(sizes) else (0, 0)
    # edges between whole numbers: otherwise bars would cover unequal numbers of sizes
    width = (high - low) // MAX_BINS + 1
    edges = np.arange(low, high + width + 1, width) - 0.5
    if high == low:
        # All sizes are equal: one bar in the middle.
        edges = low + np.arange(-4.5, 5) * max(1, low // 40)
    return [float(edge) for edge in edges]


def _draw_bars(axes: Axes, counts: Ints, names: list[str]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    sizes = counts.sum(axis=1)
    shares = counts / np.maximum(sizes, 1)[:, None]
    palette = colormaps["tab10" if len(names) <= 10 else "tab20"]
    colours = palette.colors  # type: ignore[attr-defined]
    for number, name in enumerate(names):
        axes.barh(
            np.arange(len(counts)),
            shares[:, number],
            left=shares[:, :number].sum(axis=1),
            height=0.86,
            color=colours[number],
            label=name,
        )
    for client in np.flatnonzero(sizes == 0).tolist():
        axes.text(0.01, client, "no samples", va="center", color="0.4", fontsize=8)
    axes.set(
        xlim=(0, 1),
        ylim=(len(counts) - 0.5, -0.5),
        ylabel="client",
        title="classes of each client's training samples",
    )
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 5, 10]))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_heat_map(axes: Axes, counts: Ints, names: list[str]) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    places = np.linspace(0, len(counts) - 1, min(len(counts), MAX_COLUMNS))
    shown = np.unique(places.astype(np.int64))
    shares = counts[shown] / np.maximum(counts[shown].sum(axis=1), 1)[:, None]
    image = axes.imshow(
        shares.T,
        aspect="auto",
        cmap="Blues",
        vmin=0,
        vmax=max(0.05, float(shares.max())),
        interpolation="nearest",
        extent=(0, len(shown), len(names), 0),
    )
    part = "" if len(shown) == len(counts) else f" ({len(shown)} of {len(counts)} clients)"
    axes.set(
        xlabel="client",
        ylabel="class",
        title=f"share of each class in a client's training samples{part}",
    )
    if len(names) <= MAX_CLASS_NAMES:
        axes.set_yticks(np.arange(len(names)) + 0.5, names)

    def client_number(place: float, _: float) -> str:
        return str(shown[int(place)]) if 0 <= place < len(shown) else ""

    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(client_number)
    axes.figure.colorbar(image, ax=axes, format=PercentFormatter(1), pad=0.02)


def _draw_sizes(axes: Axes, sizes: Ints) -> None:
    from matplotlib.ticker import MaxNLocator

    low, high = int(sizes.min()), int(sizes.max())
    title = f"every client has {high}"
    if high > low:
        empty = f", {int((sizes == 0).sum())} empty" if low == 0 else ""
        title = f"sizes {low} to {high}, median {np.median(sizes):g}{empty}"
    axes.hist(sizes, bins=size_edges(sizes), color="tab:blue", rwidth=0.92)
    if high > low:
        axes.axvline(float(np.median(sizes)), color="0.25", linestyle="--", linewidth=1.2)
    axes.set(xlabel="training samples", ylabel="clients", title=title)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
