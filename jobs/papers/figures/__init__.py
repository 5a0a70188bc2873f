"""Redraw figures of the papers from runs that take minutes."""

from __future__ import annotations

from collections.abc import Iterator

from jobs.papers.figures.core import PaperFigure, read_numbers
from jobs.papers.figures.fedbr import FIGURES as FEDBR
from jobs.papers.figures.fedbss import FIGURES as FEDBSS
from jobs.papers.figures.fedld import FIGURES as FEDLD
from jobs.papers.figures.fraug import FIGURES as FRAUG
from raysim.primitives.errors import RefusedError, suggest

FIGURES: dict[str, PaperFigure] = {
    figure.name: figure for figure in (*FEDBR, *FEDBSS, *FEDLD, *FRAUG)
}


def find_figure(name: str) -> PaperFigure:
    """Return a figure by its name, such as "fedbss/5a".

    Raise `RefusedError` with the nearest name for an unknown one.
    """
    if name not in FIGURES:
        raise RefusedError(f"{name}: there is no such figure; {suggest(name, FIGURES)}")
    return FIGURES[name]


def figures_of(paper: str) -> list[PaperFigure]:
    """Return the figures of a paper in the paper's order."""
    return [figure for name, figure in FIGURES.items() if name.startswith(f"{paper}/")]


def figures_section(paper: str) -> Iterator[str]:
    """Yield Markdown about each figure of a paper: what it shows, our picture, the command.

    The picture is left out if no numbers of the figure are stored.
    """
    for figure in figures_of(paper):
        number = figure.name.partition("/")[2]
        yield f"### Figure {number}: {figure.shows}"
        yield f"Here: {figure.scale}."
        if read_numbers(figure) is not None:
            yield f"![Figure {number}: {figure.shows}](figures/{figure.file}.png)"
        yield f"```bash\n{figure.command}\n```"
