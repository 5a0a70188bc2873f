"""Show which code the threads of a process execute, even if the process hangs.

A process writes the call stacks of its threads when it gets the signal SIGUSR1. This also works
while a library blocks the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from raysim.primitives.files import replace_file

STACKS = "stacks"  # the folder with files of call stacks, in the folder of a run
RAY_MESSAGES = "ray"  # the name of the file with Ray's messages, which is in the same folder
ANSWER_TIMEOUT_S = 2.0  # a process that runs writes its call stacks within milliseconds
POLL_INTERVAL_S = 0.05
_PREFIX = "raysim-stacks-"
# A process that got the signal without this module would end; other systems have no such signal.
_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)


class StackSource(NamedTuple):
    """A process that writes the call stacks of its threads into a file on request.

    process: the number (pid) of the process.
    file: the descriptor of the file in that process.
    """

    process: int
    file: int


def open_stack_source() -> StackSource | None:
    """Let this process write the call stacks of its threads when another process requests it.

    Return the number of this process and the file for its call stacks; None if the operating system
    does not have the signal SIGUSR1.
    """
    if _SIGNAL is None:
        return None
    return StackSource(os.getpid(), _own_file().fileno())


@functools.cache
def _own_file() -> IO[bytes]:
    """Open the file into which this process writes its call stacks; return the file.

    The file's name is removed at once, so that no file remains when the process ends.
    """
    assert _SIGNAL is not None, "the caller checks it"
    import fcntl

    descriptor, path = tempfile.mkstemp(prefix=_PREFIX)
    os.unlink(path)
    # The reader empties the file, and the next text starts at its new end.
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    file = os.fdopen(descriptor, "wb")
    # `faulthandler` works without the interpreter's lock, which a blocking library may hold.
    faulthandler.register(_SIGNAL, file, all_threads=True)
    return file


def read_stacks(source: StackSource | None) -> str:
    """Return the call stacks of all threads of a process on this machine, as text.

    Return "" if they cannot be read. If the process writes no stacks, return a sentence with its
    state, such as "T (stopped)".
    source: the process, and the file into which it writes its stacks. None means that the process
    has no such file; the result is then "".
    """
    if source is None or _SIGNAL is None:
        return ""
    path = Path(f"/proc/{source.process}/fd/{source.file}")
    try:
        if _PREFIX not in os.readlink(path):  # another process has the number
            return ""
        os.truncate(path, 0)
        os.kill(source.process, _SIGNAL)
        return _read_new_text(path) or _describe_state(source.process)
    except OSError:
        return ""


def _read_new_text(path: Path) -> str:
    """Wait until a file has text and stops growing; return the text.

    After `ANSWER_TIMEOUT_S` seconds, stop waiting and return the text so far, which may be "".
    """
    end = time.monotonic() + ANSWER_TIMEOUT_S
    size = 0
    while time.monotonic() < end:
        time.sleep(POLL_INTERVAL_S)
        earlier_size, size = size, path.stat().st_size
        if size and size == earlier_size:
            break
    return path.read_text(errors="replace")


def _describe_state(process: int) -> str:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("State:"):
            state = line.removeprefix("State:").strip()
            return f"process {process} does not react to signals; its state is {state}\n"
    return ""


def stack_file(folder: Path, name: str) -> Path:
    """Return the path of the file into which the call stacks of a process are written.

    folder: the run's folder.
    name: the name of the process, such as "coordinator" or "worker-3".
    """
    return folder / STACKS / f"{name}.txt"


def write_stacks(folder: Path, name: str, text: str) -> Path:
    """Write the call stacks of a process into a run's folder; return the path of the file.

    name: the name of the process, such as "worker-3".
    text: the call stacks, as `read_stacks` returns them.
    """
    path = stack_file(folder, name)
    path.parent.mkdir(exist_ok=True)
    title = f"{name}, {time.strftime('%Y-%m-%d %H:%M:%S')}"
    replace_file(path, f"{title}\n{text}".encode())
    return path


@contextlib.contextmanager
def stacks_on_signal(folder: Path, name: str) -> Iterator[None]:
    """Make `kill -USR1` write this process's call stacks to a file during a `with` block.

    Nothing is changed if the program handles SIGUSR1, or the system lacks it. At the end, an empty
    file is removed.
    folder: the run's folder, with the file `stack_file(folder, name)`.
    name: the name of this process, such as "driver".
    """
    if _SIGNAL is None or signal.getsignal(_SIGNAL) != signal.SIG_DFL:
        yield
        return
    path = stack_file(folder, name)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        faulthandler.register(_SIGNAL, file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(_SIGNAL)
    remove_empty_file(path)


def remove_empty_file(path: Path) -> None:
    """Remove a file of call stacks if it has no text, and then its folder if that is empty."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size:
            return
        path.unlink()
        with contextlib.suppress(OSError):  # it has other files
            path.parent.rmdir()
