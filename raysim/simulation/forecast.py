"""What schedule and fleet will make of a run: its first steps, planned without training anything."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raysim.simulation.events import RunStoppedError
from raysim.simulation.planner import PlannedAggregation, Planner

# With so many clients in flight for each worker, workers seldom wait for a dispatch.
CLIENTS_PER_BUSY_WORKER = 8
_TURNS, _JOBS = 4, 400  # planned at least: how often each place of a client at work is filled; jobs


@dataclass(frozen=True)
class Forecast:
    """Means over the second half of the steps that were planned, where a run has found its pace."""

    at_work: float  # clients
    seconds: float  # virtual, from one aggregation to the next
    staleness: float  # of results that are aggregated
    lost: float  # share of the jobs that end
    discarded: float
    workers_busy: float = 1.0  # share of the wall time for which workers work; over all steps


def forecast(planner: Planner, rounds: int, workers: int = 1) -> Forecast:
    """Of a run of so many rounds; uses up the planner. Raises ValueError where the fleet lets no run begin."""
    aggregations: list[PlannedAggregation] = []
    enough = max(_JOBS, _TURNS * planner.schedule.concurrency)
    while len(aggregations) < rounds and planner.dispatched < enough:
        try:
            aggregations.append(planner.next_aggregation())
        except RunStoppedError:  # by devices that end
            if not aggregations:
                raise
            break
    half = len(aggregations) // 2
    begin, end = aggregations[half - 1].now if half else 0.0, aggregations[-1].now
    jobs = [job for each in aggregations for job in each.dispatched]
    start, finish = (
        np.clip([getattr(job, name) for job in jobs], begin, end) for name in ("start", "finish")
    )
    later = aggregations[half:]
    aggregated = sum(len(each.aggregated) for each in later)
    lost = sum(len(each.lost) for each in later)
    discarded = sum(len(each.discarded) for each in later)
    ended = aggregated + lost + discarded
    return Forecast(
        at_work=float((finish - start).sum() / (end - begin)) if end > begin else 0.0,
        seconds=(end - begin) / len(later),
        staleness=float(np.mean([staleness for each in later for staleness in each.staleness])),
        lost=lost / ended,
        discarded=discarded / ended,
        workers_busy=workers_busy(aggregations, workers),
    )


def workers_busy(aggregations: Sequence[PlannedAggregation], workers: int) -> float:
    """The share of wall time for which so many workers work, if a sample takes all of them equally long.

    As the coordinator has them do it: a job can begin once its base version is made, and what the nearest aggregation
    needs comes first. What no aggregation takes is not trained.
    """
    takers = {job.number: each.version for each in aggregations for job in each.aggregated}
    left = [len(each.aggregated) for each in aggregations]
    ready: list[
        tuple[int, float, int, float]
    ] = []  # heap by the aggregation that takes a job, finish, client; work
    running: list[tuple[float, int]] = []  # heap by wall time at the end
    now, worked, version, begun = 0.0, 0.0, 0, -1
    while version < len(aggregations):
        if begun < version:
            begun = version
            for job in aggregations[version].dispatched:
                if job.number in takers:
                    heapq.heappush(ready, (takers[job.number], job.finish, job.client, job.work))
        while ready and len(running) < workers:
            taker, _, _, work = heapq.heappop(ready)
            heapq.heappush(running, (now + work, taker))
            worked += work
        if left[version]:
            now, taker = heapq.heappop(running)
            left[taker] -= 1
        else:
            version += 1
    return worked / (workers * now) if now else 0.0
