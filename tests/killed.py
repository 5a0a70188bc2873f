"""Run `raysim` and kill it after its first checkpoint in a folder whose name has a given word."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from raysim import cli
from raysim.simulation.checkpoint import Checkpoints

write = Checkpoints.write


def write_and_kill(self: Checkpoints, *arguments: Any) -> str:
    """Write a checkpoint, and end this process if its address has the word."""
    address = write(self, *arguments)
    if sys.argv[1] in address:
        os.kill(os.getpid(), signal.SIGKILL)
    return address


Checkpoints.write = write_and_kill  # type: ignore[method-assign]
cli.call(sys.argv[2:])
