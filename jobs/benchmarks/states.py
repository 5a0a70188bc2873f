"""Measure the cost of checkpoints and of client states, in memory and on disk.

    uv run python -m jobs.benchmarks.states --clients 10000

The benchmark measures:

1. Checkpoints of the workload W1 of `raysim bench`, and of 10,000 clients with states of SCAFFOLD.
2. A run of 1,000 clients with SCAFFOLD and the model of the workload W2: once with all client
   states in memory, and once with nine tenths on disk.
3. Such a run of `--clients` clients, with at most 1 GiB of states in memory. 100,000 clients need
   16.5 GB on the disk.
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

COHORT, SAMPLES = 100, 60  # clients per round and samples per client, as in the workload W2
CLIENTS = 10_000
CHANGED = (0, 10, 100, 1000)  # clients whose states changed since the last checkpoint
# The run that is compared with and without a budget: clients, rounds, share of states in memory.
FEW, ROUNDS, SHARE = 1000, 40, 0.1
BUDGET = 1.0  # GiB, for the run of `--clients`


@dataclass(frozen=True)
class CheckpointCost:
    """The median cost of a checkpoint.

    what: a text about its content.
    seconds, cpu: wall and CPU seconds of writing.
    states: bytes of the client states that changed since the last checkpoint.
    round_seconds: wall seconds of a round between two checkpoints; None without training.
    """

    what: str
    seconds: float
    cpu: float
    states: int
    round_seconds: float | None = None


@dataclass(frozen=True)
class StateRunCost:
    """The cost of a run whose clients have states.

    budget: the limit of client states in memory, in GiB; None for no limit.
    seen: the number of clients that took part.
    seconds, cpu: wall and CPU seconds of a round.
    memory: peak bytes of the process.
    spilled: bytes of client states on disk.
    """

    clients: int
    budget: float | None
    rounds: int
    seen: int
    seconds: float
    cpu: float
    memory: int
    spilled: int


# --- checkpoints ----------------------------------------------------------------------------------
def workload_checkpoints(root: str | None, rounds: int) -> CheckpointCost:
    """Return the cost of a checkpoint in a run of the workload W1 of `raysim bench`.

    The run writes a checkpoint after each of its `rounds` + 1 rounds.
    root: the folder of Fashion-MNIST; None downloads it.
    """
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
    return CheckpointCost("W1", seconds, cpu, 0, statistics.median(trained[1:]))


def _marked(events: Iterator[Event]) -> Iterator[tuple[Event, float, float]]:
    for event in events:
        yield event, time.perf_counter(), time.process_time()


def _pairs(
    marks: list[tuple[Event, float, float]], kind: type[Event]
) -> list[tuple[tuple[Event, float, float], ...]]:
    """Return a pair for each event of a class: the directly preceding event, then the event.

    The preceding event may be of any class.
    marks: all events in order, each with its wall and CPU time.
    """
    pairs = itertools.pairwise(marks)
    return [(before, mark) for before, mark in pairs if isinstance(mark[0], kind)]


def changed_states(clients: int, count: int, blocks: int) -> CheckpointCost:
    """Return the median cost of a checkpoint in a run in which every client has a state.

    A state has the size of workload W2's model.
    count: the number of states that change before each checkpoint.
    blocks: the number of measured checkpoints.
    """
    state: Arrays = {
        "scaffold.control": np.ones(
            build_networks(stateful_run(FEW, 1, None))[1].shared, np.float32
        )
    }
    jobs = dict.fromkeys(range(clients), 0)
    states = StatesByClient(jobs, lambda client: state)
    rng, times = stream(0, "bench"), []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        run = Checkpoints(folder)
        run.write(0, Snapshot({"rows": []}, state, states, jobs))
        for version in range(1, blocks + 1):
            jobs |= dict.fromkeys(rng.choice(clients, count, replace=False).tolist(), version)
            before, cpu_before = time.perf_counter(), time.process_time()
            run.write(version, Snapshot({"rows": []}, state, states, jobs))
            times.append((time.perf_counter() - before, time.process_time() - cpu_before))
    seconds, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    nbytes = count * sum(array.nbytes for array in state.values())
    return CheckpointCost(f"{count:,} of {clients:,} clients", seconds, cpu, nbytes)


# --- states beyond memory -------------------------------------------------------------------------
def stateful_run(clients: int, rounds: int, budget: float | None) -> RunSpec:
    """Return a run of SCAFFOLD with the model of the workload W2 of `raysim bench`.

    Each client has 60 of 60,000 samples. A run of more than 1,000 clients uses samples repeatedly.
    budget: the limit of client states in memory, in GiB; None for no limit.
    """
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


def _train(clients: int, rounds: int, budget: float | None) -> StateRunCost:
    spec = stateful_run(clients, rounds, budget)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        runtime = inprocess.InProcess(Worker(spec))
        run = Coordinator(spec, Synchronous(COHORT), Ideal(), runtime, folder)
        round_marks = (mark for mark in _marked(run.run()) if isinstance(mark[0], Round))
        marks = list(itertools.islice(round_marks, rounds))
        (_, start, cpu_start), (_, end, cpu_end) = marks[0], marks[-1]
        cost = (end - start) / (rounds - 1), (cpu_end - cpu_start) / (rounds - 1)
        seen = len(run.client_states.committed_jobs)
        spilled = run.client_states.spilled_bytes
    return StateRunCost(clients, budget, rounds, seen, *cost, peak_memory_bytes(), spilled)


def train(clients: int, rounds: int, budget: float | None) -> StateRunCost:
    """Train `stateful_run` in a new process, so that the peak of memory is that of the run.

    budget: the limit of client states in memory, in GiB; None for no limit.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_train, (clients, rounds, budget))


def bench(
    root: str | None, out: Path, blocks: int, clients: int, say: Callable[[str], None]
) -> None:
    """Measure checkpoints and client states, print the results, and write them to `out`.

    root: the folder of Fashion-MNIST; None downloads it.
    blocks: the number of repetitions.
    clients: the clients of an additional large run; 0 makes no such run.
    say: gets a line for each measurement.
    """
    checkpoints = [workload_checkpoints(root, blocks)]
    first = checkpoints[0]
    share = 100 * first.seconds / (10 * (first.round_seconds or 1))
    say(
        f"writing a checkpoint of W1 (a workload of raysim bench) takes {first.seconds:.3f} s (CPU "
        f"time {first.cpu:.3f} s), which is {share:.2f} % of the time of 10 rounds"
    )
    for count in (*CHANGED, CLIENTS):
        cost = changed_states(CLIENTS, count, blocks)
        checkpoints.append(cost)
        say(
            f"writing a checkpoint takes {cost.seconds:.3f} s (CPU time {cost.cpu:.3f} s) if the "
            f"client states of {cost.what} have changed; this checkpoint has {cost.states:,} "
            "bytes of new client states"
        )

    state_bytes = 4 * build_networks(stateful_run(FEW, 1, None))[1].shared
    small_budget = SHARE * FEW * state_bytes / 2**30
    pairs = []
    ratios = []
    for _ in range(blocks):
        without_budget, with_budget = (
            train(FEW, ROUNDS, budget) for budget in (None, small_budget)
        )
        pairs.append((without_budget, with_budget))
        ratios.append(with_budget.cpu / without_budget.cpu)
        say(
            f"a run of {FEW:,} clients with {SHARE:.0%} of their client states in memory takes "
            f"{ratios[-1]:.2f} times the CPU time of the same run with all client states in memory"
        )
    say(
        f"a run of {FEW:,} clients with {SHARE:.0%} of their client states in memory takes "
        f"{statistics.median(ratios):.2f} times the CPU time of the same run with all client "
        f"states in memory (median of {blocks} measurements)"
    )
    runs = [run for pair in pairs for run in pair]
    if clients:
        large = train(clients, clients // (COHORT // 2), BUDGET)
        runs.append(large)
        say(
            f"a run of {clients:,} clients with at most {BUDGET:g} GiB of client states in memory: "
            f"a round takes {large.seconds:.3f} s (CPU time {large.cpu:.3f} s). At the end, "
            f"{large.spilled:,} bytes of client states are on disk. The process used at most "
            f"{large.memory:,} bytes of memory"
        )
    results = {
        "checkpoints": [asdict(cost) for cost in checkpoints],
        "runs": [asdict(run) for run in runs],
    }
    write_json({"blocks": blocks, **results}, out)


def main() -> None:
    """Measure the cost of checkpoints and of client states, in memory and on disk.

    The results are printed, and written to the JSON file of the option `--out`.
    """
    command_line = parser(__doc__)
    command_line.add_argument(
        "--data", metavar="DIR", help="folder of FashionMNIST; downloaded if missing"
    )
    command_line.add_argument(
        "--clients",
        type=int,
        default=100_000,
        help="number of clients of the run within 1 GiB (100000); 0 skips this run",
    )
    arguments = read(command_line)
    bench(arguments.data, arguments.out, arguments.blocks, arguments.clients, print)


if __name__ == "__main__":
    run(main)
