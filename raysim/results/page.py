"""Write the report on one or several runs: one HTML file that needs no other file.

This module collects texts, tables and pictures; report.html, a Jinja2 template, lays them out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from raysim.data.heterogeneity import SCALES
from raysim.data.partition import Ints
from raysim.data.split_picture import size_edges
from raysim.primitives.checks import finite_values
from raysim.primitives.files import make_folder, replace_file, without_password
from raysim.primitives.kinds import SHARES
from raysim.results.clients import (
    CLIENTS_FILE,
    SPLIT_FILE,
    ClientLabels,
    read_clients,
    read_split,
    read_users,
)
from raysim.results.curves import (
    PERCENT,
    VISIBLE_SHARE,
    Curve,
    draw_comparison,
    gap_dashes,
    in_percent,
    mean_curve,
    panels,
)
from raysim.results.history import metric_of, metrics_of
from raysim.results.jobs import read_jobs
from raysim.results.measures import is_column_of
from raysim.results.report import (
    USUAL_VIEW,
    RunGroup,
    TableView,
    as_sentence,
    describe_scores,
    describe_tests,
    result_columns,
    share_factor,
    threshold_columns,
)
from raysim.results.rerun import rerun_command
from raysim.results.stored_runs import SAMPLES, Run, distinguishing_settings, flat_settings
from raysim.results.tables import BEST_RULE, BOLD_RULES, MISSING, Column
from raysim.results.theme import DARK, DASHES, LIGHT, draw_svg
from raysim.results.timeline import has_events, timeline_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Columns of a history with their titles and the labels of their axes.
METRIC_CURVES = {
    "{metric}": ("{metric}, mean of the clients", "{metric}"),
    "{metric}_worst": ("{metric} of the worst client", "worst {metric}"),
    "{metric}_global": ("{metric} on the central test set", "central {metric}"),
    "{metric}_unseen": ("{metric} of clients that are never trained", "unseen {metric}"),
}
LOSS_CURVES = {
    "train_loss": ("training loss", "training loss"),
    "loss_global": ("loss on the central test set", "central loss"),
}
MAX_COST_SCORES = 2  # in the table of costs
MAX_TIMELINES, MAX_SPLITS, MAX_ERRORS = 6, 4, 20  # on one page
LOWEST_USERS = 5  # users with the lowest scores that are named
MAX_MAP_CLIENTS = 1000  # columns of the picture of a split
MAX_CURVE_POINTS = 400
COMPARED_SHARES = np.linspace(0, 1, 51)  # the shares of clients at which two lines are compared
LEGEND_DASHES = ("", "5 3", "1.5 2.5", "7 3 1.5 3")  # of SVG, in the order of `DASHES`
ERROR_LENGTH = 300  # characters of an error that are shown
CHECKSUM_LENGTH = 12  # digits of a checksum that are shown
CHECKSUMS = ("model_sha256", "state_sha256")  # keys of a summary
Shown: TypeAlias = dict[str, Any]  # values for the template


@dataclass(frozen=True)
class ReportSection:
    """A section that a study or a sweep adds to the report: text, a table and a picture.

    text: a paragraph below the heading `title`.
    columns: the table.
    picture: PNGs for a light and a dark page; None without a picture.
    notes: sentences at the end.
    """

    title: str
    text: str
    columns: Sequence[Column]
    picture: tuple[bytes, bytes] | None = None  # PNG
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class PagePart:
    """The content of the page below one heading, as values for the page's template.

    text: a paragraph below the heading; "" for none.
    tables: the results of `_table`.
    pictures: PNGs.
    plots: rows of SVGs, the results of `_row_of_plots`.
    folded: more such rows, by title, which the reader can unfold.
    """

    title: str
    text: str = ""
    tables: list[Shown] = field(default_factory=list)
    pictures: list[Shown] = field(default_factory=list)
    plots: list[Shown] = field(default_factory=list)
    folded: dict[str, list[Shown]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: list[Shown] = field(default_factory=list)


def write_report(
    groups: Sequence[RunGroup],
    out_folder: Path,
    title: str = "",
    sections: Sequence[ReportSection] = (),
    results: ReportSection | None = None,
    view: TableView = USUAL_VIEW,
) -> Path:
    """Write `report.html` and one PNG for each metric and loss; return the path of the page.

    title: the heading of the page; "" uses the name of the only run, or the number of runs.
    sections: additional sections after the table of results.
    results: a section that replaces the usual table of results, with one row for each group.

    Raises `ValueError`, before it writes anything, if there is no run or a file of a run is broken.
    """
    if not groups:
        raise ValueError(
            "no run to report; name at least one folder that `raysim run out=DIR` wrote."
        )
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    before_curves: list[PagePart | None] = []
    if results is None:
        before_curves.append(_results(groups, view))
    else:
        before_curves.append(_section(results, has_swatches=True))
    before_curves += [_section(section) for section in sections]
    before_curves.append(_costs(groups, view))
    after_curves = [
        _texts(groups),
        _client_scores(groups, view),
        _splits(groups),
        _timelines(groups),
        _failures(groups),
        _differences(groups),
        _reproduction(groups),
    ]
    # Curves come last, because they are written to files: all files of the runs are read by now.
    out_folder = make_folder(Path(out_folder))
    parts = [*before_curves, _curves(groups, out_folder, view), *after_curves]

    runs = [run for group in groups for run in group.runs]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    page = environment.get_template("report.html").render(
        title=title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"),
        subtitle=_subtitle(groups),
        parts=[part for part in parts if part is not None],
        legend=[_swatch(index, group.label) for index, group in enumerate(groups)],
        configurations=_configurations(groups),
        colours=list(zip(LIGHT, DARK, strict=True)),
    )
    path = out_folder / "report.html"
    replace_file(path, page.encode())
    return path


def _subtitle(groups: Sequence[RunGroup]) -> str:
    runs = [run for group in groups for run in group.runs]
    texts = []
    if len(runs) > len(groups) > 1:
        texts.append(f"{len(runs)} runs of {len(groups)} settings")
    titles = [str(run.summary["title"]) for run in runs if run.summary.get("title")]
    if titles:
        texts.append(", ".join(dict.fromkeys(titles)))
    unfinished = sum(not run.finished for run in runs)
    if unfinished:
        texts.append(f"{unfinished} of {len(runs)} unfinished: shown up to their last round")
    return " · ".join(texts)


def _swatch(index: int, label: str) -> Shown:
    return {
        "number": index + 1,
        "colour": index % len(LIGHT),
        "label": label,
        "dashes": LEGEND_DASHES[index // len(LIGHT) % len(LEGEND_DASHES)],
    }


def _table(columns: Sequence[Column], has_swatches: bool = False) -> Shown:
    """Convert a table for the page's template, report.html, which writes it as HTML.

    columns: columns with the same number of rows.
    has_swatches: True marks each row i with the colour of curve i in the page's plots.
    """
    rows = []
    for row in range(len(columns[0].texts)):
        cells = []
        for column in columns:
            text = _with_fixed_spaces(f"{column.texts[row]}{column.mark(row)}")
            cell = {"text": text, "is_number": bool(column.scores), "whole": ""}
            cells.append(cell | {"is_best": row in column.best()})
        rows.append(cells)
    head = [{"text": column.title, "is_number": bool(column.scores)} for column in columns]
    return {"head": head, "rows": rows, "has_swatches": has_swatches}


def _with_fixed_spaces(text: str) -> str:
    """Make the spaces after "±", and between a deviation and its unit, non-breaking spaces."""
    return re.sub(r"± ([\d.]+) (?=[A-Za-z])", "±\u00a0\\1\u00a0", text).replace("± ", "±\u00a0")


def _section(section: ReportSection, has_swatches: bool = False) -> PagePart:
    tables = [_table(section.columns, has_swatches)] if section.columns else []
    pictures = [_picture(section.title, *section.picture)] if section.picture else []
    return PagePart(section.title, section.text, tables, pictures, notes=list(section.notes))


def _picture(about: str, light: bytes, dark: bytes) -> Shown:
    def data_url(image: bytes) -> str:
        return f"data:image/png;base64,{base64.b64encode(image).decode()}"

    return {"about": about, "light": data_url(light), "dark": data_url(dark)}


def _plot(svg: str, title: str = "") -> Shown:
    return {"about": title, "svg": svg}


def _row_of_plots(svgs: list[Shown], title: str = "", layout: str = "") -> Shown:
    """Combine plots into one item for the page's template, report.html.

    title: the text above the plots; "" for none.
    layout: "" arranges the plots in a grid, "row" in one line, "wide" with a wide plot first.
    """
    return {"about": title, "svgs": svgs, "layout": layout}


# --- results --------------------------------------------------------------------------------------
def _results(groups: Sequence[RunGroup], view: TableView) -> PagePart:
    columns = result_columns(groups, view=view)
    sentences = []
    if max(len(group.runs) for group in groups) > 1:
        sentences += [
            "Mean ± sample standard deviation over the seeds.",
            f"Bold is the best, {BOLD_RULES[view.bold]}.",
        ]
    elif len(groups) > 1:
        rule = f"Bold is the best of a column, {BOLD_RULES[view.bold]}."
        if view.bold == "clear":
            rule = (
                f"Bold is the best of a column; of accuracies, {BEST_RULE} over the last ten "
                "rounds."
            )
        sentences += ["One seed of each setting, so no deviation can be given.", rule]
    runs = [run for group in groups for run in group.runs]
    sentences.append(as_sentence(describe_tests(columns, groups)))
    sentences.append(as_sentence(describe_scores(runs)))
    return PagePart("Results", " ".join(filter(None, sentences)), [_table(columns, True)])


def _costs(groups: Sequence[RunGroup], view: TableView) -> PagePart | None:
    """Return the page's section on the costs of reaching target scores; None if none was reached.

    `view.thresholds` are the target scores. If it is (), take the two highest thresholds in
    `rounds_to` of the summaries that any run reached.
    """
    columns = threshold_columns(groups, view, MAX_COST_SCORES)
    if not columns:
        return None
    text = (
        "What a setting has used up to the first round that reaches the score: means over the "
        "seeds that reach it. Traffic counts 4 bytes for each number, down and up."
    )
    return PagePart("Cost of a score", text, [_table(columns)])


# --- curves ---------------------------------------------------------------------------------------
def setting_curves(
    groups: Sequence[RunGroup], view: TableView = USUAL_VIEW
) -> dict[str, tuple[str, str, list[Curve]]]:
    """Return the curves of all settings for each metric and loss that some run has measured.

    The result maps a column of the histories to (title, label of the vertical axis, curves). Each
    setting with values has one curve.
    """
    runs = [run for group in groups for run in group.runs]
    is_percent = share_factor(runs, view.percent) != 1.0
    drawn = {}
    for key, (about, ylabel) in _curve_titles(runs).items():
        curves = []
        for index, group in enumerate(groups):
            curve = mean_curve(group.label, [run.rows for run in group.runs], key, index)
            if curve.points:
                curves.append(curve)
        if is_percent and any(is_column_of(metric, key) for metric in SHARES):
            curves = [in_percent(curve) for curve in curves]
            ylabel += PERCENT
        if curves:
            drawn[key] = (about, ylabel, curves)
    return drawn


def _curves(groups: Sequence[RunGroup], folder: Path, view: TableView) -> PagePart:
    """Return the page's part with the curves, and write the curves as PNGs.

    Each metric and loss has a row of plots, with one plot for each horizontal axis, such as rounds.
    If only rounds are shown, all plots are in one grid.
    groups: one group of runs for each setting.
    """
    rows: list[Shown] = []
    folded_rows: list[Shown] = []
    folded_axes: dict[str, None] = {}
    for key, (about, ylabel, curves) in setting_curves(groups, view).items():
        draw_comparison(curves, folder / f"comparison_{key}.png", about, ylabel)
        title = about[0].upper() + about[1:]
        drawn = panels(curves, ylabel)
        rows.append(
            _row_of_plots([_plot(svg) for _, svg, is_shown in drawn if is_shown], title, "row")
        )
        folded = [(axis, svg) for axis, svg, is_shown in drawn if not is_shown]
        if folded:
            folded_rows.append(_row_of_plots([_plot(svg) for _, svg in folded], title, "row"))
            folded_axes.update(dict.fromkeys(axis for axis, _ in folded))

    if not rows:
        return PagePart("Curves", notes=["No run has measured anything yet."])
    if all(len(row["svgs"]) == 1 for row in rows):
        # Only the rounds are shown: all metrics stand in one grid, each with its own title.
        rows = [_row_of_plots([_plot(row["svgs"][0]["svg"], row["about"]) for row in rows])]
    most_seeds = max(len(group.runs) for group in groups)
    if most_seeds == 1:
        text = ""
    elif most_seeds == 2:
        text = "Lines are means of two seeds, too few for a band."
    else:
        text = (
            "Lines are means over the seeds, bands ± one sample standard deviation, for "
            "settings with three seeds or more."
        )
    folded_by_axes = {" · ".join(folded_axes): folded_rows} if folded_rows else {}
    return PagePart("Curves", text, plots=rows, folded=folded_by_axes)


def _curve_titles(runs: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """Return a dict from each curve's column to the title and the axis label of the curve.

    All metrics have curves: the main metric comes first, and the losses come last.
    """
    metrics = dict.fromkeys(metric_of(run.rows) for run in runs)
    for run in runs:
        metrics |= dict.fromkeys(metrics_of(run.rows))
    titles = {}
    for metric in metrics:
        for key, (about, ylabel) in METRIC_CURVES.items():
            titles[key.format(metric=metric)] = (
                about.format(metric=metric),
                ylabel.format(metric=metric),
            )
    return titles | LOSS_CURVES


# --- clients --------------------------------------------------------------------------------------
def _client_scores(groups: Sequence[RunGroup], view: TableView = USUAL_VIEW) -> PagePart:
    """Return the page's part about the clients' scores at the last evaluation.

    The part's plot has a curve for each setting. For each score, the curve shows the share of
    clients that have this score or a lower one. The clients of all seeds count together.
    """
    factor = share_factor([run for group in groups for run in group.runs], view.percent)
    unit = "" if factor == 1.0 else PERCENT
    title = "Spread over clients"
    scores: list[np.ndarray] = []
    test_samples: list[float | None] = []
    for group in groups:
        values, median_tests = _sorted_scores(group)
        scores.append(factor * values)
        test_samples.append(median_tests)
    if not any(len(values) for values in scores):
        note = (
            f"No run stores the scores of single clients ({CLIENTS_FILE}): no client was scored, "
            "or the run is older or unfinished."
        )
        return PagePart(title, notes=[note])
    metrics = dict.fromkeys(metric_of(run.rows) for group in groups for run in group.runs)

    def draw(ax: Axes) -> None:
        drawn: list[dict[float, float]] = []
        tolerance = VISIBLE_SHARE * float(np.ptp(np.concatenate(scores)))
        for index, values in enumerate(scores):
            if not len(values):
                continue
            quantiles = np.quantile(values, COMPARED_SHARES).tolist()
            points = dict(zip(COMPARED_SHARES.tolist(), quantiles, strict=True))
            gaps = gap_dashes(points, drawn, tolerance)
            drawn.append(points)
            shares = np.arange(1, len(values) + 1) / len(values)
            places = np.linspace(0, len(values) - 1, MAX_CURVE_POINTS)
            places = np.unique(places.astype(int))
            ax.step(
                values[places],
                shares[places],
                where="post",
                color=LIGHT[index % len(LIGHT)],
                linestyle=gaps or DASHES[index // len(LIGHT) % len(DASHES)],
                linewidth=1.6,
            )
        ax.grid(True)
        ax.set(
            xlabel=" or ".join(metrics) + unit,
            ylabel="share of clients up to this score",
            ylim=(0, 1.02),
        )

    sizes = [float(len(values)) for values in scores]
    columns = [
        Column("", [group.label for group in groups]),
        Column("clients", [f"{size:,.0f}" for size in sizes], list(sizes)),
        Column(
            "tests a client",
            [MISSING if count is None else f"{count:g}" for count in test_samples],
            test_samples,
        ),
    ]
    quantiles = {"lowest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "highest": 1.0}
    for name, at in quantiles.items():
        numbers = [float(np.quantile(values, at)) if len(values) else None for values in scores]
        columns.append(_score_column(name, numbers))
    means = [float(values.mean()) if len(values) else None for values in scores]
    deviations = [float(values.std()) if len(values) else None for values in scores]
    columns += [_score_column("mean", means), _score_column("deviation", deviations)]

    text = (
        f"Scores ({', '.join(metrics)}{unit and ', in percent'}) of single clients at the last "
        "evaluation, all seeds together. Tests a client: median number of test samples; with few "
        "samples, extremes say little. Deviation: population standard deviation over the clients."
    )
    plots = [_row_of_plots([_plot(draw_svg(draw, "share of clients by their score"))])]
    return PagePart(
        title, text, [_table(columns, True), *_lowest_users(groups, factor)], plots=plots
    )


def _lowest_users(groups: Sequence[RunGroup], factor: float) -> list[Shown]:
    """Return the table of the clients with the lowest scores, as a list with one entry.

    The table has up to `LOWEST_USERS` clients of each group's first run, with the names of their
    users. If no first run stores both users and scores, return [].
    factor: 100 shows scores in percent, 1 shows them unchanged.
    """
    labels: list[str] = []
    clients: list[str] = []
    scores: list[float | None] = []
    for group in groups:
        run = group.runs[0]
        users = read_users(run.folder)
        values = factor * _scores(run)
        if users is None or len(users) != len(values):
            continue
        count = min(LOWEST_USERS, int(np.isfinite(values).sum()))
        for client in np.argsort(values, kind="stable")[:count].tolist():
            labels.append(group.label)
            clients.append(f"{client} (user {users[client]})")
            scores.append(float(values[client]))
    if not labels:
        return []
    columns = [Column("", labels), Column("lowest clients", clients)]
    return [_table([*columns, _score_column("score", scores)])]


def _scores(run: Run) -> np.ndarray:
    """Return the score of each client; nan for a client that was not scored.

    The array is empty if the run stores no such scores.
    """
    columns = read_clients(run.folder) or {}
    metric = metric_of(run.rows)
    return columns.get(metric, columns.get(f"{metric}_shared", np.empty(0)))


def _sorted_scores(group: RunGroup) -> tuple[np.ndarray, float | None]:
    """Return the clients' scores, ascending, and the median number of test samples.

    The clients of all seeds count, except those that were not scored or never trained. The median
    is None if no clients are left.
    """
    scores = [np.empty(0)]
    test_samples = [np.empty(0)]
    for run in group.runs:
        values = _scores(run)
        columns = read_clients(run.folder) or {}
        is_scored = np.isfinite(values)
        if "unseen" in columns:
            is_scored &= columns["unseen"] == 0
        scores.append(values[is_scored])
        if is_scored.any():
            test_samples.append(columns["tests"][is_scored])
    counts = np.concatenate(test_samples)
    median = float(np.median(counts)) if len(counts) else None
    return np.sort(np.concatenate(scores)), median


def _score_column(name: str, values: Sequence[float | None]) -> Column:
    texts = [MISSING if value is None else f"{value:.3f}" for value in values]
    return Column(name, texts, list(values))


# --- the split ------------------------------------------------------------------------------------
@dataclass
class _SharedSplit:
    """A split of the data, with the labels of the settings whose runs use this split.

    split: the training samples of each client and class.
    heterogeneity: numbers, by name, that say how different the clients' data are.
    """

    split: ClientLabels
    heterogeneity: Mapping[str, object]
    labels: list[str]


def _splits(groups: Sequence[RunGroup]) -> PagePart:
    """Return the page's section about the classes of each client's training samples.

    The samples are those of the first run of each group. Groups whose clients have the same numbers
    of samples per class are shown as one.
    """
    title = "Split of the data"
    splits: dict[bytes, _SharedSplit] = {}
    for group in groups:
        run = group.runs[0]
        split = read_split(run.folder)
        if split is None:
            continue
        key = split.client.tobytes() + split.label.tobytes() + split.samples.tobytes()
        if key not in splits:
            numbers = run.summary.get("split")
            splits[key] = _SharedSplit(split, numbers if isinstance(numbers, Mapping) else {}, [])
        splits[key].labels.append(group.label)
    if not splits:
        note = f"No run stores its split ({SPLIT_FILE}): it is older. `raysim partition` draws one."
        return PagePart(title, notes=[note])

    names = []
    plots: list[Shown] = []
    for shared in splits.values():
        is_common = len(shared.labels) == len(groups)
        name = "all settings" if is_common else "; ".join(shared.labels)
        names.append(name)
        if len(plots) < MAX_SPLITS:
            svgs = [_draw_class_map(shared.split), *_draw_sizes(shared.split)]
            heading = name if len(splits) > 1 else ""
            plots.append(_row_of_plots([_plot(svg) for svg in svgs], heading, "wide"))
    notes = []
    if len(splits) > MAX_SPLITS:
        notes.append(f"{len(splits) - MAX_SPLITS} more splits are only in the table.")
    scales = "; ".join(f"{name.replace('_', ' ')}: {about}" for name, about in SCALES.items())
    text = (
        "Training samples of the first seed. Means are over the clients that have samples; only "
        f"size variation counts all clients. {scales[0].upper()}{scales[1:]}."
    )
    columns = _split_columns(names, list(splits.values()))
    return PagePart(title, text, [_table(columns)], plots=plots, notes=notes)


def _split_columns(names: Sequence[str], splits: Sequence[_SharedSplit]) -> list[Column]:
    sizes = [shared.split.sizes for shared in splits]
    texts = {
        "clients": [f"{len(counts):,}" for counts in sizes],
        "samples": [f"{counts.sum():,}" for counts in sizes],
        "samples per client (least / median / most)": [_format_sizes(counts) for counts in sizes],
        "clients without samples": [f"{(counts == 0).sum():,}" for counts in sizes],
    }
    for name in SCALES:
        cells = []
        for shared in splits:
            value = shared.heterogeneity.get(name)
            has_value = isinstance(value, (int, float)) and len(shared.split.classes) > 1
            cells.append(f"{value:.3g}" if has_value else MISSING)
        texts[name.replace("_", " ")] = cells
    columns = [Column("split", list(names))]
    for title, cells in texts.items():
        columns.append(Column(title, cells, [0.0] * len(cells)))
    return columns


def _format_sizes(sizes: Ints) -> str:
    if not len(sizes):
        return MISSING
    if sizes.min() == sizes.max():
        return f"{sizes[0]:,} each"
    return " / ".join(f"{count(sizes):,.10g}" for count in (np.min, np.median, np.max))


def _draw_class_map(split: ClientLabels) -> str:
    """Return an SVG that shows how each client's training samples are divided among classes.

    Each class is a row, and each of at most `MAX_MAP_CLIENTS` clients is a column. A cell shows the
    fraction of the client's samples that are of the class. Its colour follows the square root of
    the fraction, so that small fractions are visible.
    """
    places = np.linspace(0, max(0, split.clients - 1), min(split.clients, MAX_MAP_CLIENTS))
    shown = np.unique(places.astype(int))
    is_shown = np.isin(split.client, shown)
    clients = split.client[is_shown]
    shares = np.zeros((len(split.classes), len(shown)))
    column = np.searchsorted(shown, clients)
    shares[split.label[is_shown], column] = split.samples[is_shown] / split.sizes[clients]

    def client_name(position: float, _: float) -> str:
        is_client = position == int(position) and 0 <= position < len(shown)
        return f"{shown[int(position)]}" if is_client else ""

    def draw(ax: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        height, width = shares.shape
        ax.imshow(
            _shades(shares),
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        )
        is_sample = len(shown) < split.clients
        part = f" ({len(shown):,} of {split.clients:,})" if is_sample else ""
        ax.set(xlabel=f"client{part}", ylabel="class")
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        ax.xaxis.set_major_formatter(client_name)
        if len(split.classes) <= 12:
            ax.set_yticks(range(len(split.classes)), [name[:14] for name in split.classes])
        scale = ax.inset_axes((1.02, 0.0, 0.02, 1.0))
        steps = np.linspace(1, 0, 64)[:, None]
        scale.imshow(_shades(steps), aspect="auto", extent=(0, 1, 0, 1))
        scale.yaxis.tick_right()
        scale.yaxis.set_label_position("right")
        scale.set(xticks=[], yticks=(0, 0.25, 0.5, 0.75, 1), ylabel="share of the client's samples")
        scale.spines[:].set_visible(True)

    return draw_svg(draw, "share of each class in each client's training samples", (7.4, 3.0))


def _shades(shares: np.ndarray) -> np.ndarray:
    """Return colours [H, W, 4] (RGBA) for shares [H, W]: one colour with opacity sqrt(share)."""
    from matplotlib.colors import to_rgb

    image = np.empty((*shares.shape, 4))
    image[..., :3] = to_rgb(LIGHT[0])
    image[..., 3] = np.sqrt(shares)
    return image


def _draw_sizes(split: ClientLabels) -> list[str]:
    """Return a list with an SVG: a histogram of the clients' numbers of training samples.

    Return [] if all clients have the same number.
    """
    if len(set(split.sizes.tolist())) == 1:
        return []

    def draw(ax: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        ax.hist(split.sizes, bins=size_edges(split.sizes), color=LIGHT[0], rwidth=0.92)
        ax.set(xlabel="training samples", ylabel="clients")
        ax.ticklabel_format(axis="x", useOffset=False)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(6, integer=True))

    return [draw_svg(draw, "clients by their number of training samples")]


# --- texts ----------------------------------------------------------------------------------------
def _texts(groups: Sequence[RunGroup]) -> PagePart | None:
    """Return the page's part with texts that language models generated at the end of runs.

    The texts are those of the first run of each group. Return None if none of these runs has texts.
    """
    texts: list[Shown] = []
    for index, group in enumerate(groups):
        path = group.runs[0].folder / SAMPLES
        if path.is_file():
            swatch = _swatch(index, group.label)
            text = path.read_text(encoding="utf-8", errors="replace")
            texts.append({"swatch": swatch, "text": text})
    if not texts:
        return None
    about = "What the final model of the first seed of each setting writes (evaluate.generate)."
    return PagePart("Text", about, texts=texts)


# --- virtual time ---------------------------------------------------------------------------------
def _timelines(groups: Sequence[RunGroup]) -> PagePart | None:
    """Return the page's section with a timeline of the first run of each group.

    A run has no timeline if it stores no jobs or all its rounds look alike. Return None if no run
    has a timeline.
    """
    pictures: list[Shown] = []
    left_out = 0
    for group in groups:
        run = group.runs[0]
        jobs = read_jobs(run.folder)
        if jobs is None or not has_events(jobs):
            continue
        if len(pictures) == MAX_TIMELINES:
            left_out += 1
            continue
        light = timeline_png(jobs, run.rows, group.label)
        dark = timeline_png(jobs, run.rows, group.label, dark=True)
        about = f"{group.label}: clients, fleet and workers on virtual time, and staleness"
        pictures.append(_picture(about, light, dark))
    if not pictures:
        return None
    notes = [f"{left_out} more: see timeline.png in the folder of each run."] if left_out else []
    text = "The first seed of each setting."
    return PagePart("On virtual time", text, pictures=pictures, notes=notes)


# --- failures -------------------------------------------------------------------------------------
def _failures(groups: Sequence[RunGroup]) -> PagePart:
    """Return the page's section about failed, lost and discarded jobs, and about dead workers.

    One table counts these jobs and workers for each group, summed over all rounds and seeds.
    Another table lists the most common errors.
    """
    titles = {
        "failures": "failed jobs",
        "lost": "lost jobs",
        "discarded": "discarded jobs",
        "worker_deaths": "worker processes that died",
    }
    sums = {key: [_column_sum(group, key) for group in groups] for key in titles}
    if not any(any(values) for values in sums.values()):
        note = "No client failed, no job was lost or discarded, no worker died."
        return PagePart("Failures", notes=[note])
    columns = [Column("", [group.label for group in groups])]
    for key, title in titles.items():
        if any(sums[key]):
            texts = [MISSING if value is None else f"{value:,.0f}" for value in sums[key]]
            columns.append(Column(title, texts, list(sums[key])))
    tables = [_table(columns, True)]

    errors: Counter[tuple[str, str]] = Counter()
    for group in groups:
        for run in group.runs:
            texts = _read_errors(run.folder / "failures.jsonl")
            errors.update((group.label, text) for text in texts)
    most_common = errors.most_common(MAX_ERRORS)
    if most_common:
        counts = [str(count) for _, count in most_common]
        error_columns = [
            Column("failed jobs", counts, [1.0] * len(counts)),
            Column("setting", [label for (label, _), _ in most_common]),
            Column("error", [text for (_, text), _ in most_common]),
        ]
        tables.append(_table(error_columns))
    notes = []
    if len(errors) > MAX_ERRORS:
        more = len(errors) - MAX_ERRORS
        notes.append(f"{more} more kinds of errors are in failures.jsonl of the runs.")
    text = "Jobs of clients, summed over rounds and seeds."
    return PagePart("Failures", text, tables, notes=notes)


def _column_sum(group: RunGroup, key: str) -> float | None:
    """Return the sum of a column over all rounds and seeds; None if no run has the column.

    key: the name of the column of the history.
    """
    values = finite_values(row.get(key) for run in group.runs for row in run.rows)
    return sum(values) if values else None


def _read_errors(path: Path) -> list[str]:
    """Return the errors of a run's clients; a line that cannot be read counts as an error.

    path: the run's file failures.jsonl; without this file, there are no errors.
    """
    if not path.is_file():
        return []
    errors = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                fields = json.loads(line)
                method = str(fields.get("method") or "")
                prefix = f"method {method}: " if method else ""
                errors.append(f"{prefix}{fields.get('error')}"[:ERROR_LENGTH])
            except (ValueError, AttributeError, RecursionError):
                errors.append("a line that cannot be read")
    return errors


# --- settings and how to repeat -------------------------------------------------------------------
def _differences(groups: Sequence[RunGroup]) -> PagePart | None:
    """Return the page's part with the keys whose values differ between settings.

    Return None if there are no such keys.
    """
    if len(groups) < 2:
        return None
    different, left_out = distinguishing_settings([group.runs[0] for group in groups])
    rows = []
    for key, values in different.items():
        owners: dict[str, list[Shown]] = {}
        for index, value in enumerate(values):
            swatch = _swatch(index, groups[index].label)
            owners.setdefault(without_password(value), []).append(swatch)
        rows.append({"key": key, "values": list(owners.items())})
    if not rows:
        return None
    text = ""
    if left_out:
        text = (
            f"Left out: {left_out} defaults of options that only some settings chose; they are in "
            "Settings, below."
        )
    return PagePart("What differs", text, tables=[{"differences": rows}])


def _configurations(groups: Sequence[RunGroup]) -> list[Shown]:
    """Return the configuration of each group of runs as YAML, for `raysim run --config`.

    Each entry has a group's label ("label") and the YAML ("text"): the configuration of the group's
    first run, without passwords.
    """
    import yaml

    shown = []
    for group in groups:
        text = yaml.safe_dump(group.runs[0].config, sort_keys=False, width=120)
        shown.append({"label": group.label, "text": without_password(text)})
    return shown


def _format_checksum(value: object) -> str:
    """Return a checksum as text; a dash if there is none.

    The SHA-256 of zero bytes also becomes a dash, because it means that there was nothing to check,
    for example no client states.
    """
    is_empty = value in (None, "", hashlib.sha256().hexdigest())
    return MISSING if is_empty else str(value)


def _reproduction(groups: Sequence[RunGroup]) -> PagePart:
    """Return the page's part about repeating the runs: commands, checksums and versions."""
    labels = []
    runs = []
    for group in groups:
        for run in group.runs:
            labels.append(group.label)
            runs.append(run)
    commands = []
    for number, run in enumerate(runs, 1):
        out = f"out=again/{number}" if len(runs) > 1 else "out=again"
        config = f"{without_password(run.address)}/config.yaml"
        commands.append(rerun_command(run.config, config, out))
    columns = [
        Column("", labels),
        Column("seed", [str(run.config.get("seed", MISSING)) for run in runs]),
        Column("command", commands),
    ]
    for key in CHECKSUMS:
        texts = [_format_checksum(run.summary.get(key)) for run in runs]
        columns.append(Column(key.replace("_", " "), texts))
    table = _table(columns)
    for row in table["rows"]:
        for cell in row[-len(CHECKSUMS) :]:
            if len(cell["text"]) > CHECKSUM_LENGTH:
                cell |= {"text": cell["text"][:CHECKSUM_LENGTH], "whole": cell["text"]}
    tables = [table]

    versions: dict[str, dict[str, None]] = {}
    for run in runs:
        identity = run.summary.get("identity")
        if isinstance(identity, Mapping):
            for key, value in flat_settings(identity).items():
                versions.setdefault(key, {})[value] = None
    versions.pop("seed", None)
    if versions:
        texts = [", ".join(values) for values in versions.values()]
        tables.append(_table([Column("made with", list(versions)), Column("", texts)]))
    text = (
        "The same command gives the same checksums on the same kind of device with the same "
        "versions. Without the run's folder, save its configuration (below) as config.yaml and "
        f"name that file. The first {CHECKSUM_LENGTH} digits of a checksum are shown; all of them "
        "are in the run's summary.json."
    )
    return PagePart("How to repeat it", text, tables)
