"""What a study found: mean and deviation over its seeds, paired differences to a reference, tables, page and picture.

study.csv        a row per run         differences.csv   a row per comparison
study.json       both, and the means   study.png         the differences with their intervals
study.tex        the means for LaTeX
report.html      the page; its curves are the means over the seeds
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.commands.study.plan import Campaign, Cell
from raysim.experiment.many_runs import score, short_names
from raysim.primitives.checks import finite_values
from raysim.primitives.errors import Refused, suggest
from raysim.primitives.files import replace_file
from raysim.primitives.kinds import LOWER_IS_BETTER
from raysim.results.history import COLUMNS, metric_of, write_json
from raysim.results.page import ReportSection, write_report
from raysim.results.report import (
    Run,
    RunGroup,
    as_sentence,
    describe_scores,
    format_mean,
    load_run,
    score_kinds,
)
from raysim.results.significance import (
    MIN_PAIRS,
    Difference,
    compare_pairs,
    holm_correction,
    mean_deviation,
)
from raysim.results.tables import BEST_RULE, MISSING, Column, format_table, to_csv, to_latex
from raysim.results.theme import DARK, LIGHT, theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METRICS = ("final", "best5_mean", "last10_mean")
FEW = 5  # rounds, of which the best five are all
TITLES = {"final": "final", "best5_mean": "best 5", "last10_mean": "last 10"}
HOW = (
    "Paired over seeds: with one seed, methods have the same split, starting model and cohorts. The interval is that "
    "of the mean difference; p is that of a paired t-test, Holm's is corrected for all comparisons of one table, "
    "Wilcoxon's needs six seeds."
)


@dataclass(frozen=True)
class Scores:
    """A run of a study, and its metrics; no run where it failed or was not made."""

    cell: Cell
    run: Run | None
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Comparison:
    """One setting against the reference, where all else is equal."""

    metric: str
    where: str  # the settings that both share: "alpha=0.1"
    what: str
    reference: str
    seeds: tuple[int, ...]
    each: tuple[float, ...]  # the difference of each pair
    found: Difference


# --- numbers --------------------------------------------------------------------------------------------------------
def check_metrics(names: Sequence[str]) -> None:
    """Refuse what no summary has; a method's own reports have a dot in their names and are known when runs are."""
    simple = [*METRICS, *COLUMNS, *(f"{name}_global" for name in METRICS[1:]), "last10_std"]
    for name in names:
        if name not in simple and "." not in name:
            raise Refused(
                f"--metric {name} does not exist: {suggest(name, [*simple, 'rounds_to.0.80'])}"
            )


def _both(summary: Mapping[str, object], metric: str) -> tuple[float | None, float | None]:
    """A run's score on the clients' own tests, and on the central test set."""
    return score(summary, metric), score(summary, f"{metric}_global")


def gather(campaign: Campaign, metrics: Sequence[str]) -> tuple[list[str], list[Scores]]:
    """Read the finished runs. Without metrics: the usual ones, and the highest threshold that every run reached."""
    runs = [load_run(f) if (f := campaign.results(c)).joinpath("summary.json").is_file() else None
            for c in campaign.cells]  # fmt: skip
    there = [run.summary for run in runs if run is not None]
    reached = [
        {n for n, v in each.items() if v is not None}
        for s in there
        if isinstance(each := s.get("rounds_to"), dict)
    ]
    highest = max(set.intersection(*reached) if reached else (), key=float, default=None)
    many = any((score(each, "rounds") or 0) > FEW for each in there)
    usual = [name for name in METRICS if many or name != "best5_mean"]
    scored_by = dict.fromkeys(str(each.get("metric", "accuracy")) for each in there)
    both = [name for name in scored_by if any(None not in _both(each, name) for each in there)]
    usual += [f"{name}_global" for name in both]
    names = list(metrics) or [*usual, *([f"rounds_to.{highest}"] if highest else [])]
    return names, [
        Scores(cell, run, {name: score(run.summary, name) if run else None for name in names})
        for cell, run in zip(campaign.cells, runs, strict=True)
    ]


def compared(campaign: Campaign) -> list[str]:
    """The keys whose values are compared: methods and their values where they vary, else the first key that does."""
    varied = [key for key in campaign.varied if key != "seed"]
    return [key for key in varied if key.partition(".")[0] == "method"] or varied[:1]


def label(campaign: Campaign, cell: Cell, keys: Sequence[str]) -> str:
    """Some settings of a run in a few words: "fedprox, mu=0.1"."""
    shown = [key for key in keys if key in cell.settings]
    short = dict(zip(campaign.varied, short_names(campaign.varied), strict=True))
    names = {key: "" if key == "method" else f"{short[key]}=" for key in shown}
    return ", ".join(f"{names[key]}{cell.settings[key]}" for key in shown)


def differences(campaign: Campaign, scores: Sequence[Scores], metric: str) -> list[Comparison]:
    """Every setting against the first one, over the seeds that both have; Holm's correction over all of them."""
    keys = compared(campaign)
    others = [key for key in campaign.varied if key not in (*keys, "seed")]
    table: dict[str, dict[str, dict[int, float]]] = {}
    for each in scores:
        here = table.setdefault(label(campaign, each.cell, others), {})
        seeds = here.setdefault(label(campaign, each.cell, keys), {})
        if (value := each.values[metric]) is not None:
            seeds[each.cell.seed] = value
    found = []
    for where, whats in table.items():
        (reference, base), *rest = whats.items()
        for what, values in rest:
            common = tuple(seed for seed in base if seed in values)
            left, right = [values[seed] for seed in common], [base[seed] for seed in common]
            pairs = tuple(a - b for a, b in zip(left, right, strict=True))
            found.append(
                Comparison(
                    metric, where, what, reference, common, pairs, compare_pairs(left, right)
                )
            )
    corrected = holm_correction([one.found.p for one in found])
    return [
        replace(one, found=replace(one.found, holm=p))
        for one, p in zip(found, corrected, strict=True)
    ]


def settings(campaign: Campaign, scores: Sequence[Scores]) -> list[RunGroup]:
    """The finished runs of each setting, the reference first."""
    keys = [key for key in dict.fromkeys(["method", *campaign.varied]) if key != "seed"]
    found = [
        (label(campaign, group[0].cell, keys), [s.run for s in group if s.run])
        for group in grouped(scores)
    ]
    return [RunGroup(name, runs) for name, runs in found if runs]


def grouped(scores: Sequence[Scores]) -> list[list[Scores]]:
    """The runs of each setting: they differ in their seeds alone."""
    groups: dict[tuple[tuple[str, str], ...], list[Scores]] = {}
    for each in scores:
        groups.setdefault(tuple(each.cell.settings.items()), []).append(each)
    return list(groups.values())


# --- tables ---------------------------------------------------------------------------------------------------------
def _number(metric: str, value: float | None, sign: str = "", *, like: float | None = None) -> str:
    """like: of a deviation its mean, whose decimals it has."""
    if value is None:
        return MISSING
    if metric.startswith("rounds") or abs(value if like is None else like) < 10:
        return f"{value:{sign}{'.1f' if metric.startswith('rounds') else '.4f'}}"
    return (
        f"{value:{sign}.4g}"
        if like is None
        else f"{value:.{max(0, 3 - int(math.log10(abs(like))))}f}"
    )


def _p(value: float | None) -> str:
    return MISSING if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def _better(metric: str, errors: bool) -> int:
    """+1 where more is better, -1 where less is, 0 where nobody can say. errors: the runs are scored by these."""
    if "loss" in metric or metric.startswith(
        ("rounds_to.", "floats_", "virtual_seconds", "failures", *LOWER_IS_BETTER)
    ):
        return -1
    if metric in METRICS or metric.startswith(("best5", "last10_mean")):
        return -1 if errors else 1
    return int(metric.startswith("accuracy"))


def _title(metric: str) -> str:
    if metric.endswith("_global"):
        return f"central {_title(metric.removesuffix('_global'))}"
    return TITLES.get(metric, metric.replace("rounds_to.", "rounds to "))


def settings_table(campaign: Campaign, scores: Sequence[Scores]) -> list[Column]:
    """A row per setting: number of its runs, mean ± deviation (divisor n-1) of every metric over the seeds.

    What is compared is marked as best among rows that share all other settings, as `MARKED` says.
    """
    keys = [key for key in dict.fromkeys(["method", *campaign.varied]) if key != "seed"]
    groups = grouped(scores)
    names = zip(keys, short_names(keys), strict=True)
    columns = [
        Column(name, [g[0].cell.settings.get(key, MISSING) for g in groups]) for key, name in names
    ]
    made = [sum(each.run is not None for each in group) for group in groups]
    counts = [
        f"{n}" if n == len(g) else f"{n} of {len(g)}" for n, g in zip(made, groups, strict=True)
    ]
    others = [key for key in campaign.varied if key not in (*compared(campaign), "seed")]
    where = [label(campaign, group[0].cell, others) for group in groups]
    columns.append(Column("n", counts, [float(n) for n in made]))
    kinds = {metric_of(each.run.rows) for each in scores if each.run}
    errors = bool(kinds) and kinds <= LOWER_IS_BETTER
    for metric in scores[0].values:
        texts, means, deviations = [], [], []
        for n, group in zip(made, groups, strict=True):
            values = finite_values([each.values[metric] for each in group])
            mean, deviation = mean_deviation(values)
            text = format_mean(mean, deviation, partial(_number, metric))
            texts.append(text + (f" ({len(values)} of {n})" if 0 < len(values) < n else ""))
            means.append(mean)
            deviations.append(deviation)
        columns.append(
            Column(_title(metric), texts, means, _better(metric, errors), deviations, where)
        )
    return columns


def differences_table(comparisons: Sequence[Comparison]) -> list[Column]:
    """A row per comparison of one metric."""
    found = [one.found for one in comparisons]
    metric = comparisons[0].metric
    bounds = [
        f"[{_number(metric, f.low, '+')}, {_number(metric, f.high, '+')}]"
        if f.low is not None
        else MISSING
        for f in found
    ]
    columns = [
        Column("where", [one.where for one in comparisons]),
        Column("compared", [f"{one.what} – {one.reference}" for one in comparisons]),
        Column("n", [str(f.pairs) for f in found], [float(f.pairs) for f in found]),
        Column(
            "difference", [_number(metric, f.mean, "+") for f in found], [f.mean for f in found]
        ),
        Column("95 % interval", bounds, [f.low for f in found]),
        Column("p", [_p(f.p) for f in found], [f.p for f in found]),
        Column("p (Holm)", [_p(f.holm) for f in found], [f.holm for f in found]),
        Column("p (Wilcoxon)", [_p(f.wilcoxon) for f in found], [f.wilcoxon for f in found]),
        Column("", [f.note for f in found]),
    ]
    return [column for column in columns if set(column.texts) - {"", MISSING}]


# --- the picture ----------------------------------------------------------------------------------------------------
def draw(comparisons: Sequence[Comparison], about: str = "", *, dark: bool = False) -> bytes:
    """A PNG: the differences of one metric with their intervals and pairs, a panel per group of shared settings.

    about: which metric on which tests it is.
    """
    import matplotlib
    from matplotlib.figure import Figure

    ink, paper = ("#e6e8ea", "#16191d") if dark else ("#22262a", "#ffffff")
    panels: dict[str, list[Comparison]] = {}
    for one in comparisons:
        panels.setdefault(one.where, []).append(one)
    sizes = [len(panel) for panel in panels.values()]
    looks: dict[str, object] = dict.fromkeys(
        ("figure.facecolor", "axes.facecolor", "savefig.facecolor"), paper
    )
    with matplotlib.rc_context(theme(ink) | looks | {"axes.titlesize": 11}):
        height = 1.5 + 0.45 * len(sizes) + 0.42 * sum(sizes)
        figure = Figure(figsize=(7, height), dpi=130, layout="constrained")
        axes = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, height_ratios=[n + 0.6 for n in sizes]
        )[:, 0]
        names = list(dict.fromkeys(one.what for one in comparisons))
        for ax, (where, panel) in zip(axes, panels.items(), strict=True):
            _panel(ax, panel, names, DARK if dark else LIGHT)
            ax.set_title(where, loc="left")
        first = comparisons[0]
        is_tested = any(one.found.low is not None for one in comparisons)
        interval = (
            " with its 95 % interval"
            if is_tested
            else f" (no interval: that needs {MIN_PAIRS} seeds)"
        )
        what = f"{_title(first.metric)}{f', {about}' if about else ''}: difference to {first.reference}"
        lines = (what, f"circles: each seed, dot: mean{interval}")
        axes[-1].set_xlabel("\n".join(textwrap.fill(line, 72) for line in lines))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _panel(
    ax: Axes, panel: Sequence[Comparison], names: Sequence[str], colours: Sequence[str]
) -> None:
    for height, one in enumerate(reversed(panel)):
        colour, found = colours[(names.index(one.what) + 1) % len(colours)], one.found
        # Circles, which nobody takes for the ends of an interval.
        ax.plot(
            one.each,
            [height - 0.22] * len(one.each),
            "o",
            color=colour,
            alpha=0.6,
            markersize=4,
            fillstyle="none",
        )
        if found.low is not None and found.high is not None:
            ax.plot([found.low, found.high], [height, height], color=colour, solid_capstyle="butt")
        if found.mean is not None:
            ax.plot([found.mean], [height], "o", color=colour, markersize=6)
    ax.axvline(0.0, color="#8a9199", linewidth=1, zorder=0)
    ax.set_yticks(range(len(panel)), [one.what for one in reversed(panel)])
    ax.set_ylim(-0.6, len(panel) - 0.4)
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


# --- files ----------------------------------------------------------------------------------------------------------
def report(
    campaign: Campaign,
    metrics: Sequence[str] = (),
    failed: Mapping[str, str] | None = None,
    width: int = 0,
) -> str:
    """Write all files of the study's folder that say what it found; the text that is printed of it.

    metrics: what is compared, the first one in the picture too. failed: the sentences of runs that failed. width: of
    a line, if above 0.
    """
    names, scores = gather(campaign, metrics)
    if not any(each.run for each in scores):
        return "no run has finished, so there is nothing to report"
    table = {name: differences(campaign, scores, name) for name in names}
    columns, folder = settings_table(campaign, scores), campaign.folder
    _store(folder, scores, table, failed or {})
    about = "Behind ± is the sample deviation over the seeds (divisor n-1), of last 10 too. "
    about += f"Bold is the best, {BEST_RULE}"
    about += ", among rows that share all other settings." if any(columns[-1].groups or ()) else "."
    runs = [each.run for each in scores if each.run]
    what = describe_scores(runs)
    about = " ".join(filter(None, [about, as_sentence(what)]))
    sections = []
    pictures = None
    for name, comparisons in table.items():
        if comparisons:
            if name == names[0]:
                on = " or ".join(score_kinds(runs)) if name in METRICS else ""
                pictures = draw(comparisons, on), draw(comparisons, on, dark=True)
                replace_file(folder / "study.png", pictures[0])
            title = f"{_title(name)}: difference to {comparisons[0].reference}"
            first = name == names[0]
            sections.append(
                ReportSection(
                    title,
                    HOW if first else "",
                    differences_table(comparisons),
                    pictures if first else None,
                )
            )
    begun = [each for group in grouped(scores) if any(one.run for one in group) for each in group]
    results = ReportSection(
        "Results", about, settings_table(campaign, begun), notes=campaign.warnings
    )
    replace_file(folder / "study.tex", f"{to_latex(results.columns, about)}\n".encode())
    page = write_report(
        settings(campaign, begun), folder, f"study {folder.resolve().name}", sections, results
    )
    shown = format_table(differences_table(table[names[0]]), width) if table[names[0]] else ""
    heading = f"{_title(names[0])}, paired over seeds:\n" if shown else ""
    means = "\n".join(
        filter(None, [format_table(columns, width), what, f"± over the seeds; * best, {BEST_RULE}"])
    )
    return "\n\n".join(
        part for part in (means, heading + shown, f"tables and curves: {page}") if part
    )


def _store(
    folder: Path,
    scores: Sequence[Scores],
    table: Mapping[str, Sequence[Comparison]],
    failed: Mapping[str, str],
) -> None:
    runs: list[dict[str, object]] = [
        {
            "run": s.cell.name,
            **s.cell.settings,
            "seed": s.cell.seed,
            "finished": s.run is not None,
            **s.values,
        }
        for s in scores
    ]
    comparisons: list[dict[str, object]] = [
        {
            "metric": c.metric,
            "where": c.where,
            "compared": c.what,
            "reference": c.reference,
            **asdict(c.found),
        }
        for all_of_it in table.values()
        for c in all_of_it
    ]
    for name, rows in {"study.csv": runs, "differences.csv": comparisons}.items():
        replace_file(folder / name, to_csv(rows).encode())
    write_json({"settings": _means(scores), "differences": comparisons, "runs": runs, "failed": failed},
               folder / "study.json")  # fmt: skip


def _means(scores: Sequence[Scores]) -> list[dict[str, object]]:
    rows = []
    for group in grouped(scores):
        row: dict[str, object] = dict(group[0].cell.settings)
        for metric in scores[0].values:
            values = finite_values([each.values[metric] for each in group])
            mean, deviation = mean_deviation(values)
            row[metric] = {"mean": mean, "deviation": deviation, "n": len(values)}
        rows.append(row)
    return rows
