"""Execute the runs of a study, one after another or several at a time.

`raysim/experiment/run_table.py` describes the study's folder. `raysim/experiment/runner.py`
executes one run.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeAlias, cast

from raysim.commands.study.plan import StudyPlan, StudyRun
from raysim.experiment import run_table
from raysim.experiment.build import build
from raysim.experiment.config_files import Node
from raysim.experiment.many_runs import join_ray, resume_hint
from raysim.experiment.run_folder import choose_place
from raysim.experiment.runner import attempt
from raysim.experiment.settings import Interrupted
from raysim.primitives.errors import RefusedError, errors_as_refusals
from raysim.results.history import Row, score
from raysim.results.progress import format_duration
from raysim.runtime.placement import RayOptions

# Seconds that an interrupted run has to write its history; MLflow's tracker waits as long.
INTERRUPT_TIMEOUT_S = 30.0
CHILD_PROGRAM = "from raysim.commands.study.runner import run_child; run_child()"
Say: TypeAlias = Callable[[str], None]


@dataclass(frozen=True)
class RunEnd:
    """The end of a run.

    run: the run.
    failure: a sentence that says why the run failed; "" if it did not.
    seconds: the wall seconds from its start to its end.
    """

    run: StudyRun
    failure: str
    seconds: float


# --- before the first run -----------------------------------------------------------------------
def check(study: StudyPlan, allow: Sequence[str] = (), parallel: int = 1) -> StudyPlan:
    """Build every run of a study, so that errors are found before the first run starts.

    This writes no files except data sets in the cache. Return the study with new values of
    `config`, `is_finished` and `warnings` in each run.
    allow: the user's own packages whose classes the options may use.
    Raise `RefusedError` for the first run that is impossible or cannot be continued.
    """
    runs = []
    for run in study.runs:
        config = _share_cpus(run.config, parallel)
        try:
            experiment = build(config, allow)
            with errors_as_refusals():
                is_finished = choose_place(experiment).is_finished
        except RefusedError as error:
            if len(study.runs) == 1:
                raise
            raise RefusedError(f"{error} (run {run.name})") from error
        runs.append(
            replace(run, config=config, is_finished=is_finished, warnings=experiment.warnings)
        )
    return replace(study, runs=tuple(runs))


def _share_cpus(config: Node, parallel: int) -> Node:
    """Return the configuration with fewer workers, so that parallel runs share the CPUs.

    Only the runtime "local" is changed, and only if the user did not set the number of workers.
    parallel: the number of runs at a time.
    """
    runtime = config["runtime"]
    if parallel == 1 or runtime["name"] != "local" or runtime["workers"] is not None:
        return config
    cpus = (os.cpu_count() or 1) / parallel
    workers = int(cpus / (runtime["cpus"] or runtime["threads"]))
    return {**config, "runtime": {**runtime, "workers": max(1, workers)}}


def store(study: StudyPlan) -> None:
    """Write study.yaml into the study's folder."""
    overrides = [_join_values(key, texts) for key, texts in study.overrides.items()]
    run_table.store_plan(study.folder, "study", overrides, study.conf)


def _join_values(key: str, overrides: Sequence[str]) -> str:
    if len(overrides) == 1:
        return overrides[0]
    values = [override.partition("=")[2] for override in overrides]
    return f"{key}={','.join(values)}"


# --- the runs -----------------------------------------------------------------------------------
def make_runs(
    study: StudyPlan,
    *,
    parallel: int = 1,
    allow: Sequence[str] = (),
    say: Say = print,
    show: Callable[..., None] = lambda text, progress="": None,
) -> dict[str, str]:
    """Execute the runs that are not finished; return the reason of each failed run, by its name.

    allow: the user's own packages whose classes the options may use.
    say: function that gets a line for each run that has ended. It also gets a line about runs that
    were finished before the call.
    show: function that displays the progress. Its first argument is "running: NAMES". If `parallel`
    is 1, it also gets a second text after every round, such as " · round 3/20".

    Raise `Interrupted` if the user stops the study.
    """
    unfinished = [run for run in study.runs if not run.is_finished]
    total = len(study.runs)
    running: list[str] = []

    def begin(run: StudyRun) -> None:
        running.append(run.name)
        show(f"running: {', '.join(running)}")

    def show_progress(progress: str) -> None:
        show(f"running: {running[0]}", progress)

    if not unfinished:
        say("all runs are finished already: nothing is trained")
    elif len(unfinished) < total:
        say(f"{total - len(unfinished)} of {total} runs are finished")
    if parallel > 1:
        ends = _run_in_parallel(study, unfinished, allow, begin, parallel)
    else:
        ends = _run_one_by_one(study, unfinished, allow, begin, show_progress)
    failures = {}
    seconds: list[float] = []
    number = total - len(unfinished)
    try:
        with closing(ends):
            for end in ends:
                running.remove(end.run.name)
                number += 1
                seconds.append(end.seconds)
                if end.failure:
                    failures[end.run.name] = end.failure
                outcome = end.failure or _outcome(study.run_folder(end.run), end.seconds)
                left = _time_left(seconds, total - number, parallel)
                say(f"run {number}/{total} {end.run.name}: {outcome}{left}")
    except KeyboardInterrupt:
        how_to_continue = resume_hint("study", study.folder, allow)
        raise Interrupted(
            f"stopped before all {total} runs had finished; {how_to_continue}"
        ) from None
    return failures


def _time_left(seconds: Sequence[float], unfinished: int, parallel: int) -> str:
    if not unfinished:
        return ""
    later = seconds[1:]  # the first run may start Ray, so its time says little about the others
    estimate = statistics.median(later or seconds) * unfinished / parallel
    return f" · {'' if later else 'at most '}{format_duration(estimate)} left"


def _outcome(folder: Path, seconds: float) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    outcome = run_table.describe_outcome(
        summary.get("metric", "accuracy"),
        score(summary, "final"),
        None,
        summary["rounds"],
        summary.get("wall_seconds") or 0.0,
    )
    return f"{outcome} ({format_duration(seconds)} with its start and end)"


def _run_one_by_one(
    study: StudyPlan,
    runs: Sequence[StudyRun],
    allow: Sequence[str],
    begin: Callable[[StudyRun], None],
    show_progress: Say,
) -> Generator[RunEnd]:
    """Execute runs one after another in this process, on one Ray cluster; yield each outcome.

    After a failed run, the connection to Ray is closed and opened again.
    begin: function that is called with each run before it starts.
    show_progress: function that gets a text such as " · round 3/20" after every round.
    """
    with ExitStack() as session:
        for run in runs:
            since = time.monotonic()
            begin(run)
            if _join_ray(run.config["runtime"], session):
                from raysim.runtime import ray

                session.enter_context(ray.keep_processes(study.folder.name))

            def on_round(row: Row, rounds: int = run.config["rounds"]) -> None:
                show_progress(f" · round {row['round']}/{rounds}")

            failure = attempt(run.config, study.log(run), allow, on_round)
            yield RunEnd(run, failure, time.monotonic() - since)
            if failure:
                session.close()  # ends Ray, and with it everything that the failed run left behind


def _join_ray(runtime: Node, session: ExitStack) -> str:
    """Connect to a run's Ray cluster, or start one; return the address of the cluster.

    Return "" if the run needs no Ray.
    runtime: the settings runtime.*.
    session: the exit stack that closes the connection.
    """
    if runtime["name"] == "inprocess":
        return ""
    join_ray(RayOptions(address=runtime.get("address") or "local"), session)
    from raysim.runtime import ray

    return ray.cluster_address()


# --- several runs at a time, each in its own process -------------------------------------------
@dataclass(frozen=True)
class ChildRun:
    """A run in a process of its own.

    The process reads the configuration, the path of the log, Ray's address and the allowed packages
    from stdin. At the end it writes "", or why the run failed, to stdout.
    since: time.monotonic() at the start.
    """

    run: StudyRun
    process: subprocess.Popen[str]
    since: float

    @property
    def stdin(self) -> IO[str]:
        """Return the standard input of the child process; closing it tells the process to stop."""
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[str]:
        """Return the pipe from which this process reads the answer of the run's process."""
        assert self.process.stdout is not None
        return self.process.stdout

    def wait(self, log: Path) -> str:
        """Wait for the end of the run; return "", or a sentence that says why the run failed.

        log: the run's log, which the sentence names if the process died.
        """
        line = self.stdout.readline()
        self.stdin.close()
        status = self.process.wait()
        self.stdout.close()
        if line:
            return str(json.loads(line))
        end = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        advice = "Continue the study with out=DIR resume=latest"
        return f"the process of this run {end} (see {log}). {advice}"


def _run_in_parallel(
    study: StudyPlan,
    runs: Sequence[StudyRun],
    allow: Sequence[str],
    begin: Callable[[StudyRun], None],
    parallel: int,
) -> Generator[RunEnd]:
    """Execute runs at the same time on one Ray cluster, each in a process; yield each outcome.

    begin: function that is called with each run before it starts.
    parallel: the number of runs at a time.
    """
    waiting = list(runs)
    children: dict[int, ChildRun] = {}  # by the file descriptor of the answer
    with ExitStack() as session:
        try:
            while waiting or children:
                while waiting and len(children) < parallel:
                    run = waiting.pop(0)
                    since = time.monotonic()
                    begin(run)
                    address = _join_ray(run.config["runtime"], session)
                    process = _start_child(run, study.log(run), address, allow)
                    child = ChildRun(run, process, since)
                    children[child.stdout.fileno()] = child
                for descriptor in multiprocessing.connection.wait([*children]):
                    child = children.pop(cast(int, descriptor))
                    failure = child.wait(study.log(child.run))
                    yield RunEnd(child.run, failure, time.monotonic() - child.since)
        finally:
            _stop_children(list(children.values()))  # before the Ray that they use ends


def _stop_children(children: Sequence[ChildRun]) -> None:
    for child in children:
        child.stdin.close()
    for child in children:
        child.process.wait()


def _start_child(
    run: StudyRun, log: Path, address: str, allow: Sequence[str]
) -> subprocess.Popen[str]:
    with log.open("a") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal reaches it through this process alone
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps([run.config, str(log), address, list(allow)]) + "\n")
    process.stdin.flush()
    return process


def run_child() -> None:
    """Execute one run in this process; the task comes from stdin, the answer goes to stdout.

    When stdin is closed, the study has ended, and this process stops as well.
    """
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries goes to the log, not into the answer
    config, log, address, allow = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        with ExitStack() as session:
            if address:
                _join_ray({"name": "cluster", "address": address}, session)
            failure = attempt(config, Path(log), allow)
    except KeyboardInterrupt:
        sys.exit(130)
    # the run has finished, so the end of stdin may not stop it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer.write(json.dumps(failure) + "\n")
    answer.close()


def _stop_with_parent() -> None:
    os.read(0, 1)  # sys.stdin.read would hold the lock of stdin when the process ends
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(INTERRUPT_TIMEOUT_S)
    os._exit(130)
