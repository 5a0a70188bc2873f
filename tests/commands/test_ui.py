"""`raysim ui`: which server is started, and where its page opens."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from raysim.commands import ui
from raysim.primitives.errors import Refused
from raysim.results.tracking import Tracker, default_uri

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root") / "runs"
    (root / "a").mkdir(parents=True)
    tracker = Tracker(root / "a", default_uri(root), say=lambda _: None, patience=600.0)
    tracker.start({}, {})
    tracker.finish({})
    return root


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind((ui.HOST, 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
def test_mlflow_is_served_and_opened_on_the_charts_until_it_is_ended(runs: Path, port: int) -> None:
    words = [sys.executable, "-m", "raysim", "ui", "--no-browser", "--port", str(port)]
    with subprocess.Popen(words, cwd=runs.parent, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        said = [command.stdout.readline() for _ in range(3)]
        found = re.fullmatch(
            rf"charts: (http://127.0.0.1:{port}/)#/experiments/1/runs\?workflowType=machine_.*\n",
            said[1],
        )
        assert found, said
        assert "MLflow" in urllib.request.urlopen(found[1]).read().decode()
        command.send_signal(signal.SIGTERM)
        assert command.wait(60) == 0
    with socket.socket() as gone:
        assert gone.connect_ex((ui.HOST, port))


def test_a_run_its_root_and_a_study_have_one_database(runs: Path) -> None:
    assert (
        ui._database(str(runs))
        == ui._database(str(runs / "a"))
        == ui._database(str(runs.parent))
        == runs / "mlflow.db"
    )


def test_what_cannot_be_shown_is_one_sentence(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has no mlflow\.db: name the folder"):
        ui.charts(str(tmp_path), 5000, False)
    with socket.socket() as taken:
        taken.bind((ui.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"--port {port} is taken"):
            ui.charts(str(runs), port, False)
        with pytest.raises(Refused, match="gives no answer"):
            ui.charts(f"http://127.0.0.1:{port + 1 if port < 65535 else 1}", 5000, False)
