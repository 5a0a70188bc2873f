"""Test that a package from `raysim new` passes its own tests, and that its options can be used.

The runs of these tests are in this process. `test_submit.py` also uses such a package in a run on a
cluster.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raysim
from raysim import cli
from raysim.commands.new.package import NAME, TEMPLATE, next_steps

GROUPS = (
    "method", "model", "data", "partition", "schedule", "selection", "topology", "fleet",
    "compression", "observer",
)  # fmt: skip
OPTIONS = (*GROUPS, "learner")  # the learner takes the place of method and model
OVERRIDES = [*(f"{group}=mine" for group in GROUPS), "tracking=none", "rounds=3"]
RUN = ["run", "--quiet", "--allow", "mine"]


@pytest.fixture
def mine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Path]:
    """Make the package `mine` with `raysim new`, change into its folder, and yield its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.call(["new", "mine"]) == 0
    assert "cd mine && python -m pytest" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "mine")
    yield tmp_path / "mine"
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def files_below(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_new_package_equals_the_template_except_for_the_package_name(mine: Path) -> None:
    written = files_below(mine)
    expected = {}
    for name, text in files_below(TEMPLATE).items():
        expected[name.replace(NAME, "mine")] = text.replace(NAME, "mine")
    assert written == expected
    assert {f"mine/conf/{group}/mine.yaml" for group in OPTIONS} < written.keys()
    assert not [name for name, text in written.items() if NAME in name or NAME in text]


@pytest.mark.parametrize("name", ["My-Parts", "class", "json", "raysim", "there"])
def test_raysim_new_refuses_a_package_name_that_is_invalid_or_taken(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    assert cli.call(["new", name]) == 2
    assert capsys.readouterr().err.startswith(f"raysim: new {name}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("words", [["run"], ["submit", "--with", "mine", "run"]])
def test_error_suggests_the_package_folder_if_the_user_allows_the_project_folder(
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


def test_a_run_with_the_options_of_a_new_package_can_be_resumed(mine: Path) -> None:
    assert cli.call([*RUN, *OVERRIDES, "runtime=inprocess", "out=run"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["methods"] == ["mine", "mine_means"]
    assert summary["choices"]["observer"] == ["mine"]
    assert Path("run/best.txt").read_text().startswith("round ")
    assert cli.call([*RUN, "out=run", "resume=latest", "rounds=4"]) == 0


def scores_of_printed_command(option: str, folder: Path) -> list[float]:
    """Run a command that `raysim new` prints; return the accuracy of each round.

    option: an override, such as "method=mine". The first printed command that contains it runs.
    folder: the folder of the package.
    """
    lines = next_steps(folder).splitlines()
    line = next(line for line in lines if "raysim run" in line and option in line)
    end = line.index("rounds=10") + len("rounds=10")
    words = line[:end].split()[1:]
    assert cli.call([*words, "runtime=inprocess", "tracking=none", "out=run"]) == 0
    return [row["accuracy_global"] for row in raysim.load("run", allow=["mine"]).rows]


def test_printed_command_for_the_new_method_trains_a_model(mine: Path) -> None:
    scores = scores_of_printed_command("method=mine", mine)
    assert min(scores) < 0.7 < max(scores)
    assert json.loads(Path("run/summary.json").read_text())["accuracy_worst"] > 0.4


def test_printed_command_for_the_new_learner_trains_a_model(mine: Path) -> None:
    assert min(scores_of_printed_command("learner=mine", mine)) > 0.9


def run_tests(folder: Path, output: Path) -> None:
    """Run pytest in a folder as `python -m pytest` does, and end this process with its status.

    output: the file for what pytest prints.
    """
    sys.path.insert(0, str(folder))
    with output.open("w") as stream, contextlib.redirect_stdout(stream):
        status = pytest.main(["-q", "-p", "no:cacheprovider"])
    sys.exit(status)


@pytest.mark.slow
def test_tests_of_new_package_pass_without_installation(mine: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    # The new process has the modules that this one has imported.
    testing = multiprocessing.get_context("fork").Process(target=run_tests, args=(mine, output))
    testing.start()
    testing.join()
    printed = output.read_text()
    assert testing.exitcode == 0, printed
    assert " passed" in printed
