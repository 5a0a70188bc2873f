"""Test the mutation tool: its verdict on a mutant, its equivalent mutants, and its labels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mutants import equivalents
from mutations import Places

TOOL = Path(__file__).parent / "mutants.py"


@pytest.mark.slow
def test_mutation_tool_finds_the_test_that_kills_a_mutant(tmp_path: Path) -> None:
    words = [
        "--ids",
        "0",
        "--jobs",
        "1",
        "--only",
        "raysim/methods/moon.py",
        "--tests",
        "tests/methods/test_moon.py",
        "--warm",
        "torch",
    ]
    command = [sys.executable, str(TOOL), *words, "--out", str(tmp_path / "mutants.json")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads((tmp_path / "mutants.json").read_text())["mutants"]
    assert [one["verdict"] for one in found] == ["killed"]
    assert found[0]["by"].startswith("tests/methods/test_moon.py::")


def test_each_mutant_listed_as_equivalent_exists_in_the_code() -> None:
    labels: dict[str, set[str]] = {}
    for entry in equivalents():
        file = entry["file"]
        if file not in labels:
            source = (TOOL.parents[2] / file).read_bytes()
            labels[file] = {mutant.label for mutant in Places(file, source).found}
        assert entry["change"] in labels[file]
        assert entry["reason"]


def test_mutant_label_contains_the_function_and_the_change() -> None:
    source = b"LIMIT = 3\n\n\nclass Box:\n    def size(self, n):\n        return n + n + LIMIT\n"
    labels = {mutant.label for mutant in Places("box.py", source).found}
    assert labels == {"LIMIT: 3 -> 4", "Box.size: + -> -", "Box.size: + -> - (2)"}
