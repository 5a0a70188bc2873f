"""Two ways to the same end: a run on one host and on two, straight and resumed, in a loop and in lanes."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim.conformance.runs import Ran, coordinate, ran, run, several
from raysim.simulation.events import Row
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import Runtime
from raysim.simulation.schedule import Schedule
from raysim.training.lane import NotInLanes
from raysim.training.run_spec import RunSpec

EXACT = 1e-9  # float64 end to end: what is left is the order in which products are summed
COUNTS = ("conflicts", "projections")  # of inner products below zero, some of which are zero but for rounding
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


def in_lanes(make: Make, **settings: Any) -> None:
    """The same numbers in a loop and in lanes, in float64. Raises NotInLanes where a method says that it cannot."""
    loop, lanes = (run(replace(make(), lanes=count), **settings) for count in (1, 3))
    for found in (loop, lanes):
        assert not found.failures, found.failures[0].error
    for one, other in ((loop.tensors, lanes.tensors), (loop.private, lanes.private)):
        assert one.keys() == other.keys(), "other tensors in lanes than in a loop"
        for name, values in one.items():
            np.testing.assert_allclose(other[name], values, rtol=EXACT, atol=EXACT, err_msg=f"{name}, in lanes")
    for row, expected in zip(lanes.history, loop.history, strict=True):
        near(row, expected)


def in_lanes_or_not(make: Make, **settings: Any) -> None:
    """The same numbers in a loop and in lanes, unless the run is refused in lanes by name."""
    with contextlib.suppress(NotInLanes):
        in_lanes(make, **settings)


def same(one: Ran, other: Ran, ways: str) -> None:
    """The same bits and the same history."""
    for found in (one, other):
        assert not found.failures, found.failures[0].error
    assert one.bits[0] == other.bits[0], f"{ways}, the shared model ends at other bits"
    assert one.bits[1] == other.bits[1], f"{ways}, private or server states end at other bits"
    for row, expected in zip(other.history, one.history, strict=True):
        changed = [key for key in {**row, **expected} if not _equal(row.get(key), expected.get(key))]
        assert not changed, f"{ways}, round {expected['round']} has another {changed[0]}"


def near(row: Row, expected: Row) -> None:
    """Two rows of a history with the same numbers, but for rounding."""
    assert row.keys() == expected.keys(), "other columns in lanes than in a loop"
    for key, value in expected.items():
        if key.split(".")[-1] not in COUNTS:
            one, other = (np.nan if each is None else each for each in (value, row[key]))
            np.testing.assert_allclose(other, one, rtol=EXACT, atol=EXACT, err_msg=f"{key}, in lanes")


def _equal(one: float | None, other: float | None) -> bool:
    both = isinstance(one, float) and isinstance(other, float)
    return one == other or bool(both and math.isnan(one) and math.isnan(other))  # type: ignore[arg-type]
