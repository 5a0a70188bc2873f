"""The command that changes the source still finds tests that notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent / "mutants.py"


@pytest.mark.slow
def test_a_changed_method_is_noticed_by_its_tests(tmp_path: Path) -> None:
    words = ["--count", "3", "--only", "raysim/methods/moon.py", "--tests", "tests/methods/test_moon.py"]
    command = [sys.executable, str(TOOL), *words, "--out", str(tmp_path / "mutants.json")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "mutants.json").read_text())["mutants"]
    assert len(found) >= 3 and {one["verdict"] for one in found} == {"killed"}
    assert all(one["by"].startswith("tests/methods/test_moon.py::") for one in found)
