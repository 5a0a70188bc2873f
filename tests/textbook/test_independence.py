"""Test that a textbook uses nothing of the code that it is compared with."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HARNESS = ("check.py", "__init__.py")
BOOKS = sorted(
    path
    for path in Path(__file__).parent.glob("*.py")
    if path.name not in HARNESS and not path.name.startswith("test_")
)
MAY = ("raysim.primitives.streams",)  # to repeat a named random draw


@pytest.mark.parametrize("path", BOOKS, ids=[path.stem for path in BOOKS])
def test_textbook_imports_only_raysims_random_streams(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    assert not {name for name in imported if name.partition(".")[0] == "raysim" and name not in MAY}
