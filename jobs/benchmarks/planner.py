"""Measure the planner: planned events per second, and jobs per second of a run without training.

    uv run python -m jobs.benchmarks.planner

An event is a dispatch or the end of a job. Of a million clients, about a thousand are in flight.
Seconds are CPU time.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.benchmarks.scale import Case, ReadyWorker, spec_of
from jobs.command import run
from raysim.api.declarations import Evaluation
from raysim.api.messages import Update
from raysim.primitives.memory import peak_memory_bytes
from raysim.primitives.output import terminal_width
from raysim.primitives.streams import stream
from raysim.results.tables import format_table, text_columns
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.fleet import Fleet, Ideal, Lognormal
from raysim.simulation.oort import Oort
from raysim.simulation.planner import Load, Planner
from raysim.simulation.schedule import (
    Buffered,
    Deadline,
    Immediate,
    Oversample,
    Schedule,
    Synchronous,
    Tiered,
)
from raysim.simulation.trace import Trace
from raysim.training.run_spec import RunSettings

CLIENTS, IN_FLIGHT = 1_000_000, 1_000
SCHEDULES: dict[str, Schedule] = {
    "synchronous": Synchronous(IN_FLIGHT),
    "oversample": Oversample(IN_FLIGHT),
    "deadline": Deadline(IN_FLIGHT, seconds=0.02),
    "buffered": Buffered(IN_FLIGHT, size=100),
    "immediate": Immediate(IN_FLIGHT),
    "tiered": Tiered(5, IN_FLIGHT // 5),
}
FLEETS: dict[str, Fleet] = {
    "ideal": Ideal(),
    "lognormal": Lognormal(),
    "drop-outs": Lognormal(dropout=0.1),
    "diurnal": Lognormal(availability="diurnal"),
    "markov": Lognormal(availability="markov", on=600, off=600),
    "night": Lognormal(
        availability="diurnal", hours=0.5
    ),  # half of the time no client is available
    "scarce": Lognormal(availability="markov", on=600, off=6e6),  # about 100 clients available
}
# A further fleet: each client is available four times in two days, for 4 s on average.
TRACE = "trace"
OORT = "oort"  # this selection, with reports of all updates, on a log-normal fleet


@dataclass(frozen=True)
class Rate:
    """The speed of the planner for a schedule and a fleet.

    fleet: "oort" means the selection Oort on a log-normal fleet.
    start: CPU seconds to the first aggregation; for "oort", to the second one.
    events: dispatched and finished jobs per CPU second.
    memory: bytes by which the process grew.
    """

    schedule: str
    fleet: str
    start: float
    events: float
    memory: int


def rates(seconds: float, say: Callable[[str], None]) -> list[Rate]:
    """Measure the planner for `seconds` with each schedule and fleet.

    Each measurement has its own process, so that `Rate.memory` is that of one planner.
    say: function that gets a line for each measurement.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Trace(file=_trace(Path(folder) / "trace.parquet"))
        fleets = {**FLEETS, TRACE: trace, OORT: Lognormal()}
        for name in SCHEDULES:
            for fleet, kind in fleets.items():
                with multiprocessing.get_context("fork").Pool(1) as pool:
                    rate = pool.apply(_rate, (name, fleet, kind, seconds))
                results.append(rate)
                group = "selection" if fleet == OORT else "fleet"
                say(
                    f"schedule {name}, {group} {fleet}: the planner simulates {rate.events:,.0f} "
                    "events per CPU second (an event is a dispatch or the end of a job) and needs "
                    f"{rate.memory / 1e6:,.0f} MB of memory"
                )
    return results


def _rate(name: str, fleet: str, kind: Fleet, seconds: float) -> Rate:
    counts = 5 + np.arange(CLIENTS) * 7 % 11
    before, began = _resident(), time.process_time()
    devices = kind.devices(0, CLIENTS, lambda: 1.0)
    rule = Oort() if fleet == OORT else None
    planner = Planner(SCHEDULES[name], devices, 0, counts, _load, selection=rule)
    _plan(planner)
    if rule is not None:
        _plan(planner)  # the first decision with reports looks at all devices
    ready, earlier = time.process_time(), planner.dispatched
    while planner.dispatched == earlier or time.process_time() - ready < seconds:
        _plan(planner)
    rate = 2 * (planner.dispatched - earlier) / (time.process_time() - ready)
    return Rate(name, fleet, ready - began, rate, max(0, _resident() - before))


def _plan(planner: Planner) -> None:
    """Plan one aggregation; if the selection needs the losses of clients, report some."""
    aggregation = planner.next_aggregation()
    if planner.plans_ahead:
        return
    counters = np.empty(0, np.int64)
    updates = []
    for job in aggregation.aggregated:
        loss = 1.0 + job.client % 97 / 97
        updates.append(Update(job.number, job.client, job.version, 5, 5, 1, loss, 0.0, counters))
    planner.report(updates)


def _trace(file: Path) -> str:
    """Write a trace of all clients, each with four intervals of availability; return its path."""
    generator, period = stream(0, "bench"), 172_800.0
    starts = np.sort(generator.random((CLIENTS, 4)), axis=1) * (period - 100)
    stops = np.append(starts[:, 1:], np.full((CLIENTS, 1), period), axis=1)
    ends = np.minimum(starts + 0.1 + generator.exponential(4.0, (CLIENTS, 4)), stops)
    firsts = pa.array(np.arange(CLIENTS + 1, dtype=np.int32) * 4)
    rates = {
        key: generator.lognormal(mean, 1.0, CLIENTS)
        for key, mean in (("speed", 7), ("down", 15), ("up", 14))
    }
    lists = {
        key: pa.ListArray.from_arrays(firsts, times.ravel())
        for key, times in (("start", starts), ("end", ends))
    }
    pq.write_table(
        pa.table(
            {"client": np.arange(CLIENTS), **lists, "period": np.full(CLIENTS, period), **rates}
        ),
        file,
    )
    return str(file)


def _load(client: int, version: int, earlier: int, accepted: int) -> Load:
    return Load(float(5 + client * 7 % 11), 1_000, 1_000)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def whole_run(rounds: int) -> tuple[float, float]:
    """Return the aggregated jobs per CPU second, and the CPU seconds to the first aggregation.

    The run's only worker is in this process and returns prepared updates without training. An
    aggregation has 100 updates.
    rounds: the number of aggregations.
    """
    settings = RunSettings(rounds=rounds, evaluate=Evaluation(every=10**9))
    began = time.process_time()
    spec = spec_of(Case(CLIENTS // 2), settings)
    coordinator = Coordinator(
        spec, SCHEDULES["buffered"], FLEETS["drop-outs"], InProcess(ReadyWorker(spec))
    )
    marks = [time.process_time() for event in coordinator.run() if isinstance(event, Round)]
    return (len(marks) - 1) * SCHEDULES["buffered"].size / (marks[-1] - marks[0]), marks[0] - began


def bench(say: Callable[[str], None]) -> dict[str, object]:
    """Measure the planner, print a table, and return the results for a JSON file.

    say: function that prints a text.
    """
    results = rates(2.0, say)
    rows = []
    for name in SCHEDULES:
        of_schedule = [rate for rate in results if rate.schedule == name]
        rows.append((name, *(f"{rate.events / 1e3:,.0f}" for rate in of_schedule)))
    fleets = (*FLEETS, TRACE, OORT)
    most = [max(rate.memory for rate in results if rate.fleet == fleet) for fleet in fleets]
    rows.append(("memory, MB", *(f"{memory / 1e6:,.0f}" for memory in most)))
    say(
        "thousands of events (dispatches and ends of jobs) that the planner simulates per CPU "
        f"second, with {CLIENTS:,} clients and {IN_FLIGHT:,} jobs in flight, by schedule and fleet. "
        "The last row is the largest memory of the planner. The last column is the log-normal "
        "fleet with selection=oort"
    )
    say(format_table(text_columns(("schedule", *fleets), rows), terminal_width()))
    jobs, start = whole_run(100)
    say(
        f"a whole run without training: {jobs:,.0f} jobs per CPU second, {start:.1f} CPU seconds "
        f"until the first aggregation, {peak_memory_bytes() / 1e9:.2f} GB of memory at the peak"
    )
    return {
        "planner": [asdict(rate) for rate in results],
        "jobs_per_second": jobs,
        "start_seconds": start,
    }


def main() -> None:
    """Measure how many events per second the planner simulates, and print a table.

    The function also prints the number of jobs per second in a run without training. It writes no
    file.
    """
    bench(print)


if __name__ == "__main__":
    run(main)
