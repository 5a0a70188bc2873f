r"""Compare raysim with Flower's own simulation engine, on workloads and on Flower's programs.

    python -m venv flower && flower/bin/pip install "flwr[simulation]" torch "pyarrow<20"
    uv run python -m jobs.benchmarks.flower_engine --engine flower/bin/python W2 W1

W1 and W2 are workloads of `raysim bench`. The result is raysim's time of a round, divided by the
time of Flower's engine. The engine has its own environment, because it needs another version of
Ray.

    git clone https://github.com/adap/flower checkout
    uv run --with PACKAGES python -m jobs.benchmarks.flower_engine --engine flower/bin/python \
        --checkout checkout quickstart-sklearn fedprox

quickstart-sklearn and fedprox are programs in Flower's repository (`flower_programs.py`). The
result is a table of accuracies and times. PACKAGES are the packages in the programs'
pyproject.toml, except flwr. Flower's environment needs PACKAGES, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from jobs.benchmarks.flower_programs import (
    PROCESSES,
    PROGRAMS,
    Measured,
    compare_program,
    programs_table,
)
from jobs.command import run
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path
from raysim.results.history import write_json

APP = Path(__file__).parent / "flower_app"
CLIENTS = {"W1": 100, "W2": 1000}
LIMITS = {"W1": 1.0, "W2": 0.2}  # of raysim's time, as a share of the engine's time
TIMEOUT_S = 900
# What `--engine` executes in the app's folder.
ENGINE = """
import sys
from flwr.simulation import run_simulation
from workload.client_app import app as clients
from workload.server_app import app as server
resources = {"num_cpus": 1, "num_gpus": 0.0}
# Ray keeps the address of a cluster that ended a moment ago, and would wait for it.
started = {"num_cpus": int(sys.argv[2]), "include_dashboard": False, "address": "local"}
config = {"client_resources": resources, "init_args": started}
run_simulation(server, clients, num_supernodes=int(sys.argv[1]), backend_config=config)
"""


def measure(command: Sequence[str], name: str, rounds: int) -> float:
    """Run a command in the app's folder; return its median seconds per round.

    name: the workload's name.
    """
    with TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        settings = {"WORKLOAD": name, "ROUNDS": str(rounds), "TIMES": str(times)}
        environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1"}
        # Flower's server waits forever if its Ray did not start.
        limited = ["timeout", str(TIMEOUT_S), *command]
        ended = subprocess.run(limited, cwd=APP, env=environment, capture_output=True, text=True)
        moments: list[float] = json.loads(times.read_text()) if times.is_file() else []
    if ended.returncode != 0 or len(moments) < rounds + 1:
        print(ended.stdout[-4000:], ended.stderr[-4000:], file=sys.stderr)
        raise RefusedError(
            f"{command[0]} ended with status {ended.returncode} after "
            f"{max(0, len(moments) - 1)} of {rounds} rounds (status 124: it did not end in "
            f"{TIMEOUT_S} s). Read its output above."
        )
    # Leave out the first round, in which processes start.
    return statistics.median(later - earlier for earlier, later in pairwise(moments[1:]))


def compare(name: str, engine: str, rounds: int, blocks: int) -> dict[str, object]:
    """Time a workload alternately on raysim and on Flower's engine.

    Return a dict. "seconds_per_round" has the measured seconds of "raysim" and of "flower". "ratio"
    is raysim's seconds divided by those of Flower's engine, the median over the measurements.
    "limit" is the largest accepted ratio.
    engine: the Python interpreter of Flower's engine.
    blocks: the number of measurements of each simulator.
    """
    seconds: dict[str, list[float]] = {"raysim": [], "flower": []}
    ours = ["raysim", "flower", "run", ".", f"clients={CLIENTS[name]}", "runtime=local"]
    ours += [f"runtime.workers={PROCESSES}"]
    theirs = [engine, "-c", ENGINE, str(CLIENTS[name]), str(PROCESSES)]
    for _ in range(blocks):
        seconds["raysim"].append(measure(ours, name, rounds))
        seconds["flower"].append(measure(theirs, name, rounds))
        print(
            f"workload {name}: a round takes {seconds['raysim'][-1]:.3f} s with raysim and "
            f"{seconds['flower'][-1]:.3f} s with Flower's engine",
            flush=True,
        )
    pairs = zip(seconds["raysim"], seconds["flower"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    print(
        f"workload {name}: raysim's time divided by that of Flower's engine is {ratio:.2f} "
        f"(median of {blocks}); it should be at most {LIMITS[name]:g}"
    )
    return {"seconds_per_round": seconds, "ratio": ratio, "limit": LIMITS[name]}


def main() -> None:
    """Compare raysim with Flower's simulation engine, and print the results.

    The command line names workloads of `raysim bench` and programs of Flower's repository. Both
    raysim and Flower's engine run each of them.
    """
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    names = [*CLIENTS, *PROGRAMS]
    parser.add_argument(
        "names",
        nargs="*",
        choices=names,
        default=["W2", "W1"],
        metavar="NAME",
        help="workloads and programs to measure (W2 W1)",
    )
    parser.add_argument(
        "--engine", required=True, help="Python with the packages flwr[simulation] and torch"
    )
    parser.add_argument("--rounds", type=int, default=6, help="number of rounds of a workload (6)")
    parser.add_argument(
        "--blocks",
        type=int,
        default=3,
        help="how often a workload is measured on raysim and on Flower's engine (3)",
    )
    parser.add_argument("--checkout", default=".", help="a copy of Flower's repository (.)")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2],
        help="seeds with which each program runs (0 1 2)",
    )
    parser.add_argument(
        "--data",
        help="folder of data sets, such as uoft-cs/cifar10/train.parquet and MNIST/raw; without it "
        "the programs load theirs from the internet",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        help="share of the rows of each data set in --data that the programs get (1)",
    )
    parser.add_argument("--out", default="bench.json", help="file for the results (bench.json)")
    options = parser.parse_args()
    engine = str(user_path(options.engine).absolute())
    checkout = user_path(options.checkout).absolute()
    data = user_path(options.data).absolute() if options.data else None
    results: dict[str, object] = {}
    programs: dict[str, dict[str, list[Measured]]] = {}
    for name in options.names:
        if name in CLIENTS:
            results[name] = compare(name, engine, options.rounds, options.blocks)
            continue
        seeds, share = options.seeds, options.share
        programs[name] = compare_program(name, checkout, data, engine, seeds, share)
        results[name] = {
            side: [asdict(measured) for measured in runs] for side, runs in programs[name].items()
        }
    if programs:
        print(programs_table(programs))
    write_json(results, user_path(options.out))


if __name__ == "__main__":
    run(main)
