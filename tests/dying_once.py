"""Define a method that kills the process of its run, but only the first time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from raysim import Method
from raysim.api.server_view import Aggregation, ServerView


class DyingOnce(Method):
    """A method that kills the process which aggregates round 3, but only once.

    marker: the path of a file that the method writes before it kills the process. If the file
    exists, the method does nothing.
    """

    name = "dying_once"

    def __init__(self, marker: str):
        self.marker = marker

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Kill this process in round 3, unless the file `marker` exists."""
        marker = Path(self.marker)
        if server.version == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
