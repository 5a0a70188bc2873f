"""Keep the messages of Ray apart from raysim's output.

When a process or a node is lost, Ray prints long messages on the driver's standard output. No
setting turns them off. This module writes them to a file in the run's folder.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from raysim.primitives.stacks import RAY_MESSAGES, remove_empty_file, stack_file

RAY_THREADS = "ray_"  # the beginning of the names of Ray's threads
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class MessageFile:
    """A file that gets the messages of Ray in this process. The caller must close the file."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, text: str) -> None:
        """Write a text to the end of the file."""
        self._file.write(text)
        self._file.flush()

    @property
    def is_empty(self) -> bool:
        """True if no message was written to the file."""
        return os.fstat(self._file.fileno()).st_size == 0

    def close(self) -> None:
        """Close the file; remove it if it is empty."""
        self._file.close()
        remove_empty_file(self.path)


class RayMessages:
    """The messages of Ray in this process, and the open files that get them.

    Messages that come while no file is open are written to the next file that is opened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: list[MessageFile] = []
        self._waiting_text = ""

    def add(self, text: str) -> None:
        """Write a message to all open files; if no file is open, keep it for the next file."""
        plain_text = _COLOURS.sub("", text)
        with self._lock:
            if not self._files:
                self._waiting_text += plain_text
            for file in self._files:
                file.write(plain_text)

    def take_waiting_text(self) -> str:
        """Return the messages that came while no file was open, and forget them."""
        with self._lock:
            text, self._waiting_text = self._waiting_text, ""
        return text

    @contextmanager
    def written_to(self, file: MessageFile) -> Iterator[None]:
        """Write messages to a file until the end of the context, then close the file."""
        file.write(self.take_waiting_text())
        with self._lock:
            self._files.append(file)
        try:
            yield
        finally:
            with self._lock:
                self._files.remove(file)
            file.close()


class RoutedStream:
    """A text stream that separates the text of Ray's threads from all other text.

    Text of Ray's threads is added to `messages`, all other text is written to `stream`. Attributes
    other than `write` are those of `stream`.
    """

    def __init__(self, stream: Any, messages: RayMessages):
        self._stream, self._messages = stream, messages

    def write(self, text: str) -> int:
        """Write a text; return the number of its characters."""
        if threading.current_thread().name.startswith(RAY_THREADS):
            self._messages.add(text)
            return len(text)
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_messages: RayMessages | None = None  # None if raysim has not connected this process to Ray


def _routed_output(messages: RayMessages) -> AbstractContextManager[Any]:
    routed: Any = RoutedStream(sys.stdout, messages)
    return redirect_stdout(routed)


@contextmanager
def separate_messages() -> Iterator[None]:
    """Keep messages of Ray's threads away from standard output until the end of the context.

    Use `messages_written_to` to write the messages to a file. All messages that no file has are
    printed on standard error at the end.
    """
    global _messages
    _messages = messages = RayMessages()
    try:
        with _routed_output(messages):
            yield
    finally:
        _messages = None
        sys.stderr.write(messages.take_waiting_text())


@contextmanager
def messages_written_to(folder: Path) -> Iterator[MessageFile | None]:
    """Write Ray's messages to a file in the folder of a run, until the end of the context.

    Yield this file; None if raysim has not connected this process to Ray. Begin the context after a
    progress bar has started; otherwise the bar would get the messages.
    """
    if _messages is None:
        yield None
        return
    file = MessageFile(stack_file(folder, RAY_MESSAGES))
    with _routed_output(_messages), _messages.written_to(file):
        yield file
