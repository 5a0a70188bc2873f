"""Forecast a run: plan its first aggregations without training."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raysim.simulation.events import RunStoppedError
from raysim.simulation.planner import PlannedAggregation, Planner
from raysim.simulation.selector import SelectionError

# With this many clients in flight for each worker, workers seldom wait for a dispatch.
CLIENTS_PER_BUSY_WORKER = 8
# The least number of planned jobs: in total, and for each client that may be in flight.
_MIN_JOBS, _MIN_JOBS_PER_CLIENT = 400, 4


@dataclass(frozen=True)
class Forecast:
    """The forecast of a run, from its first planned aggregations.

    The first half of these aggregations is a warm-up. Only the two values of `workers_busy` and
    `workers_busy_ahead` include it.

    in_flight: the mean number of jobs in flight.
    seconds: the mean virtual seconds from one aggregation to the next.
    staleness: the mean staleness of aggregated updates.
    lost, discarded: fractions of the ended jobs.
    workers_busy: the fraction of wall time in which workers work.
    workers_busy_ahead: this fraction, if all aggregations were planned before the training.
    """

    in_flight: float
    seconds: float
    staleness: float
    lost: float
    discarded: float
    workers_busy: float = 1.0
    workers_busy_ahead: float = 1.0


def forecast(planner: Planner, rounds: int, workers: int = 1) -> Forecast:
    """Return the forecast of a run; the planner cannot be used afterwards.

    In the forecast, the selection gets no reports of clients.
    Raises ValueError if the run cannot begin with this fleet.
    Raises RunStoppedError if no aggregation can be planned, or if the selection makes a choice that
    is not allowed.
    """
    aggregations: list[PlannedAggregation] = []
    min_jobs = max(_MIN_JOBS, _MIN_JOBS_PER_CLIENT * planner.schedule.concurrency)
    while len(aggregations) < rounds and planner.dispatched < min_jobs:
        try:
            aggregations.append(planner.next_aggregation())
        except RunStoppedError as error:  # no clients are left
            if not aggregations or isinstance(error, SelectionError):
                raise
            break
    end = aggregations[-1].now
    half = len(aggregations) // 2
    while half and aggregations[half - 1].now >= end:
        half -= 1  # several servers may aggregate at the same time
    later = aggregations[half:]
    begin = aggregations[half - 1].now if half else 0.0
    aggregated = sum(len(aggregation.aggregated) for aggregation in later)
    lost = sum(len(aggregation.lost) for aggregation in later)
    discarded = sum(len(aggregation.discarded) for aggregation in later)
    ended = aggregated + lost + discarded
    staleness = np.concatenate([aggregation.staleness for aggregation in later])
    return Forecast(
        in_flight=_mean_in_flight(aggregations, begin, end),
        seconds=(end - begin) / len(later),
        staleness=float(np.mean(staleness)),
        lost=lost / ended,
        discarded=discarded / ended,
        workers_busy=workers_busy(aggregations, workers, planner.plans_ahead),
        workers_busy_ahead=workers_busy(aggregations, workers),
    )


def _mean_in_flight(aggregations: Sequence[PlannedAggregation], begin: float, end: float) -> float:
    """Return the mean number of jobs in flight in a period of virtual time.

    begin, end: the period, in virtual seconds.
    """
    if end <= begin:
        return 0.0
    jobs = [job for aggregation in aggregations for job in aggregation.dispatched]
    start = np.clip([job.start for job in jobs], begin, end)
    finish = np.clip([job.finish for job in jobs], begin, end)
    return float((finish - start).sum() / (end - begin))


def workers_busy(
    aggregations: Sequence[PlannedAggregation], workers: int, plans_ahead: bool = True
) -> float:
    """Return the share of wall time in which workers would work, from 0 to 1.

    It is assumed that every worker needs the same time for a sample. Workers train the jobs of the
    next aggregation first. A job whose update is never aggregated is not trained.
    plans_ahead: False lets a job begin only after the aggregation before its own. True lets it
    begin when its base version exists.
    """
    aggregation_of: dict[int, int] = {}  # by number of the job
    for aggregation in aggregations:
        for job in aggregation.aggregated:
            aggregation_of[job.number] = aggregation.version
    left = [len(aggregation.aggregated) for aggregation in aggregations]
    # Jobs that can begin: a heap by aggregation, finish and client, with the work.
    ready: list[tuple[int, float, int, float]] = []
    running: list[tuple[float, int]] = []  # heap by wall time at the end
    now, worked = 0.0, 0.0
    version, last_dispatched = 0, -1
    while version < len(aggregations):
        if last_dispatched < version:
            last_dispatched = version
            planned = aggregations[version]
            for job in planned.dispatched if plans_ahead else planned.aggregated:
                target = aggregation_of.get(job.number)
                if target is not None:
                    heapq.heappush(ready, (target, job.finish, job.client, job.work))
        while ready and len(running) < workers:
            target, _, _, work = heapq.heappop(ready)
            heapq.heappush(running, (now + work, target))
            worked += work
        if left[version]:
            now, target = heapq.heappop(running)
            left[target] -= 1
        else:
            version += 1
    return worked / (workers * now) if now else 0.0
