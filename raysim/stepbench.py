"""What a local step costs with each method, beside FedAvg's step: same clients, network and batches, in one process.

`raysim bench steps` alternates runs of FedAvg and of each method and prints the median of the ratios. The limits are
the forward and backward passes that a method needs, in units of FedAvg's three, plus 5 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raysim.client import Local
from raysim.coordinator import Coordinator, Settings
from raysim.data.federated import federate
from raysim.data.partition import IID
from raysim.data.sources import Synthetic
from raysim.fleet import Ideal
from raysim.host import Recipe
from raysim.methods.dann import Dann
from raysim.methods.fedbr import FedBR
from raysim.methods.fedcm import FedCM
from raysim.methods.feddecorr import FedDecorr
from raysim.methods.fedmix import FedMix
from raysim.methods.fedntd import FedNTD
from raysim.methods.fedprox import FedProx
from raysim.methods.groupdro import GroupDRO
from raysim.methods.method import Method
from raysim.methods.mixup import Mixup
from raysim.methods.moon import Moon
from raysim.methods.scaffold import Scaffold
from raysim.methods.vhl import Vhl
from raysim.models.cnn import MnistCnn
from raysim.runtime.inprocess import InProcess
from raysim.schedule import Synchronous

BATCH, STEPS, ROUNDS = 64, 10, 2

# Method and what we promise at most; None where nothing is promised.
METHODS: Mapping[str, tuple[Callable[[], Method], float | None]] = {
    "fedbr": (FedBR, 2.5),
    "moon": (Moon, 1.8),
    "fedntd": (FedNTD, 1.45),
    "vhl": (lambda: Vhl(batch=BATCH), 2.2),
    "feddecorr": (FedDecorr, 1.1),
    "fedcm": (FedCM, 1.05),
    "mixup": (Mixup, 1.05),
    "fedprox": (FedProx, None),
    "scaffold": (Scaffold, None),
    "groupdro": (GroupDRO, None),
    "dann": (Dann, None),
    "fedmix": (FedMix, None),
}


@dataclass(frozen=True)
class StepResult:
    """Seconds a local step (median over blocks), and its ratios to FedAvg's."""

    method: str
    seconds: float
    ratio: float
    ratios: tuple[float, ...]
    limit: float | None


def step_recipe(*methods: Method) -> Recipe:
    """Two clients of FedBR's RotatedMNIST network on noise of 14 x 14 pixels."""
    source = Synthetic(shape=[1, 14, 14], samples=4000, test_samples=100, mean=[0.5], std=[0.5])
    data = federate(source, IID(clients=2), 0)
    return Recipe(MnistCnn(), methods, Local(lr=0.01, epochs=None, steps=STEPS, batch=BATCH), data, seed=0)


def seconds_per_step(*methods: Method) -> float:
    """Of the second and later rounds: in the first, MOON has no previous model and memory is new."""
    recipe = step_recipe(*methods)
    settings = Settings(rounds=1 + ROUNDS, evaluate_every=10**9)
    coordinator = Coordinator(recipe, Synchronous(2), Ideal(), InProcess(recipe), settings)
    for _ in coordinator.run():
        pass
    return sum(float(row["host_seconds"] or 0) for row in coordinator.rows[1:]) / (2 * STEPS * ROUNDS)


def bench_steps(blocks: int, say: Callable[[str], None]) -> list[StepResult]:
    """FedAvg beside each method, in turn, `blocks` times."""
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    seconds_per_step()
    for block in range(blocks):
        for name, (make, _) in METHODS.items():
            pairs[name].append((seconds_per_step(make()), seconds_per_step()))
        say(f"block {block + 1}/{blocks}: FedAvg {statistics.median(p[1] for p in pairs[name]):.4f} s a step")
    results = []
    for name, (_, limit) in METHODS.items():
        ratios = tuple(own / other for own, other in pairs[name])
        own = statistics.median(pair[0] for pair in pairs[name])
        results.append(StepResult(name, own, statistics.median(ratios), ratios, limit))
    return results
