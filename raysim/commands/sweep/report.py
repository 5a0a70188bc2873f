"""Write the results of a sweep: a table, the best configuration, two diagrams, a page."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from raysim.commands.sweep.records import TrialRecord, TrialRecords
from raysim.commands.sweep.space import Choice, Interval, ValueRange
from raysim.experiment.config_files import to_yaml
from raysim.experiment.many_runs import value_label
from raysim.experiment.run_table import plus_minus
from raysim.primitives.files import replace_file
from raysim.results.figures import figure_file
from raysim.results.history import write_json
from raysim.results.number_format import format_amount
from raysim.results.observers import SUMMARY
from raysim.results.page import ReportSection, write_report
from raysim.results.progress import format_duration
from raysim.results.report import RunGroup
from raysim.results.rerun import rerun_command
from raysim.results.stored_runs import load_run, short_names
from raysim.results.tables import Column, format_table
from raysim.results.theme import DARK, LIGHT, set_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap

TABLE, BEST = "trials.csv", "best.yaml"
MAX_PRINTED_TRIALS = 20
MAX_CURVES = 8  # on the page
STOPPED_COLOUR = "#c3c8cd"
TICKS = 5  # about so many on an axis
LOGARITHMIC_RATIO = 30  # of a list's largest to its smallest number: its axis is logarithmic
PALEST = 0.08  # of the colour map, because its very end can hardly be seen on the page
Picture: TypeAlias = Path | io.BytesIO

STATUS_TEXTS = {"done": "", "running": "unfinished", "stopped": "stopped early"}


def write(records: TrialRecords, numbers: Mapping[str, object]) -> list[Path]:
    """Write all result files into the sweep's folder; return their paths.

    numbers: additional entries of the sweep's summary.json, such as "wall_seconds", by name.
    """
    folder = records.folder
    best = records.best()
    files = _write_tables(records)
    winner: dict[str, object] = {}
    if best is not None:
        replace_file(folder / BEST, _best_config(records, best).encode())
        files.append(folder / BEST)
        winner = {
            "best_trial": best.number,
            "best": best.score,
            "best_deviation": best.deviation,
            "setting": records.plan.setting(best.point),
        }
        for name, draw in (("parallel.png", draw_parallel), ("slices.png", draw_slices)):
            draw(records, folder / name)
            files.append(folder / name)
        page = _write_page(records)
        if page is not None:
            files.append(page)
    statuses = [record.status for record in records.all.values()]
    counts = {name: statuses.count(name) for name in ("done", "stopped", "failed", "running")}
    summary = {"metric": records.metric, **winner, "trials": counts, **numbers}
    write_json(summary, folder / SUMMARY)
    return [*files, folder / SUMMARY]


# --- tables -------------------------------------------------------------------------------------
def _write_tables(records: TrialRecords) -> list[Path]:
    table = pa.table(_columns(records))
    files = []
    for name, save in ((TABLE, pc.write_csv), ("trials.parquet", pq.write_table)):
        sink = pa.BufferOutputStream()
        save(table, sink)
        files.append(records.folder / name)
        replace_file(files[-1], sink.getvalue().to_pybytes())
    return files


def _columns(records: TrialRecords) -> dict[str, list[Any]]:
    """Return the columns of trials.csv; the best trial is in the first row.

    The column `folder` has the folder of the trial's first run.
    """
    ordered = records.ordered()
    settings = [records.plan.setting(record.point) for record in ordered]
    columns: dict[str, list[Any]] = {"trial": [record.number for record in ordered]}
    for key in records.plan.space:
        values = [setting.get(key) for setting in settings]
        if not all(_is_number(value) for value in values):
            values = [None if value is None else value_label(value) for value in values]
        columns[key] = values
    folders = [records.run_folders(record.number)[0] for record in ordered]
    return {
        **columns,
        records.metric: [record.score for record in ordered],
        f"{records.metric}_std": [record.deviation for record in ordered],
        "rounds": [record.rounds for record in ordered],
        "seconds": [record.seconds for record in ordered],
        "status": [record.status for record in ordered],
        "folder": [str(folder.relative_to(records.folder)) for folder in folders],
        "error": [record.error for record in ordered],
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _printed_columns(records: TrialRecords, most: int | None = None) -> list[Column]:
    """Return the columns of the printed table, which has one row per trial, the best first.

    A dash marks a key that a trial's setting does not have.
    most: the number of trials in the table; None shows all.
    """
    keys = list(records.plan.space)
    titles = ["trial", *short_names(keys), records.metric, "rounds", "time", ""]
    rows = []
    for record in records.ordered()[:most]:
        setting = records.plan.setting(record.point)
        values = [value_label(setting[key]) if key in setting else "–" for key in keys]
        score = plus_minus(record.score, record.deviation)
        status = STATUS_TEXTS.get(record.status, record.status)
        time = format_duration(record.seconds)
        rows.append([str(record.number), *values, score, str(record.rounds), time, status])
    # columns with numbers are aligned to the right
    numbers: list[float | None] = [None] * len(rows)
    columns = []
    for index, title in enumerate(titles):
        columns.append(Column(title, [row[index] for row in rows], numbers))
    return columns


def table(records: TrialRecords, width: int = 0) -> str:
    """Return a table of the best trials (`MAX_PRINTED_TRIALS` at most) as text.

    If there are more, the last line names the file with all trials.
    width: the longest line in characters; 0 means no limit.
    """
    text = format_table(_printed_columns(records, MAX_PRINTED_TRIALS), width)
    left_out = len(records.all) - MAX_PRINTED_TRIALS
    if left_out > 0:
        text += f"\nand {left_out} more in {records.folder / TABLE}"
    return text


# --- files --------------------------------------------------------------------------------------
def _write_page(records: TrialRecords) -> Path | None:
    """Write report.html into the sweep's folder; return the path of this file.

    The page has a table of all trials, diagrams of the scores, and curves of the best finished
    trials. If no trial has finished, write nothing and return None.
    """
    groups: list[RunGroup] = []
    for record in records.ordered():
        folders = records.run_folders(record.number)
        if len(groups) < MAX_CURVES and all((path / SUMMARY).is_file() for path in folders):
            title = f"trial {record.number}: {records.label(record)}"
            groups.append(RunGroup(title, [load_run(path) for path in folders]))
    if not groups:
        return None
    about = "All trials, the best first; behind ± is the sample standard deviation over seeds."
    sections = [ReportSection("Trials", about, _printed_columns(records))]
    pictures = (
        ("slices", draw_slices, "Score by key"),
        ("parallel", draw_parallel, "All keys together"),
    )
    for name, draw, title in pictures:
        dark = io.BytesIO()
        draw(records, dark, dark=True)
        light = (records.folder / f"{name}.png").read_bytes()
        sections.append(ReportSection(title, "", (), (light, dark.getvalue())))
    return write_report(groups, records.folder, f"sweep {records.folder.resolve().name}", sections)


def _best_config(records: TrialRecords, best: TrialRecord) -> str:
    config = {**records.plan.node(best.point), "out": None, "resume": None}
    score = plus_minus(best.score, best.deviation)
    rounds = format_amount(best.rounds, "round")
    comment = f"{records.label(best)}: {records.metric} {score} after {rounds}"
    return f"# {comment}. Use: {rerun_command(config, Path(BEST))}\n{to_yaml(config)}"


# --- pictures -----------------------------------------------------------------------------------
class KeyAxis:
    """An axis of a picture, for the values of one searched key.

    name: the label of the axis.
    values: the list or the interval in which the sweep searches.
    used: the key's values in all trials, which the axis must cover.
    """

    def __init__(self, key: str, name: str, values: ValueRange, used: Sequence[object]):
        self.key = key
        self.name = name
        self.range = values
        numbers = values.values if isinstance(values, Choice) else (values.low, values.high)
        self.is_numeric = all(_is_number(value) for value in numbers)
        is_positive = self.is_numeric and all(float(str(value)) > 0 for value in numbers)
        if isinstance(values, Interval):
            self.is_logarithmic = values.log
        else:
            self.is_logarithmic = self.is_numeric and _spans_magnitudes(numbers)
        # Learning rates are compared by their ratios, even if only a few were searched.
        self.is_logarithmic |= is_positive and _is_rate(key)
        self.values: tuple[object, ...] = numbers
        if isinstance(values, Choice) and self.is_numeric:
            self.values = tuple(sorted(values.values, key=lambda value: float(str(value))))
        ends = [0.0, len(numbers) - 1.0]
        if self.is_numeric:
            ends = [float(str(value)) for value in (*numbers, *used)]
        self.low, self.high = min(ends), max(ends)

    def number(self, value: object) -> float:
        """Return the position of a value of the searched key on this axis.

        If all searched values are numbers, this is the value itself, else its index in the list.
        """
        return float(str(value)) if self.is_numeric else float(self.values.index(value))

    def position(self, value: object) -> float:
        """Return the position of a value on the axis: 0 at the lowest value, 1 at the highest.

        On a logarithmic axis, equal ratios have equal distances.
        """
        low, high, number = self.low, self.high, self.number(value)
        if self.is_logarithmic:
            low, high, number = math.log(low), math.log(high), math.log(number)
        return (number - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Return the positions of the ticks, from 0 to 1, with their labels."""
        if isinstance(self.range, Choice):
            return [(self.position(value), value_label(value)) for value in self.values]
        if not self.is_logarithmic:
            numbers = _round_numbers(self.low, self.high)
            return [(self.position(number), f"{number:.6g}") for number in numbers]
        first = math.ceil(math.log10(self.low) - 1e-9)
        last = math.floor(math.log10(self.high) + 1e-9)
        numbers = [10.0**power for power in range(first, last + 1)]
        if len(numbers) < 2:
            numbers = [self.low, self.high]
        return [(self.position(number), f"{number:.3g}") for number in numbers]


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about five round numbers between low and high."""
    from matplotlib.ticker import MaxNLocator

    tolerance = 1e-9 * (high - low)
    ticks = MaxNLocator(TICKS, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    numbers = [float(tick) for tick in ticks if low - tolerance <= tick <= high + tolerance]
    return numbers if len(numbers) > 1 else [low, high]


def _is_rate(key: str) -> bool:
    """Return True if a key is a learning rate, such as local.lr or method.fedadam.server_lr."""
    leaf = key.rpartition(".")[2]
    return leaf == "lr" or leaf.endswith(("_lr", "learning_rate"))


def _spans_magnitudes(values: Sequence[Any]) -> bool:
    return bool(min(values) > 0 and max(values) >= LOGARITHMIC_RATIO * min(values))


def _axes(records: TrialRecords) -> list[KeyAxis]:
    space = records.plan.space
    settings = [records.plan.setting(record.point) for record in records.all.values()]
    axes = []
    for name, (key, values) in zip(short_names(list(space)), space.items(), strict=True):
        used = [setting[key] for setting in settings if key in setting]
        axes.append(KeyAxis(key, name, values, used))
    return axes


def _scored(records: TrialRecords) -> list[TrialRecord]:
    """Return the trials with a finite score; the best one is last, so that it is drawn on top."""
    scored = []
    for record in reversed(records.ordered()):
        if record.score is not None and math.isfinite(record.score):
            scored.append(record)
    return scored


def _title(records: TrialRecords) -> str:
    best = records.best()
    assert best is not None, "pictures show trials with a score"
    score = plus_minus(best.score, best.deviation)
    return f"Best {records.metric} {score} (trial {best.number}: {records.label(best)})"


def _colours(records: Sequence[TrialRecord], dark: bool) -> tuple[Colormap, float, float]:
    """Return a colour map, and the lowest and the highest score that it covers.

    Trials that the scheduler stopped are ignored, unless it stopped all trials.
    records: the trials with a score.
    dark: True for a dark page.
    """
    from matplotlib import colormaps

    scores = [record.score for record in records if record.score is not None]
    full = [
        record.score
        for record in records
        if record.status != "stopped" and record.score is not None
    ]
    scores = full or scores
    return colormaps["viridis" if dark else "viridis_r"], min(scores), max(scores)


def draw_parallel(records: TrialRecords, path: Picture, *, dark: bool = False) -> None:
    """Draw the trials of a sweep as lines in a diagram of parallel coordinates.

    Each searched key has an axis, and the score has the last one. Trials without a finite score are
    left out. The best trial's line is thick, and lines of stopped trials are grey.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    axes = _axes(records)
    trials = _scored(records)
    colours, low, high = _colours(trials, dark)
    scores = [trial.score for trial in trials if trial.score is not None]
    bottom, top = min(scores), max(scores)
    size = (max(7.0, 2.2 * (len(axes) + 1)), 5.0)
    with figure_file(path, _title(records), size, dark=dark) as figure:
        ax = figure.subplots()
        for trial in trials:
            setting = records.plan.setting(trial.point)
            score = float(trial.score or 0.0)
            heights = []
            for axis in axes:
                value = setting.get(axis.key, math.nan)
                heights.append(axis.position(value) if axis.key in setting else math.nan)
            heights.append((score - bottom) / (top - bottom) if top > bottom else 0.5)
            is_best = trial is trials[-1]
            is_stopped = trial.status == "stopped"
            share = (score - low) / (high - low) if high > low else 1.0
            ax.plot(
                range(len(heights)),
                heights,
                color=STOPPED_COLOUR if is_stopped else colours(PALEST + (1 - PALEST) * share),
                linewidth=3.2 if is_best else 1.2,
                marker="o",
                markersize=6 if is_best else 3.5,
                zorder=1 if is_stopped else 3,
            )
        ax.set(xlim=(-0.25, len(axes) + 0.6), ylim=(-0.05, 1.05), yticks=[])
        ax.set_xticks(range(len(axes) + 1), [*(axis.name for axis in axes), records.metric])
        ax.tick_params(axis="x", length=0, pad=8)
        for index, axis in enumerate(axes):
            _draw_scale(ax, index, axis.ticks())
        _draw_scale(ax, len(axes), _score_ticks(bottom, top))
        ax.spines[:].set_visible(False)
        if high > low:
            lowest = low - (high - low) * PALEST / (1 - PALEST)
            shades = ScalarMappable(Normalize(lowest, high), colours)
            figure.colorbar(shades, ax=ax, label=records.metric, fraction=0.03, pad=0.01)
        if any(trial.status == "stopped" for trial in trials):
            figure.supxlabel("grey: stopped early", fontsize=10)


def _score_ticks(bottom: float, top: float) -> list[tuple[float, str]]:
    if top == bottom:
        return [(0.5, f"{top:.6g}")]
    numbers = _round_numbers(bottom, top)
    return [((number - bottom) / (top - bottom), f"{number:.6g}") for number in numbers]


def _draw_scale(ax: Axes, x: float, ticks: Sequence[tuple[float, str]]) -> None:
    from matplotlib import rcParams

    ink, paper = rcParams["text.color"], rcParams["axes.facecolor"]
    ax.axvline(x, color=ink, linewidth=0.9, zorder=2)
    for y, text in ticks:
        ax.plot([x, x + 0.03], [y, y], color=ink, linewidth=0.9, zorder=2)
        box = {"facecolor": paper, "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
        ax.text(x + 0.05, y, text, fontsize=8.5, va="center", bbox=box, zorder=4)


def draw_slices(records: TrialRecords, path: Picture, *, dark: bool = False) -> None:
    """Draw a diagram for each searched key: the score of each trial against the key's value.

    Bars are standard deviations over seeds. A star is the best trial, an open circle a trial that
    the scheduler stopped. Trials without a finite score are left out.
    path: the file or the buffer to write.
    dark: True for a dark page.
    """
    axes = _axes(records)
    trials = _scored(records)
    columns = min(2, len(axes))
    rows = -(-len(axes) // columns)
    size = (max(7.0, 3.6 * columns), 3.2 * rows + 0.6)
    with figure_file(path, _title(records), size, dark=dark) as figure:
        panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
        for panel in panels[len(axes) :]:
            panel.set_axis_off()
        for index, (ax, axis) in enumerate(zip(panels, axes, strict=False)):
            _draw_points(ax, axis, records, trials, DARK if dark else LIGHT)
            _label_values(ax, axis)
            ax.set_xlabel(axis.name)
            ax.grid(True)
            if index % columns == 0:
                ax.set_ylabel(records.metric)


def _draw_points(
    ax: Axes,
    axis: KeyAxis,
    records: TrialRecords,
    trials: Sequence[TrialRecord],
    colours: Sequence[str],
) -> None:
    for trial in trials:
        setting = records.plan.setting(trial.point)
        if axis.key not in setting:
            continue
        is_best = trial is trials[-1]
        ax.errorbar(
            axis.number(setting[axis.key]),
            float(trial.score or 0.0),
            yerr=trial.deviation,
            fmt="*" if is_best else "o",
            markersize=13 if is_best else 6,
            color=colours[1] if is_best else colours[0],
            alpha=1.0 if is_best else 0.75,
            markerfacecolor="none" if trial.status == "stopped" else None,
            elinewidth=1.2,
            capsize=2,
        )


def _label_values(ax: Axes, axis: KeyAxis) -> None:
    labels = [value_label(value) for value in axis.values]
    if axis.is_logarithmic:
        set_log_scale(ax, "x")
    if axis.is_numeric and isinstance(axis.range, Choice):
        ax.set_xticks([axis.number(value) for value in axis.values], labels)
        ax.minorticks_off()
    if not axis.is_numeric:
        ax.set_xticks(range(len(labels)), labels, rotation=35, ha="right")
        ax.set_xlim(-0.5, len(labels) - 0.5)
