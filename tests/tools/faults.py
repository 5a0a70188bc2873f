"""Disturb runs, resume them, and compare their results with those of undisturbed runs.

    uv run python tests/tools/faults.py --count 300 --log faults.jsonl
                                                in process; continues after an interruption
    uv run python tests/tools/faults.py --count 60 --runtime local --log faults.jsonl
                                                on Ray: driver, coordinator, workers, raylet and GCS
    uv run python tests/tools/faults.py --cost 5      # cost of a killed worker, 5 pairs of runs

Faults are signals, limits on file sizes, and a locked or damaged MLflow database. They come at
random moments of CPU time, which are the same on a busy machine. A run is continued with
resume=latest until it is finished. Its sha256 values and history must be those of the undisturbed
run. No unfinished file, process or traceback may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from raysim.results.history import read_history

METHODS = {  # by name: what makes the run
    "fedavg": ["method=[]"],
    "scaffold": ["method=[scaffold]"],
    "fraug": ["method=[fraug]", "model=small_cnn", "model.norm=batch"],
    "fedbss": ["method=[fedbss]", "method.fedbss.warmup_rounds=1"],
    "fedbr": ["method=[fedbr]"],
    "fedbuff": ["method=[fedbuff]"],
    "fedasync": ["method=[fedasync]"],
}
SCHEDULES = {
    "rounds": ["schedule=synchronous", "schedule.cohort=3"],
    "buffer": ["schedule=buffered", "schedule.concurrency=3", "schedule.size=2", "fleet=lognormal"],
}
BASE = (
    *(
        "data=synthetic",
        "data.samples=200",
        "partition=iid",
        "partition.clients=6",
        "model=mlp",
        "local.epochs=1",
    ),
    *("rounds=24", "checkpoint.every=2", "out=out"),
)
RUNTIMES = {
    "inprocess": ["runtime=inprocess"],
    "local": ["runtime=local", "runtime.workers=2"],
    "one worker": ["runtime=local", "runtime.workers=1"],
}
SIGNALS = {
    "KILL": [signal.SIGKILL],
    "TERM": [signal.SIGTERM],
    "INT": [signal.SIGINT],
    "INT twice": [signal.SIGINT] * 2,
    "STOP": [signal.SIGSTOP],
}
VICTIMS = {
    "driver": "",
    "coordinator": "ray::RayCoordinator",
    "worker": "ray::RayWorker",
    "raylet": "raylet",
    "gcs": "gcs_server",
}
MEASURED = (
    "wall_seconds",
    "worker_seconds",
    "worker_busy",
    "worker_busy_least",
    "device_busy",
    "store_bytes",
    "worker_deaths",
)
PATIENT = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
}  # on a busy machine
RUN_TIMEOUT_S = 600  # seconds for a run of a few
MARK = "RAYSIM_FAULTS"  # in the environment of all processes of a case
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """A run, and a fault that disturbs it.

    method, schedule, runtime, victim: keys of `METHODS`, `SCHEDULES`, `RUNTIMES` and `VICTIMS`. If
    the fault is a signal, the victim gets it.
    moment: when the fault happens, as a share of the undisturbed run's CPU time.
    continues_on: the runtime of the continued run, a key of `RUNTIMES`; "": that of the first run.
    has_pictures: False: each picture of the run is one pixel, so that faults hit the training.
    """

    method: str
    schedule: str
    runtime: str
    fault: str  # a signal, "disk", or "lock", "delete" or "overwrite" of the database
    victim: str
    moment: float
    continues_on: str = ""
    has_pictures: bool = True

    @property
    def words(self) -> list[str]:
        """Return the command line."""
        tracking = ["tracking=none"]
        if self.fault in DATABASE:  # written while the run lasts, as its address is given
            tracking = ["tracking=mlflow", "tracking.uri=sqlite:///mlflow.db"]
        parts = (*BASE, *METHODS[self.method], *SCHEDULES[self.schedule], *RUNTIMES[self.runtime])
        return ["run", *parts, *tracking]


def _lock(database: Path) -> contextlib.AbstractContextManager[Any]:
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    return contextlib.closing(connection)


def _delete(database: Path) -> contextlib.AbstractContextManager[Any]:
    database.unlink(missing_ok=True)
    return contextlib.nullcontext()


def _overwrite(database: Path) -> contextlib.AbstractContextManager[Any]:
    database.write_bytes(b"no database" * 1000)
    return contextlib.nullcontext()


DATABASE = {"lock": _lock, "delete": _delete, "overwrite": _overwrite}


def cases(count: int, seed: int, runtime: str) -> Iterator[Case]:
    """Yield `count` random cases: runs with a fault. Equal arguments give equal cases.

    runtime: the runtime of the runs. On Ray, a signal hits any process of the run. With
    "inprocess", it hits the only process, the driver.
    """
    rng = random.Random(seed)
    faults = [*SIGNALS, *SIGNALS, "disk", "disk", *DATABASE]
    victims = list(VICTIMS) if runtime != "inprocess" else ["driver"]
    for _ in range(count):
        method = rng.choice(list(METHODS))
        schedule = {"fedbuff": "buffer", "fedasync": "one"}.get(method) or rng.choice(
            ["rounds", "buffer"]
        )
        yield Case(method, schedule, runtime, rng.choice(faults), rng.choice(victims), rng.random())


SCHEDULES["one"] = [
    "schedule=buffered",
    "schedule.concurrency=3",
    "schedule.size=1",
    "fleet=lognormal",
]


# --- processes ------------------------------------------------------------------------------------
FORKS = multiprocessing.get_context(
    "forkserver"
)  # a process that has imported raysim makes those of the runs
FORKS.set_forkserver_preload(
    [
        *(
            "raysim.cli",
            "raysim.experiment.execute",
            "raysim.runtime.inprocess",
            "matplotlib.figure",
        ),
        *(
            "mlflow.pytorch",
            "mlflow.store.tracking.sqlalchemy_store",
            "torch.export._trace",
        ),  # seconds each
    ]
)


def _run_raysim(words: list[str], folder: str, mark: str, has_pictures: bool) -> None:
    """Run `raysim` in this process; its standard error goes to the file `err` in the folder.

    words: the arguments of `raysim`.
    mark: the value of the environment variable `MARK`, by which processes of this run are found.
    has_pictures: False: each picture of the run is one pixel.
    """
    os.setsid()
    os.chdir(folder)
    os.environ.update(PATIENT, **{MARK: mark})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    from raysim.cli import main

    if not has_pictures:
        from one_point import replace_pictures

        replace_pictures()
    main(words)


def start(
    words: list[str], folder: Path, mark: str, has_pictures: bool = True
) -> ForkServerProcess:
    """Start a run in a new process with a new session, and return this process.

    words: the arguments of `raysim`.
    mark: the value of the environment variable `MARK`, by which the run's processes are found.
    has_pictures: False: each picture of the run is one pixel.
    """
    run = FORKS.Process(target=_run_raysim, args=(words, str(folder), mark, has_pictures))
    run.start()
    return run


def descendants(pid: int) -> list[int]:
    """Return all descendants of the process."""
    found = []
    with contextlib.suppress(OSError):  # it may end while it is looked at
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def command_line_of(pid: int) -> str:
    """Return the command line of a process; "" if the process does not exist."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    return ""


def used_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants, including ended ones."""
    seconds = 0.0
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            seconds += sum(map(int, fields[11:15])) / TICK
    return seconds


def processes(run: ForkServerProcess, victim: str) -> list[int]:
    """Return the ids of the run's processes of one kind.

    victim: the kind, a key of `VICTIMS`.
    """
    assert run.pid is not None
    if not (place := VICTIMS[victim]):
        return [run.pid]
    return [pid for pid in descendants(run.pid) if place in command_line_of(pid)[:200]]


def await_moment(run: ForkServerProcess, seconds: float) -> bool:
    """Wait until a run has used `seconds` of CPU time; return whether it is still running."""
    assert run.pid is not None
    while run.is_alive():
        if used_cpu_seconds(run.pid) >= seconds:
            return True
        time.sleep(0.005)
    return False


def disturb(run: ForkServerProcess, case: Case, rng: random.Random) -> None:
    """Send the signals of a case to a random process of the run with the role `case.victim`.

    Without such a process, nothing is sent. One second after SIGSTOP, the process is killed, unless
    it is a worker, which the run itself replaces.
    """
    if not (found := processes(run, case.victim)):
        return
    victim = rng.choice(found)
    for each in SIGNALS[case.fault]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, each)
    if case.fault == "STOP" and case.victim != "worker":
        time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def fill(run: ForkServerProcess, runtime: str, size: int) -> None:
    """Imitate a full disk: limit the size of files that the run's driver and coordinator can write.

    runtime: a key of `RUNTIMES`. If the run uses Ray, this function first waits until the
    coordinator runs.
    size: the limit in bytes.
    """
    coordinators: list[int] = []
    while runtime != "inprocess" and run.is_alive() and not coordinators:
        coordinators = processes(run, "coordinator")
        time.sleep(0.05)
    for pid in [*processes(run, "driver"), *coordinators]:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def finish(run: ForkServerProcess) -> int:
    """Wait for the end of a run, and return its exit status.

    If it does not end in time, kill its process and all descendants.
    """
    run.join(RUN_TIMEOUT_S)
    if run.exitcode is not None:
        return run.exitcode
    assert run.pid is not None
    for pid in [run.pid, *descendants(run.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.join()
    return HANGS


HANGS = -99


def leftover(mark: str) -> list[str]:
    """Return the command lines of the processes that a case leaves running after its runs.

    The function waits up to a minute for the processes to end.
    mark: the value of the environment variable `MARK` in all processes of the case.
    """
    for _ in range(60):
        if not (found := [command_line_of(pid) for pid in _marked(mark)]):
            break
        time.sleep(1)
    return found


def _marked(mark: str) -> Iterator[int]:
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes():
                yield int(environment.parent.name)


# --- what must be the same ------------------------------------------------------------------------
def result(folder: Path) -> tuple[Any, ...]:
    """Return the digests and the history of a finished run."""
    summary = json.loads((folder / "out/summary.json").read_text())
    rows = [
        {k: v for k, v in row.items() if k not in MEASURED}
        for row in read_history(folder / "out/history.parquet")
    ]
    return summary["model_sha256"], summary["state_sha256"], json.dumps(rows)


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed run: its results, its CPU seconds, and the size of its largest file."""

    result: tuple[Any, ...]
    seconds: float
    largest: int


UNDISTURBED: dict[tuple[bool | str, ...], Undisturbed] = {}


def undisturbed(case: Case) -> Undisturbed:
    """Return the results of a case's run without the fault, with the run's CPU time.

    The results are stored for later calls. If `case.moment` is 0, the CPU time does not matter, and
    the run uses runtime=inprocess in place of Ray.
    """
    if not case.moment:
        case = replace(case, runtime="inprocess")
    key = (case.has_pictures, *case.words)
    if key not in UNDISTURBED:
        with tempfile.TemporaryDirectory(prefix="raysim-faults-") as text:
            folder, seconds = Path(text), 0.0
            if (
                case.fault in DATABASE
            ):  # MLflow takes ten times as long to make a database as all else
                (folder / "mlflow.db").write_bytes(_database())
            run = start(case.words, folder, uuid.uuid4().hex, case.has_pictures)
            while run.is_alive():
                seconds = max(seconds, used_cpu_seconds(run.pid or 0))
                time.sleep(0.02)
            assert finish(run) == 0, (folder / "err").read_text()
            sizes = [path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file()]
            UNDISTURBED[key] = Undisturbed(result(folder), seconds, max(sizes))
    return UNDISTURBED[key]


@functools.cache
def _database() -> bytes:
    """Return the content of a database that MLflow has made."""
    with tempfile.TemporaryDirectory(prefix="raysim-faults-") as text:
        assert (
            finish(
                start(Case("fedavg", "rounds", "inprocess", "lock", "", 0).words, Path(text), "")
            )
            == 0
        )
        return Path(text, "mlflow.db").read_bytes()


def carry_out(case: Case, seed: int) -> str:
    """Run a case; return "same" if its results are right, and otherwise a text about the problem.

    The result is "same, too late" if the run ended before the fault.
    """
    expected = undisturbed(case)
    rng, mark = random.Random(seed), uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="raysim-faults-") as text:
        folder, reached = Path(text), True
        if case.fault in DATABASE:
            (folder / "mlflow.db").write_bytes(_database())
        run = start(case.words, folder, mark, case.has_pictures)
        with contextlib.ExitStack() as stack:
            reached = await_moment(run, expected.seconds * case.moment)
            if case.fault == "disk" and reached:
                fill(run, case.runtime, int(expected.largest * rng.random()))
            elif case.fault in DATABASE:
                stack.enter_context(DATABASE[case.fault](folder / "mlflow.db"))
            elif case.fault in SIGNALS and reached:
                disturb(run, case, rng)
            statuses = [finish(run)]
        while statuses[-1] not in (0, HANGS) and len(statuses) < 5:
            later = replace(case, runtime=case.continues_on or case.runtime)
            words = [*later.words, "resume=latest"]
            statuses.append(finish(start(words, folder, mark, case.has_pictures)))
        return wrong(case, folder, statuses, mark, expected) or (
            "same" if reached else "same, too late"
        )


def wrong(case: Case, folder: Path, statuses: list[int], mark: str, expected: Undisturbed) -> str:
    """Return a text about the first error that a case shows; "" if the case has no error.

    statuses: the exit statuses of the disturbed run and of its continuations, in order.
    mark: the value of the environment variable `MARK` in all processes of the case.
    expected: the results of the undisturbed run.
    """
    errors = (folder / "err").read_text()
    if statuses[-1] == HANGS:
        return "hangs"
    if statuses[-1]:
        return f"does not go on (status {statuses}): {errors[-300:]}"
    if result(folder) != expected.result:
        return "ends in another result"
    if "Traceback" in errors:
        return f"shows a traceback: {errors[errors.index('Traceback') :][-400:]}"
    if left := [path.name for path in (folder / "out").rglob(".*") if path.name != ".held"]:
        return f"leaves {left}"
    if left := leftover(mark):
        return f"leaves processes: {left}"
    return ""


# --- what a dead worker costs ---------------------------------------------------------------------
LONG = (
    *(
        "run",
        "data=synthetic",
        "data.samples=5000",
        "partition=iid",
        "partition.clients=50",
        "schedule.cohort=10",
    ),
    *(
        "local.epochs=2",
        "rounds=150",
        "checkpoint.every=0",
        "tracking=none",
        "runtime.workers=2",
        "out=out",
    ),
)


def cost(pairs: int) -> None:
    """Measure how much longer a run takes if a worker is killed 5 s after all are ready.

    Print the difference in wall seconds for each pair of a disturbed and an undisturbed run, and
    the median.
    """
    more = []
    for pair in range(pairs):
        seconds = {}
        for kills in (False, True) if pair % 2 else (True, False):
            with tempfile.TemporaryDirectory(prefix="raysim-faults-") as text:
                run = start(list(LONG), Path(text), uuid.uuid4().hex)
                if kills:
                    while (
                        run.is_alive() and not Path(text, "out", "config.yaml").is_file()
                    ):  # it appears once the workers are ready
                        time.sleep(0.1)
                    time.sleep(5)
                    disturb(
                        run,
                        Case("fedavg", "rounds", "local", "KILL", "worker", 0.5),
                        random.Random(pair),
                    )
                assert finish(run) == 0, Path(text, "err").read_text()
                rows = read_history(Path(text, "out/history.parquet"))
                assert sum(row["worker_deaths"] for row in rows) == kills, (
                    "one worker died, or none"
                )
                seconds[kills] = rows[-1]["wall_seconds"]
        more.append(seconds[True] - seconds[False])
        print(
            f"killed {seconds[True]:.2f} s, undisturbed {seconds[False]:.2f} s: {more[-1]:+.2f} s",
            flush=True,
        )
    print(f"a killed worker costs {statistics.median(more):.2f} s (median of {pairs})")


def main(count: int, seed: int, runtime: str, log: Path, only: str = "") -> int:
    """Disturb runs at random moments, resume them, and check their results.

    Print how all cases of the log file ended. Return 0 if all had correct results; otherwise 1.
    count: the number of cases. Those in the log file are not repeated.
    runtime: a key of `RUNTIMES`.
    log: the file to which each finished case adds one line.
    only: the fault of the cases to run; "": all faults.
    """
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(line["seed"], line["case"]["runtime"], line["number"]) for line in lines}
    for number, case in enumerate(cases(count, seed, runtime)):
        if (seed, runtime, number) in done or (only and case.fault != only):
            continue
        lines.append(
            {"seed": seed, "number": number, "case": asdict(case), "found": carry_out(case, number)}
        )
        with log.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(f"{number + 1}/{count} {case}: {lines[-1]['found']}", flush=True)
    outcomes: Counter[tuple[str, ...]] = Counter()
    for line in lines:
        case = Case(**line["case"])
        victim = case.victim if case.fault in SIGNALS else ""
        outcomes[case.runtime, case.fault, victim, line["found"].split(":")[0].split("(")[0]] += 1
    for kind, times in sorted(outcomes.items()):
        print(f"{times:5d}  {' '.join(f'{word:11s}' for word in kind)}")
    return 0 if all(line["found"].startswith("same") for line in lines) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", choices=RUNTIMES, default="inprocess")
    parser.add_argument(
        "--log",
        type=Path,
        default=Path("faults.jsonl"),
        help="what became of the cases, a line for each",
    )
    parser.add_argument(
        "--fault", choices=[*SIGNALS, "disk", *DATABASE], default="", help="only cases of this one"
    )
    parser.add_argument(
        "--cost",
        type=int,
        default=0,
        metavar="PAIRS",
        help="measure what a killed worker costs instead",
    )
    parsed = parser.parse_args()
    if parsed.cost:
        sys.exit(cost(parsed.cost))
    sys.exit(main(parsed.count, parsed.seed, parsed.runtime, parsed.log, parsed.fault))
