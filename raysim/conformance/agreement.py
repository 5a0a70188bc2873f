"""Check that the results of a run do not depend on how it is executed.

Each check executes a run in several ways: on one or two workers, with or without an interruption,
with or without recorded steps.
"""

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

# The largest relative and absolute difference in float64: products with a learning rate that is a
# tensor are rounded in another way.
TOLERANCE = 1e-8
# Columns that count inner products below 0. Rounding may change the sign of a product near 0.
COUNTS = ("conflicts", "projections")
Make = Callable[[], RunSpec]  # returns the same run, with new methods each time


def check_workers(
    make: Make, schedule: Schedule, fleet: Fleet | None = None, runtime: Runtime | None = None
) -> None:
    """Check that a run has the same bits and history on one worker and on several.

    make: function that returns the run, with new method objects in each call.
    fleet: None uses `Lognormal`.
    runtime: a runtime with several workers; None uses two workers in this process.
    """
    single = run(make(), schedule, fleet)
    several = run_to_end(
        coordinate(make(), schedule, fleet, runtime=runtime or several_workers(make(), 2))
    )
    check_same(single, several, "on one worker and on two")


def check_resumed(make: Make, schedule: Schedule, fleet: Fleet | None = None) -> None:
    """Check that writing a checkpoint and resuming from it do not change a run's results.

    Three runs must be bit-identical and have the same history: one without checkpoints, one with a
    checkpoint after round 3 of 5, and one resumed from this checkpoint.
    make: function that returns the run, with new method objects in each call.
    fleet: None uses `Lognormal`.
    """
    straight = run(make(), schedule, fleet, rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        saved = run(make(), schedule, fleet, rounds=5, checkpoint_every=3, folder=folder)
        check_same(straight, saved, "without checkpoints and with them")
        again = run(
            make(),
            schedule,
            fleet,
            rounds=5,
            resume=str(Path(folder, "checkpoints", "round-000003")),
        )
        check_same(straight, again, "straight and resumed after round 3")


def check_recorded(make: Make, **settings: Any) -> None:
    """Check that a run has the same results with and without recorded steps, up to rounding.

    Without a GPU, the replay is simulated. The check fails if a step reads the value of a tensor,
    as `.item()` does. It passes if raysim refuses lanes for the run.
    make: function that returns the run, in float64, with new method objects in each call.
    settings: see `runs.with_settings`.
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
                    two[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{name}, recorded"
                )
        for row, expected in zip(other.history, loop.history, strict=True):
            _check_close(row, expected)


def _check_close(row: Row, expected: Row) -> None:
    """Check that two rows of a history have the same numbers, except for rounding errors.

    row: a row of the run with recorded steps.
    expected: the row of the run without recorded steps.
    """
    assert row.keys() == expected.keys(), "other columns from recorded steps than in the loop"
    for key, value in expected.items():
        if key.split(".")[-1] not in COUNTS:
            one, other = (np.nan if number is None else number for number in (value, row[key]))
            np.testing.assert_allclose(
                other, one, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{key}, recorded"
            )


def check_same(one: FinishedRun, other: FinishedRun, executions: str) -> None:
    """Check that two finished runs are bit-identical and have the same history.

    one, other: the two runs.
    executions: the difference between the two runs, for errors, such as "on one worker and on two".
    """
    for run_ in (one, other):
        assert not run_.failures, run_.failures[0].error
    assert one.bits[0] == other.bits[0], f"{executions}, the shared models have different bits"
    assert one.bits[1] == other.bits[1], (
        f"{executions}, client states or server states have different bits"
    )
    for row, expected in zip(other.history, one.history, strict=True):
        changed = [
            key for key in {**row, **expected} if not _equal(row.get(key), expected.get(key))
        ]
        assert not changed, f"{executions}, round {expected['round']} has another {changed[0]}"


def _equal(one: float | None, other: float | None) -> bool:
    both = isinstance(one, float) and isinstance(other, float)
    if both and math.isnan(one) and math.isnan(other):  # type: ignore[arg-type]
        return True
    return one == other
