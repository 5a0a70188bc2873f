"""Measure the messages, the bytes and the coordinator's time of a round on a cluster.

    uv run python -m jobs.benchmarks.cluster --address auto
    uv run python -m jobs.benchmarks.cluster --nodes 2 --workers 4

The workers do not train. Updates return as a sum from each worker, as a sum from each node, or one
by one. Sums of nodes are left out if all workers are on the coordinator's node.
docs/many_nodes.md uses these measurements.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from jobs.benchmarks import scale
from jobs.benchmarks.arguments import parser, read
from jobs.benchmarks.scale import Case, ReadyWorker, spec_of
from jobs.command import run
from raysim.api.declarations import Evaluation
from raysim.api.messages import PublishedVersion, TrainingResult, Update
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.primitives.checks import at_least
from raysim.primitives.output import terminal_width
from raysim.results.history import write_json
from raysim.results.tables import format_table, text_columns
from raysim.runtime.placement import RayOptions, Size, choose_size, listen_on_loopback
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSettings, RunSpec

CLIENTS = 8  # in a round, for each worker
FLOATS = (1_210, 1_000_000, 11_000_000)
# The ways in which updates return; True if each node adds up the sums of its workers.
WAYS = {"sums": False, "sums of nodes": True, "updates": False}
PARTS = ("dispatch", "wait", "add up", "step", "publish")
MAX_WORKERS = 64  # without `--workers`
_SKIP = 1  # the first rounds, which are not measured


@dataclass(frozen=True)
class ClusterOptions:
    """The Ray cluster on which the benchmark runs, and the sizes of its models.

    address: a running Ray cluster; None starts Ray on this machine.
    nodes: the Ray nodes to start on this machine; None means one, or none if `address` is set.
    workers: None means as many as fit, at most `MAX_WORKERS`.
    floats: the number of parameters of each model.
    """

    address: str | None = None
    nodes: int | None = None
    workers: int | None = None
    floats: Sequence[int] = FLOATS

    def __post_init__(self) -> None:
        for name in ("nodes", "workers"):
            value = getattr(self, name)
            if value is not None:
                at_least(f"--{name}", value, 1)
        for value in self.floats:
            at_least("--floats", value, 100)
        if self.address and self.nodes:
            raise ValueError(
                "--address joins a running cluster and --nodes starts one. Remove one of them."
            )


class SingleUpdates(Method):
    """A method that needs every update by itself, so that workers cannot send sums."""

    name = "single_updates"

    def setup(self, run: Setup) -> None:
        """Declare that the method reads single updates."""
        run.read_updates()


class IdleWorker(ReadyWorker):
    """A worker that does not train: it returns prepared updates or sums, and no scores."""

    def __init__(self, spec: RunSpec, name: str = "worker-0", content: Sequence[Any] = ()):
        super().__init__(spec, name)

    def evaluate(self, *_: Any) -> list[Any]:
        """Return no scores."""
        return []


# --- counting -------------------------------------------------------------------------------------
class CountingRuntime:
    """A wrapper of a runtime that counts calls, received arrays, and bytes between nodes.

    `counts` has four numbers. "calls" is the number of calls to workers and nodes. "arrays" is the
    number of updates and sums that the coordinator has received. "down" is the bytes of versions
    that went to other nodes. "up" is the bytes of updates and sums that came from other nodes.
    """

    def __init__(self, inner: Any):
        self._inner = inner
        self.workers, self.nodes = inner.workers, inner.nodes
        self.combine_from, self.is_in_process = inner.combine_from, inner.is_in_process
        self.node_name, self.release = inner.node_name, inner.release
        self.find_lost_workers, self.explain_death = inner.find_lost_workers, inner.explain_death
        self.silent_node_timeout, self.stacks = inner.silent_node_timeout, inner.stacks
        self.take_new_workers, self.take_notices = inner.take_new_workers, inner.take_notices
        self.counts: Counter[str] = Counter()
        # Map the hash of a reference to its node, if that is not the coordinator's. The reference
        # itself would keep its value in memory.
        self._homes: dict[int, int] = {}

    def put(self, value: object) -> Any:
        """Store a value for all workers, and return a reference to it.

        If the value is a large version, which each node receives once, count its bytes.
        """
        ref = self._inner.put(value)
        if isinstance(value, PublishedVersion) and ref is not value:
            self.counts["down"] += value.nbytes * len(set(self.nodes) - {0})
        return ref

    def call(self, worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """Call a Python method of a worker, and return references to the values that it returns.

        Count the call. If the worker is on another node, also count the bytes of the versions in
        `args`. A large version is passed as a reference. Its bytes are not counted again, because
        `put` has counted them.
        """
        self.counts["calls"] += 1
        home = self.nodes[worker]
        if home:
            versions = [arg for arg in args if isinstance(arg, PublishedVersion)]
            self.counts["down"] += sum(version.nbytes for version in versions)
        refs = list(self._inner.call(worker, method, *args, returns=returns))
        self._homes.update({hash(ref): home for ref in refs if home})
        return refs

    def add_up(self, node: int, parts: Sequence[range], refs: Sequence[Any]) -> Any:
        """Let a node add up sums of updates; count the call; return a reference to the total.

        parts: for each sum, the positions of its updates in the order of aggregation.
        refs: references to the sums.
        """
        self.counts["calls"] += 1
        ref = self._inner.add_up(node, parts, refs)
        self._homes[hash(ref)] = node
        return ref

    def get(self, ref: Any) -> Any:
        """Wait for a value and return it; count the updates and sums in it.

        Each update or sum is an array. The number of arrays is added to `counts["arrays"]`. If the
        value comes from another node, the bytes of its arrays are added to `counts["up"]`.
        """
        value = self._inner.get(ref)
        if isinstance(value, (TrainingResult, np.ndarray)):
            arrays = _arrays(value)
            self.counts["arrays"] += len(arrays)
            self.counts["up"] += sum(array.nbytes for array in arrays if hash(ref) in self._homes)
        return value

    def ready(self, refs: Sequence[Any], seconds: float) -> int | None:
        """Wait until one of several values exists or is lost; return its index in `refs`.

        Return None if nothing happens within `seconds` seconds.
        refs: references to the values.
        """
        return self._inner.ready(refs, seconds)  # type: ignore[no-any-return]

    def revive(self, worker: int) -> None:
        """Start a worker that replaces a dead one, on the same node.

        worker: the number of the dead worker.
        """
        self._inner.revive(worker)


def _arrays(value: TrainingResult | np.ndarray) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    deltas = [update.delta for update in value.updates if isinstance(update, Update)]
    return [*value.sums.values(), *(delta for delta in deltas if delta is not None)]


@dataclass(frozen=True)
class RoundCost:
    """The median cost of a round.

    way: how updates return, a key of `WAYS`.
    calls: the number of the coordinator's calls to workers and nodes.
    arrays: the number of updates and sums that the coordinator receives.
    down, up: bytes from the coordinator to other nodes, and back.
    cpu, wall: seconds of the coordinator.
    parts: the coordinator's wall seconds in each of `PARTS`.
    """

    floats: int
    way: str
    workers: int
    nodes: int
    calls: int
    arrays: int
    down: int
    up: int
    cpu: float
    wall: float
    parts: Mapping[str, float]


class Stopwatch:
    """A stopwatch that adds up the wall seconds of each phase of a round, such as "dispatch".

    Call `watch` for each Python method to time. `seconds` maps a phase to the total wall seconds of
    its methods.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def watch(self, owner: Any, name: str, part: str, outer: str = "") -> None:
        """Time a Python method: each later call adds its wall seconds to `seconds[part]`.

        outer: the part during which this method is called, if that part is timed, too; else "". The
        method's seconds are subtracted from `seconds[outer]`, so that they are counted only once.
        """
        inner = getattr(owner, name)

        @wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            since = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                spent = time.perf_counter() - since
                self.seconds[part] += spent  # type: ignore[assignment]
                self.seconds[outer] -= spent  # type: ignore[assignment]

        setattr(owner, name, timed)


# --- the measurement ------------------------------------------------------------------------------
def measure(spec: RunSpec, runtime: Any, cohort: int, way: str, rounds: int) -> RoundCost:
    """Execute `rounds` measured rounds and return their median cost.

    cohort: the number of clients in a round.
    way: how updates return: "sums" (one sum per worker), "sums of nodes" (one sum per node) or
    "updates" (one by one). This is only a name for the result: `spec` and `runtime` decide.
    """
    settings = replace(spec.settings, rounds=rounds + _SKIP + 1)
    counting, stopwatch = CountingRuntime(runtime), Stopwatch()
    coordinator = Coordinator(
        replace(spec, settings=settings), Synchronous(cohort), Ideal(), counting
    )
    stopwatch.watch(coordinator, "_publish", "publish")
    stopwatch.watch(coordinator.dispatcher, "submit", "dispatch")
    stopwatch.watch(coordinator.dispatcher, "collect", "wait")
    stopwatch.watch(coordinator.dispatcher, "fetch_sums", "add up", outer="wait")
    stopwatch.watch(coordinator.server, "step", "step")
    marks = []
    for event in coordinator.run():
        if isinstance(event, Round):
            row = {part: stopwatch.seconds[part] for part in PARTS} | dict(counting.counts)
            marks.append({**row, "cpu": time.process_time(), "wall": time.perf_counter()})
    keys = (*PARTS, "calls", "arrays", "down", "up", "cpu", "wall")
    steps = [
        {key: after.get(key, 0) - before.get(key, 0) for key in keys}
        for before, after in pairwise(marks)
    ]
    middle = {key: statistics.median(step[key] for step in steps[_SKIP - 1 : -1]) for key in keys}
    numbers = {key: int(middle[key]) for key in ("calls", "arrays", "down", "up")}
    parts = {part: middle[part] for part in PARTS}
    return RoundCost(
        coordinator.layout.shared, way, runtime.workers, len(set(runtime.nodes)), **numbers,
        cpu=middle["cpu"], wall=middle["wall"], parts=parts,
    )  # fmt: skip


def run_of(floats: int, workers: int, way: str) -> RunSpec:
    """Return a run with a model of about `floats` parameters and 16 clients per worker.

    Half of the clients train in each round.
    way: a key of `WAYS`. With "updates", a method of the run needs single updates.
    """
    case = Case(workers * CLIENTS, (max(1, (floats - 10) // 75),))
    spec = spec_of(case, RunSettings(evaluate=Evaluation(every=10**9)))
    return replace(spec, methods=(SingleUpdates(),) if way == "updates" else ())


def costs(
    options: ClusterOptions, size: Size, rounds: int, say: Callable[[str], None]
) -> Iterator[RoundCost]:
    """Measure what a round costs, for each of `options.floats` and each of `WAYS`.

    "sums of nodes" is skipped if all workers are on the coordinator's node.
    rounds: the number of measured rounds for each cost.
    say: function that gets a text while the benchmark waits for Ray's resources.
    """
    from raysim.runtime import ray as cluster

    ray_options = RayOptions(workers=size.workers, strategy="SPREAD")
    with cluster.reserve(cluster.run_bundles(size), "raysim-bench", ray_options, say) as group:
        for floats in options.floats:
            spec = run_of(floats, size.workers, "sums")
            runtime = cluster.start_workers_in(
                group, size, f"bench-{floats}", ray_options, IdleWorker, spec
            )
            try:
                for way, combine in WAYS.items():
                    runtime.combine_from = replace(ray_options, combine=combine).combine_from
                    if combine and not any(runtime.nodes):
                        continue
                    cohort = size.workers * CLIENTS
                    yield measure(run_of(floats, size.workers, way), runtime, cohort, way, rounds)
            finally:
                runtime.stop()


@contextmanager
def connected_cluster(options: ClusterOptions) -> Iterator[Size]:
    """Connect to the cluster or start it; yield the number and the resources of its workers."""
    from raysim.runtime import ray as cluster

    local_nodes = None
    address = options.address
    if options.nodes:
        workers = options.workers or 2 * options.nodes
        local_nodes = cluster.start_local_nodes(options.nodes, math.ceil(workers / options.nodes))
        address = local_nodes.address
    ray_options = RayOptions(workers=options.workers, address=address)
    is_connected_here = cluster.connect(ray_options)
    try:
        yield choose_size(ray_options, {"CPU": 1.0}, cluster.node_resources(), most=MAX_WORKERS)
    finally:
        if is_connected_here:
            cluster.disconnect()
        if local_nodes:
            local_nodes.shutdown()


def bench(
    options: ClusterOptions, out: Path, rounds: int, say: Callable[[str], None]
) -> list[RoundCost]:
    """Measure what a round costs on a Ray cluster; print a table, and write a JSON file.

    Return a cost for each model size and each of `WAYS`. "sums of nodes" is skipped if all workers
    are on the coordinator's node.
    rounds: the number of measured rounds for each cost.
    """
    results = []
    with connected_cluster(options) as size:
        for cost in costs(options, size, rounds, say):
            results.append(cost)
            say(
                f"model of {cost.floats:,} parameters: a round takes {cost.wall * 1000:.1f} ms if "
                f"workers return {cost.way}"
            )
    say(table(results))
    rows = [asdict(cost) for cost in results]
    write_json({"options": asdict(options), "rounds": rounds, "results": rows}, out)
    return results


def table(results: Sequence[RoundCost]) -> str:
    """Return the results as a table: a row for each model and each way of returning updates."""
    rows = []
    for cost in results:
        counts = (f"{cost.floats:,}", cost.way, f"{cost.calls}", f"{cost.arrays}")
        megabytes = [f"{size / 1e6:.2f}" for size in (cost.down, cost.up)]
        times = [f"{seconds * 1000:.1f}" for seconds in (cost.cpu, *cost.parts.values(), cost.wall)]
        rows.append((*counts, *megabytes, *times))
    head = (
        "parameters",
        "workers return",
        "calls",
        "arrays",
        "MB down",
        "MB up",
        "CPU, ms",
        *(f"{part}, ms" for part in PARTS),
        "round, ms",
    )
    place = f"{results[0].workers} workers on {results[0].nodes} node(s)"
    title = (
        f"one round with {place}. calls: calls of workers and nodes. arrays: arrays that the "
        "coordinator received. MB down and up: megabytes from the coordinator to other nodes and back. "
        "CPU, ms: CPU time of the coordinator. The columns behind it: wall time of the round's parts "
        "and of the round"
    )
    return f"{title}\n{format_table(text_columns(head, rows), terminal_width())}"


def main() -> None:
    """Measure what a round costs on a Ray cluster; print a table and write a JSON file.

    The command line sets the cluster, the model sizes, the number of rounds and the path of the
    JSON file.
    """
    command_line = parser(__doc__)
    command_line.add_argument(
        "--address", help="address of a running Ray cluster; auto: on this machine"
    )
    command_line.add_argument(
        "--nodes", type=int, help="number of Ray nodes to start on this machine"
    )
    command_line.add_argument(
        "--workers", type=int, help=f"number of workers (one per CPU, at most {MAX_WORKERS})"
    )
    command_line.add_argument(
        "--floats",
        type=int,
        nargs="+",
        default=FLOATS,
        metavar="N",
        help="number of parameters of each model",
    )
    arguments = read(command_line)
    listen_on_loopback(RayOptions(address=arguments.address))  # before Ray is imported

    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(scale)  # the nodes may have raysim without jobs
    options = ClusterOptions(
        arguments.address, arguments.nodes, arguments.workers, arguments.floats
    )
    bench(options, arguments.out, arguments.blocks, print)


if __name__ == "__main__":
    run(main)
