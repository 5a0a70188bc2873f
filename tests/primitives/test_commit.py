"""Test that a run's summary and MLflow have the Git commit of the code that started the run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysim.primitives.commit import SOURCE, source_commit
from raysim.results.tracking import source_tags


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    source_commit.cache_clear()
    yield
    source_commit.cache_clear()


def git(*words: str) -> str:
    named = ("git", "-c", "user.name=a", "-c", "user.email=a@b", *words)
    return subprocess.run(named, capture_output=True, text=True, check=True).stdout.strip()


def test_git_commit_of_a_submitted_run_comes_from_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SOURCE, '{"commit": "abc", "dirty": "true"}')
    assert source_commit() == {"commit": "abc", "dirty": "true"}


def test_mlflow_tags_contain_git_commit_and_mark_uncommitted_changes() -> None:
    git("init", "-q")
    Path("a.py").write_text("1\n")
    git("add", "a.py")
    git("commit", "-q", "-m", "a")
    commit = git("rev-parse", "HEAD")
    assert len(commit) == 40
    assert source_commit() == {"commit": commit, "dirty": "false"}
    assert {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.dirty": "false",
    }.items() <= source_tags().items()
    Path("a.py").write_text("2\n")
    source_commit.cache_clear()
    assert source_tags()["mlflow.source.git.dirty"] == "true"


def test_folder_outside_git_has_no_commit() -> None:
    assert source_commit() == {}
    assert not any("git" in key for key in source_tags())
