"""Test that a run restarts after it has lost a process.

Also test that a repeated `raysim run` with --auto-resume continues the run.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import raysim
from raysim import cli
from raysim.primitives.errors import RefusedError
from raysim.results.history import read_history
from raysim.results.observers import CurrentRun, Observer
from raysim.runtime import inprocess
from raysim.runtime.placement import NoRoomError, RayOptions, Size
from raysim.simulation.events import Event, ProcessLostError, Round, Waiting

QUICK = [
    *(
        "runtime=inprocess",
        "tracking=none",
        "data=synthetic",
        "data.samples=100",
        "partition=iid",
        "model=mlp",
    ),
    *(
        "partition.clients=5",
        "schedule.cohort=3",
        "local.epochs=1",
        "rounds=5",
        "checkpoint.every=2",
    ),
]


class Waited(Observer):
    """An observer that counts how often a worker does not answer."""

    times = 0

    def on_wait(self, run: CurrentRun, event: Waiting) -> None:
        self.times += 1


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return an empty list, to which a test adds rounds after which a process is lost.

    Each start of a run removes the first round from the list. The run then loses a process after
    this round.
    """
    whole, rounds = inprocess.run, list[int]()

    def run(*parts: Any) -> Iterator[Event]:
        last = rounds.pop(0) if rounds else 99
        for event in whole(*parts):
            yield event
            if isinstance(event, Round) and event.row["round"] == last:
                yield Waiting(0, (1,), 11.0)
                raise ProcessLostError("a node is gone")

    monkeypatch.setattr(inprocess, "run", run)
    return rounds


def test_run_restarts_from_its_checkpoint_after_each_loss_of_a_process(
    fails: list[int], tmp_path: Path
) -> None:
    straight = raysim.run([*QUICK, f"out={tmp_path / 'a'}"], quiet=True)
    fails += [1, 3, 3, 5]
    console, waited = Console(file=(out := io.StringIO()), width=999), Waited()
    result = raysim.run([*QUICK, f"out={tmp_path / 'b'}"], console=console, observers=[waited])
    assert not fails and waited.times == 4
    assert result.summary["model_sha256"] == straight.summary["model_sha256"]
    assert [row["round"] for row in read_history(tmp_path / "b/history.parquet")] == [1, 2, 3, 4, 5]
    text = out.getvalue()
    assert text.count("a node is gone. The run restarts from round 0: it has no checkpoint") == 1
    assert text.count("a node is gone. The run restarts from its last checkpoint") == 3


def test_run_that_fails_early_restarts_from_the_checkpoint_that_resume_names(
    fails: list[int], tmp_path: Path
) -> None:
    straight = raysim.run([*QUICK, f"out={tmp_path / 'straight'}"], quiet=True)
    raysim.run([*QUICK, "rounds=2", f"out={tmp_path / 'a'}"], quiet=True)
    start = tmp_path / "a/checkpoints/round-000002"
    fails += [3]
    console = Console(file=(out := io.StringIO()), width=999)
    words = [*QUICK, f"out={tmp_path / 'b'}", f"resume={start}"]
    result = raysim.run(words, console=console)
    assert not fails and out.getvalue().count(f"continuing from {start}") == 2
    assert result.summary["model_sha256"] == straight.summary["model_sha256"]
    assert [row["round"] for row in read_history(tmp_path / "b/history.parquet")] == [1, 2, 3, 4, 5]


def test_run_fails_after_three_restarts_without_a_new_checkpoint(
    fails: list[int], tmp_path: Path
) -> None:
    fails += [3] * 9
    with pytest.raises(ProcessLostError, match=r"a node is gone\. .*out=.*/a and resume=latest"):
        raysim.run([*QUICK, f"out={tmp_path / 'a'}"], quiet=True)
    assert len(fails) == 5, "the first made a checkpoint, and three after it none"


def replace_ray(monkeypatch: pytest.MonkeyPatch, plan: Any, run: Any) -> None:
    """Replace the functions of raysim that use Ray.

    plan: replaces the function that plans the workers.
    run: replaces the function that executes the run.
    """
    from raysim.runtime import ray as on_ray

    parts = {
        "plan_workers": plan,
        "run": run,
        "connection": lambda _: nullcontext(),
        "has_gpus": lambda: False,
    }
    for name, part in parts.items():
        monkeypatch.setattr(on_ray, name, part)
    monkeypatch.setattr("raysim.experiment.runtime_events.listen_on_loopback", lambda _: None)


def test_restart_has_fewer_workers_if_the_cluster_has_too_little_room(
    fails: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    room = 2

    def fit(options: RayOptions, *_: Any) -> Size:
        asked.append(options.workers)
        if (options.workers or 1) > room:
            raise NoRoomError("too little CPU")
        return Size(options.workers or room, {"CPU": 1.0})

    def run(spec: Any, schedule: Any, fleet: Any, size: Size, *rest: Any) -> Iterator[Event]:
        nonlocal room
        room = 1  # from now on
        yield from inprocess.run(spec, schedule, fleet, *rest[2:])

    replace_ray(monkeypatch, fit, run)
    straight = raysim.run([*QUICK, f"out={tmp_path / 'a'}"], quiet=True)
    fails += [3]
    words = [*QUICK[1:], "runtime=local", "runtime.workers=2"]
    result = raysim.run([*words, f"out={tmp_path / 'b'}"], quiet=True)
    assert asked == [2, 2, None] and not fails
    assert result.summary["model_sha256"] == straight.summary["model_sha256"]
    with pytest.raises(RefusedError, match="too little CPU"):
        raysim.run([*words, f"out={tmp_path / 'c'}"], quiet=True)


def test_run_starts_again_with_fewer_workers_if_a_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def plan(*_: Any) -> Size:
        sizes.append(6 - 2 * len(sizes))
        return Size(sizes[-1], {"CPU": 1.0})

    def run(spec: Any, schedule: Any, fleet: Any, size: Size, *rest: Any) -> Iterator[Event]:
        if size.workers > lives:
            raise NoRoomError("the cluster lost a node.")
        yield from inprocess.run(spec, schedule, fleet, *rest[2:])

    replace_ray(monkeypatch, plan, run)
    lives = 4
    words = [*QUICK[1:], "runtime=local"]
    raysim.run([*words, f"out={tmp_path / 'a'}"], quiet=True)
    assert sizes == [6, 4]
    sizes.clear()
    lives = -9
    with pytest.raises(RefusedError, match="lost a node"):
        raysim.run([*words, f"out={tmp_path / 'b'}"], quiet=True)
    assert len(sizes) == 4


def test_repeated_command_with_auto_resume_continues_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", *QUICK, f"out={tmp_path / 'a'}", "--auto-resume", "--quiet"]
    assert cli.call([word.replace("rounds=5", "rounds=2") for word in words]) == 0
    assert cli.call(words) == 0
    assert [row["round"] for row in read_history(tmp_path / "a/history.parquet")] == [1, 2, 3, 4, 5]
    assert cli.call([word for word in words if "out=" not in word]) == 2
    assert "--auto-resume" in capsys.readouterr().err
    assert cli.call([*words, "resume=latest"]) == 2
