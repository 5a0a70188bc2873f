"""Tables: columns of texts, written for a terminal, for LaTeX and as Markdown; and rows of values as CSV."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from raysim.primitives.checks import finite_values

MISSING = "–"  # in the place of a number that there is not
GAP = "  "  # between two columns
BEST_RULE = "where it is ahead of the next by more than the deviation of either"  # a value as the best, in words


class FormatNumber(Protocol):
    """How a number is written. like: of a deviation its mean, whose unit and decimals it has."""

    def __call__(self, value: float | None, /, *, like: float | None = None) -> str: ...


@dataclass(frozen=True)
class Column:
    """One column of the comparison: `better` is +1 where the highest `score` wins, -1 where the lowest, 0 for text.

    deviations: of the scores, where they have one; `MARKED` is the rule. groups: rows that are compared to each other
    have the same; all of them unless given. show: how a number of it is written; with four decimals unless given.
    """

    title: str
    texts: list[str]
    scores: list[float | None] = field(default_factory=list)
    better: int = 0
    deviations: Sequence[float | None] | None = None
    groups: Sequence[object] | None = None
    show: FormatNumber | None = None

    def best(self) -> set[int]:
        """Indices of the winners; nobody wins where all are equal or only one run has a value."""
        groups = self.groups or [None] * len(self.scores)
        return {
            winner for group in dict.fromkeys(groups) for winner in self._best_of(group, groups)
        }

    def _best_of(self, group: object, groups: Sequence[object]) -> set[int]:
        scores = {
            i: score
            for i, score in enumerate(self.scores)
            if score is not None and groups[i] == group
        }
        if not self.better or len(scores) < 2 or len({*scores.values()}) == 1:
            return set()
        first, second, *_ = sorted(scores, key=lambda index: -self.better * scores[index])
        if self.deviations is None:
            return {index for index, score in scores.items() if score == scores[first]}
        spread = [self.deviations[first], self.deviations[second]]
        clear = None not in spread and abs(scores[first] - scores[second]) > max(
            finite_values(spread)
        )
        return {first} if clear else set()


def text_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Column]:
    """Return the columns of rows of texts: the first one labels the rows, all others are numbers."""
    label, *others = zip(head, *rows, strict=True)
    return [
        Column(label[0], list(label[1:])),
        *(number_column(title, texts) for title, *texts in others),
    ]


def number_column(title: str, texts: Sequence[str]) -> Column:
    """Return a column of numbers, of which none is the best."""
    return Column(title, list(texts), [None] * len(texts))


# ---------------------------------------------------------------- as text


def terminal_width() -> int:
    """Return the columns of the terminal, or 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def format_table(columns: Sequence[Column], width: int = 0) -> str:
    """A table as text: numbers right, winners with a star.

    width: of a line, if above 0; columns that do not fit come in a block below, beside the first one again.
    """
    label, *others = [_padded(column) for column in columns]
    blocks, room = [[label]], width or math.inf
    for texts in others:
        if (
            len(blocks[-1]) > 1
            and sum(len(each[0]) + len(GAP) for each in blocks[-1]) + len(texts[0]) > room
        ):
            blocks.append([label])
        blocks[-1].append(texts)
    return "\n\n".join(map(_block, blocks))


def _padded(column: Column) -> list[str]:
    best = column.best()
    texts = [
        column.title,
        *(f"{text}{'*' if index in best else ''}" for index, text in enumerate(column.texts)),
    ]
    size = max(map(len, texts))
    return [text.rjust(size) if column.scores else text.ljust(size) for text in texts]


def _block(columns: Sequence[Sequence[str]]) -> str:
    head, *body = [GAP.join(row) for row in zip(*columns, strict=True)]
    return "\n".join(line.rstrip() for line in (head, "-" * len(head), *body))


# ---------------------------------------------------------------- for papers, pages and programs

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "α": r"$\alpha$", "μ": r"$\mu$",
}  # fmt: skip


def to_latex(columns: Sequence[Column], note: str = "") -> str:
    """Return a table for LaTeX's package booktabs, winners bold. note: a comment above it."""
    import pandas as pd

    rows = zip(*(_latex_cells(column) for column in columns), strict=True)
    frame = pd.DataFrame(rows, columns=[_escaped(column.title) for column in columns])
    sides = "".join("r" if column.scores else "l" for column in columns)
    text = frame.to_latex(index=False, escape=False, column_format=sides)
    comments = [f"% {line}" for line in ["needs \\usepackage{booktabs}", *note.splitlines()]]
    return "\n".join([*comments, text.removesuffix("\n")])


def _latex_cells(column: Column) -> list[str]:
    best = column.best()
    cells = [_escaped(text) for text in column.texts]
    return [rf"\textbf{{{cell}}}" if index in best else cell for index, cell in enumerate(cells)]


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in re.sub(r"\s+", " ", text))


def to_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return lines of cells, without a newline at the end; the text of a cell must not hold a bar."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def to_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a line per row below a head of all keys; a value that is missing or None is empty."""
    import pandas as pd

    return str(pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\n"))
