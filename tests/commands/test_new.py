"""`raysim new`: what it writes passes its own tests, and its words run in process and on Ray; see `test_submit` too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raysim
from raysim import cli
from raysim.commands.new.package import NAME, TEMPLATE, next_steps

GROUPS = ("method", "model", "data", "partition", "schedule", "fleet", "observer")
WORDS = [*(f"{group}=mine" for group in GROUPS), "tracking=none", "rounds=3"]


@pytest.fixture
def mine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Path]:
    """A package that was just written, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.call(["new", "mine"]) == 0
    assert "cd mine && python -m pytest" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "mine")
    yield tmp_path / "mine"
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def test_the_name_is_everywhere_and_nothing_else_is_changed(mine: Path) -> None:
    written = {
        str(path.relative_to(mine)): path.read_text() for path in mine.rglob("*") if path.is_file()
    }
    template = {
        str(path.relative_to(TEMPLATE)).replace(NAME, "mine"): path.read_text().replace(
            NAME, "mine"
        )
        for path in TEMPLATE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert written == template
    assert {f"mine/conf/{group}/mine.yaml" for group in GROUPS} < written.keys()
    assert not [name for name, text in written.items() if NAME in name or NAME in text]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("My-Parts", "a package is called by small letters, digits and _"),
        ("class", "a package is called by small letters"),
        ("json", "Python has a package of this name already"),
        ("raysim", "Python has a package of this name already"),
        ("there", "exists already: choose another name"),
    ],
)
def test_a_name_that_cannot_be_is_one_sentence(
    name: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    assert cli.call(["new", name]) == 2
    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("words", [["run"], ["submit", "--with", "mine", "run"]])
def test_who_is_one_folder_too_high_is_told_where_the_package_is(
    words: list[str],
    mine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(mine.parent)
    assert cli.call([*words, "--allow", "mine", "method=mine", "out=/nowhere/run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("raysim: allow=mine")
    assert f"{mine}/mine" in error


def test_its_words_run_in_process_and_go_on(mine: Path) -> None:
    assert (
        cli.call(["run", "--quiet", "--allow", "mine", *WORDS, "runtime=inprocess", "out=run"]) == 0
    )
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["methods"] == ["mine"] and summary["choices"]["observer"] == ["mine"]
    assert Path("run/best.txt").read_text().startswith("round ")
    assert (
        cli.call(["run", "--quiet", "--allow", "mine", "out=run", "resume=latest", "rounds=4"]) == 0
    )


def test_the_command_that_it_prints_learns_before_ones_eyes(mine: Path) -> None:
    printed = next(line for line in next_steps(mine).splitlines() if "raysim run" in line)
    words = printed[: printed.index("rounds=10") + len("rounds=10")].split()[1:]
    assert cli.call([*words, "runtime=inprocess", "tracking=none", "out=run"]) == 0
    scores = [row["accuracy_global"] for row in raysim.load("run", allow=["mine"]).rows]
    assert min(scores) < 0.7 < max(scores)
    assert json.loads(Path("run/summary.json").read_text())["accuracy_worst"] > 0.4


@pytest.mark.slow
def test_its_words_run_on_ray_to_the_same_bits(mine: Path) -> None:
    assert (
        cli.call(["run", "--quiet", "--allow", "mine", *WORDS, "runtime=inprocess", "out=one"]) == 0
    )
    program = [
        sys.executable,
        "-m",
        "raysim",
        "run",
        "--allow",
        "mine",
        *WORDS,
        "runtime.workers=2",
        "out=two",
    ]
    ran = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    one, two = (json.loads(Path(out, "summary.json").read_text()) for out in ("one", "two"))
    assert (one["model_sha256"], one["state_sha256"]) == (two["model_sha256"], two["state_sha256"])


@pytest.mark.slow
def test_its_own_tests_pass_without_installing_it(mine: Path) -> None:
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(program, cwd=mine, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
