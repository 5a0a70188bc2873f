"""Measure the cost of adapters: the CPU time of a job, or the memory of a run.

    uv run python -m jobs.benchmarks.adapters steps     a job in raysim, and in PyTorch with peft
    uv run python -m jobs.benchmarks.adapters memory    a run on Ray (only on Linux)

Both commands measure each number format of raysim's frozen weights. raysim's CPU time should be at
most 1.05 times that of PyTorch, whose weights are float32. The memory is the peak of coordinator
and workers together.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import raysim
from jobs.command import run
from raysim.experiment.build import build
from raysim.runtime.inprocess import InProcess
from raysim.simulation.coordinator import Coordinator
from raysim.simulation.events import Round
from raysim.simulation.fleet import Ideal
from raysim.simulation.schedule import Synchronous
from raysim.training.run_spec import RunSpec, build_model, share_frozen_weights
from raysim.training.worker import Worker

LIMIT = 1.05
STEPS, BATCH, LENGTH, RATE = 20, 8, 64, 0.01
BASES = ("float32", "bfloat16", "nf4")
GPT = [
    "data=python_topics", "data.tokenizer=bytes", f"data.length={LENGTH}", "model=gpt",
    "model.width=256", "model.blocks=4", "model.lora.rank=8", "partition=iid", "partition.clients=2",
    "schedule.cohort=1", "partition.test_fraction=0", "local.epochs=null", f"local.steps={STEPS}", f"local.batch={BATCH}",
    "local.sampling=replacement", f"local.lr={RATE}", "evaluate.every=100000", "runtime=inprocess",
]  # fmt: skip
WIDTH, LAYERS = 4000, 4
MLP = [
    "data=digits", "model=mlp", f"model.widths={[WIDTH] * LAYERS}", "model.lora.rank=4",
    "partition=iid", "rounds=4", "local.epochs=null", "local.steps=2", "evaluate.every=100000",
    "tracking=none", "checkpoint.every=0", "runtime=local", "runtime.threads=1",
]  # fmt: skip
FROZEN_BYTES = 4 * (LAYERS - 1) * WIDTH**2  # size of the large layers in float32


# --- the time of a job --------------------------------------------------------------------------
def raysim_job_s(spec: RunSpec, jobs: int) -> float:
    """Return the mean CPU seconds of a job in raysim, without the first and the last round.

    jobs: the number of jobs that are measured.
    """
    spec = replace(spec, settings=replace(spec.settings, rounds=jobs + 2))
    coordinator = Coordinator(spec, Synchronous(1), Ideal(), InProcess(Worker(spec)))
    ends = []
    for event in coordinator.run():
        if isinstance(event, Round):
            ends.append(time.process_time())
    return (ends[-2] - ends[0]) / jobs


def plain_job_s(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, jobs: int) -> float:
    """Return the mean CPU seconds of a job in a plain loop, with torch.optim.SGD and peft.

    model: the network with adapters of peft.
    tokens, labels: the samples from which each step draws a batch.
    """
    factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(0)
    start = time.process_time()
    for _ in range(jobs):
        optimizer = torch.optim.SGD(factors, lr=RATE)
        for _ in range(STEPS):
            rows = torch.randint(len(tokens), (BATCH,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens[rows]), labels[rows])
            loss.backward()
            optimizer.step()
    return (time.process_time() - start) / jobs


def measure_steps(blocks: int, jobs: int) -> None:
    """Print the CPU time of a job for each number format of the frozen weights.

    Each line has the time in a plain loop, the time in raysim, and the ratio.
    blocks: the number of pairs of measurements.
    jobs: jobs in each measurement.
    """
    specs = {}
    for base in BASES:
        spec = build([*GPT, f"model.lora.base={base}"]).spec
        specs[base] = share_frozen_weights(replace(spec, threads=1))
    torch.set_num_threads(1)
    plain = build_model(specs["float32"])
    dataset = specs["float32"].data.open()
    tokens = torch.from_numpy(dataset.inputs.copy())
    labels = torch.from_numpy(dataset.labels.copy()).long()
    print(
        f"Each line has the CPU time of a job of {STEPS} steps, once in plain PyTorch with peft and "
        "once in raysim. raysim's time divided by that of PyTorch with peft should be at most "
        f"{LIMIT}.",
        flush=True,
    )
    for base, spec in specs.items():
        pairs = []
        for _ in range(blocks):
            pairs.append((plain_job_s(plain, tokens, labels, jobs), raysim_job_s(spec, jobs)))
        ratio = statistics.median(ours / theirs for theirs, ours in pairs)
        theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"frozen weights stored as {base}: CPU time of a job: {theirs:.3f} s with peft, "
            f"{ours:.3f} s with raysim; ratio raysim/peft: {ratio:.3f}",
            flush=True,
        )


# --- memory -------------------------------------------------------------------------------------
def ray_bytes() -> int:
    """Return the bytes of memory of all processes here that execute Ray actors or tasks.

    This works only on Linux. A page that several of these processes share is counted once.
    """
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not (process / "cmdline").read_bytes().startswith(b"ray::"):
                continue
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # the process has ended
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def peak_bytes(overrides: list[str]) -> int:
    """Run raysim; return the largest memory that Ray's actors hold at one time, in bytes."""
    peak, has_ended = [0], threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.1):
            peak[0] = max(peak[0], ray_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            raysim.run([*overrides, f"out={folder}/run"], quiet=True)
    finally:
        has_ended.set()
        watcher.join()
    return peak[0]


def measure_memory() -> None:
    """Print the peak memory of the Ray actors, for each number format of the frozen weights.

    At each time, the memory of the coordinator and of all workers is added up; the peak is the
    largest sum. Three runs of each format are measured: with 1 worker and 4 clients, with 2 workers
    and 4 clients, and with 2 workers and 64 clients.
    """
    size_mib = FROZEN_BYTES / 2**20
    print(
        f"The large frozen layers of the model need {size_mib:.0f} MiB in float32. Each line has "
        "the peak memory of a run: that of the coordinator and the workers together. The increase is "
        "the difference from the run with 1 worker, 4 clients and the same number format. The "
        f"brackets show it as a multiple of {size_mib:.0f} MiB.",
        flush=True,
    )
    for base in BASES:
        first = None
        for workers, clients in ((1, 4), (2, 4), (2, 64)):
            words = [f"runtime.workers={workers}", f"partition.clients={clients}"]
            words += [f"model.lora.base={base}", "schedule.cohort=4"]
            used = peak_bytes([*MLP, *words])
            first = used if first is None else first
            more = used - first
            print(
                f"frozen weights stored as {base}, workers: {workers}, clients: {clients}: "
                f"peak memory {used / 2**20:.0f} MiB, increase over 1 worker and 4 clients "
                f"{more / 2**20:+.0f} MiB ({more / FROZEN_BYTES:+.2f} times the "
                f"{size_mib:.0f} MiB of the large frozen layers in float32)",
                flush=True,
            )


def main() -> None:
    """Measure what adapters cost, for each number format of the frozen weights.

    `steps` prints the CPU seconds of a job in raysim and in a plain PyTorch loop. `memory` prints
    the memory of coordinator and workers.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument(
        "what",
        choices=("steps", "memory"),
        help="what to measure: the CPU time of a job, or the memory of coordinator and workers",
    )
    parser.add_argument(
        "--blocks", type=int, default=5, help="how often the CPU times are measured (5)"
    )
    parser.add_argument(
        "--jobs", type=int, default=3, help="number of jobs in each measured CPU time (3)"
    )
    given = parser.parse_args()
    if given.what == "steps":
        measure_steps(given.blocks, given.jobs)
    else:
        measure_memory()


if __name__ == "__main__":
    run(main)
