"""`raysim study`: methods x seeds x partitions, or any other keys, as one job of ordinary runs with one report.

study/
  study.yaml            what was asked for: `raysim study out=study resume=latest` goes on from it
  runs/NAME/            one folder a run, as `raysim run` makes it
  logs/NAME.txt         what that run printed
  report.html, ...      see campaign_report.py
"""

from __future__ import annotations

import itertools
import json
import multiprocessing.connection
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from raysim.experiment.compose import Node, compose, groups, load_yaml, plain, spread, to_yaml
from raysim.experiment.execute import build, run
from raysim.experiment.many_runs import (
    asked_to_continue,
    check_free,
    dated_folder,
    how_to_go_on,
    join_ray,
    not_a_folder_of,
    score,
    short_names,
    value_label,
)
from raysim.experiment.recorder import OnRound
from raysim.experiment.run_folder import place
from raysim.experiment.settings import Interrupted
from raysim.primitives.errors import Refused, first_line, refusing
from raysim.primitives.files import replace_file, user_path
from raysim.results.history import Row
from raysim.results.progress import duration
from raysim.results.tracking import default_uri
from raysim.runtime.placement import RayOptions
from raysim.simulation.events import RunStopped

ALWAYS = ("method", "seed")  # in every run's name, so that a study can be continued with more of them
PATIENCE = 30.0  # seconds that an interrupted run has to write its history, as long as tracking waits
Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One run of a study: what sets it apart from the others, and its configuration."""

    name: str  # of its folder
    settings: Mapping[str, str]  # what varies, without the seed: {"method": "fedprox", "partition.alpha": "0.1"}
    seed: int
    config: Node
    finished: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Campaign:
    """What a study is asked to do: its words, and the runs that follow from them."""

    folder: Path
    conf: tuple[str, ...]
    words: Mapping[str, tuple[str, ...]]  # for each key, an override for each of its values
    cells: tuple[Cell, ...] = ()

    @property
    def varied(self) -> list[str]:
        """Keys with several values, in the order in which they were given."""
        return [key for key, words in self.words.items() if len(words) > 1]

    def __str__(self) -> str:
        """How many runs, of what, and where."""
        factors = [f"{len(words)} of {key}" for key, words in self.words.items() if len(words) > 1]
        count = f"{len(self.cells)} run{'s' if len(self.cells) != 1 else ''}"
        return f"{count} ({' x '.join(factors) or 'nothing varies'}) in {self.folder}; what each prints: logs/"

    @property
    def warnings(self) -> list[str]:
        """What the runs are warned of, each once; with the first run and the number of others, if it is not all."""
        said: dict[str, list[str]] = {}
        for cell in self.cells:
            for text in cell.warnings:
                said.setdefault(text, []).append(cell.name)
        lines = []
        for text, (first, *others) in said.items():
            whose = f"{first} and {len(others)} more" if others else first
            lines.append(text if len(others) + 1 == len(self.cells) else f"{text} ({whose})")
        return lines

    def log(self, cell: Cell) -> Path:
        """Where a run's own output goes."""
        return self.folder / "logs" / f"{cell.name}.txt"

    def results(self, cell: Cell) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / cell.name


# --- the plan -------------------------------------------------------------------------------------------------------
def plan(words: Sequence[str], conf: Sequence[str] = ()) -> Campaign:
    """The runs of a study, those of the first seed first; reads study.yaml where it is continued. Raises Refused.

    words: overrides as for `raysim run`, each with any number of values: "method=fedavg,fedprox", "seed=0..4",
    "rounds=20". A key that only some of a group's options have (method.fedprox.mu) is for those runs alone.
    """
    given = {key: tuple(each) for key, each in map(spread, words)}
    out, _ = (given.pop(key, ()) for key in ("out", "resume"))
    campaign = Campaign(_folder(out), tuple(str(user_path(root).absolute()) for root in conf), given)
    if asked_to_continue(words, "study"):
        campaign = _continued(campaign)
    else:
        check_free(campaign.folder)
    cells = tuple(_cells(campaign))
    names = [cell.name for cell in cells]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Refused(f"two runs of this study would be called {twice}: give each value of a key once")
    return replace(campaign, cells=cells)


def _folder(out: Sequence[str]) -> Path:
    if not out:
        return dated_folder(Path("studies"))
    if len(out) > 1:
        raise Refused(f"{' and '.join(out)} are two folders, but a study has one: name one")
    return user_path(str(plain(compose(out))["out"]))


def _continued(campaign: Campaign) -> Campaign:
    """The study in the folder; what is given now takes the place of what its study.yaml says of the same keys."""
    folder, path = campaign.folder, campaign.folder / "study.yaml"
    if not path.is_file():
        if not campaign.words or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise not_a_folder_of("study", folder, path.name)
        return campaign
    stored = load_yaml(path)
    if not isinstance(stored, dict) or not {"overrides", "conf"} <= stored.keys():
        raise Refused(f"{path} holds no study: restore it, or start in a new folder")
    before = {key: tuple(each) for key, each in map(spread, stored["overrides"])}
    merged = replace(campaign, words={**before, **campaign.words}, conf=campaign.conf or tuple(stored["conf"]))
    for key in merged.words:
        if key not in ALWAYS and (key in merged.varied) != (len(before.get(key, ())) > 1):
            raise Refused(
                f"the study in {folder} has {'several values' if key in merged.varied else 'one value'} of {key} now, "
                "which would rename its runs: start another study in a new folder"
            )
    return merged


def _cells(campaign: Campaign) -> Iterator[Cell]:
    settings = list(_settings(campaign))
    parts = _name_parts(campaign.varied)
    seeds = campaign.words.get("seed") or ("",)
    for word, (labels, config) in itertools.product(seeds, settings):
        seed = _seed(word) if word else config["seed"]
        varied = [f"{parts[key]}-{label}" for key, label in labels.items() if key != "method"]
        name = "_".join([labels["method"], *varied])
        name = re.sub(r"[^\w.+-]+", "-", f"{name}_seed-{seed}")
        own: dict[str, object] = {"seed": seed, "out": str(campaign.folder / "runs" / name), "resume": "latest"}
        if kept := config["checkpoint"].get("folder"):
            own["checkpoint"] = {**config["checkpoint"], "folder": f"{kept.rstrip('/')}/{name}"}
        tracking = config["tracking"]
        if tracking["name"] == "mlflow" and tracking["uri"] is None:  # beside the runs, not among them
            own["tracking"] = {**tracking, "uri": default_uri(campaign.folder)}
        yield Cell(name, labels, seed, {**config, **own})


def _seed(word: str) -> int:
    text = word.partition("=")[2]
    if not text.isdigit():
        raise Refused(f"{word} must be a whole number of at least 0")
    return int(text)


def _settings(campaign: Campaign) -> Iterator[tuple[dict[str, str], Node]]:
    """Each combination of values but the seed's, once: what to call it, and its configuration."""
    words = {key: each for key, each in campaign.words.items() if key != "seed"}
    known = groups([Path(root) for root in campaign.conf]).files
    bases: dict[tuple[str, ...], Node] = {}  # the configuration that the chosen options make
    seen, used = set(), set()  # type: set[tuple[str, ...]], set[str]
    for combination in itertools.product(*words.values()):
        chosen = dict(zip(words, combination, strict=True))
        options = tuple(word for key, word in chosen.items() if key in known)
        if options not in bases:
            bases[options] = plain(compose(options, campaign.conf))
        base = bases[options]
        fits = {key: word for key, word in chosen.items() if key in known or _has(base, key)}
        used.update(fits)
        if (same := tuple(fits.values())) in seen:
            continue
        seen.add(same)
        config = plain(compose(list(fits.values()), campaign.conf))
        labels = {"method": value_label(config["choices"]["method"])}
        labels |= {k: fits[k].partition("=")[2].strip("\"'") for k in campaign.varied if k in fits and k != "method"}
        yield labels, config
    if unknown := [each[0] for key, each in words.items() if key not in used]:  # refused in the words of a run
        compose([*(each[0] for key, each in words.items() if key in known), *unknown], campaign.conf)


def _has(node: object, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _name_parts(keys: Sequence[str]) -> dict[str, str]:
    """What each key is called in the names of runs: its last part, or the whole key where another one ends alike.

    Not as short as in tables, because the folders of a study that is continued must be found under their names.
    """
    return {key: key if "." in name else name for key, name in zip(keys, short_names(keys), strict=True)}


def check(campaign: Campaign, allow: Sequence[str] = (), parallel: int = 1) -> Campaign:
    """Build every run's objects and look into its folder; the same study, which knows what is finished.

    Raises Refused for the first run that cannot be made or continued; nothing has been written then.
    """
    cells = []
    for cell in campaign.cells:
        config = _shared_out(cell.config, parallel)
        try:
            experiment = build(config, allow)
            with refusing():
                where = place(experiment)
        except Refused as error:
            raise Refused(f"{error} (run {cell.name})" if len(campaign.cells) > 1 else str(error)) from error
        cells.append(replace(cell, config=config, finished=where.finished, warnings=experiment.warnings))
    return replace(campaign, cells=tuple(cells))


def _shared_out(config: Node, parallel: int) -> Node:
    """Runs side by side share this machine's CPUs: as many hosts for each as leave room for all."""
    runtime = config["runtime"]
    if parallel == 1 or runtime["name"] != "local" or runtime["hosts"] is not None:
        return config
    each = (os.cpu_count() or 1) / parallel / (runtime["cpus"] or runtime["threads"])
    return {**config, "runtime": {**runtime, "hosts": max(1, int(each))}}


def store(campaign: Campaign) -> None:
    """Write study.yaml."""
    (campaign.folder / "logs").mkdir(parents=True, exist_ok=True)
    content: Node = {"overrides": [_listed(key, each) for key, each in campaign.words.items()]}
    replace_file(campaign.folder / "study.yaml", to_yaml(content | {"conf": list(campaign.conf)}).encode())


def _listed(key: str, words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{key}={','.join(word.partition('=')[2] for word in words)}"


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
        say(f"{done} of {total} runs are finished" if todo else "all runs are finished already: nothing is trained")
    if parallel > 1:
        runs = _side_by_side(campaign, todo, allow, begin, parallel)
    else:
        runs = _one_by_one(campaign, todo, allow, begin, lambda far: show(f"under way: {under_way[0]}", far))
    try:
        with closing(runs):
            for number, (cell, sentence, seconds) in enumerate(runs, 1):
                under_way.remove(cell.name)
                if sentence:
                    failed[cell.name] = sentence
                took.append(seconds)
                left = statistics.median(took[1:] or took) * (len(todo) - number) / parallel  # the first starts Ray
                rest = f" · {'at most ' if number == 1 else ''}{duration(left)} left" if number < len(todo) else ""
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
    rounds = f"{summary['rounds']} rounds in {duration(summary.get('wall_seconds') or 0.0)}"
    return f"{text} after {rounds} ({duration(seconds)} with its start and end)"


def _one_by_one(
    campaign: Campaign, todo: Sequence[Cell], allow: Sequence[str], begin: Callable[[Cell], None], reach: Say
) -> Generator[tuple[Cell, str, float]]:
    """In this process, on one Ray and in the same hosts; each with its sentence and seconds.

    reach: takes how far the one under way is.
    """
    with ExitStack() as session:
        for cell in todo:
            began = time.monotonic()
            begin(cell)
            if _join(cell.config["runtime"], session):
                from raysim.runtime import ray

                session.enter_context(ray.staying(campaign.folder.name))

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

    return ray.address()


def attempt(config: Node, log: Path, allow: Sequence[str] = (), on_round: OnRound | None = None) -> str:
    """Make one run, its output at the end of a file; "", or the sentence that says why it failed."""
    from rich.console import Console

    with log.open("a", encoding="utf-8") as stream:
        try:
            run(config, allow=allow, console=Console(file=stream, width=120), on_round=on_round)
            return ""
        except (Refused, RunStopped) as error:
            stream.write(f"raysim: {str(error).strip()}\n")  # with the traceback of a client, if there is one
            return first_line(error)
        except Exception as error:  # whatever it is, the other runs do not suffer
            traceback.print_exc(file=stream)
            return f"{type(error).__name__}: {first_line(error)} (see {log})"


def _side_by_side(
    campaign: Campaign, todo: Sequence[Cell], allow: Sequence[str], begin: Callable[[Cell], None], count: int
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
