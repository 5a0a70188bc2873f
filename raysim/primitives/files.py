"""Files that other processes read, or write at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from raysim.primitives.errors import Refused


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write. Readers, or those who come after a crash, see the old content or all of the new one."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a `whole` file."""
    with whole(path) as file:
        file.write(content)


def user_path(text: str | Path) -> Path:
    """The path that a user wrote, ~ being the home folder. Raises Refused for what cannot be a path."""
    if "\0" in str(text):
        raise Refused(f"{str(text)!r} is no path: it contains a NUL")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise Refused(f"{text} names a user whose home folder is not known: write the path in full") from None


def regular(path: Path) -> Path:
    """The path of a file that can be read to its end: no folder, pipe or device, and no link to one.

    Raises ValueError for any other.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no regular file: remove it, or put the file there.")
    return path


def from_json(text: str | bytes) -> Any:
    """What JSON says. Raises ValueError, also for what Python cannot nest so deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def alone(folder: Path, setting: str) -> Iterator[None]:
    """One process at a time per folder, which is made if need be; `setting` names it.

    Raises ValueError if the folder cannot be written.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a")
    except OSError as error:
        raise ValueError(f"{folder} cannot be written ({error}): name another folder in {setting}") from error
    with handle:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
