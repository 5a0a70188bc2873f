"""Explain why Ray did not start or could not be joined, and say what to change."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ray

from raysim.primitives.errors import first_line

LOCAL = "local"
MAX_SOCKET_PATH_BYTES = 107  # on Linux
START_ONE = "If there is no cluster, start one with `ray start --head`, or use runtime=local."
INPROCESS = "or use runtime=inprocess"
_LOGS = ("gcs_server", "raylet")  # of the processes that every cluster needs
_ERROR_LINE = re.compile(
    r"^\[[^\]]* [EFC] [^\]]*\]\s*(?:\([^)]*\)\s*)?(?:\S+:\d+:\s*)?(?P<message>.*)$"
)
_MAX_LOG_CHARACTERS = 200  # an error repeats at most this many characters of a log line


@dataclass(frozen=True)
class _Cause:
    """A reason why Ray cannot start, and what the user can do.

    words: texts that show this cause, in messages of Ray or of the operating system.
    meaning: the problem, for the user.
    advice: what the user should do.
    """

    words: tuple[str, ...]
    meaning: str
    advice: str


_CAUSES = (
    _Cause(
        ("Too many open files", "Errno 24"),
        "the limit of open files for this process is too low",
        "Raise the limit with `ulimit -n`",
    ),
    _Cause(
        ("Resource temporarily unavailable", "can't start new thread", "Errno 11"),
        "the limit of processes and threads for this user is too low",
        "Raise the limit with `ulimit -u`, or end other processes",
    ),
    _Cause(
        ("Address already in use", "address in use", "Errno 98", "is already in use"),
        "a port that Ray needs is in use by another program",
        "Start again, or end the other program",
    ),
    _Cause(
        ("/dev/shm", "object store memory"),
        "there is too little shared memory for Ray's object store",
        "Enlarge /dev/shm (docker run --shm-size), or end other Ray clusters on this machine",
    ),
    _Cause(
        ("Cannot allocate memory", "bad_alloc", "Errno 12"),
        "there is too little memory",
        "End other processes",
    ),
    _Cause(
        ("No space left on device", "Disk quota exceeded", "Errno 28", "Errno 122"),
        "the disk is full, or this user's quota is used up",
        "Free space there, or set RAY_TMPDIR to a folder on another disk",
    ),
    _Cause(
        ("Read-only file system", "Errno 30"),
        "the file system is read-only",
        "Set RAY_TMPDIR to another folder",
    ),
    _Cause(
        ("Permission denied", "Operation not permitted", "Errno 13", "Errno 1]"),
        "this user lacks a permission",
        "Set RAY_TMPDIR to a folder of your own",
    ),
    _Cause(
        ("Not a directory", "No such file or directory", "File exists", "Errno 20", "Errno 2]"),
        "a file or a folder is missing or cannot be created",
        "Set RAY_TMPDIR to a folder that exists",
    ),
)


def describe_failed_start(address: str, error: BaseException) -> str:
    """Return the text for an error that Ray raised when a cluster was started or joined.

    The text names the wrong setting or environment variable, the problem and what to do.
    address: "local" to start a cluster; otherwise the address of the cluster to join.
    """
    if "Version mismatch" in str(error):
        text = " ".join(str(error).split())
        return f"runtime.address={address}: {text}. Install the same versions in both places."
    if address == LOCAL:
        return _describe_local(error)
    return _describe_joining(address, error)


# --- joining a cluster ----------------------------------------------------------------------
def _describe_joining(address: str, error: BaseException) -> str:
    key, text = f"runtime.address={address}", str(error)
    if isinstance(error, ray.exceptions.AuthenticationError):
        return (
            f"{key}: this process has no token for the cluster. Copy ~/.ray/auth_token from its "
            "head node, or set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
        )
    if isinstance(error, ConnectionRefusedError):
        return f"{key}: no program listens there ({error.strerror}). {START_ONE}"
    if isinstance(error, socket.gaierror):
        return (
            f"{key}: the name of the machine is unknown ({error.strerror}). Correct the name. "
            f"{START_ONE}"
        )
    if isinstance(error, TimeoutError):
        return (
            f"{key}: the machine does not answer. Correct the address, or open its port. "
            f"{START_ONE}"
        )
    if "Failed to connect to Ray cluster" in text:
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        problem = (
            "a program listens there, but does not accept this process. If it is a Ray cluster"
        )
        alternative = "otherwise correct the address."
        if not address.rpartition(":")[2].isdigit():  # only HOST:PORT was tried before Ray tried it
            problem = f"{first_line(error)}, which may have ended. If it is running"
            alternative = f"or correct the address. {START_ONE}"
        return (
            f"{key}: {problem}, its token or RAY_AUTH_MODE differs (here {mode}). Copy "
            "~/.ray/auth_token from its head node, or set RAY_AUTH_TOKEN and RAY_AUTH_MODE as "
            f"there; {alternative}"
        )
    return f"{key}: no Ray cluster could be joined there ({first_line(error)}). {START_ONE}"


# --- starting a cluster ---------------------------------------------------------------------
def _describe_local(error: BaseException) -> str:
    text = str(error)
    variable, folder = _temporary_folder()
    if "AF_UNIX path length" in text:
        socket_path = text.rpartition(": ")[2]
        return (
            f"{variable}={folder}: the path is too long for Ray. Its sockets in this folder would "
            f"have paths of {len(socket_path.encode())} bytes, and {MAX_SOCKET_PATH_BYTES} are "
            f"allowed. Set RAY_TMPDIR to a folder with a short path, such as /tmp, {INPROCESS}."
        )
    if isinstance(error, OSError) and error.filename and ".ray" in Path(error.filename).parts:
        return (
            f"HOME={os.environ.get('HOME', '')}: Ray cannot write its token there "
            f"({error.strerror}: {error.filename}). Set HOME to a folder of your own, set "
            f"RAY_AUTH_TOKEN_PATH to a file with a token, {INPROCESS}."
        )
    if isinstance(error, ray.exceptions.AuthenticationError):
        return (
            f"RAY_AUTH_TOKEN: Ray does not accept the token ({first_line(error)}). Correct it, "
            f"{INPROCESS}."
        )
    logged = "" if isinstance(error, OSError) else _logged_error(Path(folder))
    message = first_line(error)
    if logged:
        message += f"; its log says: {logged}"
    # The log names the cause; the error may name a consequence, such as a missing file. The path
    # of the folder, such as /dev/shm/me, is no sign of a cause.
    cause = _find_cause(logged.replace(folder, "")) or _find_cause(text.replace(folder, ""))
    names_file = isinstance(error, OSError) and bool(error.filename)
    key = f"{variable}={folder}" if names_file else "runtime=local"
    if cause is None:
        logs = f"{folder}/ray/session_latest/logs"
        return f"{key}: Ray did not start ({message}). Read its logs in {logs}, {INPROCESS}."
    return (
        f"{key}: Ray did not start, because {cause.meaning} ({message}). {cause.advice}, "
        f"{INPROCESS}."
    )


def _temporary_folder() -> tuple[str, str]:
    """Return the environment variable that sets Ray's temporary folder, and this folder."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        folder = os.environ.get(variable)
        if folder:
            return variable, folder
    return "TMPDIR", tempfile.gettempdir()


def _find_cause(text: str) -> _Cause | None:
    for cause in _CAUSES:
        if any(words in text for words in cause.words):
            return cause
    return None


def _logged_error(folder: Path) -> str:
    """Return the first error in the logs of the cluster that this process started; else "".

    folder: the folder that contains Ray's sessions.
    """
    sessions = sorted(folder.glob(f"ray/session_*_{os.getpid()}"))
    if not sessions:
        return ""
    for name in _LOGS:
        for ending in ("out", "err"):
            message = _first_error(sessions[-1] / "logs" / f"{name}.{ending}")
            if message:
                return message
    return ""


def _first_error(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        match = _ERROR_LINE.match(line)
        if match is None:
            continue
        message = match["message"].strip()
        if len(message) > _MAX_LOG_CHARACTERS:
            return f"{message[:_MAX_LOG_CHARACTERS]}..."
        return message
    return ""
