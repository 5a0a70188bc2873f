"""Two ways to the same end: a run on one worker and on two, straight and resumed, in the loop and from recordings."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from raysim.conformance.runs import FinishedRun, coordinate, run, run_to_end, several_workers
from raysim.simulation.events import Row
from raysim.simulation.fleet import Fleet
from raysim.simulation.runtime import Runtime
from raysim.simulation.schedule import Schedule
from raysim.training.lanes import LanesError
from raysim.training.run_spec import RunSpec

EXACT = 1e-8  # float64 from end to end: a rate that is a tensor is multiplied with another rounding
COUNTS = (
    "conflicts",
    "projections",
)  # of inner products below zero, some of which are zero but for rounding
Make = Callable[[], RunSpec]  # the same run, with methods of its own each time


def on_workers(
    make: Make, schedule: Schedule, fleet: Fleet | None = None, runtime: Runtime | None = None
) -> None:
    """The same bits and the same history on one worker and on two in this process, or on those of another runtime."""
    here = run(make(), schedule, fleet)
    there = run_to_end(
        coordinate(make(), schedule, fleet, runtime=runtime or several_workers(make(), 2))
    )
    same(here, there, "on one worker and on two")


def resumed(make: Make, schedule: Schedule, fleet: Fleet | None = None) -> None:
    """The same bits and the same history straight, with checkpoints, and from a checkpoint on."""
    straight = run(make(), schedule, fleet, rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        saved = run(make(), schedule, fleet, rounds=5, checkpoint_every=3, folder=folder)
        same(straight, saved, "without checkpoints and with them")
        again = run(
            make(),
            schedule,
            fleet,
            rounds=5,
            resume=str(Path(folder, "checkpoints", "round-000003")),
        )
        same(straight, again, "straight and resumed after round 3")


def recorded(make: Make, **settings: Any) -> None:
    """Check that a run ends at the same numbers in the loop and from recorded steps, in float64.

    Without a GPU a recorded step is computed again, from nothing but its inputs and without reading
    a value. A run that is refused by name passes.
    """
    with contextlib.suppress(LanesError):
        loop, other = (
            run(replace(make(), lanes=lanes, graph=lanes > 1), **settings) for lanes in (1, 3)
        )
        for ended in (loop, other):
            assert not ended.failures, ended.failures[0].error
        for one, two in ((loop.tensors, other.tensors), (loop.private, other.private)):
            assert one.keys() == two.keys(), "other tensors from recorded steps than in the loop"
            for name, values in one.items():
                np.testing.assert_allclose(
                    two[name], values, rtol=EXACT, atol=EXACT, err_msg=f"{name}, recorded"
                )
        for row, expected in zip(other.history, loop.history, strict=True):
            _near(row, expected)


def _near(row: Row, expected: Row) -> None:
    """Check that two rows of a history have the same numbers, but for rounding."""
    assert row.keys() == expected.keys(), "other columns from recorded steps than in the loop"
    for key, value in expected.items():
        if key.split(".")[-1] not in COUNTS:
            one, other = (np.nan if number is None else number for number in (value, row[key]))
            np.testing.assert_allclose(
                other, one, rtol=EXACT, atol=EXACT, err_msg=f"{key}, recorded"
            )


def same(one: FinishedRun, other: FinishedRun, ways: str) -> None:
    """The same bits and the same history."""
    for found in (one, other):
        assert not found.failures, found.failures[0].error
    assert one.bits[0] == other.bits[0], f"{ways}, the shared model ends at other bits"
    assert one.bits[1] == other.bits[1], f"{ways}, private or server states end at other bits"
    for row, expected in zip(other.history, one.history, strict=True):
        changed = [
            key for key in {**row, **expected} if not _equal(row.get(key), expected.get(key))
        ]
        assert not changed, f"{ways}, round {expected['round']} has another {changed[0]}"


def _equal(one: float | None, other: float | None) -> bool:
    both = isinstance(one, float) and isinstance(other, float)
    return one == other or bool(both and math.isnan(one) and math.isnan(other))  # type: ignore[arg-type]
