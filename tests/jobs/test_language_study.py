"""Test the study of language models: its page, its learning rates and its stored numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import language_study as study
from raysim.experiment.compose import compose

PERPLEXITIES = {0.0001: 3.9, 0.0003: 3.7, 0.001: 4.1, 0.00003: 4.2}
DILOCO = "DiLoCo"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Return the results that the study has stored in a file.

    During the test, the study reads and writes a copy of this file.
    """
    monkeypatch.setattr(study, "STORE", tmp_path / "store.json")
    stored: dict[str, Any] = json.loads(study.PAGE.with_suffix(".json").read_text())
    study.STORE.write_text(json.dumps(stored))
    return stored


def finish(monkeypatch: pytest.MonkeyPatch, folder: Path, base_digest: str) -> None:
    """Write folders that look like finished runs, and let `study.measured` invent their numbers.

    No model is trained. There are runs of DiLoCo at several learning rates, and runs of
    `study.UNCHANGED`, which changes no weight. The perplexity of a run depends only on its learning
    rate.

    base_digest: the model_sha256 of all runs.
    """

    def measured(out: Path) -> dict[str, Any]:
        rate = out.name.partition("lr_")[2].rpartition("-")[0]
        perplexity = PERPLEXITIES[float(rate)] if rate else 4.3
        return {"perplexity": perplexity, "model_sha256": base_digest, "name": out.name}

    monkeypatch.setattr(study, "measured", measured)
    outs = [study.folder_of(folder, DILOCO, 0, rate) for rate in study.RATES[DILOCO]]
    outs += [study.folder_of(folder, DILOCO, seed, 0.0003) for seed in study.SEEDS]
    outs += [study.folder_of(folder, study.UNCHANGED, seed) for seed in study.SEEDS]
    for out in outs:
        out.mkdir(parents=True, exist_ok=True)
        (out / "summary.json").write_text("{}")


def test_configurations_of_the_language_study_are_valid() -> None:
    for method, overrides in study.METHODS.items():
        config = compose([*study.MODEL, *study.SETTING, *overrides, "data.root=texts"])
        assert config.model.width == 192, method
    assert set(study.RATES) < set(study.METHODS)


def test_language_page_shows_the_stored_runs() -> None:
    assert study.page_text(json.loads(study.STORE.read_text())) == study.PAGE.read_text()


def test_language_study_stores_only_runs_at_the_best_learning_rate(
    store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "SEEDS", range(1))
    finish(monkeypatch, tmp_path, store[study.UNCHANGED]["0"]["model_sha256"])
    assert (
        study.best_rate(tmp_path, DILOCO) == 0.0003 and study.best_rate(tmp_path, "FedIT") is None
    )
    study.collect(tmp_path)
    collected = json.loads(study.STORE.read_text())
    assert collected[DILOCO]["0"]["name"] == "diloco-lr_0.0003-0"
    assert collected["FedIT"]["0"] == store["FedIT"]["0"]
    sentence = study.describe_rates(collected)
    assert "that of DiLoCo (0.0003) the best one of 0.0001, 0.0003, 0.001" in sentence


def test_language_study_refuses_runs_that_start_from_another_base_model(
    store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "SEEDS", range(1))
    finish(monkeypatch, tmp_path, "another base")
    with pytest.raises(ValueError, match="has another base"):
        study.collect(tmp_path)
    assert json.loads(study.STORE.read_text()) == store


def test_language_study_refuses_unknown_method(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"only=DiLoko.*FedIT"):
        study.run_all(tmp_path, ["only=DiLoko"])


def test_language_study_continues_runs_that_were_stopped(
    store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    monkeypatch.setattr("raysim.run", lambda words, quiet: commands.append(words))
    monkeypatch.setattr(study, "SEEDS", range(1))
    finish(monkeypatch, tmp_path, "digest")
    stopped = [tmp_path / "base", study.folder_of(tmp_path, "FedIT", 0)]
    for out in stopped:
        out.mkdir()
    study.run_all(tmp_path, ["only=FedIT,FedAvg"])
    outs = [word for words in commands for word in words if word.startswith("out=")]
    assert outs == [f"out={out}" for out in (*stopped, study.folder_of(tmp_path, "FedAvg", 0))]
    assert ["resume=latest" in words for words in commands] == [True, True, False]


def test_language_study_collects_runs_of_all_methods_if_no_numbers_are_stored(
    store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study.STORE.unlink()
    monkeypatch.setattr(study, "SEEDS", range(1))
    monkeypatch.setattr(
        study, "METHODS", {name: study.METHODS[name] for name in (study.UNCHANGED, DILOCO)}
    )
    monkeypatch.setattr(study, "RATES", {DILOCO: study.RATES[DILOCO]})
    finish(monkeypatch, tmp_path, "digest")
    study.collect(tmp_path)
    assert json.loads(study.STORE.read_text())[DILOCO]["0"]["name"] == "diloco-lr_0.0003-0"
