"""Test the benchmark of checkpoints and client states."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.benchmarks import states


@pytest.mark.slow
def test_client_state_benchmark_measures_checkpoints_and_spilling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = 4 * 50_890  # the model of the workload W2 of `raysim bench`
    written = states.changed_states(20, 3, 2)
    assert (written.what, written.states) == (
        "3 of 20 clients",
        3 * size,
    ) and written.seconds > 0 < written.cpu
    run = states._train(200, 2, 0.0)
    assert (
        run.clients >= run.seen > states.COHORT
        and run.spilled == run.seen * size
        and run.seconds > 0 < run.cpu
    )
    assert list(tmp_path.iterdir()) == []
