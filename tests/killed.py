"""``raysim``, which is killed after its first checkpoint in a folder with a given word in its name."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from raysim import cli
from raysim.simulation import checkpoint
from raysim.simulation.checkpoint import Snapshot, write


def write_last(folder: Path, version: int, snapshot: Snapshot) -> Path:
    """Write a checkpoint, perhaps the last one."""
    path = write(folder, version, snapshot)
    if sys.argv[1] in str(folder):
        os.kill(os.getpid(), signal.SIGKILL)
    return path


checkpoint.write = write_last
cli.call(sys.argv[2:])
