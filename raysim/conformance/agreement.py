"""Two ways to the same end: a run on one host and on two, straight and resumed."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

from raysim.conformance.runs import Ran, coordinate, ran, run, several
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import Runtime
from raysim.simulation.schedule import Schedule
from raysim.training.run_spec import RunSpec

Make = Callable[[], RunSpec]  # the same run, with methods of its own each time


def on_hosts(make: Make, schedule: Schedule, fleet: Fleet | None = None, runtime: Runtime | None = None) -> None:
    """The same bits and the same history on one host and on two in this process, or on those of another runtime."""
    here = run(make(), schedule, fleet)
    there = ran(coordinate(make(), schedule, fleet, runtime=runtime or several(make(), 2)))
    same(here, there, "on one host and on two")


def resumed(make: Make, schedule: Schedule, fleet: Fleet | None = None) -> None:
    """The same bits and the same history straight, with checkpoints, and from a checkpoint on."""
    straight = run(make(), schedule, fleet, rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        saved = run(make(), schedule, fleet, rounds=5, checkpoint_every=3, folder=folder)
        same(straight, saved, "without checkpoints and with them")
        again = run(make(), schedule, fleet, rounds=5, resume=str(Path(folder, "checkpoints", "round-000003")))
        same(straight, again, "straight and resumed after round 3")


def same(one: Ran, other: Ran, ways: str) -> None:
    """The same bits and the same history."""
    for found in (one, other):
        assert not found.failures, found.failures[0].error
    assert one.bits[0] == other.bits[0], f"{ways}, the shared model ends at other bits"
    assert one.bits[1] == other.bits[1], f"{ways}, private or server states end at other bits"
    for row, expected in zip(other.history, one.history, strict=True):
        changed = [key for key in {**row, **expected} if not _equal(row.get(key), expected.get(key))]
        assert not changed, f"{ways}, round {expected['round']} has another {changed[0]}"


def _equal(one: float | None, other: float | None) -> bool:
    both = isinstance(one, float) and isinstance(other, float)
    return one == other or bool(both and math.isnan(one) and math.isnan(other))  # type: ignore[arg-type]
