"""Run a program of this folder with the environment and the exit status of `raysim`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

from raysim import cli
from raysim.primitives.errors import errors_as_refusals


def run(program: Callable[[], object]) -> NoReturn:
    """Run a program and exit: 0 when it is done, 2 with one sentence when it refuses its input."""

    def command() -> int:
        with errors_as_refusals():
            program()
        return 0

    cli.prepare_ray()
    sys.exit(cli.exit_status(command))
