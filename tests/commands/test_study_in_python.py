"""Test `raysim.study`, a study from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import raysim

OVERRIDES = (
    "method=fedavg,fedprox seed=0..2 rounds=1 data=synthetic model=mlp partition.clients=3 "
    "schedule.cohort=2 runtime=inprocess tracking=none"
)


def test_study_returns_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = raysim.study(f"{OVERRIDES} out={tmp_path / 'study'}", quiet=True)
    assert result.folder == tmp_path / "study" and not result.failures
    assert sorted(result.runs["seed"].unique()) == [0, 1, 2] and len(result.runs) == 6
    assert len(result.differences) > 0
    assert raysim.load(result.folder / "runs" / "fedprox_seed-1").summary["rounds"] == 1
    assert capsys.readouterr().out == ""


def test_study_with_a_single_method_has_an_empty_table_of_differences(tmp_path: Path) -> None:
    overrides = OVERRIDES.replace("method=fedavg,fedprox seed=0..2", "method=fedavg seed=0..1")
    result = raysim.study(f"{overrides} out={tmp_path / 'study'}", quiet=True)
    assert len(result.runs) == 2 and result.differences.empty


def test_study_refuses_a_wrong_key(tmp_path: Path) -> None:
    with pytest.raises(raysim.RefusedError, match=r"local\.lr"):
        raysim.study(f"{OVERRIDES} locl.lr=1 out={tmp_path / 'study'}")
