"""Test the stored studies of the papers.

Each line of jobs/studies.sh can be planned, and together they make all stored runs.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from jobs.papers import gpu, results
from jobs.papers.comparison import OPEN, is_equal
from jobs.papers.tables import PAPERS
from raysim.commands.study.plan import plan
from raysim.primitives.files import conf_folder
from raysim.results.stored_runs import flat_settings

SCRIPT = conf_folder().parent / "jobs" / "studies.sh"


def started(folder: Path, *names: str) -> list[list[str]]:
    """Run jobs/studies.sh; return the arguments of each `raysim` command that it starts.

    In place of `raysim`, the script starts a program that writes the arguments to a file in
    `folder`.
    names: the arguments of the script.
    """
    program, said = folder / "raysim", folder / "said"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >> said\necho >> said\n')
    program.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(SCRIPT), *names], cwd=folder, env={**os.environ, "PATH": path}, check=True
    )
    text = said.read_text() if said.is_file() else ""
    return [block.splitlines() for block in text.split("\n\n") if block]


def facts(config: Mapping[str, object]) -> dict[str, str]:
    """Return the values of a configuration that decide a run's results, as text by key.

    Values about where and how the run is computed are left out.
    """
    without = {
        key: value for key, value in config.items() if key not in (*results.PLACES, "choices")
    }
    return {
        key: value
        for key, value in flat_settings(without).items()
        if not key.endswith((".root", ".download"))
    }


def same(stored: Mapping[str, str], planned: Mapping[str, str]) -> bool:
    """Return whether a stored run and a planned run have equal settings.

    A key that only one run has is ignored, because stored runs may lack newer settings. If a key
    and its planned value are in `OPEN`, every stored value of the key counts as equal.
    """
    both = {(key, planned[key]): value for key, value in stored.items() if key in planned}
    return all(is_equal(value, now) or (key, now) in OPEN for (key, now), value in both.items())


@pytest.mark.slow
def test_study_commands_include_every_run_that_has_stored_results(tmp_path: Path) -> None:
    names = [
        "rotated_mnist",
        "small",
        "fedbss",
        "fraug",
        "digits",
        "fedld",
        "fedbr",
    ]
    for name in names:
        started(tmp_path, name)
    studies = started(tmp_path)  # what they have written down
    assert len(studies) == 41
    planned: dict[tuple[object, ...], list[dict[str, str]]] = {}
    for words in studies:
        assert words[0] == "study" and words[2] == "resume=latest"
        seeds = [word for word in words if word.startswith("seed=")]
        one = [
            word
            for word in words[1:]
            if word not in seeds and not word.startswith(("out=", "resume="))
        ]
        cells = plan([*one, *seeds, f"out={tmp_path / 'new'}"]).runs
        assert len(seeds) == 1 and cells, words
        for cell in cells:
            planned.setdefault((*sorted(cell.config["method"]), cell.seed), []).append(
                facts(cell.config)
            )
    for _, words in (run for study in gpu.STUDIES for run in study.runs()):
        (cell,) = plan([*words, f"out={tmp_path / 'new'}"]).runs
        planned.setdefault((*sorted(cell.config["method"]), cell.seed), []).append(
            facts(cell.config)
        )
    for run in (run for paper in PAPERS for run in results.stored_runs(paper)):
        kept, methods = facts(run.config), run.config["method"]
        assert isinstance(methods, Mapping)
        alike = planned.get((*sorted(methods), run.config["seed"]), [])
        assert any(same(kept, each) for each in alike), (
            f"neither a line of {SCRIPT} nor jobs.papers.gpu makes {run.summary['command']}"
        )


@pytest.mark.slow
def test_studies_script_without_a_name_starts_nothing(tmp_path: Path) -> None:
    assert started(tmp_path) == []
