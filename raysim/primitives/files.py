"""Files that other processes read, or write at the same time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from raysim.primitives.errors import Refused

_SOON = 3.0  # seconds of a wait that nobody need be told of
LOCK_FILE = ".held"  # the file that the process of a run locks
_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
)  # in errors of libraries' own kinds


@contextlib.contextmanager
def draft_file(path: Path) -> Iterator[Path]:
    """Where to write a file, with the mode that the umask gives; then it gets its name, with all of it on the disk.

    Readers, or those who come after a crash, see the old content or all of the new one.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        yield unfinished
        unfinished.chmod(mode)  # some libraries keep what they write to its user
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def open_draft(path: Path) -> Iterator[BinaryIO]:
    """The same, as an open file."""
    with draft_file(path) as unfinished, unfinished.open("wb") as file:
        yield file


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that readers see as a whole."""
    with report_full_disk(path, len(content)), open_draft(path) as file:
        file.write(content)


@contextlib.contextmanager
def report_full_disk(path: Path, needed: int) -> Iterator[None]:
    """Where the disk is full, an OSError of its own kind says what was to be written and what is free, in bytes."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        free = shutil.disk_usage(path.parent).free
        text = f"the disk is full: {path} takes {needed:,} bytes, of which {free:,} are free"
        raise OSError(errno.ENOSPC, text) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether something could not be written for want of room, or of leave to take it."""
    known = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return known or any(text in str(error) for text in _FULL)


def conf_folder() -> Path:
    """Where the configuration files lie: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def user_path(text: str | Path) -> Path:
    """The path that a user wrote, ~ being the home folder. Raises Refused for what cannot be a path."""
    if "\0" in str(text):
        raise Refused(f"{str(text)!r} is no path: it contains a NUL")
    try:
        str(text).encode()
    except UnicodeEncodeError:
        raise Refused(
            f"{str(text)!r} is no text in UTF-8, as files that name it have to be: rename it"
        ) from None
    try:
        path = Path(text).expanduser()
        path.is_dir()
        return path
    except OSError as error:  # a name that is too long
        raise Refused(f"{str(text)[:60]}... is no path: {error.strerror}") from None
    except RuntimeError:
        raise Refused(
            f"{text} names a user whose home folder is not known: write the path in full"
        ) from None


def make_folder(path: Path) -> Path:
    """The folder at a path, made if need be. Raises Refused where something else is there."""
    if path.exists() and not path.is_dir():
        raise Refused(f"{path} is no folder: choose another place")
    path.mkdir(parents=True, exist_ok=True)
    return path


# A slash may stand in a password, though it should not; host:5000/a@b has a port and no password.
_USER = re.compile(r"://(?:[^/@\s\"]*:(?!\d+/)[^\s\"]*@|[^/\s\"]*@)")
_SECRET = re.compile(
    r"([?&;][\w-]*(?:user|passw|pwd|token|secret|key|sig|credential)[\w-]*=)[^&;\s\"]*",
    re.IGNORECASE,
)


def without_password(text: str) -> str:
    """The same text with users, passwords and tokens taken out of every address in it."""
    bare = _USER.sub("://", text)
    return _SECRET.sub(r"\1", bare)


def regular_file(path: Path) -> Path:
    """The path of a file that can be read to its end: no folder, pipe or device, and no link to one.

    Raises Refused for any other.
    """
    if not path.is_file():
        raise Refused(f"{path} is no regular file: remove it, or put the file there.")
    return path


def existing_file(path: Path) -> list[Path]:
    """Return a list with the path of a regular file, or an empty one. Raise `Refused` for what is no file."""
    return [regular_file(path)] if os.path.lexists(path) else []


def parse_json(text: str | bytes) -> Any:
    """What JSON says. Raises ValueError, also for what Python cannot nest so deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextlib.contextmanager
def wait_for_folder(folder: Path, setting: str) -> Iterator[None]:
    """One process at a time per folder, which is made if need be; `setting` names it. Says so where it has to wait.

    Raises ValueError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a+")
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written ({error}): name another folder in {setting}"
        ) from error
    with handle:
        if not _locked_soon(handle):
            print(
                f"raysim: waiting for {_owner(handle)}, which writes {folder}",
                file=sys.stderr,
                flush=True,
            )
            _locked(handle, wait=True)
        _sign(handle)
        yield


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """A folder of a run for this process alone, as long as it works there. Raises Refused where another one does."""
    path = folder / LOCK_FILE
    if path.exists() and not path.is_file():
        raise Refused(f"{path} is no file that can be locked: remove it")
    with path.open("a+") as handle:
        if not _locked(handle):
            raise Refused(
                f"{folder} is in use by {_owner(handle)}: wait for its end, or choose another folder"
            )
        _sign(handle)
        yield


def _locked_soon(handle: TextIO) -> bool:
    """Lock a file for which others are quick, such as the trials of one search; False where it takes them seconds."""
    until = time.monotonic() + _SOON
    while not (locked := _locked(handle)) and time.monotonic() < until:
        time.sleep(0.05)
    return locked


def _locked(handle: TextIO, wait: bool = False) -> bool:
    """Lock a file until it is closed; False where another process has it. Some network file systems have no locks."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def this_process() -> str:
    """How a sentence names it to somebody who finds what it left."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _sign(handle: TextIO) -> None:
    """Leave in a locked file who has it."""
    with contextlib.suppress(OSError):  # a full disk is the next one's to tell
        handle.truncate(0)
        handle.write(this_process())
        handle.flush()


def _owner(handle: TextIO) -> str:
    handle.seek(0)
    return handle.read() or "another process"
