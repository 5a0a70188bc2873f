"""Compare the server step of each aggregation rule with FedAvg's weighted mean.

    uv run python -m jobs.benchmarks.rules

The result is the median ratio of times, measured in turns. FedAvg and FedLD's rule are compared
with a plain PyTorch loop over the updates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from jobs.benchmarks.arguments import parser, read
from jobs.command import run
from raysim.api.declarations import Local, Task
from raysim.api.declare import RunSettingsForMethods, declare
from raysim.api.messages import Update
from raysim.api.method import Method
from raysim.api.server_view import Aggregation, ServerView
from raysim.commands.bench.steps import StepCost, measure_pairs, report
from raysim.methods.fedexp import FedExP
from raysim.methods.fedld import PrincipalGradient
from raysim.methods.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from raysim.methods.groupdro import GroupDRO
from raysim.methods.inco import InCo
from raysim.models import Mlp, ModelRecipe
from raysim.models.resnet import ResNet
from raysim.primitives.streams import stream
from raysim.simulation.server import Server
from raysim.training.determinism import make_deterministic
from raysim.vectors.blocks import num_threads
from raysim.vectors.layout import plan_layout

RULES: Mapping[str, Callable[[], Method]] = {
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedexp": FedExP,
    "groupdro": GroupDRO,
    "inco": InCo,
}
RULE_LIMIT = 1.3  # as a multiple of the time of the weighted mean
MODEL: ModelRecipe = ResNet(18)  # 11 million floats
COHORT = 10  # updates of `MODEL`


def principal_and_loop() -> tuple[float, float]:
    """Return the seconds of two ways to combine 50 updates of 10 million floats each.

    The first is the server rule of FedLD (`fedld_principal`), the second a plain sum.
    """
    task = Task((1, 28, 28), 10, 50)
    model = Mlp((3200, 2400)).build((1, 28, 28), 10, 0)
    declarations = declare([], task, model, _facts(50))
    layout, generator = declarations.layout, stream(0, "bench")
    counters = np.empty(0, np.int64)
    deltas = [generator.random(layout.shared, np.float32) for _ in range(50)]
    updates = [
        Update(i, i, 0, 100, 100, 1, 1.0, 0.0, counters, delta=delta)
        for i, delta in enumerate(deltas)
    ]
    tensors = [torch.from_numpy(delta) for delta in deltas]
    aggregation = Aggregation(updates, tensors, [100.0] * 50, [0] * 50, {})
    start = torch.zeros(layout.shared), torch.empty(0, dtype=torch.int64)
    server = Server(declarations, *start, np.full(50, 100), 0, task, local=Local())
    view = ServerView(server, "fedld_principal")
    seconds = _median_seconds(lambda: PrincipalGradient().combine(aggregation, view))
    return seconds, _median_seconds(lambda: accumulate(deltas, 100.0))


def _facts(clients: int) -> RunSettingsForMethods:
    return RunSettingsForMethods(Local(), 1, 0, "uniform", clients)


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median seconds of three calls, after a first call that allocates the memory."""
    seconds = []
    for _ in range(4):
        since = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - since)
    return statistics.median(seconds[1:])


def accumulate(deltas: Sequence[np.ndarray], weight: float) -> torch.Tensor:
    """Return the sum [d] of vectors, each multiplied by the same weight.

    deltas: the vectors, each float32 [d]. They are not changed.
    weight: the weight.
    """
    total = torch.zeros(len(deltas[0]))
    for delta in deltas:
        total.add_(torch.from_numpy(delta), alpha=weight)
    return total


def seconds_per_loop(updates: Sequence[Update]) -> float:
    """Return the seconds of an aggregation by the weighted mean in a plain loop."""
    deltas = [update.delta for update in updates if update.delta is not None]
    vector = torch.zeros(len(deltas[0]))

    def step() -> None:
        nonlocal vector
        vector = vector + accumulate(deltas, 100.0).div_(100.0 * len(deltas))

    return _median_seconds(step)


def seconds_per_rule(updates: Sequence[Update], *methods: Method) -> float:
    """Return the median wall seconds in which the server aggregates `updates` with a rule.

    The first aggregation, which makes the server state, is not measured.
    updates: the updates of each aggregation. The server gets single updates, and no sums of them.
    methods: the methods of the rule; none for FedAvg.
    """
    counts = np.full(COHORT, 100)
    task = Task((3, 32, 32), 10, COHORT)
    model = MODEL.build((3, 32, 32), 10, 0)
    declarations = declare(methods, task, model, _facts(COHORT))
    layout = declarations.layout
    start = torch.zeros(layout.shared), torch.zeros(layout.shared_counters, dtype=torch.int64)
    server = Server(declarations, *start, counts, 0, task, "uniform", local=Local())
    current = list(updates)

    def step() -> None:
        server.step(current, {}, [0] * COHORT, {})
        current[:] = [update._replace(version=server.version) for update in current]

    return _median_seconds(step)


def _updates() -> list[Update]:
    layout = plan_layout({"model": MODEL.build((3, 32, 32), 10, 0)})
    generator = stream(0, "bench")
    extras: dict[str, np.ndarray] = {
        "groupdro.loss": np.ones(1, np.float32),
        "fedexp.square": np.ones(1),
    }
    counters = np.ones(layout.shared_counters, np.int64)
    updates = []
    for i in range(COHORT):
        delta = generator.random(layout.shared, np.float32)
        updates.append(Update(i, i, 0, 100, 100, 1, 1.0, 0.0, counters, extras, delta=delta))
    return updates


def bench_rules(blocks: int, say: Callable[[str], None]) -> list[StepCost]:
    """Measure FedAvg against a plain loop, and each aggregation rule against FedAvg.

    The rule of FedLD (`fedld_principal`) is measured against a plain sum.
    blocks: the number of repetitions.
    say: function that gets a line of text after each repetition.
    """
    updates = _updates()

    def with_fedavg(make: Callable[[], Method]) -> Callable[[], tuple[float, float]]:
        return lambda: (seconds_per_rule(updates, make()), seconds_per_rule(updates))

    pairs = {"fedavg": lambda: (seconds_per_rule(updates), seconds_per_loop(updates))}
    pairs |= {name: with_fedavg(make) for name, make in RULES.items()}
    pairs["fedld_principal"] = principal_and_loop
    limits = {"fedavg": 1.0} | dict.fromkeys(RULES, RULE_LIMIT) | {"fedld_principal": 3.0}
    return measure_pairs(pairs, limits, blocks, say)


def main() -> None:
    """Measure the time of a server step with each aggregation rule.

    The results are printed as a table, and written to the JSON file of the option `--out`.
    """
    arguments = read(parser(__doc__))
    make_deterministic(1)
    results = bench_rules(arguments.blocks, print)
    title = (
        f"Time of a step of the server on {num_threads()} threads. The reference of fedavg is a "
        "weighted mean in a plain loop, that of fedld_principal is a plain sum, and that of all "
        "other rules is fedavg. Of fedld_principal, only the combination of the updates is timed"
    )
    report(title, results, arguments.blocks, arguments.out)


if __name__ == "__main__":
    run(main)
