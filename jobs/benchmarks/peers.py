"""Compare the time of a round on raysim, on pfl-research and on FedJAX.

    python -m venv pfl && pfl/bin/pip install pfl torch
    python -m venv fedjax && fedjax/bin/pip install fedjax "jax==0.4.38" "jaxlib==0.4.38"
    uv run python -m jobs.benchmarks.peers --pfl pfl/bin/python --fedjax fedjax/bin/python

The three simulators train the workloads of `raysim bench` with FedAvg, in turns. raysim and
pfl-research use two processes of one thread. FedJAX uses one process; it is measured with its two
backends, and the faster one counts. The results are the median ratios of raysim's time to
pfl-research's time and to FedJAX's time.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

from jobs.benchmarks import arguments
from jobs.command import run
from raysim.commands.bench.loops import (
    WARM_UP_ROUNDS,
    WORKLOADS,
    LoopWorkload,
    source_of,
    spec_of,
    time_rounds,
)
from raysim.primitives.checks import one_of
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path
from raysim.results.history import write_json
from raysim.results.tables import format_table, text_columns
from raysim.runtime import ray as cluster
from raysim.training.run_spec import RunSpec, declare_run
from raysim.training.step_mode import default_lanes

APPS = Path(__file__).parent / "peer_apps"
PROCESSES = 2
TIMEOUT_S = 900
# How a peer's network names a layer of raysim's.
LAYER_NAMES = {
    nn.Flatten: "flatten",
    nn.ReLU: "relu",
    nn.MaxPool2d: "pool",
    nn.Linear: "linear",
    nn.Conv2d: "convolution",
}


def write_workload(folder: Path, spec: RunSpec, workload: LoopWorkload) -> None:
    """Write a workload's samples, initial parameters and settings for other simulators."""
    data = spec.data.open()
    rows = spec.data.partition.train.indices
    pixels = np.ascontiguousarray(data.inputs[rows])
    inputs = spec.data.pipeline.normalise(torch.from_numpy(pixels), spec.dtype).numpy()
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", data.labels[rows].astype(np.int64))
    model = spec.model.build(spec.task.shape, spec.task.num_classes, spec.settings.seed)
    arrays = [param.detach().numpy() for param in model.parameters()]
    np.savez(folder / "parameters.npz", *arrays)  # named arr_0, arr_1, ...
    layers = [LAYER_NAMES[type(part)] for part in model.modules() if type(part) in LAYER_NAMES]
    settings = {
        "layers": layers,
        "clients": workload.clients,
        "samples": workload.samples,
        "cohort": workload.cohort,
        "batch": workload.batch,
        "lr": spec.settings.local.lr,
    }
    write_json(settings, folder / "settings.json")


def run_processes(command: Sequence[str], environments: Sequence[dict[str, str]]) -> None:
    """Start a process for each entry of `environments`, all at once; wait for all processes.

    command: the command that every process executes.
    environments: the additional environment variables of each process.
    Raise RefusedError if a process fails.
    """
    limited = ["timeout", str(TIMEOUT_S), *command]
    processes = [
        subprocess.Popen(
            limited,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]
    try:
        for process in processes:
            output, _ = process.communicate()
            if process.returncode != 0:
                print(output[-4000:], file=sys.stderr)
                raise RefusedError(
                    f"{command[0]} ended with status {process.returncode} (status 124: it did "
                    f"not end in {TIMEOUT_S} s). Read its output above."
                )
    finally:
        for process in processes:
            process.terminate()  # has no effect on a process that has ended


def free_port() -> int:
    """Return a port of this machine that no process uses."""
    with socket.socket() as opened:
        opened.bind(("localhost", 0))
        port: int = opened.getsockname()[1]
    return port


def time_peer(
    app: str, python: str, folder: Path, rounds: int, environments: Sequence[dict[str, str]]
) -> float:
    """Run the benchmark app of another simulator; return the median wall seconds of a round.

    app: a file in `peer_apps`.
    python: the Python interpreter that has the simulator.
    rounds: the number of measured rounds.
    environments: additional environment variables of each process.
    """
    times = folder / "times.json"
    times.unlink(missing_ok=True)
    command = [python, str(APPS / app), str(folder), str(rounds + WARM_UP_ROUNDS)]
    run_processes(command, environments)
    result = json.loads(times.read_text())
    if not result["change"] > 0.0:
        raise RefusedError(
            f"{app} has not trained: the largest change of a parameter is {result['change']}. "
            "Correct this app."
        )
    moments: list[float] = result["times"][WARM_UP_ROUNDS - 1 :]
    return statistics.median(later - earlier for earlier, later in pairwise(moments))


def pfl_environments() -> list[dict[str, str]]:
    """Return the environment variables of each process of pfl-research."""
    addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(PROCESSES))
    common = {"PFL_WORKER_ADDRESSES": addresses, "PFL_PYTORCH_DEVICE": "cpu"}
    common["OMP_NUM_THREADS"] = "1"
    return [{**common, "PFL_WORKER_RANK": str(rank)} for rank in range(PROCESSES)]


def time_fedjax(python: str, folder: Path, rounds: int) -> float:
    """Return the seconds per round of FedJAX with its faster backend.

    python: the path of the Python interpreter that has FedJAX.
    folder: the workload's folder.
    rounds: the number of measured rounds.
    """
    devices = f"--xla_force_host_platform_device_count={PROCESSES}"
    jit = {"FEDJAX_BACKEND": "jit", "JAX_PLATFORMS": "cpu"}
    pmap = {**jit, "FEDJAX_BACKEND": "pmap", "XLA_FLAGS": devices}
    return min(
        time_peer("fedjax_app.py", python, folder, rounds, [environment])
        for environment in (jit, pmap)
    )


def compare(
    name: str, root: str | None, blocks: int, pfl: str | None, fedjax: str | None
) -> dict[str, list[float]]:
    """Measure the simulators in turns; return the measured seconds per round of each simulator.

    Ray must be running.
    root: the folder of Fashion-MNIST; None downloads it; "" takes random images. W3 always takes
    random images.
    pfl, fedjax: paths of Python interpreters; None leaves the simulator out.
    """
    from raysim.runtime.ray import start_workers

    workload = WORKLOADS[name]
    spec = spec_of(workload, source_of(workload, root))
    lanes = default_lanes(spec, declare_run(spec), workload.cohort)
    spec = replace(spec, lanes=lanes)
    rounds = workload.rounds
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_workload(folder, spec, workload)
        runtime = start_workers(spec, PROCESSES)
        timers: dict[str, Callable[[], float]] = {
            "raysim": lambda: time_rounds(spec, workload, runtime, rounds)
        }
        if pfl is not None:
            timers["pfl-research"] = lambda: time_peer(
                "pfl_app.py", pfl, folder, rounds, pfl_environments()
            )
        if fedjax is not None:
            timers["FedJAX"] = lambda: time_fedjax(fedjax, folder, rounds)
        seconds: dict[str, list[float]] = {simulator: [] for simulator in timers}
        try:
            time_rounds(spec, workload, runtime, 1)
            for block in range(blocks):
                for simulator, timer in timers.items():
                    seconds[simulator].append(timer())
                texts = [f"{simulator} {values[-1]:.4f} s" for simulator, values in seconds.items()]
                print(
                    f"workload {name}, measurement {block + 1} of {blocks}: time of a round "
                    f"with {', with '.join(texts)}",
                    flush=True,
                )
        finally:
            runtime.stop()
    return seconds


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """Return a table with a row for each workload and simulator.

    A row has the simulator's median seconds per round, and raysim's seconds divided by the
    simulator's.
    results: the seconds per round of each repetition, by workload and simulator.
    """
    rows = []
    for name, seconds in results.items():
        ours = seconds["raysim"]
        for simulator, theirs in seconds.items():
            ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
            numbers = [statistics.median(theirs), statistics.median(ratios)]
            numbers += [min(ratios), max(ratios)]
            rows.append([name, simulator, *(f"{number:.3f}" for number in numbers)])
    title = (
        "Seconds per round are medians of all measurements. The ratio is raysim's seconds divided "
        "by those of the simulator: median, lowest and highest of all measurements."
    )
    head = ["workload", "simulator", "s per round", "ratio", "lowest", "highest"]
    return f"{title}\n{format_table(text_columns(head, rows), 100)}"


def main() -> None:
    """Compare the time of a round on raysim, on pfl-research and on FedJAX.

    The command line names the workloads of `raysim bench` to train. The results are printed, and
    written to the JSON file of the option `--out`.
    """
    parser = arguments.parser(__doc__)
    parser.add_argument(
        "workloads", nargs="*", help="workloads of raysim bench to measure: W1, W2, W3 (all)"
    )
    parser.add_argument("--pfl", help="Python with the packages pfl and torch")
    parser.add_argument("--fedjax", help="Python with the package fedjax")
    parser.add_argument(
        "--data", help="folder with Fashion-MNIST; '' takes random pictures", default=""
    )
    parser.set_defaults(blocks=3)
    options = arguments.read(parser)
    for name in options.workloads:
        one_of("workload", name, tuple(WORKLOADS))
    pfl, fedjax = (
        None if path is None else str(user_path(path).absolute())
        for path in (options.pfl, options.fedjax)
    )
    cluster.connect(cluster.RayOptions())
    try:
        results = {
            name: compare(name, options.data, options.blocks, pfl, fedjax)
            for name in options.workloads or WORKLOADS
        }
    finally:
        cluster.disconnect()
    print(table(results))
    write_json(results, options.out)


if __name__ == "__main__":
    run(main)
