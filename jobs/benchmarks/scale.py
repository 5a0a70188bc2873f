"""Measure the coordinator's cost of a round with workers that return prepared sums or updates.

    uv run python -m jobs.benchmarks.scale --blocks 3

The command begins with the measurements of `jobs.benchmarks.planner`. `--blocks` is the number of
measured aggregations of a case.
If the aggregations of a case have only one update, 100 times as many are measured.
`jobs/README.md` derives the limits of a large cluster from the results.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.benchmarks.arguments import parser, read
from jobs.command import run
from raysim.api.declarations import Evaluation
from raysim.api.messages import Job, PublishedVersion, TrainingResult, Update
from raysim.data.federated import federate
from raysim.data.partition import CSR, IID, Partition
from raysim.data.sources import Synthetic
from raysim.models import Mlp
from raysim.primitives.memory import peak_memory_bytes
from raysim.primitives.output import terminal_width
from raysim.results.history import write_json
from raysim.results.tables import format_table, text_columns
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.runtime import Runtime
from raysim.simulation.schedule import Immediate, Synchronous
from raysim.training.run_spec import RunSettings, RunSpec, build_networks
from raysim.training.worker_sums import SeparateSums

WORKERS = 64
SMALL, LARGE = (16,), (900, 1024)  # widths: 1,210 and 991,374 floats


@dataclass(frozen=True)
class Case:
    """A setting to measure.

    clients: the number of clients that train at the same time.
    widths: the widths of the model's hidden layers.
    fleet: "ideal" or "lognormal".
    ray: True starts the workers on Ray; False creates them as objects in this process.
    alone: True aggregates each update as soon as it arrives, and uses two workers.
    """

    clients: int
    widths: tuple[int, ...] = SMALL
    fleet: str = "ideal"
    ray: bool = False
    alone: bool = False

    @property
    def jobs(self) -> int:
        """Return the number of jobs in an aggregation."""
        return 1 if self.alone else self.clients


@dataclass(frozen=True)
class AggregationCost:
    """The cost of an aggregation.

    floats: the number of floats in each received array.
    arrays: the number of received sums and updates.
    seconds, cpu: wall and CPU seconds of the coordinator's process.
    memory: the process's peak memory so far, in bytes.
    """

    case: Case
    floats: int
    arrays: int
    seconds: float
    cpu: float
    memory: int


def cases() -> list[Case]:
    """Return all cases, in the order in which they are measured."""
    # A measured peak is that of the whole process so far. In this order, it belongs to its case.
    cohorts = (1_000, 10_000, 100_000)
    cases = []
    for clients in cohorts:
        cases += [Case(clients), Case(clients, fleet="lognormal"), Case(clients, LARGE)]
    cases += [Case(clients, ray=True) for clients in cohorts]
    cases.append(Case(256, LARGE, ray=True))
    return [*cases, *(Case(10, fleet="lognormal", ray=ray, alone=True) for ray in (False, True))]


# --- the simulated workers ------------------------------------------------------------------------
class ReadyWorker(SeparateSums):
    """A worker that immediately returns prepared vectors, without training.

    All values of the vectors are 1e-9.
    """

    def __init__(self, spec: RunSpec, name: str = "worker-0"):
        self.name, self._counts = name, spec.data.partition.train.counts
        shared = build_networks(spec)[1].shared
        count = max(2, min(16, (1 << 26) // shared))  # more than fit into a cache
        self._arrays = [np.full(shared, 1e-9, np.float32) for _ in range(count)]
        self._next = 0

    def ready(self) -> str:
        """Return the worker's name, as a sign that the worker has started."""
        return self.name

    def train(
        self,
        jobs: Sequence[Job],
        groups: Sequence[tuple[int, ...]],
        versions: int,
        *published: PublishedVersion,
    ) -> TrainingResult:
        """Return an update for each job and a sum for each group, without training.

        All vectors are filled with 1e-9. The update of a job in a group has no vector.
        groups: the numbers of the jobs in each group.
        """
        summed = {number for group in groups for number in group}
        updates = tuple(self._update(job, alone=job.number not in summed) for job in jobs)
        return TrainingResult(updates, {group: self._array() for group in groups}, self.name)

    def _update(self, job: Job, alone: bool) -> Update:
        samples = int(self._counts[job.client])
        counters = np.empty(0, np.int64)
        delta = self._array() if alone else None
        facts = (job.number, job.client, job.version, samples, samples, 1, 0.0, 0.0)
        return Update(*facts, counters, delta=delta)

    def _array(self) -> np.ndarray:
        self._next = (self._next + 1) % len(self._arrays)
        return self._arrays[self._next][:]  # a new view of the prepared array


class SlowWorker(ReadyWorker):
    """A worker that reports a training time of one second for every job.

    Because of this time, the dispatcher sends only one job in a call.
    """

    def train(
        self,
        jobs: Sequence[Job],
        groups: Sequence[tuple[int, ...]],
        versions: int,
        *published: PublishedVersion,
    ) -> TrainingResult:
        """Return prepared updates; report one second of working time for each job.

        The arguments and the prepared updates are those of `ReadyWorker.train`.
        """
        return replace(super().train(jobs, groups, versions, *published), busy=float(len(jobs)))


class ManyWorkers:
    """A runtime that shows the coordinator many workers but has only a few real workers.

    Each real worker does the work of several shown workers.
    workers_inside: the runtime of the real workers.
    workers: the number of shown workers.
    """

    combine_from, is_in_process = math.inf, False

    def __init__(self, workers_inside: Runtime, workers: int):
        self._inner = workers_inside
        self.put, self.revive = workers_inside.put, workers_inside.revive
        self.explain_death = workers_inside.explain_death
        self.add_up, self.node_name = workers_inside.add_up, workers_inside.node_name
        self.find_lost_workers = workers_inside.find_lost_workers
        self.silent_node_timeout = workers_inside.silent_node_timeout
        self.stacks = workers_inside.stacks
        self.release = workers_inside.release
        self.take_new_workers = workers_inside.take_new_workers
        self.take_notices = workers_inside.take_notices
        self.workers, self.nodes = workers, (0,) * workers
        self.arrays = 0

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """Call a method of a shown worker; a real worker executes the call.

        Return references to the values that the method returns.
        worker: the number of the shown worker. The number of the real worker is the remainder of
        `worker` divided by the number of real workers.
        """
        return self._inner.call(worker % self._inner.workers, method, *args, returns=returns)

    def ready(self, refs: Sequence[Any], seconds: float) -> int | None:
        """Wait until one of several values exists or is lost; return its index in `refs`.

        Return None if nothing happens within `seconds` seconds.
        refs: references to the values.
        """
        return self._inner.ready(refs, seconds)

    def get(self, ref: Any) -> Any:
        """Wait for a value and return it; count the arrays that it contains.

        ref: the reference to the value.
        """
        value = self._inner.get(ref)
        if isinstance(value, TrainingResult):
            updates = [update for update in value.updates if isinstance(update, Update)]
            single = sum(update.delta is not None for update in updates)
            self.arrays += len(value.sums) + single
        return value


# --- the measurement -----------------------------------------------------------------------------
def spec_of(case: Case, settings: RunSettings) -> RunSpec:
    """Return a run with twice as many clients as the case, each with 5 to 15 samples."""
    workers_inside = federate(
        Synthetic(shape=[1, 8, 8], samples=100, test_samples=10), IID(clients=2), 0
    )
    offsets = np.concatenate([[0], np.cumsum(5 + np.arange(2 * case.clients) * 7 % 11)])
    train, test = (
        CSR(np.zeros(offsets[-1], np.int64), offsets),
        CSR(np.empty(0, np.int64), np.zeros_like(offsets)),
    )
    data = replace(workers_inside, partition=Partition(train, test), central=np.empty(0, np.int64))
    return RunSpec(Mlp(case.widths), (), data, settings)


def measure(case: Case, rounds: int) -> AggregationCost:
    """Run the coordinator for a case; return the cost of one aggregation.

    The seconds are medians over `rounds` aggregations. If `case.alone` is True, they are means over
    100 * `rounds` aggregations. If `case.ray` is True, Ray must be running.
    """
    evaluate = Evaluation(every=10**9)
    rounds *= 100 if case.alone else 1
    kind = SlowWorker if case.alone else ReadyWorker
    spec = spec_of(case, RunSettings(rounds=rounds + 2, evaluate=evaluate))
    workers_inside: Any = InProcess(*(kind(spec) for _ in range(2 if case.alone else 1)))
    if case.ray:
        from raysim.runtime.ray import start_workers

        workers_inside = start_workers(spec, 2, kind)
    times = Lognormal() if case.fleet == "lognormal" else Ideal()
    schedule = Immediate(case.clients) if case.alone else Synchronous(case.clients)
    coordinator = Coordinator(
        spec, schedule, times, fleet := ManyWorkers(workers_inside, 2 if case.alone else WORKERS)
    )
    try:
        marks = [
            (time.perf_counter(), time.process_time())
            for event in coordinator.run()
            if isinstance(event, Round)
        ]
    finally:
        if case.ray:
            workers_inside.stop()
    steps = np.diff(np.array(marks), axis=0)[:-1]
    middle = statistics.mean if case.alone else statistics.median
    seconds, cpu = (middle(column) for column in steps.T.tolist())
    return AggregationCost(
        case,
        coordinator.layout.shared,
        fleet.arrays // (rounds + 2),
        seconds,
        cpu,
        peak_memory_bytes(),
    )


def bench(out: Path, rounds: int, say: Callable[[str], None]) -> list[AggregationCost]:
    """Measure the planner and all cases; print a table, and write the JSON file `out`.

    Return the cost of one aggregation for each case.
    rounds: the number of measured aggregations of each case. If the aggregations of a case have
    only one update, 100 times as many are measured.
    """
    from jobs.benchmarks import planner
    from raysim.runtime import ray as cluster

    torch.set_num_threads(1)
    planned = planner.bench(say)
    costs: list[AggregationCost] = []
    mine = False
    try:
        for case in cases():
            if case.ray:
                mine = cluster.connect(cluster.RayOptions()) or mine
            costs.append(measure(case, rounds))
            workers = "on Ray" if case.ray else "in-process"
            say(
                f"{case.clients:,} clients in flight, fleet={case.fleet}, workers {workers}: an "
                f"aggregation of {case.jobs:,} updates of {costs[-1].floats:,} floats takes "
                f"{costs[-1].seconds:.3g} s"
            )
    finally:
        if mine:
            cluster.disconnect()
    rows = []
    for cost in costs:
        case = cost.case
        place = "Ray" if case.ray else "in-process"
        seconds = (cost.seconds, cost.cpu, cost.cpu / case.jobs * 1e6, cost.memory / 1e9)
        counts = (
            f"{case.clients:,}",
            f"{case.jobs:,}",
            place,
            case.fleet,
            f"{cost.floats:,}",
            f"{cost.arrays:,}",
        )
        rows.append((*counts, *(f"{number:.3g}" for number in seconds)))
    head = (
        "clients",
        "jobs",
        "workers",
        "fleet",
        "floats",
        "arrays",
        "wall s",
        "CPU s",
        "CPU µs per job",
        "peak GB",
    )
    say(
        "time and memory of the coordinator for one aggregation, with workers that do not train. "
        f"Rows with several jobs: {WORKERS} workers, median time of {rounds} aggregations. Rows "
        f"with 1 job: 2 workers, mean time of {100 * rounds} aggregations"
    )
    say(format_table(text_columns(head, rows), terminal_width()))
    write_json(
        {
            "rounds": rounds,
            **planned,
            "workers": WORKERS,
            "results": [asdict(cost) for cost in costs],
        },
        out,
    )
    return costs


def main() -> None:
    """Measure the planner, and the coordinator's time and memory for an aggregation.

    The results are printed as tables, and written to the JSON file of the option `--out`.
    """
    arguments = read(parser(__doc__))
    bench(arguments.out, arguments.blocks, print)


if __name__ == "__main__":
    run(main)
