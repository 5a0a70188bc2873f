"""A cluster's job server: reach it, submit a job, follow its output, learn how it ended."""

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

if "ray" not in sys.modules:  # which reads it when it is imported
    os.environ.setdefault("RAY_AUTH_MODE", "token")

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

PORT = 8265  # where Ray's dashboard and job server listen
OF_RAY = re.compile(
    r"^(.*INFO job_manager\.py:\d+ -- |Running entrypoint for job ).*\n", re.MULTILINE
)  # before the job's
PATIENCE = 5.0  # seconds until a machine that does not answer is given up


def address(given: str | None) -> str:
    """The job server's URL: as given, else as Ray's own variables say, else on this machine. Raises ValueError."""
    text = given or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or ""
    if text in ("", "auto", "local"):
        text = f"http://127.0.0.1:{PORT}"
    url = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = url.port or (443 if url.scheme == "https" else PORT)
    except ValueError:
        port = 0
    if url.scheme not in ("http", "https") or not url.hostname or not port:
        raise ValueError(f"--address {text} is no job server: name it as http://HOST:{PORT}")
    return f"{url.scheme}://{url.netloc.rpartition('@')[2].removesuffix(f':{port}')}:{port}"


def connect(url: str) -> JobSubmissionClient:
    """A client of the job server at `url`, whose token was accepted. Raises ValueError."""
    _check_token_file()
    parts = urlsplit(url)
    try:  # Ray would try for minutes
        socket.create_connection(
            (str(parts.hostname), int(parts.port or PORT)), timeout=PATIENCE
        ).close()
    except OSError as error:
        raise ValueError(
            f"--address {url}: no cluster answers there ({error}): start one with `ray start --head`, or open a "
            "tunnel to its head node with `ray dashboard` or `kubectl port-forward`"
        ) from error
    os.environ["RAY_API_SERVER_ADDRESS"] = url  # Ray prefers it to its argument
    for handler in logging.getLogger("ray").handlers:
        handler.setLevel(logging.WARNING)
    try:
        return JobSubmissionClient(url)
    except AuthenticationError as error:
        raise ValueError(_refused(url, str(error))) from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(
            f"--address {url}: what answers there is no Ray job server ({_first(error)})"
        ) from error


def _check_token_file() -> None:
    """Ray ends the process where the file that it is told to read is not there."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if (
        path
        and not os.environ.get("RAY_AUTH_TOKEN")
        and not (Path(path).is_file() and Path(path).read_text().strip())
    ):
        raise ValueError(
            f"RAY_AUTH_TOKEN_PATH={path} holds no token: put the cluster's token there"
        )


def _refused(url: str, reason: str) -> str:
    place = "~/.ray/auth_token"
    if os.environ.get("RAY_AUTH_TOKEN_PATH"):
        place = f"RAY_AUTH_TOKEN_PATH={os.environ['RAY_AUTH_TOKEN_PATH']}"
    if os.environ.get("RAY_AUTH_TOKEN"):
        place = "RAY_AUTH_TOKEN"
    if (
        "Missing" in reason or "couldn't find" in reason
    ):  # the cluster's words, and Ray's own before it asks anybody
        return (
            f"the cluster at {url} asks for its token, and this process has none: put the token into "
            "~/.ray/auth_token or name its file in RAY_AUTH_TOKEN_PATH, with RAY_AUTH_MODE=token"
        )
    return f"the cluster at {url} refuses the token in {place}: put the token there that its nodes were started with"


def submit(client: JobSubmissionClient, entrypoint: str, runtime_env: Mapping[str, Any]) -> str:
    """Upload the working directory if the cluster lacks it, and start the job; its id. Raises ValueError."""
    try:
        return str(client.submit_job(entrypoint=entrypoint, runtime_env=dict(runtime_env)))
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        text = _first(error)
        if "No available agent" in text:
            text = (
                "the agent of its head node is not up; where that goes on, another Ray on that machine has taken the "
                "agent's port: end it, or start the head with --dashboard-agent-listen-port=52366"
            )
        raise ValueError(
            f"the cluster at {client.get_address()} does not take the job: {text}"
        ) from error


def follow(client: JobSubmissionClient, job: str, write: Callable[[str], object]) -> None:
    """Hand over the job's output as it comes, to its end. Raises RunStoppedError where the connection breaks."""

    async def pass_on() -> None:
        async for text in client.tail_job_logs(job):
            write(OF_RAY.sub("", text))

    try:
        asyncio.run(pass_on())
    except (OSError, RuntimeError) as error:
        from raysim.simulation.events import RunStoppedError  # here, because it brings torch along

        raise RunStoppedError(
            f"the connection to {client.get_address()} broke ({_first(error)}), but the job goes on: "
            f"{again(client.get_address(), job)}"
        ) from error


def status(client: JobSubmissionClient, job: str) -> tuple[int, str]:
    """How a job ended, once it has: its exit status, and a sentence where it did not end by itself.

    A signal n gives 128 + n, as in a shell; a job that was stopped 130.
    """
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(0.2)
    if details.status == JobStatus.SUCCEEDED:
        return 0, ""
    if details.status == JobStatus.STOPPED:
        return 130, f"job {job} was stopped"
    if details.driver_exit_code is None:
        return (
            1,
            f"job {job} could not run: {' '.join((details.message or 'no reason is known').split())}",
        )
    code = int(details.driver_exit_code)
    if code > 0 and code != 128 + signal.SIGKILL:
        return code, ""  # it has said why
    number = code - 128 if code > 0 else -code
    why = ", most often for want of memory" if number == signal.SIGKILL else ""
    return (
        128 + number,
        f"job {job} was ended by signal {number}{why}: submitted again with resume=latest, it goes on",
    )


def again(url: str, job: str) -> str:
    """How to look at a job again, and to stop it."""
    return (
        f"`RAY_AUTH_MODE=token ray job logs --address {url} --follow {job}` shows it again, "
        f"`RAY_AUTH_MODE=token ray job stop --address {url} {job}` stops it"
    )


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
