"""``raysim``, which is killed after its first checkpoint in a folder with a given word in its name."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from raysim import cli
from raysim.simulation import checkpoint
from raysim.simulation.checkpoint import write


def write_last(*given: Any) -> Path:
    """Write a checkpoint, perhaps the last one."""
    path = write(*given)
    if sys.argv[1] in str(given[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    return path


checkpoint.write = write_last
cli.call(sys.argv[2:])
