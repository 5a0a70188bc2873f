"""The cost of checkpoints and client states: of W1, of 10,000 clients with a state, and of states beyond memory.

    uv run python -m jobs.benchmarks.states --clients 10000

Writes checkpoints of W1, and of a run of 10,000 clients with W2's model and SCAFFOLD after rounds that touched some of
them. Then it trains such clients within a memory budget and without one, and at last `--clients` of them within 1 GiB,
which takes as much disk space as their states need (100,000 clients: 18 GB).
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from jobs.benchmarks.arguments import parser, read
from jobs.command import run
from raysim.api.declarations import Evaluation, Local
from raysim.api.messages import Arrays
from raysim.commands.bench.loops import WORKLOADS, source_of, spec_of as spec_of_loop
from raysim.data.federated import federate
from raysim.data.partition import CSR, IID, Partition
from raysim.data.sources import Synthetic
from raysim.methods.scaffold import Scaffold
from raysim.primitives.memory import peak_memory_bytes
from raysim.primitives.streams import stream
from raysim.results.history import write_json
from raysim.runtime import inprocess
from raysim.simulation.checkpoint import Checkpoints, Snapshot
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Event, Round, Saved
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.simulation.state_log import StatesByClient
from raysim.training.run_spec import Checkpoint, RunSettings, RunSpec, StateBudget, build_networks
from raysim.training.worker import Worker

COHORT, SAMPLES = 100, 60  # clients a round and samples a client, as in W2
CLIENTS, TOUCHED = 10_000, (0, 10, 100, 1000)
FEW, ROUNDS, SHARE = (
    1000,
    40,
    0.1,
)  # the run beside which the same one keeps so much of its states in memory
BUDGET = 1.0  # GiB, of the run of very many clients


@dataclass(frozen=True)
class Written:
    """Checkpoints: seconds and CPU seconds (medians), bytes of new states; seconds of a round, where there was one."""

    what: str
    seconds: float
    cpu: float
    states: int
    round_seconds: float | None = None


@dataclass(frozen=True)
class Trained:
    """A run of clients with a state. seconds, cpu: a round; memory: the process's peak; spilled: bytes on disk."""

    clients: int
    budget: float | None
    rounds: int
    seen: int
    seconds: float
    cpu: float
    memory: int
    spilled: int


# --- checkpoints ----------------------------------------------------------------------------------------------------
def workload(root: str | None, rounds: int) -> Written:
    """W1 in this process with a checkpoint after every round."""
    work = WORKLOADS["W1"]
    spec = spec_of_loop(work, source_of(work, root))
    spec = replace(
        spec, settings=replace(spec.settings, rounds=rounds + 1, checkpoint=Checkpoint(1))
    )
    with tempfile.TemporaryDirectory(dir=".") as folder:
        marks = list(_marked(inprocess.run(spec, Synchronous(work.cohort), Ideal(), folder)))
    saves = [
        (after - before, cpu - cpu_before)
        for (_, before, cpu_before), (event, after, cpu) in _pairs(marks, Saved)
    ]
    trained = [after - before for (_, before, _), (event, after, _) in _pairs(marks, Round)]
    seconds, cpu = (statistics.median(column) for column in zip(*saves, strict=True))
    return Written("W1", seconds, cpu, 0, statistics.median(trained[1:]))


def _marked(events: Iterator[Event]) -> Iterator[tuple[Event, float, float]]:
    for event in events:
        yield event, time.perf_counter(), time.process_time()


def _pairs(
    marks: list[tuple[Event, float, float]], kind: type[Event]
) -> list[tuple[tuple[Event, float, float], ...]]:
    """Each event of a kind and the one before it."""
    return [(one, other) for one, other in itertools.pairwise(marks) if isinstance(other[0], kind)]


def touched(clients: int, count: int, blocks: int) -> Written:
    """Checkpoints of a run in which every client has a state of W2's model, and so many took part since the last."""
    state: Arrays = {
        "scaffold.control": np.ones(build_networks(many(FEW, 1, None))[1].shared, np.float32)
    }
    jobs = dict.fromkeys(range(clients), 0)
    states = StatesByClient(jobs, lambda client: state)
    rng, times = stream(0, "bench"), []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        run = Checkpoints(folder)
        run.write(0, Snapshot({"rows": []}, state, states, jobs))
        for version in range(1, blocks + 1):
            jobs |= dict.fromkeys(rng.choice(clients, count, replace=False).tolist(), version)
            before = time.perf_counter(), time.process_time()
            run.write(version, Snapshot({"rows": []}, state, states, jobs))
            times.append((time.perf_counter() - before[0], time.process_time() - before[1]))
    seconds, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    nbytes = count * sum(array.nbytes for array in state.values())
    return Written(f"{count:,} of {clients:,} clients", seconds, cpu, nbytes)


# --- states beyond memory -------------------------------------------------------------------------------------------
def many(clients: int, rounds: int, budget: float | None) -> RunSpec:
    """SCAFFOLD on W2's model; clients share the 60,000 samples of which everyone has 60."""
    work = WORKLOADS["W2"]
    few = federate(Synthetic(shape=[1, 28, 28], samples=60_000, test_samples=10), IID(clients=2), 0)
    offsets = np.arange(clients + 1, dtype=np.int64) * SAMPLES
    train = CSR(np.arange(offsets[-1]) % 60_000, offsets)
    data = replace(
        few,
        partition=Partition(train, CSR(np.empty(0, np.int64), np.zeros_like(offsets))),
        central=np.empty(0, np.int64),
    )
    settings = RunSettings(
        rounds=rounds,
        local=Local(lr=0.01, epochs=1, batch=work.batch),
        evaluate=Evaluation(every=10**9),
        checkpoint=Checkpoint(0),
        state=StateBudget(budget),
    )
    return RunSpec(work.model, (Scaffold(),), data, settings)


def _train(clients: int, rounds: int, budget: float | None) -> Trained:
    """In a process of its own, whose peak of memory is the run's."""
    spec = many(clients, rounds, budget)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        run = Coordinator(
            spec, Synchronous(COHORT), Ideal(), inprocess.InProcess(Worker(spec)), folder
        )
        marks = list(
            itertools.islice(
                (mark for mark in _marked(run.run()) if isinstance(mark[0], Round)), rounds
            )
        )
        (_, begun, cpu_begun), (_, ended, cpu_ended) = marks[0], marks[-1]
        cost = (ended - begun) / (rounds - 1), (cpu_ended - cpu_begun) / (rounds - 1)
        seen, spilled = len(run.client_states.accepted_jobs), run.client_states.spilled_bytes
    return Trained(clients, budget, rounds, seen, *cost, peak_memory_bytes(), spilled)


def train(clients: int, rounds: int, budget: float | None) -> Trained:
    """See `Trained`."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_train, (clients, rounds, budget))


def bench(
    root: str | None, out: Path, blocks: int, clients: int, say: Callable[[str], None]
) -> None:
    """Measure all of it, say what was found, write `out`."""
    written = [workload(root, blocks)]
    every = 100 * written[0].seconds / (10 * (written[0].round_seconds or 1))
    say(
        f"W1: a checkpoint takes {written[0].seconds:.3f} s (CPU {written[0].cpu:.3f}), every 10 rounds {every:.2f} %"
    )
    for count in (*TOUCHED, CLIENTS):
        written.append(touched(CLIENTS, count, blocks))
        say(
            f"{written[-1].what}: {written[-1].seconds:.3f} s (CPU {written[-1].cpu:.3f}), {written[-1].states:,} bytes"
        )
    size = 4 * build_networks(many(FEW, 1, None))[1].shared
    pairs = []
    for _ in range(blocks):
        pairs.append([train(FEW, ROUNDS, budget) for budget in (None, SHARE * FEW * size / 2**30)])
        ratios = [within.cpu / free.cpu for free, within in pairs]
        say(
            f"{FEW:,} clients, a tenth in memory: CPU {ratios[-1]:.2f} of the same run without a budget"
        )
    say(f"median {statistics.median(ratios):.2f}")
    runs = [run for pair in pairs for run in pair]
    if clients:
        runs.append(train(clients, clients // (COHORT // 2), BUDGET))
        say(f"{clients:,} clients within {BUDGET:g} GiB: {runs[-1]}")
    write_json(
        {
            "blocks": blocks,
            "written": [asdict(each) for each in written],
            "runs": [asdict(r) for r in runs],
        },
        out,
    )


def main() -> None:
    """Run the benchmark with the options of the command line."""
    options = parser(__doc__)
    options.add_argument(
        "--data", metavar="DIR", help="the folder of FashionMNIST; downloaded if missing"
    )
    options.add_argument(
        "--clients",
        type=int,
        default=100_000,
        help="clients of the run beyond memory (100000; 0: none)",
    )
    given = read(options)
    bench(given.data, given.out, given.blocks, given.clients, print)


if __name__ == "__main__":
    run(main)
