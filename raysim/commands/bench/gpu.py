"""`raysim bench gpu --out DIR`: all that only a GPU can show, in half an hour, without Ray or Hydra.

Correctness of every method against the CPU, the same bits on one worker and on two, memory against the preflight, and
four workloads, each beside a plain loop in PyTorch on the same device in the same run: G1 is FedBR's RotatedMNIST
setting, G2 its CIFAR-10 setting with VGG11, G3 CIFAR-10 with 100 clients and ResNet-18, G4 a network without
convolutions. Pictures are synthetic, of the same shapes.
Each part is written down as soon as it is known; a later call with other parts completes the same page.
"""

from __future__ import annotations

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
from typing import Any

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
from raysim.models import Mlp, ModelRecipe, SmallCnn
from raysim.models.classifier import is_stochastic
from raysim.models.cnn import MnistCnn
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
from raysim.training.run_spec import Faults, RunSettings, RunSpec, build_networks
from raysim.training.worker import Worker

NEVER = 10**9
PARTS = ("correctness", "bits", "memory", "G1", "G2", "G3", "G4", "profile")
RESULTS = "results.json"
# A float32 is rounded so many times as coarsely as a float64. Where the same way is far off in float64, as with
# FedDecorr, which divides by deviations near 0, ten times as much is allowed.
COARSER = 10 * torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
Say = Callable[[str], object]
Found = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """How clients are trained: a column of the tables."""

    name: str
    lanes: int = 1
    graph: bool = False
    precision: str = "float32"

    def of(self, spec: RunSpec) -> RunSpec:
        """The run trained in this way."""
        return replace(spec, lanes=self.lanes, graph=self.graph, precision=self.precision)  # type: ignore[arg-type]


CHECKED = (Way("loop"), Way("graph", 1, True), Way("graph of lanes 3", 3, True))


@dataclass(frozen=True)
class Workload:
    """Clients of equal size that train one epoch; how much faster than the plain loop it shall be."""

    title: str
    model: ModelRecipe
    shape: tuple[int, int, int]
    clients: int
    samples: int  # of each
    cohort: int
    batch: int
    lr: float
    least: float
    lanes: tuple[int, ...] = (5, 10)

    @property
    def steps(self) -> int:
        """Of a client's epoch."""
        return -(-self.samples // self.batch)

    @property
    def ways(self) -> list[Way]:
        """What is measured."""
        best = self.best
        some = [Way(f"graph of lanes {count}", count, True) for count in self.lanes[:-1]]
        coarse = [
            replace(best, name=f"{best.name}, {kind}", precision=kind)
            for kind in ("tf32", "bfloat16")
        ]
        return [Way("loop"), Way("graph", 1, True), *some, best, *coarse]

    @property
    def best(self) -> Way:
        """As many at once as there are, in graphs, in float32."""
        return Way(f"graph of lanes {self.lanes[-1]}", self.lanes[-1], True)


WORKLOADS = {
    "G1": Workload(
        "RotatedMNIST, 4-layer CNN", MnistCnn(), (1, 28, 28), 10, 6000, 10, 64, 1e-3, 8.0
    ),
    "G2": Workload("CIFAR-10, VGG11", Vgg11(), (3, 32, 32), 10, 5000, 10, 32, 1e-2, 3.0),
    "G3": Workload(
        "CIFAR-10, 100 clients, ResNet-18", ResNet(18), (3, 32, 32), 100, 500, 10, 32, 1e-2, 2.0
    ),
    "G4": Workload(
        "MNIST, 100 clients, small MLP", Mlp((64,)), (1, 28, 28), 100, 600, 10, 10, 1e-2, 1.0
    ),
}
_TINY = {
    name: Workload(f"{work.title} (tiny)", Mlp((8,)), (1, 8, 8), 4, 16, 2, 8, 0.1, work.least, (2,))
    for name, work in WORKLOADS.items()
}


@dataclass(frozen=True)
class Options:
    """device: what is measured. minutes: in which all must be done; seconds: of each measurement. methods: those that
    are checked, None: all. tiny: sizes for a test of this command."""

    device: str = "cuda"
    minutes: float = 28.0
    seconds: float = 8.0
    parts: tuple[str, ...] = PARTS
    methods: tuple[str, ...] | None = None
    tiny: bool = False

    @property
    def workloads(self) -> Mapping[str, Workload]:
        """By name."""
        return _TINY if self.tiny else WORKLOADS


def tried_out(options: Options) -> Options:
    """The smallest sizes, which show that the command works and nothing else."""
    return replace(options, tiny=True, seconds=0.0, methods=("scaffold",))


# --- correctness -----------------------------------------------------------------------------------------------------
def every_method() -> dict[str, type[Method]]:
    """All methods of raysim, by name."""
    modules = [
        importlib.import_module(f"raysim.methods.{each.name}")
        for each in pkgutil.iter_modules(raysim.methods.__path__)
    ]
    found = [
        thing for module in modules for thing in vars(module).values() if isinstance(thing, type)
    ]
    ours = {
        cls
        for cls in found
        if issubclass(cls, Method) and "name" in vars(cls) and cls is not Method
    }
    return {cls.name: cls for cls in sorted(ours, key=lambda cls: cls.name)}


def _checked(
    make: Callable[[], Method] | None, dtype: torch.dtype, device: str, way: Way
) -> RunSpec:
    """Four clients for two rounds."""
    data = federate(
        Synthetic(shape=[1, 8, 8], samples=192, test_samples=40, classes=5), IID(clients=4), 0
    )
    method = _made(make, rounds=2)
    local = Local(lr=0.05, momentum=0.9, batch=8, epochs=1)
    if method is not None:
        local = with_required_settings(local, method)
    settings = RunSettings(
        rounds=2, local=local, evaluate=Evaluation(every=NEVER), faults=Faults(0.0)
    )
    methods = () if method is None else (method,)
    return way.of(RunSpec(SmallCnn(norm="batch"), methods, data, settings, device, dtype=dtype))


def _made(make: Callable[..., Method] | None, rounds: int) -> Method | None:
    """Make the method; one with ramps over a run, such as FRAug, needs the number of rounds."""
    if make is None:
        return None
    takes_rounds = "rounds" in inspect.signature(make).parameters
    return make(rounds=rounds) if takes_rounds else make()


def _ran(spec: RunSpec, cohort: int, workers: int = 1) -> tuple[np.ndarray, Coordinator]:
    """The vector at the end, and what each client kept to itself."""
    runtime = InProcess(*(Worker(spec, f"worker-{index}") for index in range(workers)))
    coordinator = Coordinator(replace(spec, device="cpu"), Synchronous(cohort), Ideal(), runtime)
    for _ in coordinator.run():
        pass
    private = [
        kept for _, state in sorted(coordinator.client_states.accepted()) for kept in _floats(state)
    ]
    return np.concatenate([coordinator.server.vector.numpy(), *private]), coordinator


def _floats(state: StoredState) -> Iterator[np.ndarray]:
    """All of a client state's numbers that training moves."""
    for values in (state.personal, *state.methods.values()):
        if values.dtype.kind == "f":
            yield values.ravel()


def _off(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest distance."""
    return float(np.abs(found - expected).max(initial=0.0))


def _distances(name: str, make: Callable[[], Method] | None, options: Options) -> Iterator[Found]:
    """Of every way on the device from the loop on the CPU, as a share of the largest change, and what is allowed.

    A model that draws in its steps draws other numbers on another device: then it is the loop on that device.
    """
    drawing = _draws(make)
    dtypes, device = (torch.float64, torch.float32), options.device if drawing else "cpu"
    expected, coordinator = zip(
        *(_ran(_checked(make, dtype, device, CHECKED[0]), 4) for dtype in dtypes), strict=True
    )
    start = coordinator[0].initial.shared.numpy()
    change = _off(expected[0][: len(start)], start) or 1.0
    for way in CHECKED:
        if way.graph and drawing:
            continue  # refused, as it should be
        finer = 0.0
        for dtype, reference in zip(dtypes, expected, strict=True):
            kind = str(dtype).removeprefix("torch.")
            row: Found = {
                "method": name,
                "dtype": kind,
                "way": way.name,
                "allowed": max(TOLERANCE[kind], finer),
            }
            try:
                found, _ = _ran(_checked(make, dtype, options.device, way), 4)
                row["distance"] = _off(found, reference) / change
                finer = COARSER * row["distance"]
            except Exception as error:  # what cannot be done in this way says so in its sentence
                row["refused"] = f"{type(error).__name__}: {first_line(error)}"
            yield row


def _draws(make: Callable[[], Method] | None) -> bool:
    """Whether the model draws in its steps, which cannot be recorded then."""
    networks, _ = build_networks(_checked(make, torch.float32, "cpu", CHECKED[0]))
    return is_stochastic(*networks.values())


def _makes(options: Options) -> dict[str, Callable[[], Method] | None]:
    methods: dict[str, Callable[[], Method] | None] = {"fedavg": None, **every_method()}
    return {name: methods[name] for name in options.methods or methods}


def correctness(options: Options, left: Callable[[], bool]) -> list[Found]:
    """Every method, in float64 and float32, in every way."""
    rows: list[Found] = []
    for name, make in _makes(options).items():
        if not left():
            break
        try:
            rows += _distances(name, make, options)
        except Exception as error:  # a method that does not suit this model is no part of the check
            text = f"{type(error).__name__}: {first_line(error)}"
            rows.append({"method": name, "way": "on the CPU", "refused": text})
    return rows


def bits(options: Options, left: Callable[[], bool]) -> list[Found]:
    """Whether one worker and two in this process end at the same bits, and a second run at those of the first."""
    rows: list[Found] = []
    for name, make in _makes(options).items():
        for way in CHECKED[:1] if _draws(make) else (CHECKED[0], CHECKED[-1]):
            if not left():
                return rows
            spec = _checked(make, torch.float32, options.device, way)
            try:
                one, again, two = (_ran(spec, 4, workers)[0] for workers in (1, 1, 2))
            except Exception as error:
                rows.append({"method": name, "way": way.name, "refused": first_line(error)})
                continue
            same = {"again": np.array_equal(one, again), "two workers": np.array_equal(one, two)}
            rows.append({"method": name, "way": way.name, **same})
    return rows


# --- speed -----------------------------------------------------------------------------------------------------------
def data_of(work: Workload) -> FederatedData:
    """Synthetic pictures, evenly split."""
    samples = work.clients * work.samples
    source = Synthetic(shape=list(work.shape), samples=samples, test_samples=200)
    return federate(source, IID(clients=work.clients), 0)


def spec_of(
    work: Workload, data: FederatedData, device: str, methods: Sequence[Method] = ()
) -> RunSpec:
    """One local epoch a round, nothing scored."""
    local = Local(lr=work.lr, batch=work.batch, epochs=1)
    settings = RunSettings(rounds=NEVER, local=local, evaluate=Evaluation(every=NEVER))
    return RunSpec(work.model, tuple(methods), data, settings, device)


class Use(threading.Thread):
    """Asks the driver, some times a second, whether the GPU is at work."""

    def __init__(self, device: str):
        super().__init__(daemon=True)
        self.device, self.seen, self._end = torch.device(device), list[float](), threading.Event()

    def run(self) -> None:
        """Until `mean` is asked for."""
        while not self._end.wait(0.2) and (share := gpu_utilization(self.device)) is not None:
            self.seen.append(share)

    def mean(self) -> float | None:
        """Of all that was seen; None where nobody knows."""
        self._end.set()
        self.join()
        return statistics.fmean(self.seen) if self.seen else None


@contextmanager
def _peak(device: str) -> Iterator[Found]:
    """What the device's memory held at most, and how busy it was."""
    found: Found = {}
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    use = Use(device)
    use.start()
    try:
        yield found
    finally:
        found["device_use"] = use.mean()
        if device.startswith("cuda"):
            found["peak_bytes"] = preflight.memory_use(device)[0]


def _rate(stamps: Sequence[float], work: Workload) -> Found:
    """Seconds a round after the first two, which allocate and record, and steps of clients a second."""
    seconds = statistics.median(np.diff(stamps[2:] if len(stamps) > 3 else stamps))
    return {
        "seconds_per_round": seconds,
        "client_steps_per_second": work.cohort * work.steps / seconds,
        "rounds": len(stamps) - 1,
    }


def raysim_rate(spec: RunSpec, work: Workload, seconds: float) -> Found:
    """Of rounds on one worker in this process."""
    with _peak(spec.device) as found:
        coordinator = Coordinator(
            replace(spec, device="cpu"), Synchronous(work.cohort), Ideal(), InProcess(Worker(spec))
        )
        events, stamps = coordinator.run(), list[float]()
        for event in events:
            if isinstance(event, Round):
                stamps.append(time.perf_counter())
                if len(stamps) >= 5 and stamps[-1] - stamps[1] > seconds:
                    break
        events.close()  # type: ignore[attr-defined]
    return {**_rate(stamps, work), **found}


@contextmanager
def _as_it_comes() -> Iterator[None]:
    """PyTorch's own choices of algorithms, which workers have made deterministic."""
    cudnn, mode = torch.backends.cudnn, torch.get_deterministic_debug_mode()
    before = cudnn.deterministic, cudnn.allow_tf32
    torch.set_deterministic_debug_mode("default")
    cudnn.deterministic, cudnn.allow_tf32 = False, True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.allow_tf32 = before


def eager_rate(spec: RunSpec, work: Workload, seconds: float) -> Found:
    """Of the loop that everybody writes: one client after another, `torch.optim.SGD`, data on the device, PyTorch as it
    comes, which on a GPU means convolutions in TF32."""
    device, dataset, train = torch.device(spec.device), spec.data.open(), spec.data.partition.train
    model = spec.model.build(spec.task.shape, spec.task.num_classes, 0).to(device)
    inputs = spec.data.pipeline.normalise(
        torch.from_numpy(dataset.inputs).to(device), torch.float32
    )
    labels = torch.from_numpy(dataset.labels).to(device)
    rows = [torch.from_numpy(train.rows(client)).to(device) for client in range(work.clients)]
    shared = {key: value.clone() for key, value in model.state_dict().items()}
    random, stamps, turn = torch.Generator(device).manual_seed(0), [time.perf_counter()], 0
    model.train()
    with _peak(spec.device) as found, _as_it_comes():
        while len(stamps) < 5 or stamps[-1] - stamps[1] < seconds:
            total = {
                key: torch.zeros_like(value, dtype=torch.float32) for key, value in shared.items()
            }
            for place in range(work.cohort):
                model.load_state_dict(shared)
                optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
                own = rows[(turn + place) % work.clients]
                order = torch.randperm(len(own), generator=random, device=device)
                for batch in own[order].split(work.batch):
                    optimizer.zero_grad()
                    cross_entropy(model(inputs[batch]), labels[batch]).backward()
                    optimizer.step()
                for key, value in model.state_dict().items():
                    total[key].add_(value, alpha=1 / work.cohort)
            shared, turn = (
                {key: value.to(shared[key].dtype) for key, value in total.items()},
                turn + work.cohort,
            )
            if device.type == "cuda":
                torch.cuda.synchronize()
            stamps.append(time.perf_counter())
    return {**_rate(stamps, work), **found}


def speed(name: str, options: Options, left: Callable[[], bool]) -> list[Found]:
    """A workload in every way beside the plain loop; G1 with FedBR as well."""
    work = options.workloads[name]
    data, rows = data_of(work), list[Found]()
    spec = spec_of(work, data, options.device)
    runs: list[tuple[str, Callable[[], Found]]] = [
        ("plain loop", partial(eager_rate, spec, work, options.seconds))
    ]
    runs += [
        (way.name, partial(raysim_rate, way.of(spec), work, options.seconds)) for way in work.ways
    ]
    if name == "G1":
        method = FedBR(pseudo_batch=min(64, work.batch), samples_per_mean=10)
        other = spec_of(work, data, options.device, [method])
        ways = [
            work.ways[0],
            *(way for way in work.ways if way.graph and way.precision != "bfloat16"),
        ]
        runs += [
            (f"FedBR, {way.name}", partial(raysim_rate, way.of(other), work, options.seconds))
            for way in ways
        ]
    for title, run in runs:
        if not left():
            break
        try:
            rows.append({"way": title, **run()})
        except Exception as error:  # one way that fails must not take the others down
            rows.append({"way": title, "refused": f"{type(error).__name__}: {first_line(error)}"})
    return rows


# --- memory and profile ----------------------------------------------------------------------------------------------
def memory(options: Options, left: Callable[[], bool]) -> list[Found]:
    """What the preflight says that a worker takes, and what it took at its peak."""
    rows: list[Found] = []
    for name, work in options.workloads.items():
        for way in (work.ways[0], work.best):
            if not left():
                return rows
            spec = way.of(spec_of(work, data_of(work), options.device))
            spec = replace(
                spec, settings=replace(spec.settings, evaluate=Evaluation())
            )  # which takes memory, too
            try:
                with _peak(options.device):
                    need = preflight.measure(spec)
                peak = raysim_rate(spec, work, 0.0).get(
                    "peak_bytes", preflight.memory_use(options.device)[0]
                )
                rows.append(
                    {"workload": name, "way": way.name, "preflight": need.job, "peak": peak}
                )
            except Exception as error:
                rows.append(
                    {
                        "workload": name,
                        "way": way.name,
                        "refused": f"{type(error).__name__}: {first_line(error)}",
                    }
                )
    return rows


def profiled(options: Options, folder: Path) -> list[Found]:
    """Where the time of G1 goes, in the loop and in graphs."""
    work, rows = options.workloads["G1"], list[Found]()
    for way in (work.ways[0], work.best):
        spec = replace(way.of(spec_of(work, data_of(work), options.device)), profile=True)
        spec = replace(spec, settings=replace(spec.settings, rounds=3))
        runtime = InProcess(Worker(spec))
        for event in Coordinator(
            replace(spec, device="cpu"), Synchronous(work.cohort), Ideal(), runtime
        ).run():
            if isinstance(event, Profiled):
                prefix = f"G1-{way.name.replace(' ', '-').replace(',', '')}-"
                paths = profile.write(event, folder, f"G1, {way.name}", prefix)
                rows.append(
                    {
                        "way": way.name,
                        "picture": paths[-1].name,
                        "shares": profile.shares(event)["worker-0"],
                    }
                )
    return rows


# --- the command -----------------------------------------------------------------------------------------------------
def about(device: str) -> Found:
    """What was measured, and with what."""
    cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if cuda else device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
    }


def main(folder: Path, options: Options, say: Say = print) -> Found:
    """Measure the parts, write results.json and page.md after each. Returns all results of the folder."""
    if unknown := [part for part in options.parts if part not in PARTS]:
        raise ValueError(f"--parts {unknown[0]} does not exist: use {', '.join(PARTS)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"--device {options.device} needs a GPU that torch does not see: set --device cpu, or look at it"
        )
    path = make_folder(folder) / RESULTS
    found: Found = json.loads(path.read_text()) if path.exists() else {}
    found["about"] = about(options.device)
    end = time.monotonic() + 60 * options.minutes

    def left() -> bool:
        return time.monotonic() < end

    measure: dict[str, Callable[[], list[Found]]] = {
        "correctness": partial(correctness, options, left),
        "bits": partial(bits, options, left),
        "memory": partial(memory, options, left),
        **{name: partial(speed, name, options, left) for name in options.workloads},
        "profile": partial(profiled, options, folder),
    }
    found["workloads"] = {
        name: {**vars(work), "model": type(work.model).__name__}
        for name, work in options.workloads.items()
    }
    for part in options.parts:
        if not left():
            say(f"{part}: no time left")
            break
        since = time.monotonic()
        found[part] = measure[part]()
        say(f"{part}: {len(found[part])} rows in {time.monotonic() - since:.0f} s")
        write_json(found, path)
        write_page(found, folder)
    return found
