"""What schedule and fleet will make of a run: its first steps, planned without training anything."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raysim.simulation.events import RunStopped
from raysim.simulation.planner import Planner, Step

BUSY = 8  # clients at work for each host, from which on hosts seldom wait for a client to be sent off
_TURNS, _JOBS = 4, 400  # planned at least: how often each place of a client at work is filled; jobs


@dataclass(frozen=True)
class Forecast:
    """Means over the second half of the steps that were planned, where a run has found its pace."""

    at_work: float  # clients
    seconds: float  # virtual, from one aggregation to the next
    staleness: float  # of results that are aggregated
    lost: float  # share of the jobs that end
    discarded: float
    hosts_busy: float = 1.0  # share of the wall time for which hosts work; over all steps


def forecast(planner: Planner, rounds: int, hosts: int = 1) -> Forecast:
    """Of a run of so many rounds; uses up the planner. Raises ValueError where the fleet lets no run begin."""
    steps: list[Step] = []
    enough = max(_JOBS, _TURNS * planner.schedule.concurrency)
    while len(steps) < rounds and planner.dispatched < enough:
        try:
            steps.append(planner.step())
        except RunStopped:  # by devices that end
            if not steps:
                raise
            break
    half = len(steps) // 2
    begin, end = steps[half - 1].now if half else 0.0, steps[-1].now
    jobs = [job for step in steps for job in step.dispatched]
    start, finish = (np.clip([getattr(job, name) for job in jobs], begin, end) for name in ("start", "finish"))
    later = steps[half:]
    taken, lost, discarded = (sum(len(getattr(s, name)) for s in later) for name in ("taken", "lost", "discarded"))
    ended = taken + lost + discarded
    return Forecast(
        at_work=float((finish - start).sum() / (end - begin)) if end > begin else 0.0,
        seconds=(end - begin) / len(later),
        staleness=float(np.mean([each.staleness for step in later for each in step.taken])),
        lost=lost / ended,
        discarded=discarded / ended,
        hosts_busy=hosts_busy(steps, hosts),
    )


def hosts_busy(steps: Sequence[Step], hosts: int) -> float:
    """The share of wall time for which so many hosts work, if a sample takes all of them equally long.

    As the coordinator has them do it: a job can begin once its base version is made, and what the nearest aggregation
    needs comes first. What no aggregation takes is not trained.
    """
    takers = {number: index for index, step in enumerate(steps) for number, _ in step.taken}
    left = [len(step.taken) for step in steps]
    ready: list[tuple[int, float, int, float]] = []  # heap by the aggregation that takes a job, finish, client; work
    running: list[tuple[float, int]] = []  # heap by wall time at the end
    now, worked, version, begun = 0.0, 0.0, 0, -1
    while version < len(steps):
        if begun < version:
            begun = version
            for job in steps[version].dispatched:
                if job.number in takers:
                    heapq.heappush(ready, (takers[job.number], job.finish, job.client, job.work))
        while ready and len(running) < hosts:
            taker, _, _, work = heapq.heappop(ready)
            heapq.heappush(running, (now + work, taker))
            worked += work
        if left[version]:
            now, taker = heapq.heappop(running)
            left[taker] -= 1
        else:
            version += 1
    return worked / (hosts * now) if now else 0.0
