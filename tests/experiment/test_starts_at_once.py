"""Test several processes that start at the same moment in the same folder."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysim import cli
from raysim.commands.new import package
from raysim.commands.study.plan import move, plan
from raysim.commands.sweep.plan import read_request
from raysim.experiment import many_runs
from raysim.experiment.many_runs import new_folder
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import lock_folder

COUNT = 6
# What processes that train import, once for all of them.
PRELOADED = [
    *("raysim.cli", "raysim.experiment.execute", "raysim.runtime.inprocess"),
    "mlflow.tracking",
]
TINY = [
    "runtime=inprocess",
    "data=synthetic",
    "model=mlp",
    "rounds=1",
    "schedule.cohort=2",
    "partition.clients=3",
]


@pytest.fixture(autouse=True)
def one_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Change into an empty folder, and let `time.strftime` always return "now".

    raysim names the folder of a run after the run's starting time. All runs in a test therefore try
    to use the same folder name.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "now")


def _report(action: Callable[[], Any], barrier: Any, queue: Any, number: int) -> None:
    barrier.wait(timeout=600)  # an error here, not a hang, if another process died
    try:
        queue.put((number, action()))
    except BaseException as error:
        queue.put((number, repr(error)))
    os._exit(0)  # without what the test's own process would do at its end


def at_once(action: Callable[[], Any]) -> list[Any]:
    """Call a function in `COUNT` processes at the same moment; return the results of all."""
    context: Any = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(COUNT), context.SimpleQueue()
    return _answers(COUNT, context, queue, _report, action, barrier, queue)


def _answers(
    count: int, context: Any, queue: Any, target: Callable[..., None], *args: Any
) -> list[Any]:
    processes = [context.Process(target=target, args=(*args, number)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * count
    answers = dict(queue.get() for _ in processes)
    return [answers[number] for number in range(count)]


def _run_command(command: list[str], folder: str, barrier: Any, queue: Any, number: int) -> None:
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.strftime", lambda *_: "now")
        _report(lambda: cli.call(command), barrier, queue, number)


def test_dated_folders_of_processes_started_together_differ() -> None:
    def create() -> str:
        with new_folder(Path("root/now"), dated=True) as folder:
            (folder / "content").touch()
            return folder.name

    assert sorted(at_once(create)) == ["now", *(f"now-{number}" for number in range(2, COUNT + 1))]


def test_only_one_of_several_processes_creates_a_named_run_folder() -> None:
    def create() -> str:
        try:
            with new_folder(Path("root/mine"), dated=False) as folder:
                (folder / "content").touch()
                return "made"
        except RefusedError as error:
            return (
                "refused"
                if str(error).startswith("out=root/mine") or "is in use by" in str(error)
                else repr(error)
            )

    assert sorted(at_once(create)) == ["made"] + ["refused"] * (COUNT - 1)


def test_empty_run_folder_is_removed_together_with_its_new_parents() -> None:
    Path("kept").mkdir()
    with new_folder(Path("kept/a/b"), dated=False) as folder:
        assert folder.is_dir()
        with pytest.raises(RefusedError, match="in use"), lock_folder(folder):
            pass
    assert list(Path("kept").iterdir()) == []
    with new_folder(Path("kept/a/b"), dated=False) as folder:
        (folder / "content").touch()
    assert Path("kept/a/b/content").is_file()


def test_run_folder_cannot_be_created_if_its_parent_is_a_file() -> None:
    Path("file").touch()
    with pytest.raises(OSError), new_folder(Path("file/now"), dated=True):
        pass


def test_output_folders_of_planned_runs_change_with_the_study_folder() -> None:
    first = plan(["method=fedavg,fedprox"])
    assert first.is_new and first.is_dated and first.folder == Path("studies/now")
    second = move(first, Path("studies/now-2"))
    assert [run.config["out"] for run in second.runs] == [
        f"studies/now-2/runs/{run.name}" for run in first.runs
    ]
    assert not plan(["method=fedavg,fedprox", "out=s"]).is_dated


def test_sweep_folder_has_a_date_if_the_key_out_is_not_set() -> None:
    words = ["method=fedprox", "method.fedprox.mu=0.1,1", "sweep.search=grid"]
    assert read_request(words).is_dated and not read_request([*words, "out=s"]).is_dated


def test_only_one_of_several_processes_creates_the_package_folder_of_raysim_new() -> None:
    def write() -> str:
        try:
            return str(package.write("mine"))
        except RefusedError:
            return "refused"

    assert sorted(at_once(write)) == ["mine"] + ["refused"] * (COUNT - 1)


def test_refused_run_leaves_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RefusedError("nothing fits")

    monkeypatch.setattr("raysim.experiment.execute.runtime_events", refuse)
    assert cli.call(["run", *TINY, "tracking=none"]) == 2
    assert cli.call(["run", *TINY, "tracking=none", "out=a/b"]) == 2
    assert list(Path().iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "count"),
    [
        (["run"], 3),  # the third may find the free name that the second takes
        (["study", "seed=0", "tracking=none"], 2),  # makes its folder with the same function
    ],
    ids=["run with tracking", "study"],
)
def test_commands_started_together_all_finish(
    command: list[str], count: int, tmp_path: Path
) -> None:
    # Processes that train are not forked from this one: a fork of a process with threads may wait
    # for ever.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    barrier, queue = context.Barrier(count), context.SimpleQueue()
    arguments = ([*command, *TINY], str(tmp_path), barrier, queue)
    assert _answers(count, context, queue, _run_command, *arguments) == [0] * count
    name = "now" if command[0] == "study" else "now-fedavg-synthetic"
    root = Path("studies" if command[0] == "study" else "runs")
    folders = {path.name for path in root.iterdir() if path.name.startswith("now")}
    # A process that found `name-2` free while another took it gets `name-2-2`.
    assert len(folders) == count
    assert all(re.fullmatch(rf"{name}(-\d+)*", folder) for folder in folders)
    assert many_runs.LOCK_FILE not in {path.name for path in root.iterdir()}
