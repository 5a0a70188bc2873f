"""Test what a person sees before the first round, in a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from raysim.results.progress import Progress, activity_line, waiting_line


def seen(terminal: bool) -> str:
    console = Console(file=(out := io.StringIO()), force_terminal=terminal, width=80)
    with waiting_line(console) as waits_for:
        waits_for("waiting for Ray")
        waits_for("waiting for the workers")
    with Progress(3, console=console):
        pass
    return out.getvalue()


def test_progress_log_has_a_line_for_each_activity() -> None:
    assert seen(False).splitlines()[:2] == [
        f"{'':<10}waiting for Ray",
        f"{'':<10}waiting for the workers",
    ]


def test_terminal_shows_the_current_activity_and_its_elapsed_seconds() -> None:
    text = seen(True)
    assert "waiting for the workers" in text and "0:00:00" in text, "the elapsed seconds"
    assert "first round" in text.rpartition("waiting for the workers")[2]


@pytest.mark.parametrize("terminal", [False, True])
def test_only_a_terminal_shows_the_progress_of_an_activity(terminal: bool) -> None:
    console = Console(file=(out := io.StringIO()), force_terminal=terminal, width=80)
    with waiting_line(console) as shows:
        shows("under way: fedavg_seed-0")
        for number in range(3):
            shows("under way: fedavg_seed-0", f" · round {number}/2")
    text = out.getvalue()
    assert (
        "under way: fedavg_seed-0 · round 2/2" in text
        if terminal
        else text == f"{'':<10}under way: fedavg_seed-0\n"
    )


def test_quiet_console_prints_nothing() -> None:
    console = Console(file=(out := io.StringIO()), force_terminal=True, quiet=True)
    with waiting_line(console) as waits_for:
        waits_for("waiting for Ray")
    assert out.getvalue() == ""


def test_progress_shows_activity_after_last_round() -> None:
    console = Console(file=(out := io.StringIO()), force_terminal=False, width=80)
    with activity_line(console, "drawing pictures"):
        assert out.getvalue() == f"{'':<10}drawing pictures\n", "before it is done"


def test_progress_line_shows_a_silent_worker_until_the_next_round() -> None:
    progress = Progress(3, console=Console(file=(out := io.StringIO()), width=99))
    progress.wait(1, ["4", "17"], 35.0)
    assert out.getvalue() == progress.line() + "\n", "a log has it at once"
    assert progress.line() == "round 0/3 · worker 1 with clients 4, 17 has not answered for 35 s"
    progress.wait(0, [str(client) for client in range(9)], 400.0)
    assert progress.line().endswith(
        "worker 0 with clients 0, 1, 2, 3, 4, ... has not answered for 6 min 40 s"
    )
    progress.wait(0, [], 12.0)
    assert progress.line().endswith("· worker 0 has not answered for 12 s")
    progress.wait(2, ["3"], 12.0, "node-b (10.0.0.2)", 3600.0, 30.0)
    assert "30 s (faults.node_timeout)" in progress.line()
    progress.wait(2, ["3"], 12.0, "node-b", 3600.0, 30.0, ray_messages="run/stacks/ray.txt")
    assert progress.line().endswith(": run/stacks/ray.txt")
    progress.wait(2, ["3"], 12.0, "node-b (10.0.0.2)", 3600.0)
    assert progress.line().endswith(
        "worker 2 on node-b (10.0.0.2) with client 3 has not answered for 12 s, and is replaced "
        "after 1 h 00 min (faults.timeout)"
    )
    progress.update({"round": 1})
    assert "answered" not in progress.line()
