"""Compare runs as `raysim report` does: tables as DataFrames, figures of matplotlib."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.primitives.checks import above, one_of
from raysim.primitives.errors import errors_as_refusals, suggest
from raysim.primitives.files import make_folder, replace_file, user_path
from raysim.results.curves import AXES, is_informative, is_used
from raysim.results.print_figures import COLUMN_WIDTH_IN, FORMATS, draw_figure, save_figure
from raysim.results.report import (
    USUAL_VIEW,
    RunGroup,
    TableView,
    arrange_groups,
    as_csv,
    comparison_table,
    describe_scores,
    describe_tests,
    difference_rows,
    group_by_setting,
    result_columns,
    run_rows,
    threshold_columns,
)
from raysim.results.stored_runs import load_runs
from raysim.results.tables import BOLD_RULES, Column, format_table, to_frame, to_latex

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Report:
    """Several runs, grouped by their settings, with tables and figures that compare them.

    groups: one group of runs for each setting, in the order of the tables' rows.
    view: the columns, thresholds and bold values of the tables. `view.percent` shows scores between
    0 and 1 in percent.
    width: the width of the figures in inches.
    """

    groups: Sequence[RunGroup]
    view: TableView = USUAL_VIEW
    width: float = COLUMN_WIDTH_IN

    @property
    def results(self) -> pd.DataFrame:
        """Return the table of results: a row for each setting, with means over the seeds.

        Most columns are numbers of the runs' summaries. "floats" and "bytes" are the traffic down
        and up together. A score such as "final" may have two more columns:

        - "final_std": the sample standard deviation over the seeds. If no setting has several
          seeds, it is the population standard deviation of the last ten scores.
        - "final_mark": † or ‡ if the setting is significantly better or worse than the first
          setting with the same data and split.
        """
        return to_frame(result_columns(self.groups, view=self.view))

    @property
    def thresholds(self) -> pd.DataFrame:
        """Return a row for each target score and setting, with the costs of reaching the score.

        The costs are counted up to the first round that reaches the score: rounds, bytes, virtual
        and wall seconds, and the fleet's energy, money and CO2. They are means over the seeds that
        reach it, with sample standard deviations such as "rounds_std". A cost that is 0 everywhere
        has no column.
        """
        return to_frame(threshold_columns(self.groups, self.view))

    @property
    def differences(self) -> pd.DataFrame:
        """Return the paired tests of settings against their reference settings, a row per test.

        A reference is the first setting with the same data and split. A pair is two runs with the
        same seed, and a difference is compared minus reference.

        - metric: the compared column of `results`.
        - compared, reference: the labels of the two settings.
        - pairs: the number of pairs.
        - mean, deviation: the mean and standard deviation of the differences.
        - low, high: the ends of the mean's 95 % confidence interval.
        - p, wilcoxon: the p-values of the paired t-test and of Wilcoxon's signed-rank test.
        - holm: p after Holm's correction for the tests of this metric.
        - note: the reason if there is no test; otherwise "".

        A number is None or nan if there are too few pairs or no test.
        """
        import pandas as pd

        return pd.DataFrame(difference_rows(self._columns, self.groups))

    @property
    def runs(self) -> pd.DataFrame:
        """Return a row for each run: setting, seed, options, and every number of its summary."""
        import pandas as pd

        return pd.DataFrame(run_rows(self.groups))

    @functools.cached_property
    def figures(self) -> dict[str, Figure]:
        """Return a figure for each metric and axis, by a name such as "accuracy_global-round".

        The horizontal axes are rounds, traffic, virtual time, energy, money and CO2. An axis other
        than rounds is left out if its values are 0 everywhere, or if all settings have almost the
        same value in each round.
        """
        from raysim.results.page import setting_curves

        figures = {}
        for key, (_, ylabel, curves) in setting_curves(self.groups, self.view).items():
            for axis in AXES:
                if is_used(axis, curves) and is_informative(axis, curves):
                    name = f"{key}-{axis.name}"
                    figures[name] = draw_figure(curves, axis, ylabel, self.width)
        return figures

    @functools.cached_property
    def _columns(self) -> list[Column]:
        return result_columns(self.groups, view=self.view)

    def text(self, width: int = 0) -> str:
        """Return the tables as text.

        width: the longest line in characters; 0 means no limit.
        """
        parts = [comparison_table(self.groups, width, self.view)]
        if self.view.thresholds:
            costs = threshold_columns(self.groups, self.view)
            if costs:
                parts.append(f"until a score is reached:\n{format_table(costs, width)}")
            else:
                parts.append("no run reached one of these scores")
        return "\n\n".join(parts)

    def csv(self) -> str:
        """Return CSV: a line for each run, with every number of its summary in full precision."""
        return as_csv(self.groups)

    def latex(self) -> str:
        """Return the table of results for LaTeX's package booktabs."""
        runs = [run for group in self.groups for run in group.runs]
        notes = [
            "mean and sample standard deviation over the seeds" if self._has_seeds else "",
            f"bold: best, {BOLD_RULES[self.view.bold]}",
            describe_tests(self._columns, self.groups),
            describe_scores(runs),
        ]
        return to_latex(self._columns, "\n".join(filter(None, notes)))

    def latex_thresholds(self) -> str:
        """Return the table `thresholds` as LaTeX: the costs of reaching target scores.

        The table has a row for each target score and setting. Return "" if no run reached any
        target score.
        """
        columns = threshold_columns(self.groups, self.view)
        if not columns:
            return ""
        return to_latex(columns, "until the first round that reaches the score")

    @property
    def _has_seeds(self) -> bool:
        return any(len(group.runs) > 1 for group in self.groups)

    def write(self, folder: str | Path, formats: Sequence[str] = ()) -> list[Path]:
        """Write an HTML page, LaTeX tables and figure files; return their paths, the page first.

        formats: the types of figure files, "pdf", "svg" or "png". With (), only the page and its
        PNGs show figures. The paths of these PNGs are not returned.
        """
        from raysim.results.page import write_report

        with errors_as_refusals():
            check_formats(formats)
            folder = make_folder(user_path(folder))
            paths = [write_report(self.groups, folder, view=self.view)]
            tables = {"results.tex": self.latex(), "thresholds.tex": self.latex_thresholds()}
            for name, text in tables.items():
                if text:
                    paths.append(folder / name)
                    replace_file(paths[-1], f"{text}\n".encode())
            if formats:
                for name, figure in self.figures.items():
                    for kind in formats:
                        paths.append(folder / f"{name}.{kind}")
                        save_figure(figure, paths[-1])
        return paths


def report(
    runs: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] = (),
    labels: Mapping[str, str] | str = "",
    order: Sequence[str] | str = (),
    percent: bool = False,
    thresholds: Sequence[float | str] = (),
    bold: str = "clear",
    width: float = COLUMN_WIDTH_IN,
    warn: Callable[[str], object] = print,
) -> Report:
    """Compare runs with tables, figures and tests; the command `raysim report` does the same.

        comparison = raysim.report("studies/mine", labels={"fedavg": "FedAvg"}, percent=True)
        comparison.results, comparison.differences, comparison.thresholds
        comparison.figures["accuracy-round"]
        comparison.write("paper", formats=["pdf"])

    Runs that differ only in their seeds are one setting. Each setting is tested against the first
    setting with the same data and split.

    runs: folders of runs, studies and sweeps.
    columns: keys of a summary ("final", "rounds_to.0.80"); () shows the usual columns.
    labels: a mapping from the old to the new labels of settings, or a text such as
    "fedavg=FedAvg,fedprox=FedProx".
    order: labels of settings in the wanted order, or a text such as "fedprox,fedavg". Other
    settings follow the last setting with the same data and split, or come at the end.
    percent: True shows scores between 0 and 1 in percent.
    thresholds: the target scores of the table `thresholds`. () takes the highest target scores that
    a run reached, from `rounds_to` in the summaries: four in the table, two on the HTML page.
    bold: "best" makes the best value of a column bold. "clear" needs more in columns with standard
    deviations: the distance from the second-best value must be larger than both deviations.
    width: the width of the figures in inches.
    warn: gets a sentence about skipped folders.

    Raise `RefusedError` if a folder does not exist, no folder has a run, a file of a run is broken,
    or a choice does not exist.
    """
    paths = [runs] if isinstance(runs, (str, Path)) else list(runs)
    with errors_as_refusals():
        groups = group_by_setting(load_runs(paths, warn))
        names = [group.label for group in groups]
        new_names = parse_labels(labels, names) if isinstance(labels, str) else labels
        if isinstance(order, str):
            order = parse_order(order, [*new_names.values(), *names])
        groups = arrange_groups(groups, new_names, order)
        scores = tuple(_threshold(value) for value in thresholds)
        one_of("--bold", bold, tuple(BOLD_RULES))
        view = TableView(tuple(columns), percent, scores, bold)
        above("--width", width, 0.0)
        result_columns(groups, view=view)  # refuses columns that do not exist
    return Report(groups, view, width)


def check_formats(formats: Sequence[str]) -> None:
    """Raise `RefusedError` for a file type that is not supported for figures."""
    with errors_as_refusals():
        for name in formats:
            one_of("--format", name, FORMATS)


def _threshold(value: float | str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(
            f"--thresholds {value}: this is not a number. Write numbers, such as 0.8,0.9."
        ) from error


def parse_labels(text: str, settings: Sequence[str]) -> dict[str, str]:
    """Parse new labels such as "fedavg=FedAvg,fedprox=FedProx" into a mapping from old to new.

    settings: the old labels of all settings. A label may contain commas and equal signs.
    Raises `ValueError` for a name that is no old label.
    """
    labels = {}
    rest = text
    while rest:
        name = _leading_name(rest, settings, "=")
        if name is None:
            unknown = rest.partition("=")[0]
            raise ValueError(
                f"--labels {unknown}: there is no such setting; {suggest(unknown, settings)}."
            )
        rest = rest[len(name) + 1 :]
        ends = [rest.find(f",{other}=") for other in settings]
        end = min((place for place in ends if place >= 0), default=len(rest))
        if not any(place >= 0 for place in ends) and "," in rest and "=" in rest:
            end = rest.index(",")  # the text continues with a name that does not exist
        labels[name] = rest[:end].strip("\"'")
        rest = rest[end + 1 :].lstrip()
    return labels


def parse_order(text: str, settings: Sequence[str]) -> list[str]:
    """Split a text such as "fedprox,fedavg" at its commas into a list of labels.

    A comma inside a known label does not split the text. Unknown labels stay in the list.
    settings: the known labels, which may contain commas.
    """
    order = []
    rest = text
    while rest:
        name = _leading_name(rest, settings, ",")
        if name is None:
            name = rest.partition(",")[0]  # `arrange_groups` refuses it
        order.append(name)
        rest = rest[len(name) + 1 :].lstrip()
    return order


def _leading_name(text: str, names: Sequence[str], end: str) -> str | None:
    """Return the longest of `names` with which `text` begins; None if it begins with no name.

    end: a separator, such as a comma. A name counts only if the separator or the end of the text
    follows it.
    """
    fitting = [name for name in names if f"{text}{end}".startswith(f"{name}{end}")]
    return max(fitting, key=len, default=None)
