"""Stop a run in which too many clients fail."""

from __future__ import annotations

import math
from collections.abc import Sequence

from raysim.api.messages import Failure
from raysim.simulation.events import TooManyFailuresError
from raysim.simulation.saving import RunSaver

# The error rounds the share of failed jobs up to a multiple of 1 / this number.
_SHARE_STEPS = 10_000


def check_failures(
    failures: Sequence[Failure], jobs: int, version: int, tolerate: float, saver: RunSaver
) -> None:
    """Raise TooManyFailuresError if too many jobs of an aggregation failed.

    If the run has a folder, a checkpoint is written first.
    failures: the failed jobs of the aggregation.
    jobs: the number of all jobs of the aggregation.
    version: the number of the aggregation, from 0.
    tolerate: the largest share of failed jobs, 0 to 1.
    """
    if not failures or len(failures) / jobs <= tolerate:
        return
    first = failures[0]
    method = f"method {first.method!r}, " if first.method else ""
    text = f"{len(failures)} of {jobs} clients failed in round {version + 1}. The first failure: "
    text += method + first.error.removesuffix(".")
    if len(failures) < jobs:  # otherwise there is no update to continue with
        needed = math.ceil(len(failures) * _SHARE_STEPS / jobs) / _SHARE_STEPS
        text += f". faults.tolerate={tolerate} allows a smaller share of failed clients. To go on "
        text += f"without the failed clients, set faults.tolerate={needed:g}"
    if saver.has_folder:
        text += f". Continue from this round with resume={saver.save().path}"
    raise TooManyFailuresError(f"{text}\n{first.traceback}".rstrip("\n"))
