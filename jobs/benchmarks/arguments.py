"""Parse the command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from raysim.primitives.files import user_path


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--blocks` and `--out`.

    description: the docstring of the benchmark's module.
    """
    style = argparse.RawDescriptionHelpFormatter
    arguments = argparse.ArgumentParser(description=description, formatter_class=style)
    arguments.add_argument(
        "--blocks", type=int, default=7, help="number of measured repetitions of each case (7)"
    )
    arguments.add_argument(
        "--out",
        type=Path,
        default="bench.json",
        metavar="FILE",
        help="file for the results (bench.json)",
    )
    return arguments


def read(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; a wrong value ends the process with status 2."""
    values = arguments.parse_args()
    if values.blocks < 1:
        arguments.error(f"--blocks {values.blocks}: must be at least 1. Increase it.")
    values.out = user_path(values.out)
    return values
