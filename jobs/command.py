"""Run the programs of this folder as the command `raysim` runs: with the same exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from raysim import cli
from raysim.primitives.errors import errors_as_refusals


def run(program: Callable[[], object]) -> NoReturn:
    """Run a program and exit.

    The exit status is 0 after success. If the program refuses its input, it is 2, and one sentence
    is printed that says why.
    """

    def command() -> int:
        with errors_as_refusals():
            program()
        return 0

    cli.prepare_ray()
    sys.exit(cli.exit_status(command))


def run_study(
    usage: str | None,
    run_all: Callable[[Path, Sequence[str]], object],
    collect: Callable[[Path], object],
    write_page: Callable[[], object],
) -> NoReturn:
    """Run the command that the first argument of a study's program names, and exit.

    usage: text that is printed if there is no such command.
    run_all: function that executes the runs in a folder, with further overrides.
    collect: function that stores the numbers of the runs in a folder.
    write_page: function that makes the page from the stored numbers.
    """

    def program() -> None:
        command, *rest = sys.argv[1:] or ["help"]
        if command == "run" and rest:
            run_all(Path(rest[0]), rest[1:])
        elif command == "collect" and rest:
            collect(Path(rest[0]))
        elif command == "page":
            write_page()
        else:
            sys.exit(usage)

    run(program)
