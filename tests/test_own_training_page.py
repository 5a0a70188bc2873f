"""Test that the programs of docs/own_training.md run unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "own_training.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
NAMES = [re.findall(r'out="runs/(\w+)"', program)[0] for program in PROGRAMS]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_program_of_own_training_page_runs(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)
    assert names["result"].summary["failures"] == 0
    assert names["result"].summary["rounds"] in (5, 20, 30)
