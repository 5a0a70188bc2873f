"""Print a published table with our results next to the paper's numbers.

    uv run python -m jobs.papers.report fedbr                   the tables of a paper (fedbr, fedbss, fedld, fraug)
    uv run python -m jobs.papers.report fedbr/table1            a table with the results that are kept with raysim
    uv run python -m jobs.papers.report fedbr/table1 runs/*     the same with runs of your own in their place

Below the table are the commands that make the missing results.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jobs.command import run
from jobs.papers.comparison import compare
from jobs.papers.results import kept
from jobs.papers.tables import listing
from raysim.cli import warn
from raysim.primitives.errors import Refused
from raysim.results.report import load_runs
from raysim.results.tables import terminal_width


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables of a paper, or one of them with results."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m jobs.papers.report", description=__doc__, formatter_class=style
    )
    parser.add_argument(
        "table", metavar="TABLE", help="a paper, or one of its tables: fedbr/table1"
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help="folders of runs, studies and sweeps"
    )
    given = parser.parse_args(words)

    paper, _, table = given.table.partition("/")
    if table:
        print(compare(given.table, load_runs(given.runs, warn), terminal_width(), kept(paper)))
    elif given.runs:
        raise Refused(
            f"{paper}: is no table that runs can stand in. Name one, such as {paper}/table1"
        )
    else:
        print(listing(paper))


if __name__ == "__main__":
    run(main)
