"""Draw a figure of a paper from small runs, which take minutes.

    uv run python -m jobs.papers.figure                                 list the figures
    uv run python -m jobs.papers.figure fedbss/5b data.root=~/data      draw one, into figures/
    uv run python -m jobs.papers.figure fedbss/5b data.root=~/data rounds=100 seed=1

Further arguments are overrides. Finished runs in figures/, or in the folder --out, are not
repeated. With --store, the numbers are written to jobs/papers/results/figures, and the picture to
docs/papers/figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from jobs.command import run as run_program
from jobs.papers.figures import FIGURES, find_figure
from jobs.papers.figures.core import DEFAULT_FOLDER, STORED, Runs, draw, write_numbers
from raysim.primitives.files import user_path

PICTURES = Path("docs/papers/figures")


def listing() -> str:
    """Return a line for each figure: its name and what it shows."""
    width = max(map(len, FIGURES))
    return "\n".join(f"{name:<{width}}  {figure.shows}" for name, figure in FIGURES.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the small runs of a paper's figure, and draw the figure from their results.

    Without a figure's name, print a list of all figures.
    arguments: a figure's name, overrides and options; None reads the command line.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m jobs.papers.figure", description=__doc__, formatter_class=style
    )
    parser.add_argument(
        "figure", metavar="FIGURE", nargs="?", help="name of a figure, such as fedbss/5b"
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides of all runs")
    parser.add_argument(
        "--out",
        default=DEFAULT_FOLDER,
        help=f"folder of the runs and the figures ({DEFAULT_FOLDER})",
    )
    parser.add_argument(
        "--store", action="store_true", help="store the numbers and the picture for the pages"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.figure is None:
        print(listing())
        return

    figure = find_figure(options.figure)
    out = user_path(options.out)
    runs = Runs(out, tuple(options.overrides))
    panels = figure.panels(runs)
    numbers = write_numbers(figure, panels, runs, STORED if options.store else out)
    picture = (PICTURES if options.store else out) / f"{figure.file}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(figure, panels, picture)
    print(f"numbers of the figure: {numbers}\npicture: {picture}")


if __name__ == "__main__":
    run_program(main)
