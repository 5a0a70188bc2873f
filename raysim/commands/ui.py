"""`raysim ui`: start MLflow's server on the stored runs, and open the charts of their metrics.

MLflow 3 opens an experiment on the page for traces of language models, whatever its tags say. The
address must ask for the charts.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import IO

from raysim.primitives.errors import RefusedError
from raysim.primitives.files import user_path
from raysim.results.tracking import MLFLOW_ENVIRONMENT, find_experiment_id

HOST = "127.0.0.1"
# The filter leaves out studies and sweeps, below which MLflow hides their runs.
CHARTS = (
    "#/experiments/{}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    "&searchFilter=tags.kind%20!%3D%20%27study%27%20and%20tags.kind%20!%3D%20%27sweep%27"
)
# Seen from the folder around runs, from the folder of runs or of a study, and from one run.
DATABASES = ("mlflow.db", "runs/mlflow.db", "../mlflow.db")
START_TIMEOUT_S = 600.0  # generous, because a server that fails ends at once
POLL_INTERVAL_S = 0.2


def show_charts(place: str, port: int, opens_browser: bool) -> int:
    """Serve MLflow's page until Ctrl-C, or open the page of a server; return 0.

    place: a folder that contains runs, or a server's address. Raise `RefusedError` if there is
    nothing to show.
    """
    os.environ.update({**MLFLOW_ENVIRONMENT, **os.environ})
    if place.startswith(("http://", "https://")):
        charts = CHARTS.format(find_experiment_id(place))
        _open_page(f"{place.rstrip('/')}/{charts}", opens_browser)
        return 0
    uri = f"sqlite:///{find_database(place)}"
    charts = CHARTS.format(find_experiment_id(uri))
    if _is_listening(port):
        raise RefusedError(f"--port {port} is taken by another program. Give another one")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background commands ignore the first
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryFile() as log:
        server = _start_server(uri, port, log)
        try:
            _wait_for_server(server, port, log)
            _open_page(f"http://{HOST}:{port}/{charts}", opens_browser)
            print("Ctrl-C ends it", flush=True)
            server.wait()
        except KeyboardInterrupt:
            print()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # its workers, too
            server.wait()
    return 0


def find_database(place: str) -> Path:
    """Return the database that the runs in a folder write, or raise `RefusedError`."""
    folder = user_path(place)
    for name in DATABASES:
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise RefusedError(
        f"{place} has no mlflow.db, which runs write unless tracking=none or tracking.uri is set. "
        "Give the folder that runs are in, or the address of a server"
    )


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex((HOST, port))


def _start_server(uri: str, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    # MLflow's jobs are for language models.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return subprocess.Popen(
        [*command, "--host", HOST, "--port", str(port), "--workers", "1"],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _wait_for_server(server: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    """Wait until the server answers. Raise `RefusedError` if it ends before that."""
    print("MLflow starts", flush=True)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        if _is_listening(port):
            return
        time.sleep(POLL_INTERVAL_S)
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else "it printed nothing"
    raise RefusedError(f"--port {port}: MLflow's server did not start: {reason}")


def _open_page(address: str, opens_browser: bool) -> None:
    print(f"charts: {address}", flush=True)
    if opens_browser:
        webbrowser.open(address)
