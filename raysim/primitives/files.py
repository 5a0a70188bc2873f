"""Files that other processes read, or write at the same time."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


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
