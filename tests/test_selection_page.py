"""Test that the program of docs/selection.md runs unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raysim.experiment.groups import find_groups

PAGE = (Path(__file__).parent.parent / "docs" / "selection.md").read_text()


def test_python_program_on_the_selection_page_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)
    result = names["result"]
    assert result.summary["rounds"] == 6 and result.summary["failures"] == 0


def test_selection_page_lists_every_option() -> None:
    for name in find_groups().files["selection"]:
        assert f"| `selection={name}` |" in PAGE
