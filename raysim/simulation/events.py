"""What a run tells its driver, as it happens, and how it may stop early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from raysim.api.messages import Failure, Probe

Row: TypeAlias = dict[str, float | int | None]


@dataclass(frozen=True)
class Started:
    """Rows of the rounds that a resumed run already has."""

    rows: list[Row]


@dataclass(frozen=True)
class Round:
    """One finished aggregation."""

    row: Row
    failures: tuple[Failure, ...]
    probes: tuple[Probe, ...] = ()  # of this round's local models


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    version: int
    path: str


@dataclass(frozen=True)
class Finished:
    """The end of a run."""

    model_sha256: str
    state_sha256: str
    peak_memory_bytes: int


Event: TypeAlias = Started | Round | Saved | Finished


class RunStopped(RuntimeError):
    """A run that could not go on; what it did is in its folder."""


class TooManyFailures(RunStopped):
    """More clients failed in one aggregation than `faults.tolerate` allows."""
