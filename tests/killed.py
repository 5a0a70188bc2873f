"""``raysim``, which is killed after its first checkpoint in a folder with a given word in its name."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from raysim import cli
from raysim.simulation.checkpoint import Checkpoints

write = Checkpoints.write


def write_last(self: Checkpoints, *given: Any) -> str:
    """Write a checkpoint, perhaps the last one."""
    address = write(self, *given)
    if sys.argv[1] in address:
        os.kill(os.getpid(), signal.SIGKILL)
    return address


Checkpoints.write = write_last  # type: ignore[method-assign]
cli.call(sys.argv[2:])
