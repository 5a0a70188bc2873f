"""Implement `raysim ui`: send stored runs to MLflow's database, and open their charts.

While MLflow's server runs, new rows of runs in progress are sent every few seconds.
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
from typing import IO

from raysim.commands.ui.database import RunDatabase, find_root
from raysim.primitives.errors import RefusedError
from raysim.results.mlflow_server import find_experiment_id, make_experiment, set_mlflow_environment
from raysim.results.tracked_run import read_record

HOST = "127.0.0.1"
# The filter hides studies and sweeps. In its usual order (by creation) MLflow would show them
# nevertheless, with their runs folded below them and without curves. So runs are sorted by name.
# By default, MLflow 3 shows traces of language models in place of charts.
CHARTS = (
    "#/experiments/{}/runs?workflowType=machine_learning&compareRunsMode=CHART"
    "&searchFilter=tags.kind%20!%3D%20%27study%27%20and%20tags.kind%20!%3D%20%27sweep%27"
    "&orderByKey=tags.%60mlflow.runName%60&orderByAsc=true"
)
START_TIMEOUT_S = 600.0  # long, because a server that fails ends at once anyway
POLL_INTERVAL_S = 0.2
UPDATE_INTERVAL_S = 5.0  # between two updates of the runs in progress


def show_charts(folder_or_address: str, port: int, opens_browser: bool) -> int:
    """Show the charts of stored runs in MLflow; return 0.

    folder_or_address: the http address of an MLflow server, or a folder with runs. For a folder, a
    server starts on this machine and runs until Ctrl-C.
    opens_browser: False only prints the page's address.
    Raise `RefusedError` if there is nothing to show or the server cannot start.
    """
    set_mlflow_environment()
    if folder_or_address.startswith(("http://", "https://")):
        charts = CHARTS.format(find_experiment_id(folder_or_address))
        _open_page(f"{folder_or_address.rstrip('/')}/{charts}", opens_browser)
        return 0
    database = RunDatabase(find_root(folder_or_address), _print)
    charts = CHARTS.format(make_experiment(database.uri))
    if _is_listening(port):
        raise RefusedError(f"--port {port} is taken by another program. Give another one.")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background commands ignore the first
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryFile() as log:
        server = _start_server(database.uri, port, log)
        try:
            database.update()
            _wait_for_server(server, port, log)
            _open_page(f"http://{HOST}:{port}/{charts}", opens_browser)
            _print("Ctrl-C ends the server")
            _update_until_end(database, server)
        except KeyboardInterrupt:
            print()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # the server's workers, too
            server.wait()
    return 0


def update_database(path: str) -> int:
    """Send the runs in a folder and their models to this folder's MLflow database; return 0.

    Raise `RefusedError` if `path` is the address of an MLflow server, or if no run has stored data
    for MLflow (tracking=none stores none).
    """
    if path.startswith(("http://", "https://")):
        raise RefusedError(
            f"--update {path}: this is the address of a server, but --update is only for the "
            "database of a folder. A server needs no update, because each run sends its results to "
            "the server. Give a folder with runs."
        )
    database = RunDatabase(find_root(path), _print)
    make_experiment(database.uri)
    count = database.update()
    folders = list(database.add_models())
    models = sum(read_record(folder).get("model") == "sent" for folder in folders)
    _print(f"{database.uri}: {count} runs and {models} models were added or continued")
    return 0


def _update_until_end(database: RunDatabase, server: subprocess.Popen[bytes]) -> None:
    """Send new rows and models of all runs to the MLflow database until the server ends."""
    while server.poll() is None:
        for _ in database.add_models():
            database.update()  # before the next model, so that curves of running runs do not wait
        time.sleep(UPDATE_INTERVAL_S)
        database.update()


def _print(text: str) -> None:
    print(text, flush=True)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return not probe.connect_ex((HOST, port))


def _start_server(uri: str, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri]
    # Switch off MLflow's jobs, which are for language models.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return subprocess.Popen(
        [*command, "--host", HOST, "--port", str(port), "--workers", "1"],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _wait_for_server(server: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    """Wait until the server answers; raise `RefusedError` if it ends or needs too long.

    log: the file with the server's output, for the error.
    port: the port at which the server answers.
    """
    _print("starting MLflow")
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        if _is_listening(port):
            return
        time.sleep(POLL_INTERVAL_S)
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else "it printed nothing"
    raise RefusedError(
        f"--port {port}: MLflow's server did not start ({reason}). Correct the cause, or give "
        "another port."
    )


def _open_page(address: str, opens_browser: bool) -> None:
    _print(f"the charts of the runs are at {address}")
    if opens_browser:
        webbrowser.open(address)
