"""Test the events that observers of a run get, their order, and errors in observers."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tiny_runs import run_spec

import raysim
from raysim.api.method import Method
from raysim.api.setup import Setup
from raysim.experiment.recorder import Follower
from raysim.experiment.settings import Interrupted
from raysim.primitives.errors import RefusedError
from raysim.results.history import read_history
from raysim.results.observers import (
    AbsentClients,
    CurrentRun,
    HistoryFile,
    MethodWarnings,
    Observer,
    ObserverError,
    RemovalFailures,
    WorkerDeaths,
)
from raysim.simulation.availability import Diurnal
from raysim.simulation.events import Event, Finished, Round, Saved, Started
from raysim.training.run_spec import declare_run

QUICK = (
    *(
        "runtime=inprocess",
        "tracking=none",
        "data=synthetic",
        "partition=iid",
        "partition.clients=10",
    ),
    *("schedule.cohort=3", "local.epochs=1", "rounds=4", "checkpoint.every=2"),
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rounds(folder: str) -> list[object]:
    return [row["round"] for row in read_history(Path(folder, "history.parquet"))]


class Diary(Observer):
    """An observer that records its calls, and may fail at one of them."""

    def __init__(self, fails: str = "", pages: list[str] | None = None, name: str = ""):
        self.pages, self._fails, self._name = [] if pages is None else pages, fails, name

    def _told(self, what: str) -> None:
        self.pages.append(f"{self._name}{what}")
        if what == self._fails:
            raise ZeroDivisionError("nothing to divide by")

    def on_start(self, run: CurrentRun) -> None:
        self._told(f"start at {len(run.rows)}")

    def on_round(self, run: CurrentRun, event: Round) -> None:
        assert event.row["round"] == len(run.rows)
        self._told(f"round {event.row['round']}")

    def on_checkpoint(self, run: CurrentRun, event: Saved) -> None:
        self._told(f"checkpoint {event.version}")

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        self._told("finish")

    def on_stop(self, run: CurrentRun, error: BaseException) -> None:
        self._told(f"stop by {type(error).__name__}")


# --- a user's own ---------------------------------------------------------------------------------
def test_function_passed_as_on_round_gets_a_copy_of_each_row() -> None:
    seen: list[dict[str, Any]] = []

    def spoil(row: dict[str, Any]) -> None:
        seen.append(dict(row))
        row.clear()

    result = raysim.run([*QUICK, "out=a"], quiet=True, on_round=spoil)
    assert seen == result.rows
    assert rounds("a") == [1, 2, 3, 4]
    raysim.run([*QUICK, "out=a", "resume=latest", "rounds=5"], quiet=True, on_round=spoil)
    assert [row["round"] for row in seen] == [1, 2, 3, 4, 5]  # those of before are not told again


def test_observer_gets_all_events() -> None:
    diary = Diary()
    raysim.run([*QUICK, "out=a", "rounds=3"], quiet=True, observers=[diary])
    assert diary.pages == [
        *("start at 0", "round 1", "round 2", "checkpoint 2", "round 3", "checkpoint 3", "finish"),
    ]
    raysim.run([*QUICK, "out=a", "resume=latest"], quiet=True, observers=[again := Diary()])
    assert again.pages == ["start at 3", "round 4", "checkpoint 4", "finish"]
    raysim.run([*QUICK, "out=a", "resume=latest"], quiet=True, observers=[never := Diary()])
    assert never.pages == []  # the run had finished


def test_run_resumes_after_an_error_in_a_function_passed_as_on_round() -> None:
    def picky(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise ZeroDivisionError("nothing to divide by")

    straight = raysim.run([*QUICK, "out=straight"], quiet=True)
    diary = Diary()
    with pytest.raises(
        ObserverError, match=r"on_round=.*picky raised ZeroDivisionError .*: nothing to"
    ) as caught:
        raysim.run([*QUICK, "out=a"], quiet=True, on_round=picky, observers=[diary])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "after round 3" in str(caught.value)
    assert "resume=latest" in str(caught.value)
    assert diary.pages[-1] == "stop by ObserverError"
    assert rounds("a") == [1, 2, 3]
    assert not Path("a/summary.json").exists()
    repaired = raysim.run([*QUICK, "out=a", "resume=latest"], quiet=True)
    assert repaired.summary["model_sha256"] == straight.summary["model_sha256"]


def test_run_writes_its_summary_even_if_an_observer_fails_at_the_end() -> None:
    with pytest.raises(
        ObserverError, match=r"your observer Diary .*in on_finish.*The run itself had finished"
    ):
        raysim.run([*QUICK, "out=a", "rounds=1"], quiet=True, observers=[Diary("finish")])
    assert json.loads(Path("a/summary.json").read_text())["rounds"] == 1


def test_keyboard_interrupt_in_callback_on_round_stops_the_run() -> None:
    def stop(row: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="stopped after round 1"):
        raysim.run([*QUICK, "out=a"], quiet=True, on_round=stop, observers=[diary := Diary()])
    assert diary.pages == ["start at 0", "stop by KeyboardInterrupt"]
    assert rounds("a") == [1]


def test_wrong_observer_is_refused_before_the_run() -> None:
    with pytest.raises(RefusedError, match="an object of a subclass of"):
        raysim.run([*QUICK, "out=a"], quiet=True, observers=[Diary])  # type: ignore[list-item]
    with pytest.raises(RefusedError, match="cannot be called"):
        raysim.run([*QUICK, "out=a"], quiet=True, on_round="print")  # type: ignore[arg-type]
    assert not Path("a").exists()


# --- jobs -----------------------------------------------------------------------------------------
ASYNCHRONOUS = (
    *(
        "runtime=inprocess",
        "tracking=none",
        "data=synthetic",
        "partition=iid",
        "partition.clients=10",
        "fleet=lognormal",
    ),
    *(
        "schedule=buffered",
        "schedule.concurrency=6",
        "schedule.size=2",
        "schedule.max_staleness=2",
        "method=[fedbuff]",
    ),
    *("local.epochs=1", "checkpoint.every=2"),
)


def jobs(folder: str) -> list[dict[str, Any]]:
    return list(pq.read_table(Path(folder, "jobs.parquet")).to_pylist())


def test_job_files_of_twice_resumed_run_equal_those_of_uninterrupted_run() -> None:
    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 7:
            raise KeyboardInterrupt

    raysim.run([*ASYNCHRONOUS, "out=straight", "rounds=8"], quiet=True)
    assert {"aggregated", "discarded", "in flight"} == {job["fate"] for job in jobs("straight")}
    assert Path("straight/timeline.png").is_file()
    raysim.run([*ASYNCHRONOUS, "out=a", "rounds=4"], quiet=True)
    assert {job["round"] for job in jobs("a")} == {1, 2, 3, 4, 5}  # 5: of what was under way
    with pytest.raises(Interrupted):
        raysim.run([*ASYNCHRONOUS, "out=a", "resume=latest", "rounds=8"], quiet=True, on_round=stop)
    assert {job["round"] for job in jobs("a")} == set(range(1, 8))
    raysim.run([*ASYNCHRONOUS, "out=a", "resume=latest", "rounds=8"], quiet=True)  # from round 6
    assert jobs("a") == jobs("straight")


def test_run_can_be_resumed_after_its_job_files_and_timeline_are_deleted() -> None:
    raysim.run([*ASYNCHRONOUS, "out=a", "rounds=2"], quiet=True)
    shutil.rmtree("a/jobs.parquet")
    Path("a/timeline.png").unlink()
    raysim.run([*ASYNCHRONOUS, "out=a", "resume=latest", "rounds=4"], quiet=True)
    assert rounds("a") == [1, 2, 3, 4]
    assert not Path("a/jobs.parquet").exists() and not Path("a/timeline.png").exists()


def test_run_on_equal_devices_writes_jobs_but_no_timeline_picture() -> None:
    result = raysim.run([*QUICK, "out=a"], quiet=True)
    assert len(jobs("a")) == 12 and not Path("a/timeline.png").exists()
    assert "jobs" not in result.summary and result.summary["model_sha256"]


# --- following ------------------------------------------------------------------------------------
def played(count: int, lasts: bool = True) -> Iterator[Event]:
    """Yield the events of an artificial run.

    count: the number of rounds.
    lasts: if True, the last event is `Finished`. If False, a RuntimeError follows the last round.
    """
    yield Started([])
    for number in range(1, count + 1):
        yield Round({"round": number}, ())
    if not lasts:
        raise RuntimeError("a client's error")
    yield Finished("m", "s", 1)


def test_observers_are_called_in_the_order_of_their_list(tmp_path: Path) -> None:
    pages: list[str] = []
    follower = Follower(
        CurrentRun(tmp_path, 2), played(2), [Diary(pages=pages, name=name) for name in ("a ", "b ")]
    )
    follower.follow_to_end()
    assert pages == [
        f"{name} {what}" for what in ("start at 0", "round 1", "round 2", "finish") for name in "ab"
    ]


def test_follower_of_the_events_of_a_run_stops_after_the_requested_round(tmp_path: Path) -> None:
    follower = Follower(CurrentRun(tmp_path, 9), played(9), [diary := Diary()])
    assert follower.follow_until(2) == {"round": 2}
    assert diary.pages == ["start at 0", "round 1", "round 2"]
    follower.follow_event()
    assert follower.follow_until(1) == {"round": 1}
    assert diary.pages[3:] == ["round 3"]


def test_history_is_written_if_observers_fail(
    tmp_path: Path,
) -> None:
    others = [Diary("stop by RuntimeError"), HistoryFile(), last := Diary()]
    with pytest.raises(ZeroDivisionError) as caught:
        Follower(CurrentRun(tmp_path, 3), played(2, lasts=False), others).follow_to_end()
    assert str(caught.value.__cause__) == "a client's error"
    assert rounds(str(tmp_path)) == [1, 2]
    assert last.pages[-1] == "stop by RuntimeError"


def test_history_is_not_rewritten_at_each_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(
        "raysim.results.observers.write_history", lambda rows, _: written.append(len(rows))
    )
    run, observer = CurrentRun(tmp_path, 9), HistoryFile()
    for number in range(1, 10_001):
        run.rows.append({"round": number})
        observer.on_checkpoint(run, Saved(number, ""))
    assert written[: observer.LONG_RUN_ROUNDS] == list(range(1, observer.LONG_RUN_ROUNDS + 1)), (
        "a short one is"
    )
    assert sum(written[observer.LONG_RUN_ROUNDS :]) < 12 * len(run.rows), (
        "rows are written a dozen times at most, later on"
    )
    observer.on_finish(run, Finished("", "", 0))
    assert written[-1] == 10_000


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("start at 0", [True, False, False]),
        ("round 1", [True, True, True]),
        ("finish", [False, True, True]),
    ],
)
def test_on_stop_is_called_for_observers_that_started_but_did_not_finish(
    tmp_path: Path, fails: str, told: list[bool]
) -> None:
    observers = [Diary(), Diary(fails), Diary()]
    with pytest.raises(ZeroDivisionError):
        Follower(CurrentRun(tmp_path, 1), played(1), observers).follow_to_end()
    assert ["stop by ZeroDivisionError" in each.pages for each in observers] == told


# --- what is said ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("deaths", "text"), [(0, ""), (1, "1 worker process was lost"), (2, "2 worker processes")]
)
def test_observer_prints_the_number_of_worker_deaths_in_a_round(
    tmp_path: Path, deaths: int, text: str
) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=400)
    WorkerDeaths(console.print).on_round(
        CurrentRun(tmp_path, 9), Round({"round": 3, "worker_deaths": deaths}, ())
    )
    said = stream.getvalue()
    assert text in said
    assert ("no result changes" in said and said.startswith("round 3: ")) == bool(deaths)


def test_failed_removal_of_checkpoints_is_shown_once(tmp_path: Path) -> None:
    lines: list[str] = []
    observer = RemovalFailures(lines.append)
    for version, failure in [(1, ""), (2, "read-only"), (3, "read-only"), (4, "offline")]:
        observer.on_checkpoint(CurrentRun(tmp_path, 9), Saved(version, "a", failure))
    assert [line.partition(" is ")[0] for line in lines] == [
        "checkpoint of round 2",
        "checkpoint of round 4",
    ]


def test_method_warning_during_a_run_is_shown_once(tmp_path: Path) -> None:
    class Wary(Method):
        name, paper = "wary", "a test"

        def setup(self, run: Setup) -> None:
            run.warn_when(lambda row: "too far" if row["round"] >= 2 else "")

    said: list[str] = []
    (declared,) = declare_run(run_spec(Wary())).methods
    observer = MethodWarnings(declared.round_warnings, said.append)
    for number in range(1, 5):
        observer.on_round(CurrentRun(tmp_path, 4), Round({"round": number}, ()))
    assert said == ["round 2: too far"]


@pytest.mark.parametrize(
    ("seconds", "absent"),
    [(100.0, 2), (7 * 3600.0, 1), (12 * 3600.0, 0)],
)
def test_warning_mentions_the_number_of_clients_that_were_never_available(
    seconds: float, absent: int, tmp_path: Path
) -> None:
    # Available for four hours from the hours 0, 5 and 10 on; client 1 has no samples.
    presence = Diurnal(np.array([0, 20, 5, 10]), 4.0)
    said: list[str] = []
    observer = AbsentClients(lambda: presence, np.array([0, 2, 3]), said.append)
    run = CurrentRun(tmp_path, 4)
    run.rows.append({"round": 1, "virtual_seconds": seconds})
    observer.on_finish(run, Finished.__new__(Finished))
    counts = [re.findall(r"\d+ of \d+", text) for text in said]
    assert counts == ([[f"{absent} of 3"]] if absent else [])


def test_finished_run_warns_about_clients_that_were_never_available(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["fleet=lognormal", "fleet.availability=diurnal", "fleet.hours=3"]
    raysim.run([*QUICK, *words, "out=a"], quiet=True)
    assert "were not available" in capsys.readouterr().err


def test_summary_has_heterogeneity_of_the_split() -> None:
    result = raysim.run([*QUICK, "out=a"], quiet=True)
    split = result.summary["split"]
    assert split["clients"] == 10 and 0 < split["label_entropy"] <= split["pooled_entropy"]
    assert 0 <= split["divergence"] < 1 and split["sizes"]["min"] > 0
