"""Measure the time of a method's local step compared with FedAvg: `raysim bench steps`.

A method and its reference are measured in turns; the result is the median ratio of their times. The
reference is FedBN for FRAug, and FedAvg for all other methods.

Most limits of this ratio follow from the passes in a step; a forward pass costs 1, a backward pass
2. Such a limit is the cost of the method's passes divided by that of FedAvg's passes, plus a few
percent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from raysim.api.declarations import Evaluation, Local
from raysim.api.method import Method
from raysim.data.federated import federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.dann import Dann
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbr import FedBR
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedcm import FedCM
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedlc import FedLC
from raysim.methods.fedmix import FedMix
from raysim.methods.fedntd import FedNTD
from raysim.methods.fedprox import FedProx
from raysim.methods.fedrs import FedRS
from raysim.methods.fraug import FRAug
from raysim.methods.groupdro import GroupDRO
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.methods.scaffold import Scaffold
from raysim.methods.vhl import Vhl
from raysim.models.cnn import DigitsCnn, MnistCnn
from raysim.primitives.output import terminal_width
from raysim.results.history import write_json
from raysim.results.tables import format_table, text_columns
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.determinism import make_deterministic
from raysim.training.run_spec import RunSettings, RunSpec
from raysim.training.worker import Worker

BATCH, STEPS, ROUNDS = 64, 10, 1
CLIENTS = 2
NEVER = 10**9  # rounds between evaluations

# Each method with the largest ratio that we promise; None: no promise.
METHODS: Mapping[str, tuple[Callable[[], Method], float | None]] = {
    "fedbr": (FedBR, 2.5),
    "moon": (Moon, 1.8),
    "fedntd": (FedNTD, 1.45),
    "vhl": (lambda: Vhl(virtual_batch=BATCH), 2.2),
    "feddecorr": (FedDecorr, 1.1),
    "fedcm": (FedCM, 1.05),
    "mixup": (Mixup, 1.05),
    "fedlc": (FedLC, 1.03),
    "fedrs": (FedRS, 1.03),
    "fedprox": (FedProx, None),
    "scaffold": (Scaffold, None),
    "groupdro": (GroupDRO, None),
    "dann": (Dann, None),
    "fedmix": (FedMix, None),
}


@dataclass(frozen=True)
class StepCost:
    """The time of a method's local step, compared with that of a reference method.

    The reference is FedBN for FRAug, and FedAvg for all other methods.
    seconds: the median time of one local step. For FedBSS, it is the median time of all jobs in a
    measurement.
    ratio: the median of `ratios`.
    ratios: for each measurement, the method's seconds divided by those of the reference.
    limit: the ratio that raysim promises not to exceed; None for no promise.
    """

    method: str
    seconds: float
    ratio: float
    ratios: tuple[float, ...]
    limit: float | None


def _settings(local: Local) -> RunSettings:
    return RunSettings(rounds=1 + ROUNDS, local=local, evaluate=Evaluation(every=NEVER))


def step_spec(*methods: Method) -> RunSpec:
    """Return a run of two clients on random pictures of 14 x 14 pixels.

    The model is the network that the FedBR paper uses for RotatedMNIST.
    """
    source = Synthetic(shape=[1, 14, 14], samples=1280, test_samples=100, mean=[0.5], std=[0.5])
    data = federate(source, IID(clients=CLIENTS), 0)
    local = Local(lr=0.01, epochs=None, steps=STEPS, batch=BATCH)
    return RunSpec(MnistCnn(), methods, data, _settings(local))


def _run_spec(spec: RunSpec) -> Coordinator:
    coordinator = Coordinator(spec, Synchronous(CLIENTS), Ideal(), InProcess(Worker(spec)))
    for _ in coordinator.run():
        pass
    return coordinator


def _sum_column(coordinator: Coordinator, column: str) -> float:
    """Return the sum of a column of the history over all rounds but the first.

    The first round is not typical: memory is allocated in it, and the method MOON has no previous
    local models yet.
    """
    return sum(float(row[column] or 0) for row in coordinator.rows[1:])


def seconds_per_step(*methods: Method) -> float:
    """Return the seconds of a local step with these methods."""
    return _seconds_per_step(_run_spec(step_spec(*methods)))


def _seconds_per_step(coordinator: Coordinator) -> float:
    return _sum_column(coordinator, "worker_seconds") / (CLIENTS * STEPS * ROUNDS)


def fedbss_and_its_parts() -> tuple[float, float]:
    """Return the seconds of FedBSS's jobs, and the seconds of FedAvg for the same work.

    A job of FedBSS makes a forward pass over all samples of a client, and trains on some of them.
    The second result is the time of these forward passes, plus the time in which FedAvg trains on
    as many samples as FedBSS.
    """
    settings = _settings(Local(lr=0.01, batch=BATCH, epochs=3))
    fedbss = _run_spec(replace(step_spec(FedBSS(0)), settings=settings))
    fedavg = _run_spec(replace(step_spec(), settings=settings))
    trainer = Worker(fedavg.spec).trainer
    trainer.set_training(False)
    since = time.perf_counter()
    with torch.no_grad():
        for client in range(CLIENTS):
            for inputs, _ in trainer.client_samples(client):
                trainer.vector.networks["model"](inputs)
    forward_seconds = (time.perf_counter() - since) * ROUNDS
    share = _sum_column(fedbss, "samples") / _sum_column(fedavg, "samples")
    step_seconds = share * _sum_column(fedavg, "worker_seconds")
    return _sum_column(fedbss, "worker_seconds"), step_seconds + forward_seconds


def fraug_and_fedbn() -> tuple[float, float]:
    """Return the seconds per step of FRAug and of FedBN.

    Both train the network that FRAug uses for digits (32 x 32 pixels).
    """
    source = Synthetic(shape=[3, 32, 32], samples=640, test_samples=100, mean=[0.5], std=[0.5])
    data = federate(source, IID(clients=CLIENTS), 0)
    local = Local(lr=0.01, momentum=0.5, epochs=None, steps=STEPS, batch=BATCH)

    def seconds(*methods: Method) -> float:
        spec = RunSpec(DigitsCnn(), methods, data, _settings(local))
        return _seconds_per_step(_run_spec(spec))

    return seconds(FRAug(rounds=1 + ROUNDS)), seconds(FedBN())


def _method_and_fedavg(make: Callable[[], Method]) -> tuple[float, float]:
    return seconds_per_step(make()), seconds_per_step()


def bench_steps(blocks: int, say: Callable[[str], None]) -> list[StepCost]:
    """Measure local steps of FedBSS, FRAug and `METHODS`, each compared with FedAvg or FedBN.

    FRAug is compared with FedBN, all other methods with FedAvg. For FedBSS, whole jobs are
    compared: `fedbss_and_its_parts` returns their time and that of FedAvg.
    blocks: how often each pair of methods is measured.
    say: function that gets a line each time all methods have been measured once more.
    """
    seconds_per_step()  # the first run is slower, so it is not measured
    pairs: dict[str, Callable[[], tuple[float, float]]] = {}
    limits: dict[str, float | None] = {}
    for name, (make, limit) in METHODS.items():
        pairs[name] = partial(_method_and_fedavg, make)
        limits[name] = limit
    pairs |= {"fedbss": fedbss_and_its_parts, "fraug": fraug_and_fedbn}
    limits |= {"fedbss": 1.05, "fraug": 1.6}
    return measure_pairs(pairs, limits, blocks, say)


def measure_pairs(
    pairs: Mapping[str, Callable[[], tuple[float, float]]],
    limits: Mapping[str, float | None],
    blocks: int,
    say: Callable[[str], None],
) -> list[StepCost]:
    """Measure every method and its reference method `blocks` times; return a row per method.

    pairs: for each method, a function that returns the seconds of the method and of its reference.
    limits: the ratio that raysim promises not to exceed; None for no promise.
    say: function that gets a line each time all pairs have been measured once more.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for block in range(blocks):
        for name, time_pair in pairs.items():
            seconds[name].append(time_pair())
        say(f"every method has been measured {block + 1} of {blocks} times")

    results = []
    for name, measured in seconds.items():
        ratios = tuple(method / reference for method, reference in measured)
        median = statistics.median(method for method, _ in measured)
        results.append(StepCost(name, median, statistics.median(ratios), ratios, limits[name]))
    return results


def report(title: str, results: Sequence[StepCost], blocks: int, out: Path) -> None:
    """Print the results as a table and write them to `out`.

    title: the first words of the line above the table.
    blocks: how often each method was measured.
    out: the path of the JSON file.
    """
    rows = []
    for result in results:
        promised = "" if result.limit is None else f"{result.limit:.2f}"
        ratios = (result.ratio, min(result.ratios), max(result.ratios))
        texts = [f"{value:.3f}" for value in ratios]
        rows.append((result.method, f"{result.seconds * 1000:.1f}", *texts, promised))
    head = ("method", "ms", "ratio", "lowest", "highest", "promised")
    print(
        f"{title}. ms: time of the method in the row (median of {blocks} measurements). ratio: "
        "this method's time divided by the reference's time (median, lowest and highest of the "
        "measurements). promised: the highest ratio that raysim promises"
    )
    print(format_table(text_columns(head, rows), terminal_width()))

    capability = torch.backends.cpu.get_cpu_capability()
    settings = {"torch": torch.__version__, "blocks": blocks, "capability": capability}
    write_json({"settings": settings, "results": [asdict(result) for result in results]}, out)


def main(out: Path, blocks: int, say: Callable[[str], None]) -> None:
    """Measure local steps of several methods, print a table, and write the results to `out`.

    FRAug is compared with FedBN, all other methods with FedAvg.
    out: the JSON file for the results.
    blocks: the number of repetitions.
    say: gets a line after each repetition.
    """
    make_deterministic(1)
    results = bench_steps(blocks, say)
    title = (
        "Time of a local step on one thread; for fedbss, time of all local steps of a run. The "
        "reference is the same time of FedAvg; for fraug, it is that of FedBN"
    )
    report(title, results, blocks, out)
