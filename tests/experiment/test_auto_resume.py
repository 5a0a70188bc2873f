"""A run that lost a process goes on by itself, and the same command goes on where an earlier one stopped."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import raysim
from raysim import cli
from raysim.results.history import read_history
from raysim.results.observers import CurrentRun, Observer
from raysim.runtime import inprocess
from raysim.simulation.events import Event, ProcessLost, Round, Waiting

QUICK = [
    *("runtime=inprocess", "tracking=none", "data=synthetic", "data.samples=100", "partition=iid", "model=mlp"),
    *("partition.clients=5", "schedule.cohort=3", "local.epochs=1", "rounds=5", "checkpoint.every=2"),
]


class Waited(Observer):
    """Counts how often it is told to wait."""

    times = 0

    def on_wait(self, run: CurrentRun, event: Waiting) -> None:
        self.times += 1


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rounds after which a process of the run is lost, one for each try."""
    whole, rounds = inprocess.run, list[int]()

    def run(*parts: Any) -> Iterator[Event]:
        last = rounds.pop(0) if rounds else 99
        for event in whole(*parts):
            yield event
            if isinstance(event, Round) and event.row["round"] == last:
                yield Waiting(0, (1,), 11.0)
                raise ProcessLost("a node is gone")

    monkeypatch.setattr(inprocess, "run", run)
    return rounds


def test_a_lost_process_is_rolled_back_to_the_last_checkpoint(fails: list[int], tmp_path: Path) -> None:
    straight = raysim.run([*QUICK, f"out={tmp_path / 'a'}"], quiet=True)
    fails += [1, 3, 3, 5]
    console, waited = Console(file=(out := io.StringIO()), width=999), Waited()
    found = raysim.run([*QUICK, f"out={tmp_path / 'b'}"], console=console, observers=[waited])
    assert not fails and waited.times == 4
    assert found.summary["model_sha256"] == straight.summary["model_sha256"]
    assert [row["round"] for row in read_history(tmp_path / "b/history.parquet")] == [1, 2, 3, 4, 5]
    assert out.getvalue().count("a node is gone. The run goes back to its last checkpoint and on by itself") == 4


def test_one_that_gets_no_further_gives_up(fails: list[int], tmp_path: Path) -> None:
    fails += [3] * 9
    with pytest.raises(ProcessLost, match="a node is gone; resume=latest goes on from the last checkpoint"):
        raysim.run([*QUICK, f"out={tmp_path / 'a'}"], quiet=True)
    assert len(fails) == 5, "the first made a checkpoint, and three after it none"


def test_the_same_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", *QUICK, f"out={tmp_path / 'a'}", "--auto-resume", "--quiet"]
    assert cli.call([word.replace("rounds=5", "rounds=2") for word in words]) == 0
    assert cli.call(words) == 0
    assert [row["round"] for row in read_history(tmp_path / "a/history.parquet")] == [1, 2, 3, 4, 5]
    assert cli.call([word for word in words if "out=" not in word]) == 2
    assert "--auto-resume needs the folder of the run: add out=DIR" in capsys.readouterr().err
    assert cli.call([*words, "resume=latest"]) == 2
