"""Format tables: columns of texts for a terminal, LaTeX and Markdown, and rows of values as CSV."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raysim.primitives.checks import finite_values

MISSING = "–"  # shown for a number that does not exist
GAP = "  "  # between two columns
# When a value is marked as the best.
BEST_RULE = "where it is ahead of the next by more than the deviation of either"


class FormatNumber(Protocol):
    """A function that formats a number; a deviation gets the unit and decimals of `like`."""

    def __call__(self, value: float | None, /, *, like: float | None = None) -> str: ...


@dataclass(frozen=True)
class Column:
    """One column of a table: a text for each row, and the numbers behind the texts.

    scores: the numbers; empty for a column of texts. better: +1 if the highest score is the best,
    -1 if the lowest is, 0 if none is. deviations: the deviations of the scores; `BEST_RULE` uses
    them. groups: only rows of one group are compared; None compares all rows. show: function that
    formats a number of this column; None uses four decimals.
    """

    title: str
    texts: list[str]
    scores: list[float | None] = field(default_factory=list)
    better: int = 0
    deviations: Sequence[float | None] | None = None
    groups: Sequence[object] | None = None
    show: FormatNumber | None = None

    def best(self) -> set[int]:
        """Return the rows with the best score; none if all are equal or only one has a score."""
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
            if score is not None:
                scores[row] = score
        if not self.better or len(set(scores.values())) < 2:
            return set()
        first, second, *_ = sorted(scores, key=lambda row: -self.better * scores[row])
        if self.deviations is None:
            return {row for row, score in scores.items() if score == scores[first]}
        deviations = [self.deviations[first], self.deviations[second]]
        if None in deviations:
            return set()
        lead = abs(scores[first] - scores[second])
        return {first} if lead > max(finite_values(deviations)) else set()


def text_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Column]:
    """Return the columns of a table of texts: the first holds labels, the others numbers."""
    label, *numbers = zip(head, *rows, strict=True)
    columns = [Column(label[0], list(label[1:]))]
    for title, *texts in numbers:
        columns.append(number_column(title, texts))
    return columns


def number_column(title: str, texts: Sequence[str]) -> Column:
    """Return a column of numbers without a best one."""
    return Column(title, list(texts), [None] * len(texts))


# --- terminal -------------------------------------------------------------------------------------
def terminal_width() -> int:
    """Return the columns of the terminal, or 120 if there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def format_table(columns: Sequence[Column], width: int = 0) -> str:
    """Return a table as text, numbers on the right, the best ones with a star.

    width: the longest line; columns that do not fit go into a block below, after the first column.
    0 means no limit.
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
        texts.append(f"{text}*" if row in best else text)
    size = max(map(len, texts))
    return [text.rjust(size) if column.scores else text.ljust(size) for text in texts]


def _format_block(columns: Sequence[Sequence[str]]) -> str:
    head, *body = [GAP.join(row) for row in zip(*columns, strict=True)]
    return "\n".join(line.rstrip() for line in (head, "-" * len(head), *body))


# --- LaTeX, Markdown, CSV -------------------------------------------------------------------------
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "–": "--",
    "α": r"$\alpha$",
    "μ": r"$\mu$",
}


def to_latex(columns: Sequence[Column], note: str = "") -> str:
    """Return a table for LaTeX's package booktabs, the best values bold; note: a comment above."""
    import pandas as pd

    rows = zip(*(_latex_cells(column) for column in columns), strict=True)
    frame = pd.DataFrame(rows, columns=[_escape(column.title) for column in columns])
    sides = "".join("r" if column.scores else "l" for column in columns)
    text = frame.to_latex(index=False, escape=False, column_format=sides)
    comments = [f"% {line}" for line in ["needs \\usepackage{booktabs}", *note.splitlines()]]
    return "\n".join([*comments, text.removesuffix("\n")])


def _latex_cells(column: Column) -> list[str]:
    best = column.best()
    cells = [_escape(text) for text in column.texts]
    return [rf"\textbf{{{cell}}}" if row in best else cell for row, cell in enumerate(cells)]


def _escape(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in re.sub(r"\s+", " ", text))


def to_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without a newline at its end; no cell may contain a bar."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def to_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a head of all keys and a line for each row; a missing value or None is empty."""
    import pandas as pd

    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))
