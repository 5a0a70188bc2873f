"""Speed beside a bare PyTorch loop: the same clients, models and arrays, the same number of processes of one thread.

`raysim bench` alternates blocks of rounds of both and prints the median of their ratios, so that a machine whose speed
drifts does not decide. Evaluation and the first rounds of a block are left out. Results go to a JSON file as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from raysim.api.declarations import Evaluation, Local
from raysim.data.federated import federate
from raysim.data.partition import DirichletClient
from raysim.data.sources import FashionMnist, Source, Synthetic
from raysim.models import Cnn, Mlp, ModelRecipe
from raysim.primitives.streams import stream
from raysim.results.history import write_json
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Finished, Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSettings, RunSpec

METHODS = ("steps", "rules")  # workloads that compare methods instead of loops
SCALE = "scale"  # the one that measures the coordinator alone
_SKIP = 3  # rounds at the start of a block that are not timed


@dataclass(frozen=True)
class Workload:
    """A run of one local epoch a round. group: clients per host-side sum; limit: the ratio we promise."""

    clients: int
    samples: int
    cohort: int
    batch: int
    model: ModelRecipe
    rounds: int
    limit: float


WORKLOADS = {
    "W1": Workload(100, 600, 10, 32, Cnn(pool=2), 3, 1.05),
    "W2": Workload(1000, 60, 100, 10, Mlp(widths=(64,)), 30, 1.0),
    "W3": Workload(100, 32, 10, 32, Mlp(widths=(2700, 2700)), 20, 1.3),
}


@dataclass(frozen=True)
class Result:
    """Seconds a round (medians over blocks) and the median of the blocks' ratios."""

    workload: str
    raysim: float
    bare: float
    ratio: float
    ratios: tuple[float, ...]
    limit: float


def spec_of(work: Workload, source: Source) -> RunSpec:
    """The workload as a run: equal clients by Dirichlet(0.5), no local tests."""
    partition = DirichletClient(clients=work.clients, alpha=0.5, test_fraction=0.0, fraction=1.0)
    data = federate(source, partition, 20240)
    assert set(data.partition.train.counts) == {work.samples}
    local = Local(lr=0.01, epochs=1, batch=work.batch)
    settings = RunSettings(seed=20240, local=local, evaluate=Evaluation(every=10**9))
    return RunSpec(work.model, (), data, settings)


def source_of(work: Workload, root: str | None) -> Source:
    """Fashion-MNIST (below `root` or downloaded), or noise of its shape if root is ""."""
    normal = {"mean": [0.5], "std": [0.5]}
    if root == "" or work.clients * work.samples != 60_000:
        return Synthetic(shape=[1, 28, 28], samples=work.clients * work.samples, test_samples=1000, **normal)  # type: ignore[arg-type]
    return FashionMnist(root=root, **normal)  # type: ignore[arg-type]


# --- the bare loop -------------------------------------------------------------------------------------------------
def _bare_worker(
    index: int,
    spec: RunSpec,
    work: Workload,
    x: torch.Tensor,
    y: torch.Tensor,
    vector: Any,
    sums: Any,
    todo: Any,
    go: Any,
    done: Any,
) -> None:
    """What a textbook loop does with the clients that it takes off a shared counter."""
    torch.set_num_threads(1)
    model = spec.model.build(spec.task.shape, spec.task.num_classes, spec.settings.seed)
    params = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in params])
    position = 0
    for p in params:
        p.data = flat[position : position + p.numel()].view(p.shape)
        position += p.numel()
    block = 0
    while True:
        go[index].acquire()
        if todo.value < 0:
            return
        cohort = stream(spec.settings.seed, "bare", block).choice(work.clients, work.cohort, replace=False)
        block += 1
        sums[index].zero_()
        while True:
            with todo.get_lock():
                place = todo.value
                todo.value += 1
            if place >= work.cohort:
                break
            start = int(cohort[place]) * work.samples
            flat.copy_(vector)
            optimizer = torch.optim.SGD(params, lr=spec.settings.local.lr)
            model.train()
            for i in range(start, start + work.samples, work.batch):
                stop = min(i + work.batch, start + work.samples)
                optimizer.zero_grad()
                cross_entropy(model(x[i:stop]), y[i:stop]).backward()
                optimizer.step()
            sums[index].add_(flat, alpha=1 / work.cohort)
        done.release()


class Bare:
    """Processes that train in turn with one shared vector and a sum each; no framework."""

    def __init__(self, spec: RunSpec, work: Workload, processes: int):
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        data, rows = spec.data.open(), spec.data.partition.train.indices
        pixels = torch.from_numpy(np.ascontiguousarray(data.images[rows]))
        x = spec.data.pipeline.normalise(pixels, torch.float32).share_memory_()
        y = torch.from_numpy(data.labels[rows].copy()).share_memory_()
        model = spec.model.build(spec.task.shape, spec.task.num_classes, spec.settings.seed)
        self.vector = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).share_memory_()
        self.sums = torch.zeros(processes, len(self.vector)).share_memory_()
        self.go = [context.Semaphore(0) for _ in range(processes)]
        self.done, self.todo = context.Semaphore(0), context.Value("i", 0)
        shared = (spec, work, x, y, self.vector, self.sums, self.todo, self.go, self.done)
        self.processes = [
            context.Process(target=_bare_worker, args=(i, *shared), daemon=True) for i in range(processes)
        ]
        for process in self.processes:
            process.start()

    def rounds(self, count: int) -> float:
        """Seconds a round, the first few left out."""
        for index in range(count + _SKIP):
            if index == _SKIP:
                since = time.perf_counter()
            self.todo.value = 0
            for semaphore in self.go:
                semaphore.release()
            for _ in self.go:
                self.done.acquire()
            torch.sum(self.sums, 0, out=self.vector)
        return (time.perf_counter() - since) / count

    def close(self) -> None:
        """End the processes."""
        self.todo.value = -1
        for semaphore in self.go:
            semaphore.release()
        for process in self.processes:
            process.join(10)


# --- raysim --------------------------------------------------------------------------------------------------------
def _rounds(spec: RunSpec, work: Workload, runtime: Any, count: int) -> float:
    spec = replace(spec, settings=replace(spec.settings, rounds=count + _SKIP))
    stamps = []
    for event in Coordinator(spec, Synchronous(work.cohort), Ideal(), runtime).run():
        if isinstance(event, Round):
            stamps.append(event.row["wall_seconds"])
        assert not isinstance(event, Finished) or event.model_sha256
    return (stamps[-1] - stamps[_SKIP - 1]) / count  # type: ignore[operator]


def bench(name: str, root: str | None, blocks: int, hosts: int, say: Callable[[str], None]) -> Result:
    """Alternate blocks of bare and raysim rounds on a running Ray."""
    from raysim.runtime.ray import start_hosts

    work = WORKLOADS[name]
    spec = spec_of(work, source_of(work, root))
    runtime, bare = start_hosts(spec, hosts), Bare(spec, work, hosts)
    pairs = []
    try:
        _rounds(spec, work, runtime, 1)
        for block in range(blocks):
            pairs.append((_rounds(spec, work, runtime, work.rounds), bare.rounds(work.rounds)))
            say(f"{name} block {block + 1}/{blocks}: raysim {pairs[-1][0]:.4f} s, bare {pairs[-1][1]:.4f} s a round")
    finally:
        bare.close()
        runtime.stop()
    ratios = tuple(own / other for own, other in pairs)
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return Result(name, medians[0], medians[1], statistics.median(ratios), ratios, work.limit)


def methods(kind: str, out: Path, blocks: int) -> None:
    """What each method adds to a local step, or to the server's; prints a table, writes `out`."""
    from rich.console import Console
    from rich.table import Table

    from raysim.commands.bench.methods import bench_rules, bench_steps
    from raysim.training.determinism import make_deterministic
    from raysim.vectors.blocks import cores

    make_deterministic(1)
    console = Console()
    title, measure = {
        "steps": ("a local step beside FedAvg's, one thread", bench_steps),
        "rules": (
            f"the server's step on {cores()} threads: fedavg beside a bare loop, rules beside fedavg",
            bench_rules,
        ),
    }[kind]
    results = measure(blocks, console.print)
    table = Table(title=f"{title}; medians of {blocks} paired blocks")
    for header in ("method", "ms", "ratio", "lowest", "highest", "promised"):
        table.add_column(header)
    for r in results:
        promised = "" if r.limit is None else f"{r.limit:.2f}"
        ratios = (f"{value:.3f}" for value in (r.ratio, min(r.ratios), max(r.ratios)))
        table.add_row(r.method, f"{r.seconds * 1000:.1f}", *ratios, promised)
    console.print(table)
    settings = {"torch": torch.__version__, "blocks": blocks, "capability": torch.backends.cpu.get_cpu_capability()}
    write_json({"settings": settings, "results": [asdict(result) for result in results]}, out)


def main(names: list[str], root: str | None, out: Path, blocks: int = 7, hosts: int = 2) -> list[Result]:
    """Run workloads, print a table, write `out`."""
    from rich.console import Console
    from rich.table import Table

    from raysim.runtime import ray as cluster

    if unknown := [name for name in names if name not in (*WORKLOADS, *METHODS, SCALE)]:
        raise ValueError(f"workload {unknown[0]!r} does not exist: use {', '.join((*WORKLOADS, *METHODS, SCALE))}")
    if apart := [name for name in names if name not in WORKLOADS]:
        if len(names) > 1:
            raise ValueError(f"workload {apart[0]!r} is measured in one process: name it alone")
        if apart[0] == SCALE:
            from raysim.commands.bench.coordinator import main as scale

            scale(out, blocks, print)
        else:
            methods(apart[0], out, blocks)
        return []
    console = Console()
    cluster.connect(cluster.RayOptions())
    try:
        results = [bench(name, root, blocks, hosts, console.print) for name in names]
    finally:
        cluster.disconnect()
    table = Table(title=f"seconds a round, {hosts} processes of one thread; medians of {blocks} paired blocks")
    for header in ("workload", "raysim", "bare PyTorch", "ratio", "lowest", "highest", "promised"):
        table.add_column(header)
    for r in results:
        row = (r.raysim, r.bare, r.ratio, min(r.ratios), max(r.ratios), r.limit)
        table.add_row(r.workload, *(f"{value:.3f}" for value in row))
    console.print(table)
    settings = {
        "torch": torch.__version__,
        "hosts": hosts,
        "blocks": blocks,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    write_json({"settings": settings, "results": [asdict(result) for result in results]}, out)
    return results
