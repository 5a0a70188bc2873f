"""Implement `raysim fetch`: copy the results of a submitted command to this machine.

Here a job is a job of Ray. The node that ran the job has the results. A second job, started through
Ray's job server, packs the results folder on this node and prints it as text. If the results are at
a URL, they are read from there, without a second job.
"""

from __future__ import annotations

import base64
import io
import shlex
import sys
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raysim.commands.submit import job_server
from raysim.primitives.errors import RefusedError, errors_as_refusals, first_line
from raysim.primitives.files import make_folder, without_password
from raysim.primitives.stores import fetch_files, is_url, open_store, split_address
from raysim.results.stored_runs import CHECKPOINTS, is_result_file

# The program of the second job. It needs Python's standard library only.
# Arguments: the folder, the largest number of bytes, and names to leave out in it and below it.
PROGRAM = """\
import base64, os, sys, tarfile, tempfile
folder, limit, *left_out = sys.argv[1:]
folder = os.path.expanduser(folder)
def keep(member):
    return None if os.path.basename(member.name) in left_out else member
if not os.path.isdir(folder):
    sys.exit("ERROR no folder " + os.path.abspath(folder))
with tempfile.TemporaryFile() as archive:
    with tarfile.open(fileobj=archive, mode="w:gz") as packed:
        for name in sorted(os.listdir(folder)):
            packed.add(os.path.join(folder, name), name, filter=keep)
    if archive.tell() > int(limit):
        sys.exit(f"ERROR {archive.tell()} bytes")
    archive.seek(0)
    print("BEGIN")
    for part in iter(lambda: archive.read(57000), b""):
        print(base64.b64encode(part).decode())
    print("END")
"""
BEGIN, END, ERROR = "BEGIN", "END", "ERROR "
MB = 1_000_000
TINY_SHARE = 0.001  # of a node's resource; the request makes Ray choose this node


def fetch(
    job: str,
    target: str | None = None,
    address: str | None = None,
    folder: str | None = None,
    checkpoints: bool = False,
    limit_mb: float = 200.0,
) -> Path:
    """Copy the results of a Ray job into a folder on this machine, and return the folder.

    The job may still be running. Files of the same name on this machine are replaced.
    job: the id that `raysim submit` prints, or the URL of a run.
    target: the folder here; None takes the name of the job's folder, in the current folder.
    address: the URL of the job server; None reads Ray's environment variables, or takes the local
    server.
    folder: the results folder on the job's node; None takes out= of the job's command.
    limit_mb: the largest size in MB of the packed folder; not used for results at a URL.
    Raise `RefusedError` for a missing job or folder, or a folder above the limit. Raise
    `RunStoppedError` if the connection is lost for too long.
    """
    if is_url(job):
        return _fetch_url(job, target, checkpoints)
    with errors_as_refusals():
        client = job_server.connect(job_server.find_address(address))
    details = _details(client, job)
    remote = folder or find_folder(details.entrypoint)
    if not remote:
        raise RefusedError(
            f"job {job} has no out= in its command ({details.entrypoint}). Give its folder with "
            "--folder."
        )
    if is_url(remote):
        return _fetch_url(remote, target, checkpoints)
    local = Path(target or Path(remote).name)
    if local.exists() and not local.is_dir():
        raise RefusedError(f"{local} is a file. Give a folder for the results.")
    left_out = [] if checkpoints else [CHECKPOINTS]
    words = ["python", "-c", PROGRAM, remote, str(int(limit_mb * MB)), *left_out]
    text = _run_on_node_of(client, details, shlex.join(words))
    unpack(read_archive(text, remote, job, limit_mb), local)
    return local


def _fetch_url(url: str, target: str | None, checkpoints: bool) -> Path:
    """Copy results from a URL; return the folder of the copy.

    url: where a run wrote, such as s3://bucket/first.
    target: the local folder; None takes the last part of the URL.
    Raise `RefusedError` if the URL has no files.
    """

    def is_needed(name: str) -> bool:
        return is_result_file(name) or (checkpoints and name.startswith(f"{CHECKPOINTS}/"))

    with errors_as_refusals():
        store = open_store(url)
        if not store.files():
            raise RefusedError(
                f"{without_password(url)} has no files. Give a URL to which `raysim run out=URL` "
                "wrote."
            )
        folder = make_folder(Path(target or split_address(url)[1]))
        fetch_files(store, folder, is_needed)
    return folder


def _details(client: Any, job: str) -> Any:
    try:
        return client.get_job_info(job)
    except (OSError, RuntimeError) as error:
        address = client.get_address()
        raise RefusedError(
            f"job {job}: {address} returns no details of it ({first_line(error).rstrip('.')}). "
            f"`RAY_AUTH_MODE=token ray job list --address {address}` shows the jobs."
        ) from error


def find_folder(entrypoint: str) -> str:
    """Return the value of `out=` in a job's command; "" without one.

    entrypoint: the command line of the job.
    """
    for word in reversed(shlex.split(entrypoint)):
        key, equals, value = word.partition("=")
        if equals and key == "out":
            return value.strip("\"'")
    return ""


def _run_on_node_of(client: Any, details: Any, entrypoint: str) -> str:
    """Run a command on the node and in the folder of a job; return the text that it prints.

    If the job server does not know the node, Ray chooses one.
    details: Ray's `JobDetails` of the job.
    Raise `RefusedError` if the job server refuses the command, and `RunStoppedError` if the server
    no longer answers.
    """
    from raysim.simulation.events import RunStoppedError  # here, because it imports torch

    environment = {
        key: value
        for key, value in (details.runtime_env or {}).items()
        if key == "working_dir"  # relative folders are inside the working directory
    }
    options: dict[str, Any] = {}
    host = urlsplit(details.driver_agent_http_address or "").hostname
    if host:
        options["entrypoint_resources"] = {f"node:{host}": TINY_SHARE}
    try:
        job = client.submit_job(entrypoint=entrypoint, runtime_env=environment, **options)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise RefusedError(
            f"{client.get_address()} did not accept the job that packs the results "
            f"({first_line(error)}). Correct the cause, or copy the results folder from the node "
            "that wrote it."
        ) from error
    output: list[str] = []
    connection = job_server.ConnectionToJob(client, job, output.append, _say)
    try:
        connection.follow()
        job_server.wait_for_end(connection)
    except RunStoppedError as error:
        raise RunStoppedError(
            f"{client.get_address()} no longer answers for job {job}, which packs the results. Run "
            "`raysim fetch` again as soon as the job server answers."
        ) from error
    return "".join(output)


def read_archive(text: str, folder: str, job: str, limit_mb: float) -> bytes:
    """Return the bytes of the archive that a packing job has printed as base64 text.

    The packing job ran on the node that has the results of the Ray job `job`.
    text: everything that the packing job has printed.
    folder, job, limit_mb: the results folder, the job and the size limit in MB, for errors.
    Raise `RefusedError` if the text has an error or no whole archive.
    """
    lines = text.splitlines()
    for line in lines:
        if line.startswith(ERROR + "no folder"):
            raise RefusedError(
                f"job {job}: the run's results folder is missing on the job's node "
                f"({line.removeprefix(ERROR)}). Wait until the run has started, or give the folder "
                "with --folder."
            )
        if line.startswith(ERROR):
            size_mb = int(line.removeprefix(ERROR).split()[0]) / MB
            raise RefusedError(
                f"--limit {limit_mb:g} MB: the archive of {folder} is larger, {size_mb:.0f} MB. "
                f"Set --limit {size_mb + 1:.0f}, or copy the folder from its node."
            )
    if BEGIN not in lines or END not in lines:
        reason = lines[-1] if lines else "it printed nothing"
        raise RefusedError(
            f"job {job}: the node that ran this job could not pack the results ({reason}). "
            "Correct the cause, or copy the results folder from that node."
        )
    encoded = lines[lines.index(BEGIN) + 1 : lines.index(END)]
    return b"".join(map(base64.b64decode, encoded))


def unpack(archive: bytes, folder: Path) -> None:
    """Unpack an archive into a folder; existing files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
        packed.extractall(folder, filter="data")


def _say(text: str) -> None:
    sys.stderr.write(f"raysim: {text}\n")
