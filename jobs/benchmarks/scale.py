"""The coordinator's own cost of a round: a simulated fleet of workers returns ready-made sums at once.

    uv run python -m jobs.benchmarks.scale --blocks 3

Measures the planner (`jobs.benchmarks.planner`), then runs the real coordinator, dispatcher and server, in one process
and over Ray, and prints the seconds of a job, a summed float, a call and a byte. `jobs/README.md` says what follows
from them for a large cluster.
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
from raysim.results.history import write_json
from raysim.results.tables import format_table, terminal_width, text_columns
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal, Lognormal
from raysim.simulation.runtime import Runtime
from raysim.simulation.schedule import Immediate, Synchronous
from raysim.training.combiner import Combiner
from raysim.training.run_spec import RunSettings, RunSpec, build_networks

HOSTS = 64
PER_HOST = 4  # groups that each worker sums, so that workers finish together
SMALL, LARGE = (16,), (900, 1024)  # widths: 1,210 and 991,374 floats
DEFAULT = 5  # updates to a sum where `summation` is not set


@dataclass(frozen=True)
class Case:
    """A cohort, how many updates a worker sums into one, the model's widths, the fleet, and where workers are.

    alone: whether every result is an aggregation, and travels alone, with so many clients at work on two workers.
    """

    clients: int
    group: int
    widths: tuple[int, ...] = SMALL
    fleet: str = "ideal"
    ray: bool = False
    alone: bool = False

    @property
    def jobs(self) -> int:
        """In an aggregation."""
        return 1 if self.alone else self.clients


@dataclass(frozen=True)
class Cost:
    """Of an aggregation. arrays: sums and updates of `floats` floats that came in a round; cpu: seconds of the
    coordinator's process; memory: the peak of its resident set so far, in bytes."""

    case: Case
    floats: int
    arrays: int
    seconds: float
    cpu: float
    memory: int


def cases() -> list[Case]:
    """Ascending in memory, so that a peak is that of its own row."""
    cohorts = {clients: summation(clients) for clients in (1_000, 10_000, 100_000)}
    cases = []
    for clients, group in cohorts.items():
        cases += [
            Case(clients, group),
            Case(clients, group, fleet="lognormal"),
            Case(clients, group, LARGE),
        ]
    cases += [Case(clients, DEFAULT, LARGE) for clients in (1_000, 10_000)]
    cases += [Case(clients, group, ray=True) for clients, group in cohorts.items()]
    cases += [Case(256, 4, LARGE, ray=True), Case(256, 1, LARGE, ray=True)]
    return [*cases, *(Case(10, 1, fleet="lognormal", ray=ray, alone=True) for ray in (False, True))]


def summation(clients: int) -> int:
    """So many updates to a sum that every worker makes as many sums."""
    return math.ceil(clients / (HOSTS * PER_HOST))


# --- the fleet ------------------------------------------------------------------------------------------------------
class Ready(Combiner):
    """A worker that trains nothing: it returns updates without content and sums that are ready, at once."""

    def __init__(self, spec: RunSpec, name: str = "worker-0"):
        self.name, self._counts = name, spec.data.partition.train.counts
        shared = build_networks(spec)[1].shared
        count = max(2, min(16, (1 << 26) // shared))  # more than a cache holds
        self._arrays = [np.full(shared, 1e-9, np.float32) for _ in range(count)]  # written
        self._next = 0

    def ready(self) -> str:
        """See `Worker`."""
        return self.name

    def train(
        self,
        jobs: Sequence[Job],
        groups: Sequence[tuple[int, ...]],
        versions: int,
        *published: PublishedVersion,
    ) -> TrainingResult:
        """See `Worker`."""
        summed = {number for group in groups for number in group}
        updates = tuple(self._update(job, alone=job.number not in summed) for job in jobs)
        return TrainingResult(updates, {group: self._array() for group in groups}, self.name)

    def _update(self, job: Job, alone: bool) -> Update:
        samples = int(self._counts[job.client])
        known = (
            job.number,
            job.client,
            job.version,
            samples,
            samples,
            1,
            0.0,
            0.0,
            np.empty(0, np.int64),
        )
        return Update(*known, delta=self._array() if alone else None)

    def _array(self) -> np.ndarray:
        self._next = (self._next + 1) % len(self._arrays)
        return self._arrays[self._next][:]  # a view, which travels as a whole


class Long(Ready):
    """The same; it says that every job has taken it a second, so that nobody waits for a second one to send both."""

    def train(
        self,
        jobs: Sequence[Job],
        groups: Sequence[tuple[int, ...]],
        versions: int,
        *published: PublishedVersion,
    ) -> TrainingResult:
        """See `Worker`."""
        return replace(super().train(jobs, groups, versions, *published), busy=float(len(jobs)))


class Fleet:
    """So many workers for a coordinator, behind which there may be fewer."""

    combine_from, is_in_process = math.inf, False

    def __init__(self, few: Runtime, workers: int):
        self._few, self.put, self.revive = few, few.put, few.revive
        self.workers, self.nodes = workers, (0,) * workers
        self.arrays = 0

    def call(self, worker: int, method: str, *args: object, returns: int = 1) -> list[Any]:
        """See `Runtime`."""
        return self._few.call(worker % self._few.workers, method, *args, returns=returns)

    def ready(self, refs: Sequence[Any], seconds: float) -> int | None:
        """See `Runtime`."""
        return self._few.ready(refs, seconds)

    def get(self, ref: Any) -> Any:
        """See `Runtime`."""
        if isinstance(value := self._few.get(ref), TrainingResult):
            alone = sum(
                isinstance(update, Update) and update.delta is not None for update in value.updates
            )
            self.arrays += len(value.sums) + alone
        return value


# --- what is measured -----------------------------------------------------------------------------------------------
def spec_of(case: Case, settings: RunSettings) -> RunSpec:
    """Twice as many clients as take part, of 5 to 15 samples that nobody reads."""
    few = federate(Synthetic(shape=[1, 8, 8], samples=100, test_samples=10), IID(clients=2), 0)
    offsets = np.concatenate([[0], np.cumsum(5 + np.arange(2 * case.clients) * 7 % 11)])
    train, test = (
        CSR(np.zeros(offsets[-1], np.int64), offsets),
        CSR(np.empty(0, np.int64), np.zeros_like(offsets)),
    )
    data = replace(few, partition=Partition(train, test), central=np.empty(0, np.int64))
    return RunSpec(Mlp(case.widths), (), data, settings)


def measure(case: Case, rounds: int) -> Cost:
    """Medians of so many rounds, on the Ray that is connected if the case says so.

    From one aggregation to the next, without the first round, and without the last, after which nothing is dispatched;
    where results come alone means over a hundred times as many.
    """
    evaluate = Evaluation(every=10**9)
    rounds *= 100 if case.alone else 1
    kind = Long if case.alone else Ready
    spec = spec_of(case, RunSettings(rounds=rounds + 2, summation=case.group, evaluate=evaluate))
    few: Any = InProcess(*(kind(spec) for _ in range(2 if case.alone else 1)))
    if case.ray:
        from raysim.runtime.ray import start_workers

        few = start_workers(spec, 2, kind)
    times = Lognormal() if case.fleet == "lognormal" else Ideal()
    schedule = Immediate(case.clients) if case.alone else Synchronous(case.clients)
    coordinator = Coordinator(
        spec, schedule, times, fleet := Fleet(few, 2 if case.alone else HOSTS)
    )
    try:
        marks = [
            (time.perf_counter(), time.process_time())
            for event in coordinator.run()
            if isinstance(event, Round)
        ]
    finally:
        if case.ray:
            few.stop()
    steps = np.diff(np.array(marks), axis=0)[:-1]
    middle = statistics.mean if case.alone else statistics.median
    seconds, cpu = (middle(column) for column in steps.T.tolist())
    return Cost(
        case,
        coordinator.layout.shared,
        fleet.arrays // (rounds + 2),
        seconds,
        cpu,
        peak_memory_bytes(),
    )


def bench(out: Path, rounds: int, say: Callable[[str], None]) -> list[Cost]:
    """Measure all cases, print a table, write `out`."""
    from jobs.benchmarks import planner
    from raysim.runtime import ray as cluster

    torch.set_num_threads(1)
    planned = planner.bench(say)
    costs: list[Cost] = []
    mine = False
    try:
        for case in cases():
            if case.ray:
                mine = cluster.connect(cluster.RayOptions()) or mine
            costs.append(measure(case, rounds))
            say(f"{case}: {costs[-1].seconds:.3f} s a round")
    finally:
        if mine:
            cluster.disconnect()
    rows = []
    for cost in costs:
        case = cost.case
        place = "Ray" if case.ray else "here"
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
        "in one",
        "workers",
        "fleet",
        "floats",
        "arrays",
        "s",
        "CPU s",
        "us a job",
        "GB",
    )
    say(f"an aggregation of {HOSTS} workers that cost nothing; medians of {rounds}")
    say(format_table(text_columns(head, rows), terminal_width()))
    write_json(
        {
            "rounds": rounds,
            **planned,
            "workers": HOSTS,
            "results": [asdict(cost) for cost in costs],
        },
        out,
    )
    return costs


def main() -> None:
    """Run the benchmark with the options of the command line."""
    given = read(parser(__doc__))
    bench(given.out, given.blocks, print)


if __name__ == "__main__":
    run(main)
