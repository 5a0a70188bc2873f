"""Implement `raysim bench gpu --out DIR`: half an hour of measurements on one GPU.

It needs neither Ray nor Hydra, and measures:

- the results of every method, compared with the CPU;
- whether a repeated run, and a run on two workers, give equal bits;
- memory, compared with raysim's estimate before a run;
- the speed of the workloads G1 to G4, compared with a plain PyTorch loop;
- where the time of the workload G1 goes (a profile).

The workloads have synthetic pictures in the sizes of known data sets (`WORKLOADS`). A later call
with other --parts adds to DIR/results.json and DIR/page.md.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import pkgutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import raysim.methods
from raysim.api.client_state import StoredState
from raysim.api.declarations import Evaluation, Local
from raysim.api.declare import with_required_settings
from raysim.api.method import Method
from raysim.commands.bench.gpu_page import TOLERANCE, write_page
from raysim.data.federated import FederatedData, federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.fedbr import FedBR
from raysim.methods.lora_factors import LORA_METHODS
from raysim.models import Mlp, ModelRecipe, SmallCnn
from raysim.models.classifier import is_stochastic
from raysim.models.cnn import MnistCnn
from raysim.models.lora import Lora
from raysim.models.resnet import ResNet
from raysim.models.vgg import Vgg11
from raysim.primitives.errors import first_line
from raysim.primitives.files import make_folder
from raysim.results import profile
from raysim.results.history import write_json
from raysim.runtime import preflight
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Profiled, Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.profile import gpu_utilization
from raysim.training.run_spec import Faults, Precision, RunSettings, RunSpec, build_networks
from raysim.training.worker import Worker

NEVER = 10**9  # a number of rounds that no run reaches
SPEEDS = ("G1", "G2", "G3", "G4")
PARTS = ("correctness", "bits", "memory", *SPEEDS, "profile")
RESULTS = "results.json"
# How much more coarsely float32 rounds than float64. Where the same mode is far off in float64, as
# with FedDecorr, which divides by deviations near 0, ten times as much is allowed.
COARSER_ROUNDING = 10 * torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
COARSE_PRECISIONS: tuple[Precision, ...] = ("tf32", "bfloat16")
CHECK_CLIENTS = 4
MIN_ROUNDS = 4  # of a speed measurement; the first two rounds allocate memory and record graphs
UTILIZATION_INTERVAL_S = 0.2
Print: TypeAlias = Callable[[str], object]
HasTime: TypeAlias = Callable[[], bool]  # whether the benchmark has time for another measurement
MakeMethod: TypeAlias = Callable[..., Method] | None  # None: FedAvg, which has no method
ResultRow: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class ExecutionMode:
    """A way to execute the steps of clients.

    name: the name in tables. "graph of lanes 10" is a CUDA graph of a step that trains 10 clients
    at once.
    lanes: the number of clients trained at once.
    graph: True records a step as a CUDA graph and replays it.
    precision: the number format of matrix products.
    """

    name: str
    lanes: int = 1
    graph: bool = False
    precision: Precision = "float32"

    def apply(self, spec: RunSpec) -> RunSpec:
        """Return the run's spec with this mode."""
        return replace(spec, lanes=self.lanes, graph=self.graph, precision=self.precision)


LOOP = ExecutionMode("loop")
GRAPH = ExecutionMode("graph", 1, True)
CHECKED_MODES = (LOOP, GRAPH, ExecutionMode("graph of lanes 3", 3, True))


@dataclass(frozen=True)
class GpuWorkload:
    """A speed measurement, in which clients of equal size train one epoch in each round.

    shape: channels, height and width of a picture.
    samples: the number of samples of each client.
    least: the required speed, as a multiple of that of a plain PyTorch loop.
    lanes: the numbers of lanes that are measured.
    """

    title: str
    model: ModelRecipe
    shape: tuple[int, int, int]
    clients: int
    samples: int
    cohort: int
    batch: int
    lr: float
    least: float
    lanes: tuple[int, ...] = (5, 10)

    @property
    def steps(self) -> int:
        """Return the number of steps of a client's epoch."""
        return -(-self.samples // self.batch)

    @property
    def modes(self) -> list[ExecutionMode]:
        """Return the execution modes that are measured."""
        graphs = [_graph_of_lanes(count) for count in self.lanes[:-1]]
        best = self.best_mode
        coarse = []
        for precision in COARSE_PRECISIONS:
            name = f"{best.name}, {precision}"
            coarse.append(replace(best, name=name, precision=precision))
        return [LOOP, GRAPH, *graphs, best, *coarse]

    @property
    def best_mode(self) -> ExecutionMode:
        """Return the mode with the most lanes, with CUDA graphs, in float32."""
        return _graph_of_lanes(self.lanes[-1])


def _graph_of_lanes(count: int) -> ExecutionMode:
    return ExecutionMode(f"graph of lanes {count}", count, True)


WORKLOADS = {
    "G1": GpuWorkload(
        "RotatedMNIST, 4-layer CNN", MnistCnn(), (1, 28, 28), 10, 6000, 10, 64, 1e-3, 8.0
    ),
    "G2": GpuWorkload("CIFAR-10, VGG11", Vgg11(), (3, 32, 32), 10, 5000, 10, 32, 1e-2, 3.0),
    "G3": GpuWorkload(
        "CIFAR-10, 100 clients, ResNet-18", ResNet(18), (3, 32, 32), 100, 500, 10, 32, 1e-2, 2.0
    ),
    "G4": GpuWorkload(
        "MNIST, 100 clients, small MLP", Mlp((64,)), (1, 28, 28), 100, 600, 10, 10, 1e-2, 1.0
    ),
}


def _tiny(workload: GpuWorkload) -> GpuWorkload:
    title = f"{workload.title} (tiny)"
    return GpuWorkload(title, Mlp((8,)), (1, 8, 8), 4, 16, 2, 8, 0.1, workload.least, (2,))


TINY_WORKLOADS = {name: _tiny(workload) for name, workload in WORKLOADS.items()}


@dataclass(frozen=True)
class GpuOptions:
    """The options of `raysim bench gpu`.

    minutes: limit for all parts.
    seconds: duration of each speed measurement.
    parts: the measurements to make, such as "correctness" or "G1".
    methods: the methods to check; None checks all.
    tiny: True uses the smallest sizes, to test the command itself.
    """

    device: str = "cuda"
    minutes: float = 28.0
    seconds: float = 8.0
    parts: tuple[str, ...] = PARTS
    methods: tuple[str, ...] | None = None
    tiny: bool = False

    @property
    def workloads(self) -> Mapping[str, GpuWorkload]:
        """Return the workloads by name."""
        return TINY_WORKLOADS if self.tiny else WORKLOADS


def tiny_options(options: GpuOptions) -> GpuOptions:
    """Return options with the smallest sizes, which only test that the command works."""
    return replace(options, tiny=True, seconds=0.0, methods=("scaffold",))


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# --- correctness --------------------------------------------------------------------------------
def every_method() -> dict[str, type[Method]]:
    """Return the class of each method of raysim, by the method's name."""
    methods: dict[str, type[Method]] = {}
    for info in pkgutil.iter_modules(raysim.methods.__path__):
        module = importlib.import_module(f"raysim.methods.{info.name}")
        for member in vars(module).values():
            is_method = isinstance(member, type) and issubclass(member, Method)
            if is_method and member is not Method and "name" in vars(member):
                methods[member.name] = member
    return dict(sorted(methods.items()))


def check_spec(make: MakeMethod, dtype: torch.dtype, device: str, mode: ExecutionMode) -> RunSpec:
    """Return the run with which a method is checked: four clients and two rounds.

    make: the class of the method; None checks FedAvg.
    dtype: the type of all floats.
    mode: how the worker executes the steps of clients.
    """
    source = Synthetic(shape=[1, 8, 8], samples=192, test_samples=40, classes=5)
    data = federate(source, IID(clients=CHECK_CLIENTS), 0)
    rounds = 2
    method = _make_method(make, rounds)
    local = Local(lr=0.05, momentum=0.9, batch=8, epochs=1)
    if method is not None:
        local = with_required_settings(local, method)
    settings = RunSettings(
        rounds=rounds, local=local, evaluate=Evaluation(every=NEVER), faults=Faults(0.0)
    )
    methods = () if method is None else (method,)
    needs_adapters = method is not None and method.name in LORA_METHODS
    lora = Lora(rank=2) if needs_adapters else Lora()
    model = SmallCnn(norm="batch", lora=lora)
    spec = RunSpec(model, methods, data, settings, device, dtype=dtype)
    return mode.apply(spec)


def _make_method(make: MakeMethod, rounds: int) -> Method | None:
    """Return a new method; None for FedAvg.

    make: the class of the method; None stands for FedAvg.
    rounds: the number of rounds of the run, for methods that have such an argument.
    """
    if make is None:
        return None
    takes_rounds = "rounds" in inspect.signature(make).parameters
    return make(rounds=rounds) if takes_rounds else make()


def _run_check(spec: RunSpec, workers: int = 1) -> tuple[np.ndarray, Coordinator]:
    """Execute a run; return one array with its results, and the coordinator.

    The array has the final vector, then the floats of all client states.
    workers: the number of workers.
    """
    runtime = InProcess(*(Worker(spec, f"worker-{index}") for index in range(workers)))
    server_spec = replace(spec, device="cpu")
    coordinator = Coordinator(server_spec, Synchronous(CHECK_CLIENTS), Ideal(), runtime)
    for _ in coordinator.run():
        pass
    arrays = [coordinator.server.vector.numpy()]
    for _, state in sorted(coordinator.client_states.committed()):
        arrays += _floats(state)
    return np.concatenate(arrays), coordinator


def _floats(state: StoredState) -> Iterator[np.ndarray]:
    """Yield the arrays of a client state that contain floats, each as a flat array."""
    for values in (state.personal, *state.methods.values()):
        if values.dtype.kind == "f":
            yield values.ravel()


def _largest_difference(values: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(values - expected).max(initial=0.0))


def _distances(name: str, make: MakeMethod, options: GpuOptions) -> Iterator[ResultRow]:
    """Run a method on the measured device; yield how far its results are from a reference run.

    There is a row for each of `CHECKED_MODES` and each dtype. The reference run is on the CPU,
    without lanes and graphs. If training steps draw random numbers, it is on the measured device
    instead. Modes with graphs are then left out.

    "distance" is the largest difference between the two results. It is divided by the largest
    change of a parameter in the reference run in float64. "allowed" is the largest distance that is
    accepted.
    make: the class of the method; None stands for FedAvg.
    """
    is_drawing = _draws_in_steps(make)
    reference_device = options.device if is_drawing else "cpu"
    references = {}
    for dtype in (torch.float64, torch.float32):
        spec = check_spec(make, dtype, reference_device, LOOP)
        references[dtype], coordinator = _run_check(spec)
        if dtype == torch.float64:
            start = coordinator.initial.shared.numpy()
            end = references[dtype][: len(start)]
            largest_change = _largest_difference(end, start) or 1.0
    for mode in CHECKED_MODES:
        if mode.graph and is_drawing:
            continue  # raysim refuses it
        float64_allowance = 0.0
        for dtype, reference in references.items():
            dtype_name = str(dtype).removeprefix("torch.")
            allowed = max(TOLERANCE[dtype_name], float64_allowance)
            row: ResultRow = {"method": name, "dtype": dtype_name, "way": mode.name}
            row["allowed"] = allowed
            try:
                values, _ = _run_check(check_spec(make, dtype, options.device, mode))
                row["distance"] = _largest_difference(values, reference) / largest_change
                float64_allowance = COARSER_ROUNDING * row["distance"]
            except Exception as error:  # the table shows why a mode is impossible
                row["refused"] = _describe_error(error)
            yield row


def _draws_in_steps(make: MakeMethod) -> bool:
    """Return True if training steps may draw random numbers, for example for dropout.

    Such steps cannot be recorded as a CUDA graph.
    make: the class of the method that is trained; None stands for FedAvg.
    """
    networks, _ = build_networks(check_spec(make, torch.float32, "cpu", LOOP))
    return is_stochastic(*networks.values())


def _checked_methods(options: GpuOptions) -> dict[str, MakeMethod]:
    methods: dict[str, MakeMethod] = {"fedavg": None, **every_method()}
    return {name: methods[name] for name in options.methods or methods}


def measure_correctness(options: GpuOptions, has_time: HasTime) -> list[ResultRow]:
    """Compare the results of every method with those of the CPU, in every execution mode.

    Every method runs in float64 and in float32.
    has_time: function that returns False when the time limit is reached.
    """
    rows: list[ResultRow] = []
    for name, make in _checked_methods(options).items():
        if not has_time():
            break
        try:
            rows += _distances(name, make, options)
        except Exception as error:  # a method that does not suit this model is not checked
            refused = _describe_error(error)
            rows.append({"method": name, "way": "on the CPU", "refused": refused})
    return rows


def measure_bits(options: GpuOptions, has_time: HasTime) -> list[ResultRow]:
    """Check that a run has the same bits when it is repeated ("again"), and on two workers.

    Return a row for each method and mode: one client at a time, or several with a CUDA graph.
    Methods whose steps draw random numbers have only the first mode.
    has_time: returns False when the time limit is reached.
    """
    rows: list[ResultRow] = []
    for name, make in _checked_methods(options).items():
        modes = [LOOP] if _draws_in_steps(make) else [LOOP, CHECKED_MODES[-1]]
        for mode in modes:
            if not has_time():
                return rows
            spec = check_spec(make, torch.float32, options.device, mode)
            row: ResultRow = {"method": name, "way": mode.name}
            try:
                first, _ = _run_check(spec)
                second, _ = _run_check(spec)
                two_workers, _ = _run_check(spec, workers=2)
                row["again"] = np.array_equal(first, second)
                row["two workers"] = np.array_equal(first, two_workers)
            except Exception as error:
                row["refused"] = first_line(error)
            rows.append(row)
    return rows


# --- speed --------------------------------------------------------------------------------------
def _data_of(workload: GpuWorkload) -> FederatedData:
    """Return synthetic pictures, split evenly over the clients."""
    samples = workload.clients * workload.samples
    source = Synthetic(shape=list(workload.shape), samples=samples, test_samples=200)
    return federate(source, IID(clients=workload.clients), 0)


def _spec_of(
    workload: GpuWorkload, data: FederatedData, device: str, methods: Sequence[Method] = ()
) -> RunSpec:
    """Return a run with one local epoch per round, without evaluation.

    workload: the model and the training settings.
    data: the clients' data.
    methods: the methods of the run; () is FedAvg.
    """
    local = Local(lr=workload.lr, batch=workload.batch, epochs=1)
    settings = RunSettings(rounds=NEVER, local=local, evaluate=Evaluation(every=NEVER))
    return RunSpec(workload.model, tuple(methods), data, settings, device)


def _coordinator(spec: RunSpec, workload: GpuWorkload) -> Coordinator:
    """Return a coordinator that executes a run with one worker in this process."""
    runtime = InProcess(Worker(spec))
    server_spec = replace(spec, device="cpu")
    return Coordinator(server_spec, Synchronous(workload.cohort), Ideal(), runtime)


class UtilizationMonitor(threading.Thread):
    """A thread that asks the GPU's driver several times per second whether the GPU is working."""

    def __init__(self, device: str):
        super().__init__(daemon=True)
        self.device = torch.device(device)
        self.shares: list[float] = []
        self._end = threading.Event()

    def run(self) -> None:
        """Sample the GPU's utilization from its driver at a fixed interval until `mean` is called.

        Stop at once if the driver gives no value.
        """
        while not self._end.wait(UTILIZATION_INTERVAL_S):
            share = gpu_utilization(self.device)
            if share is None:
                return
            self.shares.append(share)

    def mean(self) -> float | None:
        """Stop the thread; return the share of time in which the GPU was busy, 0 to 1.

        Return None if the GPU's device driver gave no values.
        """
        self._end.set()
        self.join()
        return statistics.fmean(self.shares) if self.shares else None


@contextmanager
def _device_use(device: str) -> Iterator[ResultRow]:
    """Measure how the code inside `with` uses the device.

    Yield a row whose values are set when the code ends: "device_use" is the share of time in which
    the GPU worked, or None if unknown; "peak_bytes" is this process's peak memory on the GPU. On a
    CPU, the row has no "peak_bytes".
    device: such as "cuda:0".
    """
    row: ResultRow = {}
    is_cuda = device.startswith("cuda")
    if is_cuda:
        gc.collect()  # an earlier run's CUDA graphs keep their memory until they are collected
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    monitor = UtilizationMonitor(device)
    monitor.start()
    try:
        yield row
    finally:
        row["device_use"] = monitor.mean()
        if is_cuda:
            row["peak_bytes"] = preflight.memory_use(device)[0]


def _rate(times: Sequence[float], workload: GpuWorkload) -> ResultRow:
    """Return a row with the seconds per round (median) and the client steps per second.

    If there are more than two rounds, the first two are left out, because they allocate memory and
    record graphs.
    times: clock readings at the start of the first round and at the end of each round.
    """
    seconds = statistics.median(np.diff(times[2:] if len(times) > 3 else times))
    return {
        "seconds_per_round": seconds,
        "client_steps_per_second": workload.cohort * workload.steps / seconds,
        "rounds": len(times) - 1,
    }


def _is_long_enough(times: Sequence[float], seconds: float) -> bool:
    rounds = len(times) - 1
    return rounds >= MIN_ROUNDS and times[-1] - times[1] >= seconds


def raysim_rate(spec: RunSpec, workload: GpuWorkload, seconds: float) -> ResultRow:
    """Measure raysim's speed on one worker in this process.

    seconds: duration of the measurement.
    """
    with _device_use(spec.device) as row:
        events = _coordinator(spec, workload).run()
        times = [time.perf_counter()]
        for event in events:
            if isinstance(event, Round):
                times.append(time.perf_counter())
                if _is_long_enough(times, seconds):
                    break
        events.close()  # type: ignore[attr-defined]
    return {**_rate(times, workload), **row}


@contextmanager
def _default_algorithms() -> Iterator[None]:
    """Use PyTorch's default algorithms inside `with`, instead of deterministic ones."""
    cudnn = torch.backends.cudnn
    mode = torch.get_deterministic_debug_mode()
    before = cudnn.deterministic, cudnn.allow_tf32
    torch.set_deterministic_debug_mode("default")
    cudnn.deterministic, cudnn.allow_tf32 = False, True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.allow_tf32 = before


class PlainLoop:
    """A plain PyTorch loop on one device: it trains one client after another with SGD.

    The optimizer is `torch.optim.SGD`.
    """

    def __init__(self, spec: RunSpec, workload: GpuWorkload):
        self.workload = workload
        self.device = device = torch.device(spec.device)
        dataset, train = spec.data.open(), spec.data.partition.train
        self.model = spec.model.build(spec.task.shape, spec.task.num_classes, 0).to(device)
        pixels = torch.from_numpy(dataset.inputs).to(device)
        self.inputs = spec.data.pipeline.normalise(pixels, torch.float32)
        self.labels = torch.from_numpy(dataset.labels).to(device)
        clients = range(workload.clients)
        self.rows = [torch.from_numpy(train.rows(client)).to(device) for client in clients]
        self.shared = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.generator = torch.Generator(device).manual_seed(0)
        self.next_client = 0
        self.model.train()

    def round(self) -> None:
        """Train a cohort, and average the clients' models."""
        share = 1 / self.workload.cohort
        totals = {}
        for key, value in self.shared.items():
            totals[key] = torch.zeros_like(value, dtype=torch.float32)
        for _ in range(self.workload.cohort):
            self._train(self.rows[self.next_client % self.workload.clients])
            self.next_client += 1
            for key, value in self.model.state_dict().items():
                totals[key].add_(value, alpha=share)
        self.shared = {key: total.to(self.shared[key].dtype) for key, total in totals.items()}
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _train(self, rows: torch.Tensor) -> None:
        """Train one client for one epoch.

        rows: the positions of the client's samples in the data.
        """
        self.model.load_state_dict(self.shared)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.workload.lr)
        order = torch.randperm(len(rows), generator=self.generator, device=self.device)
        for batch in rows[order].split(self.workload.batch):
            optimizer.zero_grad()
            cross_entropy(self.model(self.inputs[batch]), self.labels[batch]).backward()
            optimizer.step()


def plain_rate(spec: RunSpec, workload: GpuWorkload, seconds: float) -> ResultRow:
    """Measure the speed of a plain PyTorch loop that trains the clients without raysim.

    The data are on the device. On a GPU, convolutions use TF32.
    spec: has the data, the model and the device.
    workload: the loop's training settings.
    seconds: duration of the measurement.
    """
    loop = PlainLoop(spec, workload)
    times = [time.perf_counter()]
    with _device_use(spec.device) as row, _default_algorithms():
        while not _is_long_enough(times, seconds):
            loop.round()
            times.append(time.perf_counter())
    return {**_rate(times, workload), **row}


def measure_speed(name: str, options: GpuOptions, has_time: HasTime) -> list[ResultRow]:
    """Return rows with the speed of a workload in raysim and in a plain PyTorch loop.

    raysim is measured in every execution mode of the workload, and for G1 also with the method
    FedBR.
    name: the workload, such as "G1".
    has_time: returns False when the time limit is reached.
    """
    workload = options.workloads[name]
    data = _data_of(workload)
    spec = _spec_of(workload, data, options.device)
    measurements: dict[str, Callable[[], ResultRow]] = {
        "plain loop": partial(plain_rate, spec, workload, options.seconds)
    }
    for mode in workload.modes:
        moded = mode.apply(spec)
        measurements[mode.name] = partial(raysim_rate, moded, workload, options.seconds)
    if name == "G1":
        method = FedBR(pseudo_batch=min(64, workload.batch), samples_per_mean=10)
        spec = _spec_of(workload, data, options.device, [method])
        for mode in workload.modes:
            if mode == LOOP or (mode.graph and mode.precision != "bfloat16"):
                moded = mode.apply(spec)
                title = f"FedBR, {mode.name}"
                measurements[title] = partial(raysim_rate, moded, workload, options.seconds)
    rows: list[ResultRow] = []
    for title, measure in measurements.items():
        if not has_time():
            break
        try:
            rows.append({"way": title, **measure()})
        except Exception as error:  # the error is stored, and the other modes are measured
            rows.append({"way": title, "refused": _describe_error(error)})
    return rows


# --- memory and profile -------------------------------------------------------------------------
def measure_memory(options: GpuOptions, has_time: HasTime) -> list[ResultRow]:
    """Compare the estimated memory of a worker with its measured peak.

    has_time: function that returns False when the time limit is reached.
    """
    rows: list[ResultRow] = []
    for name, workload in options.workloads.items():
        for mode in (LOOP, workload.best_mode):
            if not has_time():
                return rows
            spec = mode.apply(_spec_of(workload, _data_of(workload), options.device))
            # An evaluation takes memory, too.
            spec = replace(spec, settings=replace(spec.settings, evaluate=Evaluation()))
            row: ResultRow = {"workload": name, "way": mode.name}
            try:
                with _device_use(options.device):
                    row["preflight"] = preflight.measure(spec).job
                measured = raysim_rate(spec, workload, 0.0)
                usual = preflight.memory_use(options.device)[0]
                row["peak"] = measured.get("peak_bytes", usual)
            except Exception as error:
                row = {"workload": name, "way": mode.name, "refused": _describe_error(error)}
            rows.append(row)
    return rows


def measure_profile(options: GpuOptions, folder: Path) -> list[ResultRow]:
    """Write two profiles of the workload G1: one without and one with CUDA graphs.

    Return a row for each profile, with the file name of its picture.
    folder: the folder of the profiles.
    """
    workload = options.workloads["G1"]
    rows: list[ResultRow] = []
    for mode in (LOOP, workload.best_mode):
        spec = mode.apply(_spec_of(workload, _data_of(workload), options.device))
        spec = replace(spec, profile=True, settings=replace(spec.settings, rounds=3))
        for event in _coordinator(spec, workload).run():
            if isinstance(event, Profiled):
                prefix = f"G1-{mode.name.replace(' ', '-').replace(',', '')}-"
                paths = profile.write(event, folder, f"G1, {mode.name}", prefix)
                shares = profile.shares(event)["worker-0"]
                rows.append({"way": mode.name, "picture": paths[-1].name, "shares": shares})
    return rows


# --- the command --------------------------------------------------------------------------------
def describe_device(device: str) -> ResultRow:
    """Return the device's name, and the versions of PyTorch and CUDA."""
    is_cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
    }


def _format_device(about: Mapping[str, Any]) -> str:
    return f"{about['device']} with torch {about['torch']}"


def main(folder: Path, options: GpuOptions, say: Print = print) -> dict[str, Any]:
    """Make the measurements in `options.parts`; return new and earlier results.

    folder: has the file results.json with earlier results. This file and page.md are written after
    each part.
    say: gets a line for each part.
    Raise `ValueError` for an unknown part, for a CUDA device if torch sees no GPU, and if `folder`
    has results of another device or another version of PyTorch.
    """
    for part in options.parts:
        if part not in PARTS:
            raise ValueError(f"--parts {part} does not exist. Use {', '.join(PARTS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"--device {options.device}: torch sees no GPU. Check its driver, or set --device cpu."
        )
    path = make_folder(folder) / RESULTS
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    about = describe_device(options.device)
    earlier = results.get("about", about)
    if earlier != about:
        raise ValueError(
            f"--out {folder}: this folder has results of {_format_device(earlier)}, and this "
            f"device is {_format_device(about)}. Use another folder"
        )
    results["about"] = about
    results["workloads"] = {
        name: {**vars(workload), "model": type(workload.model).__name__}
        for name, workload in options.workloads.items()
    }
    deadline = time.monotonic() + 60 * options.minutes

    def has_time() -> bool:
        return time.monotonic() < deadline

    measurements: dict[str, Callable[[], list[ResultRow]]] = {
        "correctness": partial(measure_correctness, options, has_time),
        "bits": partial(measure_bits, options, has_time),
        "memory": partial(measure_memory, options, has_time),
        **{name: partial(measure_speed, name, options, has_time) for name in SPEEDS},
        "profile": partial(measure_profile, options, folder),
    }
    for part in options.parts:
        if not has_time():
            say(
                f"part {part} and all later parts are skipped, because the time limit (--minutes "
                f"{options.minutes:g}) has passed. To measure this part, run the command again "
                f"with --parts {part}"
            )
            break
        since = time.monotonic()
        results[part] = measurements[part]()
        seconds = time.monotonic() - since
        say(f"part {part}: {len(results[part])} measurements took {seconds:.0f} s")
        write_json(results, path)
        write_page(results, folder)
    return results
