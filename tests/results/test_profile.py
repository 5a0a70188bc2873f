"""Test the time profile of a run, which assigns each second of a process to one kind of work.

Profiling does not change the results of a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import coordinate, run, run_spec, several_workers

from raysim.methods.scaffold import Scaffold
from raysim.primitives.spans import KINDS, Spans, Track
from raysim.results import profile
from raysim.simulation.events import Finished, Profiled
from raysim.simulation.profile import add_idle_time
from raysim.training.profile import WorkerTrack
from raysim.training.worker import Worker


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Spans, list[float]]]:
    """Yield a recorder of time spans and its clock.

    The clock is a list of one number: the time in seconds. A test sets this number.
    """
    clock, found = [0.0], Spans(whole=("evaluation",))
    monkeypatch.setattr(found, "now", lambda: clock[0])
    yield found, clock


def test_profile_adds_time_only_to_the_innermost_open_span(
    spans: tuple[Spans, list[float]],
) -> None:
    found, clock = spans
    with found.span("train", "other"):
        clock[0] = 1.0
        with found.span("steps", "steps"):
            clock[0] = 3.0
            with found.span("gather", "gathering"):
                clock[0] = 7.0
            clock[0] = 8.0
    with found.span("evaluate", "evaluation"), found.span("gather", "gathering"):
        clock[0] = 10.0
    track = found.take("worker-0")
    assert track.seconds == {"other": 1.0, "steps": 3.0, "gathering": 4.0, "evaluation": 2.0}
    assert [span.name for span in track.spans] == ["gather", "steps", "train", "evaluate"]
    assert found.take("worker-0") == Track("worker-0", {})


def test_profile_counts_time_between_calls_as_waiting() -> None:
    found = WorkerTrack(Track("worker-0", {"steps": 4.0}), [(2.0, 4.0), (4.5, 6.5)])
    track = add_idle_time(
        found, [1.5, 3.0], 0.0, 10.0
    )  # the second call was made while the worker was at work
    assert track.seconds == {"steps": 4.0, "messages": 1.0, "waiting": 5.0}


@pytest.mark.pictures
@pytest.mark.parametrize("recorded", [False, True])
def test_profile_covers_the_whole_wall_time_and_changes_no_bit(
    recorded: bool, tmp_path: Path
) -> None:
    asked = run_spec(Scaffold(), lanes=3 if recorded else 1, graph=recorded)
    timed = replace(asked, profile=True)
    *_, result, finished = coordinate(timed, runtime=several_workers(timed, 2)).run()
    assert isinstance(result, Profiled) and isinstance(finished, Finished)
    assert (finished.model_sha256, finished.state_sha256) == run(asked).bits
    assert [track.name for track in result.tracks] == ["coordinator", "worker-0", "worker-1"]
    for own in profile.shares(result).values():
        assert sum(own.values()) == pytest.approx(1.0, abs=1e-3) and min(own.values()) >= 0
    assert {
        kind for track in result.tracks for kind, spent in track.seconds.items() if spent > 0
    } == {*KINDS}
    profile.write(result, tmp_path, "fedavg")
    assert profile.table(result).splitlines()[1].split() == [track.name for track in result.tracks]
    many = replace(
        result, tracks=tuple(replace(result.tracks[0], name=str(place)) for place in range(9))
    )
    assert profile.table(many).splitlines()[1].split("  ")[-2:] == [
        "coordinator",
        "mean of 8 workers",
    ]
    events = json.loads((tmp_path / profile.TRACE).read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(
        len(track.spans) for track in result.tracks
    )
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events if event["ph"] == "X")
    assert (tmp_path / profile.PICTURE).stat().st_size > 10_000


def test_run_without_profile_measures_no_times() -> None:
    worker = Worker(run_spec())
    assert (
        worker.spans is None
        and not {"train", "add_to_sums"} & vars(worker).keys()
        and "steps" not in vars(worker.trainer)
    )


def test_profile_of_a_run_on_ray_contains_the_times_of_its_workers(ray_session: None) -> None:
    from raysim.runtime.ray import start_workers

    timed = replace(run_spec(Scaffold()), profile=True)
    runtime = start_workers(timed, 2)
    *_, result, finished = coordinate(timed, runtime=runtime).run()
    runtime.stop()
    assert finished.model_sha256 == run(run_spec(Scaffold())).bits[0]
    for own in profile.shares(result).values():
        assert sum(own.values()) == pytest.approx(1.0, abs=1e-2)
    assert all(track.seconds["evaluation"] > 0 for track in result.tracks)
