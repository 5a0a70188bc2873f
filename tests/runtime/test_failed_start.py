"""Test the errors if Ray does not start, or if a cluster cannot be joined.

They say why, and which setting to change.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from raysim.runtime.ray import ray
from raysim.runtime.ray.failures import describe_failed_start

LOG = """\
[2026-01-01 00:00:00,000 I 1 1] (gcs_server) event.cc:499: Ray Event initialized for GCS
[2026-01-01 00:00:01,000 E 1 1] (gcs_server) logging.cc:118: \
Unhandled exception: Too many open files [system:24]
[2026-01-01 00:00:01,000 E 1 1] (gcs_server) logging.cc:474: PC: @     0x7f38674a8eec  (unknown)
"""
MISSING = "validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: "


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set Ray's temporary folder to an empty folder, and return it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path


def test_error_of_a_too_long_ray_path_contains_length_and_environment_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{folder}/ray/session/sockets/plasma_store"
    text = describe_failed_start("local", OSError(MISSING + path))
    assert (
        text.startswith(f"RAY_TMPDIR={folder}: ")
        and f"{len(path)} bytes" in text
        and "Set RAY_TMPDIR" in text
    )
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(folder))
    assert describe_failed_start("local", OSError(MISSING + path)).startswith(f"TMPDIR={folder}: ")


def test_error_of_a_failed_ray_start_shows_the_cause_from_the_ray_log(folder: Path) -> None:
    logs = folder / f"ray/session_2026-01-01_{os.getpid()}" / "logs"
    logs.mkdir(parents=True)
    (logs / "gcs_server.out").write_text(LOG)
    text = describe_failed_start("local", RuntimeError("Timed out waiting for file /tmp/port"))
    assert (
        text.startswith("runtime=local: ")
        and "Too many open files [system:24]" in text
        and "ulimit -n" in text
    )
    assert "0x7f38674a8eec" not in text


@pytest.mark.parametrize(
    ("error", "key", "advice"),
    [
        (PermissionError(13, "Permission denied", "/x/ray"), "RAY_TMPDIR=", "a folder of your own"),
        (OSError(28, "No space left on device", "/x/ray"), "RAY_TMPDIR=", "another disk"),
        (OSError(30, "Read-only file system", "/x/ray"), "RAY_TMPDIR=", "another folder"),
        (OSError(12, "Cannot allocate memory"), "runtime=local", "End other processes"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "runtime=local", "ulimit -u"),
        (RuntimeError("can't start new thread"), "runtime=local", "ulimit -u"),
        (OSError(98, "Address already in use"), "runtime=local", "Start again"),
        (
            ValueError("The configured object store memory of 10 bytes is too small"),
            "runtime=local",
            "/dev/shm",
        ),
        (
            PermissionError(13, "Permission denied", "/root/.ray/auth_token"),
            "HOME=",
            "RAY_AUTH_TOKEN_PATH",
        ),
        (ray.exceptions.AuthenticationError("invalid"), "RAY_AUTH_TOKEN", "Correct it"),
        (RuntimeError("something new"), "runtime=local", "session_latest/logs"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_error_of_a_failed_ray_start_contains_the_setting_to_change_and_advice(
    error: Exception, key: str, advice: str, folder: Path
) -> None:
    text = describe_failed_start("local", error)
    assert text.startswith(key) and advice in text and text.endswith("or use runtime=inprocess.")
    assert "Use runtime=local" not in text


def test_error_of_a_temporary_folder_in_shared_memory_names_the_folder_and_not_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/dev/shm/me")
    text = describe_failed_start("local", OSError(20, "Not a directory", "/dev/shm/me/ray"))
    assert text.startswith("RAY_TMPDIR=/dev/shm/me: ") and "a folder that exists" in text
    full = RuntimeError("cannot allocate 10 bytes in /dev/shm")
    assert "docker run --shm-size" in describe_failed_start("local", full)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "ray start --head"),
        (socket.gaierror(-2, "Name or service not known"), "Correct the name"),
        (TimeoutError("timed out"), "open its port"),
        (ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"), "RAY_AUTH_TOKEN"),
        (ray.exceptions.AuthenticationError("no token"), "auth_token"),
        (
            RuntimeError("Version mismatch: The cluster was started with:\n Ray: 2.1"),
            "same versions",
        ),
        (ConnectionError("Could not find any running Ray instance."), "ray start --head"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_error_contains_address_and_advice_if_raysim_cannot_join_a_cluster(
    error: Exception, advice: str
) -> None:
    text = describe_failed_start("10.0.0.1:6379", error)
    assert text.startswith("runtime.address=10.0.0.1:6379: ") and advice in text


def test_error_says_that_a_cluster_without_a_given_address_may_have_ended() -> None:
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    text = describe_failed_start("auto", error)
    assert text.startswith("runtime.address=auto: ")
    assert "10.0.0.1:6379" in text and "may have ended" in text and "ray start --head" in text
    assert "listens" not in text


PROGRAM = """
import json, os, sys
from raysim.runtime import ray
from raysim.runtime.placement import RayOptions

for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    try:
        ray.connect(RayOptions())
        print("connected")
        ray.disconnect()
    except ValueError as error:
        print(error)
    for name in variables:
        del os.environ[name]
"""


@pytest.mark.slow
def test_error_contains_the_environment_variable_of_a_wrong_temporary_folder(
    tmp_path: Path,
) -> None:
    long = tmp_path / ("x" * max(1, 90 - len(str(tmp_path))))
    long.mkdir()
    file = tmp_path / "file"
    file.touch()
    cases = [{"TMPDIR": str(long)}, {"RAY_TMPDIR": str(file)}, {"RAY_TMPDIR": "/proc/nothing"}]
    command = [sys.executable, "-c", PROGRAM, json.dumps(cases)]
    environment = {
        key: value for key, value in os.environ.items() if key not in ("TMPDIR", "RAY_TMPDIR")
    }
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    lines = ended.stdout.splitlines()
    for line, case in zip(lines, cases, strict=True):
        ((name, value),) = case.items()
        assert line.startswith(f"{name}={value}: ") and "Set RAY_TMPDIR to a folder" in line
    assert "107 are allowed" in lines[0]
