"""Test that the programs of docs/own_training.md work.

The programs are unchanged, but runs with many rounds are made shorter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "own_training.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
# The program with pseudo-labels behaves differently after ten rounds, the others in no later round.
MAX_ROUNDS = 12
NAMES = [re.findall(r'out="runs/(\w+)"', program)[0] for program in PROGRAMS]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
def test_program_on_the_page_own_training_md_succeeds(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    shorter = re.sub(
        r"\brounds=(\d+)", lambda match: f"rounds={min(int(match[1]), MAX_ROUNDS)}", program
    )
    exec(shorter, names)
    assert names["result"].summary["failures"] == 0
    assert names["result"].summary["rounds"] in (5, MAX_ROUNDS)
