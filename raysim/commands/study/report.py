"""Write the results of a study: means, paired differences to a reference, page, picture.

study.csv        a row for each run
differences.csv  a row for each comparison with the reference
study.json       both tables, and the means
study.tex        the means as a LaTeX table
study.png        the differences with their intervals, if settings are compared
report.html      a page with all results, and curves of the means over the seeds
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from raysim.commands.study.plan import StudyPlan, StudyRun
from raysim.primitives.checks import finite_values
from raysim.primitives.errors import RefusedError, suggest
from raysim.primitives.files import replace_file
from raysim.primitives.kinds import LOWER_IS_BETTER
from raysim.results.history import (
    COLUMNS,
    lower_metrics,
    metric_of,
    metrics_of,
    score,
    write_json,
)
from raysim.results.measures import METRICS, better_direction, is_column_of, measure_title
from raysim.results.number_format import format_mean
from raysim.results.observers import SUMMARY
from raysim.results.page import ReportSection, write_report
from raysim.results.report import RunGroup, as_sentence, describe_scores, score_kinds
from raysim.results.significance import (
    MIN_PAIRS,
    Difference,
    compare_pairs,
    holm_correction,
    mean_deviation,
)
from raysim.results.stored_runs import Run, load_run, short_names
from raysim.results.tables import (
    BEST_RULE,
    MARK_RULE,
    MISSING,
    Column,
    format_table,
    to_csv,
    to_latex,
)
from raysim.results.theme import DARK, LIGHT, theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEST_ROUNDS = 5  # with five rounds or fewer, the mean of the best five is the mean of all
SMALL_P = 0.001
HOW = (
    "Paired over seeds: runs with the same seed have the same split, starting model and cohorts, "
    "unless a compared setting changes these. "
    "The interval is that of the mean difference; p is that of a paired t-test, Holm's is "
    "corrected for all comparisons of one table, Wilcoxon's needs six seeds."
)


@dataclass(frozen=True)
class RunScores:
    """A run of a study with its metrics.

    result: the finished run; None if the run failed or has not started.
    values: the value of each metric, by name; None if the run does not have the metric.
    """

    run: StudyRun
    result: Run | None
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Comparison:
    """One setting compared with the reference; all other settings are equal.

    where: the equal settings, such as "alpha=0.1".
    what, reference: the compared settings, such as "fedprox" and "fedavg".
    seeds: the seeds for which both have a finished run with the metric.
    differences: for each seed, the metric of `what` minus that of `reference`.
    test: the mean difference with its interval and its p-value.
    """

    metric: str
    where: str
    what: str
    reference: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    test: Difference


# --- numbers ------------------------------------------------------------------------------------
def check_metrics(names: Sequence[str], own_metrics: Sequence[str] = ()) -> None:
    """Raise `RefusedError` for a name that cannot be a metric in a run's summary.

    own_metrics: the additional metrics of `evaluate.metrics`.
    Names with a dot are not checked. They may be metrics of a method, which are known only after a
    run.
    """
    global_names = [f"{name}_global" for name in METRICS[1:]]
    known_names = [*METRICS, *COLUMNS, *global_names, "last10_std"]
    for name in own_metrics:
        known_names += [name, f"{name}_worst", f"{name}_global"]
    for name in names:
        is_own = any(is_column_of(metric, name) for metric in own_metrics)
        if name not in known_names and "." not in name and not is_own:
            advice = suggest(name, [*known_names, "rounds_to.0.80"])
            raise RefusedError(f"--metric {name} does not exist: {advice}")


def gather_scores(study: StudyPlan, metrics: Sequence[str]) -> tuple[list[str], list[RunScores]]:
    """Return the names of the metrics, and the metrics of every planned run of a study.

    Each value of a run that has not finished is None.
    metrics: the names of the metrics; () uses the names that `_usual_metrics` returns.
    """
    results = []
    for run in study.runs:
        folder = study.run_folder(run)
        results.append(load_run(folder) if (folder / SUMMARY).is_file() else None)
    summaries = [result.summary for result in results if result is not None]
    names = list(metrics) or _usual_metrics(summaries)
    scores = []
    for run, result in zip(study.runs, results, strict=True):
        values: dict[str, float | None] = dict.fromkeys(names)
        if result is not None:
            values = {name: score(result.summary, name) for name in names}
        scores.append(RunScores(run, result, values))
    return names, scores


def _usual_metrics(summaries: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the metrics that a report compares if the user chooses none.

    summaries: the summaries of the finished runs, which decide the metrics.
    """
    has_many_rounds = any((score(summary, "rounds") or 0) > BEST_ROUNDS for summary in summaries)
    names = [name for name in METRICS if has_many_rounds or name != "best5_mean"]
    for metric in dict.fromkeys(str(summary.get("metric", "accuracy")) for summary in summaries):
        columns = (metric, f"{metric}_global")
        if any(_has_scores(summary, columns) for summary in summaries):
            names.append(f"{metric}_global")
    highest = _highest_common_threshold(summaries)
    return [*names, f"rounds_to.{highest}"] if highest else names


def _has_scores(summary: Mapping[str, object], columns: Sequence[str]) -> bool:
    return None not in [score(summary, column) for column in columns]


def _highest_common_threshold(summaries: Sequence[Mapping[str, object]]) -> str | None:
    """Return the highest threshold, such as "0.80", that the scores of all runs have reached.

    Return None without such a threshold.
    summaries: the runs' summaries. The entry "rounds_to" maps each threshold to the round that
    reached it, or to None. Summaries without this entry are ignored.
    """
    reached = []
    for summary in summaries:
        rounds_to = summary.get("rounds_to")
        if isinstance(rounds_to, dict):
            reached.append({name for name, rounds in rounds_to.items() if rounds is not None})
    common = set.intersection(*reached) if reached else set()
    return max(common, key=float, default=None)


def compared_keys(study: StudyPlan) -> list[str]:
    """Return the keys whose values the study compares.

    These are the keys `method` and `method.*` that have several values. Without such keys, return
    only the first key with several values. The seed is never compared.
    """
    varied = [key for key in study.varied if key != "seed"]
    of_methods = [key for key in varied if key.partition(".")[0] == "method"]
    return of_methods or varied[:1]


def _other_keys(study: StudyPlan) -> list[str]:
    """Return the keys that have several values in a study, without the compared keys and the seed.

    Two runs are compared only if both have the same values of these keys.
    """
    return [key for key in study.varied if key not in (*compared_keys(study), "seed")]


def _setting_keys(study: StudyPlan) -> list[str]:
    return [key for key in dict.fromkeys(["method", *study.varied]) if key != "seed"]


def label(study: StudyPlan, run: StudyRun, keys: Sequence[str]) -> str:
    """Return a run's values of some keys in one line, such as "fedprox, mu=0.1".

    keys: the keys; those that the run does not have are left out.
    """
    short = dict(zip(study.varied, short_names(study.varied), strict=True))
    parts = []
    for key in keys:
        if key in run.settings:
            name = "" if key == "method" else f"{short[key]}="
            parts.append(f"{name}{run.settings[key]}")
    return ", ".join(parts)


def compare_settings(
    study: StudyPlan, scores: Sequence[RunScores], metric: str
) -> list[Comparison]:
    """Compare settings of a study with a reference setting, in pairs of runs with equal seeds.

    A setting is a combination of values of `compared_keys`. Runs are grouped by all other keys that
    vary. In each group, the first setting is the reference of all others. Holm's correction of the
    p-values counts all returned comparisons.

    scores: all runs of the study with their metrics.
    """
    table: dict[str, dict[str, dict[int, float]]] = {}  # where, what, seed
    for run_scores in scores:
        settings = table.setdefault(label(study, run_scores.run, _other_keys(study)), {})
        values = settings.setdefault(label(study, run_scores.run, compared_keys(study)), {})
        value = run_scores.values[metric]
        if value is not None:
            values[run_scores.run.seed] = value
    comparisons = []
    for where, settings in table.items():
        (reference, reference_values), *rest = settings.items()
        for what, values in rest:
            seeds = tuple(seed for seed in reference_values if seed in values)
            left = [values[seed] for seed in seeds]
            right = [reference_values[seed] for seed in seeds]
            differences = tuple(a - b for a, b in zip(left, right, strict=True))
            test = compare_pairs(left, right)
            comparisons.append(Comparison(metric, where, what, reference, seeds, differences, test))
    corrected = holm_correction([comparison.test.p for comparison in comparisons])
    return [
        replace(comparison, test=replace(comparison.test, holm=p))
        for comparison, p in zip(comparisons, corrected, strict=True)
    ]


def result_groups(study: StudyPlan, scores: Sequence[RunScores]) -> list[RunGroup]:
    """Return a group of finished runs for each setting, in the order of the study.

    Settings without a finished run are left out.
    """
    groups = []
    for of_setting in group_by_setting(scores):
        results = [run_scores.result for run_scores in of_setting if run_scores.result]
        if results:
            title = label(study, of_setting[0].run, _setting_keys(study))
            groups.append(RunGroup(title, results))
    return groups


def group_by_setting(scores: Sequence[RunScores]) -> list[list[RunScores]]:
    """Group the runs by setting: the runs of a group differ only in their seeds."""
    groups: dict[tuple[tuple[str, str], ...], list[RunScores]] = {}
    for run_scores in scores:
        groups.setdefault(tuple(run_scores.run.settings.items()), []).append(run_scores)
    return list(groups.values())


# --- tables -------------------------------------------------------------------------------------
def _format_number(
    metric: str, value: float | None, sign: str = "", *, like: float | None = None
) -> str:
    """Return a number as text, or a dash for None.

    metric: the name of the metric. If it counts rounds, the number gets one decimal. With all other
    metrics, a small number gets more decimals than a large one.
    sign: "+" shows the sign of positive numbers.
    like: decides the number of decimals in place of `value`. For a standard deviation, pass the
    mean, so that both get the same number of decimals.
    """
    if value is None:
        return MISSING
    if metric.startswith("rounds"):
        return f"{value:{sign}.1f}"
    if abs(value if like is None else like) < 10:
        return f"{value:{sign}.4f}"
    if like is None:
        return f"{value:{sign}.4g}"
    decimals = max(0, 3 - int(math.log10(abs(like))))
    return f"{value:.{decimals}f}"


def _format_p(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"<{SMALL_P}" if value < SMALL_P else f"{value:.3f}"


def settings_table(
    study: StudyPlan,
    scores: Sequence[RunScores],
    comparisons: Mapping[str, Sequence[Comparison]] | None = None,
) -> list[Column]:
    """Return a table of settings: the number of runs, and mean ± deviation of each metric.

    Deviations are standard deviations over the seeds.
    comparisons: for each metric, the comparisons of settings with the reference. The table marks
    their significant differences. None marks no difference.
    """
    keys = _setting_keys(study)
    groups = group_by_setting(scores)
    columns = []
    for key, name in zip(keys, short_names(keys), strict=True):
        values = [group[0].run.settings.get(key, MISSING) for group in groups]
        columns.append(Column(name, values))
    counts = [sum(run_scores.result is not None for run_scores in group) for group in groups]
    count_texts = []
    for count, group in zip(counts, groups, strict=True):
        count_texts.append(f"{count}" if count == len(group) else f"{count} of {len(group)}")
    columns.append(Column("n", count_texts, [float(count) for count in counts]))
    where = [label(study, group[0].run, _other_keys(study)) for group in groups]
    compared = [label(study, group[0].run, compared_keys(study)) for group in groups]
    metrics = {metric_of(run_scores.result.rows) for run_scores in scores if run_scores.result}
    lower: frozenset[str] = LOWER_IS_BETTER
    for run_scores in scores:
        if run_scores.result:
            lower |= lower_metrics(run_scores.result.config)
    is_error = bool(metrics) and metrics <= lower
    higher = {name for one in scores if one.result for name in metrics_of(one.result.rows)} - lower
    for metric in scores[0].values:
        texts, means, deviations = [], [], []
        for count, group in zip(counts, groups, strict=True):
            values_of_seeds = finite_values([run_scores.values[metric] for run_scores in group])
            mean, deviation = mean_deviation(values_of_seeds)
            text = format_mean(mean, deviation, partial(_format_number, metric))
            if 0 < len(values_of_seeds) < count:
                text += f" ({len(values_of_seeds)} of {count})"
            texts.append(text)
            means.append(mean)
            deviations.append(deviation)
        direction = better_direction(metric, is_error, lower, higher)
        tests = {
            (comparison.where, comparison.what): comparison.test
            for comparison in (comparisons or {}).get(metric, ())
        }
        columns.append(
            Column(
                measure_title(metric),
                texts,
                means,
                direction,
                deviations,
                where,
                key=metric,
                tests=[tests.get(place) for place in zip(where, compared, strict=True)],
            )
        )
    return columns


def differences_table(comparisons: Sequence[Comparison]) -> list[Column]:
    """Return a table of the comparisons of one metric; leave empty columns out."""
    metric = comparisons[0].metric
    tests = [comparison.test for comparison in comparisons]
    intervals = []
    for test in tests:
        low, high = (_format_number(metric, bound, "+") for bound in (test.low, test.high))
        intervals.append(MISSING if test.low is None else f"[{low}, {high}]")
    pairs = [f"{comparison.what} – {comparison.reference}" for comparison in comparisons]
    means = [test.mean for test in tests]
    columns = [
        Column("where", [comparison.where for comparison in comparisons]),
        Column("compared", pairs),
        Column("n", [str(test.pairs) for test in tests], [float(test.pairs) for test in tests]),
        Column("difference", [_format_number(metric, mean, "+") for mean in means], means),
        Column("95 % interval", intervals, [test.low for test in tests]),
        Column("p", [_format_p(test.p) for test in tests], [test.p for test in tests]),
        Column("p (Holm)", [_format_p(test.holm) for test in tests], [test.holm for test in tests]),
        Column(
            "p (Wilcoxon)",
            [_format_p(test.wilcoxon) for test in tests],
            [test.wilcoxon for test in tests],
        ),
        Column("", [test.note for test in tests]),
    ]
    return [column for column in columns if set(column.texts) - {"", MISSING}]


# --- the picture --------------------------------------------------------------------------------
def draw(comparisons: Sequence[Comparison], about: str = "", *, dark: bool = False) -> bytes:
    """Return a PNG of one metric's differences, with intervals and a point for each seed.

    comparisons: all comparisons of the metric. Those with the same `where` share a panel.
    about: the name of the metric's test set; "" if there is none.
    dark: True for a dark page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    ink, paper = ("#e6e8ea", "#16191d") if dark else ("#22262a", "#ffffff")
    panels: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        panels.setdefault(comparison.where, []).append(comparison)
    sizes = [len(panel) for panel in panels.values()]
    names = list(dict.fromkeys(comparison.what for comparison in comparisons))
    looks: dict[str, object] = {
        "figure.facecolor": paper,
        "axes.facecolor": paper,
        "savefig.facecolor": paper,
        "axes.titlesize": 11,
    }
    with matplotlib.rc_context(theme(ink) | looks):
        height = 1.5 + 0.45 * len(sizes) + 0.42 * sum(sizes)
        figure = Figure(figsize=(7, height), dpi=130, layout="constrained")
        ratios = [size + 0.6 for size in sizes]
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)
        axes = grid[:, 0]
        for ax, (where, panel) in zip(axes, panels.items(), strict=True):
            _draw_panel(ax, panel, names, DARK if dark else LIGHT)
            ax.set_title(where, loc="left")
        lines = _axis_text(comparisons, about)
        axes[-1].set_xlabel("\n".join(textwrap.fill(line, 72) for line in lines))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _axis_text(comparisons: Sequence[Comparison], about: str) -> list[str]:
    first = comparisons[0]
    if any(comparison.test.low is not None for comparison in comparisons):
        interval = " with its 95 % interval"
    else:
        interval = f" (no interval: that needs {MIN_PAIRS} seeds with unequal differences)"
    metric = f"{measure_title(first.metric)}, {about}" if about else measure_title(first.metric)
    return [
        f"{metric}: difference to {first.reference}",
        f"circles: each seed, dot: mean{interval}",
    ]


def _draw_panel(
    ax: Axes, panel: Sequence[Comparison], names: Sequence[str], colours: Sequence[str]
) -> None:
    for height, comparison in enumerate(reversed(panel)):
        test = comparison.test
        colour = colours[(names.index(comparison.what) + 1) % len(colours)]
        # Circles do not look like the ends of an interval.
        ax.plot(
            comparison.differences,
            [height - 0.22] * len(comparison.differences),
            "o",
            color=colour,
            alpha=0.6,
            markersize=4,
            fillstyle="none",
        )
        if test.low is not None and test.high is not None:
            ax.plot([test.low, test.high], [height, height], color=colour, solid_capstyle="butt")
        if test.mean is not None:
            ax.plot([test.mean], [height], "o", color=colour, markersize=6)
    ax.axvline(0.0, color="#8a9199", linewidth=1, zorder=0)
    ax.set_yticks(range(len(panel)), [comparison.what for comparison in reversed(panel)])
    ax.set_ylim(-0.6, len(panel) - 0.4)
    ax.grid(axis="x")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


# --- files --------------------------------------------------------------------------------------
def report(
    study: StudyPlan,
    metrics: Sequence[str] = (),
    failures: Mapping[str, str] | None = None,
    width: int = 0,
) -> str:
    """Write all results into the study's folder; return the text to print.

    If no run has finished, write nothing.
    metrics: () compares the usual metrics. study.png shows the first metric.
    failures: for each failed run, by name, why it failed.
    width: the longest line of a table in characters; 0 means no limit.
    """
    names, scores = gather_scores(study, metrics)
    results = [run_scores.result for run_scores in scores if run_scores.result]
    if not results:
        return "no run has finished, so there is nothing to report"
    folder = study.folder
    comparisons = {name: compare_settings(study, scores, name) for name in names}
    columns = settings_table(study, scores, comparisons)
    _store(study, scores, comparisons, failures or {})

    about = (
        "Behind ± is the sample standard deviation over the seeds, in all columns. "
        f"Bold is the best, {BEST_RULE}"
    )
    has_groups = any(columns[-1].groups or ())
    about += ", among rows that share all other settings." if has_groups else "."
    are_tested = any(column.is_tested for column in columns)
    if are_tested:
        about = f"{about} {as_sentence(MARK_RULE)}"
    scored_on = describe_scores(results)
    tests = as_sentence(scored_on)
    if tests:
        about = f"{about} {tests}"

    begun = []
    for group in group_by_setting(scores):
        if any(run_scores.result for run_scores in group):
            begun += group
    begun_table = settings_table(study, begun, comparisons)
    table = ReportSection("Results", about, begun_table, notes=study.warnings)
    replace_file(folder / "study.tex", f"{to_latex(table.columns, about)}\n".encode())
    sections = _difference_sections(study, names, comparisons, results)
    title = f"study {folder.resolve().name}"
    page = write_report(result_groups(study, begun), folder, title, sections, table)

    lines = [format_table(columns, width), scored_on, f"± over the seeds; * best, {BEST_RULE}"]
    if are_tested:
        lines.append(MARK_RULE)
    parts = ["\n".join(line for line in lines if line)]
    if comparisons[names[0]]:
        differences = format_table(differences_table(comparisons[names[0]]), width)
        parts.append(f"{measure_title(names[0])}, paired over seeds:\n{differences}")
    parts.append(f"tables and curves: {page}")
    return "\n\n".join(parts)


def _difference_sections(
    study: StudyPlan,
    names: Sequence[str],
    comparisons: Mapping[str, Sequence[Comparison]],
    results: Sequence[Run],
) -> list[ReportSection]:
    """Write study.png; return the sections of report.html about differences to the reference.

    names: the names of the metrics; study.png shows the first one.
    comparisons: maps each metric to its comparisons. Without comparisons, a metric has neither a
    section nor a picture.
    """
    sections = []
    for name in names:
        if not comparisons[name]:
            continue
        how, pictures = "", None
        if name == names[0]:
            how = HOW
            about = " or ".join(score_kinds(results)) if name in METRICS else ""
            pictures = draw(comparisons[name], about), draw(comparisons[name], about, dark=True)
            replace_file(study.folder / "study.png", pictures[0])
        title = f"{measure_title(name)}: difference to {comparisons[name][0].reference}"
        sections.append(ReportSection(title, how, differences_table(comparisons[name]), pictures))
    return sections


def _store(
    study: StudyPlan,
    scores: Sequence[RunScores],
    comparisons: Mapping[str, Sequence[Comparison]],
    failures: Mapping[str, str],
) -> None:
    runs: list[dict[str, object]] = []
    for run_scores in scores:
        runs.append(
            {
                "run": run_scores.run.name,
                **run_scores.run.settings,
                "seed": run_scores.run.seed,
                "finished": run_scores.result is not None,
                **run_scores.values,
            }
        )
    differences: list[dict[str, object]] = []
    for of_metric in comparisons.values():
        for comparison in of_metric:
            differences.append(
                {
                    "metric": comparison.metric,
                    "where": comparison.where,
                    "compared": comparison.what,
                    "reference": comparison.reference,
                    **asdict(comparison.test),
                }
            )
    replace_file(study.folder / "study.csv", to_csv(runs).encode())
    replace_file(study.folder / "differences.csv", to_csv(differences).encode())
    content = {
        "settings": _means(scores),
        "differences": differences,
        "runs": runs,
        "failed": failures,
    }
    write_json(content, study.folder / "study.json")


def _means(scores: Sequence[RunScores]) -> list[dict[str, object]]:
    rows = []
    for group in group_by_setting(scores):
        row: dict[str, object] = dict(group[0].run.settings)
        for metric in scores[0].values:
            values = finite_values([run_scores.values[metric] for run_scores in group])
            mean, deviation = mean_deviation(values)
            row[metric] = {"mean": mean, "deviation": deviation, "n": len(values)}
        rows.append(row)
    return rows
