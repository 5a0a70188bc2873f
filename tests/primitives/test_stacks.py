"""Test reading the stacks of the threads of another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raysim.primitives.stacks import (
    StackSource,
    read_stacks,
    stacks_on_signal,
    write_stacks,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
BLOCKED = """
import threading
from raysim.primitives.stacks import open_stack_source

def wait_for_disk():
    lock.acquire()

lock = threading.Lock()
lock.acquire()
print(*open_stack_source(), flush=True)
wait_for_disk()
"""


def read_until(text: str, source: StackSource) -> str:
    """Read the stacks of a process again and again until they contain a text; return them."""
    while text not in (stacks := read_stacks(source)):
        pass
    return stacks


def test_stacks_of_a_blocked_process_contain_its_current_function() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            source = StackSource(*map(int, process.stdout.readline().split()))
            for _ in range(2):  # each text starts anew
                assert read_until("in wait_for_disk", source).count("in wait_for_disk") == 1
            process.send_signal(signal.SIGSTOP)
            read_until("T (stopped)", source)
        finally:
            process.kill()
    assert read_stacks(source) == ""


def test_process_gets_no_signal_if_it_has_not_opened_a_file_for_call_stacks() -> None:
    with open(os.devnull) as file:
        assert read_stacks(StackSource(os.getpid(), file.fileno())) == ""
    assert read_stacks(None) == ""


def test_process_writes_its_stacks_when_it_receives_sigusr1(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    with stacks_on_signal(tmp_path, "driver"):
        pass
    assert list(tmp_path.iterdir()) == []
    with stacks_on_signal(tmp_path, "driver"):
        os.kill(os.getpid(), signal.SIGUSR1)
    text = (tmp_path / "stacks" / "driver.txt").read_text()
    assert "test_process_writes_its_stacks_when_it_receives_sigusr1" in text
    assert signal.getsignal(signal.SIGUSR1) == handler


def test_file_of_call_stacks_contains_only_the_call_stacks_written_last(tmp_path: Path) -> None:
    write_stacks(tmp_path, "worker-1", "first")
    path = write_stacks(tmp_path, "worker-1", "second")
    assert path == tmp_path / "stacks" / "worker-1.txt"
    assert path.read_text().startswith("worker-1, ")
    assert path.read_text().endswith("\nsecond")
