"""Test which server `raysim ui` starts, and where its page opens."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import socket
import sys
import urllib.request
from pathlib import Path

import pytest

from raysim import cli
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


def call_raysim(words: list[str], output: int) -> None:
    """Execute a command of raysim, and end this process with the command's exit status.

    output: the file descriptor that gets what the command prints.
    """
    with open(output, "w") as stream, contextlib.redirect_stdout(stream):
        status = cli.call(words)
    sys.exit(status)


def test_ui_starts_a_server_and_opens_the_charts(
    runs: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.tracking  # noqa: F401 (the new process has the modules that this one has imported)

    monkeypatch.chdir(runs.parent)
    reader, writer = os.pipe()
    words = ["ui", "--no-browser", "--port", str(port)]
    fork = multiprocessing.get_context("fork")
    command = fork.Process(target=call_raysim, args=(words, writer))
    command.start()
    os.close(writer)
    with open(reader) as output:
        try:
            lines = [output.readline() for _ in range(3)]
            server = f"http://127.0.0.1:{port}/"
            charts = r"#/experiments/1/runs\?workflowType=machine_.*orderByKey=tags.*\n"
            match = re.fullmatch(f"the charts of the runs are at ({server}){charts}", lines[1])
            assert match, lines
            assert "MLflow" in urllib.request.urlopen(match[1]).read().decode()
        finally:
            command.terminate()
            command.join(60)
    assert command.exitcode == 0
    with socket.socket() as probe:
        assert probe.connect_ex((ui.HOST, port)), "the server has ended"


def test_ui_finds_the_same_mlflow_database_for_a_run_and_its_parent_folders(runs: Path) -> None:
    for folder in (runs, runs / "a", runs.parent):
        assert find_root(str(folder)) == runs


def test_ui_refuses_an_empty_folder_or_a_used_port_or_an_unreachable_server(
    runs: Path, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match=f"^{tmp_path}: this folder contains no runs"):
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
