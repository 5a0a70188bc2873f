"""Measure raysim's speed against plain PyTorch loops that do the same training.

`raysim bench` alternates between raysim and a PyTorch loop with `torch.optim.SGD`, on equally many
processes. The result is the median ratio of their times. `--floor` adds a tuned loop, which updates
all parameters in one operation. Evaluation and warm-up rounds are not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
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
from raysim.primitives.output import terminal_width
from raysim.primitives.streams import stream
from raysim.results.history import write_json
from raysim.results.tables import format_table, text_columns
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Finished, Profiled, Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSettings, RunSpec, declare_run
from raysim.training.step_mode import default_lanes

Print: TypeAlias = Callable[[Any], object]
Batches: TypeAlias = Iterable[tuple[torch.Tensor, torch.Tensor]]
WARM_UP_ROUNDS = 3  # at the start of a block; they are not timed
SEED = 20240
NEVER = 10**9  # rounds between evaluations
# The loops that raysim is compared with, in the order in which they are measured.
LOOP_NAMES = ("the bare PyTorch loop", "the tuned loop")
STOP = -1  # the value of `next_place` that ends the processes
STOP_TIMEOUT_S = 10


@dataclass(frozen=True)
class LoopWorkload:
    """A run with one local epoch per round, whose speed is measured.

    samples: the number of samples of each client.
    rounds: the number of rounds that are measured together.
    limit: the largest ratio of raysim's time to that of a plain PyTorch loop.
    """

    clients: int
    samples: int
    cohort: int
    batch: int
    model: ModelRecipe
    rounds: int
    limit: float


@dataclass(frozen=True)
class LoopOptions:
    """The options of `raysim bench`, which compares raysim with plain PyTorch loops.

    workers: the number of processes of raysim and of each loop.
    lanes: the number of clients that a worker trains at once; None takes a run's default.
    floor: True also measures the tuned loop, without an optimizer object.
    profile: the folder for a profile of each workload; None writes none.
    """

    workers: int = 2
    lanes: int | None = None
    floor: bool = False
    profile: Path | None = None


WORKLOADS = {
    "W1": LoopWorkload(100, 600, 10, 32, Cnn(pool=2), 3, 1.05),
    "W2": LoopWorkload(1000, 60, 100, 10, Mlp(widths=(64,)), 30, 1.0),
    "W3": LoopWorkload(100, 32, 10, 32, Mlp(widths=(2700, 2700)), 20, 1.3),
}


@dataclass(frozen=True)
class LoopResult:
    """The speed of a workload, in raysim and in plain PyTorch loops that do the same training.

    The bare loop uses `torch.optim.SGD`. The tuned loop updates all parameters in one operation.

    lanes: raysim's number of lanes.
    raysim: raysim's seconds per round. All seconds are medians over blocks of rounds.
    bare: the bare loop's seconds per round.
    ratios: for each block, raysim's seconds divided by those of the bare loop.
    limit: the largest allowed median of `ratios`.
    floor: the tuned loop's seconds per round; None if it was not measured.
    to_floor: for each block, raysim's seconds divided by those of the tuned loop.
    """

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
        """Return the median ratio of raysim's time to the usual loop's time."""
        return statistics.median(self.ratios)


def spec_of(workload: LoopWorkload, source: Source) -> RunSpec:
    """Return the run of a workload.

    All clients have the same number of samples, and no test samples. The shares of the classes in a
    client's samples are drawn from Dirichlet(0.5).
    """
    partition = DirichletClient(
        clients=workload.clients, alpha=0.5, test_fraction=0.0, fraction=1.0
    )
    data = federate(source, partition, SEED)
    assert set(data.partition.train.counts) == {workload.samples}
    local = Local(lr=0.01, epochs=1, batch=workload.batch)
    settings = RunSettings(seed=SEED, local=local, evaluate=Evaluation(every=NEVER))
    return RunSpec(workload.model, (), data, settings)


def source_of(workload: LoopWorkload, root: str | None) -> Source:
    """Return Fashion-MNIST, or random pictures of the same shape.

    A workload that does not have 60,000 samples always gets random pictures.
    root: the folder that contains Fashion-MNIST; None downloads it; "" takes random pictures.
    """
    samples = workload.clients * workload.samples
    if root == "" or samples != 60_000:
        return Synthetic(
            shape=[1, 28, 28], samples=samples, test_samples=1000, mean=[0.5], std=[0.5]
        )
    return FashionMnist(root=root, mean=[0.5], std=[0.5])


# --- the bare loop ------------------------------------------------------------------------------
@dataclass(frozen=True)
class SharedMemory:
    """The memory that the processes of a plain loop share.

    inputs, labels: the samples of all clients, one client after another.
    sums: [processes, parameters], the weighted sum of each process's trained models.
    next_place: a counter, the position in the cohort of the client to train next. `STOP` ends the
    processes.
    start: a semaphore for each process, which starts its next round.
    done: one semaphore that every process releases at the end of a round.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    vector: torch.Tensor
    sums: torch.Tensor
    next_place: Any
    start: Sequence[Any]
    done: Any


def _bare_worker(
    index: int, spec: RunSpec, workload: LoopWorkload, memory: SharedMemory, is_tuned: bool
) -> None:
    """Train clients in each round, as one process of a plain PyTorch loop.

    Each process takes the next client of the cohort from a counter in the shared `memory`.
    index: the number of the process.
    is_tuned: True trains with few operations of PyTorch, False with `torch.optim.SGD`.
    """
    torch.set_num_threads(1)
    model = spec.model.build(spec.task.shape, spec.task.num_classes, spec.settings.seed)
    params: list[torch.Tensor] = list(model.parameters())
    flat = _flatten(params)
    train = _train_tuned if is_tuned else _train_usual
    own_sum = memory.sums[index]
    version = 0
    while True:
        memory.start[index].acquire()
        if memory.next_place.value == STOP:
            return
        draws = stream(spec.settings.seed, "bare", version)
        cohort = draws.choice(workload.clients, workload.cohort, replace=False)
        version += 1
        own_sum.zero_()
        while True:
            with memory.next_place.get_lock():
                place = memory.next_place.value
                memory.next_place.value += 1
            if place >= workload.cohort:
                break
            first = int(cohort[place]) * workload.samples
            rows = slice(first, first + workload.samples)
            inputs = memory.inputs[rows].split(workload.batch)
            labels = memory.labels[rows].split(workload.batch)
            flat.copy_(memory.vector)
            train(model, params, zip(inputs, labels, strict=True), spec.settings.local.lr)
            own_sum.add_(flat, alpha=1 / workload.cohort)
        memory.done.release()


def _flatten(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copy the parameters into one flat vector, make them views of the vector, and return it."""
    flat = torch.cat([param.detach().reshape(-1) for param in params])
    position = 0
    for param in params:
        param.data = flat[position : position + param.numel()].view(param.shape)
        position += param.numel()
    return flat


def _train_usual(model: nn.Module, params: list[torch.Tensor], batches: Batches, lr: float) -> None:
    """Train one client for one epoch with `torch.optim.SGD`.

    params: the parameters of `model`.
    batches: the batches (inputs, labels).
    lr: the learning rate.
    """
    optimizer = torch.optim.SGD(params, lr=lr)
    model.train()
    for inputs, labels in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def _train_tuned(model: nn.Module, params: list[torch.Tensor], batches: Batches, lr: float) -> None:
    """Train one client for one epoch with as few operations of PyTorch as possible.

    params: the parameters of `model`.
    batches: the batches (inputs, labels).
    lr: the learning rate.
    """
    for inputs, labels in batches:
        gradients = torch.autograd.grad(cross_entropy(model(inputs), labels), params)
        with torch.no_grad():
            torch._foreach_add_(params, gradients, alpha=-lr)


class BareLoop:
    """A loop without a framework: its processes train clients and average the trained models."""

    def __init__(
        self, spec: RunSpec, workload: LoopWorkload, processes: int, is_tuned: bool = False
    ):
        import torch.multiprocessing

        context = torch.multiprocessing.get_context("spawn")
        data = spec.data.open()
        rows = spec.data.partition.train.indices
        pixels = torch.from_numpy(np.ascontiguousarray(data.inputs[rows]))
        inputs = spec.data.pipeline.normalise(pixels, torch.float32)
        labels = torch.from_numpy(data.labels[rows].copy())
        model = spec.model.build(spec.task.shape, spec.task.num_classes, spec.settings.seed)
        vector = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
        self.memory = SharedMemory(
            inputs=inputs.share_memory_(),
            labels=labels.share_memory_(),
            vector=vector.share_memory_(),
            sums=torch.zeros(processes, len(vector)).share_memory_(),
            next_place=context.Value("i", 0),
            start=[context.Semaphore(0) for _ in range(processes)],
            done=context.Semaphore(0),
        )
        self.processes = []
        for index in range(processes):
            arguments = (index, spec, workload, self.memory, is_tuned)
            process = context.Process(target=_bare_worker, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def time_rounds(self, count: int) -> float:
        """Execute some untimed rounds, then `count` rounds; return the seconds per timed round."""
        for index in range(count + WARM_UP_ROUNDS):
            if index == WARM_UP_ROUNDS:
                since = time.perf_counter()
            self.memory.next_place.value = 0
            self._start()
            for _ in self.processes:
                self.memory.done.acquire()
            torch.sum(self.memory.sums, 0, out=self.memory.vector)
        return (time.perf_counter() - since) / count

    def _start(self) -> None:
        for semaphore in self.memory.start:
            semaphore.release()

    def close(self) -> None:
        """End the processes."""
        self.memory.next_place.value = STOP
        self._start()
        for process in self.processes:
            process.join(STOP_TIMEOUT_S)


# --- raysim -------------------------------------------------------------------------------------
def time_rounds(spec: RunSpec, workload: LoopWorkload, runtime: Any, count: int) -> float:
    """Execute a run of raysim and return its seconds per round.

    The run has a few rounds that are not timed, and then `count` timed rounds.
    runtime: the runtime with the workers.
    """
    spec = replace(spec, settings=replace(spec.settings, rounds=count + WARM_UP_ROUNDS))
    wall_seconds: list[float] = []
    for event in Coordinator(spec, Synchronous(workload.cohort), Ideal(), runtime).run():
        if isinstance(event, Round):
            wall_seconds.append(float(event.row["wall_seconds"] or 0.0))
        assert not isinstance(event, Finished) or event.model_sha256
    return (wall_seconds[-1] - wall_seconds[WARM_UP_ROUNDS - 1]) / count


def _write_profile(
    name: str,
    spec: RunSpec,
    workload: LoopWorkload,
    workers: int,
    folder: Path,
    show: Print,
) -> None:
    """Train a workload once more with profiled workers; write the profile and print a summary.

    name: the workload's name, for the files and their titles.
    workers: the number of Ray workers.
    folder: the folder of the files.
    """
    from raysim.results import profile
    from raysim.runtime.ray import start_workers

    settings = replace(spec.settings, rounds=workload.rounds + WARM_UP_ROUNDS)
    spec = replace(spec, profile=True, settings=settings)
    runtime = start_workers(spec, workers)
    try:
        for event in Coordinator(spec, Synchronous(workload.cohort), Ideal(), runtime).run():
            if isinstance(event, Profiled):
                profile.write(event, folder, name, f"{name}-")
                show(profile.table(event))
    finally:
        runtime.stop()


def measure_workload(
    name: str, root: str | None, blocks: int, options: LoopOptions, show: Print
) -> LoopResult:
    """Measure raysim and the plain PyTorch loops alternately, in blocks of rounds.

    Ray must be running.
    root: the folder that contains Fashion-MNIST; None downloads it; "" takes random pictures. A
    workload that does not have 60,000 samples always gets random pictures.
    show: gets a line for each block, and a table if `options.profile` is set.
    """
    from raysim.runtime.ray import start_workers

    workload = WORKLOADS[name]
    spec = spec_of(workload, source_of(workload, root))
    usual_lanes = default_lanes(spec, declare_run(spec), workload.cohort)
    spec = replace(spec, lanes=options.lanes or usual_lanes)
    runtime = start_workers(spec, options.workers)
    loops = [BareLoop(spec, workload, options.workers)]
    if options.floor:
        loops.append(BareLoop(spec, workload, options.workers, is_tuned=True))
    rows = []
    try:
        time_rounds(spec, workload, runtime, 1)
        for block in range(blocks):
            seconds = [time_rounds(spec, workload, runtime, workload.rounds)]
            seconds += [loop.time_rounds(workload.rounds) for loop in loops]
            rows.append(seconds)
            raysim_time, *bare_times = (f"{value:.4f} s" for value in seconds)
            loops_text = " and ".join(
                f"{seconds_text} in {loop}"
                for loop, seconds_text in zip(LOOP_NAMES, bare_times, strict=False)
            )
            show(
                f"workload {name}, measurement {block + 1} of {blocks}: a round takes "
                f"{raysim_time} in raysim and {loops_text}"
            )
    finally:
        for loop in loops:
            loop.close()
        runtime.stop()
    if options.profile is not None:
        _write_profile(name, spec, workload, options.workers, options.profile, show)
    return _summarise_blocks(name, spec.lanes, workload.limit, rows)


def _summarise_blocks(
    name: str, lanes: int, limit: float, rows: Sequence[Sequence[float]]
) -> LoopResult:
    """Summarise the times of a workload, which were measured in several blocks.

    limit: the largest allowed ratio of raysim's time to that of the loop with `torch.optim.SGD`.
    rows: for each block the seconds per round of raysim, of this loop, and of the tuned loop if it
    was measured.
    """
    raysim, bare, *floor = (statistics.median(column) for column in zip(*rows, strict=True))
    ratios = tuple(row[0] / row[1] for row in rows)
    if not floor:
        return LoopResult(name, lanes, raysim, bare, ratios, limit)
    to_floor = tuple(row[0] / row[2] for row in rows)
    return LoopResult(name, lanes, raysim, bare, ratios, limit, floor[0], to_floor)


def main(
    names: list[str], root: str | None, out: Path, blocks: int, options: LoopOptions
) -> list[LoopResult]:
    """Measure workloads, print a table, and write the results to `out`.

    root: the folder that contains Fashion-MNIST; None downloads it; "" takes random pictures.
    blocks: the number of blocks of rounds for each workload.
    """
    from raysim.runtime import ray as cluster

    cluster.connect(cluster.RayOptions())
    try:
        results = [measure_workload(name, root, blocks, options, print) for name in names]
    finally:
        cluster.disconnect()
    print(
        f"seconds per round with {options.workers} processes of one thread each, in raysim and in "
        f"loops of plain PyTorch (medians of {blocks} measurements). ratio: raysim's seconds "
        "divided by those of the loop. promised: the highest ratio that raysim promises"
    )
    print(_table(results, options.floor))
    settings = {
        "torch": torch.__version__,
        "blocks": blocks,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "workers": options.workers,
        "lanes": options.lanes,
        "floor": options.floor,
    }
    stored = [{**asdict(result), "ratio": result.ratio} for result in results]
    write_json({"settings": settings, "results": stored}, out)
    return results


def _table(results: Sequence[LoopResult], has_floor: bool) -> str:
    head = ["workload", "lanes", "raysim", "bare loop", "ratio", "lowest", "highest", "promised"]
    if has_floor:
        head += ["tuned loop", "ratio", "lowest", "highest"]
    rows = []
    for result in results:
        ratios = result.ratios
        numbers = [result.raysim, result.bare, result.ratio, min(ratios), max(ratios), result.limit]
        if result.floor is not None:
            to_floor = result.to_floor
            numbers += [result.floor, statistics.median(to_floor), min(to_floor), max(to_floor)]
        texts = [f"{number:.3f}" for number in numbers]
        rows.append([result.workload, str(result.lanes), *texts])
    return format_table(text_columns(head, rows), terminal_width())
