"""The options that all benchmarks have."""

from __future__ import annotations

import argparse
from pathlib import Path

from raysim.primitives.files import user_path


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--blocks` and `--out`; the description is a module's docstring."""
    style = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=style)
    made.add_argument("--blocks", type=int, default=7, help="measured blocks of each case (7)")
    made.add_argument(
        "--out", type=Path, default="bench.json", metavar="FILE", help="results (bench.json)"
    )
    return made


def read(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; a wrong value ends the process with status 2."""
    given = made.parse_args()
    if given.blocks < 1:
        made.error(f"--blocks {given.blocks}: needs at least one block. Increase it.")
    given.out = user_path(given.out)
    return given
