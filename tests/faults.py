"""Disturbs runs and compares what they end in, once resumed, with the undisturbed ones.

    uv run python tests/faults.py --count 300 --seed 1         in process
    uv run python tests/faults.py --count 60 --runtime local   on Ray: driver, coordinator, hosts, raylet and GCS

A seeded case starts a run, does something to it at a seeded moment (a signal to one of its processes, a file size that
the system refuses, a database of MLflow that is locked, deleted or overwritten), and goes on with resume=latest until
the run is done. Then model_sha256, state_sha256 and the rows of the history must be those of the undisturbed run,
nothing unfinished may lie in the folder, no process may be left, and no traceback may have been shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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
    *("data=synthetic", "data.samples=200", "partition=iid", "partition.clients=6", "model=mlp", "local.epochs=1"),
    *("rounds=8", "checkpoint.every=2", "out=out"),
)
RUNTIMES = {"inprocess": ["runtime=inprocess"], "local": ["runtime=local", "runtime.hosts=2"]}
SIGNALS = {"KILL": [signal.SIGKILL], "TERM": [signal.SIGTERM], "INT": [signal.SIGINT], "INT twice": [signal.SIGINT] * 2,
           "STOP": [signal.SIGSTOP]}  # fmt: skip
VICTIMS = {
    "driver": "",
    "coordinator": "ray::RayCoordinator",
    "host": "ray::RayHost",
    "raylet": "raylet",
    "gcs": "gcs_server",
}
MEASURED = ("wall_seconds", "host_seconds", "host_busy", "host_busy_least", "device_busy", "store_bytes", "host_deaths")
PATIENT = {"RAY_raylet_start_wait_time_s": "300", "RAY_agent_register_timeout_ms": "300000"}  # on a busy machine
PATIENCE = 300  # seconds for a run of a few


@dataclass(frozen=True)
class Case:
    """What is run, what is done to it, and when (as a share of the undisturbed run's time)."""

    method: str
    schedule: str
    runtime: str
    fault: str  # a signal, "disk", or "lock", "delete" or "overwrite" of the database
    victim: str
    moment: float

    @property
    def words(self) -> list[str]:
        """The command line."""
        tracking = "mlflow" if self.fault in DATABASE else "none"
        parts = (*BASE, *METHODS[self.method], *SCHEDULES[self.schedule], *RUNTIMES[self.runtime])
        return ["run", *parts, f"tracking={tracking}"]


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
    """So many, always the same ones for a seed."""
    rng = random.Random(seed)
    files = ["disk", "disk"] if runtime == "inprocess" else []  # Ray's own files would meet the limit, too
    faults = [*SIGNALS, *SIGNALS, *files, *DATABASE]
    victims = list(VICTIMS) if runtime == "local" else ["driver"]
    for _ in range(count):
        method = rng.choice(list(METHODS))
        schedule = {"fedbuff": "buffer", "fedasync": "one"}.get(method) or rng.choice(["rounds", "buffer"])
        yield Case(method, schedule, runtime, rng.choice(faults), rng.choice(victims), rng.random())


SCHEDULES["one"] = ["schedule=buffered", "schedule.concurrency=3", "schedule.size=1", "fleet=lognormal"]


# --- processes ------------------------------------------------------------------------------------------------------
def start(words: list[str], folder: Path, size: int | None = None) -> subprocess.Popen[str]:
    """A run in a session of its own. size: the largest file that it may write, in bytes."""

    def limit() -> None:
        if size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    with (folder / "err").open("a") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "raysim", *words],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=err, text=True, start_new_session=True, preexec_fn=limit,
            env=os.environ | PATIENT,
        )  # fmt: skip


def descendants(pid: int) -> list[int]:
    """All processes that it started, and theirs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def named(pid: int) -> str:
    """How it was started."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def disturb(run: subprocess.Popen[str], case: Case, rng: random.Random) -> None:
    """Send the signals; who was stopped is killed a little later, for nobody would go on with it."""
    place = VICTIMS[case.victim]
    found = [run.pid] if not place else [pid for pid in descendants(run.pid) if place in named(pid)[:200]]
    if not found:
        return
    victim = rng.choice(found)
    for each in SIGNALS[case.fault]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, each)
    if case.fault == "STOP":
        time.sleep(1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def finish(run: subprocess.Popen[str]) -> int:
    """Its status; one that does not end in time, and all that it leaves, is killed."""
    try:
        return run.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        for pid in [run.pid, *descendants(run.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.wait()
        return -99


def leftover(session: int) -> list[str]:
    """Processes of a run that has ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(named(int(stat.parent.name)))
    return found


# --- what must be the same ------------------------------------------------------------------------------------------
def result(folder: Path) -> tuple[Any, ...]:
    """The digests and the history of a finished run."""
    summary = json.loads((folder / "out/summary.json").read_text())
    rows = [{k: v for k, v in row.items() if k not in MEASURED} for row in read_history(folder / "out/history.parquet")]
    return summary["model_sha256"], summary["state_sha256"], json.dumps(rows)


UNDISTURBED: dict[tuple[str, str], tuple[tuple[Any, ...], float, int]] = {}


def undisturbed(case: Case) -> tuple[tuple[Any, ...], float, int]:
    """What the run ends in, how long it takes, and its largest file."""
    if (key := (case.method, case.schedule)) not in UNDISTURBED:
        with tempfile.TemporaryDirectory(prefix="raysim-faults-") as text:
            since = time.monotonic()
            assert finish(start(case.words, Path(text))) == 0, Path(text, "err").read_text()
            sizes = [path.stat().st_size for path in Path(text, "out").rglob("*") if path.is_file()]
            UNDISTURBED[key] = result(Path(text)), time.monotonic() - since, max(sizes)
    return UNDISTURBED[key]


def carry_out(case: Case, seed: int) -> str:
    """ "same", or what is wrong."""
    expected, duration, largest = undisturbed(case)
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="raysim-faults-") as text:
        folder = Path(text)
        size = int(largest * case.moment) if case.fault == "disk" else None
        run = start(case.words, folder, size)
        if case.fault in SIGNALS:
            time.sleep(duration * case.moment)
            disturb(run, case, rng)
            statuses = [finish(run)]
        elif case.fault in DATABASE:
            time.sleep(duration * case.moment)
            with DATABASE[case.fault](folder / "mlflow.db"):
                statuses = [finish(run)]
        else:
            statuses = [finish(run)]
        while statuses[-1] and len(statuses) < 5:
            statuses.append(finish(start([*case.words, "resume=latest"], folder)))
        errors = (folder / "err").read_text()
        if -99 in statuses:
            return "hangs"
        if statuses[-1]:
            return f"does not go on (status {statuses}): {errors[-300:]}"
        if result(folder) != expected:
            return "ends in another result"
        if "Traceback" in errors:
            return f"shows a traceback: {errors[errors.index('Traceback') :][-400:]}"
        if left := [path.name for path in (folder / "out").rglob(".*") if path.name != ".held"]:
            return f"leaves {left}"
        if case.runtime == "inprocess" and (left := leftover(run.pid)):
            return f"leaves processes {left}"
    return "same"


def main(count: int, seed: int, runtime: str) -> int:
    """The status is 1 where a run did not end as the undisturbed one."""
    outcomes: Counter[tuple[str, str, str]] = Counter()
    broken = []
    for number, case in enumerate(cases(count, seed, runtime)):
        found = carry_out(case, number)
        victim = case.victim if case.fault in SIGNALS else ""
        outcomes[case.fault, victim, found.split(":")[0].split("(")[0]] += 1
        print(f"{number + 1}/{count} {case}: {found}", flush=True)
        if found != "same":
            broken.append(found)
    for (fault, victim, found), times in sorted(outcomes.items()):
        print(f"{times:5d}  {fault:10s} {victim:12s} {found}")
    return 1 if broken else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runtime", choices=RUNTIMES, default="inprocess")
    parsed = parser.parse_args()
    sys.exit(main(parsed.count, parsed.seed, parsed.runtime))
