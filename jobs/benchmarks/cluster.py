"""Messages, bytes and the coordinator's time in a round, on a cluster.

    uv run python -m jobs.benchmarks.cluster --address auto
    uv run python -m jobs.benchmarks.cluster --nodes 2 --workers 4

Runs the real coordinator, dispatcher and server with workers that train nothing, on a Ray cluster that runs already
(`--address`), on several Ray nodes in this machine (`--nodes`), or on a local Ray. Every round has 8 clients for each
worker; their updates come back as sums of two, as one sum of each node, and one by one. The behaviour of a large
cluster follows from the times (docs/many_nodes.md).
"""

from __future__ import annotations

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
from jobs.benchmarks.scale import Case as Load, Ready, spec_of
from jobs.command import run
from raysim.api.declarations import Evaluation
from raysim.api.messages import PublishedVersion, TrainingResult, Update
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.primitives.checks import at_least
from raysim.results.history import write_json
from raysim.results.tables import format_table, terminal_width, text_columns
from raysim.runtime.placement import RayOptions, Size, choose_size, listen_on_loopback
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSettings, RunSpec

GROUP, GROUPS = 2, 4  # updates to a sum, sums to a worker
FLOATS = (1_210, 1_000_000, 11_000_000)
WAYS = {
    "sums": False,
    "sums of nodes": True,
    "updates": False,
}  # what comes back; whether nodes add up
STAGES = ("dispatch", "wait", "add up", "step", "publish")
_SKIP = 1  # rounds at the start that are not counted


@dataclass(frozen=True)
class Options:
    """address: of a Ray that runs. nodes: start so many in this machine instead. workers: in all; None: all that fit.

    floats: of each model that is tried.
    """

    address: str | None = None
    nodes: int | None = None
    workers: int | None = None
    floats: Sequence[int] = FLOATS

    def __post_init__(self) -> None:
        for name in ("nodes", "workers"):
            if (value := getattr(self, name)) is not None:
                at_least(f"--{name}", value, 1)
        for value in self.floats:
            at_least("--floats", value, 100)
        if self.address and self.nodes:
            raise ValueError(
                "--address joins a cluster and --nodes starts one: leave one of them out"
            )


class Singly(Method):
    """A method that reads every update by itself."""

    name = "singly"

    def setup(self, run: Setup) -> None:
        """Ask for single updates."""
        run.read_updates()


class Idle(Ready):
    """A worker that trains nothing, for a run that may have its updates one by one."""

    def __init__(self, spec: RunSpec, name: str = "worker-0", content: Sequence[Any] = ()):
        super().__init__(spec, name)

    def evaluate(self, *_: Any) -> list[Any]:
        """Nothing is scored."""
        return []


# --- what is counted ------------------------------------------------------------------------------------------------
class Counted:
    """A runtime of which calls, arrays and bytes are counted.

    Bytes that cross between nodes: a version once to every other node with workers, a small one with every call there
    (`down`); what other nodes return and the coordinator takes (`up`); what they hand on to each other (`between`).
    """

    def __init__(self, inner: Any):
        self._inner, self.workers, self.nodes, self.combine_from = (
            inner,
            inner.workers,
            inner.nodes,
            inner.combine_from,
        )
        self.is_in_process = inner.is_in_process
        self.counts: Counter[str] = Counter()
        self._homes: dict[
            int, int
        ] = {}  # by hash of a reference, which would keep its value: the node, if another one

    def put(self, value: object) -> Any:
        """See `Runtime`."""
        ref = self._inner.put(value)
        if isinstance(value, PublishedVersion) and ref is not value:
            self.counts["down"] += value.nbytes * len(set(self.nodes) - {0})
        return ref

    def call(self, worker: int, method: str, *args: Any, returns: int = 1) -> list[Any]:
        """See `Runtime`."""
        self.counts["calls"] += 1
        if home := self.nodes[worker]:
            self.counts["down"] += sum(
                arg.nbytes for arg in args if isinstance(arg, PublishedVersion)
            )
        if method == "combine" and args[2] is not None and self._homes[hash(args[2])] != home:
            self.counts["between"] += 4 * (args[1] - args[0])
        refs = list(self._inner.call(worker, method, *args, returns=returns))
        self._homes.update({hash(ref): home for ref in refs if home})
        return refs

    def get(self, ref: Any) -> Any:
        """See `Runtime`."""
        value = self._inner.get(ref)
        if isinstance(value, (TrainingResult, np.ndarray)):
            arrays = _arrays(value)
            self.counts["arrays"] += len(arrays)
            self.counts["up"] += sum(array.nbytes for array in arrays if hash(ref) in self._homes)
        return value

    def ready(self, refs: Sequence[Any], seconds: float) -> int | None:
        """See `Runtime`."""
        return self._inner.ready(refs, seconds)  # type: ignore[no-any-return]

    def revive(self, worker: int) -> None:
        """See `Runtime`."""
        self._inner.revive(worker)


def _arrays(value: TrainingResult | np.ndarray) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    deltas = [update.delta for update in value.updates if isinstance(update, Update)]
    return [*value.sums.values(), *(delta for delta in deltas if delta is not None)]


@dataclass(frozen=True)
class Cost:
    """A round, medians. arrays: that came; bytes: see `Counted`; cpu, wall, stages: seconds of the coordinator."""

    floats: int
    way: str
    workers: int
    nodes: int
    calls: int
    arrays: int
    down: int
    up: int
    between: int
    cpu: float
    wall: float
    stages: Mapping[str, float]


class Clock:
    """Seconds spent in some functions."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def watch(self, owner: Any, name: str, stage: str, outer: str = "") -> None:
        """Count the time of a method of this object; outer: a stage of which it is a part, and is taken off."""
        inner = getattr(owner, name)

        @wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            since = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                spent = time.perf_counter() - since
                self.seconds[stage] += spent  # type: ignore[assignment]
                self.seconds[outer] -= spent  # type: ignore[assignment]

        setattr(owner, name, timed)


# --- the measurement ------------------------------------------------------------------------------------------------
def measure(spec: RunSpec, runtime: Any, cohort: int, way: str, rounds: int) -> Cost:
    """Some rounds with these workers."""
    settings = replace(spec.settings, rounds=rounds + _SKIP + 1)
    counted, clock = Counted(runtime), Clock()
    coordinator = Coordinator(
        replace(spec, settings=settings), Synchronous(cohort), Ideal(), counted
    )
    clock.watch(coordinator, "_publish", "publish")
    clock.watch(coordinator.dispatcher, "submit", "dispatch")
    clock.watch(coordinator.dispatcher, "collect", "wait")
    clock.watch(coordinator.dispatcher, "combine_sums", "add up", outer="wait")
    clock.watch(coordinator.server, "step", "step")
    marks = []
    for event in coordinator.run():
        if isinstance(event, Round):
            row = {stage: clock.seconds[stage] for stage in STAGES} | dict(counted.counts)
            marks.append({**row, "cpu": time.process_time(), "wall": time.perf_counter()})
    keys = (*STAGES, "calls", "arrays", "down", "up", "between", "cpu", "wall")
    steps = [
        {key: after.get(key, 0) - before.get(key, 0) for key in keys}
        for before, after in pairwise(marks)
    ]
    middle = {key: statistics.median(step[key] for step in steps[_SKIP - 1 : -1]) for key in keys}
    numbers = {key: int(middle[key]) for key in ("calls", "arrays", "down", "up", "between")}
    stages = {stage: middle[stage] for stage in STAGES}
    return Cost(
        coordinator.layout.shared, way, runtime.workers, len(set(runtime.nodes)), **numbers,
        cpu=middle["cpu"], wall=middle["wall"], stages=stages,
    )  # fmt: skip


def run_of(floats: int, workers: int, way: str) -> RunSpec:
    """A model of so many floats, nearly, and eight clients for each worker."""
    load = Load(workers * GROUP * GROUPS, GROUP, (max(1, (floats - 10) // 75),))
    spec = spec_of(load, RunSettings(summation=GROUP, evaluate=Evaluation(every=10**9)))
    return replace(spec, methods=(Singly(),) if way == "updates" else ())


def costs(options: Options, size: Size, rounds: int, say: Callable[[str], None]) -> Iterator[Cost]:
    """Measure every model in every way that the cluster has, on the Ray that is connected."""
    from raysim.runtime import ray as cluster

    asked = RayOptions(workers=size.workers, strategy="SPREAD")
    with cluster.reserve(cluster.run_bundles(size), "raysim-bench", asked, say) as group:
        for floats in options.floats:
            spec = run_of(floats, size.workers, "sums")
            runtime = cluster.start_workers_in(group, size, f"bench-{floats}", asked, Idle, spec)
            try:
                for way, combine in WAYS.items():
                    runtime.combine_from = replace(asked, combine=combine).combine_from
                    if combine and not any(runtime.nodes):
                        continue
                    cohort = size.workers * GROUP * GROUPS
                    yield measure(run_of(floats, size.workers, way), runtime, cohort, way, rounds)
            finally:
                runtime.stop()


@contextmanager
def joined(options: Options) -> Iterator[Size]:
    """Connect to the cluster, or start it; how many workers will be there."""
    from raysim.runtime import ray as cluster

    several = None
    if options.nodes:
        several = cluster.start_local_nodes(
            options.nodes, -(-(options.workers or 2 * options.nodes) // options.nodes)
        )
    asked = RayOptions(
        workers=options.workers, address=several.address if several else options.address
    )
    mine = cluster.connect(asked)
    try:
        yield choose_size(asked, {"CPU": 1.0}, cluster.node_resources(), most=64)
    finally:
        if mine:
            cluster.disconnect()
        if several:
            several.shutdown()


def bench(options: Options, out: Path, rounds: int, say: Callable[[str], None]) -> list[Cost]:
    """Measure, print a table, write `out`."""
    found = []
    with joined(options) as size:
        for cost in costs(options, size, rounds, say):
            found.append(cost)
            say(f"{cost.floats:,} floats, {cost.way}: {cost.wall * 1000:.1f} ms a round")
    say(table(found))
    write_json(
        {"options": asdict(options), "rounds": rounds, "results": [asdict(cost) for cost in found]},
        out,
    )
    return found


def table(found: Sequence[Cost]) -> str:
    """Return what the benchmark prints: a row for each model and way."""
    rows = []
    for cost in found:
        counts = (f"{cost.floats:,}", cost.way, f"{cost.calls}", f"{cost.arrays}")
        megabytes = [f"{size / 1e6:.2f}" for size in (cost.down, cost.up, cost.between)]
        times = [
            f"{seconds * 1000:.1f}" for seconds in (cost.cpu, *cost.stages.values(), cost.wall)
        ]
        rows.append((*counts, *megabytes, *times))
    head = (
        "floats",
        "what comes",
        "calls",
        "arrays",
        "MB down",
        "up",
        "between",
        "CPU",
        *STAGES,
        "round",
    )
    place = f"{found[0].workers} workers on {found[0].nodes} node(s)"
    title = f"a round of {place}: counts, MB, and ms of the coordinator"
    return f"{title}\n{format_table(text_columns(head, rows), terminal_width())}"


def main() -> None:
    """Run the benchmark with the options of the command line."""
    options = parser(__doc__)
    options.add_argument("--address", help="of a Ray cluster that runs; auto: on this machine")
    options.add_argument("--nodes", type=int, help="start this number of Ray nodes in this machine")
    options.add_argument("--workers", type=int, help="workers in all (as many as have a CPU)")
    options.add_argument(
        "--floats",
        type=int,
        nargs="+",
        default=FLOATS,
        metavar="N",
        help="parameters of the models",
    )
    given = read(options)
    listen_on_loopback(RayOptions(address=given.address))  # before Ray is imported

    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(scale)  # the nodes may have raysim alone
    bench(
        Options(given.address, given.nodes, given.workers, given.floats),
        given.out,
        given.blocks,
        print,
    )


if __name__ == "__main__":
    run(main)
