"""How many clients may fail in one aggregation before a run stops."""

from __future__ import annotations

from collections.abc import Sequence

from raysim.api.messages import Failure
from raysim.simulation.events import TooManyFailuresError
from raysim.simulation.saving import RunSaver


def check_failures(
    failures: Sequence[Failure], jobs: int, version: int, tolerate: float, saver: RunSaver
) -> None:
    """Raise TooManyFailuresError, after writing a checkpoint, if more than this share of the jobs failed.

    jobs: how many the aggregation has. version: the one that their updates would be added to.
    """
    if len(failures) <= tolerate * jobs:
        return
    first = failures[0]
    method = f"method {first.method!r}, " if first.method else ""
    text = f"{len(failures)} of {jobs} clients failed in round {version + 1}, first: {method}{first.error}"
    share = len(failures) / jobs
    if share < 1:  # otherwise there is no update to continue with
        text += f". faults.tolerate={tolerate} allows fewer; set it to {share:g} to leave them out and go on"
    if saver.has_folder:
        text += f"; resume continues from {saver.save().path}"
    raise TooManyFailuresError(f"{text}\n{first.traceback}".rstrip("\n"))
