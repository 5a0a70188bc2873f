"""Use a cluster's job server: connect, submit a job, print its output, wait for its end.

Here a job is a job of Ray, which executes a command of raysim.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if "ray" not in sys.modules:  # Ray reads this variable when it is imported
    os.environ.setdefault("RAY_AUTH_MODE", "token")

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from raysim.primitives.errors import first_line

PORT = 8265  # of Ray's dashboard and job server
# Lines that Ray prints before the job's own output.
RAY_LINES = re.compile(
    r"^(.*INFO job_manager\.py:\d+ -- |Running entrypoint for job ).*\n", re.MULTILINE
)
CONNECT_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.2
RECONNECT_S = 120.0  # seconds of attempts to reconnect
RECONNECT_INTERVAL_S = 2.0
INTERRUPTED = 130  # the exit status of a command that Ctrl-C stops
SIGNAL_STATUS = 128  # added to a signal's number, as in a shell


def find_address(address: str | None) -> str:
    """Return the job server's URL.

    address: the URL; None reads Ray's environment variables. Without these, the server is on this
    machine.
    Raise `ValueError` for an invalid address.
    """
    origin, text = "--address ", address
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        if not text:
            origin, text = f"{name}=", os.environ.get(name)
    if text in (None, "", "auto", "local"):
        text = f"http://127.0.0.1:{PORT}"
    url = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = url.port or (443 if url.scheme == "https" else PORT)
    except ValueError:
        port = 0
    if url.scheme not in ("http", "https") or not url.hostname or not port:
        raise ValueError(f"{origin}{text} is not a job server. Give it as http://HOST:{PORT}")
    host = url.netloc.rpartition("@")[2].removesuffix(f":{port}")
    return f"{url.scheme}://{host}:{port}"


def connect(url: str) -> JobSubmissionClient:
    """Connect to the job server; return the connection, Ray's `JobSubmissionClient`.

    Raise `ValueError` if no job server answers at this URL. Also raise it if Ray's authentication
    token of this machine is missing, or is not accepted.
    """
    _check_token_file()
    _check_connection(url)
    os.environ["RAY_API_SERVER_ADDRESS"] = url  # Ray prefers this variable to the argument
    for handler in logging.getLogger("ray").handlers:
        handler.setLevel(logging.WARNING)
    try:
        return JobSubmissionClient(url)
    except AuthenticationError as error:
        raise ValueError(_describe_refusal(url, str(error))) from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"--address {url}: this address is not a Ray job server ({first_line(error)}). Check "
            "host and port."
        ) from error


def _check_connection(url: str) -> None:
    """Raise `ValueError` if no server answers; without this check Ray would try for minutes."""
    parts = urlsplit(url)
    target = (str(parts.hostname), int(parts.port or PORT))
    try:
        socket.create_connection(target, timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(
            f"--address {url}: no cluster answers ({error}). Start one with `ray start --head`, or "
            "open a tunnel to its head node with `ray dashboard` or `kubectl port-forward`."
        ) from error


def _check_token_file() -> None:
    """Raise `ValueError` if RAY_AUTH_TOKEN_PATH names a file that is missing or empty.

    The file is not needed if RAY_AUTH_TOKEN is set. Without this check, Ray would end the process.
    """
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if not path or os.environ.get("RAY_AUTH_TOKEN"):
        return
    if not (Path(path).is_file() and Path(path).read_text().strip()):
        raise ValueError(
            f"RAY_AUTH_TOKEN_PATH={path}: this file is missing or empty. Put the cluster's token "
            "there."
        )


def _describe_refusal(url: str, reason: str) -> str:
    # The first texts come from the cluster, the others from Ray before it asks the cluster.
    if "Missing" in reason or "couldn't find" in reason:
        return (
            f"--address {url}: the cluster needs a token, but this process has none. Put the token "
            "into ~/.ray/auth_token or name its file in RAY_AUTH_TOKEN_PATH, with "
            "RAY_AUTH_MODE=token"
        )
    place = "~/.ray/auth_token"
    if os.environ.get("RAY_AUTH_TOKEN_PATH"):
        place = f"RAY_AUTH_TOKEN_PATH={os.environ['RAY_AUTH_TOKEN_PATH']}"
    if os.environ.get("RAY_AUTH_TOKEN"):
        place = "RAY_AUTH_TOKEN"
    return (
        f"--address {url}: the cluster does not accept the token in {place}. Put the token of its "
        "nodes there"
    )


def submit(client: JobSubmissionClient, entrypoint: str, runtime_env: Mapping[str, Any]) -> str:
    """Start a job and return its id.

    entrypoint: the command line of the job.
    runtime_env: Ray's description of the job's environment, with the working directory to upload.
    Raise `ValueError` if the cluster does not accept the job.
    """
    try:
        return str(client.submit_job(entrypoint=entrypoint, runtime_env=dict(runtime_env)))
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        reason = first_line(error)
        if "No available agent" in reason:
            reason = (
                "the agent of its head node is not up; if that lasts, another Ray on that machine "
                "has taken the agent's port: end it, or start the head with "
                "--dashboard-agent-listen-port=52366"
            )
        address = client.get_address()
        raise ValueError(
            f"--address {address}: the cluster does not accept the job: {reason.rstrip('.')}. "
            "Correct the cause, and submit the job again."
        ) from error


class ConnectionToJob:
    """A connection to a running Ray job, which reconnects if the connection breaks.

    All methods raise `RunStoppedError` if reconnecting takes longer than `wait_s` seconds, or if
    the job server does not know the job.

    client: the result of `connect`.
    write: function that gets the job's output.
    say: function that gets a line about a broken connection.
    """

    def __init__(
        self,
        client: JobSubmissionClient,
        job: str,
        write: Callable[[str], object],
        say: Callable[[str], object],
        wait_s: float = RECONNECT_S,
    ):
        self.client, self.job = client, job
        self._write, self._say, self._wait_s = write, say, wait_s
        self._written = 0  # characters of the job's log that were written
        self._broken_since: float | None = None

    def follow(self) -> None:
        """Write the job's output until the job ends.

        After a reconnection, output that was written before is not written again.
        """
        while True:
            try:
                asyncio.run(self._pass_on())
                return
            except (OSError, RuntimeError) as error:
                self._wait_to_reconnect(error)

    async def _pass_on(self) -> None:
        position = 0
        # Each connection sends the log from its beginning.
        async for text in self.client.tail_job_logs(self.job):
            self._broken_since = None
            new = text[max(0, self._written - position) :]
            position += len(text)
            if new:
                self._written = position
                self._write(RAY_LINES.sub("", new))

    def details(self) -> Any:
        """Return Ray's `JobDetails`."""
        while True:
            try:
                details = self.client.get_job_info(self.job)
                self._broken_since = None
                return details
            except (OSError, RuntimeError) as error:
                self._wait_to_reconnect(error)

    def _wait_to_reconnect(self, error: Exception) -> None:
        """Wait before the next try; raise `RunStoppedError` if no further try makes sense.

        This is so if the time for tries is over, or if the job server does not know the job.
        """
        from raysim.simulation.events import RunStoppedError  # here, because it imports torch

        address = self.client.get_address()
        if "does not exist" in str(error):
            raise RunStoppedError(
                f"the job server at {address} does not know job {self.job} any more, most often "
                "because the head node was started again. Submit the job again with resume=latest "
                "to continue from its last checkpoint."
            ) from error
        now = time.monotonic()
        if self._broken_since is None:
            self._broken_since = now
            self._say(
                f"the connection to {address} was lost ({first_line(error)}); trying again for "
                f"{self._wait_s:g} s. The job does not need this connection"
            )
        if now - self._broken_since >= self._wait_s:
            raise RunStoppedError(
                f"job {self.job}: the job server at {address} has not answered for "
                f"{self._wait_s:g} s. If Ray still runs on its head node, the job continues: "
                f"{describe_commands(address, self.job)}. Otherwise start Ray there again and "
                "submit the same command with resume=latest, which continues from the last "
                "checkpoint."
            ) from error
        time.sleep(min(RECONNECT_INTERVAL_S, self._wait_s))


def wait_for_end(connection: ConnectionToJob) -> tuple[int, str]:
    """Wait for a job's end; return its exit status, and a sentence that says why it ended.

    The sentence is "" if the job's command exited. The status is 128 + n after signal n, 130 if the
    user stopped the job, and 1 if Ray knows no status.
    """
    job, details = connection.job, connection.details()
    while not details.status.is_terminal():
        time.sleep(POLL_INTERVAL_S)
        details = connection.details()
    if details.status == JobStatus.SUCCEEDED:
        return 0, ""
    if details.status == JobStatus.STOPPED:
        return INTERRUPTED, f"job {job} was stopped"
    if details.driver_exit_code is None:
        reason = " ".join((details.message or "no reason is known").split())
        return 1, f"job {job} failed: {reason}"
    code = int(details.driver_exit_code)
    if code > 0 and code != SIGNAL_STATUS + signal.SIGKILL:
        return code, ""  # the job has printed the reason
    number = code - SIGNAL_STATUS if code > 0 else -code
    reason = ", most often because of missing memory" if number == signal.SIGKILL else ""
    sentence = (
        f"job {job} was ended by signal {number}{reason}. "
        "Submit it again with resume=latest to continue"
    )
    return SIGNAL_STATUS + number, sentence


def describe_commands(url: str, job: str) -> str:
    """Return a text with two commands for a Ray job: one shows its output again, one stops it.

    url: the URL of the job server.
    job: the id of the Ray job.
    """
    return (
        f"`RAY_AUTH_MODE=token ray job logs --address {url} --follow {job}` shows it again, "
        f"`RAY_AUTH_MODE=token ray job stop --address {url} {job}` stops it"
    )
