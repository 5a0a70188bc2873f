"""Test `raysim bench gpu` on the CPU with tiny sizes, without Ray and Hydra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import FOLDERS

from raysim import cli
from raysim.commands.bench import gpu
from raysim.commands.bench.gpu_page import PAGE, write_page
from raysim.models import Mlp
from raysim.simulation.coordinator import Coordinator

WITHOUT_LIBRARIES = """
import sys
for name in ("ray", "hydra", "omegaconf", "mlflow"):
    sys.modules[name] = None
from raysim.cli import main
main(sys.argv[1:])
"""


@pytest.mark.pictures
@pytest.mark.slow
def test_bench_gpu_writes_a_page_if_ray_and_hydra_are_not_installed(tmp_path: Path) -> None:
    words = ["bench", "gpu", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    path = os.pathsep.join([str(Path(cli.__file__).parents[1]), FOLDERS])
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, *words, "--parts", "correctness,bits,profile"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    results = json.loads((tmp_path / gpu.RESULTS).read_text())
    assert all(row["distance"] <= row["allowed"] for row in results["correctness"])
    assert all(row["again"] and row["two workers"] for row in results["bits"])

    assert cli.call([*words, "--parts", "G1,memory"]) == 0
    later = json.loads((tmp_path / gpu.RESULTS).read_text())
    assert later["bits"] == results["bits"]
    assert {"plain loop", "loop", "graph", "FedBR, loop"} <= {row["way"] for row in later["G1"]}
    assert {row["workload"] for row in later["memory"]} == {"G1", "G2", "G3", "G4"}
    for part in ("correctness", "bits", "G1"):
        assert not [row for row in later[part] if "refused" in row]
    page = (tmp_path / PAGE).read_text()
    profiles = [row["picture"] for row in results["profile"]]
    for picture in ("correctness.png", "G1.png", *profiles):
        assert f"({picture})" in page and (tmp_path / picture).stat().st_size > 5000


@pytest.mark.parametrize("folder", ["gpu", "gpu_h200"])
def test_page_of_gpu_speeds_shows_the_stored_results(folder: str, tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "docs" / folder
    write_page(json.loads((stored / gpu.RESULTS).read_text()), tmp_path)
    assert (tmp_path / PAGE).read_text() == (stored / PAGE).read_text()
    names = {path.name for path in stored.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == names - {gpu.RESULTS}


def test_gpu_check_lists_all_methods_of_raysim() -> None:
    names = gpu.every_method().keys()
    assert {"fedbr", "fraug", "scaffold", "fedld_principal", "krum"} <= names
    assert len(names) > 45


def test_bench_gpu_trains_equally_many_rounds_with_raysim_and_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = gpu.GpuWorkload(
        title="tiny",
        model=Mlp((4,)),
        shape=(1, 4, 4),
        clients=4,
        samples=8,
        cohort=2,
        batch=4,
        lr=0.1,
        least=1.0,
    )
    spec = gpu._spec_of(workload, gpu._data_of(workload), "cpu")
    coordinators: list[Coordinator] = []
    make = gpu._coordinator

    def make_and_keep(*arguments: Any) -> Coordinator:
        coordinators.append(make(*arguments))
        return coordinators[-1]

    monkeypatch.setattr(gpu, "_coordinator", make_and_keep)
    row = gpu.raysim_rate(spec, workload, seconds=0.0)
    plain = gpu.plain_rate(spec, workload, seconds=0.0)
    assert row["rounds"] == plain["rounds"] == coordinators[0].replicas.version


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fraug", "fedmix"])
def test_results_of_convolutional_models_are_close_in_all_execution_modes(name: str) -> None:
    options = gpu.GpuOptions(device="cpu", methods=(name,))
    rows = gpu.measure_correctness(options, lambda: True)
    assert [row["way"] for row in rows] == [mode.name for mode in gpu.CHECKED_MODES for _ in (0, 1)]
    assert not [row for row in rows if "refused" in row]
    assert [row["distance"] <= row["allowed"] for row in rows] == 6 * [True]


def test_bench_gpu_refuses_a_folder_with_results_of_another_device(tmp_path: Path) -> None:
    options = gpu.GpuOptions(device="cpu", parts=())
    results = gpu.main(tmp_path, options)
    assert results["about"]["device"] == "cpu"
    results["about"]["device"] = "NVIDIA H100"
    (tmp_path / gpu.RESULTS).write_text(json.dumps(results))
    with pytest.raises(ValueError, match=r"results of NVIDIA H100 with .* this device is cpu"):
        gpu.main(tmp_path, options)


@pytest.mark.parametrize(
    ("words", "part"),
    [(["--parts", "G9"], "--parts G9"), ([], "--device cuda")],
)
def test_bench_gpu_refuses_wrong_arguments(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if not words and gpu.torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "gpu", "--out", str(tmp_path / "page"), *words])
    assert part in capsys.readouterr().err
    assert not (tmp_path / "page").exists()
