"""Define a method that keeps two runs in the same round. Each run has its own process."""

from __future__ import annotations

import os
import time
from pathlib import Path

from raysim import Method
from raysim.api.server_view import Aggregation, ServerView


class InStep(Method):
    """A method that waits, in each round, until two processes have reached this round.

    folder: an empty folder, in which each process writes a file for each round.
    """

    name = "in_step"

    def __init__(self, folder: str):
        self.folder = folder

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Write the file of this process for this round; wait for that of another process."""
        folder = Path(self.folder)
        (folder / f"{server.version}-{os.getpid()}").touch()
        while len(list(folder.glob(f"{server.version}-*"))) < 2:
            time.sleep(0.02)
