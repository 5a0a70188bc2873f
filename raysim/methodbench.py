"""What a method costs beside FedAvg: a local step (`raysim bench steps`), the server's step (`raysim bench rules`).

Both alternate FedAvg and each method in one process and print the median of the ratios. A local step's limits are the
forward and backward passes that it needs, in units of FedAvg's three, plus 5 %.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from raysim.client import Local
from raysim.coordinator import Coordinator, Settings
from raysim.data.federated import federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.evaluation import Evaluation
from raysim.fleet import Ideal
from raysim.host import Host, Recipe
from raysim.messages import Update
from raysim.methods.dann import Dann
from raysim.methods.fedbr import FedBR
from raysim.methods.fedbss import FedBSS
from raysim.methods.fedcm import FedCM
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedexp import FedExP
from raysim.methods.fedlc import FedLC
from raysim.methods.fedmix import FedMix
from raysim.methods.fedntd import FedNTD
from raysim.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from raysim.methods.fedprox import FedProx
from raysim.methods.fedrs import FedRS
from raysim.methods.groupdro import GroupDRO
from raysim.methods.inco import InCo
from raysim.methods.method import Method, Task
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.methods.scaffold import Scaffold
from raysim.methods.vhl import Vhl
from raysim.models.cnn import MnistCnn
from raysim.models.resnet import ResNet
from raysim.runtime.inprocess import InProcess
from raysim.schedule import Synchronous
from raysim.server import Server
from raysim.streams import stream
from raysim.vector import plan_layout

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


RULES: Mapping[str, tuple[Callable[[], Method], float | None]] = {
    "fedavgm": (FedAvgM, 1.3),
    "fedadagrad": (FedAdagrad, 1.3),
    "fedadam": (FedAdam, 1.3),
    "fedyogi": (FedYogi, 1.3),
    "fedexp": (FedExP, 1.3),
    "groupdro": (GroupDRO, 1.3),
    "inco": (InCo, 1.3),
}
COHORT = 10  # updates of ResNet-18, 11 million floats each


@dataclass(frozen=True)
class Measured:
    """Seconds a step (median over blocks), and its ratios to FedAvg's."""

    method: str
    seconds: float
    ratio: float
    ratios: tuple[float, ...]
    limit: float | None


def step_recipe(*methods: Method) -> Recipe:
    """Two clients of FedBR's RotatedMNIST network on noise of 14 x 14 pixels."""
    source = Synthetic(shape=[1, 14, 14], samples=1280, test_samples=100, mean=[0.5], std=[0.5])
    data = federate(source, IID(clients=2), 0)
    return Recipe(MnistCnn(), methods, Local(lr=0.01, epochs=None, steps=STEPS, batch=BATCH), data, seed=0)


def _ran(*methods: Method, local: Local | None = None) -> Coordinator:
    """A few rounds of both clients."""
    recipe = step_recipe(*methods) if local is None else replace(step_recipe(*methods), local=local)
    settings = Settings(rounds=1 + ROUNDS, evaluation=Evaluation(every=10**9))
    coordinator = Coordinator(recipe, Synchronous(2), Ideal(), InProcess(recipe), settings)
    for _ in coordinator.run():
        pass
    return coordinator


def _total(coordinator: Coordinator, column: str) -> float:
    """Of the second and later rounds: in the first, MOON has no previous model and memory is new."""
    return sum(float(row[column] or 0) for row in coordinator.rows[1:])


def seconds_per_step(*methods: Method) -> float:
    """Of a local step."""
    return _total(_ran(*methods), "host_seconds") / (2 * STEPS * ROUNDS)


def fedbss_and_its_parts() -> tuple[float, float]:
    """Seconds of FedBSS's jobs, and of FedAvg's steps on as many samples with a pass over the data in front."""
    local = Local(lr=0.01, batch=BATCH, epochs=3)
    own, plain = _ran(FedBSS(0), local=local), _ran(local=local)
    trainer = Host(plain.recipe).trainer
    trainer.training(False)
    since = time.perf_counter()
    with torch.no_grad():
        for client in range(2):
            for inputs, _ in trainer.own(client):
                trainer.vector.networks["model"](inputs)
    evaluation = (time.perf_counter() - since) * ROUNDS
    share = _total(own, "samples") / _total(plain, "samples")
    return _total(own, "host_seconds"), share * _total(plain, "host_seconds") + evaluation


def seconds_per_rule(updates: Sequence[Update], *methods: Method) -> float:
    """Of the server's step on single updates, the second one of two: server states exist."""
    networks = {"model": ResNet(18).build((3, 32, 32), 10, 0)}
    layout = plan_layout(networks)
    counts = np.full(COHORT, 100)
    task = Task((3, 32, 32), 10, COHORT)
    start = torch.zeros(layout.shared), torch.zeros(layout.shared_counters, dtype=torch.int64)
    server = Server(layout, *start, methods, counts, 0, task, "uniform")
    for _ in range(2):
        since = time.perf_counter()
        server.step(updates, [], [0] * COHORT, {})
        seconds = time.perf_counter() - since
        updates = [replace(update, version=server.version) for update in updates]
    return seconds


def _updates() -> list[Update]:
    layout = plan_layout({"model": ResNet(18).build((3, 32, 32), 10, 0)})
    generator = stream(0, "bench")
    extras: dict[str, np.ndarray] = {"groupdro.loss": np.ones(1, np.float32), "fedexp.square": np.ones(1)}
    counters = np.ones(layout.shared_counters, np.int64)
    return [
        Update(i, i, 0, 100, 100, 1, 1.0, 0.0, generator.random(layout.shared, np.float32), counters, extras)
        for i in range(COHORT)
    ]


def _beside(run: Callable[..., float], make: Callable[[], Method]) -> tuple[float, float]:
    """With the method, and without."""
    return run(make()), run()


def bench_steps(blocks: int, say: Callable[[str], None]) -> list[Measured]:
    """FedAvg beside each method, in turn, `blocks` times; FedBSS beside the parts that it is made of."""
    seconds_per_step()
    pairs = {name: partial(_beside, seconds_per_step, make) for name, (make, _) in METHODS.items()}
    limits = {name: limit for name, (_, limit) in METHODS.items()}
    return _bench({**pairs, "fedbss": fedbss_and_its_parts}, limits | {"fedbss": 1.05}, blocks, say)


def bench_rules(blocks: int, say: Callable[[str], None]) -> list[Measured]:
    """The weighted mean beside each rule of the server, in turn, `blocks` times."""
    rule = partial(seconds_per_rule, _updates())
    pairs = {name: partial(_beside, rule, make) for name, (make, _) in RULES.items()}
    return _bench(pairs, {name: limit for name, (_, limit) in RULES.items()}, blocks, say)


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
    for name, found in pairs.items():
        ratios = tuple(own / other for own, other in found)
        seconds = statistics.median(own for own, _ in found)
        results.append(Measured(name, seconds, statistics.median(ratios), ratios, limits[name]))
    return results
