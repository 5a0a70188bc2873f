"""What a method costs beside FedAvg: a local step (`raysim bench steps`), the server's step (`raysim bench rules`).

Both alternate a method and what it is compared with in one process and print the median of the ratios. A local step is
beside FedAvg's: its limits are the forward and backward passes that it needs, in units of FedAvg's three, plus 5 %. The
server's step is beside FedAvg's, the weighted mean, and that one beside the loop in PyTorch that one would write.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from raysim.api.declarations import Evaluation, Local, Task
from raysim.api.messages import Update
from raysim.api.method import Method
from raysim.api.server_view import Aggregation
from raysim.data.federated import federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.methods.dann import Dann
from raysim.methods.fedbn import FedBN
from raysim.methods.fedbr import FedBR
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedcm import FedCM
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedexp import FedExP
from raysim.methods.fedlc import FedLC
from raysim.methods.fedld import PrincipalGradient
from raysim.methods.fedmix import FedMix
from raysim.methods.fedntd import FedNTD
from raysim.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from raysim.methods.fedprox import FedProx
from raysim.methods.fedrs import FedRS
from raysim.methods.fraug import FRAug
from raysim.methods.groupdro import GroupDRO
from raysim.methods.inco import InCo
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.methods.scaffold import Scaffold
from raysim.methods.vhl import Vhl
from raysim.models import Mlp
from raysim.models.cnn import DigitsCnn, MnistCnn
from raysim.models.resnet import ResNet
from raysim.primitives.streams import stream
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.simulation.server import Server
from raysim.training.host import Host
from raysim.training.run_spec import RunSettings, RunSpec
from raysim.vectors.layout import plan_layout

BATCH, STEPS, ROUNDS = 64, 10, 1

# Method and what we promise at most; None where nothing is promised.
METHODS: Mapping[str, tuple[Callable[[], Method], float | None]] = {
    "fedbr": (FedBR, 2.5),
    "moon": (Moon, 1.8),
    "fedntd": (FedNTD, 1.45),
    "vhl": (lambda: Vhl(batch=BATCH), 2.2),
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


# Every rule of the server within 1.3 of the weighted mean.
RULES: Mapping[str, Callable[[], Method]] = {
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedexp": FedExP,
    "groupdro": GroupDRO,
    "inco": InCo,
}
COHORT = 10  # updates of ResNet-18, 11 million floats each


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
    return RunSpec(MnistCnn(), methods, data, _settings(Local(lr=0.01, epochs=None, steps=STEPS, batch=BATCH)))


def _ran(*methods: Method, local: Local | None = None) -> Coordinator:
    """A few rounds of both clients."""
    spec = step_spec(*methods)
    return _of(spec if local is None else replace(spec, settings=_settings(local)))


def _of(spec: RunSpec) -> Coordinator:
    coordinator = Coordinator(spec, Synchronous(2), Ideal(), InProcess(Host(spec)))
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
    return _total(coordinator, "host_seconds") / (2 * STEPS * ROUNDS)


def fedbss_and_its_parts() -> tuple[float, float]:
    """Seconds of FedBSS's jobs, and of FedAvg's steps on as many samples with a pass over the data in front."""
    local = Local(lr=0.01, batch=BATCH, epochs=3)
    fedbss, plain = _ran(FedBSS(0), local=local), _ran(local=local)
    trainer = Host(plain.spec).trainer
    trainer.training(False)
    since = time.perf_counter()
    with torch.no_grad():
        for client in range(2):
            for inputs, _ in trainer.own(client):
                trainer.vector.networks["model"](inputs)
    evaluation = (time.perf_counter() - since) * ROUNDS
    share = _total(fedbss, "samples") / _total(plain, "samples")
    return _total(fedbss, "host_seconds"), share * _total(plain, "host_seconds") + evaluation


def fraug_and_fedbn() -> tuple[float, float]:
    """Seconds of a step of each, on FRAug's network for digits (32 x 32 pixels)."""
    source = Synthetic(shape=[3, 32, 32], samples=640, test_samples=100, mean=[0.5], std=[0.5])
    data = federate(source, IID(clients=2), 0)
    local = Local(lr=0.01, momentum=0.5, epochs=None, steps=STEPS, batch=BATCH)

    def seconds(*methods: Method) -> float:
        return _per_step(_of(RunSpec(DigitsCnn(), methods, data, _settings(local))))

    return seconds(FRAug(rounds=1 + ROUNDS)), seconds(FedBN())


def principal_and_the_loop() -> tuple[float, float]:
    """Seconds of the principal-gradient sum of 50 updates of 10 M floats, and of adding them up one by one."""
    networks = {"model": Mlp((3200, 2400)).build((1, 28, 28), 10, 0)}
    layout, generator = plan_layout(networks), stream(0, "bench")
    counters = np.empty(0, np.int64)
    deltas = [generator.random(layout.shared, np.float32) for _ in range(50)]
    updates = [Update(i, i, 0, 100, 100, 1, 1.0, 0.0, counters, delta=delta) for i, delta in enumerate(deltas)]
    aggregation = Aggregation(updates, [torch.from_numpy(delta) for delta in deltas], [100.0] * 50, [0] * 50, {})
    start = torch.zeros(layout.shared)
    server = Server(
        layout, start, torch.empty(0, dtype=torch.int64), [], np.full(50, 100), 0, Task((1, 28, 28), 10, 50)
    )
    seconds = _median(lambda: PrincipalGradient().combine(aggregation, server))
    return seconds, _median(lambda: accumulated(deltas, 100.0))


def _median(work: Callable[[], object]) -> float:
    """Seconds of three calls after another one, for which memory is new."""
    seconds = []
    for _ in range(4):
        since = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - since)
    return statistics.median(seconds[1:])


def accumulated(deltas: Sequence[np.ndarray], weight: float) -> torch.Tensor:
    """[d] the weighted sum of vectors as one would write it: one after the other, in place, one thread."""
    total = torch.zeros(len(deltas[0]))
    for delta in deltas:
        total.add_(torch.from_numpy(delta), alpha=weight)
    return total


def seconds_per_loop(updates: Sequence[Update]) -> float:
    """Of a step by the weighted mean as one would write it."""
    deltas = [update.delta for update in updates if update.delta is not None]
    vector = torch.zeros(len(deltas[0]))

    def step() -> None:
        nonlocal vector
        vector = vector + accumulated(deltas, 100.0).div_(100.0 * len(deltas))

    return _median(step)


def seconds_per_rule(updates: Sequence[Update], *methods: Method) -> float:
    """Of the server's step on single updates, when its states exist."""
    networks = {"model": ResNet(18).build((3, 32, 32), 10, 0)}
    layout = plan_layout(networks)
    counts = np.full(COHORT, 100)
    task = Task((3, 32, 32), 10, COHORT)
    start = torch.zeros(layout.shared), torch.zeros(layout.shared_counters, dtype=torch.int64)
    server = Server(layout, *start, methods, counts, 0, task, "uniform")
    step_on = list(updates)

    def step() -> None:
        server.step(step_on, {}, [0] * COHORT, {})
        step_on[:] = [replace(update, version=server.version) for update in step_on]

    return _median(step)


def _updates() -> list[Update]:
    layout = plan_layout({"model": ResNet(18).build((3, 32, 32), 10, 0)})
    generator = stream(0, "bench")
    extras: dict[str, np.ndarray] = {"groupdro.loss": np.ones(1, np.float32), "fedexp.square": np.ones(1)}
    counters = np.ones(layout.shared_counters, np.int64)
    return [
        Update(i, i, 0, 100, 100, 1, 1.0, 0.0, counters, extras, delta=generator.random(layout.shared, np.float32))
        for i in range(COHORT)
    ]


def _beside_fedavg(make: Callable[[], Method]) -> tuple[float, float]:
    return seconds_per_step(make()), seconds_per_step()


def bench_steps(blocks: int, say: Callable[[str], None]) -> list[Measured]:
    """FedAvg beside each method, in turn, `blocks` times; FedBSS beside its parts, FRAug beside FedBN."""
    seconds_per_step()
    pairs: dict[str, Callable[[], tuple[float, float]]]
    pairs = {name: partial(_beside_fedavg, make) for name, (make, _) in METHODS.items()}
    limits = {name: limit for name, (_, limit) in METHODS.items()}
    pairs |= {"fedbss": fedbss_and_its_parts, "fraug": fraug_and_fedbn}
    return _bench(pairs, limits | {"fedbss": 1.05, "fraug": 1.6}, blocks, say)


def bench_rules(blocks: int, say: Callable[[str], None]) -> list[Measured]:
    """FedAvg beside the loop, each rule beside FedAvg, in turn, `blocks` times; principal gradients last."""
    updates = _updates()

    def beside_mean(make: Callable[[], Method]) -> tuple[float, float]:
        return seconds_per_rule(updates, make()), seconds_per_rule(updates)

    pairs = {"fedavg": lambda: (seconds_per_rule(updates), seconds_per_loop(updates))}
    pairs |= {name: partial(beside_mean, make) for name, make in RULES.items()}
    limits = {"fedavg": 1.0} | dict.fromkeys(RULES, 1.3) | {"fedld_principal": 3.0}
    return _bench(pairs | {"fedld_principal": principal_and_the_loop}, limits, blocks, say)


def _bench(
    timed: Mapping[str, Callable[[], tuple[float, float]]],
    limits: Mapping[str, float | None],
    blocks: int,
    say: Callable[[str], None],
) -> list[Measured]:
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in timed}
    for block in range(blocks):
        for name, pair in timed.items():
            pairs[name].append(pair())
        say(f"block {block + 1} of {blocks}")
    results = []
    for name, measured in pairs.items():
        ratios = tuple(own / other for own, other in measured)
        seconds = statistics.median(own for own, _ in measured)
        results.append(Measured(name, seconds, statistics.median(ratios), ratios, limits[name]))
    return results
