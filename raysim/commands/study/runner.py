"""`raysim study`: methods x seeds x partitions, or any other keys, as one job of ordinary runs with one report.

study/
  study.yaml            what was asked for: `raysim study out=study resume=latest` goes on from it
  runs/NAME/            one folder a run, as `raysim run` makes it
  logs/NAME.txt         what that run printed
  report.html, ...      see campaign_report.py
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
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import cast

from raysim.commands.study.plan import Campaign, Cell
from raysim.experiment.config_files import Node, to_yaml
from raysim.experiment.execute import build, run
from raysim.experiment.many_runs import how_to_go_on, join_ray, score
from raysim.experiment.recorder import OnRound
from raysim.experiment.run_folder import place
from raysim.experiment.settings import Interrupted
from raysim.primitives.errors import Refused, errors_as_refusals, first_line
from raysim.primitives.files import replace_file
from raysim.results.history import Row
from raysim.results.progress import format_duration
from raysim.runtime.placement import RayOptions
from raysim.simulation.events import RunStoppedError

PATIENCE = (
    30.0  # seconds that an interrupted run has to write its history, as long as tracking waits
)
Say = Callable[[str], None]


# --- checked and stored ----------------------------------------------------------------------------------------------
def check(campaign: Campaign, allow: Sequence[str] = (), parallel: int = 1) -> Campaign:
    """Build every run's objects and look into its folder; the same study, which knows what is finished.

    Raises Refused for the first run that cannot be made or continued; nothing has been written then.
    """
    cells = []
    for cell in campaign.cells:
        config = _shared_out(cell.config, parallel)
        try:
            experiment = build(config, allow)
            with errors_as_refusals():
                where = place(experiment)
        except Refused as error:
            raise Refused(
                f"{error} (run {cell.name})" if len(campaign.cells) > 1 else str(error)
            ) from error
        cells.append(
            replace(cell, config=config, finished=where.finished, warnings=experiment.warnings)
        )
    return replace(campaign, cells=tuple(cells))


def _shared_out(config: Node, parallel: int) -> Node:
    """Runs side by side share this machine's CPUs: as many workers for each as leave room for all."""
    runtime = config["runtime"]
    if parallel == 1 or runtime["name"] != "local" or runtime["workers"] is not None:
        return config
    each = (os.cpu_count() or 1) / parallel / (runtime["cpus"] or runtime["threads"])
    return {**config, "runtime": {**runtime, "workers": max(1, int(each))}}


def store(campaign: Campaign) -> None:
    """Write study.yaml."""
    (campaign.folder / "logs").mkdir(parents=True, exist_ok=True)
    content: Node = {"overrides": [_listed(key, each) for key, each in campaign.words.items()]}
    replace_file(
        campaign.folder / "study.yaml", to_yaml(content | {"conf": list(campaign.conf)}).encode()
    )


def _listed(key: str, words: Sequence[str]) -> str:
    return (
        words[0]
        if len(words) == 1
        else f"{key}={','.join(word.partition('=')[2] for word in words)}"
    )


# --- the runs -------------------------------------------------------------------------------------------------------
def carry_out(
    campaign: Campaign,
    *,
    parallel: int = 1,
    allow: Sequence[str] = (),
    say: Say = print,
    show: Callable[..., None] = lambda text, far="": None,
) -> dict[str, str]:
    """Make the runs that are not finished; those that failed, with the sentence of each. Raises Interrupted.

    say: takes a line for each run that has ended. show: takes what is under way, whenever a run begins, and how far
    that is after every round.
    """
    todo = [cell for cell in campaign.cells if not cell.finished]
    done, total, failed, took = len(campaign.cells) - len(todo), len(campaign.cells), {}, []
    under_way: list[str] = []

    def begin(cell: Cell) -> None:
        under_way.append(cell.name)
        show(f"under way: {', '.join(under_way)}")

    if done:
        say(
            f"{done} of {total} runs are finished"
            if todo
            else "all runs are finished already: nothing is trained"
        )
    if parallel > 1:
        runs = _side_by_side(campaign, todo, allow, begin, parallel)
    else:
        runs = _one_by_one(
            campaign, todo, allow, begin, lambda far: show(f"under way: {under_way[0]}", far)
        )
    try:
        with closing(runs):
            for number, (cell, sentence, seconds) in enumerate(runs, 1):
                under_way.remove(cell.name)
                if sentence:
                    failed[cell.name] = sentence
                took.append(seconds)
                left = (
                    statistics.median(took[1:] or took) * (len(todo) - number) / parallel
                )  # the first starts Ray
                rest = (
                    f" · {'at most ' if number == 1 else ''}{format_duration(left)} left"
                    if number < len(todo)
                    else ""
                )
                outcome = sentence or _outcome(campaign.results(cell), seconds)
                say(f"run {done + number}/{total} {cell.name}: {outcome}{rest}")
    except KeyboardInterrupt:
        again = how_to_go_on("study", campaign.folder, allow)
        raise Interrupted(f"stopped before all {total} runs were made: {again}") from None
    return failed


def _outcome(folder: Path, seconds: float) -> str:
    """What a run reached, and how long it took."""
    summary = json.loads((folder / "summary.json").read_text())
    final = score(summary, "final")
    text = f"{summary.get('metric', 'accuracy')} {'unknown' if final is None else f'{final:.4f}'}"
    rounds = f"{summary['rounds']} rounds in {format_duration(summary.get('wall_seconds') or 0.0)}"
    return f"{text} after {rounds} ({format_duration(seconds)} with its start and end)"


def _one_by_one(
    campaign: Campaign,
    todo: Sequence[Cell],
    allow: Sequence[str],
    begin: Callable[[Cell], None],
    reach: Say,
) -> Generator[tuple[Cell, str, float]]:
    """In this process, on one Ray and in the same workers; each with its sentence and seconds.

    reach: takes how far the one under way is.
    """
    with ExitStack() as session:
        for cell in todo:
            began = time.monotonic()
            begin(cell)
            if _join(cell.config["runtime"], session):
                from raysim.runtime import ray

                session.enter_context(ray.keep_processes(campaign.folder.name))

            def on_round(row: Row, rounds: int = cell.config["rounds"]) -> None:
                reach(f" · round {row['round']}/{rounds}")

            sentence = attempt(cell.config, campaign.log(cell), allow, on_round)
            yield cell, sentence, time.monotonic() - began
            if sentence:
                session.close()  # what a failed run has left goes with its Ray


def _join(runtime: Node, session: ExitStack) -> str:
    """Have the Ray that a run asks for, until the session ends; its address, or ""."""
    if runtime["name"] == "inprocess":
        return ""
    join_ray(RayOptions(address=runtime.get("address") or "local"), session)
    from raysim.runtime import ray

    return ray.cluster_address()


def attempt(
    config: Node, log: Path, allow: Sequence[str] = (), on_round: OnRound | None = None
) -> str:
    """Make one run, its output at the end of a file; "", or the sentence that says why it failed."""
    from rich.console import Console

    with log.open("a", encoding="utf-8") as stream:
        try:
            run(config, allow=allow, console=Console(file=stream, width=120), on_round=on_round)
            return ""
        except (Refused, RunStoppedError) as error:
            stream.write(
                f"raysim: {str(error).strip()}\n"
            )  # with the traceback of a client, if there is one
            return first_line(error)
        except Exception as error:  # whatever it is, the other runs do not suffer
            traceback.print_exc(file=stream)
            return f"{type(error).__name__}: {first_line(error)} (see {log})"


def _side_by_side(
    campaign: Campaign,
    todo: Sequence[Cell],
    allow: Sequence[str],
    begin: Callable[[Cell], None],
    count: int,
) -> Generator[tuple[Cell, str, float]]:
    """Each run in a process of its own, `count` at a time, on one Ray; in the order in which they end."""
    waiting, running = list(todo), {}  # type: list[Cell], dict[int, tuple[subprocess.Popen[str], Cell, float]]
    with ExitStack() as session:
        try:
            while waiting or running:
                while waiting and len(running) < count:
                    cell, began = waiting.pop(0), time.monotonic()
                    begin(cell)
                    address = _join(cell.config["runtime"], session)
                    child = _start(cell, campaign.log(cell), address, allow)
                    running[_pipe(child)] = (child, cell, began)
                for ready in multiprocessing.connection.wait([*running]):
                    child, cell, began = running.pop(cast(int, ready))
                    yield cell, _answer(child, campaign.log(cell)), time.monotonic() - began
        finally:
            _stop([child for child, *_ in running.values()])  # before their Ray


def _stop(children: Sequence[subprocess.Popen[str]]) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.close()  # tells it to stop
    for child in children:
        child.wait()


def _pipe(child: subprocess.Popen[str]) -> int:
    """Where its answer comes from."""
    assert child.stdout is not None
    return child.stdout.fileno()


def _start(cell: Cell, log: Path, address: str, allow: Sequence[str]) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", "from raysim.commands.study.runner import child; child()"]
    with log.open("a") as stream:
        started = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            start_new_session=True,  # an interrupt at the terminal reaches it through us, once
        )
    assert started.stdin is not None
    started.stdin.write(json.dumps([cell.config, str(log), address, list(allow)]) + "\n")
    started.stdin.flush()
    return started


def _answer(child: subprocess.Popen[str], log: Path) -> str:
    assert child.stdout is not None and child.stdin is not None
    line = child.stdout.readline()
    child.stdin.close()
    status = child.wait()
    child.stdout.close()
    if line:
        return str(json.loads(line))
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"its process {how}; resume=latest goes on from its last checkpoint (see {log})"


def child() -> None:
    """A run's own process: the first line of stdin says what to do; when stdin ends, the study has, and so do we."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    config, log, address, allow = json.loads(sys.stdin.readline())
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        with ExitStack() as session:
            if address:
                _join({"name": "cluster", "address": address}, session)
            sentence = attempt(config, Path(log), allow)
    except KeyboardInterrupt:
        sys.exit(130)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # stdin may end from here on
    answer.write(json.dumps(sentence) + "\n")
    answer.close()


def _stop_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin.read: this thread would hold its lock when the process ends
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(PATIENCE)
    os._exit(130)
