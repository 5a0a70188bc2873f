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

    The status is 0 after success, 130 after Ctrl-C, and 2 after a refusal, which is printed. It is
    1 after other failures. `errors_as_refusals` says which errors count as a refusal.
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
    """Run the command of a study that the command line names, and end this process.

    The command line is `run FOLDER [OVERRIDE ...]`, `collect FOLDER` or `page`.
    usage: the text for any other command line, with the exit status 1. None prints no text, with
    the exit status 0.
    run_all: executes the runs of the study in FOLDER, with the overrides.
    collect: copies the numbers of the runs in FOLDER into a file of the repository.
    write_page: makes the study's page from this file of the repository.
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
