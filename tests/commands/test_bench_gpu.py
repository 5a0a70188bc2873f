"""The command for a GPU, tried on the CPU with tiny sizes, where neither Ray nor Hydra nor MLflow can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import FOLDERS

from raysim import cli
from raysim.commands.bench import gpu
from raysim.commands.bench.gpu_page import PAGE, write_page

WITHOUT = """
import sys
for name in ("ray", "hydra", "omegaconf", "mlflow"):
    sys.modules[name] = None
from raysim.cli import main
main(sys.argv[1:])
"""


@pytest.mark.pictures
@pytest.mark.slow
def test_the_command_measures_and_writes_a_page_without_ray_or_hydra(tmp_path: Path) -> None:
    words = ["bench", "gpu", "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words, "--parts", "correctness,bits,G1,profile"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(cli.__file__).parents[1]), FOLDERS]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, page = json.loads((tmp_path / gpu.RESULTS).read_text()), (tmp_path / PAGE).read_text()
    assert not [
        row for part in ("correctness", "bits", "G1") for row in found[part] if "refused" in row
    ]
    assert all(row["distance"] <= row["allowed"] for row in found["correctness"])
    assert all(row["again"] and row["two workers"] for row in found["bits"])
    assert {"plain loop", "loop", "graph", "FedBR, loop"} <= {row["way"] for row in found["G1"]}
    for picture in ("correctness.png", "G1.png", *(row["picture"] for row in found["profile"])):
        assert f"({picture})" in page and (tmp_path / picture).stat().st_size > 5000
    assert cli.call([*words, "--parts", "memory"]) == 0
    later = json.loads((tmp_path / gpu.RESULTS).read_text())
    assert later["G1"] == found["G1"] and {row["workload"] for row in later["memory"]} == {
        "G1",
        "G2",
        "G3",
        "G4",
    }


def test_the_page_that_is_kept_is_made_of_the_results_beside_it(tmp_path: Path) -> None:
    kept = Path(__file__).parents[2] / "docs/gpu"
    write_page(json.loads((kept / gpu.RESULTS).read_text()), tmp_path)
    assert (tmp_path / PAGE).read_text() == (kept / PAGE).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in kept.iterdir()} - {
        gpu.RESULTS
    }


def test_every_method_is_checked() -> None:
    assert {"fedbr", "fraug", "scaffold", "fedld_principal", "krum"} <= gpu.every_method().keys()
    assert len(gpu.every_method()) > 45


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fraug", "fedbr", "fedmix", "local", "vhl"])
def test_methods_are_the_same_in_every_way_on_a_network_with_convolutions(name: str) -> None:
    rows = gpu.correctness(gpu.Options(device="cpu", methods=(name,)), lambda: True)
    assert [row["way"] for row in rows] == [way.name for way in gpu.CHECKED for _ in range(2)]
    assert not [row for row in rows if "refused" in row]
    assert [row["distance"] <= row["allowed"] for row in rows] == 6 * [True]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--parts", "G9"], "--parts G9 does not exist: use correctness"),
        ([], "--device cuda needs a GPU"),
    ],
)
def test_what_cannot_be_measured_is_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if not words and gpu.torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", "gpu", "--out", str(tmp_path / "page"), *words])
    assert told in capsys.readouterr().err and not (tmp_path / "page").exists()
