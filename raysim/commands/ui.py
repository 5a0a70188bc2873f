"""`raysim ui`: MLflow's server for what runs have sent there, and its page where it shows their charts.

MLflow 3 opens an experiment on the traces of language models, whatever its tags say; only the address says otherwise.
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

from raysim.primitives.errors import Refused
from raysim.primitives.files import user_path
from raysim.results.tracking import MLFLOW_ENVIRONMENT, find_experiment_id

HOST = "127.0.0.1"
CHARTS = "#/experiments/{}/runs?workflowType=machine_learning&compareRunsMode=CHART"
PLACES = ("mlflow.db", "runs/mlflow.db", "../mlflow.db")  # below a root of runs, a study, a run
PATIENCE = 600.0  # seconds that a server has to start: one that fails ends at once


def charts(place: str, port: int, browser: bool) -> int:
    """Serve what MLflow has of the runs in a folder until Ctrl-C, or open the page of the server at an address.

    Raises Refused where there is nothing to be shown.
    """
    os.environ.update({**MLFLOW_ENVIRONMENT, **os.environ})
    if place.startswith(("http://", "https://")):
        _open(f"{place.rstrip('/')}/{CHARTS.format(find_experiment_id(place))}", browser)
        return 0
    uri = f"sqlite:///{_database(place)}"
    experiment = find_experiment_id(uri)
    with socket.socket() as probe:
        if not probe.connect_ex((HOST, port)):
            raise Refused(f"--port {port} is taken by another program: name another one")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background commands ignore the first
        signal.signal(number, signal.default_int_handler)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", HOST]
    quiet = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }  # jobs are for language models
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            [*command, "--port", str(port), "--workers", "1"],
            env=quiet,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait(server, port, log)
            _open(f"http://{HOST}:{port}/{CHARTS.format(experiment)}", browser)
            print("Ctrl-C ends it", flush=True)
            server.wait()
        except KeyboardInterrupt:
            print()
        finally:
            with suppress(ProcessLookupError):  # its workers, too
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()
    return 0


def _database(place: str) -> Path:
    """The file that runs in or around a folder have written to."""
    folder = user_path(place)
    found = [path for name in PLACES if (path := folder / name).is_file()]
    if not found:
        raise Refused(
            f"{place} has no mlflow.db: name the folder that runs are in; they write it unless tracking=none, or "
            "tracking.uri names a server, whose address is taken here too"
        )
    return found[0].resolve()


def _wait(server: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    """Until the server answers. Raises Refused where it ends instead."""
    print("MLflow starts", flush=True)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        with socket.socket() as probe:
            if not probe.connect_ex((HOST, port)):
                return
        time.sleep(0.2)
    log.seek(0)
    said = log.read().decode(errors="replace").strip().splitlines()
    raise Refused(
        f"MLflow's server did not start on --port {port}: {said[-1] if said else 'it said nothing'}"
    )


def _open(address: str, browser: bool) -> None:
    print(f"charts: {address}", flush=True)
    if browser:
        webbrowser.open(address)
