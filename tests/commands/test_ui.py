"""Test which server `raysim ui` starts, and where its page opens."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from raysim.commands.ui import server as ui
from raysim.commands.ui.database import find_root
from raysim.primitives.errors import RefusedError
from raysim.results.tracking import StoredTracker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root") / "runs"
    (root / "a").mkdir(parents=True)
    tracker = StoredTracker(root / "a")
    tracker.start({}, {})
    tracker.finish({})
    return root


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((ui.HOST, 0))
        return int(probe.getsockname()[1])


def test_ui_starts_a_server_and_opens_the_charts(runs: Path, port: int) -> None:
    words = [sys.executable, "-m", "raysim", "ui", "--no-browser", "--port", str(port)]
    with subprocess.Popen(words, cwd=runs.parent, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        lines = [command.stdout.readline() for _ in range(3)]
        server = f"http://127.0.0.1:{port}/"
        charts = r"#/experiments/1/runs\?workflowType=machine_.*orderByKey=tags.*\n"
        match = re.fullmatch(f"the charts of the runs are at ({server}){charts}", lines[1])
        assert match, lines
        assert "MLflow" in urllib.request.urlopen(match[1]).read().decode()
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 0
    with socket.socket() as probe:
        assert probe.connect_ex((ui.HOST, port)), "the server has ended"


def test_ui_finds_the_same_mlflow_database_for_a_run_and_its_parent_folders(runs: Path) -> None:
    for folder in (runs, runs / "a", runs.parent):
        assert find_root(str(folder)) == runs


def test_ui_refuses_an_empty_folder_or_a_used_port_or_an_unreachable_server(
    runs: Path, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match=f"^{tmp_path} "):
        ui.show_charts(str(tmp_path), 5000, False)
    with socket.socket() as listener:
        listener.bind((ui.HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RefusedError, match=f"--port {port} "):
            ui.show_charts(str(runs), port, False)
        other = port + 1 if port < 65535 else 1
        with pytest.raises(RefusedError, match=f"http://127.0.0.1:{other}"):
            ui.show_charts(f"http://127.0.0.1:{other}", 5000, False)
