"""Speed beside bare PyTorch loops: the same clients, models and arrays, the same number of processes of one thread.

`raysim bench` alternates blocks of rounds of raysim and a textbook loop (`torch.optim.SGD`), with `--floor` of a tuned
one too: no optimiser object, no accumulated gradient, one fused update, all in one flat vector. It prints the medians
of the ratios, so that a machine whose speed drifts does not decide. Evaluation and the first rounds of a block are left
out. Results go to a JSON file as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from raysim.api.declarations import Evaluation, Local
from raysim.data.federated import federate
from raysim.data.partition import DirichletClient
from raysim.data.sources import FashionMnist, Source, Synthetic
from raysim.models import Cnn, Mlp, ModelRecipe
from raysim.primitives.streams import stream
from raysim.results.history import write_json
from raysim.results.tables import format_table, terminal_width, text_columns
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Finished, Profiled, Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSettings, RunSpec, declare_run
from raysim.training.step_mode import default_lanes

Say: TypeAlias = Callable[[Any], object]
_SKIP = 3  # rounds at the start of a block that are not timed


@dataclass(frozen=True)
class Workload:
    """A run of one local epoch a round. group: clients per worker-side sum; limit: the ratio we promise."""

    clients: int
    samples: int
    cohort: int
    batch: int
    model: ModelRecipe
    rounds: int
    limit: float


@dataclass(frozen=True)
class Options:
    """workers: processes on each side. lanes: clients trained at once, None: as a run does. floor: measure it as well.

    profile: the folder for a profile of each workload.
    """

    workers: int = 2
    lanes: int | None = None
    floor: bool = False
    profile: Path | None = None


WORKLOADS = {
    "W1": Workload(100, 600, 10, 32, Cnn(pool=2), 3, 1.05),
    "W2": Workload(1000, 60, 100, 10, Mlp(widths=(64,)), 30, 1.0),
    "W3": Workload(100, 32, 10, 32, Mlp(widths=(2700, 2700)), 20, 1.3),
}


@dataclass(frozen=True)
class Result:
    """Seconds a round (medians over blocks) and the blocks' ratios to the textbook loop; to the floor if measured."""

    workload: str
    lanes: int
    raysim: float
    bare: float
    ratios: tuple[float, ...]
    limit: float
    floor: float | None = None
    to_floor: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)


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
    samples = work.clients * work.samples
    if root == "" or samples != 60_000:
        return Synthetic(
            shape=[1, 28, 28], samples=samples, test_samples=1000, mean=[0.5], std=[0.5]
        )
    return FashionMnist(root=root, mean=[0.5], std=[0.5])


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
    tuned: bool,
) -> None:
    """What a loop does with the clients that it takes off a shared counter."""
    torch.set_num_threads(1)
    model = spec.model.build(spec.task.shape, spec.task.num_classes, spec.settings.seed)
    params: list[torch.Tensor] = list(model.parameters())
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
        cohort = stream(spec.settings.seed, "bare", block).choice(
            work.clients, work.cohort, replace=False
        )
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
            own = slice(start, start + work.samples)
            batches = zip(x[own].split(work.batch), y[own].split(work.batch), strict=True)
            (_floor if tuned else _textbook)(model, params, batches, spec.settings.local.lr)
            sums[index].add_(flat, alpha=1 / work.cohort)
        done.release()


Batches: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor]]


def _textbook(model: nn.Module, params: list[torch.Tensor], batches: Batches, lr: float) -> None:
    """One client's epoch, as everybody writes it."""
    optimizer = torch.optim.SGD(params, lr=lr)
    model.train()
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def _floor(model: nn.Module, params: list[torch.Tensor], batches: Batches, lr: float) -> None:
    """The same with the least that PyTorch can do for it."""
    for inputs, targets in batches:
        grads = torch.autograd.grad(cross_entropy(model(inputs), targets), params)
        with torch.no_grad():
            torch._foreach_add_(params, grads, alpha=-lr)


class Bare:
    """Processes that train in turn with one shared vector and a sum each; no framework. tuned: with `_floor`'s loop."""

    def __init__(self, spec: RunSpec, work: Workload, processes: int, tuned: bool = False):
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        data, rows = spec.data.open(), spec.data.partition.train.indices
        pixels = torch.from_numpy(np.ascontiguousarray(data.inputs[rows]))
        x = spec.data.pipeline.normalise(pixels, torch.float32).share_memory_()
        y = torch.from_numpy(data.labels[rows].copy()).share_memory_()
        model = spec.model.build(spec.task.shape, spec.task.num_classes, spec.settings.seed)
        self.vector = torch.cat(
            [p.detach().reshape(-1) for p in model.parameters()]
        ).share_memory_()
        self.sums = torch.zeros(processes, len(self.vector)).share_memory_()
        self.go = [context.Semaphore(0) for _ in range(processes)]
        self.done, self.todo = context.Semaphore(0), context.Value("i", 0)
        shared = (spec, work, x, y, self.vector, self.sums, self.todo, self.go, self.done)
        self.processes = [
            context.Process(target=_bare_worker, args=(i, *shared, tuned), daemon=True)
            for i in range(processes)
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


def _profile(
    name: str, spec: RunSpec, work: Workload, options: Options, folder: Path, show: Say
) -> None:
    """A block more, on workers that are timed: where their time goes."""
    from raysim.results import profile
    from raysim.runtime.ray import start_workers

    spec = replace(spec, profile=True, settings=replace(spec.settings, rounds=work.rounds + _SKIP))
    runtime = start_workers(spec, options.workers)
    try:
        for event in Coordinator(spec, Synchronous(work.cohort), Ideal(), runtime).run():
            if isinstance(event, Profiled):
                profile.write(event, folder, name, f"{name}-")
                show(profile.table(event))
    finally:
        runtime.stop()


def bench(name: str, root: str | None, blocks: int, options: Options, say: Say) -> Result:
    """Alternate blocks of raysim's rounds and of bare ones on a running Ray."""
    from raysim.runtime.ray import start_workers

    work = WORKLOADS[name]
    spec = spec_of(work, source_of(work, root))
    spec = replace(spec, lanes=options.lanes or default_lanes(spec, declare_run(spec), work.cohort))
    runtime = start_workers(spec, options.workers)
    loops = [
        Bare(spec, work, options.workers, tuned)
        for tuned in ((False, True) if options.floor else (False,))
    ]
    rows = []
    try:
        _rounds(spec, work, runtime, 1)
        for block in range(blocks):
            rows.append(
                (
                    _rounds(spec, work, runtime, work.rounds),
                    *(loop.rounds(work.rounds) for loop in loops),
                )
            )
            bare = ", ".join(f"{seconds:.4f} s" for seconds in rows[-1][1:])
            say(
                f"{name} block {block + 1}/{blocks}: raysim {rows[-1][0]:.4f} s, bare {bare} a round"
            )
    finally:
        for loop in loops:
            loop.close()
        runtime.stop()
    if options.profile is not None:
        _profile(name, spec, work, options, options.profile, say)
    own, bare_, *floor = (statistics.median(column) for column in zip(*rows, strict=True))
    ratios = [tuple(row[0] / row[column] for row in rows) for column in range(1, len(rows[0]))]
    return Result(name, spec.lanes, own, bare_, ratios[0], work.limit, *floor, *ratios[1:])


def main(
    names: list[str], root: str | None, out: Path, blocks: int, options: Options
) -> list[Result]:
    """Run workloads, print a table, write `out`."""
    from raysim.runtime import ray as cluster

    cluster.connect(cluster.RayOptions())
    try:
        results = [bench(name, root, blocks, options, print) for name in names]
    finally:
        cluster.disconnect()
    rows = []
    for r in results:
        row = [r.raysim, r.bare, r.ratio, min(r.ratios), max(r.ratios), r.limit]
        if r.floor is not None:
            row += [r.floor, statistics.median(r.to_floor), min(r.to_floor), max(r.to_floor)]
        rows.append((r.workload, str(r.lanes), *(f"{value:.3f}" for value in row)))
    more = ("floor", "ratio to it", "lowest", "highest") if options.floor else ()
    head = (
        "workload",
        "lanes",
        "raysim",
        "bare PyTorch",
        "ratio",
        "lowest",
        "highest",
        "promised",
        *more,
    )
    print(
        f"seconds a round, {options.workers} processes of one thread; medians of {blocks} paired blocks"
    )
    print(format_table(text_columns(head, rows), terminal_width()))
    settings = {
        "torch": torch.__version__,
        "blocks": blocks,
        "capability": torch.backends.cpu.get_cpu_capability(),
        **{key: value for key, value in asdict(options).items() if key != "profile"},
    }
    columns = [{**asdict(result), "ratio": result.ratio} for result in results]
    write_json({"settings": settings, "results": columns}, out)
    return results
