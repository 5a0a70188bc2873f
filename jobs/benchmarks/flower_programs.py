"""Compare the accuracy and time of Flower's own programs on raysim and on Flower's engine.

The programs are unchanged examples and baselines of Flower's repository. Programs that are not apps
call Flower's `start_simulation`. For raysim, this module replaces that function by
`raysim.flower.start_simulation`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from pyarrow import parquet

from raysim.commands.flower import read_request
from raysim.primitives.errors import RefusedError
from raysim.results.tables import format_table, text_columns

PROCESSES = 2
TIMEOUT_S = 1800
END_TIMEOUT_S = 60.0  # for the processes that a program has started, after its own end
CPU_INTERVAL_S = 0.2  # between two readings of CPU times
ADOPT_ORPHANS = 36  # Linux: PR_SET_CHILD_SUBREAPER
LAST_ROUNDS = 5  # the accuracy of a run is the mean over so many
SMALL_ROWS = 1000  # a table with fewer rows is copied whole
IDX_COUNT = slice(4, 8)  # the bytes of an idx file that contain its number of items
MNIST_PARENT = "data/mnist"  # where fedpara expects torchvision's folder MNIST
TABLE_WIDTH = 100
# Flower's Python executes this for an app, with the settings of the run as JSON.
# `run_simulation` passes no run config to an app, and it refuses a changed context.
APP_ON_ENGINE = """
import json, sys
from importlib import import_module
from flwr.app import Context
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

settings = json.loads(sys.argv[1])

def load(reference):
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)

def configured(context):
    facts = (context.run_id, context.node_id, context.node_config, context.state)
    return Context(*facts, settings["run_config"])

client_app, server_app = load(settings["clientapp"]), load(settings["serverapp"])
server = ServerApp()

@server.main()
def main(grid, context):
    server_app(grid, configured(context))

def answer(message, context):
    return client_app(message, configured(context))

resources = {"num_cpus": 1, "num_gpus": 0.0}
started = {"num_cpus": settings["processes"], "include_dashboard": False, "address": "local"}
config = {"client_resources": resources, "init_args": started}
run_simulation(server, answer, num_supernodes=settings["clients"], backend_config=config)
"""
# Both sides execute this for an older program, with the seed ("" on Flower's engine), the number of
# processes, the program's module and the program's arguments.
OLDER_PROGRAM = """
import functools, runpy, sys
import flwr.simulation

seed, processes, module, *arguments = sys.argv[1:]
if seed:
    from raysim.flower import start_simulation
    settings = {"seed": int(seed), "workers": int(processes)}
    flwr.simulation.start_simulation = functools.partial(start_simulation, **settings)
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Program:
    """A program in Flower's repository: a Flower app, or an older program.

    folder: the path in the repository.
    settings: the values of --run-config for an app, or the arguments of an older program, in which
    {seed} stands for the seed.
    module: the module that starts an older program; "" for an app.
    """

    folder: str
    clients: int
    settings: tuple[str, ...] = ()
    module: str = ""


PROGRAMS = {
    "quickstart-sklearn": Program("examples/quickstart-sklearn", 10),
    "quickstart-pytorch": Program(
        "examples/quickstart-pytorch", 10, ("num-server-rounds=10 learning-rate=0.02",)
    ),
    "my-awesome-app": Program(
        "examples/flower-simulation-step-by-step-pytorch/my-awesome-app",
        10,
        ("num-server-rounds=10",),
    ),
    "fedprox": Program(
        "baselines/fedprox",
        100,
        (
            "algorithm.num-server-rounds=15 algorithm.local-epochs=4",
            "algorithm.fraction-fit=0.1 algorithm.min-available-clients=100",
        ),
    ),
    "fedrep": Program(
        "baselines/fedrep",
        20,
        ("num-server-rounds=15 fraction-fit=0.5 fraction-evaluate=1.0",),
    ),
    "fedpara": Program(
        "baselines/fedpara",
        100,
        (
            "--config-name=mnist_fedavg",
            "dataset_config.shard_size=60",
            "seed={seed}",
            "num_rounds=15",
            "server_device=cpu",
            "client_resources.num_cpus=1",
            "client_resources.num_gpus=0",
        ),
        "fedpara.main",
    ),
}


@dataclass(frozen=True)
class Measured:
    """The result of one run of a program.

    accuracy: the mean over the last `LAST_ROUNDS` rounds, between 0 and 1.
    seconds: the wall time, including the start of processes.
    cpu_seconds: the user and system time of all processes, including Ray's.
    """

    accuracy: float
    seconds: float
    cpu_seconds: float


def copy_data(source: Path, target: Path, share: float) -> None:
    """Copy the first rows of Parquet files and of torchvision's idx files.

    share: the share of the rows that are copied, from 0 to 1. Parquet files with fewer than
    `SMALL_ROWS` rows are copied whole.
    """
    for file in sorted(source.rglob("*.parquet")):
        table = parquet.read_table(file)
        rows = table.num_rows
        if rows >= SMALL_ROWS:
            rows = int(share * rows)
        copy = _path_of_copy(file, source, target)
        parquet.write_table(table.slice(0, rows), copy)
        short_name = target / copy.parent.name
        if copy.parent != target and not short_name.exists():
            short_name.symlink_to(copy.parent)
    for file in sorted(source.rglob("*-ubyte")):
        _path_of_copy(file, source, target).write_bytes(cut_idx(file.read_bytes(), share))
    if (target / "MNIST").exists():
        (target / MNIST_PARENT).mkdir(parents=True, exist_ok=True)
        (target / MNIST_PARENT / "MNIST").symlink_to(target / "MNIST")


def _path_of_copy(file: Path, source: Path, target: Path) -> Path:
    """Make the folder for the copy of a file; return the path of the copy.

    The path of the copy relative to `target` is the path of the file relative to `source`.
    """
    copy = target / file.relative_to(source)
    copy.parent.mkdir(parents=True, exist_ok=True)
    return copy


def cut_idx(content: bytes, share: float) -> bytes:
    """Return the content of an idx file (MNIST's format) with only the first items.

    content: the content of the whole file, whose entries are single bytes.
    share: the share of the items that are kept, from 0 to 1.
    """
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    items = int(share * int(shape[0]))
    item_bytes = int(np.prod(shape[1:], dtype=np.int64))
    start = 4 + 4 * dimensions
    head = bytearray(content[:start])
    head[IDX_COUNT] = items.to_bytes(4, "big")
    return bytes(head) + content[start : start + items * item_bytes]


def app_commands(program: Program, folder: Path, engine: str, seed: int) -> dict[str, list[str]]:
    """Return the commands that run a Flower app on "raysim" and on "flower", Flower's engine.

    engine: the path of the Python interpreter that has Flower's engine.
    seed: the seed on raysim; Flower's engine receives none.
    """
    ours = ["raysim", "flower", "run", str(folder), f"clients={program.clients}", f"seed={seed}"]
    ours += ["runtime=local", f"runtime.workers={PROCESSES}"]
    for text in program.settings:
        ours += ["--run-config", text]
    request = read_request([str(folder)], program.settings)
    settings = {
        "clientapp": request.project.client_app,
        "serverapp": request.project.server_app,
        "run_config": request.project.run_config(request.run_config, "--run-config"),
        "clients": program.clients,
        "processes": PROCESSES,
    }
    return {"raysim": ours, "flower": [engine, "-c", APP_ON_ENGINE, json.dumps(settings)]}


def older_commands(program: Program, engine: str, seed: int) -> dict[str, list[str]]:
    """Return the commands that run an older program on "raysim" and on "flower", Flower's engine.

    An older program is not an app, but calls Flower's `start_simulation`.
    engine: the Python interpreter that has Flower's engine.
    seed: the seed on raysim, also for {seed} in the program's arguments.
    """
    words = [str(PROCESSES), program.module]
    words += [word.format(seed=seed) for word in program.settings]
    ours = [sys.executable, "-c", OLDER_PROGRAM, str(seed), *words]
    return {"raysim": ours, "flower": [engine, "-c", OLDER_PROGRAM, "", *words]}


def read_accuracy(log: str) -> float:
    """Return the mean accuracy over the last `LAST_ROUNDS` rounds in a program's log.

    An app logs {'accuracy': VALUE} or {'eval_acc': VALUE} in each round. An older program logs
    'accuracy': [(ROUND, VALUE), ...]. Raise RefusedError without such values.
    """
    values = re.findall(r"'accuracy': ([-+.\de]+)", log)
    values = values or re.findall(r"'eval_acc': ([-+.\de]+)", log)
    if not values:
        history = log.rpartition("'accuracy': [")[2].partition("]")[0]
        values = re.findall(r"\(\d+,\s*([-+.\de]+)\)", history)
    if not values:
        raise RefusedError(
            "the measured program wrote no accuracy ('accuracy' or 'eval_acc') to its log. Read "
            "the log above."
        )
    return statistics.fmean(float(value) for value in values[-LAST_ROUNDS:])


def adopt_orphans() -> None:
    """Let Linux make this process the parent of each descendant whose own parent ends.

    Ray's processes, for example, lose their parent. Raise RefusedError on another system.
    """
    if sys.platform != "linux":
        raise RefusedError(
            f"this system is {sys.platform}, but the CPU time of Ray's processes can be measured "
            "only on Linux. Run this benchmark on Linux."
        )
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)


@dataclass(frozen=True)
class Process:
    """A process of this machine.

    parent: the number (PID) of its parent process.
    started: the time of its start, in clock ticks since the machine was started.
    cpu_seconds: the user and system time of this process alone, in seconds.
    """

    parent: int
    started: int
    cpu_seconds: float


def read_processes() -> dict[int, Process]:
    """Return all processes of this machine by number (only on Linux)."""
    ticks = os.sysconf("SC_CLK_TCK")
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text(errors="replace")
        except OSError:  # the process has ended
            continue
        values = text.rpartition(")")[2].split()  # from the process's state on
        cpu_seconds = (int(values[11]) + int(values[12])) / ticks
        processes[int(folder.name)] = Process(int(values[1]), int(values[19]), cpu_seconds)
    return processes


class CpuClock(threading.Thread):
    """A thread that adds up the CPU time of all descendants of this process.

    It reads the times every `CPU_INTERVAL_S` seconds.
    """

    # Reading the times once at the end would miss Ray's workers: Linux does not add the time of an
    # ended worker to that of its parent, the raylet.

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._seconds: dict[tuple[int, int], float] = {}  # by number and start of a process
        self._is_stopped = threading.Event()

    def run(self) -> None:
        """Read the CPU times of all descendant processes repeatedly until `stop` is called."""
        while not self._is_stopped.wait(CPU_INTERVAL_S):
            self._read()

    def _read(self) -> None:
        processes = read_processes()
        families = {os.getpid()}
        for pid in sorted(processes, key=lambda pid: (processes[pid].started, pid)):
            if processes[pid].parent in families:
                families.add(pid)
                self._seconds[pid, processes[pid].started] = processes[pid].cpu_seconds

    def stop(self) -> float:
        """Stop the thread; return the total CPU seconds of all descendants of this process.

        The total is the user time and the system time of all descendants together.
        """
        self._is_stopped.set()
        self.join()
        return sum(self._seconds.values())


def wait_for_children() -> None:
    """Wait until all children of this process have ended.

    Raise RefusedError if one still runs after `END_TIMEOUT_S` seconds.
    """
    end = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < end:
        try:
            child, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            time.sleep(0.1)
    raise RefusedError(
        f"the measured program has ended, but processes that it started still run "
        f"{END_TIMEOUT_S:g} s later. End these processes, and measure again."
    )


def measure_program(command: Sequence[str], folder: Path, work: Path) -> Measured:
    """Execute the command of a Flower program; return the program's accuracy and time.

    folder: has the program's Python modules.
    work: the working directory, in which the program looks for data sets.
    Raise RefusedError if the program fails or logs no accuracy, or if processes that it started do
    not end. Also raise it if the system is not Linux.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "local",  # Flower's engine would use a cluster that runs on this machine
    }
    limited = ["timeout", str(TIMEOUT_S), *command]
    adopt_orphans()
    clock = CpuClock()
    clock.start()
    start = time.monotonic()
    ended = subprocess.run(
        limited,
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    seconds = time.monotonic() - start
    wait_for_children()
    cpu_seconds = clock.stop()
    try:
        if ended.returncode != 0:
            raise RefusedError(
                f"{command[0]} ended with status {ended.returncode} (status 124: it did not end "
                f"in {TIMEOUT_S} s). Read its output above."
            )
        return Measured(read_accuracy(ended.stdout), seconds, cpu_seconds)
    except RefusedError:
        print(ended.stdout[-8000:], file=sys.stderr)
        raise


def compare_program(
    name: str,
    checkout: Path,
    data: Path | None,
    engine: str,
    seeds: Sequence[int],
    share: float,
) -> dict[str, list[Measured]]:
    """Run a program with each seed on raysim and on Flower's engine.

    Return the measurements of "raysim" and of "flower".
    checkout: a copy of Flower's repository.
    data: the folder of the data sets; None if the programs download them.
    engine: the Python interpreter of Flower's engine.
    share: the share of the rows in `data` that is used.
    """
    program = PROGRAMS[name]
    folder = checkout / program.folder
    results: dict[str, list[Measured]] = {"raysim": [], "flower": []}
    for seed in seeds:
        if program.module:
            commands = older_commands(program, engine, seed)
        else:
            commands = app_commands(program, folder, engine, seed)
        for side, command in commands.items():
            with TemporaryDirectory() as work:
                if data is not None:
                    copy_data(data, Path(work), share)
                measured = measure_program(command, folder, Path(work))
            results[side].append(measured)
            print(
                f"program {name} with seed {seed} on {side}: test accuracy "
                f"{measured.accuracy:.4f}, wall time {measured.seconds:.1f} s, CPU time "
                f"{measured.cpu_seconds:.1f} s",
                flush=True,
            )
    return results


def programs_table(results: dict[str, dict[str, list[Measured]]]) -> str:
    """Return a table with a row for each program.

    A row has the mean, lowest and highest accuracy over the seeds, both on raysim and on Flower's
    engine. The last two columns have ratios: raysim's wall time divided by that of the engine, and
    the same for the CPU time. Each ratio is the median over the seeds.
    results: one measurement for each seed, by program and then by "raysim" or "flower".
    """
    rows = []
    for name, sides in results.items():
        row = [name]
        for side in ("raysim", "flower"):
            accuracies = [measured.accuracy for measured in sides[side]]
            row.append(f"{statistics.fmean(accuracies):.3f}")
            row.append(f"{min(accuracies):.3f} to {max(accuracies):.3f}")
        pairs = list(zip(sides["raysim"], sides["flower"], strict=True))
        time_ratio = statistics.median(ours.seconds / theirs.seconds for ours, theirs in pairs)
        cpu_ratio = statistics.median(
            ours.cpu_seconds / theirs.cpu_seconds for ours, theirs in pairs
        )
        rows.append([*row, f"{time_ratio:.2f}", f"{cpu_ratio:.2f}"])
    title = (
        "Accuracy on raysim and on Flower's engine: mean and range over the seeds. Wall and CPU "
        "time: raysim's time divided by that of Flower's engine, medians over the seeds."
    )
    head = ["program", "raysim", "range", "flower", "range", "wall time", "CPU time"]
    return f"{title}\n{format_table(text_columns(head, rows), TABLE_WIDTH)}"
