"""The stored studies of the papers: each line of jobs/studies.sh is one that `raysim study` can plan."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from raysim.commands.study.plan import plan
from raysim.experiment.compose import conf_folder

SCRIPT = conf_folder().parent / "jobs" / "studies.sh"


def started(folder: Path, *names: str) -> list[list[str]]:
    """The words of each `raysim` that the script starts; a stand-in on the path writes them down."""
    program, said = folder / "raysim", folder / "said"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >> said\necho >> said\n')
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", str(SCRIPT), *names], cwd=folder, env={**os.environ, "PATH": path}, check=True)
    text = said.read_text() if said.is_file() else ""
    return [block.splitlines() for block in text.split("\n\n") if block]


@pytest.mark.slow
def test_every_stored_study_can_be_planned_and_names_its_seeds(tmp_path: Path) -> None:
    names = ["rotated_mnist", "small", "fedbss", "fraug", "fedld", "combinations"]
    for name in names:
        started(tmp_path, name)
    studies = started(tmp_path)  # what they have written down
    assert len(studies) == 22
    for words in studies:
        assert words[0] == "study" and words[2] == "resume=latest"
        seeds = [word for word in words if word.startswith("seed=")]
        one = [word for word in words[1:] if word not in seeds and not word.startswith(("out=", "resume="))]
        cells = plan([*one, f"out={tmp_path / 'new'}"]).cells
        assert len(seeds) == 1 and cells, words


@pytest.mark.slow
def test_without_a_name_the_script_starts_nothing(tmp_path: Path) -> None:
    assert started(tmp_path) == []
