"""Test the papers' GPU studies on the CPU with tiny sizes, without Ray and Hydra."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import raysim
from jobs.papers import gpu
from jobs.papers.gpu import STUDIES, GpuStudy
from jobs.papers.settings import SETTINGS
from raysim.primitives.errors import RefusedError
from raysim.primitives.files import conf_folder
from raysim.results.stored_runs import load_run

CHECKOUT = conf_folder().parent
TINY = ("data=digits", "model=mlp", "partition.clients=4", "schedule.cohort=4", "rounds=2")
STUDY = GpuStudy("tiny", TINY, (("method=fedavg",), ("method=fedprox", "method.fedprox.mu=0.5")))
WITHOUT_LIBRARIES = """
import runpy, sys
for name in ("ray", "hydra", "omegaconf", "mlflow"):
    sys.modules[name] = None
runpy.run_module("jobs.papers.gpu", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def tiny_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STUDIES", (STUDY,))


def test_gpu_study_lists_all_methods_of_a_seed_before_the_next_seed() -> None:
    names = [name for name, _ in GpuStudy("a", (), STUDY.methods, (0, 1)).runs()]
    assert names == ["a-fedavg-0", "a-fedprox-mu_0_5-0", "a-fedavg-1", "a-fedprox-mu_0_5-1"]


def test_gpu_study_is_bit_identical_to_single_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.prepare(tmp_path / "gpu", ["local.epochs=1"], [])
    # Without time, one round of the first run is made; then everything else.
    gpu.run(tmp_path / "gpu", [], "cpu", 1e-9)
    assert "tiny-fedavg-0" not in capsys.readouterr().out.rpartition("prepared")[2]
    gpu.run(tmp_path / "gpu", ["tiny"], "cpu", 10)
    for name, words in STUDY.runs():
        run = load_run(tmp_path / "gpu" / "runs" / name)
        run_overrides = [f"out={tmp_path / name}", "runtime=inprocess", "tracking=none"]
        usual = raysim.run([*words, "local.epochs=1", *run_overrides], quiet=True)
        for key in ("model_sha256", "state_sha256", "split", "accuracy_global"):
            assert run.summary[key] == usual.summary[key]
        assert run.config["method"] == load_run(usual.folder).config["method"]
        assert run.finished


def test_stopped_gpu_study_resumes_with_the_bits_of_an_unstopped_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CHECKPOINTS", gpu.Checkpoint(every=1, keep=1))
    for folder in ("straight", "stopped"):
        gpu.prepare(tmp_path / folder, ["local.epochs=1", "rounds=3"], [])
    gpu.run(tmp_path / "straight", [], "cpu", 10)
    # The clock is over after two rounds.
    times = iter([0.0, 0.0, 0.0, 0.0, 1e9])
    monkeypatch.setattr(gpu, "monotonic", lambda: next(times, 2e9))
    gpu.run(tmp_path / "stopped", [], "cpu", 1)
    runs = tmp_path / "stopped" / "runs"
    assert not list(runs.glob("*/summary.json")) and list(runs.glob("*/checkpoints/*"))
    monkeypatch.undo()
    monkeypatch.setattr(gpu, "STUDIES", (STUDY,))
    gpu.run(tmp_path / "stopped", [], "cpu", 10)
    for name, _ in STUDY.runs():
        one, other = (
            load_run(tmp_path / folder / "runs" / name) for folder in ("straight", "stopped")
        )
        assert one.summary["state_sha256"] == other.summary["state_sha256"]
        assert [row["round"] for row in one.rows] == [row["round"] for row in other.rows]


def test_gpu_studies_refuse_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"^tyni: .*tiny"):
        gpu.chosen_studies(["tyni"])
    with pytest.raises(RefusedError, match=r"tiny-fedavg-0: this run is not prepared"):
        gpu.run(tmp_path, [], "cpu", 1)


def test_gpu_studies_name_every_run_differently() -> None:
    names = [name for study in STUDIES for name, _ in study.runs()]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_gpu_studies_have_the_settings_of_the_papers() -> None:
    overrides = {frozenset(setting.overrides) for setting in SETTINGS}
    for study in STUDIES:
        assert any(frozenset(study.setting) >= known for known in overrides), study.name


@pytest.mark.slow
def test_gpu_studies_run_without_ray_and_hydra(tmp_path: Path) -> None:
    script = ["bash", str(CHECKOUT / "jobs" / "papers" / "gpu.sh"), "fedbss-skew_0.1"]
    tiny = "data=digits model=mlp rounds=1 local.epochs=1 partition.clients=4 schedule.cohort=2"
    variables = {"OUT": str(tmp_path), "DATA": "", "PYTHON": sys.executable}
    subprocess.run(
        script,
        cwd=CHECKOUT,
        env={**os.environ, **variables, "PREPARE": "only", "EXTRA": tiny},
        check=True,
    )
    ran = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT_LIBRARIES, "run", str(tmp_path)),
            *("--device", "cpu", "fedbss-skew_0.1"),
        ],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(list(tmp_path.glob("runs/*/summary.json"))) == 6
