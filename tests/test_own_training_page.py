"""Test that the programs of docs/own_training.md work.

The programs are unchanged, but their runs have fewer rounds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from shorter_programs import shorten

PAGE = Path(__file__).parent.parent / "docs" / "own_training.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
NAMES = [re.findall(r'out="runs/(\w+)"', program)[0] for program in PROGRAMS]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_program_on_the_page_own_training_md_succeeds(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shorter = shorten(program)
    exec(shorter, names)
    assert names["result"].summary["failures"] == 0
    assert f"rounds={names['result'].summary['rounds']} " in shorter
