"""A method that kills the process of its run, but only the first time."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from raysim import Method
from raysim.api.server_view import Aggregation, ServerView


class DyingOnce(Method):
    """Kill the process that aggregates round 3, unless a file exists; write this file before."""

    name = "dying_once"

    def __init__(self, marker: str):
        self.marker = marker

    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Kill this process in round 3, if it is the first time."""
        marker = Path(self.marker)
        if server.version == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
