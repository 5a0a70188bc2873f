"""Read and write files and folders that several processes use at the same time."""

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

from raysim.primitives.errors import RefusedError

# The file that the process of a run locks.
LOCK_FILE = ".held"
# Seconds of waiting for a lock before the wait is reported.
SILENT_WAIT_S = 3.0
# The names of drafts, see `draft_file`.
_DRAFT_NAME = re.compile(r"\..+\.[0-9a-f]{32}")
# Parts of the texts by which libraries report a full disk in errors of their own.
_FULL_DISK_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large")


# --- files that appear as a whole -----------------------------------------------------------------
@contextlib.contextmanager
def draft_file(path: Path) -> Iterator[Path]:
    """Yield the path of a draft; rename it to `path` when its whole content is on the disk.

    So a reader, even after a crash, sees either the old content or the complete new content.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.touch()
        mode = draft.stat().st_mode  # the mode that the umask gives
        yield draft
        draft.chmod(mode)  # some libraries deny access to everybody but the user
        sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def abandoned_drafts(folder: Path) -> list[Path]:
    """Return the drafts that killed processes have left in a folder and its subfolders.

    Call it only while no other process writes there (`lock_folder`).
    """
    return [path for path in folder.rglob(".*") if _DRAFT_NAME.fullmatch(path.name)]


@contextlib.contextmanager
def open_draft(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, open for binary writing, that is renamed to `path` at the end.

    After an error inside `with`, the temporary file is deleted, and `path` does not change.
    """
    with draft_file(path) as draft, draft.open("wb") as file:
        yield file


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file; readers see either the old content or the complete new content."""
    with report_full_disk(path, len(content)), open_draft(path) as file:
        file.write(content)


@contextlib.contextmanager
def report_full_disk(path: Path, needed_bytes: int) -> Iterator[None]:
    """If the disk becomes full inside `with`, raise an `OSError` that says how much is needed.

    The same applies if a quota or a size limit is exceeded.
    path, needed_bytes: the file that is written inside `with`, and its final size.
    """
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        free_bytes = shutil.disk_usage(path.parent).free
        code, problem = errno.ENOSPC, "the disk is full"
        if not _is_without_space(error):
            code, problem = errno.EDQUOT, "a quota or a limit of the file size is exceeded"
        text = f"{problem}: {path} needs {needed_bytes:,} bytes, {free_bytes:,} bytes are free"
        raise OSError(code, text) from error


def _is_without_space(error: BaseException) -> bool:
    """Return True if an error from `is_disk_full` means the disk, and not a quota or a limit."""
    return getattr(error, "errno", None) == errno.ENOSPC or _FULL_DISK_TEXTS[0] in str(error)


def is_disk_full(error: BaseException) -> bool:
    """Return True if an error means a full disk, or an exceeded quota or size limit."""
    full_errors = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError) and error.errno in full_errors:
        return True
    return any(text in str(error) for text in _FULL_DISK_TEXTS)


# --- paths ----------------------------------------------------------------------------------------
def conf_folder() -> Path:
    """Return the folder of the configuration files, in an installed package or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def user_path(text: str | Path) -> Path:
    """Convert text of the user to a path; ~ at the start of the text is the home folder.

    Nothing needs to exist there. Raise `RefusedError` for text that cannot be a path.
    """
    if "\0" in str(text):
        raise RefusedError(
            f"{str(text)!r} is not a path, because it contains a NUL character. Remove it."
        )
    try:
        str(text).encode()
    except UnicodeEncodeError:
        raise RefusedError(
            f"{str(text)!r} is not valid UTF-8. Rename it, because raysim writes paths as UTF-8."
        ) from None
    try:
        path = Path(text).expanduser()
        path.is_dir()
        return path
    except OSError as error:  # for example, a name that is too long
        raise RefusedError(
            f"{str(text)[:60]}... cannot be used as a path ({error.strerror}). Give another path."
        ) from None
    except RuntimeError:
        raise RefusedError(
            f"{text} names a user whose home folder is unknown. Write the path in full."
        ) from None


def make_folder(path: Path) -> Path:
    """Return the folder at a path; create it if it is missing.

    Raise `RefusedError` if the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise RefusedError(f"{path} is not a folder. Choose another path.")
    path.mkdir(parents=True, exist_ok=True)
    return path


# A password may contain an unescaped slash; host:5000/a@b has a port and no password.
_USER = re.compile(r"://(?:[^/@\s\"]*:(?!\d+/)[^\s\"]*@|[^/\s\"]*@)")
_SECRET = re.compile(
    r"([?&;][\w-]*(?:user|passw|pwd|token|secret|key|sig|credential)[\w-]*=)[^&;\s\"]*",
    re.IGNORECASE,
)


def without_password(text: str) -> str:
    """Return a text without the user names, passwords and tokens in its addresses."""
    bare = _USER.sub("://", text)
    return _SECRET.sub(r"\1", bare)


def regular_file(path: Path) -> Path:
    """Return the path of a file that can be read to its end.

    Raise `RefusedError` if the file is missing, or if the path is a folder, a pipe, a device or a
    link to one.
    """
    if not path.is_file():
        raise RefusedError(f"{path} is not a regular file. Remove it, or put a file there.")
    return path


def existing_file(path: Path) -> list[Path]:
    """Return a list with the path if a regular file exists there, else an empty list.

    Raise `RefusedError` if the path is something else, such as a folder.
    """
    return [regular_file(path)] if os.path.lexists(path) else []


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raise `ValueError` if the text is invalid or nested too deeply. This error does not name the
    file, so a caller that reports it must add the name.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


# --- locks ----------------------------------------------------------------------------------------
@contextlib.contextmanager
def wait_for_folder(folder: Path, setting: str) -> Iterator[None]:
    """Lock a folder inside `with`; wait while another process has locked it.

    A missing folder is created, and a long wait is reported on stderr.
    setting: the key of the configuration that chose the folder.
    Raise `ValueError` with this key if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a+")
    except OSError as error:
        raise ValueError(
            f"{setting}: {folder} cannot be written ({error}). Give another folder."
        ) from error
    with handle:
        if not _lock_soon(handle):
            print(
                f"raysim: waiting for {_owner(handle)}, which writes {folder}",
                file=sys.stderr,
                flush=True,
            )
            _lock(handle, wait=True)
        _write_owner(handle)
        yield


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run's folder inside `with`; raise `RefusedError` if another process has locked it."""
    path = folder / LOCK_FILE
    if path.exists() and not path.is_file():
        raise RefusedError(f"{path} cannot be locked, because it is not a regular file. Remove it.")
    with path.open("a+") as handle:
        if not _lock(handle):
            raise RefusedError(
                f"{folder} is in use by {_owner(handle)}. "
                "Wait until it ends, or choose another folder."
            )
        _write_owner(handle)
        yield


def _lock_soon(handle: TextIO) -> bool:
    """Lock a file; return False if another process has locked it during the whole wait.

    The function waits at most `SILENT_WAIT_S` seconds. The lock lasts until the file is closed.
    """
    deadline = time.monotonic() + SILENT_WAIT_S
    while not _lock(handle):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _lock(handle: TextIO, wait: bool = False) -> bool:
    """Lock a file until it is closed; return False if another process has locked it.

    On network file systems without locks it returns True in every process.
    wait: True waits until no other process has locked the file.
    """
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def this_process() -> str:
    """Return text that names this process and its machine: "process 7 on node-a"."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _write_owner(handle: TextIO) -> None:
    with contextlib.suppress(OSError):  # a full disk is reported at the next write
        handle.truncate(0)
        handle.write(this_process())
        handle.flush()


def _owner(handle: TextIO) -> str:
    handle.seek(0)
    return handle.read() or "another process"
