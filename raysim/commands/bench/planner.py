"""What virtual time costs: events a second of the plan alone, and jobs a second of whole runs that train nothing.

`raysim bench scale` runs both with a million clients of whom a thousand are at work, for every schedule and fleet.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from raysim.api.declarations import Evaluation
from raysim.commands.bench.coordinator import Case, Ready, spec_of
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.fleet import Fleet, Ideal, Lognormal
from raysim.simulation.planner import Load, Planner
from raysim.simulation.schedule import Buffered, Deadline, Immediate, Oversample, Schedule, Synchronous, Tiered
from raysim.training.run_spec import RunSettings

CLIENTS, AT_WORK = 1_000_000, 1_000
SCHEDULES: dict[str, Schedule] = {
    "synchronous": Synchronous(AT_WORK),
    "oversample": Oversample(AT_WORK),
    "deadline": Deadline(AT_WORK, seconds=0.02),
    "buffered": Buffered(AT_WORK, size=100),
    "immediate": Immediate(AT_WORK),
    "tiered": Tiered(5, AT_WORK // 5),
}
FLEETS: dict[str, Fleet] = {
    "ideal": Ideal(),
    "lognormal": Lognormal(),
    "drop-outs": Lognormal(dropout=0.1),
    "diurnal": Lognormal(availability="diurnal"),
    "markov": Lognormal(availability="markov", on=600, off=600),
}


@dataclass(frozen=True)
class Rate:
    """Of a schedule over a fleet. events: dispatches and ends a second of CPU; memory: bytes that the plan added."""

    schedule: str
    fleet: str
    start: float  # seconds
    events: float
    memory: int


def rates(seconds: float, say: Callable[[str], None]) -> list[Rate]:
    """Of the plan alone, each for so many seconds."""
    counts = 5 + np.arange(CLIENTS) * 7 % 11
    found = []
    for name, schedule in SCHEDULES.items():
        for fleet, kind in FLEETS.items():
            before, began = _resident(), time.process_time()
            planner = Planner(schedule, kind.devices(0, CLIENTS, lambda: 1.0), 0, counts, _load)
            ready = time.process_time()
            while not planner.version or time.process_time() - ready < seconds:
                planner.step()
            rate = 2 * planner.dispatched / (time.process_time() - ready)
            found.append(Rate(name, fleet, ready - began, rate, max(0, _resident() - before)))
            say(f"{name} over {fleet}: {rate:,.0f} events a second")
            del planner
    return found


def _load(client: int, version: int, earlier: int, accepted: int) -> Load:
    return Load(float(5 + client * 7 % 11), 1_000, 1_000)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def whole(rounds: int) -> tuple[float, float]:
    """Jobs a second and seconds to start of a run in this process, buffered by 100, of hosts that cost nothing."""
    settings = RunSettings(rounds=rounds, evaluate=Evaluation(every=10**9))
    began = time.perf_counter()
    spec = spec_of(Case(CLIENTS // 2, 1), settings)
    coordinator = Coordinator(spec, SCHEDULES["buffered"], FLEETS["drop-outs"], InProcess(Ready(spec)))
    marks = [time.perf_counter() for event in coordinator.run() if isinstance(event, Round)]
    return (len(marks) - 1) * SCHEDULES["buffered"].size / (marks[-1] - marks[0]), marks[0] - began


def main(say: Callable[[str], None]) -> dict[str, object]:
    """Measure, print a table; what a file of results says of it."""
    from rich.console import Console
    from rich.table import Table

    found = rates(2.0, say)
    table = Table(title=f"the plan alone: thousand events a second, {CLIENTS:,} clients, {AT_WORK:,} at work")
    for header in ("schedule", *FLEETS):
        table.add_column(header, justify="right")
    for name in SCHEDULES:
        table.add_row(name, *(f"{rate.events / 1e3:,.0f}" for rate in found if rate.schedule == name))
    Console().print(table)
    jobs, start = whole(100)
    say(f"a whole run that trains nothing: {jobs:,.0f} jobs a second, the first round after {start:.1f} s")
    return {"planner": [asdict(rate) for rate in found], "jobs_per_second": jobs, "start_seconds": start}
