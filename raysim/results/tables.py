"""Format tables as text, as LaTeX or as Markdown. Also convert rows of values to CSV."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from raysim.primitives.checks import finite_values
from raysim.results.significance import LEVEL, Difference

if TYPE_CHECKING:
    import pandas as pd

MISSING = "–"  # shown for a number that does not exist
GAP = "  "  # between two columns
# When a value is marked as the best, by the name of the rule (`raysim report --bold`).
BEST_RULE = "where it is ahead of the next by more than the deviation of either"
BOLD_RULES = {"clear": BEST_RULE, "best": "however small its lead is"}
BETTER_MARK, WORSE_MARK = "†", "‡"  # significantly better, or worse, than the reference
MARK_RULE = (
    f"{BETTER_MARK} better, {WORSE_MARK} worse than the first comparable row: paired t-test over "
    "the seeds, p < 0.05 after Holm's correction"
)


class FormatNumber(Protocol):
    """A function f(value, like=None) that returns a number as text.

    value: the number; None if it is missing.
    like: if `value` is a standard deviation, its mean; otherwise None. A standard deviation gets
    the unit and as many decimals as its mean.
    """

    def __call__(self, value: float | None, /, *, like: float | None = None) -> str: ...


@dataclass(frozen=True)
class Column:
    """One column of a table: a text for each row, and the numbers behind the texts.

    scores: the number of each row, or None; empty for a column of texts.
    better: +1 if the highest score is the best, -1 if the lowest is, 0 if none is marked.
    deviations: the standard deviations of the scores, over seeds or over the last ten rounds; None
    if there are none.
    groups: a value for each row. Only rows with equal values are compared; None compares all rows.
    show: formats a number; None uses four decimals.
    key: name of the number in a summary; "" if it has none.
    tests: the paired test of each row against its group's reference row, or None. () without tests.
    bold: "best" marks the best score. "clear" also checks `deviations`, unless they are None. It
    marks the best score only if the distance from the second-best score is larger than the
    deviations of both. An unknown deviation of one of the two prevents the mark.
    incomplete: the positions of rows whose mean leaves out some seeds. These rows are never marked
    as the best.
    """

    title: str
    texts: list[str]
    scores: list[float | None] = field(default_factory=list)
    better: int = 0
    deviations: Sequence[float | None] | None = None
    groups: Sequence[object] | None = None
    show: FormatNumber | None = None
    key: str = ""
    tests: Sequence[Difference | None] = ()
    bold: str = "clear"
    incomplete: Collection[int] = ()

    def mark(self, row: int) -> str:
        """Return "†" for a row that is significantly better than its reference, "‡" if worse.

        Return "" if the difference is not significant or was not tested.
        """
        test = self.tests[row] if self.tests else None
        if test is None or test.mean is None or test.holm is None or not self.better:
            return ""
        if test.holm >= 1 - LEVEL:
            return ""
        return BETTER_MARK if self.better * test.mean > 0 else WORSE_MARK

    @property
    def is_tested(self) -> bool:
        """Return True if at least one row was tested against its reference row."""
        return any(test is not None and test.holm is not None for test in self.tests)

    def best(self) -> set[int]:
        """Return the positions of the rows that are marked as the best of their group of rows.

        A group with equal scores, or with only one score, has no mark. With `bold="clear"`
        and `deviations`, a best score is also not marked if the second-best one is too close, or
        one of their deviations is unknown.
        """
        groups = self.groups or [None] * len(self.scores)
        best: set[int] = set()
        for group in dict.fromkeys(groups):
            rows = [row for row in range(len(self.scores)) if groups[row] == group]
            best |= self._best_of(rows)
        return best

    def _best_of(self, rows: Sequence[int]) -> set[int]:
        scores: dict[int, float] = {}
        for row in rows:
            score = self.scores[row]
            if score is not None and row not in self.incomplete:
                scores[row] = score
        if not self.better or len(set(scores.values())) < 2:
            return set()
        first, second, *_ = sorted(scores, key=lambda row: -self.better * scores[row])
        if self.deviations is None or self.bold == "best":
            return {row for row, score in scores.items() if score == scores[first]}
        deviations = [self.deviations[first], self.deviations[second]]
        if None in deviations:
            return set()
        lead = abs(scores[first] - scores[second])
        return {first} if lead > max(finite_values(deviations)) else set()


def text_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Column]:
    """Return the columns of a table whose cells are given as texts.

    head: the titles of the columns.
    rows: the cells of each row: first a label, then numbers as text. Columns of numbers are aligned
    on the right.
    """
    label, *numbers = zip(head, *rows, strict=True)
    columns = [Column(label[0], list(label[1:]))]
    for title, *texts in numbers:
        columns.append(number_column(title, texts))
    return columns


def number_column(title: str, texts: Sequence[str]) -> Column:
    """Return a column of numbers in which no number is marked as the best.

    title: the title of the column.
    texts: the numbers that the column shows, as texts, one for each row.
    """
    return Column(title, list(texts), [None] * len(texts))


# --- terminal -------------------------------------------------------------------------------------
def format_table(columns: Sequence[Column], width: int = 0) -> str:
    """Return a table as text for a terminal.

    A star marks the best number in each group of rows.
    width: the longest line in characters, unless two columns need more; 0 means no limit. Columns
    that do not fit follow below, in another table that repeats the first column.
    """
    label, *rest = [_padded(column) for column in columns]
    blocks = [[label]]
    limit = width or math.inf
    for texts in rest:
        used = sum(len(column[0]) + len(GAP) for column in blocks[-1])
        if len(blocks[-1]) > 1 and used + len(texts[0]) > limit:
            blocks.append([label])
        blocks[-1].append(texts)
    return "\n\n".join(map(_format_block, blocks))


def _padded(column: Column) -> list[str]:
    best = column.best()
    texts = [column.title]
    for row, text in enumerate(column.texts):
        star = "*" if row in best else ""
        texts.append(f"{text}{star}{column.mark(row)}")
    size = max(map(len, texts))
    return [text.rjust(size) if column.scores else text.ljust(size) for text in texts]


def _format_block(columns: Sequence[Sequence[str]]) -> str:
    head, *body = [GAP.join(row) for row in zip(*columns, strict=True)]
    return "\n".join(line.rstrip() for line in (head, "-" * len(head), *body))


# --- LaTeX, Markdown, CSV -------------------------------------------------------------------------
_MATHEMATICS = {
    "±": "pm",
    "×": "times",
    "·": "cdot",
    "≤": "le",
    "≥": "ge",
    "≠": "ne",
    "≈": "approx",
    "→": "to",
    "∞": "infty",
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "ε": "varepsilon",
    "ζ": "zeta",
    "η": "eta",
    "θ": "theta",
    "κ": "kappa",
    "λ": "lambda",
    "μ": "mu",
    "µ": "mu",  # the sign of micro, which keyboards have
    "ν": "nu",
    "ξ": "xi",
    "π": "pi",
    "ρ": "rho",
    "σ": "sigma",
    "τ": "tau",
    "φ": "varphi",
    "χ": "chi",
    "ψ": "psi",
    "ω": "omega",
    "Γ": "Gamma",
    "Δ": "Delta",
    "Θ": "Theta",
    "Λ": "Lambda",
    "Σ": "Sigma",
    "Φ": "Phi",
    "Ψ": "Psi",
    "Ω": "Omega",
}
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    # `\\` and `\midrule` of the line before would take these signs for their arguments.
    "[": "{[}",
    "*": "{*}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "−": "$-$",
    **{sign: rf"$\{name}$" for sign, name in _MATHEMATICS.items()},
}
# Marks take no width, so that numbers with and without a mark stand below each other.
_LATEX_MARKS = {
    "": "",
    BETTER_MARK: r"\rlap{$^\dagger$}",
    WORSE_MARK: r"\rlap{$^\ddagger$}",
}


def to_latex(columns: Sequence[Column], note: str = "") -> str:
    """Return a table for LaTeX's package booktabs.

    In each group of compared rows (`Column.groups`), the values that `Column.best` marks are bold.
    † marks a value that is significantly better than the value in the group's first row, and ‡ a
    significantly worse one. If the rows of each group are neighbours, lines separate the groups.

    note: a comment above the table.
    """
    sides = "".join("r" if column.scores else "l" for column in columns)
    lines = [f"% {line}" for line in ["needs \\usepackage{booktabs}", *note.splitlines()]]
    lines += [rf"\begin{{tabular}}{{{sides}}}", r"\toprule"]
    lines += [_latex_row([_escape(column.title) for column in columns]), r"\midrule"]
    starts = _group_starts(columns)
    cells_by_column = [_latex_cells(column) for column in columns]
    has_two_labels = len(columns) > 1 and not columns[1].scores
    if has_two_labels:
        cells_by_column[0] = _without_repeats(cells_by_column[0])
    for row, cells in enumerate(zip(*cells_by_column, strict=True)):
        if row in starts:
            lines.append(r"\midrule")
        lines.append(_latex_row(cells))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _without_repeats(cells: Sequence[str]) -> list[str]:
    """Return the cells, with "" for each cell that is equal to the one above."""
    above = [None, *cells[:-1]]
    return ["" if cell == upper else cell for cell, upper in zip(cells, above, strict=True)]


def _group_starts(columns: Sequence[Column]) -> set[int]:
    """Return the rows at which a new group starts; a line separates each from the row above.

    `Column.groups` says which rows form a group. If the rows of some group are not neighbours,
    return no row, so that the table gets no line.
    """
    groups = next((column.groups for column in columns if column.groups), [])
    starts = {row for row in range(1, len(groups)) if groups[row] != groups[row - 1]}
    is_sorted = len(starts) + 1 == len(set(groups))
    return starts if is_sorted else set()


def _latex_cells(column: Column) -> list[str]:
    best = column.best()
    cells = []
    for row, text in enumerate(column.texts):
        cell = _escape(text)
        if row in best:
            cell = rf"\textbf{{{cell}}}"
        cells.append(cell + _LATEX_MARKS[column.mark(row)])
    return cells


def _escape(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in re.sub(r"\s+", " ", text))


def to_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, without a newline at its end.

    head: the titles of the columns.
    rows: the texts of each row.
    No cell may contain a vertical bar.
    """
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_frame(columns: Sequence[Column]) -> pd.DataFrame:
    """Return a DataFrame with the numbers of a table; the columns are named by their keys.

    The deviations of a column's scores are in a further column, such as "final_std". If the scores
    were tested, the marks of `Column.mark` are in a column such as "final_mark".
    """
    import pandas as pd

    values: dict[str, Sequence[object]] = {}
    for column in columns:
        name = column.key or column.title or "setting"
        values[name] = column.scores or column.texts
        if column.scores and column.deviations is not None:
            values[f"{name}_std"] = column.deviations
        if column.is_tested:
            values[f"{name}_mark"] = [column.mark(row) for row in range(len(column.texts))]
    return pd.DataFrame(values)


def to_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Return CSV: a head with all keys, and a line for each row.

    A key that is missing in a row has an empty cell there. None and nan are also written as empty
    cells.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    for row in rows:
        writer.writerow([_csv_value(row.get(key)) for key in keys])
    return text.getvalue()


def _csv_value(value: object) -> object:
    is_nan = isinstance(value, float) and math.isnan(value)
    return None if is_nan else value
