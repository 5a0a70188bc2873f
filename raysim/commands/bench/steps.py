"""The cost of a local step of each method compared with FedAvg's: `raysim bench steps`.

The benchmark alternates a method and its reference in one process and reports the median of the ratios. The limit of a
method is the number of forward and backward passes that it needs, in units of FedAvg's three, plus 5 %.
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
from raysim.results.history import write_json
from raysim.results.tables import format_table, terminal_width, text_columns
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.determinism import make_deterministic
from raysim.training.run_spec import RunSettings, RunSpec
from raysim.training.worker import Worker

BATCH, STEPS, ROUNDS = 64, 10, 1

# Method and what we promise at most; None where nothing is promised.
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
class Measured:
    """Seconds a step (median over blocks), and its ratios to what it is compared with."""

    method: str
    seconds: float
    ratio: float
    ratios: tuple[float, ...]
    limit: float | None


def _settings(local: Local) -> RunSettings:
    return RunSettings(rounds=1 + ROUNDS, local=local, evaluate=Evaluation(every=10**9))


def step_spec(*methods: Method) -> RunSpec:
    """Two clients of FedBR's RotatedMNIST network on noise of 14 x 14 pixels."""
    source = Synthetic(shape=[1, 14, 14], samples=1280, test_samples=100, mean=[0.5], std=[0.5])
    data = federate(source, IID(clients=2), 0)
    return RunSpec(
        MnistCnn(), methods, data, _settings(Local(lr=0.01, epochs=None, steps=STEPS, batch=BATCH))
    )


def _ran(*methods: Method, local: Local | None = None) -> Coordinator:
    """A few rounds of both clients."""
    spec = step_spec(*methods)
    return _of(spec if local is None else replace(spec, settings=_settings(local)))


def _of(spec: RunSpec) -> Coordinator:
    coordinator = Coordinator(spec, Synchronous(2), Ideal(), InProcess(Worker(spec)))
    for _ in coordinator.run():
        pass
    return coordinator


def _total(coordinator: Coordinator, column: str) -> float:
    """Of the second and later rounds: in the first, MOON has no previous model and memory is new."""
    return sum(float(row[column] or 0) for row in coordinator.rows[1:])


def seconds_per_step(*methods: Method) -> float:
    """Of a local step."""
    return _per_step(_ran(*methods))


def _per_step(coordinator: Coordinator) -> float:
    return _total(coordinator, "worker_seconds") / (2 * STEPS * ROUNDS)


def fedbss_and_its_parts() -> tuple[float, float]:
    """Seconds of FedBSS's jobs, and of FedAvg's steps on as many samples with a pass over the data in front."""
    local = Local(lr=0.01, batch=BATCH, epochs=3)
    fedbss, plain = _ran(FedBSS(0), local=local), _ran(local=local)
    trainer = Worker(plain.spec).trainer
    trainer.set_training(False)
    since = time.perf_counter()
    with torch.no_grad():
        for client in range(2):
            for inputs, _ in trainer.client_samples(client):
                trainer.vector.networks["model"](inputs)
    evaluation = (time.perf_counter() - since) * ROUNDS
    share = _total(fedbss, "samples") / _total(plain, "samples")
    return _total(fedbss, "worker_seconds"), share * _total(plain, "worker_seconds") + evaluation


def fraug_and_fedbn() -> tuple[float, float]:
    """Seconds of a step of each, on FRAug's network for digits (32 x 32 pixels)."""
    source = Synthetic(shape=[3, 32, 32], samples=640, test_samples=100, mean=[0.5], std=[0.5])
    data = federate(source, IID(clients=2), 0)
    local = Local(lr=0.01, momentum=0.5, epochs=None, steps=STEPS, batch=BATCH)

    def seconds(*methods: Method) -> float:
        return _per_step(_of(RunSpec(DigitsCnn(), methods, data, _settings(local))))

    return seconds(FRAug(rounds=1 + ROUNDS)), seconds(FedBN())


def _beside_fedavg(make: Callable[[], Method]) -> tuple[float, float]:
    return seconds_per_step(make()), seconds_per_step()


def bench_steps(blocks: int, say: Callable[[str], None]) -> list[Measured]:
    """Measure each method and FedAvg in turn, FedBSS and its parts, FRAug and FedBN."""
    seconds_per_step()
    pairs: dict[str, Callable[[], tuple[float, float]]]
    pairs = {name: partial(_beside_fedavg, make) for name, (make, _) in METHODS.items()}
    limits = {name: limit for name, (_, limit) in METHODS.items()}
    pairs |= {"fedbss": fedbss_and_its_parts, "fraug": fraug_and_fedbn}
    return measure_pairs(pairs, limits | {"fedbss": 1.05, "fraug": 1.6}, blocks, say)


def measure_pairs(
    pairs: Mapping[str, Callable[[], tuple[float, float]]],
    limits: Mapping[str, float | None],
    blocks: int,
    say: Callable[[str], None],
) -> list[Measured]:
    """Time every pair once per block; a pair returns its seconds and those of its reference."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
    for block in range(blocks):
        for name, time_pair in pairs.items():
            seconds[name].append(time_pair())
        say(f"block {block + 1} of {blocks}")

    results = []
    for name, measured in seconds.items():
        ratios = tuple(own / reference for own, reference in measured)
        median = statistics.median(own for own, _ in measured)
        results.append(Measured(name, median, statistics.median(ratios), ratios, limits[name]))
    return results


def report(title: str, results: Sequence[Measured], blocks: int, out: Path) -> None:
    """Print the results as a table and write them to `out`."""
    rows = []
    for result in results:
        promised = "" if result.limit is None else f"{result.limit:.2f}"
        ratios = (result.ratio, min(result.ratios), max(result.ratios))
        texts = [f"{value:.3f}" for value in ratios]
        rows.append((result.method, f"{result.seconds * 1000:.1f}", *texts, promised))
    head = ("method", "ms", "ratio", "lowest", "highest", "promised")
    print(f"{title}; medians of {blocks} paired blocks")
    print(format_table(text_columns(head, rows), terminal_width()))

    capability = torch.backends.cpu.get_cpu_capability()
    settings = {"torch": torch.__version__, "blocks": blocks, "capability": capability}
    write_json({"settings": settings, "results": [asdict(result) for result in results]}, out)


def main(out: Path, blocks: int, say: Callable[[str], None]) -> None:
    """Measure the local steps, print a table, write `out`."""
    make_deterministic(1)
    results = bench_steps(blocks, say)
    report("a local step compared with FedAvg's, one thread", results, blocks, out)
