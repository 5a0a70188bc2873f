"""Measure how much time compressors add to a round of the workloads W1 and W3 of `raysim bench`.

    uv run python -m jobs.benchmarks.compression W3 W1

Runs with and without a compressor alternate. The output has the median CPU times of a round, and
how many floats a client sends. A compressor should add at most 5 % to W1 and 30 % to W3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from jobs.command import run
from raysim.api.compression import Compressor
from raysim.commands.bench.loops import WORKLOADS, LoopWorkload, source_of, spec_of
from raysim.compressors.lowrank import PowerSGD
from raysim.compressors.quantized import QSGD, TernGrad
from raysim.compressors.rounded import Float16, Fp8, Int8
from raysim.compressors.signs import SignSGD
from raysim.compressors.sparse import RandK, TopK
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSpec, declare_run
from raysim.training.worker import Worker

LIMITS = {"W1": 0.05, "W3": 0.30}
COMPRESSORS = [
    TopK(), TopK(feedback="ef14"), TopK(feedback="ef21"), RandK(), RandK(feedback="ef14"),
    RandK(feedback="ef21"), QSGD(), QSGD(feedback="ef14"), QSGD(feedback="ef21"), QSGD(1, None),
    TernGrad(), TernGrad(feedback="ef14"), TernGrad(feedback="ef21"), SignSGD(direction="up"),
    SignSGD(None, "up"), SignSGD(None, "up", "ef14"), SignSGD(None, "up", "ef21"), PowerSGD(),
    PowerSGD(feedback="ef14"), PowerSGD(feedback="ef21"), Int8(), Int8(feedback="ef14"),
    Int8(feedback="ef21"), Fp8(), Fp8(feedback="ef14"), Fp8(feedback="ef21"), Float16(),
    Float16(feedback="ef14"), Float16(feedback="ef21"),
]  # fmt: skip


def round_s(spec: RunSpec, workload: LoopWorkload, rounds: int) -> float:
    """Execute a run; return the mean CPU seconds of a round over `rounds` measured rounds.

    The run has three more rounds, which are not measured: the first two rounds and the last one.
    rounds: the number of measured rounds.
    """
    # The first two rounds allocate the memory that later rounds reuse. A round is reported while
    # the next one trains; this is not so for the last round.
    spec = replace(spec, settings=replace(spec.settings, rounds=rounds + 3))
    coordinator = Coordinator(spec, Synchronous(workload.cohort), Ideal(), InProcess(Worker(spec)))
    ends = []
    for event in coordinator.run():
        if isinstance(event, Round):
            ends.append(time.process_time())
    return (ends[-2] - ends[1]) / rounds


def measure(name: str, compressors: Sequence[Compressor], blocks: int, rounds: int) -> None:
    """Print by how much each compressor increases the CPU time of a round of a workload.

    name: the workload, "W1" or "W3".
    blocks: the number of pairs of runs, without and with a compressor.
    rounds: the number of measured rounds of each run.
    """
    workload = WORKLOADS[name]
    workload = replace(workload, clients=workload.cohort)
    spec = spec_of(workload, source_of(workload, ""))
    print(
        f"workload {name}: a compressor should add at most {LIMITS[name]:.0%} to the CPU time of "
        "a round",
        flush=True,
    )
    for compressor in compressors:
        compressed = replace(spec, methods=(compressor,))
        declarations = declare_run(compressed)
        share = declarations.floats_up / declarations.layout.shared
        pairs = []
        for _ in range(blocks):
            plain = round_s(spec, workload, rounds)
            pairs.append((plain, round_s(compressed, workload, rounds)))
        added = statistics.median(more / plain - 1 for plain, more in pairs)
        plain, more = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"workload {name}, {compressor!r}: a round takes {plain:.0f} ms of CPU time without "
            f"this compressor and {more:.0f} ms with it ({added:+.1%}); the number "
            f"of floats that a client sends is {share:.2%} of that of the model",
            flush=True,
        )


def main() -> None:
    """Print by how much each compressor increases the CPU time of a round.

    The command line names the workloads of `raysim bench` to measure.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "workloads",
        nargs="*",
        default=["W3", "W1"],
        help="workloads of raysim bench to measure (W3 W1)",
    )
    parser.add_argument(
        "--blocks", type=int, default=3, help="number of measurements of each compressor (3)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds in a measurement (3)"
    )
    parser.add_argument(
        "--only",
        choices=sorted({each.name for each in COMPRESSORS}),
        help="name of the only compressor to measure, such as topk",
    )
    given = parser.parse_args()
    unknown = sorted(set(given.workloads) - set(LIMITS))
    if unknown:
        parser.error(f"unknown workload {unknown[0]}: choose from {' and '.join(LIMITS)}")
    chosen = [each for each in COMPRESSORS if given.only in (None, each.name)]
    for name in given.workloads:
        measure(name, chosen, given.blocks, given.rounds)


if __name__ == "__main__":
    run(main)
