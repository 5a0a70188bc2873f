"""What a search found: a table, the best configuration as a file that `raysim run` takes, two pictures and a page."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from raysim.commands.sweep.records import Record, Records, plus_minus
from raysim.commands.sweep.space import Choice, Interval, Range
from raysim.experiment.config_files import to_yaml
from raysim.experiment.many_runs import short_names, value_label
from raysim.primitives.files import replace_file
from raysim.results.figures import figure_file
from raysim.results.history import write_json
from raysim.results.page import ReportSection, write_report
from raysim.results.progress import format_duration
from raysim.results.report import RunGroup, load_run
from raysim.results.rerun import rerun_command
from raysim.results.tables import Column, format_table
from raysim.results.theme import DARK, LIGHT, set_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

TABLE, BEST = "trials.csv", "best.yaml"
_SHOWN = 20  # trials of the printed table
_DRAWN = 8  # trials whose curves are on the page
_FAINT = "#c3c8cd"  # trials that were given up


def write(records: Records, numbers: Mapping[str, object]) -> list[Path]:
    """Write all results into the search's folder; their paths. numbers: what the summary says besides."""
    folder, best = records.folder, records.best()
    columns = _columns(records)
    table = pa.table(columns)
    for name, save in ((TABLE, pc.write_csv), ("trials.parquet", pq.write_table)):
        sink = pa.BufferOutputStream()
        save(table, sink)
        replace_file(folder / name, sink.getvalue().to_pybytes())
    files = [folder / TABLE, folder / "trials.parquet"]
    winner: dict[str, object] = {}
    if best is not None:
        replace_file(folder / BEST, _best(records, best).encode())
        files.append(folder / BEST)
        setting = records.search.setting(best.point)
        winner = {
            "best_trial": best.number,
            "best": best.score,
            "best_deviation": best.deviation,
            "setting": setting,
        }
        for name, draw in (("parallel.png", draw_parallel), ("slices.png", draw_slices)):
            draw(records, folder / name)
            files.append(folder / name)
        if (page := _page(records)) is not None:
            files.append(page)
    states = [record.status for record in records.all.values()]
    counts = {name: states.count(name) for name in ("done", "stopped", "failed", "running")}
    write_json(
        {"metric": records.metric, **winner, "trials": counts, **numbers}, folder / "summary.json"
    )
    return [*files, folder / "summary.json"]


def _columns(records: Records) -> dict[str, list[Any]]:
    """A column for each thing known of the trials, the best trial first."""
    ordered, space = records.ordered(), records.search.space
    columns: dict[str, list[Any]] = {"trial": [record.number for record in ordered]}
    for key in space:
        values = [records.search.setting(record.point).get(key) for record in ordered]
        plain = all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in values
        )
        columns[key] = (
            values if plain else [None if value is None else value_label(value) for value in values]
        )
    columns[records.metric] = [record.score for record in ordered]
    columns[f"{records.metric}_std"] = [record.deviation for record in ordered]
    columns["rounds"] = [record.rounds for record in ordered]
    columns["seconds"] = [record.seconds for record in ordered]
    columns["status"] = [record.status for record in ordered]
    columns["folder"] = [
        str(records.path(record.number).relative_to(records.folder)) for record in ordered
    ]
    columns["error"] = [record.error for record in ordered]
    return columns


def _table(records: Records, most: int | None = None) -> list[Column]:
    """A row for each trial, the best first; a value that a setting does not have is a dash."""
    keys = list(records.search.space)
    rows = [["trial", *short_names(keys), records.metric, "rounds", "time", ""]]
    for record in records.ordered()[:most]:
        setting = records.search.setting(record.point)
        values = [value_label(setting[key]) if key in setting else "–" for key in keys]
        state = {"done": "", "running": "unfinished", "stopped": "stopped early"}.get(
            record.status, record.status
        )
        shown = plus_minus(record.score, record.deviation)
        rows.append(
            [
                str(record.number),
                *values,
                shown,
                str(record.rounds),
                format_duration(record.seconds),
                state,
            ]
        )
    head, *body = rows
    numbers: list[float | None] = [None] * len(body)  # puts all texts to the right
    return [
        Column(title, [row[place] for row in body], numbers) for place, title in enumerate(head)
    ]


def table(records: Records, width: int = 0) -> str:
    """The best trials as text. width: of a line."""
    more = len(records.all) - _SHOWN
    return format_table(_table(records, _SHOWN), width) + (
        f"\nand {more} more in {records.folder / TABLE}" if more > 0 else ""
    )


def _page(records: Records) -> Path | None:
    """Write report.html: all trials as a table, the pictures, and the curves of the best; None where none is done."""
    done = [
        record
        for record in records.ordered()
        if (records.path(record.number) / "summary.json").is_file()
    ]
    if not done:
        return None
    groups = [
        RunGroup(
            f"trial {record.number}: {records.label(record)}",
            [load_run(records.path(record.number))],
        )
        for record in done[:_DRAWN]
    ]
    about = "All trials, the best first; behind ± is the sample deviation over seeds (divisor n-1)."
    sections = [ReportSection("Trials", about, _table(records))]
    for name, draw, title in (
        ("slices", draw_slices, "Score by key"),
        ("parallel", draw_parallel, "All keys together"),
    ):
        draw(records, dark := io.BytesIO(), dark=True)
        sections.append(
            ReportSection(
                title, "", (), ((records.folder / f"{name}.png").read_bytes(), dark.getvalue())
            )
        )
    return write_report(groups, records.folder, f"sweep {records.folder.resolve().name}", sections)


def _best(records: Records, best: Record) -> str:
    node = {**records.search.node(best.point), "out": None, "resume": None}
    what = f"{records.metric} {plus_minus(best.score, best.deviation)} after {best.rounds} rounds"
    return (
        f"# {records.label(best)}: {what}. Use: {rerun_command(node, Path(BEST))}\n{to_yaml(node)}"
    )


# --- pictures -------------------------------------------------------------------------------------------------------
class _Axis:
    """Where the values of a key lie between 0 and 1, and what to write beside them."""

    def __init__(self, key: str, name: str, found: Range, used: Sequence[object]):
        self.key, self.name, self.found = key, name, found
        numbers = found.values if isinstance(found, Choice) else (found.low, found.high)
        self.numeric = all(
            isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers
        )
        self.log = found.log if isinstance(found, Interval) else self.numeric and _spread(numbers)
        if not isinstance(found, Choice) or not self.numeric:
            self.values: tuple[object, ...] = numbers
        else:
            self.values = tuple(sorted(found.values, key=lambda value: float(str(value))))
        ends = (
            [float(str(value)) for value in (*numbers, *used)]
            if self.numeric
            else [0.0, len(numbers) - 1.0]
        )
        self.low, self.high = min(ends), max(ends)

    def number(self, value: object) -> float:
        """A value as a number: its own, or its place in the list."""
        return float(str(value)) if self.numeric else float(self.values.index(value))

    def place(self, value: object) -> float:
        """Between 0 and 1."""
        low, high, at = self.low, self.high, self.number(value)
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels."""
        if isinstance(self.found, Choice):
            return [(self.place(value), value_label(value)) for value in self.values]
        if self.log:
            first, last = (
                math.ceil(math.log10(self.low) - 1e-9),
                math.floor(math.log10(self.high) + 1e-9),
            )
            numbers = [10.0**power for power in range(first, last + 1)]
            numbers = numbers if len(numbers) > 1 else [self.low, self.high]
            return [(self.place(number), f"{number:.3g}") for number in numbers]
        return [
            (self.place(number), f"{number:.6g}") for number in _round_numbers(self.low, self.high)
        ]


def _round_numbers(low: float, high: float) -> list[float]:
    """About five round numbers between two."""
    from matplotlib.ticker import MaxNLocator

    rounding = 1e-9 * (high - low)
    found = [
        float(x)
        for x in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
        if low - rounding <= x <= high + rounding
    ]
    return found if len(found) > 1 else [low, high]


def _spread(values: Sequence[Any]) -> bool:
    """Whether a list of numbers is better seen by orders of magnitude."""
    return bool(min(values) > 0 and max(values) >= 30 * min(values))


def _axes(records: Records) -> list[_Axis]:
    space = records.search.space
    names = short_names(list(space))
    settings = [records.search.setting(record.point) for record in records.all.values()]
    return [
        _Axis(key, name, found, [setting[key] for setting in settings if key in setting])
        for (key, found), name in zip(space.items(), names, strict=True)
    ]


def _scored(records: Records) -> list[Record]:
    """Those that can be drawn, the best last, so that it lies on top."""
    return [
        each for each in records.ordered() if each.score is not None and math.isfinite(each.score)
    ][::-1]


def _title(records: Records) -> str:
    best = records.best()
    assert best is not None, "pictures are made of trials with a score"
    shown = plus_minus(best.score, best.deviation)
    return f"Best {records.metric} {shown} (trial {best.number}: {records.label(best)})"


def _colours(records: Sequence[Record], dark: bool) -> tuple[Colormap, float, float]:
    """A map of scores to colours, of which the best stands out from the page; and the scores that it spans."""
    from matplotlib import colormaps

    full = [
        record.score
        for record in records
        if record.status != "stopped" and record.score is not None
    ]
    scores = full or [record.score for record in records if record.score is not None]
    return colormaps["viridis" if dark else "viridis_r"], min(scores), max(scores)


def draw_parallel(records: Records, path: Path | io.BytesIO, *, dark: bool = False) -> None:
    """Write parallel coordinates: a line per trial through its values to its score, the best trial thick."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axes, trials = _axes(records), _scored(records)
    colours, low, high = _colours(trials, dark)
    ends = [trial.score for trial in trials if trial.score is not None]
    bottom, top = min(ends), max(ends)
    with figure_file(
        path, _title(records), (max(7.0, 2.2 * (len(axes) + 1)), 5.0), dark=dark
    ) as figure:
        ax = figure.subplots()
        for trial in trials:
            setting, score = records.search.setting(trial.point), float(trial.score or 0.0)
            ys = [
                axis.place(setting[axis.key]) if axis.key in setting else math.nan for axis in axes
            ]
            ys.append((score - bottom) / (top - bottom) if top > bottom else 0.5)
            stopped, best = trial.status == "stopped", trial is trials[-1]
            share = (score - low) / (high - low) if high > low else 1.0
            colour = _FAINT if stopped else colours(0.08 + 0.92 * share)
            ax.plot(
                range(len(ys)), ys, color=colour, linewidth=3.2 if best else 1.2, marker="o",
                markersize=6 if best else 3.5, zorder=1 if stopped else 3,
            )  # fmt: skip
        ax.set(xlim=(-0.25, len(axes) + 0.6), ylim=(-0.05, 1.05), yticks=[])
        ax.set_xticks(range(len(axes) + 1), [*(axis.name for axis in axes), records.metric])
        ax.tick_params(axis="x", length=0, pad=8)
        for index, axis in enumerate(axes):
            _scale(ax, index, axis.ticks())
        span = top - bottom
        ticks = (
            [((each - bottom) / span, f"{each:.6g}") for each in _round_numbers(bottom, top)]
            if span
            else []
        )
        _scale(ax, len(axes), ticks or [(0.5, f"{top:.6g}")])
        ax.spines[:].set_visible(False)
        if high > low:
            shades = ScalarMappable(Normalize(low - (high - low) * 0.08 / 0.92, high), colours)
            figure.colorbar(shades, ax=ax, label=records.metric, fraction=0.03, pad=0.01)
        if any(trial.status == "stopped" for trial in trials):
            figure.supxlabel("grey: stopped early", fontsize=10)


def _scale(ax: Axes, x: float, ticks: Sequence[tuple[float, str]]) -> None:
    from matplotlib import rcParams

    ink, paper = rcParams["text.color"], rcParams["axes.facecolor"]
    ax.axvline(x, color=ink, linewidth=0.9, zorder=2)
    for y, text in ticks:
        ax.plot([x, x + 0.03], [y, y], color=ink, linewidth=0.9, zorder=2)
        box = {"facecolor": paper, "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
        ax.text(x + 0.05, y, text, fontsize=8.5, va="center", bbox=box, zorder=4)


def draw_slices(records: Records, path: Path | io.BytesIO, *, dark: bool = False) -> None:
    """Write the score against each key alone, with its deviation over seeds; open circles were stopped early."""
    axes, trials, hues = _axes(records), _scored(records), DARK if dark else LIGHT
    across = min(2, len(axes))
    down = -(-len(axes) // across)
    with figure_file(
        path, _title(records), (max(7.0, 3.6 * across), 3.2 * down + 0.6), dark=dark
    ) as figure:
        panels = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
        for panel in panels[len(axes) :]:
            panel.set_axis_off()
        for index, (ax, axis) in enumerate(zip(panels, axes, strict=False)):
            for trial in trials:
                setting = records.search.setting(trial.point)
                if axis.key not in setting:
                    continue
                best, stopped = trial is trials[-1], trial.status == "stopped"
                x, y = axis.number(setting[axis.key]), float(trial.score or 0.0)
                ax.errorbar(
                    x, y, yerr=trial.deviation, fmt="*" if best else "o",
                    markersize=13 if best else 6, color=hues[1] if best else hues[0], alpha=1.0 if best else 0.75,
                    markerfacecolor="none" if stopped else None, elinewidth=1.2, capsize=2,
                )  # fmt: skip
            if axis.log:
                set_log_scale(ax, "x")
            if axis.numeric and isinstance(axis.found, Choice):
                ax.set_xticks(
                    [axis.number(value) for value in axis.values],
                    [value_label(value) for value in axis.values],
                )
                ax.minorticks_off()
            if not axis.numeric:
                ax.set_xticks(
                    range(len(axis.values)),
                    [value_label(value) for value in axis.values],
                    rotation=35,
                    ha="right",
                )
                ax.set_xlim(-0.5, len(axis.values) - 0.5)
            ax.set_xlabel(axis.name)
            ax.grid(True)
            if index % across == 0:
                ax.set_ylabel(records.metric)
