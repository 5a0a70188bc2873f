"""Print a table of a paper with our results next to the paper's numbers.

    uv run python -m jobs.papers.report fedbr                 list a paper's tables
    uv run python -m jobs.papers.report fedbr/table1          a table with raysim's stored results
    uv run python -m jobs.papers.report fedbr/table1 runs/*   the same with your own runs, too

The papers are fedbr, fedbss, fedld and fraug. The commands of missing results follow.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jobs.command import run
from jobs.papers.comparison import compare
from jobs.papers.results import stored_runs
from jobs.papers.tables import listing
from raysim.cli import warn
from raysim.primitives.errors import RefusedError
from raysim.primitives.output import terminal_width
from raysim.results.stored_runs import load_runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table of a paper with our results next to the paper's numbers.

    arguments: the table, such as "fedbr/table1", and folders of runs; None reads the command line.
    For a paper's name, print a list of its tables.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m jobs.papers.report", description=__doc__, formatter_class=style
    )
    parser.add_argument(
        "table", metavar="TABLE", help="a paper (fedbr) or one of its tables (fedbr/table1)"
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", help="folders of runs, studies and sweeps"
    )
    options = parser.parse_args(arguments)

    paper, _, table = options.table.partition("/")
    if table:
        runs = load_runs(options.runs, warn) if options.runs else []
        print(compare(options.table, runs, terminal_width(), stored_runs(paper)))
    elif options.runs:
        raise RefusedError(
            f"{paper}: this is not a table of a paper. Name a table, such as fedbr/table1."
        )
    else:
        print(listing(paper))


if __name__ == "__main__":
    run(main)
