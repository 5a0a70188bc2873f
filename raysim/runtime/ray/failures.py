"""Why Ray did not start or could not be joined: the cause, with the key or variable that changes it."""

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
SOCKET_PATH_BYTES = 107  # that Linux allows in the path of a socket
START_ONE = "Start one with `ray start --head`, or use runtime=local."
INPROCESS = "or use runtime=inprocess"
_LOGS = ("gcs_server", "raylet")  # of the processes without which nothing starts
_ERROR_LINE = re.compile(
    r"^\[[^\]]* [EFC] [^\]]*\]\s*(?:\([^)]*\)\s*)?(?:\S+:\d+:\s*)?(?P<message>.*)$"
)
_LOGGED_CHARACTERS = 200  # of a log's line that an error repeats


@dataclass(frozen=True)
class _Cause:
    """A cause by the words that Ray or the operating system have for it, and what to do."""

    words: tuple[str, ...]
    meaning: str
    advice: str


_CAUSES = (
    _Cause(
        ("Too many open files", "Errno 24"),
        "this process may open too few files",
        "Raise the limit with `ulimit -n`",
    ),
    _Cause(
        ("Resource temporarily unavailable", "can't start new thread", "Errno 11"),
        "this user may start too few processes and threads",
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
        "the disk is full",
        "Free space there, or set RAY_TMPDIR to a folder on another disk",
    ),
    _Cause(
        ("Read-only file system", "Errno 30"),
        "the folder is read-only",
        "Set RAY_TMPDIR to another folder",
    ),
    _Cause(
        ("Permission denied", "Operation not permitted", "Errno 13", "Errno 1]"),
        "this user may not write there",
        "Set RAY_TMPDIR to a folder of your own",
    ),
    _Cause(
        ("Not a directory", "No such file or directory", "File exists", "Errno 20", "Errno 2]"),
        "there is no such folder, and it cannot be made",
        "Set RAY_TMPDIR to a folder that exists",
    ),
)


def describe_failed_start(address: str, error: BaseException) -> str:
    """Return a sentence for an error that Ray raised: the key, what is wrong, what to do.

    address: "local" for a cluster that this process started, else that of one to join.
    """
    if "Version mismatch" in str(error):
        text = " ".join(str(error).split())
        return f"runtime.address={address}: {text}. Install the same versions in both places."
    return _describe_local(error) if address == LOCAL else _describe_joining(address, error)


# --- a cluster that is joined ---------------------------------------------------------------------------------------
def _describe_joining(address: str, error: BaseException) -> str:
    key, text = f"runtime.address={address}", str(error)
    if isinstance(error, ray.exceptions.AuthenticationError):
        return (
            f"{key}: this process has no token for the cluster. Copy ~/.ray/auth_token from its head node, or set "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
        )
    if isinstance(error, ConnectionRefusedError):
        return f"{key}: nothing listens there ({error.strerror}). {START_ONE}"
    if isinstance(error, socket.gaierror):
        return f"{key}: the name of the machine is not known ({error.strerror}). Correct it. {START_ONE}"
    if isinstance(error, TimeoutError):
        return f"{key}: the machine does not answer. Correct the address, or open its port. {START_ONE}"
    if "Failed to connect to Ray cluster" in text:
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        return (
            f"{key}: something listens there, but it does not accept this process. If it is a Ray cluster, its token "
            f"or RAY_AUTH_MODE differs (here {mode}). Copy ~/.ray/auth_token from its head node, or set RAY_AUTH_TOKEN "
            "and RAY_AUTH_MODE as there; else correct the address."
        )
    return f"{key}: no Ray cluster could be joined there ({first_line(error)}). {START_ONE}"


# --- a cluster of this machine's own --------------------------------------------------------------------------------
def _describe_local(error: BaseException) -> str:
    text = str(error)
    variable, folder = _temporary_folder()
    if "AF_UNIX path length" in text:
        socket_path = text.rpartition(": ")[2]
        return (
            f"{variable}={folder}: the path is too long for Ray. Its sockets in this folder would have paths of "
            f"{len(socket_path.encode())} bytes, and {SOCKET_PATH_BYTES} are allowed. Set RAY_TMPDIR to a folder with "
            f"a short path, such as /tmp, {INPROCESS}."
        )
    if isinstance(error, OSError) and error.filename and ".ray" in Path(error.filename).parts:
        return (
            f"HOME={os.environ.get('HOME', '')}: Ray cannot write its token there ({error.strerror}: "
            f"{error.filename}). Set HOME to a folder of your own, set RAY_AUTH_TOKEN_PATH to a file with a token, "
            f"{INPROCESS}."
        )
    if isinstance(error, ray.exceptions.AuthenticationError):
        return f"RAY_AUTH_TOKEN: Ray does not accept the token ({first_line(error)}). Correct it, {INPROCESS}."
    logged = "" if isinstance(error, OSError) else _logged_error(Path(folder))
    said = f"{first_line(error)}; its log says: {logged}" if logged else first_line(error)
    # The log names the cause; an error about a file that never appeared names what followed from it.
    cause = _find_cause(logged) or _find_cause(text)
    key = (
        f"{variable}={folder}" if isinstance(error, OSError) and error.filename else "runtime=local"
    )
    if cause is None:
        return f"{key}: Ray did not start ({said}). Look into {folder}/ray/session_latest/logs, {INPROCESS}."
    return f"{key}: Ray did not start, {cause.meaning} ({said}). {cause.advice}, {INPROCESS}."


def _temporary_folder() -> tuple[str, str]:
    """Return the variable that names the folder in which Ray puts its sockets and logs, and that folder."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if folder := os.environ.get(variable):
            return variable, folder
    return "TMPDIR", tempfile.gettempdir()


def _find_cause(text: str) -> _Cause | None:
    return next((cause for cause in _CAUSES if any(words in text for words in cause.words)), None)


def _logged_error(folder: Path) -> str:
    """Return the first error in the logs of the cluster that this process tried to start; "" if there is none."""
    sessions = sorted(folder.glob(f"ray/session_*_{os.getpid()}"))
    for name in _LOGS if sessions else ():
        for ending in ("out", "err"):
            if message := _first_error(sessions[-1] / "logs" / f"{name}.{ending}"):
                return message
    return ""


def _first_error(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    matches = (match for line in lines if (match := _ERROR_LINE.match(line)))
    message = next((match["message"].strip() for match in matches), "")
    return message if len(message) <= _LOGGED_CHARACTERS else f"{message[:_LOGGED_CHARACTERS]}..."
