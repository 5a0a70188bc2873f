"""Test the study of schedules: its configurations are valid, and its page shows stored results."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from raysim.experiment.compose import compose

SCRIPT = Path(__file__).parents[2] / "jobs" / "asynchrony_study.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("asynchrony_study", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # composes every run of the study
def test_asynchrony_study_compares_runs_with_equal_numbers_of_updates(study: ModuleType) -> None:
    for algorithm, local in product(study.ALGORITHMS, study.LOCAL):
        config = compose(study.words(algorithm, local, seed=1))
        assert config.seed == 1 and config.rounds * study.ALGORITHMS[algorithm][3] == study.RESULTS
        assert ("fedbr" in config.method) == (local == "FedBR")


def test_asynchrony_page_shows_the_stored_runs(study: ModuleType) -> None:
    store = json.loads(study.STORE.read_text())
    assert study.PAGE.read_text() == study.page_text(store)
    for runs in store.values():
        assert set(runs) == set(study.ALGORITHMS)
        for run in (run for by_seed in runs.values() for run in by_seed.values()):
            assert (
                re.fullmatch("[0-9a-f]{64}", run["model_sha256"])
                and run["curve"][-1][0] <= run["seconds"] + 0.005
            )


def test_mean_is_shown_with_the_number_of_runs_that_have_a_value(study: ModuleType) -> None:
    assert study.mean([None, None], "{:.0f}") == "never"
    assert study.mean([1.0, None, 3.0], "{:.0f}") == "2 ± 1 (2 of 3)"
    assert study.mean([2.0], "{:.1f}") == "2.0"
