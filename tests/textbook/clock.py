"""The virtual clock by hand: which clients are dispatched when, and which updates are aggregated.

The schedule is synchronous rounds, or a buffer of `size` updates with `concurrency` clients in
flight (Nguyen et al. 2022, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from raysim.primitives.streams import stream


@dataclass
class FlyingJob:
    """A job in flight on the virtual clock.

    number: the number of the job in the run.
    turn: how many jobs the client had before.
    finish: the virtual time in seconds at which the job ends.
    """

    number: int
    client: int
    turn: int
    version: int  # The version that it received.
    finish: float
    staleness: int = 0  # At its aggregation.


@dataclass
class Aggregated:
    """The state right after an aggregation.

    taken: the aggregated jobs.
    waiting: the arrived jobs that are not aggregated yet, in order.
    running: the jobs in flight.
    cohorts: how many times clients were drawn so far.
    sent, arrivals: how many jobs were dispatched and have arrived so far.
    turns: each client's number of dispatched jobs.
    """

    time_s: float
    taken: list[FlyingJob]
    waiting: list[FlyingJob]
    running: list[FlyingJob]
    cohorts: int
    sent: int
    arrivals: int
    turns: dict[int, int] = field(default_factory=dict)


def timetable(
    seed: int,
    counts: Sequence[int],
    rounds: int,
    seconds: Callable[[int], float],
    concurrency: int,
    size: int,
    synchronous: bool,
) -> list[Aggregated]:
    """Return the state after each aggregation of a run on the virtual clock.

    counts: each client's number of training samples. A client without samples is never dispatched.
    rounds: the number of aggregations.
    seconds(client): the duration of a job.
    concurrency: the largest number of jobs in flight.
    size: the number of updates in an aggregation.
    synchronous: True draws clients and aggregates only while no job is in flight.
    """
    able = [client for client, count in enumerate(counts) if count]
    running, waiting = list[FlyingJob](), list[FlyingJob]()
    aggregations = list[Aggregated]()
    time_s, cohorts, sent, arrivals, turns = 0.0, 0, 0, 0, dict[int, int]()
    while True:
        while len(waiting) >= size and not (synchronous and running):
            taken, waiting = waiting[:size], waiting[size:]
            for job in taken:
                job.staleness = len(aggregations) - job.version
            aggregations.append(
                Aggregated(
                    time_s,
                    taken,
                    list(waiting),
                    [replace(job) for job in running],
                    cohorts,
                    sent,
                    arrivals,
                    dict(turns),
                )
            )
            if len(aggregations) == rounds:
                return aggregations
        idle = [client for client in able if client not in {job.client for job in running}]
        free = min(concurrency - len(running), len(idle))
        if free and not (synchronous and running):
            drawn = draw(stream(seed, "cohort", cohorts), able, idle, free)
            cohorts += 1
            for client in drawn:
                job = FlyingJob(
                    sent, client, turns.get(client, 0), len(aggregations), time_s + seconds(client)
                )
                running.append(job)
                turns[client] = job.turn + 1
                sent += 1
        time_s = min(job.finish for job in running)
        arrived = sorted(
            (job for job in running if job.finish == time_s), key=lambda job: job.client
        )
        running = [job for job in running if job.finish != time_s]
        waiting += arrived
        arrivals += len(arrived)


def draw(
    generator: np.random.Generator, able: Sequence[int], idle: Sequence[int], count: int
) -> list[int]:
    """Return `count` of the idle clients, in ascending order.

    If all clients are idle, `count` clients are drawn at once. Otherwise, positions in `able` are
    drawn in groups that double in size, until enough idle clients are among them. After a group
    with which at least max(16 * count, len(able)) positions are drawn, missing clients are drawn
    from the remaining idle ones.

    able: all clients with samples.
    """
    if len(idle) == len(able):
        return sorted(
            able[place] for place in generator.choice(len(able), size=count, replace=False)
        )
    drawn: list[int] = []
    size, left = 2 * count, max(16 * count, len(able))
    while left > 0:
        for place in generator.integers(len(able), size=size):
            if able[place] in idle and able[place] not in drawn:
                drawn.append(able[place])
            if len(drawn) == count:
                return sorted(drawn)
        left, size = left - size, 2 * size
    rest = [client for client in idle if client not in drawn]
    return sorted(
        [*drawn, *generator.choice(rest, size=count - len(drawn), replace=False).tolist()]
    )


def lognormal_seconds(
    seed: int,
    clients: int,
    client: int,
    samples: float,
    floats: int,
    speed: float,
    down: float,
    up: float,
    sigma: float,
    network_sigma: float,
) -> float:
    """Return the seconds in which a client receives the model, trains and sends its update.

    samples: the number of samples on which the job trains.
    floats: the number of float32 parameters.
    speed, down, up: a typical client's samples per second, and bytes per second in each direction.
    sigma, network_sigma: the standard deviations of the logarithms of speed and bandwidth.
    """
    of_speed, of_network = stream(seed, "fleet").standard_normal((clients, 2))[client]
    network = np.exp(network_sigma * of_network)
    return float(
        4 * floats / (down * network)
        + 4 * floats / (up * network)
        + samples / (speed * np.exp(sigma * of_speed))
    )
