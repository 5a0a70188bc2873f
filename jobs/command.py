"""Run the programs of this folder with the same exit statuses as the command `raysim`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from raysim import cli
from raysim.primitives.errors import errors_as_refusals


def run(program: Callable[[], object]) -> NoReturn:
    """Run a program, and end this process with an exit status.

    The exit status is 0 if the program succeeds. The exit status is 2 if the program refuses its
    input, and a printed sentence says why.
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
    """Execute a study's command `run`, `collect` or `page`, and exit.

    The first argument of the command line names the command. The second argument of `run` and of
    `collect` is the folder of the runs.
    usage: text that is printed if the command line has none of these commands; None prints nothing.
    run_all: function for `run`. It executes the runs in the folder, with further overrides.
    collect: function for `collect`. It stores the numbers of the runs in the folder.
    write_page: function for `page`. It makes the page from the stored numbers.
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
